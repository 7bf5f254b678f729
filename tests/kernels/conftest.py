# SPDX-License-Identifier: Apache-2.0
"""One judge for the tests of this folder: starting its processes is most of what a verdict costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from own_ray import own_ray

from verl_ext.rollout.kernels.judge import Judge, Verdict
from verl_ext.rollout.kernels.options import JudgeOptions
from verl_ext.rollout.kernels.tasks import Task

#: Few pairs and looks: these tests ask what is right and what is paid, and nothing about precision.
QUICK = JudgeOptions(pairs=3, max_pairs=3, looks=10, run_s=2.0)


@pytest.fixture(scope="session")
def judge() -> Iterator[Judge]:
    with Judge(QUICK) as made:
        made.evaluate(Task.of("mul add relu"), "krve mul add relu", "fuse")  # its sandbox and a reference have started
        yield made


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with own_ray(2, "verl_ext.rollout.kernels.pool"):
        yield


def most(judge: Judge, task: Task, text: str, language: str, holds: Callable[[Verdict], bool]) -> Verdict:
    """A verdict of which this holds, if it holds of the first or of two of three; else the last one.

    Speed and coverage are sampled, here from few looks: on a busy machine one evaluation may be far off.
    """
    first = judge.evaluate(task, text, language)
    if holds(first):
        return first
    again = [judge.evaluate(task, text, language) for _ in range(2)]
    return next((verdict for verdict in again if not holds(verdict)), again[-1])
