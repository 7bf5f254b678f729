# SPDX-License-Identifier: Apache-2.0
"""A weight transfer with an eye on the receiver.

verl's sender waits for each answer without a limit: if the engine that should receive the weights has died or failed,
the run hangs for ever. Here the sender looks, while it waits, at the outcome of the call that started the receiver, and
gives up after a time without any answer.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import zmq

Outcome: TypeAlias = concurrent.futures.Future[Any]

TIMEOUT = "VERL_EXT_WEIGHT_SYNC_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 300.0


class WeightSyncError(RuntimeError):
    """The rollout engine did not take the weights. The message says why and what to look at."""


def timeout_s() -> float:
    """Seconds without an answer after which a weight sync fails: ``VERL_EXT_WEIGHT_SYNC_TIMEOUT_S``, 300 if not set.
    Raises ValueError: the variable is not a positive number."""
    given = os.environ.get(TIMEOUT)
    if not given:
        return DEFAULT_TIMEOUT_S
    try:
        value = float(given)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{TIMEOUT}={given!r} must be a positive number of seconds")
    return value


class Receiver:
    """What can be learned, without an event loop, of the engine that receives the weights.

    Args:
        call: outcome of the call that runs the receiver; None if another rank started it.
        ask: starts the question whether the engine is dead, and returns its outcome, a bool. The call alone does not
            tell: vLLM leaves it unanswered when its engine process dies.
        every_s: seconds between two questions.
    """

    def __init__(self, call: Outcome | None, ask: Callable[[], Outcome] | None = None, every_s: float = 2.0) -> None:
        self._call = call
        self._ask = ask
        self._every_s = every_s
        self._asked: Outcome | None = None
        self._next = time.monotonic() + every_s

    def failure(self) -> WeightSyncError | None:
        """Why no answer will come, or None while there is hope."""
        if self._call is not None and self._call.done():
            error = self._call.exception()
            return _error("ended early" if error is None else f"failed ({_name(error)})", error)
        if self._ask is None:
            return None
        if self._asked is None:
            if time.monotonic() >= self._next:
                self._asked = self._ask()
            return None
        if self._asked.done():
            asked, self._asked = self._asked, None
            self._next = time.monotonic() + self._every_s
            error = asked.exception()
            if error is not None:
                return _error(f"failed ({_name(error)})", error)
            if asked.result():
                return _error("died")
        return None


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _error(what: str, cause: BaseException | None = None) -> WeightSyncError:
    error = WeightSyncError(
        f"the rollout engine {what} while it was receiving weights; its own messages in the log say more."
    )
    error.__cause__ = cause
    return error


class WatchedSocket:
    """A request socket that waits for its peer no longer than there is hope.

    Args:
        socket: zmq REQ socket.
        receiver: the peer.
        limit_s: seconds to wait for one answer.
        poll_s: seconds between two looks at `receiver`.
    """

    def __init__(self, socket: Any, receiver: Receiver, limit_s: float, poll_s: float = 0.5) -> None:
        self._socket = socket
        self._receiver = receiver
        self._limit_s = limit_s
        self._poll_ms = int(poll_s * 1000)

    def bind(self, address: str) -> None:
        self._socket.bind(address)

    def send_pyobj(self, message: Any) -> None:
        self._when_ready(zmq.POLLOUT, lambda: self._socket.send_pyobj(message, flags=zmq.NOBLOCK))

    def recv(self) -> bytes:
        return self._when_ready(zmq.POLLIN, lambda: self._socket.recv(flags=zmq.NOBLOCK))

    def close(self) -> None:
        self._socket.close(linger=0)  # an undelivered message would keep the process from ending

    def _when_ready(self, event: int, act: Callable[[], Any]) -> Any:
        """What `act` returns, when the socket is ready for `event`. Raises WeightSyncError: the receiver has failed or
        ended, or nothing came within the limit."""
        until = time.monotonic() + self._limit_s
        while True:
            if self._socket.poll(self._poll_ms, event):
                with contextlib.suppress(zmq.Again):  # the peer has gone since
                    return act()
            failure = self._receiver.failure()
            if failure is not None:
                with contextlib.suppress(zmq.Again):  # the last answer and the end of the call may come together
                    return act()
                raise failure
            if time.monotonic() > until:
                raise WeightSyncError(
                    f"the rollout engine has not answered for {self._limit_s:g} s while it was receiving weights. "
                    f"{TIMEOUT} sets another limit."
                )
