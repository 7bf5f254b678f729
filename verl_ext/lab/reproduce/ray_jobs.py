# SPDX-License-Identifier: Apache-2.0
"""Jobs of a Ray cluster, through the job server of its dashboard."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from verl_ext.lab.reproduce.cluster import SubmitError, Task


class RayJobs:
    """The cluster whose dashboard has an address such as ``http://127.0.0.1:8265``; a job's id is the task's name, with
    ``.2``, ``.3``, ... for later attempts. Raises SubmitError: nothing answers there.
    """

    queues = False
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
        """See :class:`~verl_ext.lab.reproduce.cluster.Cluster`. Raises SubmitError: the cluster refuses a job, or runs
        it with another command.
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
