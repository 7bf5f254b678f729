# SPDX-License-Identifier: Apache-2.0
"""The owner's side: hand calls to a zygote, from any thread or event loop, and get values or reasons back.

One background thread a `Sandbox` talks to one zygote (:mod:`verl_ext.sandbox.zygote`), started at the first call: a new
interpreter with an empty environment, so it holds nothing of this process. If it dies, another one is started and the
calls that it had are given to it, once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import logging
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from verl_ext.sandbox.cage import LEVELS, CageError, Limits, has_seccomp, landlock_version
from verl_ext.sandbox.shell import Cgroup, bubblewrap, has_cgroup
from verl_ext.sandbox.zygote import pack, unpack

logger = logging.getLogger(__name__)

CONFIG_KEY = "verl_ext.sandbox.cage"
SETTINGS_VARIABLE = "VERL_EXT_SANDBOX"
"""Carries `SandboxOptions` as JSON from the launcher to the processes of a run."""
START_LIMIT_S = 120.0
"""Seconds in which a zygote must be ready."""
SILENCE_S = 60.0
"""A zygote that has said nothing for so long after the last possible end of a call hangs."""
TRIES = 2
"""Zygotes that a call is given to. Nothing that a call does can end one: it is the machine that kills them."""

_BOOT = (
    "import json, sys; descriptor, level, limits, modules, path = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from verl_ext.sandbox import zygote; zygote.main(descriptor, level, limits, modules)"
)
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # sets in the same order: the same verdict each time
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class SandboxError(RuntimeError):
    """A call gave no value.

    Attributes:
        reason: ``timeout`` (its time was up), ``memory`` (its memory was), ``crashed`` (its process ended of itself),
            ``output`` (its value is too long or no JSON), ``error`` (it raised), which are of its own doing; or
            ``refused`` (the sandbox would or could not run it), which is not.
        text: more, for a person. May quote what a model wrote.
    """

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"{reason}: {text}")
        self.reason, self.text = reason, text

    def __reduce__(self) -> tuple[Any, ...]:
        return SandboxError, (self.reason, self.text)


@dataclasses.dataclass(frozen=True)
class SandboxOptions(Limits):
    """``verl_ext.sandbox.*``: the `Limits` of every call, and ``cage``, one of `LEVELS`."""

    cage: str = "required"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cage not in LEVELS:
            raise ValueError(f"cage is {self.cage!r}; choose one of {', '.join(LEVELS)}")


class Call(concurrent.futures.Future[Any]):
    """A call that has been given in.

    Attributes:
        seconds: on the clock, that its process has lived; 0.0 where it had none.
    """

    seconds = 0.0


@dataclasses.dataclass
class _Job:
    message: dict[str, Any]
    future: Call
    tries: int = 0


class Sandbox:
    """A room in which calls run that may execute what a model wrote. Threads and event loops may share it.

    Args:
        limits: of the calls.
        cage: one of `LEVELS`; see :mod:`verl_ext.sandbox.cage`.
        modules: imported before the first call. Others are imported at the first call that names them.

    Raises:
        ValueError: no such cage.
        CageError: this machine has not what the cage needs.
    """

    def __init__(self, limits: Limits | None = None, cage: str = "auto", *, modules: Sequence[str] = ()) -> None:
        limits = limits or Limits()
        workers = limits.workers or max(8, 2 * (os.cpu_count() or 1))
        fields = {field.name: getattr(limits, field.name) for field in dataclasses.fields(Limits)}
        self.limits = Limits(**{**fields, "workers": workers})
        self.cage, self.modules = cage, list(modules)
        self.layers = check(cage)
        self._owner = -1
        self._reset()

    def _reset(self) -> None:
        """Begin anew, in the process that made this or in a fork of it."""
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._jobs: dict[int, _Job] = {}
        self._outbox: deque[dict[str, Any]] = deque()
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count()
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._process: subprocess.Popen[bytes] | None = None

    async def call(self, target: str, *arguments: Any, timeout_s: float, warm: Sequence[Any] = ()) -> Any:
        """Call a function in a process of its own, without blocking the event loop. Cancelling this ends the process.

        Args:
            target: ``module:function``. Never take it from a model.
            *arguments: as JSON can hold them.
            timeout_s: seconds of processor time for the call alone: neither waiting for a free place nor a busy
                machine counts. It is also ended after ``limits.patience`` times as long on the clock.
            warm: ``module:function`` and its arguments: called before, outside of the cage and with what it changes
                kept for later calls, to fill caches. Never with what a model wrote.

        Returns:
            What the function returned, as JSON can hold it. If the function runs what a model wrote, the model may
            have chosen it.

        Raises:
            SandboxError: there is no value; see its ``reason``.
        """
        return await asyncio.wrap_future(self.submit(target, *arguments, timeout_s=timeout_s, warm=warm))

    def run(self, target: str, *arguments: Any, timeout_s: float, warm: Sequence[Any] = ()) -> Any:
        """The same for callers without an event loop: blocks this thread until there is a value."""
        return self.submit(target, *arguments, timeout_s=timeout_s, warm=warm).result()

    def submit(self, target: str, *arguments: Any, timeout_s: float, warm: Sequence[Any] = ()) -> Call:
        """The same, as a future; arguments and exceptions as for :meth:`call`."""
        if not 0 < timeout_s < 1e6:
            raise ValueError(f"timeout_s={timeout_s}: expected seconds greater than 0")
        try:
            text = json.dumps(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            raise SandboxError("refused", f"arguments of {target} that are no JSON: {error}") from error
        if len(text) > self.limits.input_kb << 10:
            raise SandboxError("refused", f"{len(text)} bytes of arguments, more than {self.limits.input_kb} KiB")
        future = Call()
        if self._owner != os.getpid():
            self._reset()
        with self._lock:
            if self._closed:
                raise SandboxError("refused", "the sandbox is closed")
            number = next(self._numbers)
            message = {"id": number, "target": target, "arguments": text, "timeout_s": timeout_s, "warm": list(warm)}
            self._jobs[number] = _Job(message, future)
            self._outbox.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="verl_ext sandbox", daemon=True)
                self._thread.start()
        future.add_done_callback(functools.partial(self._cancel, number))
        self._rouse()
        return future

    def _cancel(self, number: int, future: concurrent.futures.Future[Any]) -> None:
        if future.cancelled():
            with self._lock:
                if self._jobs.pop(number, None) is not None:
                    self._outbox.append({"id": number, "cancel": True})
            self._rouse()

    def _rouse(self) -> None:
        try:
            self._wake.send(b".")
        except BlockingIOError:  # it has been told
            pass

    def close(self) -> None:
        """End the processes; calls that are under way raise. A later call is refused."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None and self._owner == os.getpid():
            self._rouse()
            thread.join(timeout=10)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the thread ---

    def _run(self) -> None:
        while not self._closed:
            why = "the zygote ended"
            try:
                try:
                    zygote = _Zygote(self)
                except OSError as error:
                    raise _Failed(f"the zygote cannot be started: {error}", final=False) from error
                with zygote:
                    self._process = zygote.process
                    self._exchange(zygote.socket)
            except _Failed as error:
                why = str(error)
                with self._lock:
                    for job in self._jobs.values():
                        job.tries = TRIES if error.final else job.tries + 1
            except OSError as error:
                why = f"the zygote ended: {error}"
            except Exception as error:  # a call that waits must always hear something
                why = f"{type(error).__name__}: {error}"
                with self._lock:
                    for job in self._jobs.values():
                        job.tries = TRIES
            self._give_again("the sandbox was closed" if self._closed else why)
            with self._lock:
                if not self._jobs:  # another zygote only when there is work
                    self._thread = None
                    return
        self._give_again("the sandbox was closed")

    def _give_again(self, why: str) -> None:
        with self._lock:
            lost = [job for job in self._jobs.values() if job.tries >= TRIES or self._closed]
            self._jobs = {number: job for number, job in self._jobs.items() if job not in lost}
            self._outbox = deque(job.message for job in self._jobs.values())
        if lost or self._jobs:
            logger.warning("sandbox: %s; %d calls begin again, %d fail", why, len(self._jobs), len(lost))
        for job in lost:
            _settle(job.future, error=SandboxError("refused", why))

    def _exchange(self, link: socket.socket) -> None:
        """Pass messages until the zygote ends, hangs, or this is closed."""
        out, incoming, heard = bytearray(), bytearray(), time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(link, selectors.EVENT_READ)
            while not self._closed:
                with self._lock:
                    while self._outbox:
                        message = self._outbox.popleft()
                        job = self._jobs.get(message["id"])
                        if job is not None:
                            job.tries += 1
                        if job is not None or "cancel" in message:
                            out += pack(message)
                    # Waiting for a place is limited too: the others' clocks run out one after another.
                    longest = sum(job.message["timeout_s"] for job in self._jobs.values()) * self.limits.patience
                if not self._jobs:
                    heard = time.monotonic()
                elif time.monotonic() > heard + longest + SILENCE_S:
                    raise OSError("it does not answer")
                selector.modify(link, selectors.EVENT_READ | (selectors.EVENT_WRITE if out else 0))
                events = {key.fileobj: mask for key, mask in selector.select(SILENCE_S)}
                if self._woken in events:
                    self._woken.recv(4096)
                if events.get(link, 0) & selectors.EVENT_WRITE:
                    del out[: link.send(out)]
                if events.get(link, 0) & selectors.EVENT_READ:
                    block = link.recv(1 << 18)
                    if not block:
                        return
                    heard = time.monotonic()
                    incoming += block
                    for message in unpack(incoming):
                        self._answer(message)

    def _answer(self, message: dict[str, Any]) -> None:
        with self._lock:
            job = self._jobs.pop(message["id"], None)
        if job is None:  # cancelled meanwhile
            return
        reason, text = message["reason"], message["text"]
        job.future.seconds = message["seconds"]
        if not reason:
            try:
                return _settle(job.future, json.loads(text, parse_constant=_no_constant))
            except (ValueError, RecursionError) as error:
                reason, text = "output", f"no JSON: {error}"
        _settle(job.future, error=SandboxError(reason, text))


