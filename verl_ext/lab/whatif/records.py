# SPDX-License-Identifier: Apache-2.0
"""Recorded batches (`verl_ext.integration.parts.outputs.record`), and what a registered estimator makes of one.

The estimators are called as in training, through verl's own advantage computation and the one adapter of this package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.common.overrides import Failure
from verl_ext.integration.columns import ActiveBatch, BatchError, split_key
from verl_ext.integration.estimators import ESTIMATORS
from verl_ext.integration.mix import component_names
from verl_ext.integration.names import register
from verl_ext.integration.parts.advantage.methods import check_advantages, estimate
from verl_ext.integration.parts.outputs.record import FORMAT, TOKENS
from verl_ext.integration.settings.options import OptionError, near, select
from verl_ext.recipes import suggestion


class RecordError(Failure):
    """There is no record, or one cannot be used; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Record:
    """The samples of a batch, right before the advantage."""

    path: Path  # of the file
    step: int  # training step
    keys: list[str]  # [B] storage keys, ``{uid}_{session}_{index}``
    tokens: dict[str, torch.Tensor]  # name: [B, T]; the first three of `TOKENS` and what else the run had
    columns: dict[str, np.ndarray]  # name: [B], a turn field
    missing: dict[str, str]  # name: why a turn field is not there
    algorithm: DictConfig  # verl's node of that name
    temperature: float  # of the rollouts
    prompts: list[torch.Tensor]  # [B] int, token ids
    responses: list[torch.Tensor]  # as `prompts`

    def drawn(self, rows: np.ndarray, copies: np.ndarray, again: np.ndarray | None = None) -> Record:
        """The turns at positions `rows` [R]; those of each of the `copies` [R] are a batch of prompts of their own, and
        those where `again` [R] is True another trajectory than the same turns where it is not."""
        split = [split_key(self.keys[row]) for row in rows]
        marks = ["+" if one else "" for one in (again if again is not None else np.zeros(len(rows)))]
        keys = [
            f"{u}~{c}{traj[len(u) :]}{mark}_{turn}"
            for (u, traj, turn), c, mark in zip(split, copies, marks, strict=True)
        ]
        trajectories = np.array([key.rsplit("_", 1)[0] for key in keys], dtype=object)
        return dataclasses.replace(
            self,
            keys=keys,
            tokens={name: column[rows] for name, column in self.tokens.items()},
            columns={name: column[rows] for name, column in self.columns.items()} | {"traj_uid": trajectories},
        )


def find(runs: Sequence[Path]) -> list[Path]:
    """The files of records of runs: each a folder of a run (with ``records/`` in it), of records, or one file. Raises
    RecordError: a run has none.
    """
    found: list[Path] = []
    for run in runs:
        inside = [run] if run.is_file() else [*run.glob("*.pt"), *run.glob("records/*.pt")]
        if not inside:
            said = "there is no record (records/STEP.pt); a run writes them with verl_ext.record_dir=FOLDER"
            raise RecordError(f"{run}: {said}")
        found += sorted(inside, key=lambda path: [int(n) if n.isdigit() else -1 for n in path.stem.split(".")])
    return list(dict.fromkeys(found))


def read(path: Path, changes: Sequence[str] = ()) -> Record:
    """Read a record; nothing in the file is run. `changes` are ``algorithm.KEY=VALUE``: options under which the
    estimators are called. Raises RecordError: it is no whole record, or a change is none of the ``algorithm`` node.
    """
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a broken file fails in many ways, none of which is worth a traceback
        said = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        raise RecordError(f"{path}: not a record ({said})") from error
    if not isinstance(found, Mapping) or found.get("format") != FORMAT:
        raise RecordError(f"{path}: not a record of format {FORMAT}")
    fields = {field.name for field in dataclasses.fields(Record)} - {"path"}
    if absent := sorted(fields - set(found)):
        raise RecordError(f"{path}: not a whole record, it lacks {', '.join(absent)}")
    tokens, size = dict(found["tokens"]), len(found["keys"])
    shape = tuple(getattr(tokens.get("response_mask"), "shape", ()))
    if len(shape) != 2 or shape[0] != size or not size:
        raise RecordError(f"{path}: response_mask has the shape {shape}; it must have a row for each of {size} keys")
    for name in TOKENS[:3]:
        if name not in tokens:
            raise RecordError(f"{path}: not a whole record, it lacks tokens.{name}")
    if not bool(((tokens["response_mask"] == 0) | (tokens["response_mask"] == 1)).all()):
        raise RecordError(f"{path}: response_mask holds numbers other than 0 and 1")
    for name, column in tokens.items():
        if tuple(column.shape) != shape:
            raise RecordError(f"{path}: tokens.{name} has the shape {tuple(column.shape)}, response_mask {shape}")
        if not bool(torch.isfinite(column[tokens["response_mask"].bool()]).all()):
            raise RecordError(f"{path}: tokens.{name} holds NaN or infinity on a model token")
    for name in ("prompts", "responses"):
        if len(found[name]) != size:
            raise RecordError(f"{path}: {name} has {len(found[name])} entries for {size} rows")
    try:
        for key in found["keys"]:
            split_key(key)
        columns = {name: _column(column, size) for name, column in found["columns"].items()}
        algorithm = OmegaConf.create({"algorithm": found["algorithm"]})
        check_changes(changes, algorithm)
        algorithm.merge_with_dotlist(list(changes))
    except RecordError:
        raise
    except (ValueError, OmegaConfBaseException) as error:
        raise RecordError(f"{path}: {error}") from error
    kept = {name: found[name] for name in fields - {"tokens", "columns", "algorithm"}}
    return Record(path=path, tokens=tokens, columns=columns, algorithm=algorithm.algorithm, **kept)


