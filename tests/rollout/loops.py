# SPDX-License-Identifier: Apache-2.0
"""What tests of agent loops share: loops made as verl makes them, a scripted engine, a config and a row."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf
from verl.workers.rollout.replica import TokenOutput

from verl_ext.lab.bench.gateway import make_loop

__all__ = ["QUESTION", "REWARD", "Scripted", "columns_of", "config_of", "make_loop"]

QUESTION = "What is 3 + 9?"


class Scripted:
    """An engine that answers by a function of the prompt's text; an answer may come late, raise, or be empty."""

    def __init__(self, tokenizer: Any, answer: Callable[[str], Any], end: bool = True) -> None:
        self.tokenizer, self.answer, self.end = tokenizer, answer, end
        self.prompts: list[str] = []
        self.requests: list[dict[str, Any]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **kwargs: Any) -> Any:
        prompt = self.tokenizer.decode(prompt_ids)
        self.prompts.append(prompt)
        self.requests.append({"request_id": request_id, "prompt_ids": prompt_ids, **sampling_params, **kwargs})
        text = self.answer(prompt)
        if isinstance(text, tuple):
            delay, text = text
            await asyncio.sleep(delay)
        if isinstance(text, Exception):
            raise text
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        ids = [*ids, self.tokenizer.eos_token_id] if self.end and text else ids
        return TokenOutput(
            token_ids=ids[: sampling_params["max_tokens"]],
            log_probs=[-0.5] * len(ids),
            extra_fields={"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7},
        )


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if "raise" in solution_str:
        raise ZeroDivisionError("in the reward")
    if "exit" in solution_str:
        raise SystemExit(3)
    if "square" in solution_str:
        return -(1e30**2)
    return {"score": float(solution_str.strip() == str(ground_truth)), "length": len(solution_str), "note": "text"}
"""


def config_of(rollout: dict[str, Any], reward: str | None, node: dict[str, Any]) -> Any:
    """As much of verl's configuration as the loops read, with the file of a reward function and ``verl_ext``'s keys."""
    custom = {"path": reward, "name": "compute_score", "reward_kwargs": {}}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": rollout},
            "data": {},
            "verl_ext": node,
            "reward": {"custom_reward_function": custom},
        }
    )


def columns_of(row: dict[str, Any] | None) -> dict[str, Any]:
    """A row of the data as verl hands it to a loop, with the columns of `row`."""
    return {
        "raw_prompt": [{"role": "user", "content": QUESTION}],
        "reward_model": {"ground_truth": "12"},
        "data_source": "toy",
        "session_id": 2,
        "global_steps": 7,
        **(row or {}),
    }
