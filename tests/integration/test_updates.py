# SPDX-License-Identifier: Apache-2.0
"""`verl_ext.updates_per_batch`: how rows are dealt to updates, and that a loss's scale does not follow their number."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import verl
import verl.trainer.ppo.v1 as v1
from hydra import compose
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from ranks import run_ranks
from transfer_queue import KVBatchMeta

from verl_ext.integration.columns import EMPTY, VALID, ActiveBatch, BatchError, has_token, is_trained
from verl_ext.integration.parts.base import Part
from verl_ext.integration.parts.update import updates
from verl_ext.integration.settings.options import OptionError
from verl_ext.integration.trainer import VerlExtTrainer

sys.path.insert(0, str(Path(__file__).parent))
import gradients  # noqa: E402

# ---- dealing -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(1, 5), st.lists(st.sampled_from([10.0, 20.0, 400.0]) | st.floats(1.0, 400.0)))
@example(5, 4, [10.0, 20.0, 400.0] * 100)
def test_every_row_is_dealt_once_evenly_and_balanced(count: int, ranks: int, work: list[float]) -> None:
    assume(len(work) >= count)
    size = -(-len(work) // (count * ranks)) * count * ranks
    padding = [False] * len(work) + [True] * (size - len(work))
    work += [1.0] * (size - len(work))
    dealt = updates.deal(work, padding, count, ranks)
    assert sorted(row for mini in dealt for part in mini for row in part) == list(range(size))
    assert {len(part) for mini in dealt for part in mini} == {size // count // ranks}
    pads = [sum(padding[row] for part in mini for row in part) for mini in dealt]
    assert max(pads) - min(pads) <= 1
    totals = [sum(work[row] for part in mini for row in part) for mini in dealt]
    assert max(totals) - min(totals) <= max(work)
    for mini in dealt:
        parts = [sum(work[row] for row in part) for part in mini]
        assert max(parts) - min(parts) <= max(work)


def test_no_update_is_without_a_real_row() -> None:
    dealt = updates.deal([5.0, 1.0, 1.0, *[100.0] * 9], [False] * 3 + [True] * 9, 3, 2)
    assert [sum(row < 3 for part in mini for row in part) for mini in dealt] == [1, 1, 1]
    with pytest.raises(ValueError, match="2 sequences cannot be dealt into 3 updates"):
        updates.deal([1.0] * 6, [False] * 2 + [True] * 4, 3, 1)
    with pytest.raises(ValueError, match="7 sequences cannot be dealt into 2 updates on 2 ranks"):
        updates.deal([1.0] * 7, [False] * 7, 2, 2)


class Meta(SimpleNamespace):
    """The part of verl's KVBatchMeta that is read: keys, tags and `reorder`."""

    def reorder(self, order: list[int]) -> None:
        assert sorted(order) == list(range(len(self.keys)))
        self.keys, self.tags = [self.keys[i] for i in order], [self.tags[i] for i in order]


def test_balanced_batch_is_what_the_ranks_cut() -> None:
    lengths = [500, 20, 30, 20, 40, 300, 20, 20, 60, 10, 30]
    batch = Meta(
        keys=[f"u_{i}_0" for i in range(12)],
        tags=[{"seq_len": length} for length in lengths] + [{"seq_len": 128, "is_padding": True}],
    )
    metrics = updates.balance(batch, updates=2, ranks=3)
    chunks = [batch.tags[4 * rank : 4 * rank + 4] for rank in range(3)]  # what verl's dispatch gives a rank
    minis = [[tag for chunk in chunks for tag in chunk[2 * k : 2 * k + 2]] for k in range(2)]  # what a rank cuts
    tokens = [sum(tag["seq_len"] for tag in mini if not tag.get("is_padding")) for mini in minis]
    assert (min(tokens), max(tokens)) == (
        metrics["updates/mini_batch_tokens/min"],
        metrics["updates/mini_batch_tokens/max"],
    )
    assert sum(tokens) == sum(lengths) and max(tokens) < 620
    loads = [sum(tag["seq_len"] for tag in chunk) for chunk in chunks]
    assert metrics["global_seqlen/balanced_max"] == max(loads) and metrics["global_seqlen/balanced_min"] == min(loads)


def test_dealing_many_rows_takes_little_time() -> None:
    import time

    chance = random.Random(0)
    work = [chance.random() for _ in range(20_480)]
    start = time.thread_time()
    updates.deal(work, [False] * len(work), 8, 16)
    assert time.thread_time() - start < 2.0  # measured 0.06 s


