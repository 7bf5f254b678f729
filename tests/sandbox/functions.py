# SPDX-License-Identifier: Apache-2.0
"""Functions that the tests call in the sandbox."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_ext.sandbox.cage import Cage

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


def sleep_with(text: str) -> None:
    time.sleep(600)


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


def signal_of_a_child() -> None:
    """What is left of this process when a child ends with a signal that has no name."""
    clone = 220 if os.uname().machine == "aarch64" else 56
    if ctypes.CDLL(None).syscall(clone, 35, 0, 0, 0, 0) == 0:
        os._exit(0)
    time.sleep(60)


def files() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


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


def take_away(*layers: str) -> None:
    """In a zygote: its machine has them not."""
    enter = Cage.enter

    def bare(self: Cage, *arguments: Any) -> None:
        if "Landlock" in layers:
            self._rules = None
        if "seccomp" in layers:
            self._program = b""
        enter(self, *arguments)

    Cage.enter = bare  # type: ignore[method-assign]


def take_a_descriptor() -> None:
    """In a zygote: for its next fork none is left."""
    given = os.pidfd_open

    def none(pid: int) -> int:
        os.pidfd_open = given
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    os.pidfd_open = none


@functools.cache
def ordinary_user() -> tuple[int, list[str]]:
    """A user without privileges, and the beginning of a command that runs as that one."""
    if user := os.getuid():
        return user, []
    user = 65534
    becomes = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    if subprocess.run([*becomes, "head", "-c1", sys.executable], capture_output=True).returncode == 0:
        return user, becomes
    # Python may be installed where only root can look (/root): in a mount namespace of its own it is elsewhere.
    home = Path(sys.base_prefix).parts[1]
    script = (
        "set -e; mkdir -p /tmp/.prefix; mount -t tmpfs none /tmp/.prefix; mkdir /tmp/.prefix/home; "
        f"mount --bind /{home} /tmp/.prefix/home; mount -t tmpfs -o mode=755 none /{home}; "
        f"for one in $(ls -A /tmp/.prefix/home); do [ -d /tmp/.prefix/home/$one ] || continue; "
        f"mkdir /{home}/$one; mount --bind /tmp/.prefix/home/$one /{home}/$one; done; "
        f'exec {" ".join(becomes)} --inh-caps=-all --bounding-set=-all "$@"'
    )
    return user, ["unshare", "--mount", "sh", "-c", script, "sh"]


def holds(pid: int, text: str) -> bool:
    """Whether a text is in the memory of a process."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            area, rights, *_ = line.split()
            begin, end = (int(one, 16) for one in area.split("-"))
            if rights.startswith("rw"):
                memory.seek(begin)
                if text.encode() in memory.read(end - begin):
                    return True
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def soon(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()
