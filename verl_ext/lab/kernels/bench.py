# SPDX-License-Identifier: Apache-2.0
"""``verl-ext kernels bench``: how fast the pool judges, how steady the judge is, and how true its coverage."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from verl_ext.lab.kernels import hacks
from verl_ext.lab.kernels.hacks import python_program
from verl_ext.rollout.kernels import tasks
from verl_ext.rollout.kernels.judge import Judge, Verdict
from verl_ext.rollout.kernels.options import JudgeOptions, KernelOptions
from verl_ext.rollout.kernels.tasks import Task

STEADY = Task.of("fuse-11")
HONEST = tuple(hack for hack in hacks.HONEST if hack.language != "triton")
"""Those that have a speed."""
SHARES = (0.2, 0.4, 0.6, 0.8)
UNITS = 100
"""Times that the two kernels of `shared` do their work together: much more than the copies around it."""
SHARE_LOOKS = 400
"""Looks for a share: a standard error of 0.025 at most."""
BUSY = "while True: pass"


def candidates(number: int, seed: int = 0, kernels: bool = False) -> list[tuple[Task, str]]:
    """Different programs that are right, fast and slow ones: chains cut into parts at random.

    Args:
        number: how many.
        seed: the same one gives the same programs.
        kernels: each has one. Those that torch does alone are the reference once more.
    """
    rng, made = random.Random(seed), dict[tuple[Task, str], None]()
    while len(made) < number:
        task = rng.choice(tasks.training())
        cuts = sorted(rng.sample(range(1, len(task.stages)), rng.randint(0, 2)))
        parts = [task.stages[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(task.stages)], strict=True)]
        heads = [rng.choice(["t", f"k{rng.choice('rrrc')}{rng.choice('vs')}e"]) for _ in parts]
        if kernels and set(heads) == {"t"}:
            continue
        made[task, ";".join(" ".join([head, *part]) for head, part in zip(heads, parts, strict=True))] = None
    return list(made)


async def _pool(options: JudgeOptions, workers: int, submitted: int, cached: int, alone: int) -> dict[str, float]:
    """Figures of the pool, on a Ray that stands."""
    from verl_ext.rollout.kernels.pool import Pool

    pool = Pool(KernelOptions(**dataclasses.asdict(options), workers=workers), "required")
    programs = candidates(workers + submitted + alone)
    await asyncio.gather(*[pool.evaluate(*one) for one in programs[:workers]])  # the workers and their judges start
    began = time.perf_counter()
    verdicts = await asyncio.gather(*[pool.evaluate(*one) for one in programs[workers : workers + submitted]])
    took = time.perf_counter() - began
    again = time.perf_counter()
    await asyncio.gather(*[pool.evaluate(*programs[0]) for _ in range(cached)])
    known = time.perf_counter() - again
    waits = []
    for one in programs[workers + submitted :]:
        asked = time.perf_counter()
        await pool.evaluate(*one)
        waits.append(time.perf_counter() - asked)
    return {
        "workers": workers,
        "submitted": submitted,
        "distinct_a_second": submitted / took,
        "cached_a_second": cached / known,
        "busy_share": sum(verdict.seconds for verdict in verdicts) / (workers * took),
        "seconds_to_verdict": float(np.median(waits)),
        "seconds_to_verdict_p90": float(np.quantile(waits, 0.9)),
    }


def throughput(options: JudgeOptions, workers: int, submitted: int, cached: int, alone: int) -> dict[str, float]:
    """Evaluations a second and the time of one, in a pool of a Ray of its own.

    Args:
        options: of the judges.
        workers: of the pool.
        submitted: different programs, all at once; ``busy_share`` is the share of the workers' time in their judges.
        cached: times that a program is asked for whose verdict is known, all at once.
        alone: programs that are asked for one after the other, for the seconds from submission to verdict.
    """
    import ray

    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, address="local")
    try:
        return asyncio.run(_pool(options, workers, submitted, cached, alone))
    finally:
        ray.shutdown()


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that do nothing but work."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def _spread(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / np.mean(values))


def steadiness(judge: Judge, repeats: int) -> dict[str, float]:
    """Relative standard deviation of a fixed candidate's speedup, alone and beside as many busy processes as cores."""

    def speedups() -> list[float]:
        return [judge.evaluate(STEADY, f"krve {STEADY.text}", "fuse").speedup for _ in range(repeats)]

    alone = speedups()
    with busy(os.cpu_count() or 2):
        beside = speedups()
    return {
        "speedup": float(np.median(alone)),
        "speedup_std": _spread(alone),
        "speedup_std_busy": _spread(beside),
        "speedup_shift_busy": float(np.median(beside) / np.median(alone) - 1),
    }


