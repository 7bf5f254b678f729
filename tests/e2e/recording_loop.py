# SPDX-License-Identifier: Apache-2.0
"""An agent loop of two turns, which are one sequence; it can write down what the engine sampled, and with which
log-probabilities."""

from __future__ import annotations

import json
import os
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


class Recording(AgentLoopBase):
    """Two model calls; the second sees the first. One line a call goes to the file named by ``RECORD``, if any."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        ids = self.continuous_token_builder.build_initial_tokens(list(kwargs["raw_prompt"]))
        rows: list[AgentLoopOutput] = []
        for turn in range(2):
            answer = await self.server_manager.generate(
                request_id=f"{kwargs['uid']}-{kwargs['session_id']}-{turn}",
                prompt_ids=ids,
                sampling_params=dict(sampling_params),
            )
            record = {
                "weights": answer.extra_fields["global_steps"],
                "turn": turn,
                "prompt": ids,
                "answer": list(answer.token_ids),
                "log_probs": list(answer.log_probs),
            }
            with open(os.environ.get("RECORD", os.devnull), "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            reward = sum(answer.token_ids) % 97 / 97  # few answers have the same
            rows.append(
                AgentLoopOutput(
                    prompt_ids=list(ids),
                    response_ids=list(answer.token_ids),
                    response_mask=[1] * len(answer.token_ids),
                    response_logprobs=list(answer.log_probs),
                    reward_score=reward,
                    num_turns=2,
                    metrics=AgentLoopMetrics(),
                    extra_fields={**answer.extra_fields, "turn_reward": reward, "reward_extra_info": {}},
                )
            )
            ids = list(ids) + list(answer.token_ids)
        return rows
