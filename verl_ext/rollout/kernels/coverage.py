# SPDX-License-Identifier: Apache-2.0
"""Where a player spends its time, seen from outside: its instruction pointer, many times a batch.

A candidate cannot lie about where its instructions are. The kernel's clock of the player looks (perf_event_open), with
another period in each batch; where a process may not ask for that, ptrace does, at random times, which takes several
times as long. `doctor` says which; where neither is allowed there is no coverage, and no reward that needs it.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import platform
import random
import signal
import struct
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

from verl_ext.rollout.kernels.compiler import Library
from verl_ext.rollout.kernels.seat import Infrastructure, Seat

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long
_CONT, _DETACH, _SEIZE, _INTERRUPT = 7, 17, 0x4206, 0x4207
_WALL = 0x40000000
#: Numbers of the call `read`, on x86_64 and aarch64.
_READ = (0, 63)
MANY, FEW = 40, 4
#: Looks a batch: by ptrace each stops the player, by the kernel's clock it does not.
TRACED, SAMPLED = 8, 64
#: Numbers of the call `perf_event_open`; the shortest period in ns, its ring's pages, and where it says how full it is.
_PERF = {"x86_64": 298, "aarch64": 241}
_SHORTEST, _PAGES, _HEAD = 50_000, 8, 1024
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
    batch_s: float,
    begin: Callable[[], None],
    end: Callable[[], None],
    library: Library | None,
    name: str,
) -> dict[str, float]:
    """Share of the looks by where they found the player, while it plays batches.

    Args:
        seat: the player.
        looks: so many at least, in `FEW` batches or more; a fifth of them after `MANY`, on a machine too busy to look.
        batch_s: seconds of a batch.
        begin, end: of a batch like any other; called as often as it takes.
        library: the kernels.
        name: of the library's memory.

    Returns:
        Shares that sum to 1: the kernels by name, `TORCH`, `VECTOR` (libmvec, which only kernels use), `OTHER`.

    Raises:
        CandidateError: the player ended.
        Infrastructure: it cannot be looked at here.
    """
    maps, found = _maps(seat.pid), Counter[str]()
    functions = library.functions if library else ()
    look = sampled if may_sample(seat.pid) else traced
    with contextlib.closing(look(seat, batch_s, begin, end)) as batches:
        for number, pointers in enumerate(batches, 1):
            found.update(_place(pointer, maps, functions, name) for pointer in pointers)
            if found.total() >= (looks if number < MANY else looks / 5) and number >= FEW:
                break
    return {place: count / found.total() for place, count in found.most_common()}


class _Clock:
    """The instruction pointers of a process whenever it has run so many seconds, outside of the kernel."""

    def __init__(self, pid: int, period_s: float) -> None:
        period, pointer, no_kernel = max(int(period_s * 1e9), _SHORTEST), 1, 1 << 5 | 1 << 6
        wanted = struct.pack("IIQQQQQIIQ", 1, 64, 0, period, pointer, 0, no_kernel, 0, 0, 0)
        self._descriptor = _libc.syscall(_PERF.get(platform.machine(), -1), wanted, pid, -1, -1, 8)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), f"perf_event_open: {os.strerror(ctypes.get_errno())}")
        try:
            self._ring = mmap.mmap(self._descriptor, mmap.PAGESIZE * (1 + _PAGES))
        except BaseException:
            os.close(self._descriptor)
            raise

    def pointers(self) -> list[int]:
        """Those so far, as many as the ring holds."""
        (head,) = struct.unpack_from("Q", self._ring, _HEAD)
        found: list[int] = []
        at = mmap.PAGESIZE
        while at < mmap.PAGESIZE + head:
            kind, _, size = struct.unpack_from("IHH", self._ring, at)
            if kind == 9:  # a sample; others say that some were lost
                found += struct.unpack_from("Q", self._ring, at + 8)
            at += size
        return found

    def close(self) -> None:
        self._ring.close()
        os.close(self._descriptor)


def may_sample(pid: int) -> bool:
    """Whether the kernel's clock of that process may be asked for."""
    try:
        _Clock(pid, 1.0).close()
    except OSError:
        return False
    return True


def sampled(
    seat: Seat, batch_s: float, begin: Callable[[], None], end: Callable[[], None]
) -> Generator[list[int], None, None]:
    """Instruction pointers of a batch, by the kernel's clock; as often as one asks."""
    rng = random.Random()
    while True:
        with contextlib.closing(_Clock(seat.pid, batch_s / SAMPLED * rng.uniform(0.5, 1.5))) as clock:
            begin()
            end()
            found = clock.pointers()
        yield found


def traced(
    seat: Seat, batch_s: float, begin: Callable[[], None], end: Callable[[], None]
) -> Generator[list[int], None, None]:
    """The same by ptrace, at random times."""
    rng = random.Random()
    try:
        _ptrace(_SEIZE, seat.pid)
    except OSError as error:
        raise Infrastructure(f"{error}; `verl-ext kernels doctor` has the remedy") from error
    try:
        while True:
            begin()
            found = []
            while not seat.waits(batch_s / TRACED * rng.uniform(0.5, 1.5)):
                pointer = _pointer(seat.pid)
                if pointer is None:
                    break
                if pointer:  # else it was not given a processor yet
                    found.append(pointer)
            end()
            yield found
    finally:
        try:
            _stop(seat.pid)
            _ptrace(_DETACH, seat.pid)
        except OSError:  # it has ended
            pass


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
    """Whether a descendant can be looked at here: empty, or what keeps one from it and the way out."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        if not may_sample(pid):
            _ptrace(_SEIZE, pid)
        return ""
    except OSError as error:
        return f"{error}: allow tracing (docker run --cap-add SYS_PTRACE; /proc/sys/kernel/yama/ptrace_scope at most 1)"
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
