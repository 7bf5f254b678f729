# SPDX-License-Identifier: Apache-2.0
"""Training some agents and not all: which rows are taken out, and where their rewards go."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_ext.integration.columns import ActiveBatch, BatchError, row_fields
from verl_ext.integration.parts.advantage import methods, rollouts, train_agents
from verl_ext.integration.parts.advantage.columns import Columns
from verl_ext.integration.settings.options import OptionError
from verl_ext.methods.returns import turn_returns
from verl_ext.rollout.agent_loops import check_train_agents


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


@settings(max_examples=25)
@given(st.just(1.0) | st.floats(0.0, 1.0), st.integers(0, 2**32 - 1))
@example(0.0, 3)
@example(0.9, 3)
@example(1.0, 3)
def test_returns_of_the_trained_are_those_over_all_rows(gamma: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
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


def test_the_discount_is_that_of_the_estimators() -> None:
    algorithm = {"gamma": 1.0, "adv_estimator": "mix", "mix": {"trloo": 0.5, "grpo": 0.5}, "trloo": {"gamma": 0.5}}
    config = OmegaConf.create({"algorithm": algorithm, "verl_ext": {"train_agents": ["planner"]}})
    keys, said = (
        ["u_0_0", "u_0_1"],
        [{"agent_id": "planner", "turn_reward": 0.0}, {"agent_id": "a", "turn_reward": 1.0}],
    )
    columns, missing = row_fields(keys, [{}] * 2, said)
    active = ActiveBatch(columns=columns, missing=missing, extra_fields=said, keys=keys, tags=[{}] * len(keys))
    train_agents.TrainAgents.check(config)
    train_agents.TrainAgents(config).on_batch(SimpleNamespace(keys=keys, tags=[{}] * 2), active, {})
    assert active.columns["turn_reward"].tolist() == [0.5, 0.0]
    config.algorithm.mix.hgpo = 1.0
    with pytest.raises(OptionError, match=r"several \(trloo: 0\.5, hgpo: 1\)\. Set algorithm\.gamma"):
        train_agents.TrainAgents.check(config)
    config.algorithm.hgpo = {"gamma": 0.5}
    assert train_agents.TrainAgents.check(config) == []


def test_rewards_of_trajectories_are_those_that_were_earned() -> None:
    """Neither discounted on their way to a trained row, nor lost before the first one, nor with KL."""
    algorithm = {"gamma": 0.5, "adv_estimator": "trloo"}
    config = OmegaConf.create({"algorithm": algorithm, "verl_ext": {"train_agents": ["worker"]}})
    keys = ["u_0_0", "u_0_1", "u_0_2", "u_1_0"]
    earned = [("planner", 1.0), ("worker", 0.0), ("planner", 2.0), ("planner", 4.0)]
    said = [{"agent_id": agent, "turn_reward": reward} for agent, reward in earned]
    batch, active = SimpleNamespace(keys=keys, tags=[{"seq_len": 2}] * 4), ActiveBatch(columns={})
    table = Columns(config)
    table._extra = dict(zip(keys, said, strict=True))
    for part in (table, train_agents.TrainAgents(config)):
        part.on_batch(batch, active, {})
    scores = torch.tensor([[3.0], [3.0], [3.0], [4.0]])
    ones = torch.ones(4, 1)
    data = SimpleNamespace(
        batch={"token_level_scores": scores, "token_level_rewards": scores - 0.25, "response_mask": ones}
    )
    methods.complete(active, data)
    assert active.columns["turn_reward"].tolist() == [-0.25, 0.75, -0.25, -0.25]
    data.batch["advantages"] = ones
    part = methods.Methods(config)
    part.after_advantage(data, keys, active)
    found = {name: part.metrics[f"trajectory/{name}"] for name in ("reward/mean", "reward/max", "turns/max")}
    assert found == {"reward/mean": 3.5, "reward/max": 4.0, "turns/max": 1.0}


def test_the_option_is_a_list_of_names() -> None:
    def named(value: Any) -> tuple[str, ...]:
        return train_agents.train_agents(OmegaConf.create({"verl_ext": {"train_agents": value}}))

    assert named(None) == () and not train_agents.TrainAgents.wanted(OmegaConf.create({}))
    assert named(["planner", "judge"]) == ("planner", "judge")
    for wrong, message in (([], "is empty"), ("planner", "'planner'; give a list"), ([3], "give a list of names")):
        with pytest.raises(OptionError, match=message):
            named(wrong)


def test_a_name_that_the_orchestra_does_not_have_is_refused() -> None:
    def check(*names: str, team: str | None = "solver_verifier") -> None:
        nodes = {"train_agents": list(names), "orchestra": {"name": team}}
        check_train_agents(OmegaConf.create({"algorithm": {}, "verl_ext": nodes}))

    check("solver", "verifier")
    check("verifer", team=None)
    message = (
        r"names 'verifer'; the orchestra solver_verifier has no such agent\. Did you mean 'verifier'\? It has: solv"
    )
    with pytest.raises(OptionError, match=message):
        check("solver", "verifer")


def test_a_name_of_no_row_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    said = [{"agent_id": "planner"}, {"agent_id": "worker"}]
    monkeypatch.setattr(train_agents, "fetch", lambda batch, fields: {"extra_fields": said})
    monkeypatch.setattr(train_agents, "take_out", lambda batch, keys: keys)
    part = train_agents.TrainAgents(OmegaConf.create({"verl_ext": {"train_agents": ["planner", "judge"]}}))
    batch = SimpleNamespace(keys=["u_0_0", "u_0_1"])
    with caplog.at_level(logging.WARNING, train_agents.logger.name):
        assert [part.on_sample(batch) for _ in range(2)] == [["u_0_1"]] * 2
    assert [one.getMessage() for one in caplog.records] == [
        "verl_ext.train_agents names judge, of whom this batch has no turn; its turns are of planner, worker"
    ]
    said[0]["agent_id"] = "worker"
    with pytest.raises(BatchError, match=r"names planner, judge; the turns are of worker\."):
        part.on_sample(batch)


@pytest.mark.parametrize("names", [None, ["planner"], ["worker"]])
def test_what_a_team_reports_does_not_depend_on_who_of_it_is_trained(names: list[str] | None) -> None:
    """Two right, two that ran out of time before they were judged, one that the machine lost; the workers of a
    trajectory work side by side, and the last of its rows has the outcome."""
    keys, said = [], []
    for trajectory in range(5):
        ends = {"failure": "", "reward_extra_info": {"acc": 1.0}}
        if trajectory >= 2:
            ends = {"failure": "time_limit" if trajectory < 4 else "infra", "reward_extra_info": {}}
        for row, (agent, turn) in enumerate((("planner", 0), ("worker", 1), ("worker", 1))):
            keys.append(f"u_{trajectory}_{row}")
            fields = {"agent_id": agent, "turn_index": turn, "turn_reward": 0.0, "valid_row": trajectory < 4}
            said.append({**fields, **(ends if row == 2 else {"failure": "", "reward_extra_info": {"acc": 0.25}})})
    config = OmegaConf.create({"algorithm": {"gamma": 1.0}, "verl_ext": {"train_agents": names}})
    columns, missing = row_fields(keys, [{}] * 15, said)
    active = ActiveBatch(columns=columns, missing=missing, extra_fields=said, keys=keys, tags=[{}] * len(keys))
    batch = SimpleNamespace(keys=keys, tags=[{}] * 15)
    if names:
        train_agents.TrainAgents(config).on_batch(batch, active, {})
    part = rollouts.Rollouts(config)
    part.on_batch(batch, active, {})
    assert part.metrics == {
        "trajectory/acc": 0.5,
        "rollout/failed_trajectories": 3.0,
        "rollout/failures/time_limit": 2.0,
        "rollout/failures/infra": 1.0,
    }
