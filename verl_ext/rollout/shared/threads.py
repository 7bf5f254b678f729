# SPDX-License-Identifier: Apache-2.0
"""Threads for what an agent loop must not do in its event loop: tokenising, decoding, judging, tools.

Each kind of work has threads of its own, as many as ``verl_ext.threads.<kind>`` says, so that a thousand slow
judgements leave prompts to be tokenised, and neither takes the event loop's default threads from anyone else. Work
waits for its turn before its time starts. Work that does not end in time can't be ended, only left behind: it keeps its
thread, its place goes to the next.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from verl_ext.integration.settings.options import read, select
from verl_ext.methods.options import AtLeastOne
from verl_ext.rollout.shared.contain import contained
from verl_ext.rollout.shared.per_config import once

logger = logging.getLogger(__name__)
T = TypeVar("T")

MOST_LOST = 64
"""So many threads of a kind may be held by work that does not end, before the process gives up."""


class HeldThreads(RuntimeError):
    """Too many threads are held by work that did not end in time and still runs: no more is begun."""


@dataclass(frozen=True)
class ThreadOptions:
    """``verl_ext.threads.*``: threads in each process that runs agent loops.

    Attributes:
        tokenising: for prompts.
        decoding: for answers.
        judging: for verifiers and reward functions that are ordinary functions.
        tools: for tools that are ordinary functions.
        agents: for agents of the gateway that are functions: so many play at the same time.
    """

    tokenising: AtLeastOne = 4
    decoding: AtLeastOne = 2
    judging: AtLeastOne = 16
    tools: AtLeastOne = 32
    agents: AtLeastOne = 1024


def read_threads(config: Any) -> ThreadOptions:
    """The options of a composed configuration of verl.

    Raises:
        OptionError: unknown key or bad value.
    """
    return read(select(config, "verl_ext"), "threads", ThreadOptions, where="verl_ext.threads")


def _contained(kind: str, function: Callable[..., T], *args: Any) -> T:
    with contained(kind):
        return function(*args)


class Threads:
    """Threads for one kind of work.

    Args:
        kind: for messages and the threads' names.
        size: how many work at the same time.
    """

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size
        self.lost = 0
        self.executor = self._executor()
        # A semaphore belongs to one event loop.
        self.places: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    def _executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.size, thread_name_prefix=f"verl_ext-{self.kind}")

    async def run(self, function: Callable[..., T], *args: Any, timeout_s: float | None = None) -> T:
        """``function(*args)`` in one of the threads.

        Args:
            function: what to do.
            args: for it.
            timeout_s: seconds that it may take once it has a thread.

        Raises:
            asyncio.TimeoutError: it took longer; it is left behind.
            Contained: the function raised what would have ended more than this call.
            HeldThreads: too much work has been left behind that still runs.
            Exception: what the function raises.
        """
        places = self.places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.size))
        async with places:
            if self.lost >= MOST_LOST:
                raise HeldThreads(
                    f"{self.lost} threads for {self.kind} are held by calls that did not end in time and still run; "
                    "what they call hangs"
                )
            work = self.executor.submit(_contained, self.kind, function, *args)
            try:
                return await asyncio.wait_for(asyncio.wrap_future(work), timeout_s)
            finally:
                if not work.done():
                    self._leave(work)

    def _leave(self, work: Future[Any]) -> None:
        """Go on without the thread that still works: new work gets new threads, idle old ones end."""
        self.lost += 1
        work.add_done_callback(self._back)
        self.executor.shutdown(wait=False)
        self.executor = self._executor()

    def _back(self, _: Future[Any]) -> None:
        self.lost -= 1


_kinds: dict[tuple[str, int], Threads] = {}


def threads(config: Any, kind: str) -> Threads:
    """The threads of this process for a kind of work.

    Args:
        config: verl's whole config.
        kind: a name in `ThreadOptions`.
    """
    size = getattr(once(config, "threads", lambda: read_threads(config)), kind)
    return _kinds.setdefault((kind, size), Threads(kind, size))
