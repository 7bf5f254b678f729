# SPDX-License-Identifier: Apache-2.0
"""Environment processes that do harm, and the bounds on all of them together."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_environments import ZOO, gone, play, session, walk

from verl_ext.rollout.environments import EnvironmentFault, runner


@pytest.fixture(autouse=True, scope="module")
def _no_host_is_left() -> Iterator[None]:
    yield
    runner.end_all()


HARMS = {
    "flood": "environment_garbage",
    "mumble": "environment_garbage",
    "talk_twice": "environment_garbage",
    "forge": "environment_garbage",
    "nest": "environment_garbage",
    "surrogate": "environment_garbage",
    "kill": "environment_died",
}


@pytest.mark.parametrize("how", HARMS)
def test_harm_ends_its_own_trajectory_by_name(how: str) -> None:
    async def both() -> list[Any]:
        stories = [play(session("Vandal", how=how), 0, lambda seen: "forward"), play(session("Corridor"), 0, go)]
        return await asyncio.gather(*stories, return_exceptions=True)

    def go(seen: Any) -> str:
        return "forward"

    harmed, sound = asyncio.run(both())
    assert isinstance(harmed, EnvironmentFault) and harmed.reason == HARMS[how], harmed
    assert len(sound) == 4 and sound[-1].reward == 1.0


def test_what_it_prints_is_bounded_and_does_not_stop_it(capfd: pytest.CaptureFixture[str]) -> None:
    runner.end_all()  # a host whose standard error is the one of this test
    assert len(walk("Vandal", how="chat")) == 4  # twice 12 MB
    runner.end_all()
    printed = capfd.readouterr().err
    assert printed.startswith("noise ") and len(printed) < 70_000 and "is left out" in printed


def test_what_it_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.end_all()  # a host with this environment
    monkeypatch.setenv("VERL_EXT_TEST_PIDS", str(tmp_path / "pid"))
    with pytest.raises(EnvironmentFault, match="environment_died"):
        walk("Vandal", how="spawn")
    assert gone(int((tmp_path / "pid").read_text()))


def children() -> int:
    """Environment processes of all hosts that live at one time: those before it that are there after it, too."""
    hosts = {str(host.process.pid) for host in runner._hosts.values() if host.process is not None}

    def found() -> set[str]:
        pids = set()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            state, parent, memory = fields[0], fields[1], fields[20]
            # One that ends gives its memory back, then closes its connection, and is a zombie only after that.
            if parent in hosts and state != "Z" and memory != "0":
                pids.add(path.name)
        return pids

    return len(found() & found())


def test_one_bound_over_all_settings_and_the_least_recently_used_goes() -> None:
    async def crowd() -> tuple[int, list[int]]:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, children())
                await asyncio.sleep(0.005)

        watcher = asyncio.create_task(watch())
        await asyncio.gather(
            *[
                play(session(name, processes=2, length=length), 0, lambda seen: "forward")
                for length in range(3, 8)
                for name in ("Reused", "Corridor", "Reused")
            ]
        )
        lengths = (3, 4, 3, 5, 3, 4)  # 4 is the least recently used when 5 comes
        pids = [
            (await play(session("Reused", processes=2, length=n), 0, lambda seen: "forward"))[1].info["pid"]
            for n in lengths
        ]
        watcher.cancel()
        return most, pids

    most, pids = asyncio.run(crowd())
    assert 1 <= most <= 2
    assert pids[0] == pids[2] == pids[4] and pids[5] != pids[1]


def test_it_works_with_many_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    runner.end_all()
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert len(walk("Corridor")) == 4
        control = runner._hosts[f"{ZOO}:Corridor"].control
        assert control is not None and control.fileno() >= 1024
    finally:
        for descriptor in held:
            os.close(descriptor)
        runner.end_all()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
