# SPDX-License-Identifier: Apache-2.0
"""Ray workers forked from one process that has imported everything, for small machines.

A run of verl is about eight Python processes, each of which spends seconds on the same imports. With
``verl_ext.fork_server: true`` Ray's ``py_executable`` is this file, run with the standard library only (`python -I -S`)
to start in milliseconds. It asks a *fork server* (fork_server.py), which the first worker of a job on a Ray node
starts, for a fork that runs Ray's worker script, and stands in for that towards Ray until it ends; without one the
worker starts the plain way. Ray fixes the job of a process when it is loaded, so jobs cannot share a server; theirs can
be forked from one without Ray (`FROM`).
"""

import contextlib
import fcntl
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
PATIENCE_S = 120.0  # for the imports, on a loaded machine
# Variables: seconds without a worker after which a server ends (10), the socket of a server from which those of jobs
# are forked (for many short runs one after another), and the modules that a server imports, separated by commas.
IDLE_S, FROM, MODULES = "VERL_EXT_FORK_IDLE_S", "VERL_EXT_FORK_FROM", "VERL_EXT_FORK_IMPORTS"
IMPORTS = (
    "ray._private.workers.default_worker,transfer_queue,verl.trainer.main_ppo,verl.trainer.ppo.v1,"
    "verl.workers.engine_workers,verl.experimental.agent_loop,verl.experimental.reward_loop,"
    "transformers.models.llama.modeling_llama,verl_ext.cpu.engine.server"
)


def main(argv: list[str]) -> None:
    """Run `argv` (Ray's worker script and its arguments) in a fork of the server, or plainly."""
    helper = any(word.startswith("--worker-type=") and word != "--worker-type=WORKER" for word in argv)
    raylet = 0 if helper else int(os.environ.get("RAY_RAYLET_PID", 0))
    if raylet:
        try:
            connection = connect(raylet)
            worker = ask(connection, argv, [0, 1, 2])
        except OSError:
            traceback.print_exc()
        else:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda number, frame: os.kill(worker, number))
            connection.recv(1)  # nothing comes: the worker holds the other end as long as it lives
            os._exit(0)
        if not alive(raylet):
            sys.exit("verl_ext: this worker's Ray node has gone")
    os.execv(sys.executable, [sys.executable, *argv])


def set_up(argv: list[str]) -> list[str]:
    """Apply the runtime environment in `argv` and return the rest, as Ray's ``setup_worker.py``, which imports all of
    Ray for that, a second for each worker. One that wants no fork, or more than variables, is left to that file.
    """
    given = dict(word.partition("=")[::2] for word in argv)
    context = json.loads(given.get("--serialized-runtime-env-context", "{}"))
    variables, wanted = context.pop("env_vars", {}), context.pop("py_executable", None)
    if wanted != py_executable() or any(context.values()) or "$" in "".join(variables.values()):
        os.execv(sys.executable, [sys.executable, os.path.join(os.path.dirname(argv[0]), "setup_worker.py"), *argv])
    os.environ.update(variables)
    return [word for word in argv if not word.startswith(("--serialized-runtime-env-context=", "--language="))]


def connect(raylet: int) -> socket.socket:
    """A connection to the server of this node and job, started if there is none; OSError if it does not come up."""
    folder = os.path.join(tempfile.gettempdir(), f"verl_ext-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.stat(folder).st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    base = os.path.join(folder, f"{raylet}-{os.environ.get('RAY_JOB_ID', 'none')}")
    until, started = time.monotonic() + PATIENCE_S, False
    while alive(raylet) and time.monotonic() < until:
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            connection.connect(base + ".sock")
            return connection
        with open(base + ".lock", "a+") as lock, contextlib.suppress(BlockingIOError):  # taken: one is on its way
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if started:
                break  # it has ended
            started = True
            with open(base + ".log", "wb") as log:
                cmd = [os.path.join(HERE, "fork_server.py"), base, str(raylet)]
                if FROM in os.environ:
                    connection.connect(os.environ[FROM])
                    ask(connection, cmd, [lock.fileno(), log.fileno(), log.fileno()])
                else:
                    subprocess.Popen([sys.executable, *cmd], stdin=lock, stdout=log, stderr=log, start_new_session=True)
        time.sleep(0.05)
    raise ConnectionError(f"no fork server came up: see {base}.log")


def alive(pid: int) -> bool:
    """Whether a process of this user runs (a zombie, which has no executable, does not)."""
    return os.path.exists(f"/proc/{pid}/exe")


def ask(connection: socket.socket, argv: list[str], files: list[int]) -> int:
    """Pid of a fork of the server that runs `argv` with our environment and `files` as 0, 1, 2; OSError if refused."""
    socket.send_fds(connection, [b"\n"], files)
    connection.sendall(json.dumps([argv, dict(os.environ), os.getcwd()]).encode())
    connection.shutdown(socket.SHUT_WR)
    answer = connection.recv(4)
    if not answer:
        raise ConnectionError("the fork server has dropped the request")
    return int.from_bytes(answer, "big")


def set_up_workers() -> None:
    """A Ray that this process starts later calls this file in place of its ``setup_worker.py``."""
    from ray._private import ray_constants

    ray_constants.SETUP_WORKER_FILENAME = os.path.abspath(__file__)  # joined to a folder in ray 2.60, node.py line 163


def py_executable() -> str:
    """The value of Ray's ``py_executable`` that starts workers through this file; Ray gives it to a shell."""
    return f"{shlex.quote(sys.executable)} -I -S {shlex.quote(os.path.abspath(__file__))}"


if __name__ == "__main__":  # isolated as `py_executable`
    main(sys.argv[1:] if sys.flags.isolated else set_up(sys.argv[1:]))
