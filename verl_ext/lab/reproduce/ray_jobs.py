# SPDX-License-Identifier: Apache-2.0
"""Cells of a table as jobs of a Ray cluster: one job a cell and seed, whose name says which.

The jobs need no working directory: the cluster's nodes are taken to share a file system with this machine, with this
Python and the folder of the runs on it. What a job finds in its run folder (complete, or begun) is treated as on this
machine, so a job that was lost, or ran out of time, goes on when it is submitted again.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


class RayJobs:
    """The cluster whose dashboard has an address such as ``http://127.0.0.1:8265``; a job's id is the task's name, with
    ``.2``, ``.3``, ... for later attempts. Raises SubmitError: nothing answers there.
    """

    pause_s = 2.0  # between two questions to a cluster that does not answer

    def __init__(self, address: str) -> None:
        if not re.match(r"^https?://", address):
            raise SubmitError(
                f"{address!r} is not the address of a Ray dashboard: give one such as http://127.0.0.1:8265"
            )
        from ray.job_submission import JobSubmissionClient

        try:
            self.server = JobSubmissionClient(address)
        except (ConnectionError, RuntimeError) as error:
            raise SubmitError(
                f"no Ray job server answers at {address}: start the cluster with its dashboard (`ray start --head "
                f"--include-dashboard=true`) and give the dashboard's address. ({' '.join(str(error).split())[:200]})"
            ) from error
        self.stop = f"ray job stop JOB_ID --address {address}"

    def attempts(self, name: str) -> dict[int, Any]:
        """Jobs of this name that the cluster remembers, by the number of the attempt, in order."""
        pattern = re.compile(re.escape(name) + r"(?:\.(\d+))?")
        found = [(pattern.fullmatch(job.submission_id or ""), job) for job in self.server.list_jobs()]
        return dict(sorted((int(match[1] or 1), job) for match, job in found if match))

    def start(self, tasks: Sequence[Task]) -> Iterator[tuple[str, str]]:
        """Submit jobs, but for those that are running: the id of each, and what is to be said of it.

        Raises SubmitError: the cluster refuses a job, or runs it with another command.
        """
        return map(self._start, tasks)

    def _start(self, task: Task) -> tuple[str, str]:
        before = self.attempts(task.name)
        number = max(before, default=0)
        last = before.get(number)
        if last is not None and not last.status.is_terminal():
            if last.entrypoint != task.entrypoint:
                raise SubmitError(
                    f"the cluster is running {last.submission_id} with another command: {last.entrypoint}. "
                    f"Wait for it, or stop it with `ray job stop {last.submission_id}`"
                )
            return str(last.submission_id), "is running already"
        job = f"{task.name}.{number + 1}" if number else task.name
        more = {"runtime_env": {"env_vars": dict(task.environment)}, "metadata": {"name": task.name}}
        self._asked(
            lambda: self.server.submit_job(entrypoint=task.entrypoint, submission_id=job, **more),
            f"the cluster refuses {job}: {{}}",
            again="try again later",  # so says a cluster that has just been started, until its agents are there
        )
        return job, "submitted"

    def _asked(self, ask: Callable[[], Any], said: str, again: str = "") -> Any:
        """The cluster's answer, asked for five times while the error holds the text `again`. Raises SubmitError:
        `said`, with the error in its place, which has lasted.
        """
        for left in reversed(range(5)):
            try:
                return ask()
            except (RuntimeError, ValueError, OSError) as error:
                text = " ".join(str(error).split())[:400]
                if left == 0 or again not in text:
                    raise SubmitError(said.format(text)) from error
            time.sleep(self.pause_s)

    def state(self, job: str) -> str:
        """State of a job; a dashboard that is away for a moment is asked again. Raises SubmitError: it does not answer,
        or does not know the job.
        """
        said = f"the cluster no longer answers for {job} ({{}}); the job may go on"
        return str(self._asked(lambda: self.server.get_job_info(job), said).status.value)

    def tail(self, job: str) -> list[str]:
        """What a job has printed, or why it did not start."""
        return str(self.server.get_job_logs(job) or self.server.get_job_info(job).message or "").splitlines()


def follow(
    cluster: RayJobs, tasks: Sequence[Task], *, wait: bool = True, at_once: int = 1, interval: float = 2.0
) -> dict[str, str]:
    """Submit jobs in order, at most `at_once` at a time, show how they go and wait for them, looking every
    `interval` seconds; without `wait` submit all. Returns the last known states by id.
    Raises SubmitError: the cluster does not answer, or refuses a job.
    """
    states: dict[str, str] = {}
    shown: dict[str, str] = {}
    running: dict[str, Task] = {}
    waiting = list(tasks)
    while waiting or running:
        room = max(at_once, 1) - len(running) if wait else len(waiting)
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
    cluster: RayJobs,
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
        if not wait and len(tasks) > 1:
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
