# SPDX-License-Identifier: Apache-2.0
"""The fork server with real processes: what a worker gets, and peers and files that misbehave."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl_ext.cpu.platform import fork_worker

WORKER = """
import json, os, signal, sys
print(json.dumps({"argv": sys.argv[1:], "name": os.environ["NAME"], "cwd": os.getcwd(), "pid": os.getpid(),
                  "forked": "wave" in sys.modules,
                  "quits": signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL}), flush=True)
if "wait" in sys.argv:
    import time
    time.sleep(600)
"""


def eventually(condition: Callable[[], bool], seconds: float = 120) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def in_the_background() -> None:
    """As a shell starts a job with `&`."""
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)


class Node:
    """A process that stands for Ray's node process, and workers of one job on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.raylet = subprocess.Popen(["sleep", "600"])
        self.base = folder / f"verl_ext-{os.getuid()}" / f"{self.raylet.pid}-job"
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self.workers: list[subprocess.Popen] = []

    def start(self, *arguments: str, modules: str = "wave", flags: str = "-I -S", **variables: str) -> subprocess.Popen:
        environment = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(self.folder),
            "RAY_RAYLET_PID": str(self.raylet.pid),
            "RAY_JOB_ID": "job",
            "NAME": f"worker {len(self.workers)}",
            fork_worker.MODULES: modules,
            **variables,
        }
        command = [sys.executable, *flags.split(), fork_worker.__file__, str(self.script), *arguments]
        worker = subprocess.Popen(
            command,
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=in_the_background,
        )
        self.workers.append(worker)
        return worker

    def answer(self, worker: subprocess.Popen) -> dict:
        assert worker.stdout is not None
        return json.loads(worker.stdout.readline())

    def connection(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(f"{self.base}.sock")
        return connection

    def locked(self) -> bool:
        """Whether a server lives."""
        with open(f"{self.base}.lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
            return False

    def server(self) -> int:
        """Process id of the server."""
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    words = (path / "cmdline").read_bytes().decode().split("\0")
                except OSError:
                    continue
                if str(self.base) in words[2:4]:
                    return int(path.name)
        raise AssertionError("no server")

    def close(self) -> None:
        self.raylet.kill()
        self.raylet.wait()
        for worker in self.workers:
            worker.kill()
            worker.communicate()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


def test_a_worker_is_a_fork_with_its_own_arguments_environment_and_files(node: Node) -> None:
    workers = [node.start("a", "b c"), node.start("wait")]
    answers = [node.answer(worker) for worker in workers]
    assert [one["argv"] for one in answers] == [["a", "b c"], ["wait"]]
    assert [one["name"] for one in answers] == ["worker 0", "worker 1"]
    assert all(one["forked"] and one["quits"] and one["cwd"] == str(node.folder) for one in answers)
    assert workers[0].wait(120) == 0
    assert workers[1].poll() is None  # stands in as long as the worker lives
    workers[1].send_signal(signal.SIGTERM)  # and hands signals on
    assert workers[1].wait(120) == 0
    assert eventually(lambda: not fork_worker.alive(answers[1]["pid"]))


@pytest.mark.parametrize(
    ("context", "forked"),
    [
        ({"py_executable": fork_worker.py_executable()}, True),
        ({"py_executable": sys.executable}, False),
        ({"py_executable": fork_worker.py_executable(), "command_prefix": ["nice"]}, False),
        ({"py_executable": fork_worker.py_executable(), "env_vars": {"NAME": "${HOME}"}}, False),
        ({}, False),
    ],
)
def test_in_place_of_rays_file_for_runtime_environments(node: Node, context: dict, forked: bool) -> None:
    """A fork where variables are all that is asked for beside it; else what Ray's own file, here one of ours, does."""
    node.script.with_name("setup_worker.py").write_text("import sys; print(['Ray', *sys.argv[2:]])")
    context = {"command_prefix": [], "env_vars": {"NAME": "of the context"}, "java_jars": [], **context}
    given = [f"--serialized-runtime-env-context={json.dumps(context)}", "--language=PYTHON"]
    worker = node.start("a", *given, flags="")
    if forked:
        answer = node.answer(worker)
        assert answer["forked"] and answer["argv"] == ["a"] and answer["name"] == "of the context"
    else:
        assert worker.communicate(timeout=120)[0] == f"{['Ray', 'a', *given]}\n"
    assert worker.wait(120) == 0


@pytest.mark.seconds
def test_forks_do_not_share_rays_random_ids(node: Node) -> None:
    """The import of a module with actor classes must not seed the generators that all forks inherit."""
    lines = (
        "import threading, ray; say = lambda: print(json.dumps(ray.WorkerID.from_random().hex()), flush=True); say()"
    )
    node.script.write_text(f"{WORKER}{lines}; threading.Thread(target=say).start()")
    workers = [node.start(modules="wave,ray._private.workers.default_worker,transfer_queue") for _ in range(2)]
    assert all(node.answer(worker)["forked"] for worker in workers)
    ids = [node.answer(worker) for worker in [*workers, *workers]]
    assert len(set(ids)) == 4


@pytest.mark.seconds
def test_peers_that_leave_early_stop_nobody(node: Node) -> None:
    assert node.start().wait(120) == 0
    for part in (b"", b"\0\0", b"\0\0\0\x63", b'\0\0\0\x63{"argv": ["x"', b"\0\0\0\x02{}", b"\0\0\0\x03abc"):
        with node.connection() as connection:
            connection.sendall(part)
    server = node.server()
    with node.connection() as silent:  # says nothing and stays
        late = node.start()
        assert node.answer(late)["forked"] and late.wait(120) == 0
        assert silent.recv(4) == b""  # was sent away
    assert node.server() == server
    log = Path(f"{node.base}.log")
    assert eventually(lambda: log.read_text().count("a request was dropped") == 7) and "TimeoutError" in log.read_text()


def test_files_of_a_dead_server_stand_in_nobodys_way(node: Node) -> None:
    assert node.start().wait(120) == 0
    os.kill(node.server(), signal.SIGKILL)
    assert eventually(lambda: not node.locked())
    assert Path(f"{node.base}.sock").exists() and Path(f"{node.base}.lock").exists()
    again = node.start()
    assert node.answer(again)["forked"] and again.wait(120) == 0


def test_without_a_server_a_worker_starts_plainly(node: Node) -> None:
    plain = node.start(modules="no_such_module")
    assert not node.answer(plain)["forked"] and plain.wait(120) == 0
    assert "No module named 'no_such_module'" in Path(f"{node.base}.log").read_text()


def test_nothing_outlives_the_node(node: Node) -> None:
    assert node.start().wait(120) == 0
    server = node.server()
    os.kill(server, signal.SIGSTOP)  # a server that will not answer
    waiting = node.start()
    os.kill(server, signal.SIGCONT)
    assert waiting.wait(120) == 0
    os.kill(server, signal.SIGKILL)
    assert eventually(lambda: not node.locked())
    with open(f"{node.base}.lock", "a") as lock:  # one that never comes up
        fcntl.flock(lock, fcntl.LOCK_EX)
        orphan = node.start()
        time.sleep(0.3)
        assert orphan.poll() is None
        node.raylet.kill()
        node.raylet.wait()
        assert orphan.wait(120) == 1
    assert "this worker's Ray node has gone" in orphan.communicate()[1]


def test_the_server_ends_with_the_node_and_takes_its_files_along(node: Node) -> None:
    assert node.start().wait(120) == 0
    server = node.server()
    node.raylet.kill()
    node.raylet.wait()
    assert eventually(lambda: not fork_worker.alive(server))
    assert list(node.base.parent.iterdir()) == []


@pytest.mark.seconds
def test_a_server_without_workers_ends_and_one_with_a_worker_stays(node: Node) -> None:
    soon = {fork_worker.IDLE_S: "0.3"}
    busy = node.start("wait", **soon)
    worker, server = node.answer(busy)["pid"], node.server()
    time.sleep(1)
    assert fork_worker.alive(server)
    os.kill(worker, signal.SIGKILL)
    assert eventually(lambda: not fork_worker.alive(server))
    assert list(node.base.parent.iterdir()) == []
    assert node.answer(node.start(**soon))["forked"]


def test_a_server_forked_from_one_with_imports(node: Node) -> None:
    """The server of a job has the modules of both, and a lock of its own."""
    first = node.start(RAY_JOB_ID="imports", **{fork_worker.IDLE_S: "inf"})
    assert node.answer(first)["forked"] and first.wait(120) == 0
    node.script.write_text(f"{WORKER}print(json.dumps('chunk' in sys.modules), flush=True)")
    source = {fork_worker.FROM: f"{node.base.parent}/{node.raylet.pid}-imports.sock"}
    second = node.start(modules="chunk", **source)
    said = node.answer(second)
    assert said["forked"] and said["name"] == "worker 1" and node.answer(second) is True
    assert node.locked()
    gone = node.start(RAY_JOB_ID="other", **{fork_worker.FROM: "/nowhere"})  # then plainly
    assert not node.answer(gone)["forked"] and "FileNotFoundError" in gone.communicate()[1]
