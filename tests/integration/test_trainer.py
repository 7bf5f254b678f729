# SPDX-License-Identifier: Apache-2.0
"""The mixin over verl's three V1 trainers: in front of each, silent in runs that are not ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import verl.trainer.ppo.v1 as v1
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_ext.integration import columns, parts
from verl_ext.integration.compat import wraps
from verl_ext.integration.models.lead import LeadMixin
from verl_ext.integration.models.separate import SeparateLead
from verl_ext.integration.models.side import ModelSide
from verl_ext.integration.parts import checkpoints, uses_verl_ext
from verl_ext.integration.parts.advantage import methods
from verl_ext.integration.parts.advantage.methods import complete
from verl_ext.integration.parts.base import Part
from verl_ext.integration.parts.reduction import reduced
from verl_ext.integration.parts.update.length_lr import LengthLearningRate
from verl_ext.integration.trainer import VerlExtTrainer, extend_registry

MODES = {
    "sync": v1.PPOTrainerSync,
    "colocate_async": v1.PPOTrainerColocateAsync,
    "separate_async": v1.PPOTrainerSeparateAsync,
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_the_mixin_under_its_own_name(mode: str) -> None:
    trainer = v1.get_trainer_cls(mode)
    own = (SeparateLead,) if mode == "separate_async" else ()
    assert trainer.__mro__[1 : 5 + len(own)] == (VerlExtTrainer, *own, LeadMixin, ModelSide, MODES[mode])
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
        ("_update_critic", ("batch", {})),
        ("_balance_batch", ("batch", {})),
        ("_get_required_batch_multiple", (2,)),
        ("_compute_values", ("batch", {})),
        ("_rollout_server_managers", ()),
        ("_get_n_gpus_for_throughput", ()),
    ],
)
def test_a_run_that_is_not_ours_goes_straight_to_verl(
    mode: str, method: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(MODES[mode], method, lambda self, *given: seen.append(given) or "verl's answer")
    cls = v1.get_trainer_cls(mode)
    trainer = cls.__new__(cls)
    assert trainer.parts == ()
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
    complete(active, data(torch.tensor([[0.0, 3.0], [0.0, 3.0]]), torch.tensor([[-0.5, 3.0], [0.0, 2.5]])))
    assert active.columns["turn_reward"].tolist() == [0.5, 1.5]
    assert active.columns["score"].tolist() == [2.5, 2.5]


def test_single_turn_rows_bring_their_own_reward_and_several_do_not() -> None:
    one = torch.tensor([[0.0, 3.0], [1.0, 0.0]])
    fields = {"valid_row": np.array([True, True]), "traj_uid": np.array(["a", "b"])}
    active = columns.ActiveBatch(columns=fields, missing={"turn_reward": "absent"})
    complete(active, data(one, one))
    assert active.columns["turn_reward"].tolist() == [3.0, 1.0]
    fields = {"valid_row": np.array([True, True]), "traj_uid": np.array(["a", "a"])}
    active = columns.ActiveBatch(columns=fields, missing={"turn_reward": "absent"})
    complete(active, data(one, one))
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
            self.asked, self.config = asked, OmegaConf.create({"algorithm": config})
            self.parts = (methods.Methods(self.config),)
            _, keys = verl_batch()
            found, missing = columns.row_fields(keys, [{}] * len(keys), [{"turn_reward": 0.1 * i} for i in range(8)])
            self._rows = columns.ActiveBatch(columns=found, missing=missing)

    trainer = Trainer("mix")
    mixed = trainer._compute_advantage(None, {}).batch
    plain = (Trainer(name)._compute_advantage(None, {}) if name == "trloo" else plain_verl(name, config)).batch
    assert torch.equal(mixed["advantages"], plain["advantages"]) and torch.equal(mixed["returns"], plain["returns"])
    assert mixed["advantages"].abs().sum() > 0 and trainer.parts[0].metrics["trajectory/turns/mean"] == 2
    if name == "grpo":
        assert torch.equal(mixed["advantages"][0::2], mixed["advantages"][1::2])


def plain_verl(name: str, config: Any) -> Any:
    """verl's own computation, without the mixin."""
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    data, keys = verl_batch()
    return compute_advantage_for_multi_trajectories(data, keys, name, config=config, norm_adv_by_std_in_grpo=True)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("mixed", [True, False])
