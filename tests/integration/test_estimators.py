# SPDX-License-Identifier: Apache-2.0
"""Registered names: callable by hand with verl's arguments, fed by the trainer, mixed by weights."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import verl.trainer.ppo.core_algos as core_algos
import yaml
from omegaconf import OmegaConf

from verl_ext.integration import columns, estimators, metrics
from verl_ext.integration.estimators import ESTIMATORS
from verl_ext.integration.mix import weights
from verl_ext.integration.settings.options import OptionError
from verl_ext.recipes import find_recipe

OURS = ["trloo", "dr_mas", "hgpo", "gigpo", "otb", "maxrl"]


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


def test_help_shows_the_fields_of_the_method() -> None:
    fn = core_algos.get_adv_estimator_fn("hgpo")
    shown = inspect.signature(fn).parameters
    assert list(shown)[:4] == ["token_level_rewards", "response_mask", "index", "config"]
    assert {"traj_uid", "turn_index", "anchor_obs", "turn_reward", "is_action_valid", "valid_row"} < set(shown)
    assert not {"gamma", "mode"} & set(shown)
    assert "history_length" in fn.__doc__ and "anchor_obs: [B]" in fn.__doc__ and fn.__name__ == "hgpo"


def test_options_come_from_the_node_then_from_verls_key_then_from_the_signature() -> None:
    def settings(name: str, **node: Any) -> dict[str, Any]:
        return ESTIMATORS[name].settings(OmegaConf.create(node))

    assert settings("hgpo")["gamma"] == 0.95 and settings("hgpo", gamma=0.5)["gamma"] == 0.5
    assert settings("hgpo", gamma=0.5, hgpo={"gamma": 0.9})["gamma"] == 0.9
    assert settings("dr_mas", norm_adv_by_std_in_grpo=False)["norm_by_std"] is False
    assert settings("dr_mas", norm_adv_by_std_in_grpo=False, dr_mas={"norm_by_std": True})["norm_by_std"] is True
    assert settings("dr_mas", dr_mas={"norm_by_std": None, "group_by": None}, norm_adv_by_std_in_grpo=True) == {
        "level": "agent",
        "statistics": "both",
        "norm_by_std": True,
        "std": "released",
        "invalid_action_penalty_coef": 0.1,
        "epsilon": 1e-6,
        "group_by": None,
    }


@pytest.mark.parametrize("name", OURS)
def test_a_recipe_states_the_defaults_of_the_signature(name: str) -> None:
    recipe = yaml.safe_load(find_recipe(name).path.read_text())["algorithm"]
    own = {option: parameter.default for option, parameter in ESTIMATORS[name].parameters.options.items()}
    if "gamma" in own:
        assert recipe["gamma"] == own.pop("gamma")
    stated = recipe[name]
    if name == "dr_mas":  # null: verl's own key, which is true
        assert stated["norm_by_std"] is None and own["norm_by_std"] is True
        stated["norm_by_std"] = True
    assert {key: tuple(value) if isinstance(value, list) else value for key, value in stated.items()} == own


@pytest.mark.parametrize("name", [*OURS, "mix"])
def test_in_a_training_process_an_estimator_does_not_guess(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the trainer's batch TRLOO would take every row for a trajectory of its own."""
    data = {key: value for key, value in batch().items() if key in VERLS}
    monkeypatch.setenv("VERL_EXT_STRICT", "1")
    with pytest.raises(columns.RowFieldMissing, match=f"'{name}' was called in a training process.*trainer.use_v1"):
        call(name, data, OmegaConf.create({"mix": {"trloo": 1.0}}))


def test_groups_by_a_field_of_the_users_own() -> None:
    data = batch()
    levels = [f"level {i % 2}" for i in range(len(data["index"]))]
    config = OmegaConf.create({"otb": {"group_by": ["index", "level"]}})
    by_hand, _ = core_algos.get_adv_estimator_fn("otb")(**data, level=levels, config=config)
    assert not torch.equal(by_hand, call("otb", data, None)[0])
    rest = {key: value for key, value in data.items() if key not in VERLS}
    rest["valid_row"] = np.ones(len(levels), dtype=bool)
    with columns.active(columns.ActiveBatch(dict(rest), extra_fields=[{"level": level} for level in levels])):
        in_run, _ = call("otb", {key: data[key] for key in VERLS}, config)
    assert torch.equal(by_hand, in_run)
    lacking = columns.ActiveBatch(dict(rest), extra_fields=[{"level": "a"}, *[{"other": 1}] * (len(levels) - 1)])
    with columns.active(lacking), pytest.raises(columns.RowFieldMissing, match="'level'.*35 of 36 turns lack it"):
        call("otb", {key: data[key] for key in VERLS}, config)


@pytest.mark.parametrize(
    ("field", "message"),
    [("agentid", "did you mean 'agent_id'"), ("turn_idx", "did you mean 'turn_index'"), ("entropy", "entry a token")],
)
def test_a_misspelled_group_field_is_refused_at_launch(field: str, message: str) -> None:
    node = OmegaConf.create({"trloo": {"group_by": ["index", field]}})
    with pytest.raises(OptionError, match=message):
        estimators.check(node, ["trloo"])
    estimators.check(OmegaConf.create({"trloo": {"group_by": ["index", "difficulty"]}}), ["trloo"])


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
    assert out["agent/a/turns"] == 1 and out["agent/b/score/mean"] == 4
    assert out["advantage/effective_turns"] == pytest.approx(121 / 85)


def test_a_row_of_rounding_size_carries_no_signal() -> None:
    fields = {"valid_row": np.array([True, True, True, False])}
    advantages = torch.tensor([[0.5, 0.0], [1e-8, -1e-8], [0.0, 7.0], [9e9, 0.0]])
    out = metrics.learning_signal(fields, advantages, torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]]))
    assert out["advantage/zero_turn_share"] == pytest.approx(2 / 3)
    assert metrics.learning_signal(fields, 0 * advantages, torch.ones(4, 2))["advantage/zero_turn_share"] == 1.0


def test_responses_at_the_limit_are_those_that_fill_it() -> None:
    """Of four rows one is as long as the limit; the longest of the others is as long as verl's clip_ratio counts."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0], [1, 0, 0, 0]])
    valid = {"valid_row": np.array([True, True, True, True])}
    assert metrics.at_limit(valid, mask, 4) == {"rollout/responses_at_limit": 0.25}
    assert metrics.at_limit(valid, mask[1:, :3].repeat(2, 1)[:4], 8) == {"rollout/responses_at_limit": 0.0}
    assert (
        metrics.at_limit({"valid_row": np.array([False, True, True, False])}, mask, 4)["rollout/responses_at_limit"]
        == 0.0
    )
    assert metrics.at_limit({"valid_row": np.zeros(4, bool)}, mask, 4) == {}


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
