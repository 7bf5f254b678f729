# SPDX-License-Identifier: Apache-2.0
"""The quantities that papers report, from what a run has logged.

What a metric's ``kind`` means (`keys` are names of logged metrics or patterns as in a shell, and a value is the mean
over the keys that match):

=============  =====================================================================================
``last``       mean of the last `window` (1) logged values
``first``      mean of the first `window` (1)
``mean``       mean of all
``best``       best running mean over `window` (1) logged values
``spike``      largest over median
``spikes``     steps above `factor` (3) times the running median
``tokens``     sum of `tokens_key` (``perf/total_num_tokens``)
``tokens_to``  tokens until the running mean over `window` (1) of the score reaches `threshold`
``avg_at_k``   avg@k, from verl's validation dumps
``pass_at_k``  unbiased pass@k, from the dumps
``fast_at``    share of tasks that are correct with a speedup of at least `p`, from the dumps
=============  =====================================================================================

The dumps are what verl writes below ``trainer.validation_data_dir`` (:mod:`verl_ext.lab.reproduce.dumps`); `score_key`
(``acc``, else ``score``) is the field that is 1 for a correct answer, `speedup_key` (``speedup``) the measured speedup,
`source` the data sources that are wanted, names or patterns, each of which then weighs the same.
"""

from __future__ import annotations

import difflib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy
import pandas

from verl_ext.lab.reproduce.dumps import MetricMissing, last_dump, read_dump
from verl_ext.lab.reproduce.tables import MetricSpec

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """A complete run."""

    cell: str
    seed: int
    path: Path  # its folder
    curves: Mapping[str, pandas.Series]  # value by step of each metric, where it is logged; NaN for what is no number
    planned: int | None = None  # steps that it was to make, None if unknown
    record: Mapping[str, Any] = field(default_factory=dict)  # its ``cell.json``

    @property
    def end(self) -> int:
        """Last step."""
        return max(int(curve.index[-1]) for curve in self.curves.values())

    def until(self, limit: int) -> Run:
        """The run up to a step."""
        curves = {key: curve[curve.index <= limit] for key, curve in self.curves.items()}
        return replace(self, curves={key: curve for key, curve in curves.items() if len(curve)})


def evaluate(spec: MetricSpec, run: Run, say: Say = lambda text: None) -> float | None:
    """A metric of a run up to the step that counts, as it is logged (not yet times 100); None for a score that does not
    reach its threshold. `say` is called with what is odd about the run. Raises MetricMissing: there is no value.
    """
    if spec.kind in ("avg_at_k", "pass_at_k", "fast_at"):
        return _of_dump(spec, run, say)
    if spec.kind == "tokens":
        return math.fsum(_token_counts(spec, run))
    keys = matching(spec.options["keys"], list(run.curves))
    if spec.kind == "tokens_to":
        joint = pandas.concat([run.curves[key] for key in keys], axis=1, join="inner").sort_index()
        scores = _finite(joint.agg(statistics.fmean, axis=1).rename(", ".join(keys)), say)
        return tokens_to(_token_counts(spec, run), scores, spec.options["threshold"], spec.options.get("window", 1))
    return statistics.fmean(_of_curve(spec, run.curves[key], say) for key in keys)


def matching(patterns: Iterable[str], logged: Sequence[str], said: str = "no metric {} is logged") -> list[str]:
    """Names of `logged` that match one of the patterns, each once; in a pattern ``*`` also stands for a ``/``. Raises
    MetricMissing: a pattern matches none; the message, `said` with the pattern in its place, names the nearest.
    """
    found: list[str] = []
    for pattern in patterns:
        # A name may hold brackets, which would be a set of letters in a pattern.
        own = [pattern] if pattern in logged else [key for key in logged if fnmatchcase(key, pattern)]
        if not own:
            near = difflib.get_close_matches(pattern, logged, n=3, cutoff=0.6)
            near += [key for key in logged if key.rsplit("/", 1)[-1] == pattern.rsplit("/", 1)[-1] and key not in near]
            raise MetricMissing(said.format(repr(pattern)) + (f"; near are {', '.join(near[:3])}" if near else ""))
        found += own
    return list(dict.fromkeys(found))


def _of_curve(spec: MetricSpec, curve: pandas.Series, say: Say) -> float:
    window = int(spec.options.get("window", 1))
    if spec.kind in ("last", "first"):
        used = curve.tail(window) if spec.kind == "last" else curve.head(window)
        if bad := _not_finite(used):
            raise MetricMissing(f"{curve.name} is not a finite number at {bad}")
        return statistics.fmean(used)
    if spec.kind == "spikes":
        return float(len(spike_steps(curve, spec.options.get("factor", 3.0))))
    finite = _finite(curve, say)
    if finite.empty:
        raise MetricMissing(f"{curve.name} is not a finite number at any step")
    if spec.kind == "best":
        means = finite.rolling(min(window, len(finite))).apply(statistics.fmean, raw=True)
        return float(means.min() if spec.higher is False else means.max())
    value = spike(finite) if spec.kind == "spike" else statistics.fmean(finite)
    if math.isnan(value):
        raise MetricMissing(f"the median of {curve.name} is 0")
    return value


def _not_finite(curve: pandas.Series) -> str:
    """The steps at which a curve is not a finite number, as a text; empty if there are none."""
    steps = curve.index[~numpy.isfinite(curve)].tolist()
    shown = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
    return f"step{'' if len(steps) == 1 else 's'} {shown}" if steps else ""


