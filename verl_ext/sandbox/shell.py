# SPDX-License-Identifier: Apache-2.0
"""The outer layers, around the process that forks the calls: bubblewrap and a cgroup, where the machine has them.

Neither is needed: many containers allow neither (user namespaces are refused by Docker's default profile and by
Ubuntu 24.04's AppArmor, bubblewrap issue 505). They are a second wall, not the first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

_NAME = "verl_ext_sandbox_"


@functools.cache
def bubblewrap() -> list[str]:
    """The beginning of a command in its own namespaces (no network, own processes); empty where that fails."""
    program = shutil.which("bwrap")
    if program is None:
        return []
    # Bubblewrap leaves a read-only view of everything: what can be read is Landlock's part.
    command = [program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--chdir", "/"]
    command += ["--setenv", "TMPDIR", "/dev/shm"]  # the one folder that can be written, by the zygote alone
    try:
        tried = subprocess.run([*command, sys.executable, "-S", "-c", ""], capture_output=True, timeout=30, env={})
    except (OSError, subprocess.TimeoutExpired):
        return []
    return command if tried.returncode == 0 else []


def _places() -> list[Path]:
    """Folders of this process's cgroup: one in version 2, whose line names no controllers, one each in version 1."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    return [
        Path("/sys/fs/cgroup", controllers, path.lstrip("/"))
        for _, controllers, path in lines
        if controllers in ("", "memory", "pids")
    ]


class Cgroup:
    """A cgroup of one zygote and its workers.

    Args:
        memory: bytes of all together.
        processes: of all together.

    Attributes:
        folders: what was made, one a hierarchy; empty where this user may not, or the controllers are not delegated.
    """

    def __init__(self, memory: int, processes: int) -> None:
        self.folders: list[Path] = []
        for place in _places():
            folder = place / f"{_NAME}{uuid.uuid4().hex[:12]}"
            limits = {"memory.max": memory, "memory.limit_in_bytes": memory, "pids.max": processes}
            try:
                folder.mkdir()
                found = [folder / name for name in limits if (folder / name).exists()]
                for file in found:
                    file.write_text(str(limits[file.name]))
            except OSError:
                found = []
            if found:
                self.folders.append(folder)
            elif folder.exists():
                folder.rmdir()

    def command(self) -> list[str]:
        """The beginning of a command that runs in this cgroup."""
        if not self.folders:
            return []
        joins = "; ".join(f"echo $$ > {folder}/cgroup.procs" for folder in self.folders)
        return ["/bin/sh", "-c", f'{joins}; exec "$@"', "sh"]

    def close(self) -> None:
        """Remove the folders, and old ones of others that have ended without doing so."""
        for folder in self.folders:
            for one in folder.parent.glob(f"{_NAME}*"):
                with contextlib.suppress(OSError):  # still in use, or gone
                    if one == folder or time.time() - one.stat().st_mtime > 60:
                        one.rmdir()
        self.folders = []


def has_cgroup() -> bool:
    """Whether this user may make a cgroup with a limit here."""
    probe = Cgroup(1 << 30, 64)
    found = bool(probe.folders)
    probe.close()
    return found and os.path.exists("/bin/sh")
