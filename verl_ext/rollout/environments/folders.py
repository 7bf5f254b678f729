# SPDX-License-Identifier: Apache-2.0
"""Folders of environments' hosts, which hold the working folders of their children."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

#: Of their names. With the machine's: a folder for temporary files may be of many, and their locks not.
PREFIX = f"verl_ext_environments_{socket.gethostname()}_"


def locked_folder() -> tuple[str, int]:
    """A new folder for a host, and a descriptor that locks it as long as any process has it.

    Those that nobody locks are removed: Ray kills a worker's hosts with it, and leaves them no time for that.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or in use
            descriptor = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)
    while True:  # another sweep may come between the three lines
        folder = tempfile.mkdtemp(prefix=PREFIX)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.path.isdir(folder):
                return folder, lock
            os.close(lock)
