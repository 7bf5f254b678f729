# SPDX-License-Identifier: Apache-2.0
"""MaxRL: hand-computed cases, the gradient that it estimates, and its errors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from verl_ext.methods.maxrl import maxrl_advantage
from verl_ext.methods.rows import RowFieldError


def advantage(scores, index, **fields):
    """The advantage of each row, and that the token tensors hold it on every model token."""
    rewards = torch.zeros(len(scores), 3)
    rewards[:, 1] = torch.tensor(scores)
    mask = torch.tensor([[1, 1, 0]] * len(scores))
    result = maxrl_advantage(rewards, mask, index, **fields)
    assert result.returns is result.advantages and result.advantages.dtype == torch.float32
    assert torch.equal(result.advantages, result.advantages[:, :1] * mask)
    return result.advantages[:, 0].tolist()


def test_reward_over_the_mean_of_the_prompt():
    assert advantage([1.0, 0.0, 0.0, 0.0, 0.5, 1.5], list("aaaabb")) == [3.0, -1.0, -1.0, -1.0, -0.5, 0.5]


def test_no_success_no_spread_and_no_company_give_nothing():
    assert advantage([0.0, 0.0, 0.9, 0.9, 0.9, 2.0], list("aabbbc")) == [0.0] * 6


def test_a_trajectory_is_one_sample_and_rows_can_be():
    fields = {"traj_uid": ["t", "t", "t", "u"]}
    assert advantage([1.0, 1.0, 1.0, 0.0], ["a"] * 4, **fields) == [1.0, 1.0, 1.0, -1.0]
    assert advantage([1.0, 1.0, 1.0, 0.0], ["a"] * 4) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])


def test_rows_that_are_no_samples_and_groups_by_another_field():
    assert advantage([1.0, 0.0, 9.0], ["a"] * 3, valid_row=[True, True, False]) == [1.0, -1.0, 0.0]
    fields = {"group_by": ["index", "level"], "row_fields": {"level": [0, 0, 1, 1]}}
    assert advantage([1.0, 0.0, 2.0, 6.0], ["a"] * 4, **fields) == [1.0, -1.0, -0.5, 0.5]
    with pytest.raises(RowFieldError, match="'level' is required and missing"):
        advantage([1.0, 0.0], ["a"] * 2, group_by=["index", "level"])


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("p", [0.02, 0.3, 0.9])
def test_the_update_is_the_gradient_of_the_log_likelihood_to_order_n_minus_1(samples, p):
    """Of a policy that succeeds with probability p = sigmoid(x), by enumeration of every outcome of N samples.

    d log p / dp = 1/p = sum over k >= 0 of (1-p)^k; the expected update has its first N - 1 terms, times dp/dx.
    """
    score = {1.0: 1 - p, 0.0: -p}  # d log P(outcome) / dx
    update = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=samples):
        probability = np.prod([p if r else 1 - p for r in outcome])
        values = advantage(list(outcome), ["a"] * samples)
        update += probability * np.mean([a * score[r] for a, r in zip(values, outcome, strict=True)])
    expansion = sum((1 - p) ** k for k in range(samples - 1))
    assert update == pytest.approx(expansion * p * (1 - p), rel=1e-5, abs=1e-9)


def test_negative_rewards_are_refused_by_row():
    with pytest.raises(
        ValueError,
        match=r"token_level_rewards must be at least 0.* maxrl divides .*, got -0.5 in row 1 \(uid a\)",
    ):
        advantage([1.0, -0.5], ["a", "a"])
    assert advantage([1.0, 0.0, -0.5], ["a"] * 3, valid_row=[True, True, False]) == [1.0, -1.0, 0.0]
    with pytest.raises(ValueError, match="token_level_rewards must be a finite number, got nan in row 1"):
        advantage([1.0, float("nan")], ["a", "a"])
