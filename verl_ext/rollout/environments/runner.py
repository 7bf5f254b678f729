# SPDX-License-Identifier: Apache-2.0
"""Running environments for an agent loop: outside its event loop, with time limits, and so that one can be killed.

Ordinary (blocking) environments run in processes, one an object, forked from a host process that has imported the
environment once (:mod:`verl_ext.rollout.environments.host`). A thread would not do: one that hangs cannot be ended,
and one in C code may stop all others. A process that does not answer in time is killed; its trajectory gets an
:class:`~verl_ext.rollout.environments.protocol.EnvironmentFault` and nobody else notices.

Environments whose methods are coroutines run in the event loop, each call under ``asyncio.wait_for``. That ends one
that waits forever, but not one that computes forever: such a class belongs in ordinary methods.

Everything here belongs to one process (a worker of verl that runs agent loops) and ends with it.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from verl_ext.rollout.environments import protocol
from verl_ext.rollout.environments.folders import locked_folder
from verl_ext.rollout.environments.host import CLOSING_SECONDS, pack
from verl_ext.rollout.environments.protocol import EnvironmentFault, EnvironmentUnavailable, Observation, Step
from verl_ext.rollout.environments.registry import is_async, load
from verl_ext.rollout.environments.sessions import LoopSession, Session

T = TypeVar("T")

#: Seconds for a host to import the environment, load what its processes share and fork the first of them.
START_SECONDS = 600.0
#: Orders that a host is given at a time; more would fill the connection to a host that is still loading.
ORDERS_AT_A_TIME = 16


class _Connection:
    """The agent loop's end of the connection to one environment process."""

    def __init__(self, host: Host, kwargs: Mapping[str, Any]) -> None:
        self.host, self.kwargs = host, dict(kwargs)
        self.pid = 0
        self.process: subprocess.Popen[bytes] | None = None  # the host's, which forked it
        self.loop = asyncio.get_running_loop()
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self.calls = 0

    async def open(self) -> None:
        """Have the host fork a process. Raises EnvironmentUnavailable: it cannot, or has ended, or does not answer, and
        is ended then."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.reader, self.writer = await asyncio.open_connection(sock=ours, limit=2 * protocol.MAX_BYTES)
        try:
            with theirs:
                self.host.order({"do": "fork", "kwargs": self.kwargs}, theirs)
            self.process = self.host.process
            answer = await asyncio.wait_for(self._read(), START_SECONDS)
            if "unavailable" in answer:
                self.writer.close()
                raise EnvironmentUnavailable(str(answer["unavailable"]))
            self.pid = int(answer["pid"])
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            self.writer.close()
            if isinstance(error, asyncio.TimeoutError) or self._orphaned():  # else the others are in a sound host
                self.host.end()
            raise EnvironmentUnavailable(
                f"environment {self.host.name!r}: its host process did not start one within {START_SECONDS} s, or "
                "ended (its own output, on the standard error of this process, may say why)"
            ) from error
        except asyncio.CancelledError:
            self.writer.close()  # a process without a connection ends
            raise

    def _orphaned(self) -> bool:
        """Whether the host that forked this process has ended, and with it all its processes."""
        return self.process is None or self.host.process is not self.process or self.process.poll() is not None

    async def _read(self) -> dict[str, Any]:
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        if size > 2 * protocol.MAX_BYTES:
            raise ValueError(f"it announces {size} bytes")
        answer = json.loads(await self.reader.readexactly(size))
        if not isinstance(answer, dict):
            raise ValueError(f"it sent a {type(answer).__name__}")
        return answer

    async def call(self, message: Mapping[str, Any] | None, what: str, limit: float) -> dict[str, Any]:
        """Send a message (None: only wait) and return the value of the answer within `limit` seconds."""
        try:
            if message is not None:
                self.calls += 1
                self.writer.write(pack({**message, "call": self.calls}))
            answer = await asyncio.wait_for(self._read(), limit)
            if message is not None and answer.get("call") != self.calls:
                raise ValueError("it is not the answer to this call")
        except asyncio.TimeoutError as error:
            self.kill()
            raise EnvironmentFault(protocol.TIMEOUT, f"{what} did not end within {limit} s; it was killed") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            await asyncio.sleep(0.1)  # a process may be seen to have ended before its host is
            orphaned = self._orphaned()  # asked before `kill`, which may start a new host
            self.kill()
            if orphaned:  # no action did that: the rollout is lost, and nobody's failure
                text = f"environment {self.host.name!r}: its host process ended during {what}"
                raise EnvironmentUnavailable(text) from error
            raise EnvironmentFault(protocol.DIED, f"its process ended during {what}") from error
        except (ValueError, RecursionError) as error:
            self.kill()
            raise EnvironmentFault(protocol.GARBAGE, f"its process answered {what} with no message: {error}") from error
        if "unavailable" in answer:
            raise EnvironmentUnavailable(str(answer["unavailable"]))
        if "fault" in answer:
            reason = answer["fault"] if answer["fault"] in protocol.FAULTS else protocol.GARBAGE
            raise EnvironmentFault(reason, f"{what}: {answer.get('detail')}")
        if "value" not in answer:
            self.kill()
            raise EnvironmentFault(protocol.GARBAGE, f"its process answered {what} without a value")
        return answer["value"]

    def kill(self) -> None:
        """End the process at once."""
        self.host.kill(self.pid)

    def close(self) -> None:
        """Let the process end by itself: it sees the connection close."""
        self.writer.close()

    async def ended(self) -> None:
        """Let the process end by itself and wait for that; one that takes too long is killed. Never raises."""
        try:
            if self.writer.can_write_eof():
                self.writer.write_eof()
            await asyncio.wait_for(self._drain(), CLOSING_SECONDS + 1)
        except (asyncio.TimeoutError, OSError):
            self.kill()
        finally:
            self.writer.close()

    async def _drain(self) -> None:
        while await self.reader.read(1 << 16):
            pass


class Host:
    """The parent's side of a host process; one a kind of environment (name or import path) in this process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self.folder = ""

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.folder, lock = locked_folder()
        package_parent = str(Path(__file__).resolve().parents[3])
        # Absolute: an environment imports from another working folder, too. What is no path belongs to an import hook.
        path = [os.path.abspath(entry) if not entry or os.path.exists(entry) else entry for entry in sys.path]
        path += [] if package_parent in sys.path else [package_parent]
        code = (
            f"import sys; sys.path[:] = {path!r}; "
            "from verl_ext.rollout.environments.host import main; "
            f"main({theirs.fileno()}, {self.name!r}, {self.folder!r})"
        )
        # One thread: a fork of a process with a pool of threads would lack them.
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what an environment prints is no output of the run
            pass_fds=[theirs.fileno(), lock],
            env={**os.environ, **threads},
        )
        os.close(lock)
        theirs.close()
        self.control = ours
        return ours

    def order(self, message: Mapping[str, Any], connection: socket.socket | None = None) -> None:
        """Send the host a message, with an end of a connection for a new child."""
        if self.process is not None and self.process.poll() is not None:
            self.end()
        control = self.control or self._start()
        data = pack(message)
        if connection is None:
            control.sendall(data)
            return
        sent = socket.send_fds(control, [data], [connection.fileno()])
        control.sendall(data[sent:])

    def kill(self, pid: int) -> None:
        """Have the host kill one of its children."""
        if pid and self.control is not None:
            try:
                self.order({"do": "kill", "pid": pid})
            except OSError:
                self.end()

    def end(self) -> None:
        """End the host and all its children."""
        for connection in [one for one in _idle if one.host is self]:
            del _idle[connection]
            if (places := _places.get(connection.loop)) is not None:
                places.alive -= 1
            if not connection.loop.is_closed():
                connection.close()
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            try:
                self.process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)  # a host that was killed has left it
        self.process = self.control = None


