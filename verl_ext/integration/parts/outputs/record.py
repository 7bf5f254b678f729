# SPDX-License-Identifier: Apache-2.0
"""``verl_ext.record_dir``: what the estimators saw of the last batches, one file a batch; `verl-ext whatif` reads it.

A file holds the samples of a batch as they are right before the advantage: tensors, numbers, text, lists and dicts and
nothing else, so that `torch.load` reads it without running anything that it brings. `record_of` has its entries.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from verl_ext.integration.columns import TOKEN_COLUMNS, ActiveBatch, row_lacks
from verl_ext.integration.compat.data_plane import fetch
from verl_ext.integration.parts.advantage.columns import engine_columns
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings.options import option, select
from verl_ext.methods.options import AtLeastOne

FORMAT = 1
TOKENS = ("response_mask", "token_level_rewards", "token_level_scores", *TOKEN_COLUMNS)
"""Columns of tokens, [B, T]; a batch has the first three and those of the rest that its run computes."""
SCALARS = (str, int, float, bool)


class Record(Part):
    """Writes the batch after every other part has had its say on what the estimator sees."""

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return bool(select(config.get("verl_ext"), "record_dir"))

    @classmethod
    def check(cls, config: Any) -> list[str]:
        remedy = "give the number of last training steps whose batches are kept, a whole number of at least 1"
        option(config, "record_steps", AtLeastOne, 1, remedy)
        if cls.wanted(config) and "sum_pi_squared" not in engine_columns(config):
            return [
                "verl_ext.record_dir: the records will hold no sum_pi_squared, which needs the logits of a pass over "
                "the old policy (no bypass mode, no fused kernels, FSDP or Megatron); verl-ext whatif will count every "
                "token alike and leave otb out."
            ]
        return []

    def before_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        found = fetch(self.batch, ["prompts", "responses", "entropy"])
        tokens = {name: data.batch[name] for name in TOKENS if name in data.batch.keys()}
        if "entropy" in found and "entropy" not in tokens:
            tokens["entropy"] = active.turns.unpack(found["entropy"].to_padded_tensor(0.0))
        prompts, responses = active.turns.texts(found["prompts"].unbind(), found["responses"].unbind())
        texts = {"prompts": prompts, "responses": responses}
        record = record_of(self.trainer.global_steps, self.config, keys, active, tokens, texts)
        node, repeat = self.config.verl_ext, int(self.trainer.local_trigger_step)
        write(Path(node.record_dir), record, repeat, keep=int(select(node, "record_steps", 1)))


def record_of(
    step: int,
    config: Any,
    keys: Sequence[str],
    active: ActiveBatch,
    tokens: Mapping[str, torch.Tensor],
    texts: Mapping[str, Sequence[torch.Tensor]],
) -> dict[str, Any]:
    """The samples of a batch as a file holds them: turns that are padding, or that their agent loop took out, are not.

    Args:
        step: training step.
        keys: [B] storage keys.
        active: turn fields, completed for the estimator.
        tokens: [B, T] tensors, of `TOKENS`.
        texts: ``prompts`` and ``responses``, [B] token ids of each turn.

    Returns:
        ``format, step, keys`` [V], ``tokens`` (name: [V, T] tensor), ``columns`` (name: [V] tensor or list),
        ``missing`` (name: why it is not there), ``algorithm`` (verl's node), ``temperature``, ``prompts`` and
        ``responses`` ([V] int32 tensors of ids).
    """
    rows = np.flatnonzero(active.columns["valid_row"])
    missing, columns = dict(active.missing), {}
    for name in sorted(_plain_fields(active.extra_fields, rows) | (set(active.columns) - set(TOKENS))):
        column = active.column(name)
        if column is None:
            missing[name] = active.missing.get(name, "it is not there")
            continue
        try:
            columns[name] = plain(np.asarray(column)[rows])
        except TypeError as error:
            missing[name] = f"its entries cannot be recorded: {error}"
    width = len(tokens["response_mask"][0])
    return {
        "format": FORMAT,
        "step": int(step),
        "keys": [keys[row] for row in rows],
        "tokens": {name: _as_wide(column[rows], width) for name, column in tokens.items()},
        "columns": columns,
        "missing": missing,
        "algorithm": OmegaConf.to_container(config.algorithm, resolve=True),
        "temperature": float(select(config.actor_rollout_ref.rollout, "temperature", 1.0)),
        **{name: [ids[row].to(torch.int32) for row in rows] for name, ids in texts.items()},
    }


def _as_wide(column: torch.Tensor, width: int) -> torch.Tensor:
    """A column [B, S] with S of at most `width` as [B, width], padded with 0."""
    return torch.nn.functional.pad(column, (0, width - column.shape[1])).contiguous()


def _plain_fields(extra_fields: Sequence[Mapping[str, Any]], rows: np.ndarray) -> set[str]:
    """What the agent loops said of every sample that is one text or number: a method may group by it."""
    said = [extra_fields[row] for row in rows] if extra_fields else []
    names = set(said[0]) if said else set()
    return {n for n in names if all(not row_lacks(row, n) and isinstance(row[n], SCALARS) for row in said)}


def plain(value: Any) -> Any:
    """`value` of tensors, numbers, text, lists and dicts alone; a column keeps its values as the methods compare them.
    Raises TypeError: it holds something else."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(np.ascontiguousarray(value))
    if value is None or isinstance(value, SCALARS):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(one) for one in value]
    raise TypeError(f"a {type(value).__name__} is neither tensor, number, text, list nor dict")


def write(folder: Path, record: Mapping[str, Any], repeat: int, keep: int) -> None:
    """Write ``<folder>/<step>.pt`` (``<step>.<repeat>.pt`` for further updates of a step) and drop files of old steps.

    Args:
        folder: made if it is not there.
        record: of `record_of`.
        repeat: number of the update within its step, from 0.
        keep: number of last steps whose files stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    step = record["step"]
    path = folder / (f"{step}.{repeat}.pt" if repeat else f"{step}.pt")
    torch.save(dict(record), path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)
    for old in folder.glob("*.pt"):
        number, again, *_ = old.name.split(".")
        if number.isdigit():
            place = int(number), int(again) if again.isdigit() else 0
            # What comes later than this one is of a run that was given up for its last checkpoint.
            if place[0] <= step - keep or place > (step, repeat):
                old.unlink()
