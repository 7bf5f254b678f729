# SPDX-License-Identifier: Apache-2.0
"""The mixin over verl's three V1 trainers: in front of each, silent in runs that are not ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import verl.trainer.ppo.v1 as v1
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_ext.integration import columns, wraps
from verl_ext.integration.trainer import VerlExtTrainer, _complete, extend_registry, uses_verl_ext

MODES = {
    "sync": v1.PPOTrainerSync,
    "colocate_async": v1.PPOTrainerColocateAsync,
    "separate_async": v1.PPOTrainerSeparateAsync,
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_the_mixin_under_its_own_name(mode: str) -> None:
    trainer = v1.get_trainer_cls(mode)
    assert trainer.__mro__[1] is VerlExtTrainer and trainer.__mro__[2] is MODES[mode]
    assert issubclass(trainer, PPOTrainer) and trainer.__name__ == MODES[mode].__name__
    extend_registry()
    assert v1.get_trainer_cls(mode) is trainer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("_build_replay_buffer", ()),
        ("fit", ("manager",)),
        ("_compute_old_log_prob", ("batch", {})),
        ("_compute_advantage", ("batch", {})),
        ("_update_actor", ("batch", {})),
    ],
)
def test_a_run_that_is_not_ours_goes_straight_to_verl(
    mode: str, method: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(MODES[mode], method, lambda self, *given: seen.append(given) or "verl's answer", raising=False)
    cls = v1.get_trainer_cls(mode)
    trainer = cls.__new__(cls)
    trainer._verl_ext = False
    assert getattr(trainer, method)(*arguments) == "verl's answer"
    assert seen == [arguments]


@pytest.mark.parametrize(
    ("config", "ours"),
    [
        ({"algorithm": {"adv_estimator": "grpo"}}, False),
        ({"algorithm": {"adv_estimator": "gae"}, "verl_ext": None}, False),
        ({"algorithm": {"adv_estimator": "trloo"}}, True),
        ({"algorithm": {"adv_estimator": "mix"}}, True),
        ({"algorithm": {"adv_estimator": "gae"}, "verl_ext": {}}, True),
    ],
)
def test_what_counts_as_ours(config: dict[str, Any], ours: bool) -> None:
    assert uses_verl_ext(OmegaConf.create(config)) is ours


def data(scores: torch.Tensor, rewards: torch.Tensor) -> Any:
    from verl import DataProto

    return DataProto.from_dict(tensors={"token_level_scores": scores, "token_level_rewards": rewards})


def test_kl_in_reward_reaches_the_rewards_of_turns() -> None:
    fields = {
        "turn_reward": np.array([1.0, 2.0]),
        "valid_row": np.array([True, True]),
        "traj_uid": np.array(["a", "a"]),
    }
    active = columns.ActiveBatch(columns=fields)
    _complete(active, data(torch.tensor([[0.0, 3.0], [0.0, 3.0]]), torch.tensor([[-0.5, 3.0], [0.0, 2.5]])))
    assert active.columns["turn_reward"].tolist() == [0.5, 1.5]
    assert active.columns["score"].tolist() == [2.5, 2.5]


def test_single_turn_rows_bring_their_own_reward_and_several_do_not() -> None:
    one = torch.tensor([[0.0, 3.0], [1.0, 0.0]])
    fields = {"valid_row": np.array([True, True]), "traj_uid": np.array(["a", "b"])}
    active = columns.ActiveBatch(columns=fields, missing={"turn_reward": "absent"})
    _complete(active, data(one, one))
    assert active.columns["turn_reward"].tolist() == [3.0, 1.0]
    fields = {"valid_row": np.array([True, True]), "traj_uid": np.array(["a", "a"])}
    active = columns.ActiveBatch(columns=fields, missing={"turn_reward": "absent"})
    _complete(active, data(one, one))
    assert "turn_reward" not in active.columns and active.missing == {"turn_reward": "absent"}


def test_changed_verl_is_named() -> None:
    target = wraps.Target("verl.utils.tracking", "NoSuchLogger", None, "verl 0.9.1", "to see it fail")
    with pytest.raises(
        wraps.UnsupportedVerl, match=r"verl\.utils\.tracking\.NoSuchLogger .*pip install 'verl>=0\.9\.1"
    ):
        target.resolve()
    target = wraps.Target("verl.utils.tracking", "FileLogger", ("file_name",), "verl 0.9.1", "to see it fail")
    with pytest.raises(wraps.UnsupportedVerl, match="no longer takes file_name"):
        target.resolve()


@pytest.mark.parametrize("name", [name for name in dir(wraps) if isinstance(getattr(wraps, name), wraps.Target)])
def test_every_wrap_finds_its_target(name: str) -> None:
    target = getattr(wraps, name)
    assert target.resolve() is not None and target.written_for.startswith("verl 0.9.1") and target.reason
