# SPDX-License-Identifier: Apache-2.0
"""Rejection rules as the trainer applies them, on batches in verl's store, through verl's own advantage computation."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import verl.trainer.ppo.v1 as v1
from hydra import compose, initialize_config_dir
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto

from verl_ext.integration import checks, columns
from verl_ext.integration.compat.wraps import STRICT
from verl_ext.integration.metrics import learning_signal
from verl_ext.integration.parts import all_parts, checkpoints
from verl_ext.integration.parts.advantage.columns import Columns, dicts
from verl_ext.integration.parts.advantage.methods import LearningSignal, Methods
from verl_ext.integration.parts.advantage.modifiers import Modifiers
from verl_ext.integration.parts.update import rejection
from verl_ext.integration.parts.update.length_lr import LengthLearningRate
from verl_ext.integration.parts.update.pruning import Outside, Pruning
from verl_ext.integration.settings.options import OptionError
from verl_ext.recipes import recipe_root, verl_config_dir

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "methods"))
from vector_cases import assert_expected, case_name, load_cases, token_field  # noqa: E402


def config(*overrides: str) -> Any:
    search = f"hydra.searchpath=[file://{recipe_root()}]"
    with initialize_config_dir(version_base=None, config_dir=str(verl_config_dir())):
        return compose("ppo_trainer", overrides=[search, "actor_rollout_ref.rollout.n=4", *overrides])


pytestmark = pytest.mark.slow  # starts Ray


# ---- at launch -----------------------------------------------------------------------------------------------------

TRM = ["+algorithm.rejection.trm=true", "actor_rollout_ref.rollout.name=embedded"]
EXACT = [*TRM, "+algorithm.trm.divergence=exact"]
TOP_K = [*TRM, "+algorithm.trm.divergence=top_k", "+algorithm.trm.memory_gib=0.1"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+algorithm.rejection.mrz=true"], r"algorithm\.rejection\.mrz: there is no such rule\. Known: mrs, prs, trm"),
        (["algorithm.rejection.mrs=2"], r"algorithm\.rejection\.mrs is 2; give true or false"),
        (["algorithm.mrs.level=word"], r"algorithm\.mrs\.level is 'word'; choose one of 'token', 'turn'"),
        (["algorithm.mrs.lower=1.1"], r"algorithm\.mrs: lower=1\.1 is above upper=1\.001"),
        (["+algorithm.mrs.uper=2"], r"algorithm\.mrs\.uper is not an option of mrs\. Did you mean 'upper'"),
        (["algorithm.rejection_normalise=some"], r"rejection_normalise is 'some'; choose one of 'all', 'kept'"),
        (["+algorithm.rejection.ser=true"], r"algorithm\.ser\.threshold has no default"),
        (
            ["+algorithm.rejection.trm=true", "+algorithm.trm.max=-1"],
            r"algorithm\.trm\.max is -1; it must be at least 0",
        ),
        ([*EXACT, "actor_rollout_ref.rollout.name=vllm"], r"divergence=exact needs .* asks vLLM for logprobs=0"),
        ([*EXACT, "trainer.v1.trainer_mode=separate_async"], r"trainer_mode=separate_async\. Set it to sync"),
        ([*EXACT, "actor_rollout_ref.model.use_fused_kernels=true"], r"exact .*use_fused_kernels=false"),
        ([*EXACT, "+dvp.rho=0.1"], r"their divergence is infinite\. Leave out dvp\.rho or trm"),
        ([*EXACT, "+algorithm.trm.top_k=0"], r"algorithm\.trm\.top_k is 0; it must be at least 1"),
        (
            [*TOP_K, "data.train_batch_size=1024"],
            r"1024 x n=4 x 512 tokens x 40 numbers take 0\.3 GiB.*memory_gib=0\.1",
        ),
        (["actor_rollout_ref.rollout.calculate_log_probs=false"], r"mrs compare .*calculate_log_probs=false"),
        (["algorithm.rollout_correction.bypass_mode=true"], r"mrs, but .*bypass_mode=true .*Set bypass_mode=false"),
        (["actor_rollout_ref.actor.strategy=megatron"], r"skipped in verl's FSDP engine; .*strategy=megatron"),
    ],
)
def test_what_cannot_be_is_said_at_launch(overrides: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        checks.check(config("+recipe=[trloo,mrs]", *overrides))


def test_sampler_is_asked_for_its_distribution_and_the_memory_is_estimated(tmp_path: Path) -> None:
    """Of the vocabulary of the model's folder; a batch may take 4 GiB unless the option says otherwise."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 151936}')
    model = f"actor_rollout_ref.model.path={tmp_path}"
    large = config("+recipe=[trloo,mrs]", *EXACT, model)
    with pytest.raises(
        OptionError, match=r"1024 x n=4 x 512 tokens x 151936 numbers take 1187\.0 GiB.*top_k or sampled"
    ):
        checks.check(large)
    small = config("+recipe=[trloo,mrs]", *EXACT, model, "data.train_batch_size=4", "data.max_response_length=64")
    checks.complete(small)
    assert checks.check(small) == []
    assert small.actor_rollout_ref.rollout.engine_kwargs.embedded.top_logprobs == -1
    (unknown,) = checks.check(config("+recipe=[trloo,mrs]", *EXACT, "actor_rollout_ref.model.path=/nowhere"))
    assert "was not estimated" in unknown
    lumped = config("+recipe=[trloo,mrs]", *TRM, "+algorithm.trm.divergence=top_k")
    checks.complete(lumped)
    assert lumped.actor_rollout_ref.rollout.engine_kwargs.embedded.top_logprobs == 20
    assert checks.check(lumped) == []
    plain = config("+recipe=[trloo,mrs]", *TRM)
    checks.complete(plain)
    assert "embedded" not in plain.actor_rollout_ref.rollout.engine_kwargs


