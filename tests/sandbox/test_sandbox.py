# SPDX-License-Identifier: Apache-2.0
"""Calls in the sandbox: values, reasons, limits, and that nothing outlives or hurts anything."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import functools
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import functions
import pytest
from functions import alive, holds, soon

from verl_ext.sandbox import SETTINGS_VARIABLE, CageError, Limits, Sandbox, SandboxError, cage, check, pool, shared

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)  # the zygote takes it over


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(Limits(workers=4, memory_mb=256, output_kb=64, input_kb=64, patience=3.0), "required") as sandbox:
        yield sandbox


def reason(sandbox: Sandbox, name: str, *arguments: Any, timeout_s: float = 60.0) -> str:
    with pytest.raises(SandboxError) as caught:
        sandbox.run(f"functions:{name}", *arguments, timeout_s=timeout_s)
    return str(caught.value)


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    try:
        children = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []
    return [one for child in children for one in (child, *below(child))]


def test_values(sandbox: Sandbox) -> None:
    assert sandbox.run("functions:add", 1, 2, timeout_s=60) == 3
    assert sandbox.run("functions:give", "text", timeout_s=60) == "ä\u2028\ud800\0"
    assert sandbox.run("functions:give", "large", timeout_s=60) == 10**400


def test_every_call_has_a_process_of_its_own(sandbox: Sandbox) -> None:
    (first, zygote), (second, same) = (sandbox.run("functions:pids", timeout_s=60) for _ in range(2))
    assert len({first, second, zygote, os.getpid()}) == 4 and zygote == same
    assert not alive(first) and alive(zygote)
    assert [sandbox.run("functions:keep", n, timeout_s=60) for n in (1, 2)] == [[1], [2]]


@pytest.mark.parametrize(
    ("name", "argument", "expected"),
    [
        ("give", "nan", "output: ValueError: Out of range float"),
        ("give", "set", "output: TypeError: Object of type set"),
        ("give", "object", "output: TypeError"),
        ("give", "long", "output: 1048579 bytes, more than 65536"),
        ("fail", "no such thing", "error: LookupError: no such thing (functions.py:"),
        ("leave", "exit", "crashed: the process ended with code 0 and without a value"),
        ("leave", "code", "crashed: the process ended with code 3"),
        ("leave", "system_exit", "error: SystemExit: 0"),
        ("leave", "segfault", "crashed: the process was ended by SIGSEGV"),
        ("leave", "abort", "crashed: the process was ended by SIG"),
        ("leave", "recursion", "error: RecursionError"),
        ("memory", 400, "memory: "),
        ("add", "x" * (65 << 10), "input: 66564 bytes of arguments, more than verl_ext.sandbox.input_kb=64"),
        ("nothing", 1, "refused: AttributeError: module 'functions' has no attribute 'nothing'"),
    ],
)
def test_reasons(sandbox: Sandbox, name: str, argument: Any, expected: str) -> None:
    assert reason(sandbox, name, argument).startswith(expected)
    assert sandbox.run("functions:add", 1, 2, timeout_s=60) == 3


def test_too_deep_a_value_is_no_value(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="output: "):
        sandbox.run("functions:nested", timeout_s=60)


def test_arguments_that_are_no_json_are_refused(sandbox: Sandbox) -> None:
    assert reason(sandbox, "add", object()).startswith("refused: arguments of functions:add")
    with pytest.raises(ValueError, match="timeout_s=0"):
        sandbox.submit("functions:add", timeout_s=0)


@pytest.mark.seconds
def test_time_is_that_of_the_processor_and_patience_that_of_the_clock(sandbox: Sandbox) -> None:
    with Sandbox(Limits(patience=100.0), "required") as patient:
        assert patient.run("functions:sleep", 0.6, timeout_s=0.5) == 0.6
    assert reason(sandbox, "sleep", 60.0, timeout_s=0.2).startswith("timeout: no value after 0.2 s")
    assert reason(sandbox, "burn", 60.0, timeout_s=0.2).startswith("timeout: no value after 0.2 s")


@pytest.mark.seconds
def test_waiting_for_a_processor_is_not_on_the_clock() -> None:
    """Eight calls share one: each takes 2.4 s on a clock that it may use for 1 s."""
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})  # of this thread, and of the zygote, which the sandbox's thread starts
    try:
        with Sandbox(Limits(workers=8, patience=1.0), "required") as sandbox:
            calls = [sandbox.submit("functions:burn", 0.3, timeout_s=1.0) for _ in range(8)]
            assert [call.result() for call in calls] == [0.3] * 8
            assert max(call.seconds for call in calls) > 1.0
    finally:
        os.sched_setaffinity(0, processors)


@pytest.mark.seconds
def test_slow_calls_hold_their_own_place_only(sandbox: Sandbox) -> None:
    slow = [sandbox.submit("functions:burn", 600.0, timeout_s=600.0) for _ in range(3)]
    assert [sandbox.run("functions:add", n, timeout_s=60) for n in range(5)] == list(range(5))
    assert not any(one.done() for one in slow) and all(one.cancel() for one in slow)
    late = [sandbox.submit("functions:burn", 60.0, timeout_s=0.5) for _ in range(3)]
    assert all(isinstance(one.exception(), SandboxError) for one in late)


@pytest.mark.seconds
def test_more_calls_than_places_wait_without_their_clock(sandbox: Sandbox) -> None:
    """Four places: the last of 120 begin after 3 s or more, when 0.8 s with a patience of 3 would be over."""
    slow = [sandbox.submit("functions:sleep", 0.1, timeout_s=0.8) for _ in range(120)]
    assert [one.result() for one in slow] == [0.1] * 120


def test_from_an_event_loop_and_cancelled(sandbox: Sandbox) -> None:
    async def play() -> list[int]:
        task = asyncio.create_task(sandbox.call("functions:sleep", 600.0, timeout_s=600.0))
        values = await asyncio.gather(*(sandbox.call("functions:add", n, timeout_s=60) for n in range(20)))
        (zygote,) = {(await sandbox.call("functions:pids", timeout_s=60))[1]}
        children = Path(f"/proc/{zygote}/task/{zygote}/children")
        assert soon(lambda: len(children.read_text().split()) == 1)
        task.cancel()
        await asyncio.sleep(0.01)
        assert soon(lambda: children.read_text() == "")
        return values

    assert asyncio.run(play()) == list(range(20))
    assert asyncio.run(play()) == list(range(20))  # another loop


def test_from_many_threads(sandbox: Sandbox) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        values = list(threads.map(lambda n: sandbox.run("functions:add", n, timeout_s=60), range(64)))
    assert values == list(range(64))


def test_from_a_fork(sandbox: Sandbox) -> None:
    sandbox.run("functions:add", timeout_s=60)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(sandbox.run("functions:add", 1, 2, timeout_s=60)).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"3"
    assert sandbox.run("functions:add", 2, 2, timeout_s=60) == 4


def test_warm_fills_a_cache_once() -> None:
    with Sandbox(cage="required") as sandbox:
        for _ in range(3):
            assert sandbox.run("functions:warmed", "a", timeout_s=60, warm=("functions:number_of", "a")) == [0, 1]
        with pytest.raises(SandboxError, match="refused: LookupError: no"):
            sandbox.run("functions:add", timeout_s=60, warm=("functions:fail", "no"))


def running(sandbox: Sandbox, name: str, *arguments: Any) -> tuple[int, int, Any]:
    """The zygote, a call of it that has begun, and its future."""
    _, zygote = sandbox.run("functions:pids", timeout_s=60)
    call = sandbox.submit(f"functions:{name}", *arguments, timeout_s=600)
    assert soon(lambda: len(below(zygote)) == 1)
    return zygote, below(zygote)[0], call


def test_what_a_call_is_given_is_in_no_memory_that_others_are_forked_from() -> None:
    given = uuid.uuid4().hex
    with Sandbox(cage="required") as sandbox:
        zygote, worker, _ = running(sandbox, "sleep_with", given)
        assert soon(lambda: holds(worker, given))
        assert not holds(zygote, given)


def test_a_signal_without_a_name_ends_its_own_call_only(tmp_path: Path) -> None:
    with Sandbox(cage="required", scratch=str(tmp_path)) as sandbox:
        zygote, _, honest = running(sandbox, "sleep", 1.0)
        assert reason(sandbox, "signal_of_a_child") == "crashed: the process was ended by signal 35"
        assert honest.result() == 1.0 and sandbox.run("functions:pids", timeout_s=60)[1] == zygote


def test_a_zygote_without_descriptors_refuses_one_call_and_leaks_none() -> None:
    with Sandbox(cage="required") as sandbox:
        zygote, _, honest = running(sandbox, "sleep", 1.0)
        before = len(os.listdir(f"/proc/{zygote}/fd"))
        with pytest.raises(SandboxError, match="refused: OSError: .* Too many open files"):
            sandbox.run("functions:add", timeout_s=60, warm=("functions:take_a_descriptor",))
        assert soon(lambda: len(os.listdir(f"/proc/{zygote}/fd")) == before)
        assert honest.result() == 1.0 and sandbox.run("functions:pids", timeout_s=60)[1] == zygote


def test_a_zygote_may_open_more_files_than_its_calls(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
    try:
        for scratch, limit in (("", 64), (str(tmp_path), min(soft, 1000))):
            with Sandbox(cage="required", scratch=scratch) as sandbox:
                assert sandbox.run("functions:files", timeout_s=60) == [limit, limit]
                zygote = sandbox.run("functions:pids", timeout_s=60)[1]
                assert resource.prlimit(zygote, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_where_memory_is_short_the_kernel_ends_a_call_first() -> None:
    with Sandbox(cage="required") as sandbox:
        zygote, worker, _ = running(sandbox, "sleep", 600.0)
        assert soon(lambda: Path(f"/proc/{worker}/oom_score_adj").read_text() == "1000\n")
        ours, its = (Path(f"/proc/{one}/oom_score_adj").read_text() for one in ("self", zygote))
        assert its == ours


def test_a_zygote_that_is_killed_is_replaced_and_its_calls_begin_again() -> None:
    with Sandbox(cage="required") as sandbox:
        _, zygote = sandbox.run("functions:pids", timeout_s=60)
        running = [sandbox.submit("functions:sleep_below", zygote, timeout_s=600) for _ in range(4)]
        children = Path(f"/proc/{zygote}/task/{zygote}/children")
        assert soon(lambda: len(children.read_text().split()) == 4)
        workers = list(map(int, children.read_text().split()))
        os.kill(zygote, signal.SIGKILL)
        assert [one.result() for one in running] == [True] * 4
        assert soon(lambda: not any(map(alive, workers)))


def test_a_call_is_not_given_to_a_third_zygote() -> None:
    with Sandbox(cage="required") as sandbox:
        call = sandbox.submit("functions:sleep", 600.0, timeout_s=600.0)
        seen: set[int] = set()
        while not call.done():
            zygote = sandbox._zygote
            if zygote is not None and zygote.process.pid not in seen and below(zygote.process.pid):
                seen.add(zygote.process.pid)
                zygote.process.kill()
            time.sleep(0.02)
        assert len(seen) == 2
        with pytest.raises(SandboxError, match="refused: the zygote ended"):
            call.result()


def test_everything_ends_with_the_owner() -> None:
    code = (
        f"import sys; sys.path.insert(0, {HERE!r})\n"
        "from verl_ext.sandbox import Sandbox\n"
        "sandbox = Sandbox(cage=sys.argv[1])\n"
        "import os, signal, time\n"
        "from test_sandbox import below\n"
        "sandbox.run('functions:pids', timeout_s=60)\n"
        "zygote = sandbox._zygote.process.pid\n"
        "before = below(zygote)\n"  # with bubblewrap the processes between
        "sandbox.submit('functions:sleep', 600.0, timeout_s=600.0)\n"
        "while len(below(zygote)) <= len(before): time.sleep(0.02)\n"
        "print(zygote, *below(zygote), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for level in ("required", "auto"):
        done = subprocess.run([sys.executable, "-c", code, level], stdout=subprocess.PIPE, text=True, timeout=600)
        numbers = list(map(int, done.stdout.split()))
        assert len(numbers) >= 2
        assert soon(lambda numbers=numbers: not any(map(alive, numbers)))  # type: ignore[misc]


def test_closed() -> None:
    sandbox = Sandbox(cage="required")
    process = sandbox.run("functions:pids", timeout_s=60)[1]
    waiting = sandbox.submit("functions:sleep", 600.0, timeout_s=600.0)
    sandbox.close()
    with pytest.raises(SandboxError, match="refused: the sandbox was closed"):
        waiting.result(timeout=120)
    with pytest.raises(SandboxError, match="refused: the sandbox is closed"):
        sandbox.submit("functions:add", timeout_s=60)
    assert soon(lambda: not alive(process) and sandbox._thread not in threading.enumerate())


def opened() -> Counter[str]:
    """What this process has open, but for the folder that is read here."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return Counter(found)


