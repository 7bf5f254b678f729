# SPDX-License-Identifier: Apache-2.0
"""Training some agents and not all: which rows are taken out, and where their rewards go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from verl_ext.integration.options import OptionError
from verl_ext.integration.parts import train_agents
from verl_ext.methods.returns import turn_returns


def rows(*turns: tuple[str, int, float]) -> dict[str, Any]:
    trajectories, places, rewards = zip(*turns, strict=True)
    objects = np.array(trajectories, dtype=object)
    return {"traj_uid": objects, "turn_index": np.array(places), "turn_reward": np.array(rewards, dtype=np.float64)}


def test_what_others_earn_goes_to_the_row_before_them() -> None:
    # Trajectory a: planner, worker, worker, planner; b, out of order: worker, planner, worker.
    columns = rows(("a", 0, 1), ("b", 1, 2), ("a", 1, 4), ("a", 3, 16), ("b", 2, 8), ("a", 2, 32), ("b", 0, 64))
    trained = np.array([True, True, False, True, False, False, False])
    found = train_agents.carried(columns, np.ones(7, dtype=bool), trained, 1.0)
    assert found.tolist() == [1 + 4 + 32, 2 + 8, 0, 16, 0, 0, 0]
    found = train_agents.carried(columns, np.ones(7, dtype=bool), trained, 0.5)
    assert found[trained].tolist() == [1 + 4 / 2 + 32 / 4, 2 + 8 / 2, 16]
    valid = np.array([True, True, True, True, True, False, True])  # what is no sample has earned nothing
    assert train_agents.carried(columns, valid, trained, 1.0)[0] == 1 + 4
    assert columns["turn_reward"].tolist() == [1, 2, 4, 16, 8, 32, 64]


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_returns_of_the_trained_are_those_over_all_rows(gamma: float) -> None:
    generator = np.random.default_rng(3)
    trajectory = generator.integers(0, 9, 60)
    turn = np.zeros(60, dtype=np.int64)
    for one in range(9):
        turn[trajectory == one] = generator.permutation(100)[: (trajectory == one).sum()] // 2 * 2
        turn[trajectory == one] += np.arange((trajectory == one).sum()) * 100  # distinct, and with gaps
    columns = {"traj_uid": trajectory.astype(object), "turn_index": turn, "turn_reward": generator.normal(size=60)}
    trained = generator.random(60) < 0.4
    rewards = train_agents.carried(columns, np.ones(60, dtype=bool), trained, gamma)
    whole = turn_returns(columns["turn_reward"], trajectory, turn, gamma=gamma)
    part = turn_returns(rewards[trained], trajectory[trained], turn[trained], gamma=gamma)
    np.testing.assert_allclose(part, whole[trained], rtol=1e-12, atol=1e-12)
    everyone = train_agents.carried(columns, np.ones(60, dtype=bool), np.ones(60, dtype=bool), gamma)
    np.testing.assert_allclose(everyone, columns["turn_reward"], rtol=1e-12, atol=1e-12)


def test_the_option_is_a_list_of_names() -> None:
    def named(value: Any) -> tuple[str, ...]:
        return train_agents.train_agents(OmegaConf.create({"verl_ext": {"train_agents": value}}))

    assert named(None) == () and not train_agents.TrainAgents.wanted(OmegaConf.create({}))
    assert named(["planner", "judge"]) == ("planner", "judge")
    for wrong, message in (([], "is empty"), ("planner", "'planner'; give a list"), ([3], "give a list of names")):
        with pytest.raises(OptionError, match=message):
            named(wrong)