def test_verls_estimators_see_the_rows_that_are_trained_on(name: str, mixed: bool) -> None:
    """Two of four samples are taken out: the others are compared with each other alone, the two get nothing."""
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories as verls

    asked = {"adv_estimator": "mix", "mix": {name: 1.0}} if mixed else {"adv_estimator": name}
    config = OmegaConf.create({**asked, "gamma": 1.0, "norm_adv_by_std_in_grpo": True})
    data, keys = verl_batch(sessions=4, outputs=1)
    data.batch["token_level_rewards"][:, -1] = torch.tensor([1.0, 0.0, 1.0, 0.0])
    found, missing = columns.row_fields(keys, [{}] * 4, [{"valid_row": value} for value in (True, True, False, False)])
    active = columns.ActiveBatch(columns=found, missing=missing)
    alone = verls(data.select_idxs(torch.tensor([0, 1])), keys[:2], name, config=config)
    settings = {"config": config, "norm_adv_by_std_in_grpo": True}
    got = methods.estimate(verls, data, keys, config.adv_estimator, active, **settings).batch
    assert torch.equal(got["advantages"][:2], alone.batch["advantages"]) and (got["advantages"][2:] == 0).all()
    assert torch.equal(got["returns"][:2], alone.batch["returns"]) and (got["returns"][2:] == 0).all()
    if name == "grpo":  # with all four rows it was .866, -.866, .866, -.866
        assert got["advantages"][:2, 0].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)


def test_metrics_are_reduced_by_what_they_are() -> None:
    """Two updates of a step, of 10 and 30 rows; verl adds up what has "sum" in its name and minimises "min"."""
    updates = [
        (
            10,
            {"agent/summarizer/score/mean": 1.0, "agent/examiner/score/std": 0.2, "updates/mini_batch_sequences": 8.0},
        ),
        (
            30,
            {"agent/summarizer/score/mean": 2.0, "agent/examiner/score/std": 0.6, "updates/mini_batch_sequences": 16.0},
        ),
    ]
    rest = {
        "agent/max/turns": (3.0, 4.0, 7.0),
        "agent/minimax/grad_norm/max": (1.0, 9.0, 9.0),
        "actor/second/kpo/log_ratio_abs_max": (1.0, 9.0, 9.0),
        "updates/mini_batch_tokens/min": (5.0, 4.0, 4.0),
        "rollout/trajectories": (4, 4, 8),
        "rollout/failures/timeout at max": (1.0, 2.0, 3.0),
        "trajectory/max": (1.0, 2.0, 1.75),
        "trajectory/reward/max": (1.0, 2.0, 2.0),
        "rollout/turns_of_other_agents": (6.0, 5.0, 11.0),
        "model/policy/sequences": (3, 4, 7),
        "model/policy/tokens": (100, 300, 400),
        "timing_s/policy/update_actor": (5.0, 2.0, 7.0),
    }
    for name, (first, second, _) in rest.items():
        updates[0][1][name], updates[1][1][name] = first, second
    found = reduced(updates)
    assert found.pop("agent/summarizer/score/mean") == pytest.approx(1.75)
    assert found.pop("agent/examiner/score/std") == pytest.approx(0.5)
    assert found.pop("updates/mini_batch_sequences") == pytest.approx(14.0)
    assert found == {name: expected for name, (_, _, expected) in rest.items()}


def test_names_of_agents_do_not_choose_how_the_trainer_reduces() -> None:
    """Through verl's own `step` with two updates: what the parts report, beside what verl aggregates."""

    class Twice(PPOTrainer):
        def __init__(self) -> None:
            self.config = OmegaConf.create({"data": {"train_batch_size": 2}})
            self.parameter_sync_step = 2

        def prepare_step(self) -> dict[str, Any]:
            return {}

        def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int) -> Any:
            metrics["verls/sum"] = 1.0
            part.metrics["agent/summarizer/score/mean"] = float(self.local_trigger_step)
            return SimpleNamespace(keys=[f"u_{self.local_trigger_step}_0"], tags=[{}], partition_id="train")

        on_step_end = on_sample_end = prepare_step

    class Trainer(VerlExtTrainer, Twice):
        def __init__(self) -> None:
            Twice.__init__(self)
            self.parts, self._updates_metrics = (part,), []

    part, metrics = Part(None), {}
    Trainer().step(metrics, {})
    assert metrics == {"verls/sum": 2.0, "agent/summarizer/score/mean": 0.5} and part.metrics == {}