# ---- sizes ---------------------------------------------------------------------------------------------------------


def keys_and_tags(rows: int, padding: int) -> tuple[list[str], list[dict[str, Any]]]:
    keys = [f"p{i // 8}_{i // 2 % 4}_{i % 2}" for i in range(rows)] + [f"pad_{i}_0" for i in range(padding)]
    return keys, [{}] * rows + [{"is_padding": True}] * padding


@pytest.mark.parametrize(
    ("mode", "divisor"),
    [("seq-mean-token-sum", 4.0), ("seq-mean-token-sum-norm", 4.0), ("seq-mean-token-mean", 7.5)],
)
def test_divisors(mode: str, divisor: float) -> None:
    """15 rows of 2 prompts with 4 samples each, in 2 updates."""
    keys, tags = keys_and_tags(15, 1)
    assert updates.settings(keys, tags, 4, 2, mode) == {"mini_batch_size": 8, "global_batch_size": divisor}


@pytest.mark.parametrize("mode", gradients.MODES)
def test_with_one_row_a_sample_the_sizes_are_verls(mode: str) -> None:
    keys = [f"p{i // 4}_{i % 4}_0" for i in range(32)]  # 8 prompts, n=4; ppo_mini_batch_size=4: two updates
    assert updates.settings(keys, [{}] * 32, 4, 2, mode) == {"mini_batch_size": 16, "global_batch_size": 16.0}


def config(**changes: Any) -> Any:
    base = {
        "verl_ext": {"updates_per_batch": 2},
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync", "sync": {"parameter_sync_step": 1}}},
        "data": {"train_batch_size": 4, "max_response_length": 99},
        "critic": {
            "enable": None,
            "use_dynamic_bsz": True,
            "loss_agg_mode": "token-mean",
            "loss_scale_factor": None,
            "ppo_micro_batch_size_per_gpu": None,
            "forward_micro_batch_size_per_gpu": None,
        },
        "actor_rollout_ref": {
            "actor": {
                "use_dynamic_bsz": True,
                "ppo_micro_batch_size_per_gpu": None,
                "loss_agg_mode": "token-mean",
                "loss_scale_factor": None,
                "policy_loss": {"loss_mode": "vanilla"},
            },
            "rollout": {"n": 4, "log_prob_use_dynamic_bsz": True, "log_prob_micro_batch_size_per_gpu": None},
            "ref": {"log_prob_use_dynamic_bsz": True, "log_prob_micro_batch_size_per_gpu": None},
        },
    }
    made = OmegaConf.create(base)
    for key, value in changes.items():
        OmegaConf.update(made, key.replace("__", "."), value)
    return made


def test_rows_are_a_multiple_of_all_that_must_divide_them() -> None:
    assert updates.row_multiple(config(), 3, 2, critic=True) == 6
    fixed = config(
        actor_rollout_ref__actor__use_dynamic_bsz=False,
        actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=4,
        actor_rollout_ref__rollout__log_prob_use_dynamic_bsz=False,
        actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu=5,
        critic__use_dynamic_bsz=False,
        critic__ppo_micro_batch_size_per_gpu=7,
        critic__forward_micro_batch_size_per_gpu=3,
    )
    assert updates.row_multiple(fixed, 3, 2, critic=False) == 120
    assert updates.row_multiple(fixed, 3, 2, critic=True) == 840


@pytest.mark.parametrize("value", [0, -1, 1.5, "two", True])
def test_bad_values_are_refused(value: Any) -> None:
    with pytest.raises(OptionError, match=r"verl_ext\.updates_per_batch is .*whole number of at least 1, or null"):
        updates.check(config(verl_ext__updates_per_batch=value))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verl_ext__updates_per_batch": 17}, "a batch has 16 samples .* at most 16"),
        ({"trainer__v1__sync__parameter_sync_step": 4, "verl_ext__updates_per_batch": 5}, "a batch has 4 samples"),
        ({"actor_rollout_ref__actor__policy_loss__loss_mode": "geo_mean"}, "loss_mode=geo_mean, which averages"),
        ({"actor_rollout_ref__actor__shuffle": True}, r"Set actor_rollout_ref\.actor\.shuffle=false"),
        ({"critic__enable": True, "critic__shuffle": True}, r"critic\.shuffle=true draws the sequences of each update"),
        (
            {"actor_rollout_ref__actor__policy_loss__loss_mode": "sapo"},
            r"loss_mode=sapo always aggregates by seq-mean-token-mean .*loss_agg_mode=token-mean, whose divisor",
        ),
        (
            {"actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-sum-norm"},
            r"Set actor_rollout_ref\.actor\.loss_scale_factor, for example to 99",
        ),
        (
            {"critic__enable": True, "critic__loss_agg_mode": "seq-mean-token-sum-norm"},
            r"Set critic\.loss_scale_factor",
        ),
    ],
)
def test_what_cannot_hold_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        updates.check(config(**changes))


