# SPDX-License-Identifier: Apache-2.0
"""TRLOO: oracle vectors, hand-computed cases and its errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vector_cases import assert_expected, case_name, load_cases, row_field, row_fields, token_field

from verl_ext.methods.groups import joint_ids, value_ids
from verl_ext.methods.returns import regressed_turns, turn_returns
from verl_ext.methods.rows import RowFieldError
from verl_ext.methods.trloo import trloo_advantage

FIELDS = ("traj_uid", "turn_index", "turn_reward", "valid_row")


def run(case, **options):
    return trloo_advantage(
        token_field(case, "token_level_rewards"),
        token_field(case, "response_mask", torch.int64),
        row_field(case, "index"),
        gamma=case["config"]["gamma"],
        **row_fields(case, *FIELDS),
        **options,
    )


@pytest.mark.parametrize("case", load_cases("trloo"), ids=case_name)
def test_vectors(case):
    advantages, returns = run(case)
    assert_expected(case, "advantages", advantages)
    assert returns is advantages
    assert advantages.dtype == torch.float32
    assert_expected(case, "row_advantage", advantages.abs().amax(-1) * advantages.sum(-1).sign())
    mean_baseline, _ = run(case, baseline="mean")
    assert_expected(case, "advantages_group_mean_baseline", mean_baseline)


@pytest.mark.parametrize("case", load_cases("trloo"), ids=case_name)
def test_vectors_turn_return(case):
    trajectory = joint_ids(value_ids(row_field(case, "index")), value_ids(row_field(case, "traj_uid")))
    reward = np.asarray(row_field(case, "turn_reward"), dtype=np.float64)
    if "valid_row" in case["inputs"]:
        reward = np.where(row_field(case, "valid_row"), reward, 0.0)
    returns = turn_returns(reward, trajectory, row_field(case, "turn_index"), gamma=case["config"]["gamma"])
    assert_expected(case, "turn_return", returns)


def tokens(scores, length=2):
    rewards = torch.zeros(len(scores), length)
    rewards[:, -1] = torch.tensor(scores)
    return rewards, torch.ones(len(scores), length, dtype=torch.int64)


def test_single_turn_is_leave_one_out():
    rewards, mask = tokens([1.0, 0.0, 0.0, 1.0, 5.0])
    advantages, _ = trloo_advantage(rewards, mask, ["a", "a", "a", "b", "c"])
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1.0, -0.5, -0.5, 1.0, 5.0]))


def test_exponent_follows_the_turn_gap():
    # Turn 1 is missing altogether, so the reward of turn 2 reaches turn 0 with gamma^2.
    rewards, mask = tokens([0.0, 1.0])
    advantages, _ = trloo_advantage(rewards, mask, ["a", "a"], traj_uid=["t", "t"], turn_index=[0, 2], gamma=0.5)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([0.25, 1.0]))


def test_masked_turn_still_discounts():
    rewards, mask = tokens([1.0, 7.0, 1.0])
    advantages, _ = trloo_advantage(
        rewards, mask, ["a"] * 3, traj_uid=["t"] * 3, turn_index=[0, 1, 2], valid_row=[True, False, True], gamma=0.5
    )
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1.25, 0.0, 1.0]))


def test_mask_regressions():
    turn_reward = np.array([1.2, 0.0, 1.5, 0.0, 0.0, 0.3])
    trajectory, turn = np.array([0, 0, 0, 1, 1, 1]), np.array([0, 1, 2, 0, 1, 2])
    np.testing.assert_array_equal(
        regressed_turns(turn_reward, trajectory, turn), [False, True, False, False, False, False]
    )
    rewards, mask = tokens([0.0] * 6)
    advantages, _ = trloo_advantage(
        rewards,
        mask,
        ["a"] * 6,
        traj_uid=list("ppprrr"),
        turn_index=turn,
        turn_reward=turn_reward,
        mask_regressions=True,
    )
    # Turn 1 of the first trajectory leaves its group: the other row is alone and keeps its return.
    torch.testing.assert_close(advantages[:, 0], torch.tensor([2.4, 0.0, 1.2, -2.4, 0.3, -1.2]))


def test_batch_std_whitens_row_scalars():
    rewards, mask = tokens([1.0, 0.0, 0.0, 1.0])
    mask[0, 0] = 0
    advantages, _ = trloo_advantage(rewards, mask, ["a", "a", "b", "b"], batch_std=True)
    expected = 1.0 / np.sqrt(4.0 / 3.0 + 1e-8)
    torch.testing.assert_close(advantages[:, 1], torch.tensor([1.0, -1.0, -1.0, 1.0]) * expected)
    assert advantages[0, 0] == 0


def test_group_by_further_field():
    rewards, mask = tokens([1.0, 0.0, 0.5, 0.0])
    advantages, _ = trloo_advantage(
        rewards,
        mask,
        ["a"] * 4,
        group_by=["index", "turn_index", "agent_id"],
        row_fields={"agent_id": ["x", "y", "x", "y"]},
    )
    torch.testing.assert_close(advantages[:, 0], torch.tensor([0.5, 0.0, -0.5, 0.0]))


def test_errors_name_the_field_and_the_remedy():
    rewards, mask = tokens([1.0, 0.0])
    with pytest.raises(RowFieldError, match="agent_id.*extra_fields"):
        trloo_advantage(rewards, mask, ["a", "a"], group_by=["index", "agent_id"])
    with pytest.raises(RowFieldError, match="turn_index"):
        trloo_advantage(rewards, mask, ["a", "a"], traj_uid=["t", "u"])
    with pytest.raises(RowFieldError, match="'traj_uid' has 3 entries for a batch of 2"):
        trloo_advantage(rewards, mask, ["a", "a"], traj_uid=["t", "u", "v"], turn_index=[0, 0])
    with pytest.raises(RowFieldError, match="turn_index.*in each turn of a trajectory.*trajectory t"):
        trloo_advantage(rewards, mask, ["a", "a"], traj_uid=["t", "t"], turn_index=[0, 0])
    with pytest.raises(RowFieldError, match="traj_uid.*entry 1 is None"):
        trloo_advantage(rewards, mask, ["a", "a"], traj_uid=["t", None], turn_index=[0, 0])
    with pytest.raises(ValueError, match="must name 'index'"):
        trloo_advantage(rewards, mask, ["a", "a"], group_by=["turn_index"])
    with pytest.raises(ValueError, match="baseline='median': choose one of 'leave_one_out', 'mean'"):
        trloo_advantage(rewards, mask, ["a", "a"], baseline="median")
    with pytest.raises(ValueError, match="gamma=1.5"):
        trloo_advantage(rewards, mask, ["a", "a"], gamma=1.5)
    with pytest.raises(ValueError, match="response_mask has shape"):
        trloo_advantage(rewards, mask[:, :1], ["a", "a"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_rewards_name_uid_trajectory_and_turn(bad):
    rewards, mask = tokens([1.0, bad, 0.0])
    fields = {"traj_uid": ["t", "t", "u"], "turn_index": [0, 1, 0]}
    with pytest.raises(
        ValueError, match=r"token_level_rewards must be .*finite.* row 1 \(uid a, trajectory t, turn 1\)"
    ):
        trloo_advantage(rewards, mask, ["a"] * 3, **fields)
    with pytest.raises(ValueError, match=r"turn_reward' must be .*finite.* row 2 \(uid a, trajectory u, turn 0\)"):
        trloo_advantage(torch.zeros(3, 2), mask, ["a"] * 3, turn_reward=[0.0, 1.0, bad], **fields)
    advantages, _ = trloo_advantage(rewards, mask, ["a"] * 3, valid_row=[True, False, True], **fields)
    assert torch.isfinite(advantages).all()
