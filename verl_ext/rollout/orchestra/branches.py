# SPDX-License-Identifier: Apache-2.0
"""Places of the calls of one trajectory: the order of its turns does not depend on how long a call takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from verl_ext.rollout.shared.contain import contained


@dataclass
class Branch:
    """A line of calls, one after the other: the orchestration itself, or an asyncio task that it started.

    A turn's position is the path of counters from the root to its call, so turns come out in the order in which the
    program makes the calls, however long each of them takes.
    """

    prefix: tuple[int, ...]
    task: asyncio.Task[Any] | None
    used: int = 0

    def next(self) -> tuple[int, ...]:
        self.used += 1
        return (*self.prefix, self.used - 1)


_branch: ContextVar[Branch | None] = ContextVar("verl_ext_orchestra_branch", default=None)


def start() -> None:
    """The running task is the orchestration itself: its calls are the first branch."""
    _branch.set(Branch((), asyncio.current_task()))


def here() -> Branch:
    """The branch of the running task; a task that has none yet becomes a child of the one that started it."""
    branch, task = _branch.get(), asyncio.current_task()
    if branch is None:
        branch = Branch((), task)
        _branch.set(branch)
    elif branch.task is not task:
        branch = Branch(branch.next(), task)
        _branch.set(branch)
    return branch


async def together(*branches: Awaitable[Any]) -> list[Any]:
    """Run awaitables at the same time, and keep the turns of each together, in the order given.

    ``asyncio.gather`` works too. Its turns have a fixed order if each branch calls an agent before it waits for
    anything else; here the order never depends on time. If one branch raises, the others are cancelled.
    """
    parent = here()
    places = [parent.next() for _ in branches]

    async def run(place: tuple[int, ...], branch: Awaitable[Any]) -> Any:
        _branch.set(Branch(place, asyncio.current_task()))
        with contained("a branch of the orchestration"):
            return await branch

    tasks = [asyncio.ensure_future(run(place, branch)) for place, branch in zip(places, branches, strict=True)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
