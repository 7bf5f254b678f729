# SPDX-License-Identifier: Apache-2.0
"""The process from which Ray's workers of a job are forked on one node: it has imported everything, and waits.

It forks for a peer (:mod:`verl_ext.cpu.platform.fork_worker`) before it reads a word, so what a peer sends, or does
not, is that fork's business alone. It ends with the node's process, or after a while without a worker, and lives
exactly if its lock is held. Run as ``python fork_server.py BASE RAYLET``: the path of its files without suffix, the
node's process.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import socketserver
import sys
import time
from types import SimpleNamespace
from typing import Any

from verl_ext.cpu.platform.fork_worker import IDLE_S, IMPORTS, MODULES, PATIENCE_S, alive


def serve(base: str, raylet: int) -> None:
    """Import, listen, fork on demand; end when Ray's node process has, or when there is no worker any more."""
    gc.disable()  # a sixth of the time of imports goes into collections, which find nothing
    for module in os.environ.get(MODULES, IMPORTS).split(","):
        importlib.import_module(module)
        # Ray's C++ seeds its generators at the first id, such as an actor class gets (ray 2.60, actor.py line 2938).
        # Seeded here, every fork would go on with the same ones and take its tasks and subscriptions for another's.
        if ray := sys.modules.get("ray"):
            ids = SimpleNamespace(from_random=lambda kind=ray.ActorClassID: kind(os.urandom(kind.size())))
            ray.actor.ActorClassID = ids
    gc.collect()
    gc.freeze()  # collections in the workers then leave the shared pages alone
    gc.enable()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(base + ".sock")  # of a server that was killed, since the lock is ours
    server = Server(base + ".sock", socketserver.BaseRequestHandler)
    until = time.monotonic() + PATIENCE_S  # for the first one
    while alive(raylet) and time.monotonic() < until:
        server.handle_request()
        if server.active_children:
            until = time.monotonic() + float(os.environ.get(IDLE_S, "10"))
    for suffix in (".sock", ".lock", ".log"):
        os.unlink(base + suffix)


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    timeout = 0.1  # seconds between looks at the node and at the workers
    max_children = sys.maxsize

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In a fork of the server: run the worker script as if this process had just been started with it."""
        self.socket.close()
        try:
            request.settimeout(5)
            files = socket.recv_fds(request, 1, 3)[1]
            argv, environment, cwd = json.load(request.makefile("rb"))
            request.sendall(os.getpid().to_bytes(4, "big"))
        except (OSError, ValueError) as error:  # the peer has gone, is late or makes no sense
            print(f"a request was dropped: {error!r}", flush=True)
            return
        for target, file in enumerate(files):  # the server's lock was 0
            os.dup2(file, target)
            os.close(file)
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        # SGLang's server ends itself by SIGQUIT when its scheduler has died. A shell's background job ignores it, as
        # does all that such a job starts.
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        if "numpy" in sys.modules:  # Python's own generator is seeded anew by the fork, torch's is as after its import
            sys.modules["numpy"].random.seed()
        paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
        sys.argv, sys.path[:1] = argv, [os.path.dirname(argv[0]), *paths]
        try:
            runpy.run_path(argv[0], run_name="__main__")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


if __name__ == "__main__":
    serve(sys.argv[1], raylet=int(sys.argv[2]))
