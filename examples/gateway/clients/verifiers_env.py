# SPDX-License-Identifier: Apache-2.0
"""An environment of `verifiers`, with its own rollout and its own rubric: `pip install 'verifiers<0.4'`, since 0.4 has
neither `MultiTurnEnv` nor `Rubric` any more.

Train on it with `verl_ext.gateway.command=[python,verifiers_env.py]`: the server and the key are in the environment,
the task is JSON on the standard input, and the last line of the output is the reward.
"""

import asyncio
import json
import os
import sys

import verifiers as vf
from datasets import Dataset


class SecondTry(vf.MultiTurnEnv):
    """Whoever is wrong may answer once more."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Wrong. Try again."}]

    @vf.stop
    async def is_right(self, state, **kwargs):
        return bool(state["trajectory"]) and state["answer"] in str(state["trajectory"][-1]["completion"])


async def right(completion, answer):
    return float(answer in str(completion[-1]))


async def solve(task):
    data = Dataset.from_list([{"prompt": task["messages"], "answer": task["ground_truth"]}])
    env = SecondTry(eval_dataset=data, rubric=vf.Rubric(funcs=[right]), max_turns=2)
    client = vf.ClientConfig(api_base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    done = await env.evaluate(client, os.environ["OPENAI_MODEL"])
    return done["outputs"][0]["reward"]


print(json.dumps(asyncio.run(solve(json.load(sys.stdin)))))