def settled() -> Counter[str]:
    """The same when what earlier tests had open is closed: garbage is collected, and threads are done with it."""
    gc.collect()
    before, now = Counter(), opened()
    while now != before:
        time.sleep(0.2)
        before, now = now, opened()
    return now


def test_nothing_is_left() -> None:
    before = settled()
    for level in ("required", "auto"):
        with Sandbox(cage=level) as sandbox:
            assert sandbox.run("functions:add", 1, timeout_s=60) == 1
            zygote = sandbox._zygote
            assert zygote is not None
            folders = list(zygote.cgroup.folders) if zygote.cgroup else []
            assert bool(folders) == ("cgroup" in sandbox.layers) and all(folder.exists() for folder in folders)
        # What an earlier test has left may be closed meanwhile.
        assert soon(lambda: not opened() - before), opened() - before
        assert not any(folder.exists() for folder in folders)


def test_a_machine_without_landlock_or_seccomp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without = (("landlock_version", lambda: 0, "Landlock"), ("has_seccomp", lambda: False, "seccomp filters"))
    for name, value, missing in without:
        check.cache_clear()
        with monkeypatch.context() as patched:
            patched.setattr(pool, name, value)
            for level in ("required", "auto"):
                with pytest.raises(
                    CageError, match=rf"cage={level} needs {missing}.*\+\+verl_ext.sandbox.cage=rlimits"
                ):
                    Sandbox(cage=level)
            with Sandbox(cage="rlimits") as sandbox:
                assert sandbox.run("functions:add", 1, timeout_s=60) == 1
    check.cache_clear()


