# SPDX-License-Identifier: Apache-2.0
"""Where a player spends its time, seen from outside: its instruction pointer at random times, by ptrace.

A candidate cannot lie about where its instructions are. `doctor` says whether this machine lets a process trace its
descendants; where it does not, there is no coverage, and no reward that needs it.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from verl_ext.kernels.compiler import Library
from verl_ext.kernels.seat import Infrastructure, Seat

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long
_CONT, _DETACH, _SEIZE, _INTERRUPT = 7, 17, 0x4206, 0x4207
_WALL = 0x40000000
#: Numbers of the call `read`, on x86_64 and aarch64.
_READ = (0, 63)
MANY = 40
#: Names of the rows that are no kernel's.
TORCH, VECTOR, OTHER = "torch", "vector mathematics", "other"


def _ptrace(request: int, pid: int, address: int = 0, data: int | None = None) -> None:
    if _libc.ptrace(request, pid, address, data) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace: {os.strerror(ctypes.get_errno())}")


def _maps(pid: int) -> list[tuple[int, int, int, str]]:
    """Executable parts of a process's memory: begin, end, offset in the file, the file."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights, offset, _, _, *name = line.split(maxsplit=5)
        if "x" in rights:
            begin, end = (int(value, 16) for value in span.split("-"))
            found.append((begin, end, int(offset, 16), name[0] if name else ""))
    return found


def profile(
    seat: Seat,
    looks: int,
    period_s: float,
    begin: Callable[[], None],
    end: Callable[[], None],
    library: Library | None,
    name: str,
) -> dict[str, float]:
    """Share of the looks by where they found the player, while it plays batches.

    Args:
        seat: the player.
        looks: so many; a fifth of them after `MANY` batches, on a machine too busy to look often.
        period_s: mean seconds between two.
        begin, end: of a batch like any other; called as often as it takes.
        library: the kernels.
        name: of the library's memory.

    Returns:
        Shares that sum to 1: the kernels by name, `TORCH`, `VECTOR` (libmvec, which only kernels use), `OTHER`.

    Raises:
        CandidateError: the player ended.
        Infrastructure: it cannot be traced here.
    """
    maps, found, rng = _maps(seat.pid), Counter[str](), random.Random()
    functions = library.functions if library else ()
    try:
        _ptrace(_SEIZE, seat.pid)
    except OSError as error:
        raise Infrastructure(f"{error}; `verl-ext kernels doctor` has the remedy") from error
    try:
        for batches in itertools.count():
            if found.total() >= looks or (batches >= MANY and found.total() >= looks / 5):
                break
            begin()
            while not seat.waits(period_s * rng.uniform(0.5, 1.5)):
                pointer = _pointer(seat.pid)
                if pointer is None:
                    break
                if pointer:  # else it was not given a processor yet
                    found[_place(pointer, maps, functions, name)] += 1
            end()
    finally:
        try:
            _stop(seat.pid)
            _ptrace(_DETACH, seat.pid)
        except OSError:  # it has ended
            pass
    return {place: count / found.total() for place, count in found.most_common()}


def _stop(pid: int) -> bool:
    """Stop it; whether it lives."""
    _ptrace(_INTERRUPT, pid)
    return os.WIFSTOPPED(os.waitpid(pid, _WALL)[1])


def _pointer(pid: int) -> int | None:
    """Its instruction pointer; 0 while it waits for a byte, None if it has ended."""
    try:
        if not _stop(pid):
            return None
        call, *_, pointer = Path(f"/proc/{pid}/syscall").read_text().split()
        _ptrace(_CONT, pid)
    except (OSError, ChildProcessError):
        return None
    return 0 if int(call) in _READ else int(pointer, 16)


def _place(
    pointer: int, maps: list[tuple[int, int, int, str]], functions: tuple[tuple[int, str], ...], name: str
) -> str:
    for begin, end, offset, file in maps:
        if begin <= pointer < end:
            if f"/memfd:{name} " in file:
                where = bisect.bisect_right(functions, (pointer - begin + offset, "\x7f")) - 1
                function = functions[where][1] if where >= 0 else "_"
                return VECTOR if function[0] == "_" else function  # stubs through which a kernel calls mathematics
            if "libmvec" in file:
                return VECTOR
            return TORCH if "libtorch" in file else OTHER
    return OTHER


def works() -> str:
    """Whether a descendant can be traced here: empty, or what keeps one from it and the way out."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        _ptrace(_SEIZE, pid)
        return ""
    except OSError as error:
        return f"{error}: allow tracing (docker run --cap-add SYS_PTRACE; /proc/sys/kernel/yama/ptrace_scope at most 1)"
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
