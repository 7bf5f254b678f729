# SPDX-License-Identifier: Apache-2.0
"""An environment of `verifiers` with its own user and its own rewards: `pip install 'verifiers>=0.4'`.

Train on it with `verl_ext.gateway.command=[python,verifiers_env.py]`: the server and the key are in the environment,
the task is JSON on the standard input, and the last line of the output is the reward.
"""

import asyncio
import json
import os
import sys

import openai

try:
    import verifiers.v1 as vf
except ImportError as error:
    sys.exit(f"this agent needs verifiers 0.4: pip install 'verifiers>=0.4' ({error})")

__all__ = ["Chat"]  # verifiers looks for a harness by the name of its module


class Chat(vf.Harness[vf.HarnessConfig]):
    """One answer a turn, in this process: those of verifiers are programs, for which `uv` fetches packages."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **kwargs):
        messages = [one.model_dump(exclude_none=True) for one in data.prompt]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class Sum(vf.TaskData):
    answer: str


class SecondTry(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace):
        return float(self.data.answer in str(trace.branches[-1].messages[-1].content))


async def solve(task):
    """Whoever is wrong may answer once more."""
    agent = vf.Agent(
        vf.AgentConfig(
            model=os.environ["OPENAI_MODEL"],
            client=vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"),
            harness=vf.HarnessConfig(id="verifiers_env"),
            runtime=vf.SubprocessConfig(),
        )
    )
    data = Sum(prompt=None, answer=task["ground_truth"])
    async with agent, agent.interaction(SecondTry(data)) as user:
        said = await user.turn("\n\n".join(message["content"] for message in task["messages"]))
        if task["ground_truth"] not in said.last_reply:
            await user.turn("Wrong. Try again.")
    if user.trace.errors:
        sys.exit(str(user.trace.errors))
    return user.trace.reward


if __name__ == "__main__":
    print(json.dumps(asyncio.run(solve(json.load(sys.stdin)))))
