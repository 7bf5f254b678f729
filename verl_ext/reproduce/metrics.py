# SPDX-License-Identifier: Apache-2.0
"""The quantities that papers report, as functions of numbers, and the statistics of their comparison.

Nothing here reads files or imports torch. What a table's metric is made of these functions by its ``kind`` is said in
:mod:`verl_ext.reproduce.collect`, which applies them to what a run has logged.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy
import pandas

SPIKE_FACTOR = 3.0
SPIKE_WINDOW = 20
SPIKE_EARLIER = 3
TOKENS_KEY = "perf/total_num_tokens"
"""verl's number of tokens of a step's batch, prompts and responses together."""


# ----------------------------------------------------------------------------------------------------------------------
# Answers to tasks


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased pass@k of one task, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    It is the probability that `k` samples, drawn from the `n` without replacement, hold a correct one. The product
    form is used, which neither overflows nor cancels.

    Args:
        samples: n, samples of the task.
        correct: c, how many of them are correct.
        k: size of the draw, at most n.

    Returns:
        A probability.

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= correct <= samples:
        raise ValueError(f"pass@k: {correct} correct of {samples} samples")
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples of a task and k >= 1; there are {samples}")
    if samples - correct < k:
        return 1.0
    # C(n-c, k) / C(n, k) = product over i = n-c+1 .. n of (1 - k / i); the sum of logarithms keeps a small pass@k.
    return -math.expm1(math.fsum(math.log1p(-k / i) for i in range(samples - correct + 1, samples + 1)))


def fast(correct: pandas.Series, speedup: pandas.Series, p: float) -> pandas.Series:
    """Which answers count for Fast@p: correct, and at least `p` times as fast as the reference.

    KernelBench (arXiv 2502.10517) writes "greater than p", Dr. Kernel (arXiv 2602.05885) reports ">= p"; the latter is
    used. A correct answer without a measured speedup does not count.

    Args:
        correct: one a sample, bool.
        speedup: time of the reference over time of the answer; NaN where nothing was measured.
        p: threshold, at least 0.

    Raises:
        ValueError: p below 0.
    """
    if not p >= 0:
        raise ValueError(f"Fast@p: p must be at least 0, not {p}")
    return correct & (speedup >= p)


# ----------------------------------------------------------------------------------------------------------------------
# Curves of a run


def spike(norms: Sequence[float], peaks: Sequence[float] | None = None) -> float:
    """How far the largest gradient norm stands out: over the median of all steps. NaN without a positive median.

    Args:
        norms: of the steps (mean over a step's updates).
        peaks: largest norm of a step's updates, if it is known beside the mean.
    """
    middle = statistics.median(norms) if len(norms) else 0.0
    largest = norms if peaks is None or not len(peaks) else peaks
    return max(largest) / middle if middle > 0 else math.nan


def spike_steps(norms: pandas.Series, factor: float = SPIKE_FACTOR, window: int = SPIKE_WINDOW) -> list[int]:
    """Steps with a gradient-norm spike: a value above `factor` times the running median.

    The running median of a step is that of the `window` values before it, itself excluded. The first `SPIKE_EARLIER`
    values have too little before them and are never spikes. A value that is not finite is one wherever it stands, and
    is left out of the medians.

    Args:
        norms: by step, not negative.
        factor: above 0.
        window: at least `SPIKE_EARLIER`.

    Raises:
        ValueError: a bad factor or window.
    """
    if not factor > 0:
        raise ValueError(f"the factor must be above 0, not {factor}")
    if window < SPIKE_EARLIER:
        raise ValueError(f"the window must be at least {SPIKE_EARLIER}, not {window}")
    finite = norms[numpy.isfinite(norms)]
    median = finite.rolling(window, min_periods=SPIKE_EARLIER).median().shift()
    # The median is unknown (NaN) for the first ones, and nothing is above that.
    return sorted({*norms.index.difference(finite.index), *finite.index[finite > factor * median]})


def tokens_to(tokens: pandas.Series, scores: pandas.Series, threshold: float, window: int = 1) -> float | None:
    """Token cost of a score: tokens of all steps up to the first at which the running mean reaches the threshold.

    Args:
        tokens: by training step, the tokens of its batch.
        scores: by step, in order; may be known at some steps only, and at step 0 (before training, at no cost).
        threshold: in the unit of the scores.
        window: logged scores in the running mean; it is defined once there are that many.

    Returns:
        Tokens, or None if the threshold is not reached.
    """
    # The exactly rounded mean: a score that equals the threshold reaches it.
    means = scores.rolling(window).apply(statistics.fmean, raw=True)
    reached = means.index[means >= threshold]
    return math.fsum(tokens[tokens.index <= reached[0]]) if len(reached) else None


# ----------------------------------------------------------------------------------------------------------------------
# Figures of agents and of levels

AGENT_FIGURES = ("score/mean", "gradient_energy_share", "grad_norm/mean")
LEVEL_FIGURES = ("usable_share", "group_size/mean")


def agent_figures(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Which logged keys say what of which agent (``agent/<name>/<figure>``).

    Returns:
        Key by figure by agent, agents in order of name, figures in that of `AGENT_FIGURES`.
    """
    return _figures(keys, r"agent/(.+)", AGENT_FIGURES)


def level_figures(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """Which logged keys say what of which level of a hierarchy of groups (``<method>/level_<k>/<figure>``).

    Returns:
        Key by figure by ``<method> level <k>``, levels in order, figures in that of `LEVEL_FIGURES`.
    """
    found = _figures(keys, r"([^/]+/level_\d+)", LEVEL_FIGURES)
    levels = {name: name.split("/level_") for name in found}
    order = sorted(levels, key=lambda name: (levels[name][0], int(levels[name][1])))
    return {" level ".join(levels[name]): found[name] for name in order}


def _figures(keys: Iterable[str], owner: str, figures: Sequence[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    known = sorted(set(keys))
    for figure in figures:
        for key in known:
            if match := re.fullmatch(f"{owner}/{re.escape(figure)}", key):
                found.setdefault(match[1], {})[figure] = key
    return dict(sorted(found.items()))


# ----------------------------------------------------------------------------------------------------------------------
# Noise


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    Attributes:
        value: the estimate, a mean or a difference of means.
        low, high: ends of the interval.
        dof: degrees of freedom of Student's t; infinite where there is no spread at all.
    """

    value: float
    low: float
    high: float
    dof: float

    def holds(self, value: float) -> bool:
        """Is `value` inside (ends included, and rounding forgiven)?"""
        slack = 1e-9 * max(abs(self.low), abs(self.high))
        return self.low - slack <= value <= self.high + slack


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval | None:
    """Student's confidence interval of a mean; None for fewer than two values.

    Args:
        values: one a seed.
        level: of confidence, in (0, 1).
    """
    if len(values) < 2:
        return None
    mean, dof = statistics.fmean(values), len(values) - 1
    half = student_t_quantile((1 + level) / 2, dof) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, float(dof))


def welch(ours: Sequence[float], theirs: Sequence[float], level: float = 0.95) -> Interval | None:
    """Welch's confidence interval of the difference of two means, mean(ours) - mean(theirs).

    The variances need not be equal; degrees of freedom by Welch and Satterthwaite. Without any spread in both the
    interval is the difference itself.

    Args:
        ours, theirs: one value a seed.
        level: of confidence, in (0, 1).

    Returns:
        The interval, or None if one side has fewer than two values: the noise is then unknown.
    """
    if len(ours) < 2 or len(theirs) < 2:
        return None
    difference = statistics.fmean(ours) - statistics.fmean(theirs)
    parts = [statistics.variance(values) / len(values) for values in (ours, theirs)]
    total = sum(parts)
    largest = max(parts)
    if largest == 0:
        return Interval(difference, difference, difference, math.inf)
    # Scaled by the larger part: squares of tiny variances would underflow.
    scaled = [part / largest for part in parts]
    dof = sum(scaled) ** 2 / sum(s**2 / (len(v) - 1) for s, v in zip(scaled, (ours, theirs), strict=True))
    half = student_t_quantile((1 + level) / 2, dof) * math.sqrt(total)
    return Interval(difference, difference - half, difference + half, dof)


@functools.lru_cache(maxsize=1024)
def student_t_quantile(probability: float, dof: float) -> float:
    """Quantile of Student's t distribution, to 1e-9 of the probability and far better for the usual levels.

    With t = sqrt(dof) tan(a) the density is that of cos(a)^(dof - 1), which is integrated from 0 to the angle by Gauss
    and Legendre's rule and inverted by bisection; the integral to pi/2 is known (Abramowitz and Stegun 6.2.1).

    Args:
        probability: in (0, 1).
        dof: degrees of freedom, at least 1, whole or not.

    Raises:
        ValueError: a probability or a number of degrees out of range.
    """
    if not 0 < probability < 1:
        raise ValueError(f"the probability must lie in (0, 1), not {probability}")
    if not 1 <= dof < math.inf:
        raise ValueError(f"the degrees of freedom must be at least 1 and finite, not {dof}")
    nodes, weights = _gauss_legendre()
    whole = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(dof / 2) - math.lgamma((dof + 1) / 2))
    inside = abs(2 * probability - 1)  # of |t|
    low, high = 0.0, math.pi / 2 if inside else 0.0
    while low < (middle := (low + high) / 2) < high:
        integral = middle / 2 * float(weights @ numpy.cos(middle * (nodes + 1) / 2) ** (dof - 1))
        low, high = (middle, high) if integral < inside * whole else (low, middle)
    return math.copysign(math.sqrt(dof) * math.tan(high), probability - 0.5)


@functools.cache
def _gauss_legendre() -> tuple[numpy.ndarray, numpy.ndarray]:
    """Nodes in (-1, 1) and weights."""
    return numpy.polynomial.legendre.leggauss(256)