def newer_gspo(log_prob: Any, loss_agg_mode: str = "token-mean", config: Any = None) -> Any:
    """As verl 0.9.1 has it."""
    from verl.trainer.ppo.core_algos import agg_loss

    return agg_loss(loss_mat=log_prob, loss_mask=log_prob, loss_agg_mode=loss_agg_mode, batch_num_tokens=1)


def older_gspo(log_prob: Any, loss_agg_mode: str = "token-mean", config: Any = None) -> Any:
    """As verl's August 2026 tree has it: ``loss_agg_mode=loss_agg_mode`` is not handed on."""
    from verl.trainer.ppo.core_algos import agg_loss

    return agg_loss(loss_mat=log_prob, loss_mask=log_prob, loss_agg_mode="seq-mean-token-mean", batch_num_tokens=1)


@pytest.mark.usefixtures("verl_configuration")
def test_actor_and_critic_have_the_same_ranks() -> None:
    """Rows were a multiple of the actor's; of two mini-batches of one row the critic's two ranks got none."""
    run = ("+recipe=grpo", "algorithm.adv_estimator=gae", "verl_ext.updates_per_batch=2")
    ulysses = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    for passing in (
        [],
        [ulysses, "critic.fsdp.ulysses_sequence_parallel_size=2"],
        [ulysses, "critic.enable=false", "algorithm.adv_estimator=grpo"],
    ):
        updates.check(compose("ppo_trainer", overrides=[*run, *passing]))
    for refused, found in (
        ([ulysses], "2 GPUs share one and in the critic 1 do"),
        ([ulysses, "critic.ulysses_sequence_parallel_size=2"], "and in the critic 1 do"),  # verl reads no such key
        (["actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"], "2 GPUs share one"),
    ):
        with pytest.raises(OptionError, match=f"{found}.*Set critic.fsdp.ulysses_sequence_parallel_size=2, or"):
            updates.check(compose("ppo_trainer", overrides=[*run, *refused]))
    megatron = ["model_engine=megatron", "critic.megatron.tensor_model_parallel_size=2"]
    with pytest.raises(OptionError, match=r"in the critic 2 do .*Set the parallel sizes in critic\.megatron to those"):
        updates.check(compose("ppo_trainer", overrides=[*run, *megatron]))


def test_a_verl_whose_gspo_has_a_mode_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    gspo = {"actor_rollout_ref__actor__policy_loss__loss_mode": "gspo"}
    if verl.__version__ == "0.9.1":
        assert updates.check(config(**gspo)) == []
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "gspo", newer_gspo)
    assert updates.check(config(**gspo)) == []
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "gspo", older_gspo)
    with pytest.raises(OptionError, match=r"loss_mode=gspo always .*Set .*loss_agg_mode=seq-mean-token-mean"):
        updates.check(config(**gspo))
    assert updates.check(config(**gspo, actor_rollout_ref__actor__loss_agg_mode="seq-mean-token-mean")) == []


def test_what_may_surprise_is_said_and_null_says_nothing() -> None:
    assert updates.check(config()) == []
    assert (
        "token-sum divides by nothing" in updates.check(config(actor_rollout_ref__actor__loss_agg_mode="token-sum"))[0]
    )
    silent = config(verl_ext__updates_per_batch=None, actor_rollout_ref__actor__policy_loss__loss_mode="geo_mean")
    assert updates.check(silent) == [] and updates.updates_per_batch(silent) is None
    # An unused critic's settings do not matter.
    assert updates.check(config(critic__loss_agg_mode="seq-mean-token-sum-norm")) == []


def taken_out(count: int, asked: int | None) -> tuple[Any, updates.Updates]:
    """A batch of 15 rows and one of padding, of which the first `count` were taken out, and the part."""
    keys, tags = keys_and_tags(15, 1)
    tags = [{**tag, "seq_len": 10} for tag in tags]
    for tag in tags[:count]:
        tag[VALID] = False
    batch = KVBatchMeta(keys=keys, tags=tags, partition_id="train")
    settings = config(verl_ext__updates_per_batch=asked, actor_rollout_ref__actor__ppo_mini_batch_size=1)
    group = SimpleNamespace(_dispatch_info={"actor": [0]})
    return batch, updates.Updates(settings, SimpleNamespace(use_critic=False, actor_rollout_wg=group))


