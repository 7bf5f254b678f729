# SPDX-License-Identifier: Apache-2.0
"""Cells of a table as jobs of a cluster: one job a cell and seed, whose name says which.

The jobs need no working directory: the cluster's nodes are taken to share a file system with this machine, with this
Python and the folder of the runs on it. What a job finds in its run folder (complete, or begun) is treated as on this
machine, so a job that was lost, or ran out of time, goes on when it is submitted again.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from verl_ext.common.overrides import Failure
from verl_ext.lab.reproduce import plan, runs
from verl_ext.lab.reproduce.run import INTERRUPTED, collected
from verl_ext.lab.reproduce.runs import Run

SUCCEEDED, FAILED = "SUCCEEDED", "FAILED"
ENDED = (SUCCEEDED, FAILED, "STOPPED")
"""States of a job that is over; the others are the cluster's own words."""


class SubmitError(Failure):
    """The cluster cannot be reached, or refuses a job."""


@dataclass(frozen=True)
class Task:
    """One job to be submitted."""

    name: str
    entrypoint: str  # command line
    environment: Mapping[str, str]  # variables of the job
    progress: Callable[[], str] | None = None  # a few words on how far it is; None: not known


class Cluster(Protocol):
    """Where jobs run."""

    queues: bool  # it takes all jobs at once, and lets as many run at a time as it was told
    stop: str  # command that stops a job

    def start(self, tasks: Sequence[Task]) -> Iterator[tuple[str, str]]:
        """Submit jobs, but for those that are running: the id of each, and what is to be said of it."""

    def state(self, job: str) -> str:
        """State of a job, by its id."""

    def tail(self, job: str) -> Sequence[str]:
        """The last lines that a job has printed."""


def follow(
    cluster: Cluster, tasks: Sequence[Task], *, wait: bool = True, at_once: int = 1, interval: float = 2.0
) -> dict[str, str]:
    """Submit jobs in order, at most `at_once` at a time (where the cluster does not see to that), show how they go and
    wait for them, looking every `interval` seconds; without `wait` submit all. Returns the last known states by id.
    Raises SubmitError: the cluster does not answer, or refuses a job.
    """
    states: dict[str, str] = {}
    shown: dict[str, str] = {}
    running: dict[str, Task] = {}
    waiting = list(tasks)
    while waiting or running:
        room = max(at_once, 1) - len(running) if wait and not cluster.queues else len(waiting)
        now, waiting = waiting[:room], waiting[room:]
        for task, (job, said) in zip(now, cluster.start(now), strict=True):
            print(f"{job}: {said}", flush=True)
            running[job] = task
        for job, task in list(running.items()):
            text = states[job] = cluster.state(job)
            if text == "RUNNING" and task.progress is not None:
                text = f"{text}, {task.progress()}"
            if shown.get(job) != text:
                shown[job] = text
                print(f"{job}: {text}", flush=True)
            if states[job] in ENDED:
                del running[job]
                if states[job] != SUCCEEDED:
                    print(*(f"    {line}" for line in cluster.tail(job)[-15:]), sep="\n", flush=True)
        if not wait:
            break
        if running:
            time.sleep(interval)
    return states


def tasks_of(found: Sequence[Run], check: bool = True) -> list[Task]:
    """The jobs of the runs that are not complete; with `check` each looks first for what is missing where it runs.
    Raises RunError: a folder holds something else, or was begun with other settings.
    """
    tasks = []
    for run, complete in [(one, one.examine()) for one in found]:
        if complete:
            print(f"{run.name}: complete in {run.path}", flush=True)
            continue
        # fmt: off
        words = [
            sys.executable, "-m", "verl_ext.cli", "reproduce", "run", run.table.name, "--scale", run.scale.name,
            "--cell", run.cell, "--seeds", str(run.seed), "--out", str(run.out.absolute()), "--no-collect",
            *([] if check else ["--no-check"]), *([] if run.steps is None else ["--steps", str(run.steps)]),
            *run.extra,
        ]
        # fmt: on

        def progress(run: Run = run) -> str:
            return f"step {runs.steps_of(run.path)}{'' if run.steps is None else f'/{run.steps}'}"

        names = (*run.scale.needs.inputs, "VERL_EXT_HOME")
        environment = {name: os.environ[name] for name in names if os.environ.get(name)}
        name = f"verl_ext.{plan.experiment(run.table, run.scale, run.scale.cells[run.cell], run.seed)}"
        tasks.append(Task(name, shlex.join(words), environment, progress))
    return tasks


def main(
    found: Sequence[Run],
    cluster: Cluster,
    *,
    check: bool = True,
    collect: bool = True,
    wait: bool = True,
    at_once: int = 1,
) -> int:
    """Submit runs of a table, wait for them and collect the table.

    Returns 0 if all jobs succeeded (or were submitted, without `wait`), 130 after Ctrl-C, else 1. Raises RunError or
    SubmitError: a folder holds something else; the cluster does not answer, or refuses a job.
    """
    tasks = tasks_of(found, check)
    if tasks:
        print(
            f"The nodes are taken to share {found[0].out.absolute()} and {sys.executable} with this machine.",
            flush=True,
        )
        if not (wait or cluster.queues) and len(tasks) > 1:
            print(f"All {len(tasks)} jobs start at once: the cluster must have free GPUs for all of them.", flush=True)
    try:
        states = follow(cluster, tasks, wait=wait, at_once=at_once)
    except KeyboardInterrupt:
        print(f"\nThe jobs go on. The same command watches them again; `{cluster.stop}` stops one.", flush=True)
        return INTERRUPTED
    if not wait:
        print("Give the same command again to see how they are, and to collect the table.")
        return 0
    failed = [job for job, state in states.items() if state != SUCCEEDED]
    if failed:
        print(f"not complete: {', '.join(failed)}; the same command submits them again", file=sys.stderr)
    code = collected(found[0]) if collect else 0
    return 1 if failed else code
