# SPDX-License-Identifier: Apache-2.0
"""The one thread that touches the embedded engine: calls first, then requests, then one step, and again.

Control is answered whatever number of requests waits: a call runs between two steps, and the gates (closed while
generation is paused, asleep or receiving weights) are opened and closed without the thread. A request in front of a
closed gate is an entry in a queue; nothing waits for it. Any thread may use the methods, from any event loop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from verl_ext.cpu.engine.engine import GenerationEngine
from verl_ext.cpu.engine.request import Request

__all__ = ["EngineThread"]

T = TypeVar("T")

#: Requests admitted between two looks at the calls.
_ADMITTED_AT_ONCE = 32
_ENDED = "the embedded engine has been shut down"


def _future() -> Future[Any]:
    future: Future[Any] = Future()
    # a caller that stops waiting must not make it a cancelled one, which takes no result
    future.set_running_or_notify_cancel()
    return future


class EngineThread:
    """Steps an engine while it has work.

    Args:
        engine: touched by this thread alone from now on.
        admit: hands a request to the engine; an exception of it is the request's.
        num_threads: torch threads of the steps.
    """

    def __init__(self, engine: GenerationEngine, admit: Callable[[Request], Any], num_threads: int = 1) -> None:
        self._engine = engine
        self._admit = admit
        self._num_threads = num_threads
        self._changed = threading.Condition(threading.RLock())
        self._calls: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._idle_calls: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._arrived: deque[Request] = deque()
        self._parked: deque[Request] = deque()
        self._futures: dict[Request, Future[None]] = {}
        self._closed: set[str] = set()
        self._rejecting = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    # ---- from any thread -------------------------------------------------------------------------------------------
    def call(self, action: Callable[..., T], *args: Any, when_idle: bool = False) -> Future[T]:
        """Run an action on the thread before its next step; ``when_idle``, once no admitted request is unfinished."""
        future = _future()
        with self._changed:
            if self._ended:
                future.set_exception(RuntimeError(_ENDED))
                return future
            (self._idle_calls if when_idle else self._calls).append((future, action, args))
            self._changed.notify()
        return future

    def submit(self, request: Request) -> Future[None]:
        """Queue a request; the future is done when it has finished or failed."""
        future = _future()
        with self._changed:
            if self._ended:
                future.set_exception(RuntimeError(_ENDED))
                return future
            self._futures[request] = future
            if self._rejecting:
                self._reject(request)
            else:
                (self._parked if self._closed else self._arrived).append(request)
                self._changed.notify()
        return future

    def close(self, *reasons: str, rejecting: bool = False) -> None:
        """Admit no request until all reasons are gone. The reason ``updating`` stops the steps as well.

        Args:
            reasons: why.
            rejecting: for the reason ``paused``: end requests as aborted instead of holding them, those that are held
                already included.
        """
        with self._changed:
            self._closed.update(reasons)
            if "paused" in reasons:
                self._rejecting = rejecting
            while self._rejecting and self._parked:
                self._reject(self._parked.popleft())

    def open(self, *reasons: str) -> None:
        """Take reasons back."""
        with self._changed:
            self._closed.difference_update(reasons)
            self._rejecting = self._rejecting and "paused" in self._closed
            if not self._closed:
                self._arrived += self._parked
                self._parked.clear()
            self._changed.notify()

    def abort(self, requests: Iterable[str | Request] | None = None) -> Future[list[Request]]:
        """End requests with what they have; all that were admitted, or the named ones wherever they are."""
        return self.call(self._abort, None if requests is None else set(requests))

    def fail_all(self, error: Exception) -> Future[None]:
        """End all admitted requests with ``error``."""
        return self.call(lambda: self._resolve(self._engine.fail_all(error)))

    def state(self) -> dict[str, Any]:
        """Numbers of requests running, waiting for room, and held by a gate, and the reasons why it is closed."""
        with self._changed:
            waiting = self._engine.num_waiting + len(self._arrived)
            counts = {"running": self._engine.num_running, "waiting": waiting, "parked": len(self._parked)}
            return {**counts, "closed": sorted(self._closed)}

    def stop(self) -> None:
        """End all requests and the thread; calls that wait and those that come later raise RuntimeError."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()
        self._abort(set(self._futures))
        for future, *_ in (*self._calls, *self._idle_calls):
            future.set_exception(RuntimeError(_ENDED))
        self._calls.clear()
        self._idle_calls.clear()

    # ---- on the thread ---------------------------------------------------------------------------------------------
    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        while True:
            calls: list[Any] = []
            arrived: list[Request] = []
            with self._changed:
                self._changed.wait_for(self._due)
                if self._ended:
                    return
                calls += self._calls
                self._calls.clear()
                if self._idle_calls and self._idle():
                    calls.append(self._idle_calls.popleft())
                while not calls and not self._held() and self._arrived and len(arrived) < _ADMITTED_AT_ONCE:
                    arrived.append(self._arrived.popleft())
            for future, action, args in calls:
                try:
                    future.set_result(action(*args))
                except Exception as error:  # the caller's
                    future.set_exception(error)
            for request in arrived:
                try:
                    self._admit(request)
                except Exception as error:  # the caller's
                    self._futures.pop(request).set_exception(error)
            if not calls and not self._held() and self._engine.has_work():
                try:
                    finished = self._engine.step()
                except Exception as error:  # a defect of the engine itself: nobody may wait for ever
                    finished = self._engine.fail_all(error)
                self._resolve(finished)

    def _held(self) -> bool:
        return "updating" in self._closed

    def _idle(self) -> bool:
        return not self._arrived and not self._engine.has_work()

    def _due(self) -> bool:
        if self._ended or self._calls or (self._idle_calls and self._idle()):
            return True
        return not self._held() and not self._idle()

    def _abort(self, wanted: set[str | Request] | None) -> list[Request]:
        with self._changed:
            queues = (self._arrived,) if wanted is None else (self._arrived, self._parked)
            aborted = [r for q in queues for r in q if wanted is None or r in wanted or r.request_id in wanted]
            for request in aborted:
                (self._arrived if request in self._arrived else self._parked).remove(request)
                request.finish_reason = "abort"
        aborted = self._engine.abort(wanted) + aborted
        self._resolve(aborted)
        return aborted

    def _reject(self, request: Request) -> None:
        request.finish_reason = "abort"
        self._resolve([request])

    def _resolve(self, finished: Iterable[Request]) -> None:
        for request in finished:
            future = self._futures.pop(request, None)
            if future is not None:
                future.set_result(None)