def test_rows_that_are_taken_out_count_as_padding() -> None:
    """They are spread over the updates, and no divisor counts them."""
    batch, part = taken_out(7, 2)
    assert updates.settings(batch.keys, batch.tags, 4, 2, "seq-mean-token-mean")["global_batch_size"] == 4.0  # 8 of 15
    part.on_sample(batch)
    part.on_batch(batch, ActiveBatch(columns={}), {})
    trained = [is_trained(tag) for tag in batch.tags]
    assert sum(trained[:8]) == sum(trained[8:]) == 4


def test_rows_that_are_taken_out_after_the_look_at_the_batch_count_too() -> None:
    """The parts that take rows out come after this one, and verl's padding after them."""
    batch, part = taken_out(0, 8)
    part.on_sample(batch)
    for tag in batch.tags[:11]:
        tag[VALID] = False
    assert part.row_multiple(1, 1) == 4 and part.now == 4
    part.on_batch(batch, ActiveBatch(columns={}), {})
    batch, part = taken_out(0, 8)
    part.on_sample(batch)
    part.row_multiple(1, 1)
    assert part.now == 8


@pytest.mark.parametrize("asked", [2, None])
def test_rows_without_a_token_are_dealt_like_padding(asked: int | None, caplog: pytest.LogCaptureFixture) -> None:
    """A call to which the engine gives no token is a row; an update of such rows alone divided by 0 tokens."""
    batch, part = taken_out(0, asked)
    for tag in batch.tags[:13]:
        tag[EMPTY] = True
    part.on_sample(batch)
    part.row_multiple(1, 1)
    if asked is None:
        with pytest.raises(BatchError, match=r"all but 2 of them .* got no token of the model for them"):
            part.on_batch(batch, ActiveBatch(columns={}), {})
        return
    part.on_batch(batch, ActiveBatch(columns={}), {})
    some = [has_token(tag) for tag in batch.tags]
    assert sum(some[:8]) == sum(some[8:]) == 1 and not caplog.records
    mode = "seq-mean-token-mean"
    assert updates.settings(batch.keys, batch.tags, 4, 2, mode)["global_batch_size"] == 7.5, "they count as rows"
    batch.tags[some.index(True)][EMPTY] = True
    assert part.row_multiple(1, 1) == 1 and part.now == 1
    assert "a batch with 1 sequences to train gets as many updates" in caplog.text
    for tag in batch.tags:
        tag[EMPTY] = True
    caplog.clear()
    assert part.row_multiple(1, 1) == 1 and not caplog.records, "nothing is said of a model that is passed over"
    with pytest.raises(BatchError, match="took out all 15 sequences of this batch .* or got no token of the model"):
        part.on_batch(batch, ActiveBatch(columns={}), {})


def test_no_mini_batch_of_verls_is_without_a_row_that_is_trained_on() -> None:
    """verl divides by the tokens of a mini-batch: the first two of four had none, and their loss was 0/0."""
    batch, part = taken_out(11, None)
    part.on_batch(batch, ActiveBatch(columns={}), {})
    trained = [is_trained(tag) for tag in batch.tags]
    assert [sum(trained[k : k + 4]) for k in (0, 4, 8, 12)] == [1, 1, 1, 1]
    batch, part = taken_out(12, None)
    with pytest.raises(BatchError, match=r"4 updates of this batch of 16 sequences, .* all but 3 of .*Set verl_ext"):
        part.on_batch(batch, ActiveBatch(columns={}), {})
    batch, part = taken_out(0, None)
    before = list(batch.keys)
    part.on_batch(batch, ActiveBatch(columns={}), {})
    assert batch.keys == before and part.metrics == {}


@pytest.mark.parametrize("asked", [2, None])
def test_a_batch_of_which_nothing_is_left_is_refused(asked: int | None) -> None:
    """The loss was 0/0, and with updates_per_batch the NaN went into the weights."""
    batch, part = taken_out(15, asked)
    part.on_sample(batch)
    part.row_multiple(1, 1)
    with pytest.raises(BatchError, match=r"took out all 15 sequences of this batch .*Mend what makes the rollouts"):
        part.on_batch(batch, ActiveBatch(columns={}), {})


