# SPDX-License-Identifier: Apache-2.0
"""Running the cells of a table on this machine, one after the other: what is complete is skipped, the rest goes on."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from verl_ext.reproduce import needs, plan, runs
from verl_ext.reproduce.tables import Cell, Scale, Table

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@dataclass
class Request:
    """What is to be run."""

    table: Table
    scale: Scale  # the table's
    cells: Sequence[Cell]
    seeds: Sequence[int]
    steps: int | None = None  # training steps instead of the scale's
    out: Path = runs.DEFAULT_OUT  # folder of all runs
    extra: Sequence[str] = ()  # Hydra overrides, applied last
    collect: bool = True  # write and print the table afterwards
    check: bool = True  # look for what is missing first

    def __post_init__(self) -> None:
        self.out = self.out.absolute()
        if self.steps is None:
            self.steps = self.scale.steps

    def collected(self) -> int:
        """Write and print the table; the exit code of ``collect``."""
        from verl_ext.reproduce import render

        print(flush=True)
        return render.main(self.table, self.scale.name, self.out)


class Job(NamedTuple):
    """One run to be made, and whether it is complete."""

    cell: Cell
    seed: int
    folder: Path
    done: bool
    name: str  # for people


def jobs(request: Request) -> list[Job]:
    """The runs of cells and seeds, all cells of a seed before the next seed: an interrupted table has fewer seeds.
    Raises RunError: a run folder holds something else, or was begun with other settings. Nothing is written either way.
    """
    one, found = request, []
    for seed, cell in itertools.product(one.seeds, one.cells):
        run, done = runs.examine(one.table, one.scale, cell, seed, steps=one.steps, extra=one.extra, out=one.out)
        found.append(Job(cell, seed, run.path, done, f"{cell.name}, seed {seed}"))
    return found


def run_cell(request: Request, job: Job) -> int:
    """Start one run, or go on with it. Returns the exit code of verl's trainer; 130 after Ctrl-C; 1 if the trainer
    ended before its last step. Raises RunError: the folder cannot be used, or another process is at it.
    """
    one, steps = request, request.steps
    with runs.locked(job.folder):
        runs.begin(one.table, one.scale, job.cell, job.seed, steps=steps, extra=one.extra, out=one.out)
        if steps is not None and runs.steps_of(job.folder) >= steps:
            print("all steps are logged: it was stopped after the last one", flush=True)
            runs.end(job.folder, runs.COMPLETE, 0, 0.0)
            return 0
        started = time.monotonic()
        state, code = runs.STARTED, INTERRUPTED
        try:
            code = _train(request, job)
            reached = runs.steps_of(job.folder)
            if code == 0 and steps is not None and reached < steps:
                print(f"the trainer ended at step {reached} of {steps}; see {job.folder / 'log.txt'}", file=sys.stderr)
                code = 1
            if code != INTERRUPTED:
                state = runs.COMPLETE if code == 0 else runs.FAILED
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on from here", flush=True)
        except BaseException:
            state, code = runs.FAILED, 1
            raise
        finally:
            runs.end(job.folder, state, code, time.monotonic() - started)
    return code


def _train(request: Request, job: Job) -> int:
    from verl_ext.demo.run import run_task, start_trainer
    from verl_ext.demo.tasks import TASKS

    table, scale, steps = request.table, request.scale, request.steps
    if scale.name == "laptop":
        assert scale.task is not None and steps is not None  # the tables' reader demands them of a laptop scale
        words = [*plan.laptop_overrides(table, job.cell, job.seed, job.folder), *request.extra]
        return run_task(TASKS[scale.task], job.cell.recipe, steps=steps, seed=job.seed, out=job.folder, extra=words)
    words = plan.full_words(table, job.cell, job.seed, job.folder, steps=steps)
    words = [plan.expand(word, scale.needs.inputs, os.environ) for word in words]
    return start_trainer([*words, *request.extra], job.folder, steps)


def run(request: Request) -> int:
    """Run cells and seeds of a table and collect it.

    Returns 0 if all runs are complete; 1 if something is missing before the start; else the code of the first run that
    failed, which does not keep the others from being run; Ctrl-C does (130). Raises RunError: a run folder holds
    something else, or was begun with other settings; nothing was started.
    """
    table, scale = request.table, request.scale
    found = jobs(request)
    waiting = [job.cell for job in found if not job.done]
    if request.check and waiting:
        if missing := needs.lacks(table, scale, waiting, request.extra, sums=True):
            said = f"{table.name} cannot be run at {scale.name} scale here:"
            print(said, *missing, sep="\n  - ", file=sys.stderr)
            return 1
    codes, failed = [], []
    for number, job in enumerate(found, start=1):
        head = f"[{number}/{len(found)}] {table.name} ({scale.name} scale), {job.name}"
        if job.done:
            print(f"{head}: complete in {job.folder}", flush=True)
            continue
        reached = runs.steps_of(job.folder)
        print(f"\n{head}: {'begins' if not reached else f'was at step {reached}, goes on'} in {job.folder}", flush=True)
        codes.append(run_cell(request, job))
        if codes[-1] == INTERRUPTED:
            break
        if codes[-1]:
            failed.append(job.name)
    if failed:
        print(f"\nfailed: {'; '.join(failed)}; the same command tries them again", file=sys.stderr)
    if request.collect and INTERRUPTED not in codes:
        codes.append(request.collected())
    return next(filter(None, codes), 0)