def test_rules_add_up_and_one_may_be_switched_off() -> None:
    both = config("+recipe=[trloo,mrs]", "+algorithm.rejection.variance_filter=true")
    assert checks.check(both) == [] and rejection.wanted_rules(both) == ["mrs", "variance_filter"]
    off = config("+recipe=[trloo,mrs]", "algorithm.rejection.mrs=false")
    assert not rejection.RejectionRules.wanted(off)


# ---- a batch -------------------------------------------------------------------------------------------------------


class Tokenizer:
    """Words by number, joined by blanks."""

    words = ("plain", "```python\n", "x=1", "```", "\\boxed{1}")

    def decode(self, ids: torch.Tensor) -> str:
        return " ".join(self.words[int(token)] for token in ids)


MASKS = [[1, 1, 1, 1], [1, 1], [1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 0, 1], [1, 1], [1, 1], [0, 0]]
SHIFT = [0.0, 0.5, 0.0, 0.0, 0.0, -0.5, 0.0, 0.0]
"""log pi_train - log pi_rollout at every token of a row."""
REWARDS = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
WORDS = [[1, 2, 3, 0], [4, 4], [0, 0, 0], [1, 2, 3, 0, 0, 4], [4, 0, 0], [4, 0], [4, 4], [0, 0]]
"""Row 2 is a void turn; row 4 has one in its second stretch of model tokens."""


def put(store: Any, said: list[dict[str, Any]] | None = None, masks: list[list[int]] = MASKS) -> KVBatchMeta:
    """Two prompts, the first with three samples of which one has two turns (rows 2 and 3), and a row of padding.

    `masks` are what is left of them when the rules come, after pruning.
    """
    keys = ["a_0_0", "a_1_0", "a_2_0", "a_2_1", "b_0_0", "b_1_0", "b_2_0", "pad_0_0"]
    tags = [
        {"seq_len": len(mask) + 2, "is_padding": key.startswith("pad")} for key, mask in zip(keys, MASKS, strict=True)
    ]

    def jagged(make: Any) -> torch.Tensor:
        return torch.nested.as_nested_tensor([make(row) for row in range(len(MASKS))], layout=torch.jagged)

    fields = {
        "response_mask": jagged(lambda row: torch.tensor(masks[row])),
        "loss_mask": jagged(lambda row: torch.tensor(MASKS[row])),
        "responses": jagged(lambda row: torch.tensor(WORDS[row])),
        "old_log_probs": jagged(lambda row: torch.full((len(MASKS[row]),), -2.0)),
        "rollout_log_probs": jagged(lambda row: torch.full((len(MASKS[row]),), -2.0 - SHIFT[row])),
        "entropy": jagged(lambda row: torch.full((len(MASKS[row]),), 0.1 * (row + 1))),
        "rm_scores": jagged(lambda row: torch.tensor([0.0] * (len(MASKS[row]) - 1) + [REWARDS[row]])),
    }
    return put_fields(store, keys, tags, fields, said)


