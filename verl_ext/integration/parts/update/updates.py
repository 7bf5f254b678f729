# SPDX-License-Identifier: Apache-2.0
"""Sequences and optimiser steps: ``verl_ext.updates_per_batch``.

verl cuts a batch into mini-batches of ``ppo_mini_batch_size * rollout.n`` sequences, and fills it up to a multiple of
that with padding, nearly all of it in the last one. ``updates_per_batch: N`` makes N updates of every batch (times
``ppo_epochs``), however many sequences it has: they are dealt into N mini-batches of equal size and nearly equal work,
and so is the padding (fewer than N times the ranks, with micro-batches by tokens). ``ppo_mini_batch_size`` then has no
say. What an update's loss is divided by, for each ``loss_agg_mode``: the table in docs/rows.md, and `settings`.

With one sequence a sample and N = sequences / (``ppo_mini_batch_size * rollout.n``) all divisors are verl's. Rejected
sequences (mask all zero) count, so that a rejection does not make the others heavier; padding and what its agent loop
took out (``valid_row: false``) do not. A sequence without a token of the model counts and is dealt like padding, so
that no update is without a token. Tokens are those of verl's ``loss_mask``, which is the mask before rejection.
Entropy, KL and critic losses go the same way.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from verl_ext.integration.columns import ActiveBatch, BatchError, has_token, is_real, is_trained, split_key
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.merging import fixed_mode
from verl_ext.integration.settings.options import OptionError, has_critic, option, select, updated
from verl_ext.methods.options import AtLeastOne

logger = logging.getLogger(__name__)

KEY = "verl_ext.updates_per_batch"
LOCAL_MEAN_LOSSES = ("geo_mean",)
"""verl's losses that average over the sequences of a micro-batch and so know no divisor (verl 0.9.1, core_algos.py)."""

PARALLEL = (
    "ulysses_sequence_parallel_size",
    "ulysses_parallel_size",
    "tensor_model_parallel_size",
    "tensor_parallel_size",
    "pipeline_model_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
)
"""Keys of verl's engines for how many GPUs have a part of each sequence; the others are data-parallel ranks."""


class Updates(Part):
    """Tells verl's workers how to cut a batch if the key is set, and reports how it was cut in any case."""

    def __init__(self, config: Any, trainer: Any = None) -> None:
        super().__init__(config, trainer)
        self.asked = updates_per_batch(config)
        self.now = self.asked or 0
        self._sampled: Any = None

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return not model_options.of(config)  # each of several models has its own (verl_ext.integration.models)

    @classmethod
    def check(cls, config: Any) -> list[str]:
        return check(config)

    def on_sample(self, batch: Any) -> Any:
        self._sampled = batch
        return batch

    def row_multiple(self, multiple: int, ranks: int) -> int:
        if self.asked is None:
            return multiple
        # By now the parts that take sequences out have done so.
        rows = sum(map(has_token, self._sampled.tags))
        self.now = max(1, min(self.asked, rows))
        if 0 < rows < self.asked:
            logger.warning("a batch with %d sequences to train gets as many updates, not %s=%d", rows, KEY, self.asked)
        return row_multiple(self.config, self.now, ranks, critic=self.trainer.use_critic)

    def on_batch(self, batch: Any, active: ActiveBatch, metrics: dict[str, Any]) -> Any:
        if not any(map(has_token, batch.tags)):
            raise BatchError(
                f"agent loops took out all {sum(map(is_real, batch.tags))} sequences of this batch (valid_row: false) "
                "or got no token of the model for them, and an update needs one. Mend what makes the rollouts fail."
            )
        ranks = max(self.trainer.actor_rollout_wg._dispatch_info["actor"]) + 1
        updates = self.now if self.asked is not None else self._verls_updates(batch, ranks)
        if updates:
            found = balance(batch, updates, ranks)
            metrics.update({name: value for name, value in found.items() if name.startswith("global_seqlen/")})
            self.metrics.update({name: value for name, value in found.items() if name not in metrics})
        return batch

    def _verls_updates(self, batch: Any, ranks: int) -> int:
        """verl's number of mini-batches if there might be one of sequences without a token to train on, else 0."""
        if not any(is_real(tag) and not has_token(tag) for tag in batch.tags):
            return 0
        policy = self.config.actor_rollout_ref
        updates = len(batch) // (int(policy.actor.ppo_mini_batch_size) * int(policy.rollout.n))
        trained = sum(map(has_token, batch.tags))
        if trained < updates:
            raise BatchError(
                f"verl makes {updates} updates of this batch of {len(batch)} sequences, but agent loops took out all "
                f"but {trained} of them (valid_row: false) or got no token of the model for them, and an update needs "
                f"one. Set {KEY}, or mend what makes the rollouts fail."
            )
        return updates if updates and len(batch) % (updates * ranks) == 0 else 0

    @contextmanager
    def around_update(self, role: str, batch: Any) -> Iterator[None]:
        if role == "actor":
            section, group, method = self.config.actor_rollout_ref.actor, self.trainer.actor_rollout_wg, "update_actor"
        else:
            section, group, method = self.config.critic, self.trainer.critic_wg, "train_mini_batch"
        n, changes = int(self.config.actor_rollout_ref.rollout.n), None
        if self.asked is not None:
            changes = settings(batch.keys, batch.tags, n, self.now, str(section.loss_agg_mode))
        if role == "actor":
            rows = changes["mini_batch_size"] if changes else int(section.ppo_mini_batch_size) * n
            self.metrics.update(step_metrics(batch.keys, batch.tags, rows, int(section.ppo_epochs)))
        with told(group, method, changes):
            yield


