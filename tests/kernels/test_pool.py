# SPDX-License-Identifier: Apache-2.0
"""The evaluation pool on a real Ray: duplicates, the cache, workers that are killed, and an evaluation without one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

from verl_ext.rollout.kernels.options import KernelOptions
from verl_ext.rollout.kernels.pool import Pool, Verdicts
from verl_ext.rollout.kernels.seat import Infrastructure
from verl_ext.rollout.kernels.tasks import Task

TASK = Task.of("mul add relu")
OPTIONS = KernelOptions(pairs=3, max_pairs=3, looks=10, workers=1)


@pytest.fixture(scope="module")
def pool(cluster: None) -> Pool:
    return Pool(OPTIONS, "required")


async def several(pool: Pool, texts: list[str]) -> list[object]:
    return list(await asyncio.gather(*[pool.evaluate(TASK, text) for text in texts], return_exceptions=True))


def figures(pool: Pool) -> dict[str, int]:
    return ray.get(pool.broker.figures.remote())


@pytest.mark.seconds
def test_one_program_is_judged_once(pool: Pool) -> None:
    first = asyncio.run(several(pool, ["krve mul add relu", " krve  mul add relu ", "krve mul add relu", "k nothing"]))
    assert [one.status for one in first] == ["right", "right", "right", "no_code"]  # type: ignore[attr-defined]
    assert first[0] == first[1] == first[2]
    (again,) = asyncio.run(several(pool, ["krve mul add relu"]))
    assert again == first[0]
    said = figures(pool)
    assert said["judged"] == 1 and said["coalesced"] == 2 and said["cached"] == 1 and said["workers"] == 1


def test_another_pool_of_the_same_options_is_the_same(pool: Pool) -> None:
    other = Pool(OPTIONS, "required")
    assert figures(other) == figures(pool)


def test_runs_that_share_a_folder_share_verdicts(tmp_path: Path) -> None:
    one, other, alone = Verdicts(str(tmp_path / "a")), Verdicts(str(tmp_path / "a")), Verdicts(None)
    one.add("x", {"status": "right"})
    alone.add("x", {"status": "wrong"})
    assert other.get("x") == one.get("x") == {"status": "right"} and alone.get("x") == {"status": "wrong"}
    (file,) = (tmp_path / "a").iterdir()
    with file.open("ab") as half:  # by a run that was killed while it wrote
        half.write(b'{"key": "z", "ver')
    other.add("y", {"status": "wrong"})
    assert one.get("z") is None and one.get("y") == {"status": "wrong"}
    later = Verdicts(str(tmp_path / "a"))
    assert later.get("x") == {"status": "right"} and later.get("y") == {"status": "wrong"} and later.get("z") is None


def children(pid: int) -> dict[int, str]:
    """Pids and commands of a process's children, those that end meanwhile left out."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for one in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    found[one] = Path(f"/proc/{one}/cmdline").read_text().replace("\0", " ")
    return found


def zygote(worker: int) -> int:
    (pid,) = [pid for pid, command in children(worker).items() if "-s -c" in command]
    return pid


def compiles(worker: int, _: set[int]) -> bool:
    return any("gcc" in one for one in children(worker).values())


def measures(worker: int, before: set[int]) -> bool:
    """Whether a player that was not there before is on the judge's core, where each batch puts it that is timed."""
    for player in set(children(zygote(worker))) - before:
        with contextlib.suppress(ProcessLookupError):
            if len(os.sched_getaffinity(player)) == 1:
                return True
    return False


#: Whom to kill, and a program that is not known yet.
VICTIMS = {
    "worker, idle": "krve mul;krve add relu",
    "worker, compiling": "krse mul add relu",
    "worker, measuring": "krve mul add;krve relu",
    "zygote, idle": "krse mul;krve add relu",
    "zygote, measuring": "krve mul;krse add relu",
}
#: Further programs, for a moment that was over before it was seen.
SPARE = (f"{one} mul;{two} add;{three} relu" for one, two, three in itertools.product(("krve", "krse"), repeat=3))


@pytest.mark.slow
@pytest.mark.parametrize("moment", VICTIMS)
def test_what_is_killed_costs_nobody_a_verdict_and_comes_back(pool: Pool, moment: str) -> None:
    whom, _, when = moment.partition(", ")

    async def killed(text: str) -> Any:
        """The verdict, and how many there were before; None if the moment was missed."""
        (worker,) = await pool.broker.processes.remote()
        before = figures(pool).get("judged", 0)
        victim = worker if whom == "worker" else zygote(worker)
        if when == "idle":
            os.kill(victim, signal.SIGKILL)
            return await pool.evaluate(TASK, text), before
        has_come = {"compiling": compiles, "measuring": measures}[when]
        players = set(children(zygote(worker)))
        waits = asyncio.create_task(pool.evaluate(TASK, text))
        while not waits.done():
            await asyncio.sleep(0)
            if has_come(worker, players):
                os.kill(victim, signal.SIGKILL)
                return await waits, before
        return None

    for text in (VICTIMS[moment], *itertools.islice(SPARE, 2)):
        if found := asyncio.run(killed(text)):
            break
    assert found, "the moment was missed three times"
    verdict, before = found
    assert verdict.status == "right"
    said = figures(pool)
    assert said["workers"] == 1 and said["judged"] == before + 1 and "infra" not in said
    (later,) = asyncio.run(several(pool, [text.replace("r", "c", 1)]))
    assert later.status == "right"  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_lost_broker_is_made_again(pool: Pool) -> None:
    async def killed() -> object:
        for text in ("krse mul;krse add relu", *itertools.islice(SPARE, 2)):
            waits = asyncio.create_task(pool.evaluate(TASK, text))
            while not waits.done():
                await asyncio.sleep(0)
                if figures(pool)["waiting"]:
                    ray.kill(pool.broker)
                    return await waits
        raise AssertionError("it was done before it was seen, three times")

    assert asyncio.run(killed()).status == "right"  # type: ignore[attr-defined]
    ray.kill(pool.broker)
    (verdict,) = asyncio.run(several(pool, ["krve mul add relu"]))
    assert verdict.status == "right"  # type: ignore[attr-defined]


@pytest.mark.slow
def test_without_a_judge_there_is_no_verdict(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cage that does not exist stands for a machine that cannot judge: every worker fails, and leaves."""
    broken = Pool(KernelOptions(pairs=3, max_pairs=3, workers=1), "no such cage")
    (said,) = asyncio.run(several(broken, ["krve mul add relu"]))
    assert isinstance(said, Infrastructure)
    (later,) = asyncio.run(several(broken, ["krve mul;t add relu"]))
    assert isinstance(later, Infrastructure) and "no worker" in str(later)
    said = figures(broken)
    assert said["infra"] == 2 and said["workers"] == 0 and "judged" not in said
