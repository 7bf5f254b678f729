# SPDX-License-Identifier: Apache-2.0
"""What a program finds in its process: the names that verl's judge provides, standard streams, and threads that need
none. It cannot be undone: for a process that ends with its call."""

from __future__ import annotations

import _thread
import asyncio
import builtins
import concurrent.futures.thread
import importlib
import io
import itertools
import multiprocessing.pool
import os
import selectors
import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any

_KNOWN = (
    *(
        "string",
        "re",
        "datetime",
        "collections",
        "heapq",
        "bisect",
        "copy",
        "math",
        "random",
        "statistics",
        "itertools",
    ),
    *("functools", "operator", "io", "sys", "json", "typing"),
)
"""Modules that a program has without importing them, and all that they export, as under verl's judge (0.9.1,
utils/reward_score/prime_code/testing_util.py): answers name `List`, `defaultdict` and `math` as problem statements do.
Of two of a name the later counts; a module comes before what others export, Python's own functions before all."""
DEPTH = 600_000
"""Calls within calls, as there."""


def _start(self: threading.Thread) -> None:
    """``Thread.start`` that returns when the thread has ended: the cage has one. Answers use them for a deep stack."""
    try:
        self.run()
    except SystemExit:
        pass
    except Exception as error:  # ends the thread alone
        threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, self)))


def _submit(self: Any, function: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
    """``ThreadPoolExecutor.submit`` that returns when the call has ended."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    try:
        future.set_result(function(*given, **named))
    except Exception as error:
        future.set_exception(error)
    return future


class _Pool:
    """``multiprocessing.pool.ThreadPool``, which ``multiprocessing.dummy.Pool`` is, without its threads."""

    def __init__(self, processes: Any = None, initializer: Any = None, initargs: Iterable[Any] = ()) -> None:
        if initializer:
            initializer(*initargs)

    def apply_async(self, function: Any, args: Any = (), kwds: Any = None, callback: Any = None, *_: Any) -> Any:
        future = _submit(self, function, *args, **(kwds or {}))
        failed = future.exception() is not None
        if callback and not failed:
            callback(future.result())
        return types.SimpleNamespace(
            get=lambda *_, **__: future.result(),
            wait=lambda *_: None,
            ready=lambda: True,
            successful=lambda: not failed,
        )

    def apply(self, function: Any, args: Any = (), kwds: Any = None) -> Any:
        return function(*args, **(kwds or {}))

    def map(self, function: Any, given: Iterable[Any], *_: Any, **__: Any) -> list[Any]:
        return list(map(function, given))

    def starmap(self, function: Any, given: Iterable[Any], *_: Any, **__: Any) -> list[Any]:
        return list(itertools.starmap(function, given))

    def imap(self, function: Any, given: Iterable[Any], *_: Any, **__: Any) -> Any:
        return iter(self.map(function, given))

    def map_async(self, function: Any, given: Iterable[Any], _: Any = None, callback: Any = None, *__: Any) -> Any:
        return self.apply_async(self.map, (function, given), None, callback)

    def starmap_async(self, function: Any, given: Iterable[Any], _: Any = None, callback: Any = None, *__: Any) -> Any:
        return self.apply_async(self.starmap, (function, given), None, callback)

    def close(self, *_: Any) -> None:
        pass

    imap_unordered = imap
    join = terminate = __exit__ = close

    def __enter__(self) -> _Pool:
        return self


class _Stream(io.TextIOWrapper):
    """A standard stream with the number and the mode that it would have."""

    def __init__(self, data: io.BytesIO, number: int, **named: Any) -> None:
        super().__init__(data, encoding="utf-8", **named)
        vars(self).update(number=number, mode="rw"[number])

    def fileno(self) -> int:
        return int(vars(self)["number"])


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that needs no socket, because no other thread wakes it."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())

    def _nothing(self) -> None:
        pass

    _make_self_pipe = _close_self_pipe = _write_to_self = _nothing


class _Loops(asyncio.DefaultEventLoopPolicy):
    _loop_factory = _Loop


def furnish() -> None:
    """Give this process what programs have under verl's judge: names, depth, threads. It ends with its call."""
    names: dict[str, Any] = {}
    for module in map(importlib.import_module, _KNOWN):
        exported = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        names.update((name, getattr(module, name)) for name in exported)
    names.update((name, sys.modules[name]) for name in _KNOWN if name != "typing")
    vars(builtins).update({**names, **vars(builtins)})
    sys.setrecursionlimit(DEPTH)
    instead = {"start": _start, "join": lambda *_, **__: None, "is_alive": lambda _: False}
    for owner, methods in ((threading.Thread, instead), (concurrent.futures.ThreadPoolExecutor, {"submit": _submit})):
        for name, method in methods.items():
            setattr(owner, name, method)
    vars(multiprocessing.pool)["ThreadPool"] = _Pool
    vars(_thread)["start_new_thread"] = lambda function, given=(), named=None: function(*given, **(named or {})) or 0
    asyncio.set_event_loop_policy(_Loops())


def connect(typed: str) -> io.BytesIO:
    """Give this process a standard input, and a standard output that is returned, also for ``open`` and the functions
    of ``os`` that fast programs use: the process's own are the null device."""
    given, printed = io.BytesIO(typed.encode()), io.BytesIO()
    stdin: Any = _Stream(given, 0)
    sys.stdin, sys.stdout = stdin, _Stream(printed, 1, write_through=True)
    plain, read, write, fstat = open, os.read, os.write, os.fstat

    def opened(file: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
        if file in (0, "/dev/stdin"):
            return stdin.buffer if "b" in mode else stdin
        return plain(file, mode, *more, **named)

    instead: dict[str, Any] = {
        "read": lambda file, length: given.read(length) if file == 0 else read(file, length),
        "write": lambda file, data: printed.write(data) if file == 1 else write(file, data),
        "fstat": lambda file: types.SimpleNamespace(st_size=len(given.getbuffer())) if file == 0 else fstat(file),
        "fdopen": opened,
    }
    for name, function in instead.items():
        setattr(os, name, function)
    vars(builtins)["open"] = opened
    return printed
