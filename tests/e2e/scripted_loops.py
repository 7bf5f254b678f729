# SPDX-License-Identifier: Apache-2.0
"""Agent loops for the end-to-end tests: rollouts that are known beforehand, and rollouts that go wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from verl_ext.integration.engines.token_kl import IDS, LOG_PROBS


def recorded(prompt: int, session: int, turn: int) -> list[int]:
    """The tokens of a turn of `Recorded`."""
    return [20 + (prompt + 5 * session + turn + k) % 60 for k in range(2 + session)]


def distributions(prompt: int, session: int, turn: int) -> torch.Tensor:
    """What `Distributed` says it sampled these tokens from, log-probabilities [tokens, 259]: far from uniform, and so
    from an untrained model, in the last sample of a prompt."""
    generator = torch.Generator().manual_seed(100 * prompt + 10 * session + turn)
    logits = torch.randn(len(recorded(prompt, session, turn)), 259, generator=generator)
    return (logits * (1.0 if session == 3 else 0.2)).log_softmax(-1)


class Recorded(AgentLoopBase):
    """One to three turns whose tokens and rewards follow from the prompt and the number of the sample alone."""

    def reward(self, prompt: int, session: int, turn: int) -> float:
        return float((7 * prompt + 3 * session + turn) % 5) / 4

    def sampler(self, prompt: int, session: int, turn: int, answer: list[int]) -> tuple[list[float], dict[str, Any]]:
        """Log-probabilities of the answer's tokens, and what else the sampler says of them."""
        return [-5.0] * len(answer), {}

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        prompt, session = int(kwargs["extra_info"]["index"]), int(kwargs["session_id"])
        ids = [3 + prompt, 7, 11]
        rows = []
        for turn in range(1 + (prompt + session) % 3):
            answer = recorded(prompt, session, turn)
            log_probs, said = self.sampler(prompt, session, turn, answer)
            rows.append(
                AgentLoopOutput(
                    prompt_ids=list(ids),
                    response_ids=answer,
                    response_mask=[1] * len(answer),
                    response_logprobs=log_probs,
                    reward_score=1.0,
                    num_turns=2,
                    metrics=AgentLoopMetrics(),
                    extra_fields={
                        **said,
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


class Distributed(Recorded):
    """With the distributions that the embedded engine would send: of all tokens, or of as many as it is asked for."""

    def sampler(self, prompt: int, session: int, turn: int, answer: list[int]) -> tuple[list[float], dict[str, Any]]:
        whole, count = (
            distributions(prompt, session, turn),
            self.rollout_config.engine_kwargs["embedded"]["top_logprobs"],
        )
        log_probs = whole[range(len(answer)), answer].tolist()
        if count < 0:
            return log_probs, {LOG_PROBS: whole.numpy()}
        top = whole.topk(count)
        return log_probs, {LOG_PROBS: top.values.numpy(), IDS: top.indices.numpy().astype(np.int32)}


class Surging(AgentLoopBase):
    """One scripted turn of 4 to 7 tokens, three times as long from the second step on."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt, session = int(kwargs["extra_info"]["index"]), int(kwargs["session_id"])
        length = (4 + session) * (3 if kwargs["global_steps"] > 1 else 1)
        answer = [20 + (prompt + 5 * session + 7 * place) % 60 for place in range(length)]
        return AgentLoopOutput(
            prompt_ids=[3 + prompt, 7, 11],
            response_ids=answer,
            response_mask=[1] * length,
            response_logprobs=[-math.log(259) + (0.5 if session == 3 else 0.0)] * length,
            reward_score=float((prompt + session) % 3),
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={
                "reward_extra_info": {},
                "min_global_steps": kwargs["global_steps"],
                "max_global_steps": kwargs["global_steps"],
            },
        )


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


class Team(AgentLoopBase):
    """Two agents on one model take turns in a small world: the engine writes, and few answers have the same reward.

    The observation is one of two rooms, so that groups of equal observations and histories form; the critic's rewards
    are ten times the writer's; an answer without any digit is an invalid action.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        messages = list(kwargs["raw_prompt"])
        prompt = self.continuous_token_builder.build_initial_tokens(messages)
        rows: list[AgentLoopOutput] = []
        room, total = "red room", 0.0
        for turn in range(2 + int(kwargs["session_id"]) % 2):
            agent = ("writer", "critic")[turn % 2]
            answer = await self.server_manager.generate(
                request_id=f"{kwargs['uid']}-{kwargs['session_id']}-{turn}",
                prompt_ids=prompt,
                sampling_params=sampling_params,
            )
            digits = sum(c.isdigit() for c in self.tokenizer.decode(answer.token_ids))
            reward = sum(answer.token_ids) % 97 / 97 * (10 if agent == "critic" else 1)
            total += reward
            rows.append(
                AgentLoopOutput(
                    prompt_ids=list(prompt),
                    response_ids=list(answer.token_ids),
                    response_mask=[1] * len(answer.token_ids),
                    response_logprobs=list(answer.log_probs),
                    num_turns=2,
                    metrics=AgentLoopMetrics(),
                    extra_fields={
                        **answer.extra_fields,
                        "turn_reward": reward,
                        "agent_id": agent,
                        "anchor_obs": room,
                        "is_action_valid": digits > 0,
                        "reward_extra_info": {},
                    },
                )
            )
            room = "blue room" if digits else "red room"
        for row in rows:
            row.reward_score = total
        return rows


class Seeded(AgentLoopBase):
    """One turn whose sampling seed follows from prompt and sample, so that arrival order plays no part."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = self.continuous_token_builder.build_initial_tokens(list(kwargs["raw_prompt"]))
        seed = 1000 * int(kwargs["extra_info"]["index"]) + int(kwargs["session_id"])
        answer = await self.server_manager.generate(
            request_id=f"{kwargs['uid']}-{kwargs['session_id']}",
            prompt_ids=prompt,
            sampling_params={**sampling_params, "seed": seed},
        )
        return AgentLoopOutput(
            prompt_ids=list(prompt),
            response_ids=list(answer.token_ids),
            response_mask=[1] * len(answer.token_ids),
            response_logprobs=list(answer.log_probs),
            reward_score=sum(answer.token_ids) % 97 / 97,
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={**answer.extra_fields, "reward_extra_info": {}},
        )
