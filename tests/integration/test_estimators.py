# SPDX-License-Identifier: Apache-2.0
"""Registered names: callable by hand with verl's arguments, fed by the trainer, mixed by weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import verl.trainer.ppo.core_algos as core_algos
from omegaconf import OmegaConf

from verl_ext.integration import columns, metrics
from verl_ext.integration.mix import weights
from verl_ext.integration.options import OptionError

OURS = ["trloo", "dr_mas", "hgpo", "gigpo", "otb"]


def batch(prompts: int = 3, samples: int = 4, turns: int = 3, length: int = 6, seed: int = 0) -> dict[str, Any]:
    """A full set of columns; the observations of a prompt repeat, so that every level has groups."""
    random = np.random.default_rng(seed)
    rows = [(p, s, t) for p in range(prompts) for s in range(samples) for t in range(turns)]
    size = len(rows)
    tokens = torch.from_numpy(random.integers(1, length + 1, size))
    mask = (torch.arange(length) < tokens[:, None]).long()
    outcome = {(p, s): float(random.integers(0, 2)) for p in range(prompts) for s in range(samples)}
    rewards = torch.zeros(size, length)
    rewards[torch.arange(size), tokens - 1] = torch.tensor([outcome[p, s] for p, s, _ in rows])
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": np.array([f"p{p}" for p, _, _ in rows], dtype=object),
        "traj_uid": np.array([f"p{p}_{s}" for p, s, _ in rows], dtype=object),
        "turn_index": np.array([t for _, _, t in rows]),
        "agent_id": np.array([f"agent{t % 2}" for _, _, t in rows], dtype=object),
        "anchor_obs": np.array([f"room {random.integers(0, 2)}" for _ in rows], dtype=object),
        "turn_reward": random.normal(size=size),
        "is_action_valid": random.random(size) < 0.8,
        "old_log_probs": -torch.from_numpy(random.random((size, length))).float(),
        "sum_pi_squared": torch.from_numpy(random.random((size, length))).float(),
    }


def call(name: str, data: dict[str, Any], config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return core_algos.get_adv_estimator_fn(name)(**data, config=config)


VERLS = ("token_level_rewards", "response_mask", "index")


@pytest.mark.parametrize("name", OURS)
def test_by_hand_and_through_the_trainer_are_the_same(name: str) -> None:
    """By hand every column is an argument; in a run verl passes three and the active batch has the rest."""
    data = batch()
    by_hand = call(name, data, OmegaConf.create({"gamma": 0.9}))
    rest = {key: value for key, value in data.items() if key not in VERLS}
    rest["valid_row"] = np.ones(len(data["index"]), dtype=bool)
    active = columns.ActiveBatch(columns=rest)
    with columns.active(active):
        in_run = call(name, {key: data[key] for key in VERLS}, OmegaConf.create({"gamma": 0.9}))
    for one, two in zip(by_hand, in_run, strict=True):
        assert one.dtype == torch.float32 and one.shape == data["response_mask"].shape
        assert torch.equal(one, two) and torch.isfinite(one).all() and one.abs().sum() > 0
    assert active.metrics and all(np.isfinite(value) for value in active.metrics.values())
    assert all(key.startswith(f"{name}/") for key in active.metrics)


NEEDS = {
    "trloo": "turn_reward",
    "dr_mas": "agent_id",
    "hgpo": "anchor_obs",
    "gigpo": "anchor_obs",
    "otb": "sum_pi_squared",
}


@pytest.mark.parametrize(("name", "field"), NEEDS.items())
def test_missing_column_is_named_with_its_remedy(name: str, field: str) -> None:
    data = batch()
    rest = {key: value for key, value in data.items() if key not in (*VERLS, field)}
    active = columns.ActiveBatch(columns=rest, missing={field: "36 of 36 rows lack it, the first is p0_0_0"})
    with columns.active(active), pytest.raises(columns.RowFieldMissing) as error:
        call(name, {key: data[key] for key in VERLS}, None)
    assert name in str(error.value) and repr(field) in str(error.value) and "the first is p0_0_0" in str(error.value)


@pytest.mark.parametrize("name", [*OURS, "rloo", "grpo", "reinforce_plus_plus_baseline"])
def test_mixture_of_one_is_the_estimator_bit_for_bit(name: str) -> None:
    data = batch()
    config = OmegaConf.create({"gamma": 0.9, "mix": {name: 1.0}, "norm_adv_by_std_in_grpo": True})
    if name == "grpo":
        plain = core_algos.compute_grpo_outcome_advantage(*(data[key] for key in VERLS), norm_adv_by_std_in_grpo=True)
    else:
        plain = call(name, data if name in OURS else {key: data[key] for key in VERLS}, config)
    mixed = call("mix", data if name in OURS else {key: data[key] for key in VERLS}, config)
    for one, two in zip(plain, mixed, strict=True):
        assert torch.equal(one, two)


def test_mixture_is_the_weighted_sum_and_says_what_each_part_brings() -> None:
    data = batch()
    config = OmegaConf.create({"gamma": 0.9, "mix": {"trloo": 3.0, "hgpo": 1.0, "gigpo": 0.0}})
    parts = {name: call(name, data, config)[0] for name in ("trloo", "hgpo")}
    active = columns.ActiveBatch(columns={key: data[key] for key in data if key not in VERLS})
    with columns.active(active):
        mixed, returns = call("mix", {key: data[key] for key in VERLS}, config)
    assert torch.allclose(mixed, 0.75 * parts["trloo"] + 0.25 * parts["hgpo"], atol=1e-6)
    assert active.metrics["mix/trloo/weight"] == 0.75
    assert active.metrics["mix/trloo/share"] + active.metrics["mix/hgpo/share"] == pytest.approx(1.0)
    chosen = data["response_mask"].bool()
    expected = np.corrcoef(parts["trloo"][chosen].numpy(), parts["hgpo"][chosen].numpy())[0, 1]
    assert active.metrics["mix/correlation/trloo-hgpo"] == pytest.approx(expected, abs=1e-6)

    config.mix_normalize = False
    raw, _ = call("mix", data, config)
    assert torch.allclose(raw, 4 * mixed, atol=1e-5)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({}, "algorithm.mix is empty"),
        ({"mix": {"mix": 1.0}}, "cannot contain itself"),
        ({"mix": {"trlo": 1.0}}, "algorithm.mix.trlo: no estimator"),
        ({"mix": {"trloo": "much"}}, "algorithm.mix.trloo is 'much'"),
        ({"mix": {"trloo": 1.0, "otb": -1.0}}, "add up to 0.0; they cannot be normalised"),
        ({"mix": {"trloo": 1.0}, "mix_normalize": "yes"}, "mix_normalize is 'yes'"),
    ],
)
def test_bad_mixture_is_named(node: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        weights(OmegaConf.create(node))


def test_agent_metrics_split_the_gradient_energy() -> None:
    advantages = torch.tensor([[3.0, 0.0], [1.0, 1.0], [9.0, 9.0]])
    mask = torch.tensor([[1, 0], [1, 1], [1, 1]])
    fields = {
        "valid_row": np.array([True, True, False]),
        "agent_id": np.array(["a", "b", "a"], dtype=object),
        "score": np.array([2.0, 4.0, 100.0]),
    }
    out = metrics.learning_signal(fields, advantages, mask)
    assert out["agent/a/gradient_energy_share"] == pytest.approx(9 / 11)
    assert out["agent/b/gradient_energy_share"] == pytest.approx(2 / 11)
    assert out["agent/a/rows"] == 1 and out["agent/b/score/mean"] == 4
    assert out["advantage/effective_rows"] == pytest.approx(121 / 85)


def test_trajectory_metrics_count_each_trajectory_once() -> None:
    fields = {
        "valid_row": np.array([True, True, True, False]),
        "traj_uid": np.array(["u_0", "u_0", "u_1", "u_1"], dtype=object),
        "turn_reward": np.array([1.0, 2.0, 5.0, 100.0]),
        "score": np.array([3.0, 3.0, 5.0, 5.0]),
        "is_action_valid": np.array([True, False, True, True]),
    }
    out = metrics.trajectory_metrics(fields)
    assert out["trajectory/reward/mean"] == 4.0 and out["trajectory/reward/max"] == 5.0
    assert out["trajectory/turns/mean"] == 1.5
    assert out["rollout/valid_action_share"] == pytest.approx(2 / 3)
    del fields["turn_reward"]
    assert metrics.trajectory_metrics(fields)["trajectory/reward/mean"] == 4.0


def test_level_metrics() -> None:
    out = metrics.level_metrics("hgpo", [np.array([0, 0, 1, 2, 2, 2]), np.array([0, 1])], rows=6)
    assert out["hgpo/level_1/usable_share"] == pytest.approx(5 / 6)
    assert out["hgpo/level_1/groups/1"] == 1 and out["hgpo/level_1/groups/2_3"] == 2
    assert out["hgpo/level_2/usable_share"] == 0.0