def _settle(future: concurrent.futures.Future[Any], value: Any = None, error: Exception | None = None) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(value) if error is None else future.set_exception(error)


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


class _Failed(Exception):
    """A zygote did not start; `final` if another one would not either."""

    def __init__(self, message: str, final: bool) -> None:
        super().__init__(message)
        self.final = final


class _Zygote:
    """A running zygote: ``process`` and the ``socket`` to it. Its end is that of the block."""

    def __init__(self, sandbox: Sandbox) -> None:
        limits = sandbox.limits
        outer = sandbox.cage == "auto"
        room = limits.workers * (limits.memory_mb << 20) + (4 << 30)
        self.cgroup = Cgroup(room, limits.workers + 64) if outer else None
        wrapper = [*(self.cgroup.command() if self.cgroup else []), *(bubblewrap() if outer else [])]
        self.socket, theirs = socket.socketpair()
        path = [os.path.abspath(entry) for entry in sys.path if os.path.exists(entry or ".")]
        settings = [theirs.fileno(), sandbox.cage, dataclasses.asdict(limits), sandbox.modules, path]
        self.said = tempfile.TemporaryFile()
        with theirs:
            self.process = subprocess.Popen(
                [*wrapper, sys.executable, "-s", "-c", _BOOT, json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.said,
                env=_ENVIRONMENT,
                cwd="/",
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )

    def __enter__(self) -> _Zygote:
        try:
            self.socket.settimeout(START_LIMIT_S)
            told = bytearray()
            while not (first := next(unpack(told), None)):
                block = self.socket.recv(1 << 16)
                if not block:
                    self.said.seek(0)
                    said = self.said.read().decode(errors="replace").strip()
                    raise _Failed(f"the zygote did not start: {said[-1000:]}", final=False)
                told += block
            if "failed" in first:
                raise _Failed(first["failed"], final=True)
            self.socket.setblocking(False)
        except BaseException as error:
            self.__exit__()
            if isinstance(error, TimeoutError):
                raise _Failed(f"the zygote was not ready after {START_LIMIT_S} s", final=False) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()  # upon which it ends its workers
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.said.close()
        if self.cgroup is not None:
            self.cgroup.close()


def machine() -> dict[str, Any]:
    """What this machine has: ``landlock`` (version, 0: none), ``seccomp``, ``bubblewrap``, ``cgroup`` (bool)."""
    return {
        "landlock": landlock_version(),
        "seccomp": has_seccomp(),
        "bubblewrap": bool(bubblewrap()),
        "cgroup": has_cgroup(),
    }


@functools.cache
def check(cage: str) -> tuple[str, ...]:
    """The layers of a cage on this machine, named in the log once a process.

    Args:
        cage: one of `LEVELS`.

    Raises:
        ValueError: no such cage.
        CageError: the machine lacks what it needs; the message says what can be done.
    """
    if cage not in LEVELS:
        raise ValueError(f"{CONFIG_KEY} is {cage!r}; choose one of {', '.join(LEVELS)}")
    layers = ["rlimits"]
    if cage != "rlimits":
        missing = [] if landlock_version() else ["Landlock (Linux 5.13 or later, `landlock` in the kernel's lsm= list)"]
        missing += [] if has_seccomp() else ["seccomp filters (x86_64 or aarch64)"]
        if missing:
            raise CageError(
                f"{CONFIG_KEY}={cage} needs {' and '.join(missing)}, which this machine has not. What models write "
                "would run with your rights. For models that you trust, in a container of its own: "
                f"++{CONFIG_KEY}=rlimits"
            )
        layers += ["seccomp", f"Landlock {landlock_version()}"]
    if cage == "auto":
        layers += ["bubblewrap"] if bubblewrap() else []
        layers += ["cgroup"] if has_cgroup() else []
    if cage == "rlimits":
        logger.warning("sandbox: %s=rlimits: what models write runs with your rights, limits apart", CONFIG_KEY)
    else:
        logger.info("sandbox: %s: %s", cage, ", ".join(layers))
    return tuple(layers)


@functools.cache
def _shared(settings: str) -> Sandbox:
    options = SandboxOptions(**json.loads(settings))
    return Sandbox(options, options.cage)


def shared() -> Sandbox:
    """The sandbox of this process, as the run's configuration has it.

    Raises:
        ValueError, CageError: as for `Sandbox`.
    """
    return _shared(os.environ.get(SETTINGS_VARIABLE) or "{}")