def test_a_kernel_without_pidfd_open_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    check.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", missing)
        for level in cage.LEVELS:
            with pytest.raises(CageError, match=r"pidfd_open \(Linux 5\.3\): Function not implemented"):
                Sandbox(cage=level)
    check.cache_clear()


def test_a_layer_that_does_not_close_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork tries what must fail; with a filter that lets everything through, and so on, it gives up."""
    reader, writer = os.pipe()
    everything = {"seccomp_program": lambda *_: b"\x06\0\0\0\0\0\xff\x7f", "library_paths": lambda: ["/"]}
    for name, value in everything.items():
        with monkeypatch.context() as patched:
            patched.setattr(cage, name, value)
            made = cage.Cage("required", Limits())
            if (child := os.fork()) == 0:
                try:
                    made.enter(writer, 1.0)
                    os.write(writer, b"in")
                except CageError as error:
                    os.write(writer, str(error).encode())
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
        assert b"is in force and" in os.read(reader, 1000)


def test_bad_values_are_named() -> None:
    with pytest.raises(ValueError, match="verl_ext.sandbox.cage is 'strict'; choose one of auto, required, rlimits"):
        Sandbox(cage="strict")
    with pytest.raises(ValueError, match="memory_mb=0.*at least 1"):
        Limits(memory_mb=0)


def test_shared_takes_the_cage_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)
    assert shared() is shared() and shared().cage == "required"
    monkeypatch.setenv(SETTINGS_VARIABLE, json.dumps({"cage": "rlimits", "memory_mb": 512}))
    assert shared().cage == "rlimits" and shared().limits.memory_mb == 512


def test_shared_is_made_once_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def slowly(*given: Any) -> Any:
        time.sleep(0.1)
        made.append(given)
        return len(made)

    monkeypatch.setattr(pool, "_shared", functools.cache(slowly))
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: shared(), range(8))) == {1}
    assert shared("verdicts") == 2  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_call_numbers_are_those_of_the_kernel_and_none_is_dangerous(machine: str) -> None:
    calls = cage.allowed_calls(machine)
    some = {"x86_64": {"read": 0, "openat": 257, "futex": 202}, "aarch64": {"read": 63, "openat": 56, "futex": 98}}
    assert calls.items() >= some[machine].items() and len(set(calls.values())) == len(calls)
    forbidden = "fork vfork clone clone3 execve execveat kill tgkill ptrace socket connect unlinkat renameat prctl"
    assert not set(calls) & set(forbidden.split())
    assert len(cage.seccomp_program(machine)) % 8 == 0


ZYGOTE_SEES = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from verl_ext.sandbox import Sandbox
from verl_ext.lab.sandbox.escapes import ATTEMPTS, MEMORY_MB, Room, escaped
from verl_ext.sandbox import Limits
with Room() as room, Sandbox(Limits(memory_mb=MEMORY_MB), sys.argv[2]) as sandbox:
    out = {name: how for name in ATTEMPTS if (how := escaped(sandbox, name, room))}
    print(json.dumps([os.getuid(), len(ATTEMPTS), out]))
"""


@pytest.mark.seconds
@pytest.mark.parametrize("level", ["required", "auto"])
def test_an_ordinary_user_is_held_too(level: str) -> None:
    user, begins = functions.ordinary_user()
    command = [*begins, sys.executable, "-c", ZYGOTE_SEES, HERE, level]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd="/")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [user, 79, {}]
