# SPDX-License-Identifier: Apache-2.0
"""What a call may do where it has a scratch folder, and what not."""

from __future__ import annotations

import ctypes
import os
import select
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

    def driver() -> None:
        """As a GPU's driver begins: it names a thread, does not wait at a pipe, and looks for a service."""
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
            file.write("cuda-EvtHandlr")
        end, other_end = os.pipe()
        os.set_blocking(end, False)
        os.close(end)
        os.close(other_end)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as packets:
            try:
                packets.connect("/tmp/nvidia-mps/control")
            except FileNotFoundError:
                pass
            packets.bind(f"\0cuda-uvmfd-{os.getpid()}")
            packets.listen(128)
            if select.select([packets], [], [], 0)[0]:
                raise OSError("the driver's thread would turn in circles")

    def script() -> None:
        """As Triton finds the driver: a script of the shell, which asks the loader."""
        with open(f"{scratch}/script", "w") as file:
            file.write("#!/bin/sh\nexec /sbin/ldconfig -p\n")
        done = subprocess.run(["sh", f"{scratch}/script"], capture_output=True, check=False)
        if done.returncode or b".so" not in done.stdout:
            raise OSError(done.stderr)

    def listening() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as packets:
            packets.bind(f"{scratch}/listening")

    def connected() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as packets:
            packets.connect(f"{other}/socket")

    parent = os.getppid()
    return {
        "driver": _tried(driver),
        "script": _tried(script),
        "connect": _tried(connected),
        "listen": _tried(listening),
        "parents_threads": _tried(lambda: open(f"/proc/{parent}/task/{parent}/comm", "w")),
        "parents_score": _tried(lambda: open(f"/proc/{parent}/oom_score_adj", "w")),
        "datagrams": _tried(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)),
        "compiles": ctypes.CDLL(library).answer(),
        "thread": threads[0],
        "elsewhere": _tried(lambda: open(f"{other}/file", "w")),
        "home": _tried(lambda: os.listdir("/root")),
        "socket": _tried(socket.socket),
        "kill": _tried(lambda: os.kill(os.getppid(), 0)),
    }