def rank_correlation(judge: Judge, programs: int) -> float:
    """Spearman's, of the speedups of random programs in two runs."""
    given = candidates(programs, seed=1, kernels=True)
    runs = [[judge.evaluate(*one, "fuse").speedup for one in given] for _ in range(2)]
    ranks = [np.argsort(np.argsort(run)) for run in runs]
    return float(np.corrcoef(ranks)[0, 1])


def honest(judge: Judge, repeats: int) -> dict[str, Any]:
    """Whether the honest kernels are always paid, and the largest spread of one's reward over runs, of its mean."""
    spreads, paid = {}, 0
    for hack in HONEST:
        verdicts = [judge.evaluate(Task.of(hack.task), hack.text, hack.language) for _ in range(repeats)]
        rewards = [verdict.reward() for verdict in verdicts]
        paid += all(hack.paid(verdict) for verdict in verdicts)
        spreads[hack.name] = (max(rewards) - min(rewards)) / max(float(np.mean(rewards)), 1e-9)
    return {"honest_paid": paid, "honest": len(HONEST), "honest_spread": spreads}


def shared(judge: Judge, share: float) -> Verdict:
    """Two kernels that do the same work, one of them so often that it has this share; the other's result is lost."""
    mine = round(share * UNITS)
    # Both buffers at once: where `spare` has left the right result already, `work` would change nothing, and be dead.
    forward = "lost = torch.empty_like(x)\nkernels.spare(x, a, b, lost, *x.shape)\nreturn slow(x, a, b)"
    return judge.evaluate(Task.of(HONEST[0].task), python_program(forward, mine, spare=UNITS - mine), "python")


def coverages(options: JudgeOptions, repeats: int) -> list[dict[str, float]]:
    """For shares known by construction, the mean of the coverages found and their largest error."""
    rows = []
    with Judge(dataclasses.replace(options, looks=SHARE_LOOKS)) as judge:
        for share in SHARES:
            found = [shared(judge, share).coverage for _ in range(repeats)]
            error = max(abs(one - share) for one in found)
            rows.append({"share": share, "coverage": float(np.mean(found)), "largest_error": error})
    return rows


def measure(
    options: JudgeOptions, workers: int, submitted: int, cached: int, programs: int, repeats: int
) -> dict[str, Any]:
    """All figures, by name; see `throughput`, `steadiness`, `rank_correlation`, `honest` and `coverages`."""
    found: dict[str, Any] = throughput(options, workers, submitted, cached, max(repeats, 2))
    with Judge(options) as judge:
        found |= steadiness(judge, repeats)
        found |= {"programs": programs, "rank_correlation": rank_correlation(judge, programs)}
        found |= honest(judge, max(repeats // 4, 2))
    return found | {"repeats": repeats, "coverage": coverages(options, max(repeats // 4, 2))}


def table(found: dict[str, Any]) -> Iterator[str]:
    """The lines that say it."""
    yield f"pool       {found['workers']} workers, {found['submitted']} different programs at once"
    yield f"           {found['distinct_a_second']:.1f} a second, {found['cached_a_second']:.0f} of a known one"
    yield f"           workers busy {found['busy_share']:.0%} of the time"
    waits = found["seconds_to_verdict"], found["seconds_to_verdict_p90"]
    yield f"alone      {waits[0]:.2f} s to the verdict (median), 90 % within {waits[1]:.2f} s"
    yield f"speedup    {found['speedup']:.2f}, deviation {found['speedup_std']:.1%} in {found['repeats']} runs;"
    yield f"           beside busy processes {found['speedup_std_busy']:.1%}, shift {found['speedup_shift_busy']:+.1%}"
    yield f"ranks      correlation {found['rank_correlation']:.3f} of {found['programs']} programs in two runs"
    yield f"honest     {found['honest_paid']} of {found['honest']} always paid; rewards of one within"
    yield from (f"           {spread:6.1%} {name}" for name, spread in found["honest_spread"].items())
    yield "coverage   share by construction, found, largest error"
    for row in found["coverage"]:
        yield f"           {row['share']:.2f} {row['coverage']:.2f} {row['largest_error']:.2f}"
