# SPDX-License-Identifier: Apache-2.0
"""The papers' quantities against hand-computed cases, enumeration and an independent library."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence

import mpmath
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.reproduce import metrics
from verl_ext.reproduce.metrics import Interval

finite = st.floats(-100, 100, allow_nan=False)
several = st.lists(finite, min_size=2, max_size=6)


# --- answers to tasks ---------------------------------------------------------------------------------------------


def test_pass_at_k_by_hand() -> None:
    # 1 - C(7, 2) / C(10, 2) = 1 - 21/45
    assert metrics.pass_at_k(10, 3, 2) == pytest.approx(24 / 45, rel=1e-14)
    assert metrics.pass_at_k(5, 2, 1) == pytest.approx(0.4, rel=1e-14)
    assert metrics.pass_at_k(16, 0, 16) == 0.0
    assert metrics.pass_at_k(16, 1, 16) == 1.0


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(samples: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))
    draws = list(itertools.combinations(samples, k))
    expected = sum(map(any, draws)) / len(draws)
    assert metrics.pass_at_k(len(samples), sum(samples), k) == pytest.approx(expected, abs=1e-12)


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


def test_fast_counts_correct_answers_at_the_threshold_and_above() -> None:
    correct = pandas.Series([True, True, True, False, True])
    speedup = pandas.Series([1.5, 1.49, 3.0, 9.0, math.nan])
    assert metrics.fast(correct, speedup, 1.5).mean() == 0.4
    assert metrics.fast(correct, speedup, 0).mean() == 0.6  # the unmeasured one never counts
    with pytest.raises(ValueError, match="at least 0"):
        metrics.fast(correct, speedup, -1)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 10)), min_size=1), st.floats(0, 10), st.floats(0, 10))
def test_fast_falls_with_the_threshold(rows: list[tuple[bool, float]], p: float, q: float) -> None:
    answers = pandas.DataFrame(rows, columns=["correct", "speedup"])
    low, high = (metrics.fast(answers["correct"], answers["speedup"], one) for one in sorted((p, q)))
    assert (high <= low).all() and (low <= answers["correct"]).all()


# --- curves -------------------------------------------------------------------------------------------------------


def test_spike_is_the_largest_over_the_median() -> None:
    assert metrics.spike([1, 2, 2, 10]) == 5
    assert metrics.spike([1, 2, 3], [1, 2, 8]) == 4
    assert math.isnan(metrics.spike([0, 0, 0, 1]))
    assert math.isnan(metrics.spike([]))


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
    with pytest.raises(ValueError, match="factor"):
        spike_steps(norms, factor=0)
    with pytest.raises(ValueError, match="window"):
        spike_steps(norms, window=2)


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


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_score_costs_no_fewer_tokens(values: list[float], a: float, b: float) -> None:
    scores = dict(enumerate(values, start=1))
    tokens = dict.fromkeys(scores, 10.0)
    low, high = (tokens_to(tokens, scores, threshold) for threshold in sorted((a, b)))
    assert (high is None) or (low is not None and low <= high)


# --- agents and levels --------------------------------------------------------------------------------------------


def test_keys_of_agents_and_levels() -> None:
    keys = [
        "agent/solver/score/mean",
        "agent/solver/score/std",
        "agent/solver/gradient_energy_share",
        "agent/a/b/score/mean",
        "agent/score/mean",
        "hgpo/level_10/usable_share",
        "hgpo/level_2/usable_share",
        "hgpo/level_2/group_size/mean",
        "hgpo/level_2/groups/1",
        "trajectory/reward/mean",
    ]
    assert metrics.agent_figures(keys) == {
        "a/b": {"score/mean": "agent/a/b/score/mean"},
        "solver": {
            "score/mean": "agent/solver/score/mean",
            "gradient_energy_share": "agent/solver/gradient_energy_share",
        },
    }
    levels = metrics.level_figures(keys)
    assert list(levels) == ["hgpo level 2", "hgpo level 10"]
    assert levels["hgpo level 2"] == {
        "usable_share": "hgpo/level_2/usable_share",
        "group_size/mean": "hgpo/level_2/group_size/mean",
    }
    assert metrics.agent_figures(["critic/score/mean"]) == {}


# --- noise --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dof", "quantile"),
    # Printed in every table of Student's distribution (two-sided 95 %).
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)],
)
def test_student_quantiles_of_the_printed_tables(dof: int, quantile: float) -> None:
    assert metrics.student_t_quantile(0.975, dof) == pytest.approx(quantile, abs=5e-4)
    assert metrics.student_t_quantile(0.025, dof) == pytest.approx(-quantile, abs=5e-4)
    assert metrics.student_t_quantile(0.5, dof) == 0


@settings(max_examples=40)
@given(st.floats(0.51, 0.9999), st.floats(1, 1e5))
def test_student_quantile_inverts_the_distribution(probability: float, dof: float) -> None:
    quantile = metrics.student_t_quantile(probability, dof)
    tail = mpmath.betainc(dof / 2, 0.5, 0, dof / (dof + mpmath.mpf(quantile) ** 2), regularized=True) / 2
    assert float(1 - tail) == pytest.approx(probability, abs=1e-9)


@pytest.mark.parametrize(("probability", "dof"), [(0, 3), (1, 3), (0.975, 0.5), (0.975, math.inf), (0.975, math.nan)])
def test_student_quantile_refuses_what_is_out_of_range(probability: float, dof: float) -> None:
    with pytest.raises(ValueError, match="must"):
        metrics.student_t_quantile(probability, dof)


def test_welch_by_hand() -> None:
    # Means 2 and 6; variances 1 and 4 of three values each: standard error sqrt(5/3);
    # dof = (1/3 + 4/3)^2 / ((1/9 + 16/9) / 2) = 50/17.
    interval = metrics.welch([1, 2, 3], [4, 6, 8])
    assert interval is not None
    assert interval.value == -4
    assert interval.dof == pytest.approx(50 / 17)
    half = metrics.student_t_quantile(0.975, 50 / 17) * math.sqrt(5 / 3)
    assert (interval.low, interval.high) == pytest.approx((-4 - half, -4 + half))
    assert half == pytest.approx(3.219 * math.sqrt(5 / 3), rel=2e-3)  # between the tables' 4.303 and 3.182
    assert interval.holds(-4) and not interval.holds(0.5)


def test_noise_of_one_seed_is_unknown_and_of_equal_seeds_is_none() -> None:
    assert metrics.welch([1], [1, 2, 3]) is None
    assert metrics.welch([1, 2, 3], [1]) is None
    assert metrics.mean_interval([1]) is None
    assert metrics.welch([2, 2], [1, 1, 1]) == Interval(1, 1, 1, math.inf)
    tiny = metrics.welch([1e-120, 3e-120], [0.0, 0.0])
    assert tiny is not None and math.isfinite(tiny.low) and tiny.dof == pytest.approx(1)


def test_interval_of_a_mean_by_hand() -> None:
    interval = metrics.mean_interval([1, 2, 3])
    assert interval is not None
    assert interval.high - 2 == pytest.approx(4.302652729911275 / math.sqrt(3), rel=1e-9)


@given(several, several, finite)
def test_welch_is_antisymmetric_and_follows_a_shift(ours: list[float], theirs: list[float], shift: float) -> None:
    there, back = metrics.welch(ours, theirs), metrics.welch(theirs, ours)
    assert there is not None and back is not None
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low), abs=1e-9)
    assert there.low <= there.value <= there.high
    moved = metrics.welch([value + shift for value in ours], theirs)
    assert moved is not None
    assert moved.value == pytest.approx(there.value + shift, abs=1e-9)
    assert moved.high - moved.low == pytest.approx(there.high - there.low, rel=1e-6, abs=1e-6)


def test_welch_covers_the_truth_as_often_as_it_says() -> None:
    generator = random.Random(0)
    covered = 0
    for _ in range(1500):
        ours = [generator.gauss(1.0, 1.0) for _ in range(3)]
        theirs = [generator.gauss(0.5, 3.0) for _ in range(5)]
        interval = metrics.welch(ours, theirs)
        assert interval is not None
        covered += interval.holds(0.5)
    assert 0.935 <= covered / 1500 <= 0.97  # standard error 0.006; Welch is slightly conservative
