# SPDX-License-Identifier: Apache-2.0
"""The noise of a few seeds: 95 % intervals of means and differences, and the effect that they could have shown.

Runs of two cells with the same seed have the same order of data and the same seeds of sampling: they are pairs. The
distributions are scipy's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas
from scipy import stats

LEVEL, POWER = 0.95, 0.8
"""Confidence of the intervals, and the chance with which the detectable effect would be outside the noise."""


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its confidence interval. The ends and what follows are NaN where the values have no
    spread at all: a few equal seeds say nothing of their noise.
    """

    value: float  # a mean or a difference of means
    low: float
    high: float
    dof: float  # degrees of freedom of Student's t
    detectable: float  # see :func:`detectable`

    def holds(self, value: float) -> bool:
        """Is `value` inside (ends included, and rounding forgiven)?"""
        slack = 1e-9 * max(abs(self.low), abs(self.high))
        return self.low - slack <= value <= self.high + slack


def detectable(error: float, dof: float) -> float:
    """The minimal detectable effect (Bloom, Evaluation Review 19, 1995): the true difference that is outside the noise
    with the chance `POWER`, about, at a standard `error` with `dof` degrees of freedom. With an error of 1 / sqrt(n) it
    is in standard deviations.
    """
    return error * float(stats.t.ppf((1 + LEVEL) / 2, dof) + stats.t.ppf(POWER, dof))


def mean_interval(values: pandas.Series) -> Interval | None:
    """Student's interval of a mean over seeds; None for fewer than two."""
    if len(values) < 2:
        return None
    return _interval(float(values.mean()), float(values.sem()), len(values) - 1)


def difference(ours: pandas.Series, theirs: pandas.Series) -> tuple[float, Interval | None]:
    """Difference of two cells, ours less theirs, from their values by seed, and its interval.

    With at least two seeds in common these are the mean over the pairs and Student's interval; else the difference of
    the means and Welch's interval, or None if one side has a single seed.
    """
    pairs = (ours - theirs).dropna()
    if (interval := mean_interval(pairs)) is not None:
        return interval.value, interval
    value = float(ours.mean() - theirs.mean())
    if min(len(ours), len(theirs)) < 2:
        return value, None
    error = math.hypot(ours.sem(), theirs.sem())
    # Welch and Satterthwaite's degrees of freedom, by each side's share of the variance.
    share = (ours.sem() / error) ** 2 if error else 0.0
    dof = 1 / (share**2 / (len(ours) - 1) + (1 - share) ** 2 / (len(theirs) - 1))
    return value, _interval(value, error, float(dof))


def _interval(value: float, error: float, dof: float) -> Interval:
    if error <= 1e-12 * abs(value):  # equal but for rounding
        return Interval(value, *[math.nan] * 4)
    low, high = stats.t.interval(LEVEL, dof, value, error)
    return Interval(value, float(low), float(high), dof, detectable(error, dof))