# ---- the trainer's side --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("method", ["_balance_batch", "_get_required_batch_multiple"])
def test_without_the_key_verl_decides(mode: str, ours: bool, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = v1.get_trainer_cls(mode)
    answer = 7 if method == "_get_required_batch_multiple" else SimpleNamespace(tags=[{}])
    monkeypatch.setattr(cls.__mro__[2], method, lambda self, *given, **named: answer)
    trainer = cls.__new__(cls)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})
    trainer.parts = (updates.Updates(config(verl_ext__updates_per_batch=None), trainer),) if ours else ()
    given = (2,) if answer == 7 else (SimpleNamespace(tags=[{}]), {})
    assert getattr(trainer, method)(*given) is answer


class WorkerGroup:
    """Records the sizes it is told, as verl's worker would read them."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.update_actor = self.train_mini_batch = lambda batch: self.seen.append(
            {name: batch.extra_info[name] for name in ("mini_batch_size", "global_batch_size", "epochs")}
        )


class VerlUpdates:
    """Stands for verl's trainer above the mixin: the calls that it makes, with its own sizes."""

    use_critic = True

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info.update(mini_batch_size=16, global_batch_size=16, epochs=2)
        self.actor_rollout_wg.update_actor(batch)  # type: ignore[attr-defined]
        return batch

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info.update(mini_batch_size=16, global_batch_size=16, epochs=1)
        self.critic_wg.train_mini_batch(batch)  # type: ignore[attr-defined]
        return batch


@pytest.mark.parametrize("asked", [None, 2])
def test_the_workers_are_told_right_before_the_call(asked: int | None) -> None:
    class Trainer(VerlExtTrainer, VerlUpdates):
        def __init__(self) -> None:
            self.config = config(
                verl_ext__updates_per_batch=asked,
                actor_rollout_ref__actor__loss_agg_mode="seq-mean-token-sum",
                critic__loss_agg_mode="seq-mean-token-mean",
            )
            OmegaConf.update(self.config, "actor_rollout_ref.actor.ppo_mini_batch_size", 4)
            OmegaConf.update(self.config, "actor_rollout_ref.actor.ppo_epochs", 2)
            self.actor_rollout_wg, self.critic_wg = WorkerGroup(), WorkerGroup()
            self.parts: tuple[Part, ...] = (updates.Updates(self.config, self),)

    keys, tags = keys_and_tags(15, 1)
    batch, metrics, trainer = SimpleNamespace(keys=keys, tags=tags, extra_info={}), {}, Trainer()
    (part,) = trainer.parts
    before = vars(trainer.actor_rollout_wg)["update_actor"], vars(trainer.critic_wg)["train_mini_batch"]
    assert trainer._update_critic(batch, metrics) is batch and trainer._update_actor(batch, metrics) is batch
    assert before == (vars(trainer.actor_rollout_wg)["update_actor"], vars(trainer.critic_wg)["train_mini_batch"])
    own = {"mini_batch_size": 16, "global_batch_size": 16}
    sizes = {"mini_batch_size": 8}
    assert trainer.actor_rollout_wg.seen == [{**(sizes | {"global_batch_size": 4.0} if asked else own), "epochs": 2}]
    assert trainer.critic_wg.seen == [{**(sizes | {"global_batch_size": 7.5} if asked else own), "epochs": 1}]
    assert part.metrics == {
        "updates/per_batch": 4.0 if asked else 2.0,
        "updates/mini_batch_sequences": 8.0 if asked else 16.0,
        "updates/padding_sequences": 1.0,
    }


def test_what_workers_are_told_is_put_back_after_a_failure() -> None:
    group = WorkerGroup()
    original = group.update_actor
    with pytest.raises(RuntimeError, match="worker died"), updates.told(group, "update_actor", {"a": 1}):
        raise RuntimeError("worker died")
    assert group.update_actor is original


# ---- gradients of verl's worker ------------------------------------------------------------------------------------


def train(out: Path, world: int) -> dict[tuple[str, str, int | None], dict[str, Any]]:
    """The results of `gradients.cases` by (name, mode, updates), from `world` processes."""
    run_ranks(Path(gradients.__file__), out, world=world)
    found = torch.load(out, weights_only=False)
    return {(result["name"], result["mode"], result["updates"]): result for result in found}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    return train(tmp_path_factory.mktemp("gradients") / "one.pt", 1)


