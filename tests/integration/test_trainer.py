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
from verl_ext.integration.dvp import Pruning
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
        ("get_llm_client", ()),
        ("_compute_old_log_prob", ("batch", {})),
        ("_compute_ref_log_prob", ("batch", {})),
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


def verl_batch(sessions: int = 4, outputs: int = 2, length: int = 3) -> tuple[Any, list[str]]:
    """One prompt, several samples of several outputs, as V1 hands them to the advantage computation."""
    from verl import DataProto

    keys = [f"u_{session}_{output}" for session in range(sessions) for output in range(outputs)]
    generator = torch.Generator().manual_seed(0)
    rewards = torch.zeros(len(keys), length)
    rewards[:, -1] = torch.rand(len(keys), generator=generator)
    batch = DataProto.from_dict(
        tensors={
            "token_level_scores": rewards,
            "token_level_rewards": rewards.clone(),
            "response_mask": torch.ones(len(keys), length),
        },
        non_tensors={"uid": np.array(["u"] * len(keys), dtype=object)},
    )
    return batch, keys


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline", "trloo"])
def test_mixture_of_one_in_the_trainer_is_what_verl_would_compute(name: str) -> None:
    """For GRPO, V1 compares the last outputs of the sessions and broadcasts; a mixture of GRPO alone must too."""
    from verl.trainer.ppo.v1 import trainer_base

    config = OmegaConf.create(
        {"adv_estimator": name, "gamma": 1.0, "mix": {name: 1.0}, "norm_adv_by_std_in_grpo": True}
    )

    class Verl:
        """Stands for the trainer above the mixin: it makes the one call that the mixin wraps."""

        def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
            data, keys = verl_batch()
            return trainer_base.compute_advantage_for_multi_trajectories(
                data, batch_keys=keys, adv_estimator=self.asked, config=config, norm_adv_by_std_in_grpo=True
            )

    class Trainer(VerlExtTrainer, Verl):
        def __init__(self, asked: str) -> None:
            self.asked, self._verl_ext, self._needs, self._variance_batch = asked, True, set(), None
            self.config = OmegaConf.create({"verl_ext": {}})
            self._pruning = Pruning(self.config)

        def _active_batch(self, batch: Any) -> columns.ActiveBatch:
            _, keys = verl_batch()
            found, missing = columns.row_fields(keys, [{}] * len(keys), [{"turn_reward": 0.1 * i} for i in range(8)])
            return columns.ActiveBatch(columns=found, missing=missing)

        def _completeness(self, batch: Any) -> dict[str, float]:
            return {}

    metrics: dict[str, Any] = {}
    mixed = Trainer("mix")._compute_advantage(None, metrics).batch
    plain = (Trainer(name)._compute_advantage(None, {}) if name == "trloo" else plain_verl(name, config)).batch
    assert torch.equal(mixed["advantages"], plain["advantages"]) and torch.equal(mixed["returns"], plain["returns"])
    assert mixed["advantages"].abs().sum() > 0 and metrics["trajectory/turns/mean"] == 2
    if name == "grpo":
        assert torch.equal(mixed["advantages"][0::2], mixed["advantages"][1::2])


def plain_verl(name: str, config: Any) -> Any:
    """verl's own computation, without the mixin."""
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    data, keys = verl_batch()
    return compute_advantage_for_multi_trajectories(data, keys, name, config=config, norm_adv_by_std_in_grpo=True)
