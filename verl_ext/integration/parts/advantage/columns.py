# SPDX-License-Identifier: Apache-2.0
"""The fields of the batch's turns: read once, kept for all parts; and turns that their agent loop took out are not
trained on.

What verl has stored are sequences, and which turns they hold is said here (`verl_ext.integration.turns`). A turn whose
agent loop says ``valid_row: false`` gets ``response_mask`` and ``loss_mask`` 0 before any pass over the
batch, so it is in no loss term, no KL, no entropy and no denominator, whatever the estimator: of a sequence here, of a
turn in one when it is merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_ext.integration import columns
from verl_ext.integration.columns import ActiveBatch, is_real
from verl_ext.integration.compat import data_plane
from verl_ext.integration.engines import loss_turns
from verl_ext.integration.estimators import ESTIMATORS
from verl_ext.integration.mix import component_names
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings import merging, model_options
from verl_ext.integration.settings.options import OptionError, bypass, option, select
from verl_ext.integration.turns import Layout, Turns, lay_out

VERL_OTB = {"optimal_token_baseline", "tir_optimal_token_baseline"}
"""verl's own estimators that read sum_pi_squared, which V1 never asks the engine for."""


class Columns(Part):
    """See the module's text."""

    def __init__(self, config: Any, trainer: Any = None) -> None:
        super().__init__(config, trainer)
        self.needs = engine_columns(config)
        names = component_names(config.algorithm)
        self.along = "gae" in names and merging.merges(config)
        self._extra: dict[str, Mapping[str, Any]] = {}
        self._of_padding: Mapping[str, Any] = {}
        self._batch: Any = None

    @classmethod
    def check(cls, config: Any) -> list[str]:
        if "sum_pi_squared" in engine_columns(config):
            check_sum_pi_squared(config)
        merging.merges(config)
        return []

    def on_sample(self, batch: Any) -> Any:
        found = data_plane.fetch(batch, ["extra_fields", "loss_mask"])
        data, masks = found.get("extra_fields"), found.get("loss_mask")
        if masks is not None:
            _mark_empty(batch, masks)
        said = [{}] * len(batch) if data is None else dicts(data)
        self._extra = dict(zip(batch.keys, [{} if row is None else row for row in said], strict=True))
        self._of_padding = self._extra[batch.keys[0]]  # verl makes padding from the first sequence
        for key, row in self._extra.items():
            if not isinstance(row, Mapping):
                raise TypeError(f"extra_fields of {key} is a {type(row).__name__}; an agent loop returns a dict")
        out = [key for key, row in self._extra.items() if not columns.truth(row, "valid_row", key)]
        return take_out(batch, out) if out else batch

    def on_batch(self, batch: Any, active: ActiveBatch, metrics: dict[str, Any]) -> Any:
        said = [self._extra.get(key, self._of_padding) for key in batch.keys]
        active.stored, active.said, active.along = list(batch.keys), said, self.along
        layout = lay_out(batch.keys, batch.tags, said)
        active.turns, active.keys, active.tags = layout.turns, layout.keys, layout.tags
        active.extra_fields = layout.said
        found, active.missing = columns.row_fields(active.keys, active.tags, active.extra_fields)
        active.columns.update(found)
        self.metrics.update(sizes(batch.tags, layout))
        if active.turns.sequence is not None and set(merging.losses(self.config)) & set(merging.OURS):
            store_numbers(batch, active.turns)
        active.earned = {name: found[name] for name in ("valid_row", "turn_reward") if name in found}
        self._batch = batch
        return batch

    def before_old_log_prob(self, batch: Any) -> Any:
        if "sum_pi_squared" in self.needs:
            batch.extra_info["calculate_sum_pi_squared"] = True
        return batch

    def before_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        if "sum_pi_squared" not in self.needs:
            return
        from verl.workers.utils.padding import response_from_nested

        found = data_plane.fetch(self._batch, ["sum_pi_squared", "response_mask"])
        if "sum_pi_squared" not in found:
            raise columns.RowFieldMissing(
                "the training engine returned no sum_pi_squared with the old log-probabilities. It needs "
                "actor_rollout_ref.model.use_fused_kernels=false and an FSDP, VeOmni or Megatron engine."
            )
        nested = response_from_nested(found["sum_pi_squared"], found["response_mask"])
        data.batch["sum_pi_squared"] = active.turns.unpack(nested.to_padded_tensor(0.0).float())


