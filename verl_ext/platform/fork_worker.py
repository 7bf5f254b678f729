# SPDX-License-Identifier: Apache-2.0
"""Ray workers forked from one process that has imported everything, for small machines.

A run of verl is about eight Python processes, each of which spends seconds on the same imports. With
``verl_ext.fork_server: true`` Ray's ``py_executable`` is this file: it asks a *fork server*, which the first worker of
the run starts, for a copy of itself that runs Ray's worker script, and then stands in for it towards Ray until it ends.
If there is no server within `PATIENCE` seconds, or anything is odd, the worker is started the plain way.

The file is run as a script with the standard library only (`python -I -S`), so that it starts in milliseconds; the
server imports the rest. One server serves one Ray node of one job and ends with it.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from typing import Any

PATIENCE = 120.0
IMPORTS = (
    "ray",
    "ray._private.workers.default_worker",
    "verl",
    "transfer_queue",
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl.experimental.agent_loop",
    "verl.experimental.reward_loop",
    "transformers.models.llama.modeling_llama",
    "verl_ext.rollout.embedded.server",
)
MORE_IMPORTS = "VERL_EXT_FORK_IMPORTS"
"""Variable with further modules for the server to import, separated by commas: those of the run's rollout engine."""


def folder() -> str:
    """Folder of the sockets and locks, for this user alone."""
    path = os.path.join(tempfile.gettempdir(), f"verl_ext-{os.getuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    if os.stat(path).st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    return path


def name() -> str:
    """One server for each Ray node process and job: both are fixed when `ray` is imported."""
    return f"{os.environ['RAY_RAYLET_PID']}-{os.environ.get('RAY_JOB_ID', 'none')}"


# --- the worker's side ---------------------------------------------------------------------------------------------


def main(argv: list[str]) -> None:
    """Run `argv` (Ray's worker script and its arguments) in a fork of the server, or plainly."""
    helper = any(word.startswith("--worker-type=") and word != "--worker-type=WORKER" for word in argv)
    if "RAY_RAYLET_PID" in os.environ and not helper:
        try:
            connection = connect(os.path.join(folder(), name()))
        except OSError:
            connection = None
        if connection is not None:
            stand_in(connection, argv)
    os.execv(sys.executable, [sys.executable, *argv])


def connect(base: str) -> socket.socket | None:
    """A connection to the server of this node and job, started if there is none; None if it does not come up."""
    until = time.monotonic() + PATIENCE
    started = False
    while time.monotonic() < until:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(base + ".sock")
            return connection
        except OSError:
            connection.close()
        if not started:
            started = start(base)
        elif os.path.exists(base + ".failed"):
            return None
        time.sleep(0.05)
    return None


def start(base: str) -> bool:
    """Start the server unless another worker has; always True."""
    with open(base + ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        if not os.path.exists(base + ".started"):
            open(base + ".started", "w").close()
            with open(base + ".log", "wb") as log:
                subprocess.Popen(
                    [sys.executable, os.path.abspath(__file__), "--serve", base],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
    return True


def stand_in(connection: socket.socket, argv: list[str]) -> None:
    """Hand over arguments, environment and open files; then live and die with the forked worker."""
    request = json.dumps({"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
    socket.send_fds(connection, [struct.pack("!I", len(request))], [0, 1, 2])
    connection.sendall(request)
    answer = connection.recv(4)
    if len(answer) < 4:
        return  # the server refused: start plainly
    worker = struct.unpack("!I", answer)[0]

    def forward(number: int, frame: Any) -> None:
        try:
            os.kill(worker, number)
        except ProcessLookupError:
            pass

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    status = b""
    while len(status) < 4 and (part := connection.recv(4 - len(status))):
        status += part
    os._exit(struct.unpack("!i", status)[0] & 0xFF if len(status) == 4 else 1)


# --- the server's side ---------------------------------------------------------------------------------------------


def serve(base: str) -> None:
    """Import, listen, fork on demand; end when Ray's node process has."""
    raylet = int(os.environ["RAY_RAYLET_PID"])
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        import importlib

        for module in (*IMPORTS, *filter(None, os.environ.get(MORE_IMPORTS, "").split(","))):
            importlib.import_module(module)
        threads = len(os.listdir("/proc/self/task"))
        if threads > 1:
            print(f"{threads - 1} threads were started by imports; forking would lose them", flush=True)
    except BaseException:
        open(base + ".failed", "w").close()
        raise
    gc.collect()
    gc.freeze()  # collections in the workers then leave the shared pages alone
    listener.bind(base + ".sock")
    listener.listen(64)
    workers: dict[int, socket.socket] = {}
    try:
        while alive(raylet):
            if select.select([listener], [], [], 0.1)[0]:
                connection, _ = listener.accept()
                pid = fork_worker(listener, connection, list(workers.values()))
                workers[pid] = connection
            reap(workers)
    finally:
        for suffix in (".sock", ".lock", ".started", ".failed", ".log"):
            try:
                os.unlink(base + suffix)
            except FileNotFoundError:
                pass


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def reap(workers: dict[int, socket.socket]) -> None:
    """Tell the stand-ins of ended workers their exit codes."""
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        connection = workers.pop(pid)
        try:
            connection.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
        except OSError:
            pass
        connection.close()


def fork_worker(listener: socket.socket, connection: socket.socket, others: list[socket.socket]) -> int:
    """Fork for one request; in the child, become the worker and never return."""
    header, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
    size = struct.unpack("!I", header)[0]
    request = b""
    while len(request) < size:
        request += connection.recv(size - len(request))
    pid = os.fork()
    if pid:
        connection.sendall(struct.pack("!I", pid))
        for descriptor in descriptors:
            os.close(descriptor)
        return pid

    listener.close()
    for other in [*others, connection]:
        other.close()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    become(json.loads(request))
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """Run the worker script as if this process had just been started with the request's arguments."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    reseed()
    for path in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(1, path)
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def reseed() -> None:
    """Random state as in a new process: Python's and numpy's from the system, torch's at its fixed default."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.manual_seed(torch.initial_seed())


def py_executable() -> str:
    """The value of Ray's ``py_executable`` that starts workers through this file; Ray gives it to a shell."""
    import shlex

    return f"{shlex.quote(sys.executable)} -I -S {shlex.quote(os.path.abspath(__file__))}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main(sys.argv[1:])
