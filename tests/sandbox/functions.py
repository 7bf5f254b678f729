# SPDX-License-Identifier: Apache-2.0
"""Functions that the tests call in the sandbox."""

from __future__ import annotations

import ctypes
import functools
import os
import time
from typing import Any

kept: list[int] = []


def add(*numbers: int) -> int:
    return sum(numbers)


def keep(number: int) -> list[int]:
    kept.append(number)
    return kept


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def sleep_below(zygote: int) -> bool:
    if os.getppid() == zygote:
        time.sleep(600)
    return True


def burn(seconds: float) -> float:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return seconds


def give(what: str) -> Any:
    return {
        "nan": float("nan"),
        "set": {1, 2},
        "object": object(),
        "long": "x" * (1 << 20),
        "text": "ä\u2028\ud800\0",
        "large": 10**400,
    }[what]


def nested() -> Any:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


def fail(text: str) -> None:
    raise LookupError(text)


def leave(how: str) -> None:
    if how == "exit":
        os._exit(0)
    if how == "code":
        os._exit(3)
    if how == "system_exit":
        raise SystemExit(0)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "abort":
        os.abort()
    if how == "recursion":
        leave(how)


def memory(mb: int) -> int:
    return len(bytearray(mb << 20))


def pids() -> list[int]:
    return [os.getpid(), os.getppid()]


@functools.cache
def number_of(name: str) -> int:
    kept.append(len(kept))
    return kept[-1]


def warmed(name: str) -> list[int]:
    return [number_of(name), len(kept)]
