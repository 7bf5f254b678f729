# SPDX-License-Identifier: Apache-2.0
"""A whole program in the cage: what it can do, and what it can't although the same program outside can."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from verl_ext.sandbox import cage
from verl_ext.sandbox.program import ProgramCage, environment_of

TRIES = """
import ctypes, fcntl, json, os, resource, socket, struct, subprocess, sys, threading
room = json.loads(sys.argv[1])
done = {}
def tried(name, action):
    try:
        action()
        done[name] = True
    except OSError:
        done[name] = False
def connect(port, *kind, flags=None):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, *kind) as one:
        one.settimeout(30)
        one.connect(("127.0.0.1", port)) if flags is None else one.sendto(b"x", flags, ("127.0.0.1", port))
tried("the port", lambda: connect(room["port"]))
tried("scratch", lambda: open("mine.txt", "w").write("x"))
tried("programs", lambda: subprocess.run(["sh", "-c", "cat mine.txt | wc -c"], check=True, capture_output=True))
tried("threads", lambda: threading.Thread(target=len, args=("",)).start())
tried("its argument", lambda: open(room["given"]).read())
tried("another port", lambda: connect(room["other"]))
tried("another port, fast open", lambda: connect(room["other"], flags=0x20000000))
tried("datagrams", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
tried("Unix sockets", lambda: socket.socket(socket.AF_UNIX))
tried("a server", lambda: socket.create_server(("127.0.0.1", 0)))
tried("a secret", lambda: open(room["secret"]).read())
tried("a file", lambda: open(room["written"], "w"))
tried("another's environment", lambda: open("/proc/%d/environ" % room["pid"]).read())
tried("another's signals", lambda: os.kill(room["pid"], 0))
tried("another's limits", lambda: resource.prlimit(room["pid"], 4, resource.prlimit(room["pid"], 4)))
tried("another's priority", lambda: os.setpriority(0, room["pid"], os.getpriority(0, room["pid"])))
tried("another's processors", lambda: os.sched_setaffinity(room["pid"], os.sched_getaffinity(0)))
tried("another's socket", lambda: fcntl.ioctl(socket.socket(), 0x8901, struct.pack("i", room["pid"])))
tried("its own", lambda: (
    resource.setrlimit(4, (0, 0)), os.nice(1), os.sched_setaffinity(0, os.sched_getaffinity(0))
))
tried("a session", lambda: subprocess.run(["true"], start_new_session=True))
tried("a group", lambda: subprocess.run(["true"], process_group=0))
capabilities = [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")]
spawned = ctypes.CDLL(None).syscall(272, 0x10000000)  # unshare, user namespace
print(json.dumps([done, capabilities, spawned, sorted(os.environ)]))
"""
OPEN = {"the port", "scratch", "programs", "threads", "its argument", "its own"}


@pytest.fixture
def room(tmp_path: Path) -> Iterator[dict[str, object]]:
    with closing(socket.create_server(("127.0.0.1", 0))) as one, closing(socket.create_server(("127.0.0.1", 0))) as two:
        for name in ("given", "secret"):
            (tmp_path / name).write_text("x")
        names = {name: str(tmp_path / name) for name in ("given", "secret", "written")}
        yield {"port": one.getsockname()[1], "other": two.getsockname()[1], "pid": os.getpid(), **names}


def played(line: list[str], **keys: object) -> list[object]:
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, start_new_session=True, **keys)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_a_program_can_do_and_what_it_cannot(room: dict[str, object], tmp_path: Path) -> None:
    line = [sys.executable, "-I", "-S", "-c", TRIES, json.dumps(room), str(room["given"])]
    outside, *_ = played(line, cwd=tmp_path)
    # fast open can be switched off in the kernel, and in a container without IPv4 to itself
    assert {name for name, did in outside.items() if not did} <= {"another port, fast open"}  # type: ignore[attr-defined]
    with ProgramCage(int(str(room["port"]))).command(line) as (caged, environment):
        inside, capabilities, spawned, variables = played(caged, env=environment)
        scratch = Path(environment["TMPDIR"])
        assert (scratch / "mine.txt").read_text() == "x"
    assert {name for name, did in inside.items() if did} == OPEN and set(inside) == set(outside)  # type: ignore[attr-defined, call-overload]
    assert [int(value, 16) for value in capabilities] == [0] and spawned == -1  # type: ignore[attr-defined]
    assert not set(variables) - {"PATH", "LANG", "HOME", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}  # type: ignore[call-overload]
    assert not scratch.exists()


def test_what_is_named_can_be_read(room: dict[str, object]) -> None:
    code = "import json, sys; print(json.dumps([open(sys.argv[1]).read()]))"
    split = f"{Path(str(room['secret'])).parent}/./secret"  # no word of the command that is a file
    line = [sys.executable, "-I", "-S", "-c", code.replace("sys.argv[1]", repr(split))]
    with ProgramCage(9).command(line) as (caged, environment), pytest.raises(AssertionError, match="Permission denied"):
        played(caged, env=environment)
    with ProgramCage(9, (str(room["secret"]),)).command(line) as (caged, environment):
        assert played(caged, env=environment) == ["x"]


def test_a_program_that_is_not_there_and_a_kernel_without_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with ProgramCage(9).command(["/no/such/program"]) as (caged, environment):
        done = subprocess.run(caged, env=environment, capture_output=True, text=True)
    assert done.returncode == 126 and "FileNotFoundError" in done.stderr
    monkeypatch.setattr(cage, "landlock_version", lambda: 3)
    from verl_ext.sandbox import program

    with pytest.raises(cage.CageError, match=r"Linux 6\.7, Landlock 4.*Landlock 3"):
        program.check()


def test_an_environment_is_found_by_its_interpreter(tmp_path: Path) -> None:
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    assert str(folder / "lib") not in environment_of(str(folder / "bin" / "python"))
    (folder / "pyvenv.cfg").touch()
    assert {str(folder / "lib"), str(folder / "bin")} <= set(environment_of(str(folder / "bin" / "python")))
    assert environment_of(str(tmp_path / "program")) == []


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_calls_of_programs_have_numbers_of_their_own(machine: str) -> None:
    calls = cage.allowed_calls(machine, "program")
    some = {"x86_64": {"connect": 42, "execve": 59}, "aarch64": {"connect": 203, "execve": 221}}
    assert calls.items() >= some[machine].items() and len(set(calls.values())) == len(calls)
    forbidden = "clone clone3 socket sendto sendmsg sendmmsg bind listen ptrace setsid setpgid unshare setns mount"
    assert not set(calls) & {*forbidden.split(), "prlimit64", "setpriority", "sched_setaffinity"}
    assert len(cage.seccomp_program(machine, "program")) % 8 == 0
