# SPDX-License-Identifier: Apache-2.0
"""A whole program in the cage: what it can do, and what it can't although the same program outside can."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import functions
import pytest
from functions import alive, soon

from verl_ext.sandbox import cage, program, shell
from verl_ext.sandbox.program import ProgramCage, environment_of

TRIES = """
import ctypes, fcntl, json, os, resource, socket, struct, subprocess, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
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
tried("another's signals, by a socket", lambda: fcntl.ioctl(socket.socket(), 0x8901, struct.pack("i", room["pid"])))
tried("another's limits", lambda: resource.prlimit(room["pid"], resource.RLIMIT_CORE, (0, 0)))
tried("another's priority", lambda: os.setpriority(os.PRIO_PROCESS, room["pid"], 19))
tried("another's processors", lambda: os.sched_setaffinity(room["pid"], os.sched_getaffinity(0)))
tried("another's command line", lambda: open("/proc/%d/cmdline" % room["pid"]).read())
tried("a socket of Unix, by a pair", lambda: socket.socketpair(type=socket.SOCK_DGRAM)[0].connect(room["socket"]))
tried("a pair of streams", socket.socketpair)
def watched():
    if libc.inotify_add_watch(libc.inotify_init1(0), os.path.dirname(room["secret"]).encode(), 0xFFF) < 0:
        raise OSError(ctypes.get_errno())
tried("names of files, as they come", watched)
tried("rights of a file", lambda: os.chmod(room["secret"], 0o640))
tried("rights of a file that it reads", lambda: os.fchmod(os.open(room["given"], os.O_RDONLY), 0o640))
tried("times of a file", lambda: os.utime(room["secret"], (1, 1)))
tried("its own limits", lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
tried("its own command line", lambda: open("/proc/self/cmdline").read())
tried("its own environment", lambda: open("/proc/self/environ").read())
tried("its own memory", lambda: open("/proc/self/mem", "rb"))
tried("a session", lambda: subprocess.run(["true"], start_new_session=True))
tried("a group", lambda: subprocess.run(["true"], process_group=0))
capabilities = [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")]
spawned = libc.syscall(272, 0x10000000)  # unshare, user namespace
print(json.dumps([done, capabilities, spawned, sorted(os.environ)]))
"""
PRETENDED = {"rights of a file", "rights of a file that it reads", "times of a file"}
OPEN = {"the port", "scratch", "programs", "threads", "its argument", "a pair of streams", "its own limits"}
OPEN |= {"its own command line"} | PRETENDED


@pytest.fixture(params=["this user", "an ordinary user"])
def user(request: pytest.FixtureRequest) -> tuple[int, list[str]]:
    """Its number, and the beginning of a command that runs as it."""
    return functions.ordinary_user() if request.param == "an ordinary user" else (os.getuid(), [])


@pytest.fixture
def room(user: tuple[int, list[str]]) -> Iterator[dict[str, Any]]:
    """Ports, files and a process of that user's."""
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as one,
        closing(socket.create_server(("127.0.0.1", 0))) as two,
        closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as three,
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([*user[1], "sleep", "1000"]) as process,
    ):
        names = {name: f"{folder}/{name}" for name in ("given", "secret", "written", "socket")}
        three.bind(names["socket"])
        for name in ("given", "secret"):
            Path(names[name]).write_text("x")
            os.chmod(names[name], 0o600)
        for path in (folder, *map(str, Path(folder).iterdir())):
            os.chown(path, user[0], -1)
        yield {"port": one.getsockname()[1], "other": two.getsockname()[1], "pid": process.pid, **names}
        process.kill()


def played(line: list[str], **keys: Any) -> Any:
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, start_new_session=True, **keys)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_a_program_can_do_and_what_it_cannot(room: dict[str, Any], user: tuple[int, list[str]]) -> None:
    files = [Path(room[name]) for name in ("given", "secret")]
    before = [(path.stat().st_mode, path.stat().st_mtime) for path in files]
    line = [sys.executable, "-I", "-S", "-c", TRIES, json.dumps(room), room["given"]]
    with ProgramCage(room["port"]).command(line) as (caged, environment):
        scratch = Path(environment["TMPDIR"])
        os.chown(scratch, user[0], -1)
        inside, capabilities, spawned, variables = played([*user[1], *caged], env=environment)
        assert (scratch / "mine.txt").read_text() == "x"
    assert {name for name, did in inside.items() if did} == OPEN
    assert [(path.stat().st_mode, path.stat().st_mtime) for path in files] == before
    assert [int(value, 16) for value in capabilities] == [0] and spawned == -1
    assert not set(variables) - {"PATH", "LANG", "HOME", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}
    assert soon(lambda: not scratch.exists())
    outside, *_ = played([*user[1], *line], cwd=Path(room["secret"]).parent)
    # fast open can be switched off in the kernel, and in a container without IPv4 to itself
    assert {name for name, did in outside.items() if not did} <= {"another port, fast open"}
    assert set(inside) == set(outside)
    assert not [path for path, seen in zip(files, before, strict=True) if path.stat().st_mode == seen[0]]


STARTS = """
import asyncio, json, multiprocessing, ssl, subprocess, sys
async def said():
    one = await asyncio.create_subprocess_exec("sh", "-c", "echo yes | cat", stdout=subprocess.PIPE)
    return (await one.communicate())[0].decode().strip()
again = [sys.executable, "-c", "import asyncio, multiprocessing, ssl, subprocess; print('yes')"]
again = subprocess.run(again, capture_output=True, text=True).stdout.strip()
print(json.dumps([asyncio.run(said()), again]))
"""


