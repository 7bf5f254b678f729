# SPDX-License-Identifier: Apache-2.0
"""The owner's side: hand calls to a zygote, from any thread or event loop, and get values or reasons back.

Each `Sandbox` has a thread with an event loop, where each call is a coroutine with a socket of its own to the zygote
(:mod:`verl_ext.sandbox.zygote`). That is started at the first call: a new interpreter with an empty environment, so it
holds nothing of this process. If it dies, another one is started and the calls that it had are given to it, once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any, Literal

from verl_ext.sandbox.cage import LEVELS, CageError, Limits, has_seccomp, landlock_version
from verl_ext.sandbox.shell import Cgroup, bubblewrap, has_cgroup

logger = logging.getLogger(__name__)

SETTINGS_VARIABLE = "VERL_EXT_SANDBOX"
"""Carries `SandboxOptions` as JSON from the launcher to the processes of a run."""
SILENCE_S = 120.0
"""A zygote that has not answered for so long after the last possible end of a call hangs. It may have to start first,
and to import what the call needs."""
TRIES = 2
"""Zygotes that a call is given to. Nothing that a call does can end one: it is the machine that kills them."""

_BOOT = (
    "import json, sys; *settings, sys.path[:] = json.loads(sys.argv[1]); "
    "from verl_ext.sandbox import zygote; zygote.main(*settings)"
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
            ``output`` (its value is too long or no JSON), ``error`` (it raised), ``input`` (its arguments are too
            long), which are of its own doing; or ``refused`` (the sandbox would or could not run it), which is not.
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

    def settle(self, task: concurrent.futures.Future[Any]) -> None:
        """Take over what came of a coroutine, whatever that is: who waits must hear something."""
        if not self.set_running_or_notify_cancel():
            return
        error = SandboxError("refused", "the sandbox was closed") if task.cancelled() else task.exception()
        if error is None:
            self.set_result(task.result())
        elif isinstance(error, SandboxError):
            self.set_exception(error)
        else:
            self.set_exception(SandboxError("refused", f"{type(error).__name__}: {error}"))


class Sandbox:
    """A room in which calls run that may execute what a model wrote. Threads and event loops may share it.

    Args:
        limits: of the calls.
        cage: one of `LEVELS`; see :mod:`verl_ext.sandbox.cage`.
        modules: imported before the first call. Others are imported at the first call that names them.
        scratch: a folder, for calls that use a GPU; see `verl_ext.sandbox.cage.Cage`.

    Raises:
        ValueError: no such cage.
        CageError: this machine has not what the cage needs.
    """

    def __init__(
        self, limits: Limits | None = None, cage: str = "auto", *, modules: Sequence[str] = (), scratch: str = ""
    ) -> None:
        limits = limits or Limits()
        fields = {field.name: getattr(limits, field.name) for field in dataclasses.fields(Limits)}
        self.limits = Limits(**{**fields, "workers": limits.workers or max(8, 2 * (os.cpu_count() or 1))})
        self.cage, self.modules, self.scratch = cage, list(modules), scratch
        self.layers = check(cage)
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        """Begin anew, in the process that made this or in a fork of it."""
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._zygote: _Zygote | None = None

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

    def submit(
        self,
        target: str,
        *arguments: Any,
        timeout_s: float,
        warm: Sequence[Any] = (),
        descriptors: Sequence[int] = (),
    ) -> Call:
        """The same, as a future; arguments and exceptions as for :meth:`call`.

        Args:
            descriptors: at most 8 open files, which the call gets besides, their numbers there before its arguments.
                They may be closed here once it has begun. Such a call is not begun again if its zygote ends.
        """
        if not 0 < timeout_s < 1e6:
            raise ValueError(f"timeout_s={timeout_s}: expected seconds greater than 0")
        try:
            text = json.dumps(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            raise SandboxError("refused", f"arguments of {target} that are no JSON: {error}") from error
        call = Call()
        if len(text) > self.limits.input_kb << 10:
            limit = f"verl_ext.sandbox.input_kb={self.limits.input_kb}"
            call.set_exception(SandboxError("input", f"{len(text)} bytes of arguments, more than {limit}"))
            return call
        head = json.dumps({"target": target, "timeout_s": timeout_s, "warm": list(warm)})
        if self._owner != os.getpid():
            self._reset()
        with self._lock:
            if self._closed:
                raise SandboxError("refused", "the sandbox is closed")
            if self._thread is None:
                self._loop, self._places = asyncio.new_event_loop(), asyncio.Semaphore(self.limits.workers)
                self._thread = threading.Thread(target=self._live, name="verl_ext sandbox", daemon=True)
                self._thread.start()
            limit_s = timeout_s * self.limits.patience
            served = self._serve(call, f"{head}\n".encode(), text.encode(), limit_s, list(descriptors))
            task = asyncio.run_coroutine_threadsafe(served, self._loop)
        task.add_done_callback(call.settle)
        call.add_done_callback(lambda _: task.cancel() if call.cancelled() else None)
        return call

    def close(self) -> None:
        """End the processes; calls that are under way raise. A later call is refused."""
        with self._lock:
            self._closed = True
        if self._thread is not None and self._owner == os.getpid() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the thread ---

    def _live(self) -> None:
        self._loop.run_forever()
        if tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._end_zygote()
        self._loop.close()

    async def _serve(self, call: Call, head: bytes, text: bytes, limit_s: float, descriptors: list[int]) -> Any:
        async with self._places:
            answer = await self._ask(head, text, limit_s, descriptors)
        call.seconds = answer["seconds"]
        if answer["reason"]:
            raise SandboxError(answer["reason"], answer["text"])
        try:
            return json.loads(answer["text"], parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise SandboxError("output", f"no JSON: {error}") from error

    async def _ask(self, head: bytes, text: bytes, limit_s: float, descriptors: list[int]) -> dict[str, Any]:
        """What a zygote answers; another one is asked if it ends or hangs."""
        for _ in range(1 if descriptors else TRIES):
            if self._zygote is None:
                self._zygote = _Zygote(self.limits, self.cage, self.modules, self.scratch)
            zygote, said, why = self._zygote, b"", "the zygote ended"
            with zygote.connect(text, descriptors) as link:
                try:
                    said = await asyncio.wait_for(self._exchange(link, head), limit_s + SILENCE_S)
                except asyncio.TimeoutError:
                    why = "the zygote does not answer"
                except OSError as error:
                    why = f"the zygote ended: {error}"
            if said.endswith(b"\n"):
                return json.loads(said)
            if self._zygote is zygote:
                said_last = self._end_zygote()
                why = f"{why}: {said_last}" if said_last else why
                logger.warning("sandbox: %s; its calls begin again, if they have not before", why)
        raise SandboxError("refused", why)

    async def _exchange(self, link: socket.socket, head: bytes) -> bytes:
        await self._loop.sock_sendall(link, head)
        said = bytearray()
        while not said.endswith(b"\n") and (block := await self._loop.sock_recv(link, 1 << 16)):
            said += block
        return bytes(said)

    def _end_zygote(self) -> str:
        """What it had to say for itself."""
        zygote, self._zygote = self._zygote, None
        return zygote.end() if zygote else ""


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


class _Zygote:
    """A zygote that has been started."""

    def __init__(self, limits: Limits, cage: str, modules: Sequence[str], scratch: str) -> None:
        room = limits.workers * (limits.memory_mb << 20) + (4 << 30)
        self.cgroup = Cgroup(room, limits.workers + 64) if cage == "auto" else None
        wrapper = [*self.cgroup.command(), *bubblewrap()] if self.cgroup else []
        self.said = tempfile.TemporaryFile()
        self.channel, theirs = socket.socketpair()
        path = [os.path.abspath(entry) for entry in sys.path if os.path.exists(entry or ".")]
        settings = [theirs.fileno(), cage, dataclasses.asdict(limits), modules, scratch, path]
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

    def connect(self, text: bytes, descriptors: list[int]) -> socket.socket:
        """A socket for one call, whose other end the zygote gets, with a file of the arguments' text and descriptors.

        If the zygote has ended, that is what the socket says.
        """
        with open(os.memfd_create("verl_ext_arguments"), "w+b") as file:
            file.write(text)
            file.seek(0)
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            with theirs, contextlib.suppress(BrokenPipeError):
                socket.send_fds(self.channel, [b"."], [theirs.fileno(), file.fileno(), *descriptors])
        return ours

    def end(self) -> str:
        """End it and its workers; the last that it said."""
        self.channel.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.cgroup is not None:
            self.cgroup.close()
        with self.said:
            self.said.seek(0)
            return self.said.read().decode(errors="replace").strip()[-1000:]


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
        raise ValueError(f"verl_ext.sandbox.cage is {cage!r}; choose one of {', '.join(LEVELS)}")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise CageError(f"every cage needs the system call pidfd_open (Linux 5.3): {error.strerror}") from error
    seccomp, landlock = has_seccomp(), landlock_version()
    layers = ["rlimits", *(["seccomp"] if seccomp else []), *([f"Landlock {landlock}"] if landlock else [])]
    missing = [] if landlock else ["Landlock (Linux 5.13 or later, `landlock` in the kernel's lsm= list)"]
    missing += [] if seccomp else ["seccomp filters (x86_64 or aarch64)"]
    lacks = " and ".join(missing)
    if cage == "rlimits":
        than = f"; without {lacks} models' code has your rights" if lacks else ""
        logger.warning("sandbox: verl_ext.sandbox.cage=rlimits, nothing else is required%s", than)
    elif lacks:
        raise CageError(
            f"verl_ext.sandbox.cage={cage} needs {lacks}, which this machine has not. What models write would run "
            "with your rights. For models that you trust, in a container of its own: ++verl_ext.sandbox.cage=rlimits"
        )
    if cage == "auto":
        layers += ["bubblewrap"] if bubblewrap() else []
        layers += ["cgroup"] if has_cgroup() else []
    logger.info("sandbox: %s: %s", cage, ", ".join(layers))
    return tuple(layers)


@functools.cache
def _shared(settings: str, room: str) -> Sandbox:
    options = SandboxOptions(**json.loads(settings))
    return Sandbox(options, options.cage)


_making = threading.Lock()


def shared(room: Literal["programs", "verdicts"] = "programs") -> Sandbox:
    """A sandbox of this process, as the run's configuration has it: the same one for all who ask, from any thread.

    Args:
        room: what for. ``programs``: what models wrote, as answers that are judged by their output and as tools of
            agents. ``verdicts``: verifiers, which are told the reference and keep datasets with all answers; they let
            nothing of an answer run. So a program is forked from a process that has never had either.

    Raises:
        ValueError, CageError: as for `Sandbox`.
    """
    with _making:
        return _shared(os.environ.get(SETTINGS_VARIABLE) or "{}", room)
