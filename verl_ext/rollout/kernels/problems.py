# SPDX-License-Identifier: Apache-2.0
"""Problems in KernelBench's form as tasks: what each needs and whether this machine has it, and their players' seat.

A problem is a third party's Python: it runs in the cage, in a process of its own. That process draws the inputs, from
seeds that the judge keeps, and computes what is right; the candidate's process gets inputs, constructor arguments and
the seed of the weights.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_ext.rollout.kernels.compiler import Library
from verl_ext.rollout.kernels.players import player, problem_memory
from verl_ext.rollout.kernels.seat import SLOWER, Infrastructure, Seat
from verl_ext.rollout.kernels.tasks import Task
from verl_ext.sandbox import Limits, Sandbox, SandboxError

LANGUAGES = ("python", "triton")
DESCRIBE_S = 60.0
"""Seconds of processor time for the pass on the meta device."""
COPIES = 4
"""Of what a player holds: two players, and the judge's inputs and outputs."""


class ProblemSeat(Seat):
    """A player of a problem or of a candidate for it; `shape` is a layout, as `layout` makes it."""

    def __init__(
        self,
        sandbox: Sandbox,
        shape: Any,
        plan: dict[str, Any],
        library: Library | None,
        lost: Sequence[str] = (),
        cpu_s: float = 10.0,
    ) -> None:
        place = "problem_triton:play" if "triton" in plan else "problem_player:play"
        self.target = "verl_ext.rollout.kernels.players." + ("problem_player:reference" if "problem" in plan else place)
        self.slower = SLOWER if "triton" in plan else 1
        super().__init__(sandbox, shape, plan, library, lost, cpu_s)

    def _size(self, shape: Any) -> int:
        return problem_memory.size(shape)

    def _map(self, shape: Any) -> None:
        seeds, *self.given, self.y = problem_memory.views(self._memory, shape)
        self.seed, self.drawn = seeds[:1], seeds[1:]

    def draw(self) -> list[torch.Tensor]:
        """A batch that nobody has seen, of the problem's own player; none of its time for that is charged."""
        self.seed.fill_(secrets.randbits(48))
        self.drawn.fill_(secrets.randbits(48))
        self._say(problem_memory.DRAW)
        self._answer()
        self._charged = self._time()
        return [self.drawn.clone(), *(one.clone() for one in self.given)]

    def begin(self, *given: torch.Tensor) -> None:
        """Reveal a batch and say go."""
        self.y.fill_(float("nan") if self.y.is_floating_point() else 1 if self.y.dtype == torch.bool else -77)
        for room, one in zip([self.drawn, *self.given], given, strict=True):
            room.copy_(one)
        self._say(player.GO)


def describe(task: Task, sandbox: Sandbox) -> dict[str, Any]:
    """`problem_player.describe` of a task, in the cage.

    Raises:
        Infrastructure: it fails on the meta device; names the task.
    """
    try:
        found: dict[str, Any] = sandbox.run(
            "verl_ext.rollout.kernels.players.problem_player:describe", task.code, timeout_s=DESCRIBE_S
        )
    except SandboxError as error:
        raise Infrastructure(f"{task.name} cannot be played: {error.text}") from error
    return found


def layout(task: Task, described: dict[str, Any], batch: int, memory_mb: int) -> dict[str, Any]:
    """How the players of a task use their shared memory: `batch` inputs at a time, or one where so many are too large.

    Raises:
        Infrastructure: one is too large, by the estimate; names the task, the estimate and the limit.
    """
    limit = min(memory_mb << 20, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // COPIES)
    for inputs in (batch, 1):
        made = {**described, "batch": inputs, "seed": secrets.randbits(48)}
        if (needs := described["bytes"] + problem_memory.size(made)) <= limit:
            return made
    raise Infrastructure(
        f"{task.name} needs about {needs >> 20} MiB in a player (weights, inputs, outputs and what lies between); the "
        f"limit is {limit >> 20} MiB, the smaller of memory_mb={memory_mb} and 1/{COPIES} of this machine's memory"
    )


def check(tasks: Sequence[Task], memory_mb: int, cage: str = "required") -> Iterator[tuple[Task, int, str]]:
    """Of each task what a player of it needs in bytes, and why it cannot be played here; empty if it can."""
    with Sandbox(
        Limits(memory_mb=memory_mb), cage, modules=["verl_ext.rollout.kernels.players.problem_player"]
    ) as sandbox:
        for task in tasks:
            try:
                made = layout(task, describe(task, sandbox), 1, memory_mb)
            except Infrastructure as error:
                yield task, 0, str(error)
            else:
                yield task, made["bytes"] + problem_memory.size(made), ""


def task_of(row: Mapping[str, Any]) -> Task:
    """The problem of a row that ``verl-ext reproduce prepare`` wrote."""
    info, code = row.get("extra_info") or {}, str(row["reward_model"]["ground_truth"])
    if "problem_id" not in info:
        return Task.of(code)
    return Task(f"kernelbench-{info['level']}-{info['problem_id']}", (), code)


def read(path: Path) -> list[Task]:
    """The problems of a Python file, or of a parquet file that ``verl-ext reproduce prepare`` wrote.

    Raises:
        ValueError, OSError: it holds none, or cannot be read.
    """
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return [task_of(row) for row in pq.read_table(path).to_pylist()]
    return [Task(path.stem, (), Task.of(path.read_text(encoding="utf-8")).code)]
