# SPDX-License-Identifier: Apache-2.0
"""The benchmark of many trajectories: its arithmetic by hand, and a small run of the real worker."""

from __future__ import annotations

import json
import os

import copies
import pytest

from verl_ext.cpu.platform import fork_worker
from verl_ext.lab.bench import _many_rollouts as many


def test_sizes_go_up_to_the_number_that_was_asked_for() -> None:
    assert many.sizes(10000) == [100, 316, 1000, 3162, 10000]
    assert many.sizes(60) == [20, 60]
    assert many.sizes(1) == [1]


def test_exponent_of_powers() -> None:
    for power in (0.5, 1.0, 1.7):
        assert many.exponent([(n, 3 * n**power) for n in (10, 100, 300)]) == pytest.approx(power)


def test_a_timer_that_is_late_stands_for_those_that_could_not_be_set() -> None:
    late = [0.0] * 90 + [10 * many.TICK_S]  # ten timers, late by 1 to 10 times the tick
    assert many.delay_percentile(late, 0.9) == 0.0
    assert many.delay_percentile(late, 0.95) == pytest.approx(5 * many.TICK_S)
    assert many.delay_percentile(late, 1.0) == pytest.approx(10 * many.TICK_S)


@pytest.mark.e2e
def test_every_trajectory_ends_and_descriptors_come_back() -> None:
    command = ["-m", "verl_ext.cli", "bench", "rollouts", "--engine", "stub", "--trajectories", "18", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", fork_worker.FROM: copies.imports()}
    done = copies.python(*command, env=environment, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [one["trajectories"] for one in found["sizes"]] == [6, 18]
    for one in found["sizes"]:
        count = one["trajectories"]
        assert one["ended"] == count
        # Up to 3 turns in two thirds, which go on in their sequence, and up to 6 steps in a third.
        assert count <= one["sequences"] <= one["calls"] <= 4 * count and one["tokens"] >= one["calls"]
        assert 0 < one["most_at_sampler"] <= count
        assert 0 <= one["delay_p50_ms"] <= one["delay_p99_ms"] <= one["delay_p100_ms"]
        assert one["seconds"] > 0 and one["cpu_ms_each"] > 0
        # What stays: environments that wait for reuse, with a connection each, and the threads' and the store's few.
        assert one["descriptors_after"] <= found["descriptors_before"] + count // 3 + 40
    assert 0 < found["exponent"]
    assert "goal" in done.stdout and "... 18 trajectories" in done.stderr