def put_fields(
    store: Any,
    keys: list[str],
    tags: list[dict[str, Any]],
    fields: dict[str, torch.Tensor],
    said: list[dict[str, Any]] | None = None,
) -> KVBatchMeta:
    column = [NonTensorData(row) for row in said or [{}] * len(keys)]
    uids = [NonTensorData(columns.split_key(key)[0]) for key in keys]
    rows = TensorDict(
        {**fields, "extra_fields": NonTensorStack(*column), "uid": NonTensorStack(*uids)}, batch_size=len(keys)
    )
    store.kv_batch_put(keys=keys, partition_id="train", fields=rows, tags=tags)
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train")


def trainer_of(cfg: Any) -> Any:
    """verl's trainer with ours in front, as far as the advantage goes."""
    checks.complete(cfg)
    checks.check(cfg)
    cls = v1.get_trainer_cls("sync")
    trainer = cls.__new__(cls)
    trainer.config, trainer.tokenizer = cfg, Tokenizer()
    tried = (Columns, rejection.RejectionRules, Pruning, Methods, Modifiers, LearningSignal)
    trainer.parts = tuple(part(cfg, trainer) for part in all_parts() if part in tried and part.wanted(cfg))
    trainer._rows = columns.ActiveBatch(columns={})
    return trainer


def advantage(trainer: Any, batch: KVBatchMeta) -> Any:
    """The batch as verl's trainer has it after its advantage."""
    for part in trainer.parts:
        batch = part.on_sample(batch)
    for part in trainer.parts:
        batch = part.on_batch(batch, trainer._rows, {})
    return trainer._compute_advantage(trainer._compute_old_log_prob(batch, {}) if bypass(trainer) else batch, {})


def bypass(trainer: Any) -> bool:
    return bool(trainer.config.algorithm.rollout_correction.bypass_mode)


def run(store: Any, *overrides: str, said: list[dict[str, Any]] | None = None) -> tuple[Any, KVBatchMeta]:
    """The part of rejection and the batch, after verl's GRPO advantage with the recipe `mrs`."""
    trainer = trainer_of(config("+recipe=[grpo,mrs]", *overrides))
    batch = advantage(trainer, put(store, said))
    return trainer.parts[1], batch


def test_a_token_that_is_only_out_of_the_loss_does_not_cut_a_turn_in_two(store: Any) -> None:
    """Pruning has taken the third token of row 0 out of the loss; the turn's text is whole, and not void."""
    pruned = [[1, 1, 0, 1], *MASKS[1:]]
    trainer = trainer_of(config("+recipe=[grpo,simpletir]"))
    batch = advantage(trainer, put(store, masks=pruned))
    assert stored(store, batch) == [[0] * len(mask) if row in (2, 3, 4) else mask for row, mask in enumerate(pruned)]


def stored(store: Any, batch: KVBatchMeta, name: str = "response_mask") -> list[list[Any]]:
    found = store.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=[name])
    return [row.tolist() for row in found[name].unbind()]


def emptied(*rows: int) -> list[list[int]]:
    return [[0] * len(mask) if row in rows else mask for row, mask in enumerate(MASKS)]