def engine_columns(config: Any) -> set[str]:
    """Token columns that the run's estimators and metrics need from the engine's pass over the old policy's logits."""
    names = component_names(config.algorithm)
    needs = {column for name in names if name in ESTIMATORS for column in ESTIMATORS[name].columns}
    named = VERL_OTB & set(names) or logit_update_wanted(config)
    return needs | ({"sum_pi_squared"} if named or _recorded(config) else set())


def _recorded(config: Any) -> bool:
    """Whether a record (`verl_ext.integration.parts.outputs.record`) gets sum_pi_squared: where the engines of all
    models can compute it."""
    if not select(config.get("verl_ext"), "record_dir"):
        return False
    try:
        for one in (config, *(model.config(config) for model in model_options.of(config))):
            check_sum_pi_squared(one)
    except OptionError:
        return False
    return True


def logit_update_wanted(config: Any) -> bool:
    """``verl_ext.logit_update``."""
    return option(config, "logit_update", bool, False)


def check_sum_pi_squared(config: Any) -> None:
    """The sum of squared probabilities needs a pass over the old policy's logits. Raises OptionError: there is none, or
    its engine cannot compute it."""
    who = "verl_ext.logit_update" if logit_update_wanted(config) else "otb"
    model_options.require_engines(config, who, "sum_pi_squared")
    if bypass(config):
        raise OptionError(
            f"{who} needs sum_pi_squared, which comes with the old log-probabilities, but "
            "algorithm.rollout_correction.bypass_mode=true skips that pass. Set it to false."
        )
    if config.actor_rollout_ref.model.get("use_fused_kernels", False):
        raise OptionError(
            f"{who} needs the logits, which fused kernels never form. Set "
            "actor_rollout_ref.model.use_fused_kernels=false."
        )
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy not in ("fsdp", "fsdp2", "megatron", "veomni"):
        raise OptionError(
            f"{who} needs sum_pi_squared from the training engine; verl's {strategy!r} engine does not compute it. "
            "Set actor_rollout_ref.actor.strategy to fsdp, fsdp2, megatron or veomni."
        )


def sizes(tags: Sequence[Mapping[str, Any]], layout: Layout) -> dict[str, float]:
    """How many sequences and turns a batch has without padding; the tokens of its sequences, and how many they would be
    if each turn were a sequence with all that stands before it."""
    real = [int(tag["seq_len"]) for tag in tags if is_real(tag)]
    by_call = real
    if layout.turns.sequence is not None:
        ends = zip(layout.tags, layout.turns.end.tolist(), strict=True)
        by_call = [int(tag["prompt_len"]) + end for tag, end in ends if is_real(tag)]
    found = {"sequences": len(real), "turns": len(by_call), "tokens": sum(real), "tokens_by_call": sum(by_call)}
    return {f"rollout/{name}": float(count) for name, count in found.items()}


def store_numbers(batch: Any, turns: Turns) -> None:
    """Say at each token of verl's store which turn it belongs to, for losses that look along a turn."""
    import torch

    rows = zip(turns.numbers().unbind(), batch.tags, strict=True)
    numbers = torch.nested.as_nested_tensor([row[: tag["response_len"]] for row, tag in rows], layout=torch.jagged)
    data_plane.write(batch, {loss_turns.COLUMN: numbers})


def _mark_empty(batch: Any, masks: Any) -> None:
    """Say in the tags which sequences have no token of the model in their `masks`."""
    for tag, mask in zip(batch.tags, masks.unbind(), strict=True):
        if not mask.any():
            tag[columns.EMPTY] = True


def take_out(batch: Any, keys: Sequence[str]) -> Any:
    """Set the masks of the sequences `keys` to 0 in verl's store, and say so in their tags.

    Args:
        batch: verl's KVBatchMeta; its tags are changed.
        keys: their storage keys.
    """
    import torch

    masks = data_plane.fetch(batch, ["response_mask"], keys)
    zeros = torch.nested.as_nested_tensor(
        [torch.zeros_like(row) for row in masks["response_mask"].unbind()], layout=torch.jagged
    )
    tags = [{columns.VALID: False}] * len(keys)
    data_plane.write(batch, {"response_mask": zeros, "loss_mask": zeros.clone()}, keys, tags)
    out = set(keys)
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        if key in out:
            tag[columns.VALID] = False
    return batch


def dicts(column: Any) -> list[Any]:
    """The entries of an object column; tensordict keeps them in a stack of wrappers or in a plain list."""
    entries = column.tolist() if hasattr(column, "tolist") else list(column)
    return [entry if isinstance(entry, Mapping) else getattr(entry, "data", entry) for entry in entries]
