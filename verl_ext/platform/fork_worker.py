# SPDX-License-Identifier: Apache-2.0
"""Ray workers forked from one process that has imported everything, for small machines.

A run of verl is about eight Python processes, each of which spends seconds on the same imports. With
``verl_ext.fork_server: true`` Ray's ``py_executable`` is this file. It asks a *fork server*, which the first worker of
the run starts, for a copy of itself that runs Ray's worker script, and stands in for it towards Ray until it ends. If
no server comes up, or anything is odd, the worker is started the plain way.

The file is run as a script with the standard library only (`python -I -S`), so that it starts in milliseconds; the
server imports the rest. One server serves one job on one Ray node and ends with that node's process. It lives exactly
as long as it holds its lock, whatever files lie in the folder.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

PATIENCE_S = 120.0  # for the imports, on a loaded machine
PEER_S = 5.0  # for what a worker sends
MODULES = "VERL_EXT_FORK_IMPORTS"
"""Variable with the modules that the server imports, separated by commas; `IMPORTS` where it is not set."""
IMPORTS = (
    "ray._private.workers.default_worker,transfer_queue,verl.trainer.main_ppo,verl.trainer.ppo.v1,"
    "verl.workers.engine_workers,verl.experimental.agent_loop,verl.experimental.reward_loop,"
    "transformers.models.llama.modeling_llama,verl_ext.rollout.embedded.server"
)


def main(argv: list[str]) -> None:
    """Run `argv` (Ray's worker script and its arguments) in a fork of the server, or plainly."""
    helper = any(word.startswith("--worker-type=") and word != "--worker-type=WORKER" for word in argv)
    if "RAY_RAYLET_PID" in os.environ and not helper:
        try:
            connection = connect(int(os.environ["RAY_RAYLET_PID"]))
            if connection is not None:
                stand_in(connection, argv)
        except OSError:
            traceback.print_exc()
    os.execv(sys.executable, [sys.executable, *argv])


def connect(raylet: int) -> socket.socket | None:
    """A connection to the server of this node and job, started if there is none; None if it does not come up."""
    folder = os.path.join(tempfile.gettempdir(), f"verl_ext-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.stat(folder).st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    base = os.path.join(folder, f"{raylet}-{os.environ.get('RAY_JOB_ID', 'none')}")
    until, started = time.monotonic() + PATIENCE_S, False
    while time.monotonic() < until:
        if not alive(raylet):
            sys.exit("verl_ext: this worker's Ray node has gone")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(base + ".sock")
            return connection
        except OSError:
            connection.close()
        with open(base + ".lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pass  # a server is on its way
            else:
                if started:
                    return None  # it has ended without a word; its log says why
                started = True
                command = [sys.executable, os.path.abspath(__file__), "--serve", base, str(raylet), str(lock.fileno())]
                with open(base + ".log", "wb") as log:  # the server inherits the lock with its descriptor
                    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                    subprocess.Popen(command, pass_fds=[lock.fileno()], start_new_session=True, **streams)
        time.sleep(0.05)
    return None


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def stand_in(connection: socket.socket, argv: list[str]) -> None:
    """Hand over arguments, environment and open files, then live as long as the worker; return if refused."""
    request = json.dumps({"argv": argv, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
    socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
    connection.sendall(request)
    answer = connection.recv(4)
    if len(answer) < 4:
        return
    worker = int.from_bytes(answer, "big")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: os.kill(worker, number))
    connection.recv(1)  # nothing comes: the worker holds the other end as long as it lives
    os._exit(0)


def serve(base: str, raylet: int, lock: int) -> None:
    """Import, listen, fork on demand; end when Ray's node process has."""
    for module in os.environ.get(MODULES, IMPORTS).split(","):
        importlib.import_module(module)
        leave_generator_of_ids()
    gc.collect()
    gc.freeze()  # collections in the workers then leave the shared pages alone
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that have ended are nobody's business here
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if os.path.exists(base + ".sock"):
        os.unlink(base + ".sock")  # of a server that was killed, since the lock is ours
    listener.bind(base + ".sock")
    listener.listen(64)
    listener.settimeout(0.1)
    while alive(raylet):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            try:
                fork_worker(connection, listener, lock)
            except (OSError, ValueError, KeyError) as error:  # the peer has gone, is late or makes no sense
                print(f"a request was dropped: {error!r}", flush=True)
    for suffix in (".sock", ".lock", ".log"):
        os.unlink(base + suffix)


def leave_generator_of_ids() -> None:
    """Let Ray's actor classes take their random ids from the system, once Ray has been imported.

    All other ids of a process come from generators in Ray's C++ that are seeded when the first id is made. Made here,
    as by the import of any module with an actor class, every fork would go on with the same ones: processes of one job
    would name tasks and objects alike, and subscribe to Ray's news as the same subscriber (ray 2.60, actor.py line
    2938 in `_make_actor`).
    """
    actor: Any = sys.modules.get("ray.actor")
    if actor is not None and not isinstance(actor.ActorClassID, _ClassID):
        actor.ActorClassID = _ClassID(actor.ActorClassID)


class _ClassID:
    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def from_random(self) -> Any:
        return self.kind(os.urandom(self.kind.size()))


def fork_worker(connection: socket.socket, listener: socket.socket, lock: int) -> None:
    """Fork for one request; the child becomes the worker and never returns."""
    connection.settimeout(PEER_S)
    header, files, _, _ = socket.recv_fds(connection, 4, 3)
    try:
        with connection.makefile("rb") as stream:
            request = json.loads(stream.read(int.from_bytes(header, "big")))
        argv, environment, cwd = request["argv"], request["env"], request["cwd"]
        pid = os.fork()
        if pid == 0:
            for target, file in enumerate(files):
                os.dup2(file, target)
            for file in [*files, lock, listener.detach()]:
                os.close(file)
            become(argv, environment, cwd)
        connection.sendall(pid.to_bytes(4, "big"))
    finally:
        for file in files:
            os.close(file)


def become(argv: list[str], environment: dict[str, str], cwd: str) -> None:
    """Run the worker script as if this process had just been started with it; never returns."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        if "numpy" in sys.modules:  # Python's own generator is seeded anew by the fork, torch's is as after its import
            sys.modules["numpy"].random.seed()
        paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
        sys.argv, sys.path[:1] = argv, [os.path.dirname(argv[0]), *paths]
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def py_executable() -> str:
    """The value of Ray's ``py_executable`` that starts workers through this file; Ray gives it to a shell."""
    return f"{shlex.quote(sys.executable)} -I -S {shlex.quote(os.path.abspath(__file__))}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], raylet=int(sys.argv[3]), lock=int(sys.argv[4]))
    else:
        main(sys.argv[1:])