def test_a_rejected_row_leaves_the_loss_and_nothing_else(store: Any) -> None:
    _, batch = run(store, "algorithm.mrs.level=null", "algorithm.mrs.veto=null")
    assert stored(store, batch) == MASKS
    plain = stored(store, batch, "advantages")
    part, batch = run(store)
    assert stored(store, batch) == emptied(1, 5)  # e^0.5 and e^-0.5
    assert stored(store, batch, "advantages") == plain and plain[1][0] != 0  # of all samples of the prompt
    metrics = part.metrics
    assert metrics["rejection/kept_share"] == metrics["rejection/mrs/kept_share"] == pytest.approx(5 / 7)
    assert metrics["rejection/kept_tokens_share"] == pytest.approx(17 / 21)
    assert metrics["rejection/mrs/kept_share_length_q1"] == pytest.approx(2 / 4)
    assert metrics["rejection/mrs/kept_share_length_q4"] == 1.0
    for name, sign in (("positive", 1), ("negative", -1)):
        rows = [row for row in range(7) if np.sign(sum(plain[row])) == sign]
        kept = [row not in (1, 5) for row in rows]
        assert rows and metrics[f"rejection/mrs/kept_share_{name}"] == pytest.approx(np.mean(kept))
    assert metrics["rejection/mrs/statistic/p50"] == 1.0
    assert metrics["rejection/mrs/statistic/p95"] == pytest.approx(np.quantile(np.exp(SHIFT[:7]), 0.95))
    assert metrics["rejection/log_ppl_gap/mean"] == pytest.approx(-np.mean(SHIFT[:7]), abs=1e-7)
    assert metrics["rejection/mrs/log_ppl_gap/kept"] == 0.0
    engine = rejection.SkippedUpdates(part.config)
    with engine.around_update("actor", batch):
        assert batch.extra_info["verl_ext_normalise"] == "all"
        batch.extra_info.update(mini_batch_size=4, epochs=3)
    engine.after_update(verls := {"actor/skipped_share": 0.5})
    assert verls == {} and engine.metrics["rejection/skipped_updates/count"] == 3.0
    with pytest.raises(RuntimeError, match="has not said whether it skipped an update"):
        engine.after_update({})
    part.after_update({})
    assert stored(store, batch) == MASKS


@pytest.mark.parametrize(
    ("overrides", "rejected"),
    [
        ([], {1, 5}),
        (["algorithm.mrs.upper=2.0"], set()),
        (["algorithm.mrs.upper=2.0", "algorithm.mrs.lower=0.999"], {5}),
        (["algorithm.mrs.lower=1e-9"], {1}),
        (["algorithm.mrs.level=null"], set()),
        (["algorithm.mrs.level=null", "algorithm.mrs.veto=0.9"], {5}),
        (["+algorithm.rejection.trm=true", "algorithm.mrs.level=null", "+algorithm.trm.avg=null"], {1, 5}),
        (["+algorithm.rejection.ser=true", "algorithm.mrs.level=null", "+algorithm.ser.threshold=0.5"], {1}),
        (["+algorithm.rejection.variance_filter=true", "algorithm.mrs.level=null"], {4, 5, 6}),
        (["+algorithm.rejection.simpletir=true", "algorithm.mrs.level=null"], {2, 3, 4}),
        (["+algorithm.rejection.simpletir=true"], {1, 2, 3, 4, 5}),
    ],
)
def test_each_rule_on_the_rows_of_a_run(store: Any, overrides: list[str], rejected: set[int]) -> None:
    part, batch = run(store, *overrides)
    assert stored(store, batch) == emptied(*rejected)
    assert all(np.isfinite(value) for value in part.metrics.values())


@pytest.mark.parametrize(("winners", "kept"), [([1.0, -1.0, 1.0, -1.0], 24), ([1.0] * 4, 0)])
def test_agents_with_a_reward_each_are_judged_by_their_own_spread(winners: list[float], kept: int) -> None:
    """A zero-sum game: verl has the trajectory's score, 0 in each."""
    keys, said = [], []
    for game, reward in enumerate(winners):
        for turn, agent in enumerate(("cross", "nought")):
            keys.append(f"u_{game}_{turn}")
            said.append({"agent_id": agent, "agent_reward": -reward if turn else reward, "turn_reward": 0.0})
    found, missing = columns.row_fields(keys, [{}] * 8, said)
    active = columns.ActiveBatch(columns=found, missing=missing, extra_fields=said)
    scores = torch.zeros(8, 3)
    tensors = {"response_mask": torch.ones(8, 3, dtype=torch.int64), "token_level_scores": scores}
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(["u"] * 8, dtype=object)})
    part = rejection.RejectionRules(config("+recipe=[dr_mas,variance_filter]"))
    part.before_advantage(data, keys, active)
    assert int(part._kept.sum()) == kept
    assert active.columns["row_mask"].tolist() == [kept > 0] * 8


