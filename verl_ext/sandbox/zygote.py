# SPDX-License-Identifier: Apache-2.0
"""The process that forks a worker for each call: ``python -c '... zygote.main(FD, LEVEL, LIMITS)'``, see pool.py.

It has imported what the calls need, holds no secret, and runs nothing of theirs itself: it hands the text of a call to
a fork, takes back text that it does not read, keeps the time, and kills. One thread, one socket to its owner:

* from it: ``{"id", "target", "arguments", "timeout_s", "warm"}``, or ``{"id", "cancel": true}``;
* to it: ``{"ready": true}`` or ``{"failed": message}`` once, then ``{"id", "reason", "text", "seconds"}`` with reason
  "" and the value's JSON in ``text``, or why there is none.

A message is its length (4 bytes) and JSON. A fork's answer is one letter and text: ``v`` a value, ``e`` an exception,
``m`` out of memory, ``o`` a value that is no JSON or too long, ``r`` the cage did not close.
"""

from __future__ import annotations

import functools
import gc
import heapq
import importlib
import json
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from verl_ext.sandbox.cage import Cage, CageError, Limits, adopt_orphans, die_with_parent

REASONS = {"v": "", "e": "error", "m": "memory", "o": "output", "r": "refused"}
ERROR_CHARS = 2000
_SWEEPS = 1000


def pack(message: dict[str, Any]) -> bytes:
    """A message with its length in front."""
    body = json.dumps(message).encode()
    return struct.pack("=I", len(body)) + body


def unpack(buffer: bytearray) -> Iterator[dict[str, Any]]:
    """Take the complete messages out of a buffer."""
    while len(buffer) >= 4:
        end = 4 + struct.unpack_from("=I", buffer)[0]
        if len(buffer) < end:
            return
        body = bytes(buffer[4:end])
        del buffer[:end]
        yield json.loads(body)


