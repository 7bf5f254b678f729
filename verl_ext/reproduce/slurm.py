# SPDX-License-Identifier: Apache-2.0
"""Cells of a table as jobs of Slurm, through submitit: one job a cell and seed, in one array.

The nodes are taken to share a file system with this machine, as the nodes of a Ray cluster are (`submit`). Each job is
the command of its cell and seed, so that one that was lost, or ran out of time, goes on when it is submitted again.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from verl_ext.reproduce.run import INTERRUPTED, Request
from verl_ext.reproduce.submit import SubmitError, Task, tasks_of


def executor_of(folder: Path, settings: str, at_once: int) -> Any:
    """submitit's executor, whose files go into `folder`.

    Args:
        settings: submitit's parameters, ``slurm_partition=gpu,gpus_per_node=8,timeout_min=2880``; those of Slurm alone
            begin with ``slurm_``. ``cluster=local`` runs the jobs on this machine, all at once.
        at_once: jobs of the array that may run at the same time.

    Raises:
        SubmitError: submitit or Slurm is not there, or does not know a setting.
    """
    try:
        import submitit
    except ImportError as error:
        raise SubmitError("jobs of Slurm need submitit: pip install submitit") from error
    given: dict[str, Any] = {}
    for word in filter(None, settings.split(",")):
        key, sign, value = word.partition("=")
        if not sign:
            raise SubmitError(
                f"--slurm: {word!r} is no KEY=VALUE; give such as slurm_partition=gpu,gpus_per_node=8,timeout_min=600"
            )
        given[key] = int(value) if value.isdecimal() else value
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=given.pop("cluster", "slurm"))
        executor.update_parameters(name="verl_ext", slurm_array_parallelism=at_once, **given)
    except (NameError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise SubmitError(f"--slurm {settings}: {' '.join(str(error).split())[:400]}") from error
    return executor


def submitted(executor: Any, folder: Path, tasks: list[Task]) -> dict[str, Any]:
    """submitit's job of each task by its name; those that have not ended are not submitted again."""
    from submitit.helpers import CommandFunction

    jobs: dict[str, Any] = {}
    for task in tasks:
        note = folder / f"{task.name}.job"
        job = pickle.loads(note.read_bytes()) if note.exists() else None  # as submitit keeps its own files
        if job is not None and not job.done(force_check=True):
            jobs[task.name] = job
            print(f"{task.name}: is job {job.job_id} already", flush=True)
    waiting = [task for task in tasks if task.name not in jobs]
    with executor.batch() if waiting else contextlib.nullcontext():
        for task in waiting:
            command = CommandFunction(shlex.split(task.entrypoint), env={**os.environ, **task.environment})
            jobs[task.name] = executor.submit(command)
    for task in waiting:  # a job of a batch has its id only now
        job = jobs[task.name]
        (folder / f"{task.name}.job").write_bytes(pickle.dumps(job))
        print(f"{task.name}: job {job.job_id}, its output is {job.paths.stdout}", flush=True)
    return jobs


def watch(jobs: dict[str, Any], tasks: list[Task], interval: float) -> list[str]:
    """Say how jobs go until all have ended; the names of those that failed."""
    shown: dict[str, str] = {}
    running, failed = dict(jobs), []
    progress = {task.name: task.progress for task in tasks}
    while running:
        for name, job in list(running.items()):
            ended, words = job.done(), progress[name]
            text = "FAILED" if ended and job.exception() else "COMPLETED" if ended else job.state
            if text == "RUNNING" and words is not None:
                text = f"{text}, {words()}"
            if shown.get(name) != text:
                shown[name] = text
                print(f"{name}: {text}", flush=True)
            if ended:
                del running[name]
                if text == "FAILED":
                    failed.append(name)
                    print(*(f"    {line}" for line in (job.stderr() or "").splitlines()[-15:]), sep="\n", flush=True)
        if running:
            time.sleep(interval)
    return failed


def main(request: Request, settings: str, *, wait: bool = True, at_once: int = 1) -> int:
    """Submit cells and seeds of a table to Slurm, wait for them and collect the table.

    Returns 0 if all jobs succeeded (or were submitted, without `wait`), 130 after Ctrl-C, else 1. Raises RunError or
    SubmitError: a folder holds something else; see `executor_of`.
    """
    folder = request.out / "slurm"
    executor, tasks = executor_of(folder, settings, at_once), tasks_of(request)
    failed: list[str] = []
    if tasks:
        print(f"The nodes are taken to share {request.out} and {sys.executable} with this machine.", flush=True)
        try:
            jobs = submitted(executor, folder, tasks)
        except (OSError, RuntimeError) as error:
            raise SubmitError(f"Slurm refuses the jobs: {' '.join(str(error).split())[:400]}") from error
        if not wait:
            print("Give the same command again to see how they are, and to collect the table.")
            return 0
        try:
            failed = watch(jobs, tasks, interval=2.0)
        except KeyboardInterrupt:
            print("\nThe jobs go on. The same command watches them again; `scancel JOB_ID` stops one.", flush=True)
            return INTERRUPTED
    if failed:
        print(f"not complete: {', '.join(failed)}; the same command submits them again", file=sys.stderr)
    collected = request.collected() if request.collect else 0
    return 1 if failed else collected
