# SPDX-License-Identifier: Apache-2.0
"""The quantities that papers report, as functions of plain numbers, and the statistics of their comparison.

Nothing here reads files or imports torch. What a table's metric is made of these functions by its ``kind`` is said in
:mod:`verl_ext.reproduce.collect`, which applies them to what a run has logged.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SPIKE_FACTOR = 3.0
SPIKE_WINDOW = 20
SPIKE_EARLIER = 3
TOKENS_KEY = "perf/total_num_tokens"
"""verl's number of tokens of a step's batch, prompts and responses together."""


# ----------------------------------------------------------------------------------------------------------------------
# Answers to tasks


def success_rate(successes: Sequence[bool]) -> float:
    """Share of episodes that succeeded (ALFWorld, WebShop), in [0, 1].

    Raises:
        ValueError: there is no episode.
    """
    return _mean([float(bool(one)) for one in successes], "success rate of no episodes")


def mean_score(scores: Sequence[float]) -> float:
    """Mean score of episodes, whatever their scale (WebShop's task score is in [0, 1], shown times 100).

    Raises:
        ValueError: there is no episode, or a score is not finite.
    """
    return _mean(scores, "mean score of no episodes")


def avg_at_k(tasks: Sequence[Sequence[float]], k: int) -> float:
    """avg@k: the mean over tasks of the mean over a task's samples.

    With more than `k` samples of a task all of them are used: the expectation is the same and the noise is less.

    Args:
        tasks: correctness (0 or 1) or scores of each task's samples.
        k: samples that a task must have at least.

    Raises:
        ValueError: no tasks, `k` below 1, or a task with fewer than `k` samples.
    """
    _enough(tasks, k)
    return statistics.fmean(statistics.fmean(samples) for samples in tasks)


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


def mean_pass_at_k(tasks: Sequence[Sequence[bool]], k: int) -> float:
    """Mean over tasks of :func:`pass_at_k`.

    Args:
        tasks: correctness of each task's samples.
        k: as in :func:`pass_at_k`.

    Raises:
        ValueError: no tasks, or one with fewer than `k` samples.
    """
    _enough(tasks, k)
    return statistics.fmean(pass_at_k(len(task), sum(map(bool, task)), k) for task in tasks)


def fast_at(correct: Sequence[bool], speedup: Sequence[float | None], p: float) -> float:
    """Fast@p: share of tasks whose answer is correct and at least `p` times as fast as the reference.

    KernelBench (arXiv 2502.10517) writes "greater than p", Dr. Kernel (arXiv 2602.05885) reports ">= p"; the latter is
    used. A correct answer without a measured speedup does not count.

    Args:
        correct: one a task (or a sample of a task: the mean over samples is then meant).
        speedup: time of the reference over time of the answer; None or NaN where nothing was measured.
        p: threshold, at least 0.

    Raises:
        ValueError: no tasks, lists of different length, or p below 0.
    """
    if len(correct) != len(speedup):
        raise ValueError(f"Fast@p: {len(correct)} verdicts but {len(speedup)} speedups")
    if not p >= 0:
        raise ValueError(f"Fast@p: p must be at least 0, not {p}")
    fast = [bool(c) and s is not None and s >= p for c, s in zip(correct, speedup, strict=True)]
    return _mean([float(one) for one in fast], "Fast@p of no tasks")


def _enough(tasks: Sequence[Sequence[float]], k: int) -> None:
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if not tasks:
        raise ValueError(f"@{k} of no tasks")
    least = min(map(len, tasks))
    if least < k:
        raise ValueError(f"@{k} needs {k} samples of each task; there is a task with {least}")


def _mean(values: Sequence[float], empty: str) -> float:
    if not values:
        raise ValueError(empty)
    if not all(map(math.isfinite, values)):
        raise ValueError("a value is not finite")
    return statistics.fmean(values)


# ----------------------------------------------------------------------------------------------------------------------
# Curves of a run


def last(values: Sequence[float], window: int = 1) -> float:
    """Mean of the last `window` values (of all, if there are fewer).

    Raises:
        ValueError: no values or a window below 1.
    """
    _window(window)
    return _mean(values[-window:], "no values")


def first(values: Sequence[float], window: int = 1) -> float:
    """Mean of the first `window` values (of all, if there are fewer).

    Raises:
        ValueError: no values or a window below 1.
    """
    _window(window)
    return _mean(values[:window], "no values")


def best(values: Sequence[float], higher: bool = True) -> float:
    """The largest value, or the smallest where lower is better.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values")
    return max(values) if higher else min(values)


def spike(norms: Sequence[float], peaks: Sequence[float] | None = None) -> float:
    """How far the largest gradient norm stands out: over the median of all steps. NaN without a positive median.

    Args:
        norms: of the steps (mean over a step's updates).
        peaks: largest norm of a step's updates, if it is known beside the mean.
    """
    middle = statistics.median(norms) if norms else 0.0
    return max(peaks or norms) / middle if middle > 0 else math.nan


def spike_steps(norms: Sequence[float], factor: float = SPIKE_FACTOR, window: int = SPIKE_WINDOW) -> list[int]:
    """Positions of gradient-norm spikes: values above `factor` times the running median.

    The running median of a position is that of the `window` values before it, itself excluded. The first
    `SPIKE_EARLIER` positions have too little before them and are never spikes. A value that is not finite is one
    wherever it stands, and is left out of the medians.

    Args:
        norms: one a step, not negative.
        factor: above 0.
        window: at least `SPIKE_EARLIER`.

    Raises:
        ValueError: a bad factor or window.
    """
    if not factor > 0:
        raise ValueError(f"the factor must be above 0, not {factor}")
    if window < SPIKE_EARLIER:
        raise ValueError(f"the window must be at least {SPIKE_EARLIER}, not {window}")
    out, earlier = [], list[float]()
    for position, norm in enumerate(norms):
        if not math.isfinite(norm):
            out.append(position)
            continue
        if len(earlier) >= SPIKE_EARLIER and norm > factor * statistics.median(earlier[-window:]):
            out.append(position)
        earlier.append(norm)
    return out


def tokens_to(
    tokens: Mapping[int, float],
    scores: Mapping[int, float],
    threshold: float,
    window: int = 1,
    higher: bool = True,
) -> float | None:
    """Token cost of a score: tokens of all steps up to the first at which the running mean reaches the threshold.

    Args:
        tokens: by training step, the tokens of its batch.
        scores: by step; may be known at some steps only, and at step 0 (before training, at no cost).
        threshold: in the unit of the scores.
        window: logged scores in the running mean; it is defined once there are that many.
        higher: True if scores above the threshold reach it, False if those below do.

    Returns:
        Tokens, or None if the threshold is not reached.

    Raises:
        ValueError: a window below 1, or tokens that are not finite.
    """
    _window(window)
    steps = sorted(scores)
    for position in range(window - 1, len(steps)):
        mean = statistics.fmean(scores[step] for step in steps[position + 1 - window : position + 1])
        if mean >= threshold if higher else mean <= threshold:
            return total_tokens({step: count for step, count in tokens.items() if step <= steps[position]})
    return None


def total_tokens(tokens: Mapping[int, float]) -> float:
    """Sum over steps.

    Raises:
        ValueError: a count is not finite.
    """
    if not all(map(math.isfinite, tokens.values())):
        raise ValueError("a number of tokens is not finite")
    return math.fsum(tokens.values())


def _window(window: int) -> None:
    if window < 1:
        raise ValueError(f"the window must be at least 1, not {window}")


# ----------------------------------------------------------------------------------------------------------------------
# Figures of agents and of levels

AGENT_FIGURES = ("score/mean", "gradient_energy_share", "grad_norm/mean")
LEVEL_FIGURES = ("usable_share", "group_size/mean")

_LEVEL = re.compile(r"^(?P<method>[^/]+)/level_(?P<level>\d+)/(?P<figure>.+)$")


def agent_figures(keys: Iterable[str], figures: Sequence[str] = AGENT_FIGURES) -> dict[str, dict[str, str]]:
    """Which logged keys say what of which agent (``agent/<name>/<figure>``).

    Args:
        keys: names of logged metrics.
        figures: those that are wanted.

    Returns:
        Key by figure by agent, agents in order of name, figures in the order given.
    """
    found: dict[str, dict[str, str]] = {}
    known = set(keys)
    for figure in figures:
        for key in sorted(known):
            if key.startswith("agent/") and key.endswith(f"/{figure}"):
                name = key[len("agent/") : -len(figure) - 1]
                if name:
                    found.setdefault(name, {})[figure] = key
    return {name: found[name] for name in sorted(found)}


def level_figures(keys: Iterable[str], figures: Sequence[str] = LEVEL_FIGURES) -> dict[str, dict[str, str]]:
    """Which logged keys say what of which level of a hierarchy of groups (``<method>/level_<k>/<figure>``).

    Returns:
        Key by figure by ``<method> level <k>``, levels in order.
    """
    found: dict[tuple[str, int], dict[str, str]] = {}
    for key in keys:
        match = _LEVEL.match(key)
        if match and match["figure"] in figures:
            found.setdefault((match["method"], int(match["level"])), {})[match["figure"]] = key
    return {
        f"{method} level {level}": {figure: own[figure] for figure in figures if figure in own}
        for (method, level), own in sorted(found.items())
    }


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


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation of a sample (ddof 1); None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


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


def student_t_quantile(probability: float, dof: float) -> float:
    """Quantile of Student's t distribution.

    With y = t^2 / (t^2 + dof) the distribution of |t| is the regularised incomplete beta function I_y(1/2, dof/2)
    (Abramowitz and Stegun 26.7.1 and 26.5), which is inverted by bisection.

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
    if probability < 0.5:
        return -student_t_quantile(1 - probability, dof)
    inside = 2 * probability - 1
    low, high = 0.0, 1.0
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if incomplete_beta(middle, 0.5, dof / 2) < inside:
            low = middle
        else:
            high = middle
    return math.sqrt(dof * high / (1 - high)) if inside > 0 else 0.0


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b), by its continued fraction (Abramowitz and Stegun 26.5.8).

    Args:
        x: in [0, 1].
        a, b: above 0.
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast below the mode only
        return 1 - incomplete_beta(1 - x, b, a)
    scale = math.exp(a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b))
    # Modified Lentz: numerators 1, d_1, d_2, ...; all denominators 1.
    tiny = 1e-300
    fraction, upper, lower = 1.0, 1.0, 0.0
    for step in range(1, 10_000):
        m = step // 2
        if step == 1:
            numerator = -(a + b) * x / (a + 1)
        elif step % 2:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 + numerator * lower
        lower = 1 / (lower if abs(lower) > tiny else tiny)
        upper = 1 + numerator / upper
        upper = upper if abs(upper) > tiny else tiny
        fraction *= upper * lower
        if abs(upper * lower - 1) < 1e-16:
            break
    return scale / (a * fraction)