def check_changes(changes: Sequence[str], recorded: DictConfig) -> None:
    """Raises RecordError: a change is no ``algorithm.KEY=VALUE`` of a key that was recorded or that an estimator or
    verl's own ``algorithm`` node has."""
    options = set()
    if changes:
        with _quiet():
            from verl.trainer.config import AlgoConfig
            from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

            register()  # ours and those of other packages

        options = {f"algorithm.{field.name}" for field in dataclasses.fields(AlgoConfig)}
        options |= {f"algorithm.{name}" for name in ("mix", "mix_normalize", *ESTIMATORS)}
        options |= {f"algorithm.mix.{name}" for name in ADV_ESTIMATOR_REGISTRY}
        for name, one in ESTIMATORS.items():
            options |= {f"algorithm.{name}.{option}" for option in one.parameters.options}
    for change in changes:
        key, equals, _ = change.partition("=")
        if not equals or not key.startswith("algorithm."):
            raise RecordError(f"{change}: give algorithm.KEY=VALUE; nothing else changes an advantage")
        parent, _, last = key.rpartition(".")
        node = OmegaConf.select(recorded, parent)
        if key not in options and not (isinstance(node, DictConfig) and last in node):
            raise RecordError(f"--set {key}: no estimator has such an option{near(key, options)}")


def _column(column: Any, size: int) -> np.ndarray:
    """A turn field as the trainer has it: numbers in an array of theirs, all else in one of objects."""
    if len(column) != size:
        raise ValueError(f"a turn field has {len(column)} entries for {size} rows")
    return column.numpy() if isinstance(column, torch.Tensor) else np.fromiter(column, dtype=object, count=size)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """For imports of verl, which remarks on engines and accelerators that are not here: a record needs none."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def known(names: Collection[str] = (), algorithms: Sequence[Any] = ()) -> list[str]:
    """Registered estimators: those named; or ours, then verl's, and the mixture of the runs where each is one. Raises
    RecordError: a name is not registered.
    """
    with _quiet():
        from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

        register()
    every = [*ESTIMATORS, *(name for name in map(str, ADV_ESTIMATOR_REGISTRY) if name not in {*ESTIMATORS, "mix"})]
    for name in names:
        if name not in {*every, "mix"}:
            raise RecordError(f"no estimator {name!r} is registered{suggestion(name, every)}")
    mixed = [select(one, "adv_estimator") == "mix" and len(component_names(one)) > 1 for one in algorithms]
    return list(names) or [*every, *(["mix"] if mixed and all(mixed) else [])]


def advantages(record: Record, name: str, algorithm: Any = None) -> torch.Tensor:
    """The advantages that a registered estimator gives the turns of a record, [B, T] float64, 0 off the model tokens.

    `algorithm` is verl's node, if not the record's. Raises BatchError: it cannot run on these turns; RecordError: an
    option of it has no such value.
    """
    with _quiet():
        from verl import DataProto
        from verl.trainer.ppo.core_algos import get_adv_estimator_fn
        from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

        register()
    algorithm = record.algorithm if algorithm is None else algorithm
    if name not in {*ESTIMATORS, "mix", "grpo"}:
        # What verl's trainer has for every estimator that it calls by its registered name.
        given = ("token_level_rewards", "response_mask", "index", "config", "kwargs")
        asked = inspect.signature(get_adv_estimator_fn(name)).parameters.values()
        needs = [one.name for one in asked if one.default is one.empty and one.name not in given]
        if "values" in needs:
            raise BatchError("needs a critic")
        if lacking := [one for one in needs if one not in record.tokens]:
            raise BatchError(f"needs {', '.join(lacking)}, which the record does not hold")
    data = DataProto.from_dict(
        tensors={key: column.clone() for key, column in record.tokens.items()},
        non_tensors={"uid": np.array([split_key(key)[0] for key in record.keys], dtype=object)},
    )
    active = ActiveBatch(columns={**record.columns, **record.tokens}, missing=dict(record.missing))
    active.columns["valid_row"] = np.ones(len(record.keys), dtype=bool)
    try:
        out = estimate(
            compute_advantage_for_multi_trajectories,
            data,
            record.keys,
            name,
            active,
            gamma=select(algorithm, "gamma", 1.0),
            lam=select(algorithm, "lam", 1.0),
            norm_adv_by_std_in_grpo=select(algorithm, "norm_adv_by_std_in_grpo", True),
            config=algorithm,
        )
    except OptionError as error:
        raise RecordError(str(error)) from error
    except (AssertionError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise BatchError(f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}") from error
    found = out.batch["advantages"]
    check_advantages(found, record.keys, name)
    return torch.where(record.tokens["response_mask"].bool(), found, 0.0).double()