_hosts: dict[str, Host] = {}
#: Processes that wait for their next trajectory, of all environments and settings; the one that waits longest first.
_idle: OrderedDict[_Connection, None] = OrderedDict()


class _Places:
    """The bound on environment processes of one event loop: those in use, those that wait and those that end."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.free = asyncio.Semaphore(processes)
        self.orders = asyncio.Semaphore(ORDERS_AT_A_TIME)
        self.alive = 0
        self.ending: set[asyncio.Task[None]] = set()

    async def take(self, host: Host, kwargs: Mapping[str, Any], reuse: bool) -> _Connection:
        """A process of the host: an idle one with these arguments, else a place to fork a new one.

        The caller has a place of `free`, so fewer than `processes` others are in use or ending: where the bound is
        reached, one is idle.
        """
        here = asyncio.get_running_loop()
        for connection in [one for one in _idle if one.loop is not here or one.reader.at_eof()]:
            del _idle[connection]
            if connection.loop is here:
                self.alive -= 1
        if reuse:
            for connection in reversed(_idle):
                if connection.host is host and connection.kwargs == kwargs:
                    del _idle[connection]
                    return connection
        while self.alive >= self.processes and _idle:
            oldest, _ = _idle.popitem(last=False)
            try:
                await oldest.ended()
            finally:
                self.alive -= 1
        self.alive += 1
        return _Connection(host, kwargs)

    def give(self, connection: _Connection) -> None:
        """Keep a process for a later trajectory."""
        _idle[connection] = None
        self.free.release()

    def end(self, connection: _Connection) -> None:
        """Have a process end; its place is free once it has."""

        async def wait() -> None:
            try:
                await connection.ended()
            finally:
                self.alive -= 1
                self.free.release()

        task = asyncio.ensure_future(wait())
        self.ending.add(task)
        task.add_done_callback(self.ending.discard)


_places: weakref.WeakKeyDictionary[Any, _Places] = weakref.WeakKeyDictionary()


def end_all() -> None:
    """End all hosts of this process."""
    for host in list(_hosts.values()):
        host.end()
    _hosts.clear()


atexit.register(end_all)


class ProcessSession(Session):
    """An environment in a process of its own."""

    def __init__(
        self,
        host: Host,
        kwargs: Mapping[str, Any],
        reuse: bool,
        reset_timeout_s: float,
        step_timeout_s: float,
        processes: int,
    ) -> None:
        self.host, self.kwargs, self.reuse, self.processes = host, dict(kwargs), reuse, processes
        self.reset_timeout_s, self.step_timeout_s = reset_timeout_s, step_timeout_s
        self.connection: _Connection | None = None
        self.places: _Places | None = None
        self.healthy = False

    async def reset(self, seed: int, task: str = "") -> Observation:
        places = _places.setdefault(asyncio.get_running_loop(), _Places(self.processes))
        await places.free.acquire()  # the time until a process is free is not the environment's
        self.places = places
        self.connection = await places.take(self.host, self.kwargs, self.reuse)
        if not self.connection.pid:
            async with places.orders:
                await self.connection.open()
            await self.connection.call(None, "making it", self.reset_timeout_s)
        return await self._ask(Observation, {"do": "reset", "seed": int(seed), "task": task}, self.reset_timeout_s)

    async def step(self, action: str) -> Step:
        return await self._ask(Step, {"do": "step", "action": action}, self.step_timeout_s)

    async def _ask(self, kind: type[T], message: Mapping[str, Any], limit: float) -> T:
        assert self.connection is not None
        self.healthy = False  # until the answer is there; also if this trajectory is cancelled
        value = protocol.from_wire(await self.connection.call(message, message["do"], limit))
        if not isinstance(value, kind):
            detail = f"its process answered {message['do']} with a {type(value).__name__}"
            raise EnvironmentFault(protocol.GARBAGE, detail)
        self.healthy = True
        return value

    async def close(self) -> None:
        connection, self.connection = self.connection, None
        places, self.places = self.places, None
        if places is None:
            return
        if connection is None:  # cancelled while it took one
            places.free.release()
        elif not connection.pid:  # none was forked
            places.alive -= 1
            places.free.release()
        elif self.healthy and self.reuse:
            places.give(connection)
        else:
            if not self.healthy:
                connection.kill()
            places.end(connection)


def open_session(
    name: str,
    kwargs: Mapping[str, Any],
    *,
    reset_timeout_s: float,
    step_timeout_s: float,
    processes: int,
) -> Session:
    """A session with an environment. Nothing is started before its ``reset``.

    Args:
        name: name or import path.
        kwargs: arguments of the class; plain data.
        reset_timeout_s, step_timeout_s: seconds for making the object and again for ``reset``; for a ``step``.
        processes: environments that may be alive at the same time in this process, whatever their kind and arguments,
            idle ones included; further trajectories wait.

    Raises:
        EnvironmentUnavailable: the class cannot be imported, is no environment, or does not take these arguments.
    """
    kind = load(name)
    try:
        inspect.signature(kind).bind(**kwargs)
    except TypeError as error:
        raise EnvironmentUnavailable(
            f"environment {name!r} does not take the arguments {dict(kwargs)}: {error}. They come from "
            "verl_ext.environment.kwargs and the data's extra_info.environment_kwargs."
        ) from error
    if is_async(kind):
        return LoopSession(kind, kwargs, reset_timeout_s, step_timeout_s)
    host, reuse = _hosts.setdefault(name, Host(name)), bool(getattr(kind, "reuse", False))
    return ProcessSession(host, kwargs, reuse, reset_timeout_s, step_timeout_s, processes)
