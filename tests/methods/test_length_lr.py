# SPDX-License-Identifier: Apache-2.0
"""`verl_ext.methods.length_lr`: the check values, the detector, and a resume."""

from __future__ import annotations

import json
import math

import pytest

from verl_ext.methods.length_lr import LengthLR

WARMUP = {0: 0.1, 9: 1.0, 207: 1.0, 208: 0.5, 405: 0.5, 406: 0.25, 603: 0.25, 604: 0.125, 802: 0.1, 5000: 0.1}
SURGE = {307: 1.0, 308: 0.5, 505: 0.5, 506: 0.25, 704: 0.125, 902: 0.1}


def run(schedule: LengthLR, steps: range, surge_at: int) -> list[float]:
    factors = []
    for step in steps:
        schedule.observe(step, 400.0 if step < surge_at else 1300.0)
        factors.append(schedule.factor(step))
    return factors


@pytest.mark.parametrize(("anchor", "expected"), [("warmup", WARMUP), ("surge", SURGE)])
def test_check_values(anchor: str, expected: dict[int, float]) -> None:
    schedule = LengthLR(anchor=anchor)  # type: ignore[arg-type]
    factors = run(schedule, range(1000), surge_at=110)
    assert (schedule.surge_step, schedule.period) == (110, 198)
    for step, factor in expected.items():
        assert schedule.factor(step) == pytest.approx(factor, rel=1e-12)
        assert step >= 1000 or factors[step] == pytest.approx(factor, rel=1e-12)
    assert factors[109] == factors[110] == 1.0  # arming restarts nothing


def test_only_a_surge_after_the_baseline_arms_and_only_once() -> None:
    schedule = LengthLR(baseline_steps=4, warmup_steps=2)
    for step, length in enumerate([100, 900, 100, 100]):  # a long batch among the first ones is part of the baseline
        schedule.observe(step, length)
    schedule.observe(4, 900)  # three times the mean of 300 exactly
    assert schedule.surge_step is None
    schedule.observe(5, 901)
    schedule.observe(6, 5000)
    assert schedule.surge_step == 5
    assert schedule.factor(2) == 1.0  # what has been is not changed


def test_a_resume_goes_on_exactly() -> None:
    whole = run(LengthLR(), range(500), surge_at=110)
    for cut in (0, 30, 50, 109, 110, 111, 400):
        first, second = LengthLR(), LengthLR()
        factors = run(first, range(cut), surge_at=110)
        second.restore(json.loads(json.dumps(first.state())))
        assert factors + run(second, range(cut, 500), surge_at=110) == whole


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"baseline_steps": 0}, "baseline_steps 0"),
        ({"trigger_ratio": 1.0}, "trigger_ratio is 1.0"),
        ({"decay": 1.0}, "decay is 1.0"),
        ({"min_ratio": 1.5}, "min_ratio 1.5"),
        ({"anchor": "end"}, "anchor is 'end'"),
    ],
)
def test_bad_options(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LengthLR(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mean response length is nan in step 7"):
        LengthLR().observe(7, math.nan)
