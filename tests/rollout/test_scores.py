# SPDX-License-Identifier: Apache-2.0
"""What can be a reward is what verl can store."""

from __future__ import annotations

import math

import pytest
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl_ext.rollout.shared.rows import ModelCall, make_rows
from verl_ext.rollout.shared.scores import FLOAT32_MAX, storable

LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("number", [0.0, -1.5, LARGEST, -LARGEST, math.nextafter(LARGEST, math.inf), -1e60])
def test_a_reward_that_verl_can_store(number: float) -> None:
    output = AgentLoopOutput(
        prompt_ids=[1], response_ids=[2], response_mask=[1], reward_score=number, metrics=AgentLoopMetrics()
    )
    try:
        output.as_dict()
        stored = True
    except RuntimeError:
        stored = False
    assert storable(number) == stored


def test_neither_are_values_that_are_not_finite() -> None:
    assert FLOAT32_MAX == LARGEST and not any(map(storable, (math.nan, math.inf, -math.inf, 10**400)))


@pytest.mark.parametrize(("outcome", "turn"), [(-1e60, 0.0), (0.0, -1e60), (math.nan, 0.0), (0.0, math.nan)])
def test_rows_have_no_other_rewards(outcome: float, turn: float) -> None:
    call = ModelCall([1], [2], None, fields={"turn_reward": turn})
    with pytest.raises(ValueError, match="a reward must be finite, in float32 too"):
        make_rows([call], outcome=outcome, info={})