def updates_per_batch(config: Any) -> int | None:
    """The value of ``verl_ext.updates_per_batch``; None for verl's own behaviour."""
    remedy = (
        "give the number of updates of a batch, a whole number of at least 1, or null for mini-batches of "
        "ppo_mini_batch_size * rollout.n sequences"
    )
    return option(config, "updates_per_batch", AtLeastOne | None, remedy=remedy)


def check(config: Any) -> list[str]:
    """Check what ``verl_ext.updates_per_batch`` needs. Returns warnings. Raises OptionError: a bad value, more updates
    than a batch has samples, shuffled sequences, a critic on another number of data-parallel ranks, or a loss whose
    scale cannot be kept independent of the number of sequences."""
    updates = updates_per_batch(config)
    if updates is None:
        return []
    actor, n = config.actor_rollout_ref.actor, int(config.actor_rollout_ref.rollout.n)
    trainer = config.trainer.get("v1") or {}
    local_steps = int(select(trainer.get(trainer.get("trainer_mode", "sync")), "parameter_sync_step", 1))
    samples = int(config.data.train_batch_size) // local_steps * n
    if updates > samples:
        raise OptionError(
            f"{KEY} is {updates}, but a batch has {samples} samples (prompts times rollout.n) and an update needs at "
            f"least one. Set {KEY} to at most {samples}."
        )
    loss = str(actor.policy_loss.loss_mode)
    if loss in LOCAL_MEAN_LOSSES:
        raise OptionError(
            f"{KEY}={updates} cannot fix the scale of actor_rollout_ref.actor.policy_loss.loss_mode={loss}, which "
            f"averages over the sequences of each micro-batch, padding included. Choose another loss or set {KEY}=null."
        )
    fixed = fixed_mode(loss)
    if fixed not in (None, str(actor.loss_agg_mode)):
        raise OptionError(
            f"{KEY}={updates}: actor_rollout_ref.actor.policy_loss.loss_mode={loss} always aggregates by {fixed} in "
            f"this verl, but actor_rollout_ref.actor.loss_agg_mode={actor.loss_agg_mode}, whose divisor it would get. "
            f"Set actor_rollout_ref.actor.loss_agg_mode={fixed}."
        )
    if has_critic(config):
        _require_same_ranks(config, updates)
    sections = updated(config)
    for name, section in sections.items():
        if section.get("shuffle", False):
            raise OptionError(
                f"{name}.shuffle=true draws the sequences of each update anew, but {KEY}={updates} deals them, so that "
                f"work and padding are spread evenly and no update is without one. Set {name}.shuffle=false (verl's "
                f"default) or {KEY}=null."
            )
        if section.loss_agg_mode == "seq-mean-token-sum-norm" and section.get("loss_scale_factor") is None:
            raise OptionError(
                f"{name}.loss_agg_mode=seq-mean-token-sum-norm divides by the longest response of each micro-batch "
                f"while {name}.loss_scale_factor is null, so the scale would change with what meets in one. "
                f"Set {name}.loss_scale_factor, for example to {config.data.max_response_length} "
                "(data.max_response_length)."
            )
    return [
        f"{name}.loss_agg_mode=token-sum divides by nothing: an update of a batch with more tokens is larger, and with "
        f"{KEY}={updates} each update sums over 1/{updates} of the batch."
        for name, section in sections.items()
        if section.loss_agg_mode == "token-sum"
    ]