def _finite(curve: pandas.Series, say: Say) -> pandas.Series:
    """The numbers of a curve; what is none is said."""
    if bad := _not_finite(curve):
        say(f"{curve.name} is not a finite number at {bad}: left out there")
    return curve[numpy.isfinite(curve)]


def _token_counts(spec: MetricSpec, run: Run) -> pandas.Series:
    (key,) = matching([spec.options.get("tokens_key", "perf/total_num_tokens")], list(run.curves))
    if bad := _not_finite(run.curves[key].reindex(range(1, run.end + 1))):
        raise MetricMissing(f"{key} is not known at {bad}")
    return run.curves[key]


def spike(norms: pandas.Series, peaks: pandas.Series | None = None) -> float:
    """Largest gradient norm over the median of all steps; NaN without a positive median. `norms` are means over a
    step's updates, `peaks` the largest of a step's updates, if they are known.
    """
    middle = norms.median()
    largest = (norms if peaks is None or peaks.empty else peaks).max()
    return float(largest / middle) if middle > 0 else math.nan


def spike_steps(norms: pandas.Series, factor: float = 3.0, window: int = 20) -> list[int]:
    """Steps with a gradient-norm spike: a value above `factor` times the median of the `window` (at least 3) values
    before. The first three values have too little before them and are never spikes. A value that is not finite is one
    wherever it stands, and is left out of the medians.
    """
    finite = norms[numpy.isfinite(norms)]
    median = finite.rolling(window, min_periods=3).median().shift()
    # The median is unknown (NaN) for the first ones, and nothing is above that.
    return sorted({*norms.index.difference(finite.index), *finite.index[finite > factor * median]})


def tokens_to(tokens: pandas.Series, scores: pandas.Series, threshold: float, window: int = 1) -> float | None:
    """Token cost of a score: tokens of all steps up to the first at which the mean of the last `window` scores reaches
    the threshold; None if it is not reached. `tokens` are of the batch, by training step; `scores` may be known at some
    steps only, and at step 0 (before training, at no cost).
    """
    # The exactly rounded mean: a score that equals the threshold reaches it.
    means = scores.rolling(window).apply(statistics.fmean, raw=True)
    reached = means.index[means >= threshold]
    return math.fsum(tokens[tokens.index <= reached[0]]) if len(reached) else None


def _of_dump(spec: MetricSpec, run: Run, say: Say) -> float:
    """avg@k, pass@k or Fast@p: the mean over sources of the mean over tasks.

    A sample without a score has failed; so have those that are missing up to k, and a task without any. With more than
    k samples of a task all of them are used: the expectation is the same and the noise is less. Fast@p wants an answer
    that is correct and at least `p` times as fast as the reference: KernelBench (arXiv 2502.10517) writes "greater than
    p", Dr. Kernel (arXiv 2602.05885) reports ">= p"; the latter is used. A correct answer without a measured speedup
    does not count.
    """
    samples = _samples(spec, run, say)
    scores = _field(samples, spec, "score_key", ("acc", "score")).fillna(0.0)
    k = int(spec.options.get("k", 1))
    if spec.kind == "fast_at":
        speedup = _field(samples, spec, "speedup_key", ("speedup",))
        scores = ((scores >= 1.0) & (speedup >= spec.options["p"])).astype(float)
    tasks = scores.groupby([samples["source"], samples["task"]])
    if short := int((tasks.size() < k).sum()):
        say(f"{spec.label}: {short} tasks have fewer than {k} samples; those missing count as failed")
    if spec.kind == "pass_at_k":
        values = tasks.agg(lambda own: pass_at_k(max(len(own), k), int((own >= 1.0).sum()), k))
    else:
        values = tasks.sum() / tasks.size().clip(lower=k)
    return float(values.groupby("source").mean().mean())


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased pass@k of one task, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1): the chance
    that `k` of n `samples` without replacement hold one of the c `correct` ones. Raises ValueError: no such case.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {correct} correct ones among {samples} samples")
    # Whole numbers until the last division, which Python rounds exactly.
    draws = math.comb(samples, k)
    return (draws - math.comb(samples - correct, k)) / draws


def _samples(spec: MetricSpec, run: Run, say: Say) -> pandas.DataFrame:
    """Samples of the last validation with their ``source``, which is the same for all if none is asked for."""
    dump = last_dump(run.path / "validation", run.end)
    samples, problems = read_dump(dump)
    for text in problems:
        say(text)
    if not (wanted := spec.options.get("source", ())):
        return samples.assign(source="")
    known = sorted(set(samples["source"].dropna()))
    if not known:
        raise MetricMissing(f"data sources are not known: a run of this version writes {dump.stem}.tasks.json")
    said = "no sample of data source {} is in the validation dump"
    names = matching([wanted] if isinstance(wanted, str) else wanted, known, said)
    return samples[samples["source"].isin(names)]


def _field(samples: pandas.DataFrame, spec: MetricSpec, option: str, names: Sequence[str]) -> pandas.Series:
    """A number of each sample; NaN if it is null."""
    wanted = [spec.options[option]] if option in spec.options else names
    for name in wanted:
        if name in samples:
            return samples[name].map(lambda value: float(value) if isinstance(value, int | float) else math.nan)
    there = ", ".join(sorted(set(samples) - {"task", "source"}))
    raise MetricMissing(f"the validation dump has no field {' or '.join(map(repr, wanted))}; it has {there}")