def test_the_field_that_prs_lacks_is_named() -> None:
    """`draw` is made of it, and is read of no row."""
    keys, said = ["u_0_0", "u_1_0"], [{"coverage": 0.5, "correct": True}] * 2
    found, missing = columns.row_fields(keys, [{}] * 2, said)
    active = columns.ActiveBatch(columns=found, missing=missing, extra_fields=said)
    uids = np.array(["u"] * 2, dtype=object)
    data = DataProto.from_dict(tensors={"response_mask": torch.ones(2, 3)}, non_tensors={"uid": uids})
    cfg = config("+recipe=grpo", "+algorithm.rejection.prs=true")
    part = rejection.RejectionRules(cfg, SimpleNamespace(global_steps=1))
    with pytest.raises(
        columns.RowFieldMissing, match=r"^prs needs the turn field 'prompt_index'.*\(extra_info\.index\)"
    ):
        part.before_advantage(data, keys, active)


def test_an_agent_loop_may_say_what_a_void_turn_is(store: Any) -> None:
    said = [{"void": row == 6} for row in range(len(MASKS))]
    _, batch = run(store, "+algorithm.rejection.simpletir=true", "algorithm.mrs.level=null", said=said)
    assert stored(store, batch) == emptied(6)


def test_exact_divergence_comes_from_the_engine_and_the_distributions_go(store: Any) -> None:
    from verl_ext.integration.engines.token_kl import COLUMN, IDS, LOG_PROBS, WANTED

    overrides = [*EXACT, "algorithm.mrs.level=null", "algorithm.mrs.veto=null", "+algorithm.trm.avg=null"]
    trainer = trainer_of(config("+recipe=[grpo,mrs]", *overrides, "+algorithm.trm.max=0.25"))
    part = trainer.parts[1]
    said = [{LOG_PROBS: np.zeros((2, 3), np.float32), IDS: np.zeros((2, 3), np.int32), "n": row} for row in range(8)]
    batch = put(store, said)
    # At prompts of two tokens, whose last one has the output of the first response token.
    rows = [torch.tensor([9.0, *[0.1 * row] * len(mask), 9.0]) for row, mask in enumerate(MASKS)]
    fields = TensorDict({COLUMN: torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=len(MASKS))
    store.kv_batch_put(keys=batch.keys, partition_id="train", fields=fields)
    for one in trainer.parts:
        batch = one.on_sample(batch)
    for one in trainer.parts:
        batch = one.on_batch(batch, trainer._rows, {})
    part.before_old_log_prob(batch)
    assert batch.extra_info[WANTED] is True
    part.after_old_log_prob(batch, {})
    assert WANTED not in batch.extra_info
    found = store.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["extra_fields"])["extra_fields"]
    assert [dict(row) for row in dicts(found)] == [{"n": row} for row in range(8)]
    batch = advantage(trainer, batch)
    assert stored(store, batch) == emptied(3, 4, 5, 6)
    assert part.metrics["rejection/trm/statistic/p50"] == pytest.approx(0.3)


@pytest.mark.parametrize("estimator", ["otb", "optimal_token_baseline"])
def test_rejected_rows_leave_the_sums_of_the_optimal_token_baseline(store: Any, estimator: str) -> None:
    """Ours and verl's: the others' advantages are those of a batch whose rejected rows have no tokens to begin with."""

    def found(masks: list[list[int]], *overrides: str) -> list[list[float]]:
        name = [] if estimator == "otb" else [f"algorithm.adv_estimator={estimator}"]
        batch = put(store)
        generator = torch.Generator().manual_seed(0)
        more = {
            "sum_pi_squared": [torch.rand(len(mask) + 2, generator=generator) for mask in masks],
            "response_mask": [torch.tensor(mask) for mask in masks],
        }
        fields = {key: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for key, rows in more.items()}
        fields["old_log_probs"] = torch.nested.as_nested_tensor(
            [-2.0 - torch.rand(len(mask), generator=generator) for mask in masks], layout=torch.jagged
        )
        fields["rollout_log_probs"] = torch.nested.as_nested_tensor(
            [old - SHIFT[row] for row, old in enumerate(fields["old_log_probs"].unbind())], layout=torch.jagged
        )
        store.kv_batch_put(keys=batch.keys, partition_id="train", fields=TensorDict(fields, batch_size=len(masks)))
        trainer = trainer_of(config("+recipe=[otb,mrs]", *name, *overrides))
        return stored(store, advantage(trainer, batch), "advantages")

    off = ["algorithm.mrs.level=null", "algorithm.mrs.veto=null"]
    rejecting, without, every = found(MASKS), found(emptied(1, 5), *off), found(MASKS, *off)
    for row in (0, 2, 3, 4, 6):
        assert rejecting[row] == pytest.approx(without[row], abs=1e-6)
    assert rejecting[0] != pytest.approx(every[0], abs=1e-3)


