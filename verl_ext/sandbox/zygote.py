# SPDX-License-Identifier: Apache-2.0
"""The process that forks a worker for each call: ``python -c '... zygote.main(FD, LEVEL, LIMITS, MODULES, SCRATCH)'``.

It has imported what the calls need, holds no secret, and runs nothing of theirs itself: it hands a call to a fork,
takes back text that it does not read, keeps the time, and kills. One thread. Its owner (pool.py) sends it descriptors
for each call, and ends it by closing the channel on which these come: one end of a new socket, a file with the JSON
list of arguments, and what stays open in the fork, where these numbers are the function's first arguments. The fork
alone reads the file, so that no other fork finds in its memory what this one was given. On the socket of a call:

* from the owner a line ``{"target", "timeout_s", "warm"}``;
* to it ``{"reason", "text", "seconds"}`` and the end: reason "" and the value's JSON in ``text``, or why there is none.

An owner who closes the socket before has given the call up. A fork says ``r`` and why if its cage did not close; else
`ENTERED`, before anything of the call runs, and then one letter and text: ``v`` a value, ``e`` an exception, ``m`` out
of memory, ``o`` a value that is no JSON or too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from verl_ext.sandbox.cage import Cage, Limits, adopt_orphans, die_with_parent

REASONS = {"v": "", "e": "error", "m": "memory", "o": "output", "r": "refused"}
ERROR_CHARS = 2000
ENTERED = b"+"
DESCRIPTORS = 8
"""Most descriptors that may come with a call."""
_SWEEPS = 1000
"""Most rounds of killing orphans that go on forking."""
_SIGNALS = {int(one): one.name for one in signal.Signals}


@functools.cache
def resolve(target: str) -> Callable[..., Any]:
    """The function ``module:name``, which the owner named; its module is imported here, once for all calls."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{target} is not a function")
    return function


class Zygote:
    """Forks a worker for each call and sees to it that it ends."""

    def __init__(self, level: str, limits: Limits, scratch: str = "") -> None:
        self.cage, self.limits = Cage(level, limits, scratch), limits
        self.workers: set[int] = set()
        self.modules = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, channel: socket.socket) -> None:
        """Answer the calls whose sockets come, until the channel is closed: then this process and its forks end."""
        asyncio.get_running_loop().add_reader(channel, self._take, channel)
        await asyncio.Event().wait()

    def _take(self, channel: socket.socket) -> None:
        said, sockets, _, _ = socket.recv_fds(channel, 1, 2 + DESCRIPTORS)
        if not said:
            for pid in list(self.workers):
                self._end(pid)
            os._exit(0)
        task = asyncio.create_task(self.answer(socket.socket(fileno=sockets[0]), sockets[1:]))
        self._tasks.add(task)  # the loop itself keeps weak references only
        task.add_done_callback(self._tasks.discard)

    async def answer(self, link: socket.socket, descriptors: list[int]) -> None:
        """One call, from its line to its answer, or until the owner gives it up."""
        loop, said = asyncio.get_running_loop(), bytearray()
        with link, contextlib.ExitStack() as held:
            for descriptor in descriptors:
                held.callback(os.close, descriptor)
            link.setblocking(False)
            while not said.endswith(b"\n"):
                block = await loop.sock_recv(link, 1 << 18)
                if not block:
                    return
                said += block
            call = asyncio.create_task(self.run(**json.loads(said), descriptors=descriptors, held=held))
            given_up = asyncio.create_task(loop.sock_recv(link, 1))
            await asyncio.wait({call, given_up}, return_when=asyncio.FIRST_COMPLETED)
            for task in (call, given_up):
                task.cancel()  # which does nothing to one that has ended
            await asyncio.wait({call, given_up})
            if not call.cancelled():
                error = call.exception()
                answer = call.result() if error is None else {"reason": "refused", "text": _told(error), "seconds": 0.0}
                await loop.sock_sendall(link, json.dumps(answer).encode() + b"\n")

    async def run(
        self, target: str, timeout_s: float, warm: list[Any], descriptors: list[int], held: contextlib.ExitStack
    ) -> dict[str, Any]:
        """Fork a worker, wait for its end or bring it about, and say what came of it. What it raises is no verdict."""
        function = resolve(target)
        if warm:
            resolve(warm[0])(*warm[1:])
        if len(sys.modules) != self.modules:
            self.modules = len(sys.modules)
            gc.collect()
            gc.freeze()  # a collection in a fork would touch, and so copy, all of the memory
        said = bytearray()
        with contextlib.ExitStack() as ours:
            pipe, writer = os.pipe2(os.O_CLOEXEC)
            ours.callback(os.close, pipe)
            held.callback(os.close, writer)
            pid = os.fork()
            if pid == 0:
                work(self.cage, function, timeout_s, writer, self.limits.output_kb << 10, descriptors)
            self.workers.add(pid)
            started = time.monotonic()
            try:
                held.close()  # the fork alone has them now: who holds the other end hears of its end
                reason = await self._watch(pid, pipe, said, timeout_s)
            finally:
                status = self._end(pid)
        seconds, text = time.monotonic() - started, ""
        if reason == "timeout":
            text = f"no value after {timeout_s} s of processor time ({seconds:.1f} s on the clock)"
        elif reason == "output":
            text = f"more than {self.limits.output_kb} KiB"
        else:
            reason, text = _verdict(os.waitstatus_to_exitcode(status), said)
        return {"reason": reason, "text": text, "seconds": seconds}

    async def _watch(self, pid: int, pipe: int, said: bytearray, timeout_s: float) -> str:
        """Collect what a worker says until it ends; or the reason why it must."""
        late = time.monotonic() + timeout_s * self.limits.patience
        loop, awake = asyncio.get_running_loop(), asyncio.Event()
        os.set_blocking(pipe, False)
        end = os.pidfd_open(pid)
        for descriptor in (pipe, end):
            loop.add_reader(descriptor, awake.set)
        try:
            while True:
                # In this order: what it says before its end is read after it.
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                with contextlib.suppress(BlockingIOError):  # nothing yet, or an orphan holds the other end
                    while block := os.read(pipe, 1 << 16):
                        said += block
                        if len(said) > (self.limits.output_kb << 10) + ERROR_CHARS:
                            return "output"
                    loop.remove_reader(pipe)
                if ended:
                    return ""
                used = time.clock_gettime((~pid << 3) | 2)  # the processor time of that process
                left = min(timeout_s - used, late + _kept_waiting(pid) - time.monotonic())
                if left <= 0:
                    return "timeout"
                timer = loop.call_later(max(left, 0.005), awake.set)
                await awake.wait()
                awake.clear()
                timer.cancel()
        finally:
            for descriptor in (pipe, end):
                loop.remove_reader(descriptor)
            os.close(end)

    def _end(self, pid: int) -> int:
        """Kill what is left of a worker and of all that it started; the worker's exit status."""
        for kill in (os.killpg, os.kill):  # it may not have made its group yet
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        self.workers.remove(pid)
        for _ in range(_SWEEPS):
            orphans = _children() - self.workers  # what it started has become our child
            for orphan in orphans:
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)
            if not orphans:
                break
        return status


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:ERROR_CHARS]