class Counter(Part):
    """A part with state."""

    key = "counter"
    count = 0

    def state(self) -> dict[str, Any]:
        return {"count": self.count, "drawn": torch.arange(3)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"]) + int(state["drawn"].sum())


def test_state_of_parts_is_in_the_checkpoint(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path), "resume_mode": "auto"}})
    before, after, without = Counter(config), Counter(config), Part(config)
    before.count = 5
    checkpoints.save(config, 3, [without, before])
    checkpoints.load(config, 0, [after])  # verl found no checkpoint
    assert after.count == 0
    checkpoints.load(config, 3, [without, after])
    assert after.count == 8
    checkpoints.save(config, 4, [without])
    assert not (tmp_path / "global_step_4").exists()
    checkpoints.load(config, 4, [after])
    assert "counter start afresh" in caplog.text
    config.trainer.update(resume_mode="resume_path", resume_from_path=str(tmp_path / "global_step_3"))
    checkpoints.load(config, 3, [after])
    assert after.count == 8

    class Renamed(Counter):
        key = "other"

    caplog.clear()
    checkpoints.load(config, 3, [Renamed(config)])
    assert "no state of other" in caplog.text and "no use for: counter" in caplog.text

    with pytest.raises(TypeError, match="Nameless has a state and no `key`"):
        type("Nameless", (Counter,), {"key": ""})


def test_a_state_that_begins_empty_is_resumed(tmp_path: Any) -> None:
    class Notes(Part):
        key = "notes"

        def __init__(self, config: Any, trainer: Any = None) -> None:
            super().__init__(config, trainer)
            self.taken: dict[str, Any] = {}

        def state(self) -> dict[str, Any]:
            return self.taken

        def load_state(self, state: dict[str, Any]) -> None:
            self.taken = state

    config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path), "resume_mode": "auto"}})
    before, after = Notes(config), Notes(config)
    before.taken["a"] = 1
    checkpoints.save(config, 3, [before])
    checkpoints.load(config, 3, [after])
    assert after.taken == {"a": 1}


def test_two_parts_with_one_key_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_PARTS", list(parts._PARTS))
    other = type("Other", (Counter,), {"key": "LengthLearningRate"})
    with pytest.raises(ValueError, match="LengthLearningRate and Other have the same key"):
        parts.insert(other, after=LengthLearningRate)


def test_a_checkpoint_of_before_the_move_is_read() -> None:
    assert LengthLearningRate.key == "LengthLearningRate"  # the name in checkpoints of 0.2