def test_python_and_a_shell_start_and_start_others() -> None:
    with ProgramCage(9).command([sys.executable, "-c", STARTS]) as (line, environment):
        assert played(line, env=environment) == ["yes", "yes"]
    with ProgramCage(9).command(["sh", "-c", "echo 1 | cat"]) as (line, environment):
        assert played(line, env=environment) == 1


def test_what_is_named_can_be_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    path = f"{tmp_path}/./secret"  # so that no word of the command is a file
    code = f"import json; print(json.dumps([open({path!r}).read()]))"
    line = [sys.executable, "-I", "-S", "-c", code]
    with ProgramCage(9).command(line) as (caged, environment), pytest.raises(AssertionError, match="Permission denied"):
        played(caged, env=environment)
    with ProgramCage(9, (str(secret),)).command(line) as (caged, environment):
        assert played(caged, env=environment) == ["x"]


OWNER = """
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from verl_ext.sandbox.program import ProgramCage
with ProgramCage(9).command(["sh", "-c", "echo $$; sleep 1000 & echo $!; wait"]) as (line, environment):
    subprocess.run(line, env=environment, start_new_session=True)
"""


def test_it_ends_with_its_owner() -> None:
    root = str(Path(__file__).parents[2])
    with subprocess.Popen([sys.executable, "-c", OWNER, root], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(owner.stdout.readline()) for _ in range(2)]
        assert all(map(alive, pids))
        owner.kill()
        assert soon(lambda: not any(map(alive, pids)))


DEEP = "for _ in range(3000): os.mkdir('d'); os.chdir('d')"
CLOSED = "os.mkdir('d', 0o300); open('d/file', 'w')"


@pytest.mark.parametrize("code", [DEEP, CLOSED])
def test_its_folder_goes_whatever_is_in_it(code: str) -> None:
    """Deeper than Python's own removal gets, and closed to its owner."""
    line = [sys.executable, "-I", "-S", "-c", f"import os\n{code}\nprint(1)"]
    with ProgramCage(9).command(line) as (caged, environment):
        assert played(caged, env=environment) == 1
        assert os.listdir(environment["TMPDIR"]) == ["d"]
    assert soon(lambda: not os.path.exists(environment["TMPDIR"]))


def test_a_full_disk_ends_it() -> None:
    with ProgramCage(9).command(["sleep", "1000"]) as (caged, environment):
        boot = next(word for word in caged if word.startswith("import json"))
        caged[caged.index(boot)] = boot.replace("program.main", "program.SPARE_MB = 1 << 40; program.main")
        done = subprocess.run(caged, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL and "MiB are left on the disk of" in done.stderr


def test_a_program_that_is_not_there_and_a_kernel_without_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with ProgramCage(9).command(["/no/such/program"]) as (caged, environment):
        done = subprocess.run(caged, env=environment, capture_output=True, text=True)
    assert done.returncode == 126 and "FileNotFoundError" in done.stderr
    monkeypatch.setattr(cage, "landlock_version", lambda: 3)
    with pytest.raises(cage.CageError, match=r"Linux 6\.7, Landlock 4.*Landlock 3"):
        program.check()


BOMB = """
import os, signal, time
pids = []
try:
    while len(pids) < 1000:
        if (pid := os.fork()) == 0: time.sleep(600)
        pids.append(pid)
except BlockingIOError:
    print(len(pids))
for pid in pids: os.kill(pid, signal.SIGKILL)
"""


@pytest.mark.parametrize("cgroup", [True, False])
def test_a_fork_bomb_ends_soon(cgroup: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begins: list[str] = []
    if not cgroup:
        monkeypatch.setattr(shell, "_places", list)
        _, begins = functions.ordinary_user()  # the kernel does not count root's
    elif not shell.has_cgroup():
        return  # the other case is what this machine has
    with ProgramCage(9).command([sys.executable, "-I", "-S", "-c", BOMB]) as (caged, environment):
        os.chmod(environment["TMPDIR"], 0o777)
        assert 50 < played([*begins, *caged], env=environment) <= program.PROCESSES


def test_an_environment_is_found_by_its_interpreter(tmp_path: Path) -> None:
    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    assert str(folder / "lib") not in environment_of(str(folder / "bin" / "python"))
    (folder / "pyvenv.cfg").touch()
    assert {str(folder / "lib"), str(folder / "bin")} <= set(environment_of(str(folder / "bin" / "python")))
    assert environment_of(str(tmp_path / "program")) == []


def test_programs_of_the_user_open_no_other_folder_of_the_user(tmp_path: Path) -> None:
    """``~/.local`` has programs, what pip installs for the user, and in ``share`` keyrings and tokens."""
    for name in ("bin", "lib/python3.11/site-packages", "lib/other", "share/keyrings"):
        (tmp_path / name).mkdir(parents=True)
    needed = [str(tmp_path / "bin"), str(tmp_path / "lib" / "python3.11")]
    assert set(environment_of(str(tmp_path / "bin" / "agent"))) == set(needed)
    (tmp_path / "conda-meta").mkdir()
    assert str(tmp_path / "share") in environment_of(str(tmp_path / "bin" / "agent"))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_calls_of_programs_have_numbers_of_their_own(machine: str) -> None:
    calls = cage.allowed_calls(machine, "program")
    some = {"x86_64": {"connect": 42, "execve": 59}, "aarch64": {"connect": 203, "execve": 221}}
    assert calls.items() >= some[machine].items() and len(set(calls.values())) == len(calls)
    forbidden = "clone clone3 socket sendto sendmsg sendmmsg bind listen ptrace setsid setpgid unshare setns mount"
    assert not set(calls) & set(forbidden.split())
    assert len(cage.seccomp_program(machine, "program")) % 8 == 0
