# SPDX-License-Identifier: Apache-2.0
"""Code that tries to get out: none does, and the same code without a cage does what it is after."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from verl_ext.lab.sandbox.escapes import ATTEMPTS, MEMORY_MB, Room, escaped, how
from verl_ext.sandbox import Limits, Sandbox, SandboxError

TWINS = [name for name, attempt in ATTEMPTS.items() if attempt.twin]
KERNEL = [name for name in ATTEMPTS if name not in TWINS]


_ALONE = """
import json, pickle, sys
from verl_ext.lab.sandbox import escapes
got = escapes.attempt(sys.argv[1], json.loads(sys.argv[2]))
if sys.argv[1] == "return_a_pickle": got = pickle.loads(pickle.dumps(got))
print(json.dumps(got))
print(escapes.honest(41))
"""


def alone(name: str, room: Room) -> str:
    """Make an attempt in an ordinary process, whose result is what it prints: as `escaped`."""
    given, kept = socket.socketpair()
    with given, kept:
        done = subprocess.run(
            [sys.executable, "-c", _ALONE, name, json.dumps(room.description)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=600,
            pass_fds=(given.fileno(),),
        )
    lines = done.stdout.splitlines()
    got = next((line for line in lines[:-1] if line not in ("null", "false", "0")), "")
    right = lines[-1:] in ([], ["42"])
    return how(got, room, right, 0.05 if got or not right else 60.0)


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    with Room() as room:
        yield room


@pytest.fixture(scope="module", params=["required", "auto", "rlimits"])
def sandbox(request: pytest.FixtureRequest, room: Room) -> Iterator[Sandbox]:
    with Sandbox(Limits(memory_mb=MEMORY_MB), request.param) as sandbox:
        yield sandbox


def test_there_are_enough() -> None:
    assert len(ATTEMPTS) >= 75 and len(TWINS) >= 65


@pytest.mark.seconds
@pytest.mark.parametrize("name", ATTEMPTS)
def test_nothing_gets_out(sandbox: Sandbox, room: Room, name: str) -> None:
    assert escaped(sandbox, name, room) == ""


@pytest.mark.seconds
@pytest.mark.parametrize("name", TWINS)
def test_it_would_without_a_cage(room: Room, name: str) -> None:
    assert alone(name, room) != ""


@pytest.mark.parametrize("name", KERNEL)
def test_what_cannot_be_shown_is_denied_by_name(sandbox: Sandbox, room: Room, name: str) -> None:
    with pytest.raises(SandboxError, match="error: PermissionError") as caught:
        sandbox.run("verl_ext.lab.sandbox.escapes:attempt", name, room.description, timeout_s=60.0)
    assert caught.value.reason == "error"


READ = {"read_a_secret", "read_accounts", "list_a_folder", "read_through_proc", "read_through_a_given_symlink"}
# Of a process of the same user, unless that has capabilities, as root's has.
READ_OF_PROCESSES = {"read_its_memory", "read_its_environment", "read_the_parents_environment"}
HELD_BY_LIMITS = """
append_to_a_file write_a_temporary_file overwrite_the_verifier fill_a_memory_file leave_a_child leave_a_daemon
take_memory take_memory_in_small_pieces take_descriptors go_on_after_the_time sleep_past_the_time
change_root mount load_bpf set_the_clock regain_capabilities read_my_environment read_my_first_environment
find_an_open_socket print_the_expected_result claim_refusal answer_for_others return_too_much return_a_pickle
change_what_comes_after
"""


@pytest.mark.seconds
@pytest.mark.parametrize("gone", [("Landlock",), ("Landlock", "seccomp")])
def test_at_rlimits_the_layers_that_are_there_hold_their_part(room: Room, gone: tuple[str, ...]) -> None:
    with Sandbox(Limits(memory_mb=MEMORY_MB), "rlimits") as sandbox:
        sandbox.run("functions:add", timeout_s=60.0, warm=("functions:take_away", *gone))
        if gone == ("Landlock",):
            out = {name for name in ATTEMPTS if escaped(sandbox, name, room)}
            assert READ <= out <= READ | READ_OF_PROCESSES | {"list_processes"}
        else:
            assert [name for name in HELD_BY_LIMITS.split() if escaped(sandbox, name, room)] == []
            assert escaped(sandbox, "read_a_secret", room) != "" and escaped(sandbox, "connect", room) != ""
