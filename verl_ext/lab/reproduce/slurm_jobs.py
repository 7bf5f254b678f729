# SPDX-License-Identifier: Apache-2.0
"""Jobs of Slurm, through submitit, in one array."""

from __future__ import annotations

import contextlib
import os
import pickle
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl_ext.lab.reproduce.cluster import FAILED, SUCCEEDED, SubmitError, Task


class SlurmJobs:
    """submitit's executor, whose files go into `folder`; a job's id is the task's name.

    Args:
        settings: submitit's parameters, ``slurm_partition=gpu,gpus_per_node=8,timeout_min=2880``; those of Slurm alone
            begin with ``slurm_``. ``cluster=local`` runs the jobs on this machine, all at once.
        at_once: jobs of the array that may run at the same time.

    Raises:
        SubmitError: submitit or Slurm is not there, or does not know a setting.
    """

    queues = True
    stop = "scancel NUMBER"

    def __init__(self, folder: Path, settings: str, at_once: int) -> None:
        try:
            import submitit
        except ImportError as error:
            raise SubmitError("jobs of Slurm need submitit: pip install submitit") from error
        given: dict[str, Any] = {}
        for word in filter(None, settings.split(",")):
            key, sign, value = word.partition("=")
            if not sign:
                said = "give such as slurm_partition=gpu,gpus_per_node=8,timeout_min=600"
                raise SubmitError(f"--slurm: {word!r} is no KEY=VALUE; {said}")
            given[key] = int(value) if value.isdecimal() else value
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=given.pop("cluster", "slurm"))
            self.executor.update_parameters(name="verl_ext", slurm_array_parallelism=at_once, **given)
        except (NameError, TypeError, ValueError, AssertionError, RuntimeError) as error:
            raise SubmitError(f"--slurm {settings}: {' '.join(str(error).split())[:400]}") from error
        self.folder = folder
        self.jobs: dict[str, Any] = {}  # submitit's, by id

    def start(self, tasks: Sequence[Task]) -> Iterator[tuple[str, str]]:
        """See :class:`~verl_ext.lab.reproduce.cluster.Cluster`. Raises SubmitError: Slurm refuses the jobs."""
        from submitit.helpers import CommandFunction

        notes = {task.name: self.folder / f"{task.name}.job" for task in tasks}
        # As submitit keeps its own files.
        before = {name: pickle.loads(note.read_bytes()) for name, note in notes.items() if note.exists()}
        self.jobs |= {name: job for name, job in before.items() if not job.done(force_check=True)}
        new = [task for task in tasks if task.name not in self.jobs]
        try:
            with self.executor.batch() if new else contextlib.nullcontext():
                for task in new:
                    command = CommandFunction(shlex.split(task.entrypoint), env={**os.environ, **task.environment})
                    self.jobs[task.name] = self.executor.submit(command)
        except (OSError, RuntimeError) as error:
            raise SubmitError(f"Slurm refuses the jobs: {' '.join(str(error).split())[:400]}") from error
        for task in tasks:
            job = self.jobs[task.name]
            if task in new:
                notes[task.name].write_bytes(pickle.dumps(job))
            said = f"job {job.job_id}, its output is {job.paths.stdout}"
            yield task.name, said if task in new else f"is {said}"

    def state(self, job: str) -> str:
        """State of a job, as Slurm or submitit says it until it has ended."""
        one = self.jobs[job]
        return str(one.state) if not one.done() else FAILED if one.exception() else SUCCEEDED

    def tail(self, job: str) -> list[str]:
        """What a job has printed as errors."""
        return (self.jobs[job].stderr() or "").splitlines()