def test_rules_see_what_pruning_leaves_and_give_nothing_of_it_back(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token outside of the safe set has no log-probability to compare, and stays out whatever the rules keep."""
    monkeypatch.setenv(STRICT, "1")
    trainer = trainer_of(config("+recipe=[grpo,mrs,dvp]", "actor_rollout_ref.rollout.name=vllm"))
    batch = put(store)
    outside = torch.zeros(8, 6, dtype=torch.bool)
    outside[0, 1] = outside[3, 5] = outside[5, 0] = True  # of a kept row, a kept row's last, of a rejected row
    trained = [
        [int(m and not o) for m, o in zip(*row, strict=False)] for row in zip(MASKS, outside.tolist(), strict=True)
    ]
    column = torch.nested.as_nested_tensor([torch.tensor(mask) for mask in trained], layout=torch.jagged)
    fields = TensorDict({"response_mask": column}, batch_size=len(MASKS))
    store.kv_batch_put(keys=batch.keys, partition_id="train", fields=fields)
    (pruning,) = (part for part in trainer.parts if isinstance(part, Pruning))
    pruning.outside, pruning._guarded = Outside(list(batch.keys), outside), True
    batch = advantage(trainer, batch)
    assert stored(store, batch) == [[0] * len(mask) if row in (1, 5) else mask for row, mask in enumerate(trained)]
    advantages = stored(store, batch, "advantages")
    assert advantages[0][0] != 0 and advantages[0][1] == advantages[3][5] == advantages[5][0] == 0
    metrics = trainer.parts[1].metrics
    assert metrics["rejection/kept_share"] == pytest.approx(5 / 7)
    assert metrics["rejection/mrs/statistic/p50"] == 1.0
    with trainer.parts[1].around_update("actor", batch):
        batch.extra_info.update(mini_batch_size=4, epochs=1)
    trainer.parts[1].after_update({"actor/skipped_share": 0.0})
    assert stored(store, batch) == trained


def test_the_mask_is_whole_again_after_the_critics_warm_up(store: Any) -> None:
    """verl updates no actor then, and its metrics of the rollouts read the mask."""
    trainer = trainer_of(config("+recipe=[grpo,mrs]", "trainer.critic_warmup=3"))
    for step, expected in ((2, MASKS), (3, emptied(1, 5))):
        trainer.global_steps = step
        batch = advantage(trainer, put(store))
        assert stored(store, batch) == emptied(1, 5)
        with trainer.parts[1].around_update("critic", batch):
            assert stored(store, batch) == emptied(1, 5)
        assert stored(store, batch) == expected


# ---- after the advantage -------------------------------------------------------------------------------------------


def test_empg_follows_the_estimator_and_leaves_rejected_rows_out(store: Any) -> None:
    from verl_ext.methods.empg import empg

    _, batch = run(store)
    before = torch.nested.nested_tensor([torch.tensor(row) for row in stored(store, batch, "advantages")])
    trainer = trainer_of(config("+recipe=[grpo,mrs,empg]", "algorithm.empg.zeta=0.3"))
    batch = advantage(trainer, put(store))
    mask = torch.nested.nested_tensor([torch.tensor(row) for row in emptied(1, 5)]).to_padded_tensor(0)
    expected = empg(
        before.to_padded_tensor(0.0),
        0.1 * torch.arange(1.0, 9.0)[:, None].expand(mask.shape),
        mask,
        index=["a"] * 4 + ["b"] * 3 + ["pad"],
        traj_uid=["a0", "a1", "a2", "a2", "b0", "b1", "b2", "pad0"],
        turn_index=[0, 0, 0, 1, 0, 0, 0, 0],
        valid_row=np.arange(8) < 7,
        zeta=0.3,
    )
    for row, found in enumerate(stored(store, batch, "advantages")):
        assert found == pytest.approx(expected[row, : len(found)].tolist(), abs=1e-6)
    assert expected[1].abs().max() == 0 and expected[2, 0] != 0
    modifier, signal = trainer.parts[-2:]
    metrics = modifier.metrics
    assert metrics["empg/step_entropy/min"] == pytest.approx(0.1)
    assert metrics["empg/step_entropy/max"] == pytest.approx(0.7)
    assert metrics["empg/advantage_rms/after"] != metrics["empg/advantage_rms/before"]
    what = learning_signal({"valid_row": np.arange(8) < 7}, expected, mask)  # of what is trained
    assert signal.metrics == pytest.approx(what, rel=1e-5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+algorithm.modifiers.emgp=true", r"algorithm\.modifiers\.emgp: there is no such modifier"),
        ("algorithm.empg.k=-1", r"algorithm\.empg\.k is -1"),
        ("algorithm.rollout_correction.bypass_mode=true", r"empg needs the entropy .*bypass_mode=true skips that pass"),
        ("trainer.length_lr.decay=2", r"trainer\.length_lr\.decay is 2"),
        ("+trainer.length_lr.surge_step=3", r"trainer\.length_lr\.surge_step is not an option"),
        ("actor_rollout_ref.actor.strategy=megatron", r"trainer\.length_lr multiplies .*strategy=megatron"),
    ],
)
def test_modifiers_and_schedule_are_checked_at_launch(override: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        checks.check(config("+recipe=[grpo,empg,length_lr]", override))


def test_two_warm_ups_are_warned_about() -> None:
    actor, critic = (f"{name}.optim.lr_warmup_steps" for name in ("actor_rollout_ref.actor", "critic"))
    (warning,) = checks.check(config("+recipe=[grpo,length_lr]", f"{actor}=5"))
    assert f"warmup_steps=10 warms up on top of {actor}, and" in warning and f"warmup_steps=0, or {actor}=0." in warning
    # verl falls back to the ratio where the number of steps is 0
    (warning,) = checks.check(config("+recipe=[grpo,length_lr]", f"{actor}=0", f"{actor}_ratio=0.1"))
    assert f"warmup_steps=0, or {actor}_ratio=0." in warning
    of_critic = ["critic.enable=true", f"{critic}=5", f"{critic}_ratio=0.1"]
    (warning,) = checks.check(config("+recipe=[grpo,length_lr]", *of_critic))
    assert f", or {critic}=0, {critic}_ratio=0." in warning


def lengths_seen(part: LengthLearningRate, store: Any, steps: dict[int, int]) -> list[float]:
    """Factors that actor and critic are told in steps whose rows have so many tokens."""
    told = []
    for step, length in steps.items():
        part.trainer.global_steps = step
        rows = [torch.ones(length, dtype=torch.int64), torch.ones(99, dtype=torch.int64)]
        mask = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        keys, tags = (
            [f"l{step}_{id(part)}_0", f"pad{step}_{id(part)}_0"],
            [{"seq_len": 9}, {"seq_len": 9, "is_padding": True}],
        )
        batch = put_fields(store, keys, tags, {"response_mask": mask})
        part.on_batch(batch, columns.ActiveBatch({"valid_row": np.array([True, False])}), {})
        for role in ("critic", "actor"):
            with part.around_update(role, batch):
                told.append(batch.extra_info["verl_ext_learning_rate"])
    return told[::2] if told[::2] == told[1::2] else []


def test_schedule_goes_on_from_a_checkpoint(store: Any, tmp_path: Path) -> None:
    cfg = config(
        "+recipe=[grpo,length_lr]",
        "trainer.length_lr.warmup_steps=2",
        "trainer.length_lr.baseline_steps=2",
        "trainer.length_lr.period_factor=0.5",
        f"trainer.default_local_dir={tmp_path}",
    )
    trainer = SimpleNamespace(local_trigger_step=0, global_steps=0)
    steps = {1: 10, 2: 10, 3: 10, 4: 10, 5: 40, 6: 10, 7: 10, 8: 10}  # a surge at t = 4, so P = 2 counted from t = 2
    expected = [0.5, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    whole = LengthLearningRate(cfg, trainer)
    assert lengths_seen(whole, store, steps) == expected
    first, second = LengthLearningRate(cfg, trainer), LengthLearningRate(cfg, trainer)
    assert lengths_seen(first, store, {step: steps[step] for step in range(1, 6)}) == expected[:5]
    checkpoints.save(cfg, 5, [first])
    checkpoints.load(cfg, 5, [second])
    assert lengths_seen(second, store, {step: steps[step] for step in range(6, 9)}) == expected[5:]
    second.after_update(verls := {"actor/lr_factor": 0.25})
    assert verls == {}
    assert second.metrics == {
        "length_lr/factor": 0.25,
        "length_lr/baseline_length": 10.0,
        "length_lr/surge_step": 4.0,
    }
    with pytest.raises(RuntimeError, match="has not multiplied its learning rate"):
        second.after_update({})


# ---- verl's own families -------------------------------------------------------------------------------------------


VERLS = [case for case in load_cases("rollout_correction") if case["config"]["family"].startswith("verl")]
SUITED = [f"actor_rollout_ref.actor.{key}" for key in ("clip_ratio_low=1e6", "clip_ratio_high=1e6", "clip_ratio_c=1e9")]


def put_case(store: Any, case: dict[str, Any]) -> KVBatchMeta:
    mask = token_field(case, "response_mask").long()
    keys, tags = [f"u_{row}_0" for row in range(len(mask))], [{"seq_len": 9} for _ in mask]
    tensors = {name: token_field(case, name) for name in ("old_log_probs", "rollout_log_probs")}
    tensors |= {"response_mask": mask, "rm_scores": torch.arange(mask.numel()).view(mask.shape).float()}
    fields = {
        name: torch.nested.as_nested_tensor(list(value.unbind()), layout=torch.jagged)
        for name, value in tensors.items()
    }
    return put_fields(store, keys, tags, fields)


def of_case(case: dict[str, Any], *overrides: str) -> Any:
    names = ("rollout_rs", "rollout_rs_threshold", "rollout_is", "rollout_is_threshold")
    given = {name: case["config"][name] for name in names if name in case["config"]}
    quoted = {name: f"'{value}'" if isinstance(value, str) else value for name, value in given.items()}
    overrides = (*(f"algorithm.rollout_correction.{name}={value}" for name, value in quoted.items()), *overrides)
    return trainer_of(config("+recipe=grpo", *overrides))


@pytest.mark.parametrize("case", VERLS, ids=case_name)
def test_verls_families_through_our_trainer(store: Any, case: dict[str, Any]) -> None:
    batch = advantage(of_case(case), put_case(store, case))
    for name, column in (("response_mask", "response_mask"), ("rollout_is_weights", "rollout_is_weights")):
        if name in case["expected"]:
            assert_expected(case, name, np.array(stored(store, batch, column)))


@pytest.mark.parametrize("case", VERLS, ids=case_name)
def test_verls_families_in_bypass_mode(store: Any, case: dict[str, Any]) -> None:
    """There the loss applies them: each token's gradient is its weight, and 0 where it is rejected."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.config import omega_conf_to_dataclass

    one = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    node = "algorithm.rollout_correction"
    trainer = of_case(case, f"{node}.bypass_mode=true", f"{node}.loss_type=reinforce", one, *SUITED)
    batch = advantage(trainer, put_case(store, case))
    mask = token_field(case, "response_mask")
    assert np.array_equal(stored(store, batch), mask)  # the trainer leaves it to the loss
    assert stored(store, batch, "old_log_probs") == stored(store, batch, "rollout_log_probs")
    actor = omega_conf_to_dataclass(trainer.config.actor_rollout_ref.actor)
    log_prob = token_field(case, "old_log_probs").requires_grad_()
    loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=torch.tensor(stored(store, batch, "old_log_probs")),
        log_prob=log_prob,
        advantages=-torch.ones_like(log_prob),
        response_mask=mask,
        loss_agg_mode="token-sum",
        config=actor,
    )
    loss.backward()
    name = "response_mask" if "response_mask" in case["expected"] else "rollout_is_weights"
    assert_expected(case, name, log_prob.grad * mask)
