# SPDX-License-Identifier: Apache-2.0
"""Row fields: from verl's keys, tags and the agent loops' extra fields to columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_ext.integration import columns
from verl_ext.integration.parts.advantage import methods


def test_key_is_split_from_the_right() -> None:
    assert columns.split_key("a_b_3_12") == ("a_b", "a_b_3", 12)
    with pytest.raises(ValueError, match="'prompt-only'"):
        columns.split_key("prompt-only")


def test_row_fields_come_from_key_and_extra_fields() -> None:
    found, missing = columns.row_fields(
        keys=["u_0_1", "u_0_0", "pad_0_0"],
        tags=[{}, {}, {"is_padding": True}],
        extra_fields=[
            {"turn_reward": 1.0, "agent_id": "solver", "anchor_obs": ["a", "b"], "is_action_valid": False},
            {"turn_reward": 0.5, "agent_id": "judge", "anchor_obs": {"x": 1}, "valid_row": False},
            {"turn_reward": 1.0, "agent_id": "solver", "anchor_obs": ["a", "b"]},
        ],
    )
    assert missing == {}
    assert found["traj_uid"].tolist() == ["u_0", "u_0", "pad_0"]
    assert found["turn_index"].tolist() == [1, 0, 0]
    assert found["turn_reward"].tolist() == [1.0, 0.5, 0.0]  # a padding row carries no reward of its own
    assert found["anchor_obs"].tolist() == [["a", "b"], {"x": 1}, ["a", "b"]]
    assert found["valid_row"].tolist() == [True, False, False]
    assert found["is_action_valid"].tolist() == [False, True, True]


def test_a_field_that_some_rows_lack_is_missing_and_the_row_is_named() -> None:
    found, missing = columns.row_fields(["u_0_0", "u_1_0"], [{}, {}], [{"agent_id": "a"}, {}])
    assert "agent_id" not in found
    assert "u_1_0" in missing["agent_id"] and "turn_reward" in missing
    batch = columns.ActiveBatch(columns=found, missing=missing)
    with columns.active(batch):
        message = str(columns.demand("agent_id", "dr_mas"))
    assert "dr_mas" in message and "'agent_id'" in message and "u_1_0" in message and "extra_fields" in message
    assert columns.current() is None


def test_no_extra_fields_at_all() -> None:
    found, missing = columns.row_fields(["u_0_0"], [{}], None)
    assert found["valid_row"].tolist() == [True]
    found, _ = columns.row_fields(["u_0_0"], [{}], [{"valid_row": None, "is_action_valid": None}])
    assert found["valid_row"].tolist() == found["is_action_valid"].tolist() == [True]
    assert set(missing) == {"agent_id", "anchor_obs", "turn_reward"}


def test_single_turn_data_is_recognised_among_padding() -> None:
    traj = np.array(["u_0", "u_1", "u_1"], dtype=object)
    assert columns.one_row_each(traj, np.array([True, True, False]), np.array([True, True, False]))
    assert not columns.one_row_each(traj, np.array([True, True, True]), np.array([False, False, True]))


def test_nan_reward_names_prompt_trajectory_and_turn() -> None:
    fields = {"turn_reward": np.array([0.0, float("nan"), float("nan")]), "valid_row": np.array([True, True, False])}
    with pytest.raises(columns.BatchError, match=r"uid q, trajectory q_4, turn 2 \(1 such turns"):
        methods.check_rewards(fields, torch.zeros(3, 2), ["q_4_1", "q_4_2", "q_5_0"])
    fields = {"valid_row": np.array([True])}
    with pytest.raises(columns.BatchError, match="reward inf"):
        methods.check_rewards(fields, torch.tensor([[0.0, float("inf")]]), ["q_4_1"])
    methods.check_rewards({"valid_row": np.array([False])}, torch.tensor([[float("nan")]]), ["q_4_1"])


def test_the_turn_that_the_agent_loop_gives_counts() -> None:
    """Calls made side by side end in another order than they began in."""
    said = [{"turn_index": 2**53 + 1}, {"turn_index": np.int64(2**53)}, {}]
    found, _ = columns.row_fields(["u_0_0", "u_0_1", "u_1_7"], [{}] * 3, said)
    assert found["turn_index"].tolist() == [2**53 + 1, 2**53, 7] and found["turn_index"].dtype == np.int64
    for wrong in ("1", 1.0, True):
        with pytest.raises(columns.BatchError, match="turn_index of turn u_0_0 is"):
            columns.row_fields(["u_0_0"], [{}], [{"turn_index": wrong}])


def test_a_field_of_the_users_own_is_read_from_what_the_agent_loop_said() -> None:
    said = [{"level": "a"}, {"level": ["b"]}, {}]
    found, missing = columns.row_fields(["u_0_0", "u_1_0", "p_0_0"], [{}, {}, {"is_padding": True}], said)
    batch = columns.ActiveBatch(found, missing, said)
    assert batch.column("level").tolist() == ["a", ["b"], None] and batch.column("agent_id") is None
    assert batch.column("colour") is None and "2 of 2 turns lack it; they have level" in batch.missing["colour"]
