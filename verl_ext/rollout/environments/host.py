# SPDX-License-Identifier: Apache-2.0
"""The process from which environments' processes are forked, and what runs in each of these.

One host a kind of environment is started by :mod:`verl_ext.rollout.environments.runner`. It imports the environment
once, then forks a child for each object that is asked for: a fork takes milliseconds and shares the host's memory.
A child serves one connection, call by call, in a session of its own: whatever it starts is killed with it. The host has
one thread only and does nothing else, so that it can always be asked to kill a child that hangs, and to drain what the
children print. When its control connection ends (the process that started it is gone), it kills its children and ends.

An object is made in the run's folder. Each of its episodes begins in an empty working folder, which the host removes
once the child has ended, however it did: what an action has written (text games can save and restore) is there
for no other.

This module needs the standard library only, beside the environment itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from verl_ext.rollout.environments.panel import check_task
from verl_ext.rollout.environments.protocol import (
    ERROR,
    EnvironmentFault,
    EnvironmentUnavailable,
    reset_result,
    step_result,
    to_wire,
)

_LENGTH = struct.Struct("!I")
#: Seconds that an environment may take to close.
CLOSING_SECONDS = 2.0
#: Bytes of what an environment prints that are passed on; the rest is read and dropped.
PRINTED_BYTES = 64 << 10


def pack(message: Mapping[str, Any]) -> bytes:
    """A message as bytes: the length, then JSON."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def _receive(connection: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _read(connection: socket.socket) -> Any:
    """The next message, or None when the other side is gone."""
    header = _receive(connection, _LENGTH.size)
    body = None if header is None else _receive(connection, _LENGTH.unpack(header)[0])
    return None if body is None else json.loads(body)


def explain(error: BaseException) -> str:
    """One line about an exception, with the place where it was raised."""
    where = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(where[-1].filename)}:{where[-1].lineno})" if where else ""
    return f"{type(error).__name__}: {error}{place}"


def _answer(environment: Any, call: Mapping[str, Any], folder: str) -> dict[str, Any]:
    if call["do"] == "reset":
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
        seen = reset_result(environment.reset(call["seed"]))
        check_task(environment, call["seed"], seen, call.get("task", ""))
        return to_wire(seen)
    return to_wire(step_result(environment.step(call["action"])))


def _failure(error: BaseException, when: str = "") -> dict[str, Any]:
    """What the trajectory is told of an exception."""
    if isinstance(error, EnvironmentUnavailable):
        return {"unavailable": str(error)}
    if isinstance(error, EnvironmentFault):
        return {"fault": error.reason, "detail": error.detail}
    return {"fault": ERROR, "detail": when + explain(error)}


def _serve(
    connection: socket.socket, kind: type | EnvironmentUnavailable, kwargs: Mapping[str, Any], folder: str
) -> None:
    """The life of a child: make the environment, answer until the other side closes the connection."""
    connection.sendall(pack({"pid": os.getpid()}))
    try:
        if isinstance(kind, EnvironmentUnavailable):
            raise kind
        environment = kind(**kwargs)
    except BaseException as error:  # SystemExit too: the trajectory is told why
        connection.sendall(pack(_failure(error, "it cannot be made: ")))
        return
    connection.sendall(pack({"value": {"pid": os.getpid()}}))
    while True:
        call = _read(connection)
        if call is None:
            # An environment that hangs while it closes is ended by the alarm.
            signal.setitimer(signal.ITIMER_REAL, CLOSING_SECONDS)
            close = getattr(environment, "close", None)
            if close is not None:
                close()
            return
        try:
            answer = {"value": _answer(environment, call, folder)}
        except BaseException as error:
            answer = _failure(error)
        connection.sendall(pack({**answer, "call": call["call"]}))


def _kill(pid: int) -> None:
    """Kill a child that has not been waited for, and its session."""
    for kill in (os.killpg, os.kill):  # the group is there once the child has made it
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _end_with_host() -> None:
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