def _require_same_ranks(config: Any, updates: int) -> None:
    """Refuse an actor and a critic with different numbers of data-parallel ranks: sequences are dealt to the actor's,
    and verl's critic would cut other mini-batches, or none. Raises OptionError: names the sizes."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    old = int(select(actor, PARALLEL[0], 1))  # verl puts it over the one in fsdp_config; the critic's it does not read
    of_actor, of_critic = old if old > 1 else _gpus_a_row(actor, "fsdp_config"), _gpus_a_row(critic, "fsdp")
    if of_actor != of_critic:
        remedy = f"critic.fsdp.{PARALLEL[0]}={of_actor}"
        if str(critic.strategy) not in ("fsdp", "fsdp2"):
            remedy = f"the parallel sizes in critic.{critic.strategy} to those of the actor"
        raise OptionError(
            f"{KEY}={updates} deals sequences to the data-parallel ranks of the actor, where {of_actor} GPUs share one "
            f"and in the critic {of_critic} do (sequence, tensor, pipeline and context parallel sizes), so that it has "
            f"another number of ranks. Set {remedy}, or {KEY}=null."
        )


def _gpus_a_row(section: Any, fsdp: str) -> int:
    """How many GPUs have a part of each sequence in the engine of an actor or critic, whose FSDP node is `fsdp`."""
    strategy = str(select(section, "strategy", "fsdp"))
    engine = select(section, fsdp if strategy in ("fsdp", "fsdp2") else strategy)
    return math.prod(_size(engine, key) for key in PARALLEL)


def row_multiple(config: Any, updates: int, ranks: int, critic: bool) -> int:
    """The sequences of a batch must be a multiple of this, so that every step can split them evenly over `ranks`."""
    policy = config.actor_rollout_ref
    multiple = updates * ranks
    if not policy.actor.use_dynamic_bsz:
        multiple = math.lcm(multiple, updates * ranks * _size(policy.actor, "ppo_micro_batch_size_per_gpu"))
    for section in (policy.rollout, policy.ref):
        if not section.get("log_prob_use_dynamic_bsz", True):
            multiple = math.lcm(multiple, ranks * _size(section, "log_prob_micro_batch_size_per_gpu"))
    if critic and not config.critic.use_dynamic_bsz:
        multiple = math.lcm(multiple, updates * ranks * _size(config.critic, "ppo_micro_batch_size_per_gpu"))
        multiple = math.lcm(multiple, ranks * _size(config.critic, "forward_micro_batch_size_per_gpu"))
    return multiple


def _size(section: Any, name: str) -> int:
    return int(select(section, name, 1))


def deal(work: Sequence[float], padding: Sequence[bool], updates: int, ranks: int) -> list[list[list[int]]]:
    """Deal sequences into mini-batches of equal size and nearly equal work.

    Real sequences go to the mini-batch with the least work that has room, the largest first; padding is spread evenly,
    so that no mini-batch is without a real sequence. Each mini-batch is then dealt to the ranks in the same way.

    Args:
        work: [B] cost of each sequence, in any unit.
        padding: [B] whether a sequence is padding.
        updates: number of mini-batches.
        ranks: data-parallel size; B is a multiple of ``updates * ranks``.

    Returns:
        For each mini-batch and rank the positions of its sequences, ascending.

    Raises:
        ValueError: B is not such a multiple, or there are fewer real sequences than updates.
    """
    size = len(work)
    if size % (updates * ranks):
        raise ValueError(f"{size} sequences cannot be dealt into {updates} updates on {ranks} ranks evenly")
    real = [row for row in range(size) if not padding[row]]
    if len(real) < updates:
        raise ValueError(f"{len(real)} sequences cannot be dealt into {updates} updates: an update needs one")
    pads = [row for row in range(size) if padding[row]]
    shares = [pads[update::updates] for update in range(updates)]
    room = [size // updates - len(share) for share in shares]
    start = [float(sum(work[row] for row in share)) for share in shares]
    dealt = _least_loaded(real, work, room, start)
    return [
        _least_loaded(rows + share, work, [size // updates // ranks] * ranks, [0.0] * ranks)
        for rows, share in zip(dealt, shares, strict=True)
    ]


def _least_loaded(
    rows: Sequence[int], work: Sequence[float], room: Sequence[int], start: Sequence[float]
) -> list[list[int]]:
    """Put each sequence, the largest first, into the bin with the least work that still has room."""
    bins: list[list[int]] = [[] for _ in room]
    heap = [(load, number) for number, load in enumerate(start) if room[number] > 0]
    heapq.heapify(heap)
    for row in sorted(rows, key=lambda row: -work[row]):
        load, number = heapq.heappop(heap)
        bins[number].append(row)
        if len(bins[number]) < room[number]:
            heapq.heappush(heap, (load + work[row], number))
    return [sorted(chosen) for chosen in bins]


def balance(batch: Any, updates: int, ranks: int) -> dict[str, float]:
    """Reorder a padded batch in place so that verl's even cuts give the mini-batches of `deal`. Returns as metrics the
    prompt and response tokens of the mini-batches, and verl's ``global_seqlen/*`` for the ranks as they now are."""
    import torch
    from verl.utils.seqlen_balancing import calculate_workload, log_seqlen_unbalance

    lengths = [int(tag["seq_len"]) for tag in batch.tags]
    padding = [not has_token(tag) for tag in batch.tags]
    work = calculate_workload(torch.tensor(lengths, dtype=torch.int64)).double().tolist()
    mini_batches = deal(work, padding, updates, ranks)
    partitions = [[row for mini_batch in mini_batches for row in mini_batch[rank]] for rank in range(ranks)]
    metrics = log_seqlen_unbalance(lengths, partitions, prefix="global_seqlen")
    tokens = [
        sum(0 if padding[row] else lengths[row] for part in mini_batch for row in part) for mini_batch in mini_batches
    ]
    metrics.update({"updates/mini_batch_tokens/min": min(tokens), "updates/mini_batch_tokens/max": max(tokens)})
    batch.reorder([row for partition in partitions for row in partition])
    return metrics


