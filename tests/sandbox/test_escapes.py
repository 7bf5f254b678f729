# SPDX-License-Identifier: Apache-2.0
"""Code that tries to get out: none does, and the same code without a cage does what it is after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from verl_ext.sandbox import Limits, Sandbox, SandboxError
from verl_ext.sandbox.escapes import ATTEMPTS, MEMORY_MB, TIMEOUT_S, Room, alone, escaped

TWINS = [name for name, attempt in ATTEMPTS.items() if attempt.twin]
KERNEL = [name for name in ATTEMPTS if name not in TWINS]


@pytest.fixture(scope="module")
def room() -> Iterator[Room]:
    with Room() as room:
        yield room


@pytest.fixture(scope="module", params=["required", "auto"])
def sandbox(request: pytest.FixtureRequest, room: Room) -> Iterator[Sandbox]:
    with Sandbox(Limits(memory_mb=MEMORY_MB), request.param) as sandbox:
        yield sandbox


def test_there_are_enough() -> None:
    assert len(ATTEMPTS) >= 75 and len(TWINS) >= 65


@pytest.mark.parametrize("name", ATTEMPTS)
def test_nothing_gets_out(sandbox: Sandbox, room: Room, name: str) -> None:
    assert escaped(sandbox, name, room) == ""


@pytest.mark.parametrize("name", TWINS)
def test_it_would_without_a_cage(room: Room, name: str) -> None:
    assert alone(name, room) != ""


@pytest.mark.parametrize("name", KERNEL)
def test_what_cannot_be_shown_is_denied_by_name(sandbox: Sandbox, room: Room, name: str) -> None:
    with pytest.raises(SandboxError, match="error: PermissionError") as caught:
        sandbox.run("verl_ext.sandbox.escapes:attempt", name, room.description, timeout_s=TIMEOUT_S)
    assert caught.value.reason == "error"


def test_rlimits_alone_hold_what_they_are_for(room: Room) -> None:
    with Sandbox(Limits(memory_mb=MEMORY_MB), "rlimits") as sandbox:
        for name in ("take_memory", "take_descriptors", "go_on_after_the_time", "sleep_past_the_time", "leave_a_child"):
            assert escaped(sandbox, name, room) == ""
        for name in ("leave_a_daemon", "read_my_environment", "answer_for_others", "change_what_comes_after"):
            assert escaped(sandbox, name, room) == ""
        assert escaped(sandbox, "read_a_secret", room) != ""