def _verdict(code: int, said: bytearray) -> tuple[str, str]:
    """Reason and text of a worker that ended by itself."""
    entered = said.startswith(ENTERED)
    said = said[entered:]
    letter = said[:1].decode("ascii", "replace")
    if code == 0 and letter in REASONS and entered == (letter != "r"):
        return REASONS[letter], said[1:].decode("utf-8", "replace")
    if code >= 0:
        return "crashed", f"the process ended with code {code} and without a value"
    # SIGKILL from somebody else: the kernel, for want of memory. SIGXCPU: its own processor limit.
    reason = {-signal.SIGKILL: "memory", -signal.SIGXCPU: "timeout"}.get(code, "crashed")
    return reason, f"the process was ended by {_SIGNALS.get(-code, f'signal {-code}')}"


def _kept_waiting(pid: int) -> float:
    """Seconds for which a process could have run and had no processor, which is the machine's doing; 0.0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # a kernel that does not count it
        return 0.0


def _children() -> set[int]:
    pid = os.getpid()
    try:
        return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except FileNotFoundError:  # a kernel without that file, which only checkpoints need
        found = set()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                    found.add(int(stat.parent.name))
        return found


def work(
    cage: Cage, function: Callable[..., Any], timeout_s: float, pipe: int, limit: int, descriptors: list[int]
) -> NoReturn:
    """The life of a fork: into the cage, one call, its answer of at most `limit` bytes into the pipe, the end.

    Args:
        descriptors: the file with the arguments, and those that the function gets.
    """
    letter, text = "r", ""
    try:
        with contextlib.suppress(OSError):  # where memory is short the kernel ends this one first, not the trainer
            Path("/proc/self/oom_score_adj").write_text("1000")
        arguments, *descriptors = descriptors
        with open(arguments, "rb") as file:
            given = file.read()
        cage.enter(pipe, timeout_s, descriptors)
        os.write(pipe, ENTERED)
        letter = "e"
        value = function(*descriptors, *json.loads(given))
        letter = "o"
        text = json.dumps(value, allow_nan=False)
        if len(text) < limit:
            letter = "v"
        else:
            text = f"{len(text) + 1} bytes, more than {limit}"
    except BaseException as error:  # SystemExit too: the call ends here, not the room
        if letter != "r" and isinstance(error, MemoryError):
            letter = "m"
        text = _told(error)
        if place := traceback.extract_tb(error.__traceback__)[-1:]:
            text += f" ({os.path.basename(place[0].filename)}:{place[0].lineno})"
    finally:
        try:
            answer = memoryview((letter + text).encode("utf-8", "replace"))
            while answer:
                answer = answer[os.write(pipe, answer) :]
        finally:
            os._exit(0)


def main(descriptor: int, level: str, limits: dict[str, Any], modules: list[str], scratch: str) -> None:
    """Import the modules and serve the channel of this descriptor. What goes wrong before is told as a traceback."""
    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, whose end closes the channel
    logging.disable(logging.CRITICAL)
    zygote = Zygote(level, Limits(**limits), scratch)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a call takes a few here; its fork has a limit of its own
    for module in modules:
        importlib.import_module(module)
    asyncio.run(zygote.serve(socket.socket(fileno=descriptor)))