@functools.cache
def resolve(target: str) -> Callable[..., Any]:
    """The function ``module:name``, which the owner named; its module is imported here, once for all calls."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{target} is not a function")
    return function


@dataclass
class Worker:
    """A fork and its call."""

    call: dict[str, Any]
    pid: int
    pipe: int
    started: float
    said: bytearray = field(default_factory=bytearray)
    ended: str = ""


class Zygote:
    """Forks workers, at most ``limits.workers`` at a time, and sees to it that they end."""

    def __init__(self, owner: socket.socket, level: str, limits: Limits) -> None:
        self.owner, self.limits = owner, limits
        self.cage = Cage(level, limits)
        self.waiting: deque[dict[str, Any]] = deque()
        self.workers: dict[int, Worker] = {}
        self.checks: list[tuple[float, int]] = []  # heap of (time, pid): look at the clocks of this worker then
        self.incoming = bytearray()
        self.modules = 0
        self.selector = selectors.DefaultSelector()
        self.selector.register(owner, selectors.EVENT_READ, self._read_owner)
        ours, signals = socket.socketpair()
        for end in (ours, signals):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
        self.woken, self._signals = ours, signals
        self.selector.register(ours, selectors.EVENT_READ, lambda: self.woken.recv(4096))

    def serve(self) -> None:
        """Work until the owner closes its socket."""
        while True:
            while self.waiting and len(self.workers) < self.limits.workers:
                self._start(self.waiting.popleft())
            wait = max(self.checks[0][0] - time.monotonic(), 0.0) if self.checks else None
            for key, _ in self.selector.select(wait):
                if isinstance(key.data, Worker):
                    self._read_worker(key.data)
                else:
                    key.data()
            self._keep_time()
            self._reap()

    def tell(self, message: dict[str, Any]) -> None:
        self.owner.sendall(pack(message))

    def _read_owner(self) -> None:
        block = self.owner.recv(1 << 18)
        if not block:
            self._end()
        self.incoming += block
        for call in unpack(self.incoming):
            if "cancel" not in call:
                self.waiting.append(call)
                continue
            self.waiting = deque(one for one in self.waiting if one["id"] != call["id"])
            for worker in self.workers.values():
                if worker.call["id"] == call["id"]:
                    self._kill(worker, "cancelled")

    def _end(self) -> None:
        for worker in list(self.workers.values()):
            self._kill(worker, "cancelled")
        self._sweep()
        os._exit(0)

    # --- a worker ---

    def _start(self, call: dict[str, Any]) -> None:
        try:
            function = resolve(call["target"])
            if call["warm"]:
                target, *arguments = call["warm"]
                resolve(target)(*arguments)
            if len(sys.modules) != self.modules:
                self.modules = len(sys.modules)
                gc.collect()
                gc.freeze()  # a collection in a fork would touch, and so copy, all of the memory
            reader, writer = os.pipe2(os.O_CLOEXEC)
            pid = os.fork()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            self.tell({"id": call["id"], "reason": "refused", "text": text[:ERROR_CHARS], "seconds": 0.0})
            return
        if pid == 0:
            work(self.cage, function, call, writer, self.limits.output_kb << 10)
        os.close(writer)
        os.set_blocking(reader, False)
        worker = self.workers[pid] = Worker(call, pid, reader, time.monotonic())
        self.selector.register(reader, selectors.EVENT_READ, worker)
        heapq.heappush(self.checks, (worker.started + call["timeout_s"], pid))

    def _read_worker(self, worker: Worker) -> None:
        try:
            block = os.read(worker.pipe, 1 << 16)
        except BlockingIOError:
            return
        if not block:
            self.selector.unregister(worker.pipe)
        worker.said += block
        if len(worker.said) > (self.limits.output_kb << 10) + ERROR_CHARS:
            self._kill(worker, "output")

    def _keep_time(self) -> None:
        now = time.monotonic()
        while self.checks and self.checks[0][0] <= now:
            worker = self.workers.get(heapq.heappop(self.checks)[1])
            if worker is None or worker.ended:
                continue
            limit = worker.call["timeout_s"]
            clock = worker.started + limit * self.limits.patience - now
            try:
                left = limit - time.clock_gettime((~worker.pid << 3) | 2)  # the processor time of that process
            except OSError:  # it has ended
                continue
            if left <= 0 or clock <= 0:
                self._kill(worker, "timeout")
            else:
                heapq.heappush(self.checks, (now + max(min(left, clock), 0.005), worker.pid))

    def _kill(self, worker: Worker, reason: str) -> None:
        worker.ended = worker.ended or reason
        for kill in (os.killpg, os.kill):  # it may not have made its group yet
            try:
                kill(worker.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _reap(self) -> None:
        """Take note of the workers that have ended. Whatever else has become a child of ours is an orphan: killed."""
        ended = False
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if found is None:
                break
            worker = self.workers.get(found.si_pid)
            if worker is not None:
                self._kill(worker, "")  # the rest of its group, while its number cannot be another's
            _, status = os.waitpid(found.si_pid, 0)
            if worker is not None:
                ended = True
                self._finish(worker, status)
        if ended:
            self._sweep()

    def _finish(self, worker: Worker, status: int) -> None:
        del self.workers[worker.pid]
        try:
            while block := os.read(worker.pipe, 1 << 16):
                worker.said += block
                if len(worker.said) > (self.limits.output_kb << 10) + ERROR_CHARS:
                    worker.ended = worker.ended or "output"
                    break
        except BlockingIOError:
            pass  # an orphan holds the other end
        if worker.pipe in self.selector.get_map():
            self.selector.unregister(worker.pipe)
        os.close(worker.pipe)
        seconds = time.monotonic() - worker.started
        reason, text = worker.ended, ""
        if reason == "cancelled":
            return
        if not reason:
            letter, text = worker.said[:1].decode("ascii", "replace"), worker.said[1:].decode("utf-8", "replace")
            code = os.waitstatus_to_exitcode(status)
            if code == 0 and letter in REASONS:
                reason = REASONS[letter]
            else:
                # SIGKILL from somebody else: the kernel, for want of memory. SIGXCPU: its own processor limit.
                killed = {-signal.SIGKILL: "memory", -signal.SIGXCPU: "timeout"}
                reason, text = killed.get(code, "crashed"), _cause(code)
        elif reason == "timeout":
            text = f"no value after {worker.call['timeout_s']} s of processor time ({seconds:.1f} s on the clock)"
        elif reason == "output":
            text = f"more than {self.limits.output_kb} KiB"
        self.tell({"id": worker.call["id"], "reason": reason, "text": text, "seconds": seconds})

    def _sweep(self) -> None:
        for _ in range(_SWEEPS):
            strangers = [pid for pid in _children() if pid not in self.workers]
            if not strangers:
                return
            for pid in strangers:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _cause(code: int) -> str:
    if code >= 0:
        return f"the process ended with code {code} and without a value"
    return f"the process was ended by {signal.Signals(-code).name}"


def _children() -> list[int]:
    pid = os.getpid()
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:  # a kernel without that file, which only checkpoints need
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/stat") as file:
                    if int(file.read().rpartition(")")[2].split()[1]) == pid:
                        found.append(int(name))
            except OSError:
                pass
        return found


def work(cage: Cage, function: Callable[..., Any], call: dict[str, Any], pipe: int, limit: int) -> None:
    """The life of a fork: into the cage, one call, its answer, the end.

    Args:
        cage: to enter.
        function: to call.
        call: with its ``arguments``, a JSON list, and ``timeout_s``.
        pipe: where the answer goes.
        limit: bytes of the answer.
    """
    answer = b"r"
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        cage.enter(pipe, call["timeout_s"])
        answer = b"m"
        try:
            value = function(*json.loads(call["arguments"]))
            try:
                answer = b"v" + json.dumps(value, allow_nan=False).encode()
                if len(answer) > limit:
                    answer = f"o{len(answer)} bytes, more than {limit}".encode()
            except (TypeError, ValueError, RecursionError) as error:
                answer = f"o{type(error).__name__}: {error}".encode()[:ERROR_CHARS]
        except MemoryError:
            pass
        except BaseException as error:  # SystemExit too: the call ends here, not the room
            place = traceback.extract_tb(error.__traceback__)[-1:]
            where = f" ({os.path.basename(place[0].filename)}:{place[0].lineno})" if place else ""
            answer = f"e{type(error).__name__}: {error}"[:ERROR_CHARS].encode("utf-8", "replace") + where.encode()
    except CageError as error:
        answer = f"r{error}".encode()
    except BaseException as error:
        answer = answer[:1] + f"{type(error).__name__}: {error}"[:ERROR_CHARS].encode("utf-8", "replace")
    finally:
        try:
            view = memoryview(answer)
            while view:
                view = view[os.write(pipe, view) :]
        finally:
            os._exit(0)


def main(descriptor: int, level: str, limits: dict[str, Any], modules: list[str]) -> None:
    """Prepare, say so, and serve.

    Args:
        descriptor: of the socket to the owner.
        level: of the cage.
        limits: fields of `Limits`.
        modules: to import before the first call.
    """
    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, whose end closes the socket
    logging.disable(logging.CRITICAL)
    owner = socket.socket(fileno=descriptor)
    try:
        zygote = Zygote(owner, level, Limits(**limits))
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        owner.sendall(pack({"failed": f"{type(error).__name__}: {error}", "cage": isinstance(error, CageError)}))
        sys.exit(1)
    zygote.tell({"ready": True})
    zygote.serve()
