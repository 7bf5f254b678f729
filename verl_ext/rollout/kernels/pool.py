# SPDX-License-Identifier: Apache-2.0
"""The evaluation pool: a broker and workers, Ray actors of the run. There is no service to start.

Each worker holds a `Judge`; nothing that a model wrote runs in a worker or in the broker, so what they tell each other
is ordinary Ray. The same program under way is judged once, and its verdict kept. A worker that is lost, or whose
judge fails, judges a program that is known to be right before it gets another; failing twice it leaves the pool. Its
evaluation is done again, at most `RETRIES` times: then there is no verdict, and the trajectory is in no statistic.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray

from verl_ext import __version__
from verl_ext.rollout.kernels.judge import Judge, Verdict
from verl_ext.rollout.kernels.languages import CandidateError, module, read
from verl_ext.rollout.kernels.options import JudgeOptions, KernelOptions
from verl_ext.rollout.kernels.seat import Infrastructure
from verl_ext.rollout.kernels.tasks import THREE_LAYERS, Task, in_triton

RETRIES = 2
RESTART_S = 120
"""Seconds that Ray may take to start the process of a worker or of the broker again, imports and all."""
PROBE = Task("fuse", ("mul", "add"))
CALLS = 10_000
"""Evaluations that the broker may have under way; how many of them are given to workers is `max_pending`."""


class Worker:
    """One judge in a process of its own."""

    def __init__(self, options: dict[str, Any], cage: str) -> None:
        self.judge = Judge(JudgeOptions(**options), cage)

    def evaluate(self, task: str, text: str) -> dict[str, Any]:
        """The verdict, as a mapping."""
        return dataclasses.asdict(self.judge.evaluate(Task.of(task), text))

    def probe(self) -> bool:
        """Whether a kernel that is right is judged right."""
        if self.judge.on_device:
            program = in_triton("return launch(x, a, b)")
            return self.judge.evaluate(Task.of(THREE_LAYERS), program, "triton").correct
        return self.judge.evaluate(PROBE, "krve mul add", "fuse").correct

    def process(self) -> int:
        """Its pid."""
        return os.getpid()


class Verdicts:
    """What was judged: in this run, or in all that share a folder, where each verdict is a line of one file."""

    def __init__(self, folder: str | None) -> None:
        self.known: dict[str, dict[str, Any]] = {}
        self.file, self.rest = None, b""
        if folder:
            self.file = Path(folder).expanduser() / f"verdicts-{__version__}.jsonl"
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.touch()
            self.read = self.file.open("rb").read

    def get(self, key: str) -> dict[str, Any] | None:
        """A verdict, or None; what others have written since is read before."""
        if key not in self.known and self.file:
            *lines, self.rest = (self.rest + self.read()).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):  # of a process that was killed
                    found = json.loads(line)
                    self.known[found["key"]] = found["verdict"]
        return self.known.get(key)

    def add(self, key: str, verdict: dict[str, Any]) -> None:
        """Remember a verdict, in one write at the end of the file."""
        self.known[key] = verdict
        if self.file:
            with self.file.open("ab") as file:
                file.write(b"\n" + json.dumps({"key": key, "verdict": verdict}).encode() + b"\n")


class Broker:
    """Hands evaluations to idle workers, each program once."""

    def __init__(self, options: dict[str, Any], cage: str, workers: int) -> None:
        self.options = KernelOptions(**options)
        self.judge = {field.name: options[field.name] for field in dataclasses.fields(JudgeOptions)}
        own = module(self.options.language)  # whose verdicts are those of the file as it is
        self.own = [hashlib.sha256(Path(own.__file__).read_bytes()).hexdigest()] if own else []
        made = ray.remote(Worker).options(
            num_cpus=0, num_gpus=int(self.options.backend == "triton"), max_restarts=-1, scheduling_strategy="SPREAD"
        )
        self.workers = [made.remote(self.judge, cage) for _ in range(workers)]
        self.idle: asyncio.Queue[Any] = asyncio.Queue()
        for worker in self.workers:
            self.idle.put_nowait(worker)
        self.places = asyncio.Semaphore(self.options.max_pending)
        self.known = Verdicts(self.options.cache_dir)
        self.running: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self.count: Counter[str] = Counter()

    async def evaluate(self, task: str, text: str) -> dict[str, Any]:
        """The verdict on an answer to a task, as a mapping; its status is ``infra`` if there is none."""
        self.count["asked"] += 1
        try:
            program = read(text, self.options.language, Task.of(task))
        except CandidateError as error:
            return dataclasses.asdict(Verdict(error.status, error=error.text))
        if not self.options.cache:
            return await self._evaluate(task, text)
        key = hashlib.sha256(json.dumps([task, self.judge, *self.own, program.key]).encode()).hexdigest()
        if known := self.known.get(key):
            self.count["cached"] += 1
            return known
        if key in self.running:
            self.count["coalesced"] += 1
        else:
            self.running[key] = asyncio.create_task(self._evaluate(task, text))
            self.running[key].add_done_callback(lambda _: self.running.pop(key))
        verdict = await asyncio.shield(self.running[key])
        # The compiler's time goes on while a busy machine lets it wait.
        if verdict["status"] not in ("infra", "compile_timeout") and not self.known.get(key):
            self.known.add(key, verdict)
        return verdict

    async def _evaluate(self, task: str, text: str) -> dict[str, Any]:
        said = "there is no worker left"
        async with self.places:
            for _ in range(1 + RETRIES):
                if not self.workers:
                    break
                worker = await self.idle.get()
                if worker not in self.workers:
                    self.idle.put_nowait(worker)  # for the others who wait: there is none left
                    break
                try:
                    verdict = await worker.evaluate.remote(task, text)
                except Exception as error:  # the worker died, or its judge failed: not the candidate's fault
                    said = f"{type(error).__name__}: {error}"[:500]
                    self.count["failed"] += 1
                    await self._mend(worker)
                else:
                    self.idle.put_nowait(worker)
                    self.count["judged"] += 1
                    return verdict
        self.count["infra"] += 1
        return dataclasses.asdict(Verdict("infra", error=said))

    async def _mend(self, worker: Any) -> None:
        """Back into the pool if it judges a known kernel right, else out of it."""
        until, tries = time.monotonic() + RESTART_S, 2
        while tries:
            try:
                if await worker.probe.remote():
                    self.idle.put_nowait(worker)
                    return
                tries -= 1
            except Exception as error:
                starts = isinstance(error, ray.exceptions.ActorUnavailableError) and time.monotonic() < until
                tries -= not starts
                await asyncio.sleep(1.0)
        self.workers.remove(worker)
        print(f"verl_ext kernels: a worker leaves the pool, {len(self.workers)} are left", flush=True)
        if not self.workers:
            self.idle.put_nowait(worker)

    async def figures(self) -> dict[str, int]:
        """Evaluations so far: asked, cached, coalesced, judged, failed, infra; and the workers' number."""
        return {**self.count, "workers": len(self.workers), "waiting": len(self.running)}

    async def processes(self) -> list[int]:
        """The workers' pids."""
        return list(await asyncio.gather(*[worker.process.remote() for worker in self.workers]))


