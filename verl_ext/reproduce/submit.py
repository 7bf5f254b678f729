# SPDX-License-Identifier: Apache-2.0
"""Cells of a table as jobs of a Ray cluster: one job a cell and seed, whose id says which.

The jobs need no working directory: the cluster's nodes are taken to share a file system with this machine, with this
Python and the folder of the runs on it. What a job finds in its run folder (complete, or begun) is treated as on this
machine, so a job that was lost is submitted again and goes on.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.overrides import Failure
from verl_ext.reproduce import plan, runs
from verl_ext.reproduce.run import INTERRUPTED, Request, jobs

ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
"""States of a Ray job that is over."""


class SubmitError(Failure):
    """The cluster cannot be reached, or refuses a job."""


@dataclass(frozen=True)
class Task:
    """One job to be submitted."""

    name: str  # its id is the name, with ``.2``, ``.3``, ... for later attempts
    entrypoint: str  # command line
    environment: Mapping[str, str]  # variables of the job
    progress: Callable[[], str] | None = None  # a few words on how far it is; None: not known


def client(address: str) -> Any:
    """Ray's job client of the cluster whose dashboard has an address such as ``http://127.0.0.1:8265``. Raises
    SubmitError: nothing answers there.
    """
    if not re.match(r"^https?://", address):
        raise SubmitError(f"{address!r} is not the address of a Ray dashboard: give one such as http://127.0.0.1:8265")
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        raise SubmitError(
            f"no Ray job server answers at {address}: start the cluster with its dashboard (`ray start --head "
            f"--include-dashboard=true`) and give the dashboard's address. ({' '.join(str(error).split())[:200]})"
        ) from error


def attempts(server: Any, name: str) -> dict[int, Any]:
    """Jobs of this name that the cluster remembers, by the number of the attempt, in order."""
    pattern = re.compile(re.escape(name) + r"(?:\.(\d+))?")
    found = [(pattern.fullmatch(job.submission_id or ""), job) for job in server.list_jobs()]
    return dict(sorted((int(match[1] or 1), job) for match, job in found if match))


def state_of(job: Any) -> str:
    """State of a job as a word."""
    return str(getattr(job.status, "value", job.status))


def _asked(ask: Callable[[], Any], said: str, interval: float, again: str = "") -> Any:
    """The cluster's answer, asked for five times `interval` seconds apart while the error holds the text `again`.
    Raises SubmitError: `said`, with the error in its place, which has lasted.
    """
    for left in reversed(range(5)):
        try:
            return ask()
        except (RuntimeError, ValueError, OSError) as error:
            text = " ".join(str(error).split())[:400]
            if left == 0 or again not in text:
                raise SubmitError(said.format(text)) from error
        time.sleep(interval)


def submit_one(server: Any, task: Task) -> tuple[str, bool]:
    """Submit a job unless it is running. Returns the job's id, and whether it was submitted now. Raises SubmitError:
    the cluster refuses it, or runs this job with another command.
    """
    before = attempts(server, task.name)
    number = max(before, default=0)
    last = before.get(number)
    if last is not None and state_of(last) not in ENDED:
        if last.entrypoint != task.entrypoint:
            raise SubmitError(
                f"the cluster is running {last.submission_id} with another command: {last.entrypoint}. "
                f"Wait for it, or stop it with `ray job stop {last.submission_id}`"
            )
        return str(last.submission_id), False
    job_id = f"{task.name}.{number + 1}" if number else task.name
    more = {"runtime_env": {"env_vars": dict(task.environment)}, "metadata": {"name": task.name}}
    _asked(
        lambda: server.submit_job(entrypoint=task.entrypoint, submission_id=job_id, **more),
        f"the cluster refuses {job_id}: {{}}",
        interval=2.0,
        again="try again later",  # so says a cluster that has just been started, until its agents are there
    )
    return job_id, True


def submit(
    server: Any, tasks: Sequence[Task], *, wait: bool = True, at_once: int = 1, interval: float = 2.0
) -> dict[str, str]:
    """Submit jobs in order, at most `at_once` at a time, show how they go and wait for them, looking at the cluster
    every `interval` seconds; without `wait` submit all. Returns the last known states by job id. Raises SubmitError:
    see :func:`submit_one`.
    """
    states: dict[str, str] = {}
    shown: dict[str, str] = {}
    running: dict[str, Task] = {}
    waiting = list(tasks)
    while waiting or running:
        while waiting and (not wait or len(running) < max(at_once, 1)):
            task = waiting.pop(0)
            job_id, new = submit_one(server, task)
            print(f"{job_id}: {'submitted' if new else 'is running already'}", flush=True)
            running[job_id] = task
        for job_id, task in list(running.items()):
            info = look(server, job_id, interval)
            text = states[job_id] = state_of(info)
            if text == "RUNNING" and task.progress is not None:
                text = f"{text}, {task.progress()}"
            if shown.get(job_id) != text:
                shown[job_id] = text
                print(f"{job_id}: {text}", flush=True)
            if states[job_id] in ENDED:
                del running[job_id]
                if states[job_id] != "SUCCEEDED":
                    tail = (server.get_job_logs(job_id) or info.message or "").splitlines()[-15:]
                    print("\n".join(f"    {line}" for line in tail), flush=True)
        if not wait:
            break
        if running:
            time.sleep(interval)
    return states


def look(server: Any, job_id: str, interval: float) -> Any:
    """What the cluster says of a job; a dashboard that is away for a moment is asked again. Raises SubmitError: it does
    not answer, or does not know the job.
    """
    said = f"the cluster no longer answers for {job_id} ({{}}); the job may go on"
    return _asked(lambda: server.get_job_info(job_id), said, interval)


def tasks_of(request: Request) -> list[Task]:
    """The jobs of the runs that are not complete; with `check` each looks first for what is missing where it runs."""
    table, scale, steps = request.table, request.scale, request.steps
    names = (*scale.needs.inputs, "VERL_EXT_HOME")
    environment = {name: os.environ[name] for name in names if os.environ.get(name)}
    found = []
    for job in jobs(request):
        if job.done:
            print(f"{job.name}: complete in {job.folder}", flush=True)
            continue
        # fmt: off
        words = [
            sys.executable, "-m", "verl_ext.cli", "reproduce", "run", table.name, "--scale", scale.name,
            "--cell", job.cell.name, "--seeds", str(job.seed), "--out", str(request.out), "--no-collect",
            *([] if request.check else ["--no-check"]), *([] if steps is None else ["--steps", str(steps)]),
            *request.extra,
        ]
        # fmt: on

        def progress(folder: Path = job.folder) -> str:
            return f"step {runs.steps_of(folder)}{'' if steps is None else f'/{steps}'}"

        name = f"verl_ext.{plan.experiment(table, scale, job.cell, job.seed)}"
        found.append(Task(name, shlex.join(words), environment, progress))
    return found


def main(request: Request, address: str, *, wait: bool = True, at_once: int = 1) -> int:
    """Submit cells and seeds of a table to the cluster at `address`, wait for them and collect the table.

    Returns 0 if all jobs succeeded (or were submitted, without `wait`), 130 after Ctrl-C, else 1. Raises RunError or
    SubmitError: a folder holds something else; the cluster cannot be reached, or refuses a job.
    """
    server = client(address)
    tasks = tasks_of(request)
    if tasks:
        print(f"The cluster's nodes are taken to share {request.out} and {sys.executable} with this machine.")
        if not wait and len(tasks) > 1:
            print(f"All {len(tasks)} jobs start at once: the cluster must have free GPUs for all of them.")
    try:
        states = submit(server, tasks, wait=wait, at_once=at_once)
    except KeyboardInterrupt:
        said = f"The same command watches them again; `ray job stop JOB_ID --address {address}` stops one."
        print(f"\nThe jobs go on. {said}", flush=True)
        return INTERRUPTED
    if not wait:
        print("Give the same command again to see how they are, and to collect the table.")
        return 0
    failed = [job_id for job_id, state in states.items() if state != "SUCCEEDED"]
    if failed:
        print(f"not complete: {', '.join(failed)}; the same command submits them again", file=sys.stderr)
    collected = request.collected() if request.collect else 0
    return 1 if failed else collected
