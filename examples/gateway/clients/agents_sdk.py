# SPDX-License-Identifier: Apache-2.0
"""Two agents of the OpenAI Agents SDK, one handing over to the other: `pip install openai-agents`.

Train it with `verl_ext.gateway.command=[python,agents_sdk.py]`: the server and the key are in the environment, the
task is JSON on the standard input, and the last line of the output is the reward. The name of an agent's model is the
`agent_id` of its turns.
"""

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)  # which would send the trajectory to OpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


async def solve(task: dict) -> float:
    async with AsyncOpenAI() as client:
        worker = Agent(
            name="worker",
            instructions="Answer with a number.",
            tools=[add],
            model=OpenAIChatCompletionsModel("worker", client),
        )
        planner = Agent(
            name="planner",
            instructions="Hand the question over.",
            handoffs=[worker],
            model=OpenAIChatCompletionsModel("planner", client),
        )
        done = await Runner.run(planner, task["messages"][-1]["content"], max_turns=6)
    return float(task["ground_truth"] in str(done.final_output))


print(json.dumps(asyncio.run(solve(json.load(sys.stdin)))))