def settings(keys: Sequence[str], tags: Sequence[Mapping[str, Any]], n: int, updates: int, mode: str) -> dict[str, Any]:
    """What verl's worker is told of a batch, padding included, with `n` samples a prompt: ``mini_batch_size`` in
    sequences and ``global_batch_size``, verl's name for the divisor of the seq-mean modes."""
    real = [key for key, tag in zip(keys, tags, strict=True) if is_trained(tag)]
    prompts = {split_key(key)[0] for key in real}
    units = len(real) if mode == "seq-mean-token-mean" else len(prompts) * n
    return {"mini_batch_size": len(keys) // updates, "global_batch_size": units / updates}


@contextmanager
def told(worker_group: Any, method: str, changes: Mapping[str, Any] | None) -> Iterator[None]:
    """Add `changes`, if any, to the ``extra_info`` of the batch that verl hands to a method of a worker group in this
    block: verl 0.9.1 writes its own sizes there right before the call, so others can be said here alone."""
    if changes is None:
        yield
        return
    original = getattr(worker_group, method)
    own = method in vars(worker_group)

    def call(batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch.extra_info.update(changes)
        return original(batch, *args, **kwargs)

    setattr(worker_group, method, call)
    try:
        yield
    finally:
        if own:
            setattr(worker_group, method, original)
        else:
            delattr(worker_group, method)


def step_metrics(keys: Sequence[str], tags: Sequence[Mapping[str, Any]], rows: int, epochs: int) -> dict[str, float]:
    """How a padded batch was cut into mini-batches of `rows` sequences."""
    return {
        "updates/per_batch": float(len(keys) // rows * epochs),
        "updates/mini_batch_sequences": float(rows),
        "updates/padding_sequences": float(sum(not is_real(tag) for tag in tags)),
    }