def mean_gradient(result: dict[str, Any]) -> torch.Tensor:
    return torch.stack(result["gradients"]).mean(0)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).norm()) <= 5e-6 * float(b.norm()) and float(b.norm()) > 0.1


@pytest.mark.seconds
@pytest.mark.parametrize("mode", gradients.MODES)
def test_rows_do_not_change_the_scale_of_the_loss(one_rank: dict[Any, dict[str, Any]], mode: str) -> None:
    """One update of a batch: the same tokens in twice the rows, with or without padding, give the same gradient."""
    base = one_rank["plain", mode, 1]["gradients"][0]
    assert len(one_rank["split", mode, 1]["gradients"]) == 1
    assert close(one_rank["split", mode, 1]["gradients"][0], base)
    assert close(one_rank["big_micro", mode, 1]["gradients"][0], base)
    doubled = one_rank["doubled", mode, 1]["gradients"][0]
    # Twice the tokens: a mean stays, a sum over the tokens of a trajectory doubles.
    assert close(doubled, base * (1 if mode in ("token-mean", "seq-mean-token-mean") else 2))
    if mode != "seq-mean-token-mean":  # where a row of one's own is a sequence of one's own
        assert close(one_rank["one_talks", mode, 1]["gradients"][0], base)
    else:  # the other seven samples keep their share of the mean over rows
        assert one_rank["one_talks", mode, 1]["sizes"]["global_batch_size"] == 9


@pytest.mark.parametrize("mode", [mode for mode in gradients.MODES if mode.startswith("seq-mean")])
def test_the_updates_of_a_batch_average_to_its_gradient(one_rank: dict[Any, dict[str, Any]], mode: str) -> None:
    """8 rows in 3 updates: one of 9 rows is padding, and it weighs nothing."""
    for name in ("plain", "split", "doubled", "one_talks"):
        result = one_rank[name, mode, 3]
        assert len(result["gradients"]) == 3 and result["rows"] % 3 == 0
        assert close(mean_gradient(result), one_rank[name, mode, 1]["gradients"][0])


def test_a_token_weighs_the_same_in_each_update_of_token_sum(one_rank: dict[Any, dict[str, Any]]) -> None:
    total = torch.stack(one_rank["split", "token-sum", 3]["gradients"]).sum(0)
    assert close(total, one_rank["plain", "token-sum", 1]["gradients"][0])


def test_verls_own_mini_batches_follow_the_number_of_rows(one_rank: dict[Any, dict[str, Any]]) -> None:
    """What the key is for: the same tokens in twice the rows are twice the updates, each of half the weight a token."""
    for mode in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
        plain, split = one_rank["plain", mode, None], one_rank["split", mode, None]
        assert (len(plain["gradients"]), len(split["gradients"])) == (2, 4)
        assert close(mean_gradient(plain), one_rank["plain", mode, 1]["gradients"][0])
        assert close(mean_gradient(split), mean_gradient(plain) / 2)


def test_uneven_rows_cost_what_their_tokens_cost(one_rank: dict[Any, dict[str, Any]]) -> None:
    """One trajectory of 57 rows, one row of 128 tokens, beside 64 equal ones: the micro-batches stay bounded."""
    even, uneven = one_rank["even", "token-mean", 4], one_rank["uneven", "token-mean", 4]
    for result in (even, uneven):
        assert max(part["tokens"] for part in result["micro"]) <= 160
        assert max(part["rows"] * part["longest"] for part in result["micro"]) <= 160  # also as a rectangle
        assert result["rows"] == 64 and len(result["gradients"]) == 4
    assert sum(part["tokens"] for part in uneven["micro"]) == 63 * 16 + 128
    assert len(uneven["micro"]) <= len(even["micro"]) + 2
    assert uneven["seconds"] < 3 * even["seconds"]  # measured 1.1


@pytest.mark.slow
def test_two_ranks_give_the_gradients_of_one(one_rank: dict[Any, dict[str, Any]], tmp_path: Path) -> None:
    two = train(tmp_path / "two.pt", 2)
    compared = 0
    for key, result in two.items():
        name, mode, count = key
        assert result["rows"] % (2 * (count or 2)) == 0
        assert max(part["tokens"] for part in result["micro"]) <= 4096
        if count == 1:
            assert close(result["gradients"][0], one_rank[key]["gradients"][0]), key
            compared += 1
        elif count is not None and mode.startswith("seq-mean"):
            assert close(mean_gradient(result), one_rank[name, mode, 1]["gradients"][0]), key
            compared += 1
    assert compared == 37
