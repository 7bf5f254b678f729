# SPDX-License-Identifier: Apache-2.0
"""Running the cells of a table on this machine, one after the other: what is complete is skipped, the rest goes on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_ext.reproduce import needs, plan, runs
from verl_ext.reproduce.tables import Cell, Scale, Table

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@dataclass(frozen=True)
class Job:
    """One run to be made.

    Attributes:
        cell, seed: which.
        folder: of the run.
        done: whether it is complete.
    """

    cell: Cell
    seed: int
    folder: Path
    done: bool

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.cell.name}, seed {self.seed}"


def jobs(
    table: Table,
    scale: Scale,
    cells: Sequence[Cell],
    seeds: Sequence[int],
    *,
    steps: int | None,
    out: Path,
    extra: Sequence[str],
) -> list[Job]:
    """The runs of cells and seeds, all cells of a seed before the next seed: an interrupted table has fewer seeds.

    Nothing is written.

    Raises:
        RunError: a run folder holds something else, or was begun with other settings.
    """
    found = []
    for seed in seeds:
        for cell in cells:
            folder, _, done = runs.examine(table, scale, cell, seed, steps=steps, extra=extra, out=out)
            found.append(Job(cell, seed, folder, done))
    return found


def run_cell(table: Table, scale: Scale, job: Job, *, steps: int | None, out: Path, extra: Sequence[str]) -> int:
    """Start one run, or go on with it.

    Returns:
        The exit code of verl's trainer; 130 after Ctrl-C; 1 if the trainer ended before its last step.

    Raises:
        RunError: the folder cannot be used, or another process is at it.
        ImportError: a package is missing to make the model and data of the laptop scale.
    """
    with runs.locked(job.folder):
        runs.begin(table, scale, job.cell, job.seed, steps=steps, extra=extra, out=out)
        if steps is not None and runs.steps_of(job.folder) >= steps:
            print("all steps are logged: it was stopped after the last one", flush=True)
            runs.end(job.folder, runs.COMPLETE, 0, 0.0)
            return 0
        started = time.monotonic()
        state, code = runs.STARTED, INTERRUPTED
        try:
            if scale.name == "laptop":
                code = _laptop(table, scale, job, steps, extra)
            else:
                code = _full(table, scale, job, steps, extra)
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


def _laptop(table: Table, scale: Scale, job: Job, steps: int | None, extra: Sequence[str]) -> int:
    from verl_ext.demo.run import run_task
    from verl_ext.demo.tasks import TASKS

    task = TASKS[str(scale.task)]
    words = [*plan.laptop_overrides(table, job.cell, job.seed, job.folder), *extra]
    total = task.settings.steps if steps is None else steps
    return run_task(task, job.cell.recipe, steps=total, seed=job.seed, out=job.folder, extra=words)


def _full(table: Table, scale: Scale, job: Job, steps: int | None, extra: Sequence[str]) -> int:
    from verl_ext.demo.run import start_trainer

    words = plan.full_words(table, job.cell, job.seed, job.folder, steps=steps)
    words = [plan.expand(word, scale.needs.inputs, os.environ) for word in words]
    return start_trainer([*words, *extra], job.folder, steps)


def run(
    table: Table,
    scale: Scale,
    cells: Sequence[Cell],
    seeds: Sequence[int],
    *,
    steps: int | None = None,
    out: Path = runs.DEFAULT_OUT,
    extra: Sequence[str] = (),
    collect: bool = True,
    check: bool = True,
) -> int:
    """Run cells and seeds of a table and collect it.

    Args:
        table, scale: what to run; the scale is the table's.
        cells, seeds: of it.
        steps: training steps instead of the scale's.
        out: folder of all runs.
        extra: Hydra overrides, applied last.
        collect: write and print the table afterwards.
        check: look for what is missing first.

    Returns:
        0 if all runs are complete; 1 if something is missing before the start; else the code of the first run that
        failed. A run that fails does not keep the others from being run; Ctrl-C does (130).

    Raises:
        RunError: a run folder holds something else, or was begun with other settings; nothing was started.
    """
    out = out.absolute()
    steps = scale.steps if steps is None else steps
    found = jobs(table, scale, cells, seeds, steps=steps, out=out, extra=extra)
    waiting = [job for job in found if not job.done]
    if check and waiting:
        missing = needs.lacks(table, scale, [job.cell for job in waiting], extra, sums=True)
        if missing:
            print(f"{table.name} cannot be run at {scale.name} scale here:", file=sys.stderr)
            for one in missing:
                print(f"  - {one}", file=sys.stderr)
            return 1
    first, stopped = 0, False
    failed: list[str] = []
    for number, job in enumerate(found, start=1):
        head = f"[{number}/{len(found)}] {table.name} ({scale.name} scale), {job.name}"
        if job.done:
            print(f"{head}: complete in {job.folder}", flush=True)
            continue
        reached = runs.steps_of(job.folder)
        print(f"\n{head}: {'begins' if not reached else f'was at step {reached}, goes on'} in {job.folder}", flush=True)
        code = run_cell(table, scale, job, steps=steps, out=out, extra=extra)
        first = first or code
        if code == INTERRUPTED:
            stopped = True
            break
        if code:
            failed.append(job.name)
    if failed:
        print(f"\nfailed: {'; '.join(failed)}; the same command tries them again", file=sys.stderr)
    if collect and not stopped:
        from verl_ext.reproduce import render

        print(flush=True)
        collected = render.main(table, scale.name, out)
        return first or collected
    return first
