# SPDX-License-Identifier: Apache-2.0
"""A whole program in the cage: one that runs what a model writes, such as an agent with a terminal.

It may start programs of the system and of its own environment, has one folder to write in, and reaches one TCP port.
Everything else is closed to it and to all that it starts: other files and ports, Unix sockets, UDP, signals to others
and their limits, command lines of others, sessions and process groups of its own (so that killing its group leaves
nothing behind), namespaces, capabilities, rights and times of files. A guard outside, the head of the group, ends it
with its owner, and when the disk is nearly full. Where a cgroup can be made it bounds memory and processes of all
together; else memory is bounded for each process, and the processes of an ordinary user.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.sandbox import cage
from verl_ext.sandbox.cage import CageError
from verl_ext.sandbox.shell import Cgroup

PORTS = 4
"""The version of Landlock that has rules for ports."""
PROCESSES = 256
"""Processes and threads of one program."""
WRITTEN_MB = 1024
"""Largest file."""
SPARE_MB = 1024
"""What must be free on the disk of its folder."""
LOOK_S = 0.2
"""Seconds between looks at the disk and the owner."""
_ETC = "ssl ca-certificates passwd group hosts nsswitch.conf localtime mime.types alternatives"
# Of others it sees nothing here, unlike in /proc as a whole: command lines may hold a key.
_PROC = "cpuinfo meminfo stat uptime loadavg version filesystems sys"
# Of the program itself not all: what it starts sees it under its number, and its environment and memory may hold a key.
_SELF = "status stat cgroup cmdline maps"
_REMOVE = '(chmod -R u+rwx "$1"; rm -rf "$1") 2>/dev/null &'  # it may be large, deep, or closed to ourselves
_BOOT = (
    "import json, sys; root, *given = json.loads(sys.argv[1]); sys.path.append(root); "
    "from verl_ext.sandbox import program; program.main(*given, sys.argv[2:])"
)


def check() -> None:
    """Raises CageError: this machine has no cage for programs; the message says what is missing."""
    if cage.landlock_version() < PORTS or not cage.has_seccomp():
        raise CageError(
            f"a program in the cage needs seccomp and rules for ports (Linux 6.7, Landlock {PORTS}); this is "
            f"Linux {platform.release()}, Landlock {cage.landlock_version()}"
        )


@dataclass(frozen=True)
class ProgramCage:
    """The cage of one program.

    Attributes:
        port: TCP port that it may connect to. Landlock knows ports and no hosts: it is open on every host.
        readable: files and folders that it may read, and run, beside the system's, its own environment (if its
            interpreter is in one) and those that its command names.
        memory_mb: MiB of all its processes together in a cgroup, else of the data of each.
    """

    port: int
    readable: tuple[str, ...] = ()
    memory_mb: int = 4096

    @contextlib.contextmanager
    def command(self, words: Sequence[str]) -> Iterator[tuple[list[str], dict[str, str]]]:
        """A command line that runs this one in the cage, and its environment; its folder goes with the context.

        Files that are named relative to this folder are found from there, too. What fails before the program runs
        ends with code 126 and says why.
        """
        scratch = tempfile.mkdtemp(prefix="verl_ext_program_")
        cgroup = Cgroup(self.memory_mb << 20, PROCESSES)
        program = shutil.which(words[0]) or words[0]
        line = [program, *(os.path.abspath(word) if os.path.exists(word) else word for word in words[1:])]
        named = [word for word in line if os.path.isabs(word) and os.path.exists(word)]
        settings = {
            "port": self.port,
            "scratch": scratch,
            "readable": [*named, *environment_of(program), *map(os.path.abspath, self.readable)],
            "memory_mb": self.memory_mb,
        }
        root = str(Path(__file__).resolve().parents[2])
        boot = [sys.executable, "-I", "-S", "-c", _BOOT, json.dumps([root, os.getpid(), settings])]
        inside = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": scratch, "TMPDIR": scratch}
        try:
            yield [*cgroup.command(), *boot, *line], inside
        finally:
            subprocess.run(["/bin/sh", "-c", _REMOVE, "sh", scratch])
            cgroup.close()


def environment_of(program: str) -> list[str]:
    """What an interpreter needs of the environment (venv, conda) and of the installation that it is in."""
    found = []
    for path in (Path(program), Path(os.path.realpath(program))):
        folder = path.parent.parent
        if path.parent.name != "bin":
            continue
        if any((folder / name).exists() for name in ("pyvenv.cfg", "conda-meta")):
            found += [str(folder / name) for name in ("bin", "lib", "lib64", "include", "share", "pyvenv.cfg")]
        elif libraries := [*folder.glob("lib/*python3*")]:  # ~/.local is one, whose other folders hold keys
            found += [str(folder / "bin"), *map(str, libraries)]
    return found


def main(owner: int, settings: dict[str, Any], words: list[str]) -> None:
    """Start the program in the cage, in a session with this process, and watch over it while `owner` is our parent."""
    if os.getpgrp() != os.getpid():
        os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        try:
            enter(**settings)
            os.execv(words[0], words)
        except Exception as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(126)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        disk = os.statvfs(settings["scratch"])
        full = disk.f_bavail * disk.f_frsize < SPARE_MB << 20
        if full:
            os.write(2, f"ended: less than {SPARE_MB} MiB are left on the disk of {settings['scratch']}\n".encode())
        if full or os.getppid() != owner:
            os.killpg(0, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, LOOK_S)
    code = os.waitstatus_to_exitcode(ended[1])
    os._exit(code if code >= 0 else 128 - code)


def enter(port: int, scratch: str, readable: Sequence[str], memory_mb: int) -> None:
    """Shut this process in, and what it becomes.

    Raises CageError: a layer is missing or did not close.
    """
    check()
    cage.die_with_parent()
    read = cage.READ_FILE | cage.READ_DIR
    system = [path for path in ("/usr", "/bin", "/sbin", *glob.glob("/lib*")) if os.path.isdir(path)]
    folders = (("etc", _ETC), ("proc", _PROC), ("proc/self", _SELF))
    seen = [f"/{folder}/{name}" for folder, names in folders for name in names.split()]
    rules = cage.landlock_rules(
        [*cage.library_paths(), *seen],
        [
            *((path, read | cage.RUN) for path in [*system, *readable]),
            *((f"/dev/{name}", cage.DEVICE) for name in ("null", "zero", "full", "random", "urandom")),
            (scratch, cage.SCRATCH | cage.RUN | 1 << 10 | 1 << 12),  # FIFOs and symbolic links
        ],
        port=port,
    )
    os.chdir(scratch)
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, WRITTEN_MB << 20),
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_DATA, memory_mb << 20),
        (resource.RLIMIT_NPROC, threads_of_user() + PROCESSES),  # the kernel counts all of a user, and none of root's
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    cage.give_up_privileges()
    cage.close(rules, cage.seccomp_program(platform.machine(), "program"))


def threads_of_user() -> int:
    """How many threads this user has."""
    found = 0
    for folder in glob.glob("/proc/[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            found += len(os.listdir(f"{folder}/task")) if os.stat(folder).st_uid == os.getuid() else 0
    return found
