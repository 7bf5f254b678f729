# SPDX-License-Identifier: Apache-2.0
"""Trajectories of several turns whose tokens follow from their numbers, stored a sequence a call and merged."""

from __future__ import annotations

from typing import Any

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl_ext.integration.turns import Layout, lay_out
from verl_ext.rollout.shared.merge import merge

VOCAB = 40


def trajectory(prompt: int, session: int) -> list[AgentLoopOutput]:
    """Two to four turns of a planner and a worker; the third begins anew where the sample's number is odd, and the
    environment says nothing before the second."""
    outputs: list[AgentLoopOutput] = []
    ids = {"planner": [1 + prompt, 2, 3], "worker": [30 + prompt, 5]}
    for turn in range(2 + (prompt + session) % 3):
        agent = "worker" if turn == 1 and prompt % 2 else "planner"
        if turn == 2 and session % 2:
            ids[agent] = ids[agent][::-1] + [7]
        answer = [(3 * prompt + 5 * session + 7 * turn + 11 * k) % VOCAB for k in range(1 + (session + turn) % 3)]
        outputs.append(
            AgentLoopOutput(
                prompt_ids=list(ids[agent]),
                response_ids=answer,
                response_mask=[1] * len(answer),
                response_logprobs=[-3.7 + 0.1 * ((session + turn + k) % 3) for k in range(len(answer))],
                reward_score=((prompt + 2 * session) % 5) / 4,
                metrics=AgentLoopMetrics(),
                extra_fields={
                    "agent_id": agent,
                    "turn_reward": ((prompt + session + 3 * turn) % 4) / 3,
                    "anchor_obs": f"room {(session + turn) % 2}",
                    "is_action_valid": (session + turn) % 3 > 0,
                    "valid_row": not (session == 3 and turn == 1),
                    "reward_extra_info": {},
                },
            )
        )
        ids[agent] = [*ids[agent], *answer, *([8, 9 + session] if turn != 0 else [])]
    return outputs


def batch(merged: bool, prompts: int = 2, n: int = 4) -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]]]:
    """Keys, tags and fields as verl would store them."""
    keys, tags, fields = [], [], []
    for prompt in range(prompts):
        for session in range(n):
            outputs = trajectory(prompt, session)
            if merged:
                outputs = merge(outputs)
            for index, output in enumerate(outputs):
                field = output.as_dict()
                if field["extra_fields"].get("valid_row") is False:
                    field["response_mask"] = torch.zeros_like(field["response_mask"])
                lengths = len(field["prompts"]), len(field["responses"])
                keys.append(f"p{prompt}_{session}_{index}")
                tags.append({"prompt_len": lengths[0], "response_len": lengths[1], "seq_len": sum(lengths)})
                fields.append(field)
    return keys, tags, fields


def layout(keys: list[str], tags: list[dict[str, Any]], fields: list[dict[str, Any]]) -> Layout:
    return lay_out(keys, tags, [one["extra_fields"] for one in fields])


def padded(fields: list[dict[str, Any]], name: str) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([one[name] for one in fields], batch_first=True)
