# SPDX-License-Identifier: Apache-2.0
"""Agent loops for the end-to-end tests: rollouts that are known beforehand, and rollouts that go wrong."""

from __future__ import annotations

import math
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


class Recorded(AgentLoopBase):
    """One to three turns whose tokens and rewards follow from the prompt and the number of the sample alone."""

    def reward(self, prompt: int, session: int, turn: int) -> float:
        return float((7 * prompt + 3 * session + turn) % 5) / 4

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        prompt, session = int(kwargs["extra_info"]["index"]), int(kwargs["session_id"])
        ids = [3 + prompt, 7, 11]
        rows = []
        for turn in range(1 + (prompt + session) % 3):
            answer = [20 + (prompt + 5 * session + turn + k) % 60 for k in range(2 + session)]
            rows.append(
                AgentLoopOutput(
                    prompt_ids=list(ids),
                    response_ids=answer,
                    response_mask=[1] * len(answer),
                    response_logprobs=[-5.0] * len(answer),
                    reward_score=1.0,
                    num_turns=2,
                    metrics=AgentLoopMetrics(),
                    extra_fields={
                        "turn_reward": self.reward(prompt, session, turn),
                        "agent_id": "solver",
                        "anchor_obs": f"{prompt}/{session}/{turn}",
                        "reward_extra_info": {},
                        "min_global_steps": kwargs["global_steps"],
                        "max_global_steps": kwargs["global_steps"],
                    },
                )
            )
            ids = ids + answer
        return rows


class NanReward(Recorded):
    """One reward in the second turn of one rollout is not a number."""

    def reward(self, prompt: int, session: int, turn: int) -> float:
        return math.nan if session == 2 and turn == 1 else super().reward(prompt, session, turn)


class OneRaises(Recorded):
    """One rollout of every prompt dies."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        if int(kwargs["session_id"]) == 1:
            raise RuntimeError("the environment is gone")
        return await super().run(sampling_params, **kwargs)
