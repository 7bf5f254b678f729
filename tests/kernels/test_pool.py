# SPDX-License-Identifier: Apache-2.0
"""The evaluation pool on a real Ray: duplicates, the cache, workers that are killed, and an evaluation without one."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import ray

from verl_ext.kernels.options import KernelOptions
from verl_ext.kernels.pool import Pool, Verdicts
from verl_ext.kernels.seat import Infrastructure
from verl_ext.kernels.tasks import Task

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
    """Pids and commands of a process's children."""
    found = [
        int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()
    ]
    return {one: Path(f"/proc/{one}/cmdline").read_text().replace("\0", " ") for one in found}


def zygote(worker: int) -> int:
    (pid,) = [pid for pid, command in children(worker).items() if "-s -c" in command]
    return pid


#: Whom to kill, given the worker (0: the moment has not come), and a program that is not known yet.
VICTIMS = {
    "worker, idle": (lambda worker: worker, "krve mul;krve add relu"),
    "worker, compiling": (
        lambda worker: worker * any("gcc" in one for one in children(worker).values()),
        "krse mul add relu",
    ),
    "worker, measuring": (lambda worker: worker * (len(children(zygote(worker))) > 1), "krve mul add;krve relu"),
    "zygote, idle": (lambda worker: zygote(worker), "krse mul;krve add relu"),
    "zygote, measuring": (
        lambda worker: zygote(worker) * (len(children(zygote(worker))) > 1),
        "krve mul;krse add relu",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", VICTIMS)
def test_what_is_killed_costs_nobody_a_verdict_and_comes_back(pool: Pool, moment: str) -> None:
    victim, text = VICTIMS[moment]

    async def killed() -> object:
        (worker,) = await pool.broker.processes.remote()
        before = figures(pool).get("judged", 0)
        if "idle" in moment:
            os.kill(victim(worker), signal.SIGKILL)
        waits = asyncio.create_task(pool.evaluate(TASK, text))
        while "idle" not in moment and not waits.done():
            await asyncio.sleep(0)
            if pid := victim(worker):
                os.kill(pid, signal.SIGKILL)
                break
        assert not waits.done(), "the moment was missed"
        return await waits, before

    verdict, before = asyncio.run(killed())
    assert verdict.status == "right"
    said = figures(pool)
    assert said["workers"] == 1 and said["judged"] == before + 1 and "infra" not in said
    (later,) = asyncio.run(several(pool, [text.replace("r", "c", 1)]))
    assert later.status == "right"  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_lost_broker_is_made_again(pool: Pool) -> None:
    async def killed() -> object:
        waits = asyncio.create_task(pool.evaluate(TASK, "krse mul;krse add relu"))
        await asyncio.sleep(0.1)
        assert not waits.done()
        ray.kill(pool.broker)
        return await waits

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
