# SPDX-License-Identifier: Apache-2.0
"""What a call may do where it has a scratch folder, and what not."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any


def _tried(action: Callable[[], Any]) -> str:
    try:
        action()
    except OSError:
        return "no"
    return "yes"


def tries(scratch: str, other: str) -> dict[str, Any]:
    """As a compiler's wrapper works: a program of the system makes a library there, which is loaded."""
    os.environ["TMPDIR"] = scratch
    source, library = f"{scratch}/answer.c", f"{scratch}/answer.so"
    with open(source, "w") as file:
        file.write("#include <stdint.h>\nint32_t answer(void) { return 42; }\n")
    command = ["gcc", "-shared", "-fPIC", source, "-o", library]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    threads: list[str] = []
    thread = threading.Thread(target=lambda: threads.append("yes"))
    thread.start()
    thread.join()
    return {
        "compiles": ctypes.CDLL(library).answer(),
        "thread": threads[0],
        "elsewhere": _tried(lambda: open(f"{other}/file", "w")),
        "home": _tried(lambda: os.listdir("/root")),
        "socket": _tried(socket.socket),
        "kill": _tried(lambda: os.kill(os.getppid(), 0)),
    }
