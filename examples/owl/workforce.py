# SPDX-License-Identifier: Apache-2.0
"""OWL's agents on the gateway: the Workforce of `camel-ai`, whose planner splits the task, whose coordinator gives the
parts to workers, and whose workers have a tool each.

A program that knows nothing of verl. `OPENAI_BASE_URL` and `OPENAI_API_KEY` name any OpenAI-compatible server, and
`OWL_TOOLS` that of the tools (tools.py). The task is JSON on the standard input; the last line of the output is its
result. Arguments are what the planner may do when a part fails: retry, replan, decompose, reassign. It then judges
every part.
"""

import asyncio
import json
import os
import re
import sys
from urllib.request import Request, urlopen

from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.societies.workforce import Workforce
from camel.tasks import Task
from camel.types import ModelPlatformType
from camel.utils import BaseTokenCounter


class FourLetters(BaseTokenCounter):
    """camel's own counter downloads the vocabulary of one of OpenAI's models; the gateway has the true numbers."""

    def count_tokens_from_messages(self, messages):
        return len(json.dumps(messages)) // 4

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode()


def agent(model, name=None, tools=()):
    """An agent of camel. The name of its model is the `agent_id` of its turns."""
    backend = ModelFactory.create(
        ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
        model,
        url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        token_counter=FourLetters(),
        timeout=1800,
        max_retries=0,
    )
    return ChatAgent(model=backend, agent_id=name, tools=list(tools))


def tool(name, argument):
    request = Request(f"{os.environ['OWL_TOOLS']}/{name}", argument.encode())
    with urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def calculator(expression: str) -> str:
    """Calculate.

    Args:
        expression (str): numbers and operators, such as 3 * (4 + 5).
    """
    return tool("calculator", expression)


def search(query: str) -> str:
    """Find passages about cities and countries.

    Args:
        query (str): a few words, such as population of Lima.
    """
    return tool("search", query)


def python(code: str) -> str:
    """Run a program.

    Args:
        code (str): Python that prints its result.
    """
    return tool("python", code)


async def solve(task, recovery):
    team = Workforce(
        "a team with tools",
        task_agent=agent("planner"),
        coordinator_agent=agent("coordinator"),
        # Made by the coordinator where it finds no worker for a part; camel's own would search the web.
        new_worker_agent=agent("worker", tools=[calculator, search, python]),
        graceful_shutdown_timeout=0,
        failure_handling_config={"enabled_strategies": recovery, "max_retries": 2, "halt_on_max_retries": False},
    )
    team.add_single_agent_worker("calculates", agent("worker", "calculator", [calculator]))
    team.add_single_agent_worker("looks up cities and countries", agent("worker", "search", [search]))
    team.add_single_agent_worker("writes and runs Python", agent("worker", "python", [python]))
    done = await team.process_task_async(Task(content=task["messages"][-1]["content"], id="0"))
    parts = done.subtasks
    answer = (parts[-1] if parts else done).result or ""
    numbers = re.findall(r"-?\d+", answer.replace(",", ""))
    right, planned = numbers[-1:] == [task["ground_truth"]], bool(parts)
    info = {"right": right, "planned": planned, "parts": len(parts), "finished": done.state == "DONE"}
    # A tenth for a plan that can be read: without it a model that has yet to write one has nothing to learn from.
    return {"reward": 1.0 if right else 0.1 * planned, "info": info}


print(json.dumps(asyncio.run(solve(json.load(sys.stdin), sys.argv[1:]))))