class Host:
    """The host's loop; see the module's text.

    `control` is the connection to the process that started this one, `folder` holds the children's working folders and
    is removed in the end.
    """

    def __init__(self, control: socket.socket, name: str, folder: str) -> None:
        self.control, self.name, self.folder = control, name, folder
        self.children: set[int] = set()
        # Not select(), which fails from descriptor 1024 on: numbers are inherited from the process that started this.
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        self.printed: dict[int, int] = {}
        self.kind: type | EnvironmentUnavailable
        self.preloaded: dict[str, EnvironmentUnavailable | None] = {}
        from verl_ext.rollout.environments.registry import load

        try:
            self.kind = load(name)
        except EnvironmentUnavailable as error:
            self.kind = error
        except Exception as error:
            self.kind = EnvironmentUnavailable(f"environment {name!r} cannot be imported: {explain(error)}")

    def run(self) -> None:
        """Serve until the control connection ends."""
        while True:
            ready = {key.fd for key, _ in self.selector.select(1.0)}
            self._reap()
            for output in ready - {self.control.fileno()}:
                self._drain(output)
            if self.control.fileno() in ready and not self._listen():
                break
        for pid in self.children:
            _kill(pid)
        for pid in self.children:
            os.waitpid(pid, 0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _folder_of(self, pid: int) -> str:
        return os.path.join(self.folder, str(pid))

    def _listen(self) -> bool:
        """Take one order; whether there was one."""
        header, passed, _, _ = socket.recv_fds(self.control, _LENGTH.size, 1)
        if not header:
            return False
        rest = _receive(self.control, _LENGTH.size - len(header)) if len(header) < _LENGTH.size else b""
        body = None if rest is None else _receive(self.control, _LENGTH.unpack(header + rest)[0])
        if body is None:
            return False
        self._obey(json.loads(body), passed)
        return True

    def _drain(self, output: int) -> None:
        """Read what a child has printed; pass on the first of it."""
        data = os.read(output, 1 << 16)
        if not data:
            self.selector.unregister(output)
            os.close(output)
            del self.printed[output]
            return
        left = PRINTED_BYTES - self.printed[output]
        self.printed[output] += len(data)
        if left > 0:
            os.write(2, data[:left])
            if len(data) >= left:
                os.write(2, f"\nenvironment {self.name}: what else this one prints is left out\n".encode())

    def _reap(self) -> None:
        for pid in list(self.children):
            if hasattr(os, "waitid"):
                # The number stays the child's until it is waited for; what it has left behind is killed before that.
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                    continue
                _kill(pid)
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.children.discard(pid)
                shutil.rmtree(self._folder_of(pid), ignore_errors=True)

    def _obey(self, order: Mapping[str, Any], passed: list[int]) -> None:
        if order["do"] == "kill":
            # Only a child that has not been waited for: its number cannot have gone to another process.
            if order["pid"] in self.children:
                _kill(order["pid"])
            return
        kind = self._preload(order["kwargs"])
        if not passed:  # out of descriptors, the kernel has dropped it, and the other side sees its end
            return
        connection = socket.socket(fileno=passed[0])
        ends: tuple[int, ...] = ()
        try:
            output, printing = ends = os.pipe()
            pid = os.fork()
        except OSError as error:  # of this one's process: the others live on
            for end in ends:
                os.close(end)
            with connection, contextlib.suppress(OSError):
                text = f"environment {self.name!r} has no process: {explain(error)}"
                connection.sendall(pack({"unavailable": text}))
            return
        if pid:
            self.children.add(pid)
            connection.close()
            os.close(printing)
            self.printed[output] = 0
            self.selector.register(output, selectors.EVENT_READ)
            return
        code = 1
        try:
            os.setsid()
            os.dup2(printing, 1)
            os.dup2(printing, 2)
            self.selector.close()
            for descriptor in (printing, output, *self.printed):
                os.close(descriptor)
            self.control.close()
            _end_with_host()
            _serve(connection, kind, order["kwargs"], self._folder_of(os.getpid()))
            code = 0
        except (ConnectionError, KeyboardInterrupt):
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _preload(self, kwargs: Mapping[str, Any]) -> type | EnvironmentUnavailable:
        """Load what the children will share, once for each set of arguments."""
        preload = getattr(self.kind, "preload", None)
        if isinstance(self.kind, EnvironmentUnavailable) or preload is None:
            return self.kind
        key = json.dumps(kwargs, sort_keys=True)
        if key not in self.preloaded:
            try:
                preload(**kwargs)
                self.preloaded[key] = None
            except EnvironmentUnavailable as error:
                self.preloaded[key] = error
            except Exception as error:
                text = f"environment {self.name!r} cannot be loaded: {explain(error)}"
                self.preloaded[key] = EnvironmentUnavailable(text)
        return self.preloaded[key] or self.kind


def main(control_fd: int, name: str, folder: str) -> None:
    """Run a host on an inherited control connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then closes the connection
    Host(socket.socket(fileno=control_fd), name, folder).run()
