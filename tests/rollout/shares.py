# SPDX-License-Identifier: Apache-2.0
"""How much of a conversation merges into one sequence, by loop and chat template, for `docs/templates.md`.

Each loop plays eight turns with an engine whose answers are written here; models that think do so before each answer.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from typing import Any

import openai
from families import FAMILIES, chat_of_family, tokenizer_of
from loops import columns_of, config_of, make_loop
from verl.workers.rollout.replica import TokenOutput

from verl_ext.rollout.environments import runner
from verl_ext.rollout.gateway import server
from verl_ext.rollout.orchestra import agent, orchestra
from verl_ext.rollout.shared.merge import merge

TURNS = 8
NAMES = ("qwen2_5", "qwen3", "qwen3_off", "qwen3_5", "llama3", "gptoss", "deepseekv3", "gemma3")
THINKING = "Let me see. The corridor is long, and what I tried before was not it, so I try something else now."
ANSWER = "I go <action>back</action> and think that the number is {number}, which is my answer this time."
FURTHER = "That is not right, and here is what you see now: another place in a long corridor. Try again."
LOOPS = {
    "multi-turn, kernels": ("verl_ext_multi_turn", {}),
    "step-wise, `history=continue`": ("verl_ext_step_wise", {"environment": {"history": "continue"}}),
    "step-wise, `render`": ("verl_ext_step_wise", {"environment": {"history_length": TURNS}}),
    "teams": ("verl_ext_orchestra", {"orchestra": {"name": "test_shares"}}),
    "gateway": ("verl_ext_gateway", {"gateway": {"agent": "shares:solve"}}),
}


@agent("talker", role="You tell.")
def talker(text: str) -> str:
    """Tell."""
    return text


@orchestra("test_shares")
async def talk(task: Any, talker: Any) -> float:
    """One agent whose conversation goes on."""
    messages = list(task.messages)
    for _ in range(TURNS):
        reply = await talker(messages)
        messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": FURTHER}]
    return 1.0


async def solve(task: dict[str, Any], *, base_url: str, api_key: str, model: str) -> float:
    """A client that appends what it is told, as most do."""
    messages = list(task["messages"])
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(TURNS):
            reply = await client.chat.completions.create(model=model, messages=messages)
            text = reply.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": FURTHER}]
    return 1.0


def answers(name: str) -> Iterator[str]:
    """What a model of the family writes, with its control tokens."""
    family = FAMILIES[name]
    for number in range(TURNS):
        text = ANSWER.format(number=number)
        if name == "gptoss":
            thought = f"<|channel|>analysis<|message|>{THINKING}<|end|>"
            text = f"{thought}<|start|>assistant<|channel|>final<|message|>{text}"
        elif chat_of_family(name).opens_thinking:
            text = f"{THINKING}\n</think>\n\n{text}"
        elif name == "qwen3":
            text = f"<think>\n{THINKING}\n</think>\n\n{text}"
        yield text + family.before_end + family.ends


class Engine:
    """Gives the family's answers in turn."""

    def __init__(self, name: str) -> None:
        self.tokenizer, self.texts = tokenizer_of(name), answers(name)

    async def generate(self, **_: Any) -> Any:
        ids = list(self.tokenizer.encode(next(self.texts), add_special_tokens=False))
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields={"global_steps": 1})


def played(name: str, loop: str, node: dict[str, Any]) -> list[Any]:
    """The outputs of a trajectory."""
    if "environment" in node:
        own = {"name": "environment_zoo:Corridor", "kwargs": {"length": 100}, "max_steps": TURNS}
        node = {"environment": {**own, **node["environment"]}}
    rollout = {"prompt_length": 8192, "response_length": 256, "temperature": 1.0}
    with tempfile.NamedTemporaryFile("w", suffix=".py") as reward:
        reward.write("def compute_score(**kwargs):\n    return 1.0\n")
        reward.flush()
        config = config_of({**rollout, "custom": {"multi_turn": {"max_turns": TURNS}}}, reward.name, node)
        config.data.apply_chat_template_kwargs = FAMILIES[name].kwargs

        async def run() -> Any:
            try:
                kind = FAMILIES[name].model_type
                made = make_loop(loop, config, Engine(name), tokenizer_of(name), hf_model_type=kind)
                entry = '{"question": "What is 3 + 9?", "answer": "12", "metadata": {}}'
                task = {"dataset": "chain_sum", "config_json": '{"seed": 0, "size": 1}', "entry_json": entry}
                row = {"extra_info": {**task, "parser": "last_number"}, "index": 0, "session_id": 0}
                return await made.run({"temperature": 1.0, "logprobs": True}, **columns_of(row))
            finally:
                for gateway in server._gateways.get(asyncio.get_running_loop(), {}).values():
                    await gateway.close()

        return list(asyncio.run(run()))


def share(name: str, loop: str, node: dict[str, Any]) -> str:
    """Sequences, and their tokens over those of a sequence a call."""
    outputs = played(name, loop, node)
    assert len(outputs) == TURNS and not outputs[-1].extra_fields.get("failure"), outputs[-1].extra_fields
    merged = merge(outputs)
    tokens, apart = (sum(len(one.prompt_ids) + len(one.response_ids) for one in each) for each in (merged, outputs))
    return f"{len(merged)}, {tokens / apart:.2f}"


def table() -> str:
    """A row a family, a column a loop."""
    lines = [f"| family | {' | '.join(LOOPS)} |", "|---" * (len(LOOPS) + 1) + "|"]
    for name in NAMES:
        cells = [share(name, loop, node) for loop, node in LOOPS.values()]
        lines.append(f"| {FAMILIES[name].title} | {' | '.join(cells)} |")
    runner.end_all()
    return "\n".join(lines)