def make(options: KernelOptions, cage: str) -> Any:
    """The broker of this Ray job for such options, made if there is none; what a verdict pays is not its business."""
    given = dataclasses.asdict(dataclasses.replace(options, reward={}, stts={}, pay_decoys=False))
    name = hashlib.sha256(json.dumps([given, cage]).encode()).hexdigest()[:16]
    workers = options.workers or (1 if options.backend == "triton" else max((os.cpu_count() or 2) - 1, 1))
    actor = ray.remote(Broker).options(
        name=f"verl_ext_kernels_{name}", get_if_exists=True, num_cpus=0, max_concurrency=CALLS, max_restarts=-1
    )
    return actor.remote(given, cage, workers)


class Pool:
    """The broker as an agent loop uses it."""

    def __init__(self, options: KernelOptions, cage: str) -> None:
        self.options, self.cage = options, cage
        self.broker = make(options, cage)

    async def evaluate(self, task: Task, text: str) -> Verdict:
        """The verdict on an answer.

        Raises:
            Infrastructure: there is none, and the candidate is not to blame.
        """
        until = time.monotonic() + RESTART_S
        while True:
            try:
                verdict = Verdict(**await self.broker.evaluate.remote(task.text, text))
                break
            except ray.exceptions.RayTaskError as error:  # the broker is there, and would say the same again
                raise Infrastructure(f"the broker: {error}") from error
            except ray.exceptions.RayError as error:
                if time.monotonic() > until:
                    raise Infrastructure(f"the broker: {error}") from error
                await asyncio.sleep(1.0)
                self.broker = make(self.options, self.cage)
        if verdict.status == "infra":
            raise Infrastructure(verdict.error)
        return verdict
