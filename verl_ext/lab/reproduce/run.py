# SPDX-License-Identifier: Apache-2.0
"""Running the cells of a table on this machine, one after the other: what is complete is skipped, the rest goes on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from verl_ext.lab.reproduce import needs, plan, runs
from verl_ext.lab.reproduce.runs import Run

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def run_cell(run: Run) -> int:
    """Start one run, or go on with it. Returns the exit code of verl's trainer; 130 after Ctrl-C; 1 if the trainer
    ended before its last step. Raises RunError: the folder cannot be used, or another process is at it.
    """
    steps = run.steps
    with run.locked():
        run.begin()
        if steps is not None and runs.steps_of(run.path) >= steps:
            print("all steps are logged: it was stopped after the last one", flush=True)
            run.end(runs.COMPLETE, 0, 0.0)
            return 0
        started = time.monotonic()
        state, code = runs.STARTED, INTERRUPTED
        try:
            code = _train(run)
            reached = runs.reached(run.path)
            if code == 0 and steps is not None and reached < steps:
                print(f"the trainer ended at step {reached} of {steps}; see {run.path / 'log.txt'}", file=sys.stderr)
                code = 1
            if code != INTERRUPTED:
                state = runs.COMPLETE if code == 0 else runs.FAILED
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on from here", flush=True)
        except BaseException:
            state, code = runs.FAILED, 1
            raise
        finally:
            run.end(state, code, time.monotonic() - started)
    return code


def _train(run: Run) -> int:
    from verl_ext.lab.demo.run import run_task, start_trainer
    from verl_ext.lab.demo.tasks import TASKS

    scale, cell, steps = run.scale, run.scale.cells[run.cell], run.steps
    if scale.name == "laptop":
        assert scale.task is not None and steps is not None  # the tables' reader demands them of a laptop scale
        words = [*plan.laptop_overrides(run.table, cell, run.seed, run.path), *run.extra]
        return run_task(TASKS[scale.task], cell.recipe, steps=steps, seed=run.seed, out=run.path, extra=words)
    words = plan.full_words(run.table, cell, run.seed, run.path, steps=steps)
    words = [plan.expand(word, scale.needs.inputs, os.environ) for word in words]
    return start_trainer([*words, *run.extra], run.path, steps)


def collected(run: Run) -> int:
    """Write and print the table of a run; the exit code of ``collect``."""
    from verl_ext.lab.reproduce import render

    print(flush=True)
    return render.main(run.table, run.scale.name, run.out)


def run(found: Sequence[Run], *, check: bool = True, collect: bool = True) -> int:
    """Make those runs of a table that are not complete, in order, and collect it: with `check` after a look for what is
    missing, with `collect` ending with the table.

    Returns 0 if all runs are complete; 1 if something is missing before the start; else the code of the first run that
    failed, which keeps the others from being run if it has made no step; Ctrl-C does, too (130). Raises RunError: a run
    folder holds something else, or was begun with other settings; nothing was started.
    """
    done = [one.examine() for one in found]
    table, scale = found[0].table, found[0].scale
    waiting = [scale.cells[one.cell] for one, complete in zip(found, done, strict=True) if not complete]
    if check and waiting and (missing := needs.lacks(table, scale, waiting, found[0].extra, sums=True)):
        said = f"{table.name} cannot be run at {scale.name} scale here:"
        print(said, *missing, sep="\n  - ", file=sys.stderr)
        return 1
    codes, failed = [], []
    for number, (one, complete) in enumerate(zip(found, done, strict=True), start=1):
        head = f"[{number}/{len(found)}] {table.name} ({scale.name} scale), {one.name}"
        if complete:
            print(f"{head}: complete in {one.path}", flush=True)
            continue
        reached = runs.steps_of(one.path)
        print(f"\n{head}: {'begins' if not reached else f'was at step {reached}, goes on'} in {one.path}", flush=True)
        codes.append(run_cell(one))
        if codes[-1] == INTERRUPTED:
            break
        if codes[-1]:
            failed.append(one.name)
            if number < len(found) and not runs.steps_of(one.path):
                print("\nit ended before its first step: the other runs are not tried", file=sys.stderr)
                break
    if failed:
        print(f"\nfailed: {'; '.join(failed)}; the same command tries them again", file=sys.stderr)
    if collect and INTERRUPTED not in codes:
        codes.append(collected(found[0]))
    return next(filter(None, codes), 0)
