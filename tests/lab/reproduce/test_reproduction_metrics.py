# SPDX-License-Identifier: Apache-2.0
"""The papers' quantities against hand-computed cases, enumeration and an independent library."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

import mpmath
import numpy
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.lab.reproduce import metrics, noise

property_of_all = settings(deadline=None, derandomize=True, max_examples=50)
finite = st.floats(-100, 100, allow_nan=False)
several = st.lists(finite, min_size=2, max_size=6)


# --- answers to tasks ---------------------------------------------------------------------------------------------


def test_pass_at_k_by_hand() -> None:
    # 1 - C(7, 2) / C(10, 2) = 1 - 21/45
    assert metrics.pass_at_k(10, 3, 2) == pytest.approx(24 / 45, rel=1e-14)
    assert metrics.pass_at_k(5, 2, 1) == pytest.approx(0.4, rel=1e-14)
    assert metrics.pass_at_k(16, 0, 16) == 0.0
    assert metrics.pass_at_k(16, 1, 16) == 1.0


@property_of_all
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(samples: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))
    draws = list(itertools.combinations(samples, k))
    expected = sum(map(any, draws)) / len(draws)
    assert metrics.pass_at_k(len(samples), sum(samples), k) == pytest.approx(expected, abs=1e-12)


@property_of_all
@given(st.integers(2, 3000), st.data())
def test_pass_at_k_agrees_with_whole_numbers_at_any_size(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    exact = 1 - mpmath.mpf(math.comb(n - c, k)) / math.comb(n, k)
    value = metrics.pass_at_k(n, c, k)
    assert 0 <= value <= 1
    assert value == pytest.approx(float(exact), rel=1e-9, abs=1e-300)
    if c < n:
        assert metrics.pass_at_k(n, c + 1, k) >= value


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_impossible_counts(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        metrics.pass_at_k(n, c, k)


# --- curves -------------------------------------------------------------------------------------------------------


def test_spike_is_the_largest_over_the_median() -> None:
    assert metrics.spike(pandas.Series([1, 2, 2, 10])) == 5
    assert metrics.spike(pandas.Series([1, 2, 3]), pandas.Series([1, 2, 8])) == 4
    assert math.isnan(metrics.spike(pandas.Series([0, 0, 0, 1])))
    assert math.isnan(metrics.spike(pandas.Series([], dtype=float)))


def spike_steps(norms: Sequence[float], **options: float) -> list[int]:
    return metrics.spike_steps(pandas.Series(norms, dtype=float), **options)  # type: ignore[arg-type]


def test_spike_steps_look_back_only() -> None:
    norms = [9, 1, 1, 1, 1, 3.1, 1, 3, 1]
    # The 9 has nothing before it; 3 is not above 3 x 1.
    assert spike_steps(norms) == [5]
    assert spike_steps(norms, factor=2) == [5, 7]
    # A slow rise is none, however far it goes.
    assert spike_steps([1.1**step for step in range(60)], factor=3) == []
    # One step up is a spike until the median has followed: a window of 3 has it after two steps.
    assert spike_steps([1, 1, 1, 1, 9, 9, 9, 9, 9], window=3) == [4, 5]
    assert spike_steps([1, math.nan, 1, 1, math.inf, 9]) == [1, 4, 5]
    assert spike_steps([]) == []


@property_of_all
@given(st.lists(st.floats(0.01, 100), max_size=60), st.floats(1, 5), st.integers(3, 25))
def test_spike_steps_are_those_of_the_definition(norms: list[float], factor: float, window: int) -> None:
    expected = [
        step
        for step, norm in enumerate(norms)
        if step >= 3 and norm > factor * statistics.median(norms[max(0, step - window) : step])
    ]
    assert spike_steps(norms, factor=factor, window=window) == expected
    # Powers of two scale without rounding.
    assert spike_steps([1024 * norm for norm in norms], factor=factor, window=window) == expected


def tokens_to(tokens: dict[int, float], scores: dict[int, float], threshold: float, window: int = 1) -> float | None:
    return metrics.tokens_to(pandas.Series(tokens), pandas.Series(scores, dtype=float), threshold, window)


def test_tokens_to_a_score() -> None:
    tokens = {1: 100.0, 2: 200.0, 3: 300.0, 4: 400.0}
    scores = {1: 0.1, 2: 0.5, 3: 0.3, 4: 0.6}
    assert tokens_to(tokens, scores, 0.5) == 300
    assert tokens_to(tokens, scores, 0.4, window=2) == 600  # (0.5 + 0.3) / 2 at step 3
    assert tokens_to(tokens, scores, 0.7) is None
    # A full window is needed: one lucky step at the start is no score.
    assert tokens_to(tokens, {1: 0.9, 2: 0.0, 3: 0.0, 4: 0.0}, 0.5, window=2) is None
    # A mean that equals the threshold reaches it, whatever a running sum would say.
    assert tokens_to(tokens, {1: 0.9, 2: 0.1, 3: 0.1, 4: 0.1}, 0.1, window=3) == 600
    assert tokens_to(tokens, {1: 1e9, 2: 0.1, 3: 0.1, 4: 0.1}, 1e10, window=3) is None
    # Validation before training costs nothing, and validation at some steps pays for those between.
    assert tokens_to(tokens, {0: 0.9}, 0.5) == 0
    assert tokens_to(tokens, {0: 0.0, 3: 0.9}, 0.5) == 600
    assert tokens_to(tokens, {}, 0.5) is None


@property_of_all
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_score_costs_no_fewer_tokens(values: list[float], a: float, b: float) -> None:
    scores = dict(enumerate(values, start=1))
    tokens = dict.fromkeys(scores, 10.0)
    low, high = (tokens_to(tokens, scores, threshold) for threshold in sorted((a, b)))
    assert (high is None) or (low is not None and low <= high)


# --- noise --------------------------------------------------------------------------------------------------------


def by_seed(values: Sequence[float], first: int = 0) -> pandas.Series:
    return pandas.Series(values, index=range(first, first + len(values)), dtype=float)


def test_interval_of_a_mean_by_hand() -> None:
    interval = noise.mean_interval(by_seed([1, 2, 3]))
    assert interval is not None and interval.dof == 2
    assert interval.high - 2 == pytest.approx(4.302652729911275 / math.sqrt(3), rel=1e-9)
    # The printed tables of Student's distribution have 4.303 and, at 80 %, 1.061.
    assert interval.detectable == pytest.approx((4.303 + 1.061) / math.sqrt(3), rel=1e-3)
    assert noise.mean_interval(by_seed([1])) is None


def test_runs_with_the_same_seed_are_pairs() -> None:
    # Differences 1, 2, 3 in spite of the seeds' spread; the fourth seed of ours has no partner.
    ours, theirs = by_seed([101, 12, 3, 500]), by_seed([100, 10, 0])
    value, interval = noise.difference(ours, theirs)
    assert value == 2 and interval == noise.mean_interval(by_seed([1, 2, 3]))
    assert interval is not None and not interval.holds(6.5) and interval.holds(0.0)


def test_values_without_spread_tell_nothing_of_their_noise() -> None:
    for value, interval in (
        noise.difference(by_seed([0.4, 0.5, 0.6]), by_seed([0.1, 0.2, 0.3])),
        noise.difference(by_seed([1.3, 1.3]), by_seed([1, 1, 1], first=5)),
        (0.3, noise.mean_interval(by_seed([0.3, 0.3, 0.3]))),
    ):
        assert interval is not None and interval.value == value == pytest.approx(0.3)
        assert all(map(math.isnan, (interval.low, interval.high, interval.dof, interval.detectable)))
        assert not interval.holds(value)


def test_welch_by_hand() -> None:
    # No seed in common. Means 2 and 6; variances 1 and 4 of three values each: standard error sqrt(5/3);
    # dof = (1/3 + 4/3)^2 / ((1/9 + 16/9) / 2) = 50/17.
    value, interval = noise.difference(by_seed([1, 2, 3]), by_seed([4, 6, 8], first=3))
    assert interval is not None and value == interval.value == -4
    assert interval.dof == pytest.approx(50 / 17)
    assert interval.high + 4 == pytest.approx(3.219 * math.sqrt(5 / 3), rel=2e-3)  # between the tables' 4.303 and 3.182
    assert interval.holds(-4) and not interval.holds(0.5)
    # The noise of one seed is unknown.
    assert noise.difference(by_seed([1]), by_seed([1, 2, 3])) == (-1, None)
    assert noise.difference(by_seed([1, 2, 3]), by_seed([1], first=3)) == (1, None)


@property_of_all
@given(several, several, finite)
def test_a_difference_is_antisymmetric_and_follows_a_shift(a: list[float], b: list[float], shift: float) -> None:
    for first in (0, 9):
        ours, theirs = by_seed(a), by_seed(b, first)
        (value, there), (back, other) = noise.difference(ours, theirs), noise.difference(theirs, ours)
        assert there is not None and other is not None
        assert (-back, -other.high, -other.low) == pytest.approx((value, there.low, there.high), abs=1e-9, nan_ok=True)
        assert there.low <= value <= there.high or math.isnan(there.low)
        moved, _ = noise.difference(ours + shift, theirs)
        assert moved == pytest.approx(value + shift, abs=1e-9)


@pytest.mark.parametrize("first", [0, 9], ids=["pairs", "welch"])
def test_intervals_cover_the_truth_and_effects_are_detected_as_often_as_they_say(first: int) -> None:
    generator = numpy.random.default_rng(0)
    # Eight seeds a cell; pairs share what the seed does, which is ten times the rest.
    rest = generator.normal(0, 1, (2, 400, 8))
    shared = 10 * generator.normal(0, 1, (400, 8)) * (first == 0)
    effect = noise.detectable(math.sqrt(2 / 8), 7 if first == 0 else 14)
    covered = detected = 0
    for ours, theirs in zip(effect + shared + rest[0], shared + rest[1], strict=True):
        _, interval = noise.difference(by_seed(ours), by_seed(theirs, first))
        assert interval is not None
        covered += interval.holds(effect)
        detected += not interval.holds(0.0)
    # Standard errors 0.011 and 0.02, of a fixed seed.
    assert 0.92 <= covered / 400 <= 0.98
    assert 0.74 <= detected / 400 <= 0.86