def test_a_package_puts_a_part_among_ours(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stopwatch.py").write_text(
        "from verl_ext.integration import parts\nfrom verl_ext.integration.parts.base import Part\n"
        "class Stopwatch(Part):\n    pass\n"
        "def register():\n    from verl_ext.integration.parts.update.updates import Updates\n"
        "    parts.insert(Stopwatch, after=Updates)\n"
    )
    folder = tmp_path / "stopwatch-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: stopwatch\nVersion: 1\n")
    points = folder / "entry_points.txt"
    points.write_text("[verl_ext.parts]\nstopwatch = stopwatch:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("_PARTS", "_called"):
        monkeypatch.setattr(parts, name, list(getattr(parts, name)))
    names = [part.__name__ for part in parts.all_parts()]
    assert names[names.index("Updates") + 1] == "Stopwatch" and names.count("Stopwatch") == 1
    assert [part.__name__ for part in parts.all_parts()] == names
    points.write_text("[verl_ext.parts]\nstopwatch = stopwatch:absent\n")
    with pytest.raises(RuntimeError, match=r"stopwatch = stopwatch:absent \(verl_ext.parts\) failed"):
        parts.all_parts()


@pytest.mark.parametrize("name", ["dr_mas", "trloo", "grpo"])
def test_agents_with_a_reward_each_are_compared_by_their_own(name: str) -> None:
    """Two games of two players: verl stores one score a trajectory, and no estimator may mix the players."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    keys = [f"u_{game}_{turn}" for game in (0, 1) for turn in range(4)]
    wins = [1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 1.0]
    said = [{"agent_id": f"player_{turn % 2}", "turn_reward": 0.0} for turn in range(8)]
    for row, reward in zip(said, wins, strict=True):
        row["agent_reward"] = reward
    for row in (2, 3, 6, 7):
        said[row]["turn_reward"] = wins[row]
    found, missing = columns.row_fields(keys, [{}] * 8, said)
    active = columns.ActiveBatch(columns=found, missing=missing, extra_fields=said)
    zeros = torch.zeros(8, 2)
    tensors = {"response_mask": torch.tensor([[1, 1], [1, 0]] * 4)}
    tensors |= {"token_level_scores": zeros, "token_level_rewards": zeros}
    uids = np.array(["u"] * 8, dtype=object)
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})
    methods.complete(active, data)
    assert data.batch["token_level_rewards"].sum(-1).tolist() == wins
    assert data.batch["token_level_rewards"][1].tolist() == [-1.0, 0.0] and not zeros.any()
    config = OmegaConf.create({"gamma": 1.0, "trloo": {"group_by": ["index"]}, "norm_adv_by_std_in_grpo": True})
    estimated = methods.estimate(
        compute_advantage_for_multi_trajectories,
        data,
        keys,
        AdvantageEstimator(name) if name == "grpo" else name,
        active,
        config=config,
    )
    advantages = estimated.batch["advantages"][:, 0]
    assert torch.equal(advantages.sign(), torch.tensor(wins))
    assert active.columns["traj_uid"].tolist() == ["u_0"] * 4 + ["u_1"] * 4


def test_a_failed_trajectory_without_the_rewards_of_its_agents_is_named() -> None:
    said = [{"agent_id": "player_0", "agent_reward": 1.0}, {"agent_id": "player_0"}]
    with pytest.raises(columns.BatchError, match="turn u_1_0 has no agent_reward, but turn u_0_0 of the same prompt"):
        columns.row_fields(["u_0_0", "u_1_0"], [{}] * 2, said)
    columns.row_fields(["u_0_0", "v_1_0"], [{}] * 2, said)  # another prompt may have a team with one reward
    columns.row_fields(["u_0_0", "u_1_0"], [{}] * 2, [said[0], {**said[1], "valid_row": False}])


@pytest.mark.parametrize("name", ["grpo", "rloo", "gigpo", "hgpo", "otb", "trloo", "dr_mas", "mix"])
def test_agents_with_a_reward_each_are_not_compared_with_each_other(name: str) -> None:
    """One player wins all games of the prompt, the other loses all: neither has anything to learn."""
    from verl.protocol import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    keys = [f"u_{game}_{row}" for game in range(4) for row in range(2)]
    said = [
        {"agent_id": f"player_{row}", "agent_reward": 1.0 - 2 * row, "turn_reward": 1.0 - 2 * row, "turn_index": turn}
        for row, turn in [(0, 0), (1, 1), (1, 0), (0, 1)] * 2  # whose turn it is says nothing of who it is
    ]
    for row in said:
        row["anchor_obs"] = "an empty board"
    found, missing = columns.row_fields(keys, [{}] * 8, said)
    active = columns.ActiveBatch(columns=found, missing=missing, extra_fields=said)
    zeros, ones = torch.zeros(8, 2), torch.ones(8, 2)
    tensors = {"response_mask": ones.long(), "token_level_scores": zeros, "token_level_rewards": zeros}
    tensors |= {"old_log_probs": -ones, "sum_pi_squared": 0.5 * ones}
    uids = np.array(["u"] * 8, dtype=object)
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})
    methods.complete(active, data)

    def estimate(**options: Any) -> torch.Tensor:
        config = OmegaConf.create({"gamma": 1.0, "mix": {"grpo": 1.0, "gigpo": 1.0, "dr_mas": 1.0}, **options})
        asked = AdvantageEstimator(name) if name in ("grpo", "rloo") else name
        out = methods.estimate(compute_advantage_for_multi_trajectories, data, keys, asked, active, config=config)
        assert out.non_tensor_batch["uid"].tolist() == ["u"] * 8
        return out.batch["advantages"]

    torch.testing.assert_close(estimate(), zeros, rtol=0, atol=1e-6)
    if name == "dr_mas":  # the baseline over all agents is what it is
        assert estimate(dr_mas={"level": "global_rows"}).abs().min() > 0.5
