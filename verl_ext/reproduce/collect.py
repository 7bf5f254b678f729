# SPDX-License-Identifier: Apache-2.0
"""From the finished runs of a table to its numbers: values by cell, metric and seed, and how they differ.

What a metric's ``kind`` means (the functions are in :mod:`verl_ext.reproduce.metrics`; `keys` are names of logged
metrics or patterns as in a shell, and a value is the mean over the keys that match):

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

The dumps are what verl writes below ``trainer.validation_data_dir`` (:mod:`verl_ext.reproduce.dumps`); `score_key`
(``acc``, else ``score``) is the field that is 1 for a correct answer, `speedup_key` (``speedup``) the measured speedup,
`source` the data sources that are wanted, names or patterns, each of which then weighs the same.
"""

from __future__ import annotations

import difflib
import math
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import pandas

from verl_ext.report.logs import LogError, read_run
from verl_ext.reproduce import metrics
from verl_ext.reproduce.dumps import DumpMissing, last_dump, read_dump, sources_of
from verl_ext.reproduce.metrics import Interval
from verl_ext.reproduce.runs import COMPLETE, DEFAULT_OUT, RunFolder, find_runs, identity
from verl_ext.reproduce.tables import SCALES, Cell, MetricSpec, Published, Scale, Table, scale_of

VALIDATION_FOLDER = "validation"
"""Folder of a run that verl's validation dumps go to."""

FIGURE_WINDOW = 5
"""Steps at the end of a run over which figures of agents and levels are averaged."""

REWARD_KEYS = ("trajectory/reward/mean", "critic/score/mean")
VALIDATION_KEYS = ("val-core/*/mean@*",)
AGENT_SPIKE = "largest grad_norm of an update over the steps' median"

SHOWN, NOT_SHOWN, OPPOSITE, UNKNOWN = "shown", "not shown", "opposite", "unknown"
NOT_REACHED = "not reached"


class CollectError(ValueError):
    """There is nothing to make a table of; the message says which command makes it."""


class MetricMissing(ValueError):
    """A run has no value of a metric; the message says why."""


@dataclass(frozen=True)
class Summary:
    """A metric of a cell over seeds, in the unit in which it is shown (times 100 if a percentage).

    Attributes:
        values: by seed; None where there is none.
        reasons: why not, by seed.
    """

    values: Mapping[int, float | None]
    reasons: Mapping[int, str] = field(default_factory=dict)

    @property
    def unreached(self) -> list[int]:
        """Seeds whose score did not reach its threshold: they have no token cost, and without them a mean would be
        too low."""
        return [seed for seed, reason in self.reasons.items() if reason == NOT_REACHED]

    @property
    def known(self) -> list[float]:
        """Values that there are, in order of seed."""
        return [value for _, value in sorted(self.values.items()) if value is not None]

    @property
    def mean(self) -> float | None:
        """Mean over the seeds that have a value; None if there is none or one has not reached the threshold."""
        return statistics.fmean(self.known) if self.known and not self.unreached else None

    @property
    def std(self) -> float | None:
        """Standard deviation over seeds (ddof 1); None for fewer than two."""
        return statistics.stdev(self.known) if len(self.known) > 1 and not self.unreached else None


@dataclass(frozen=True)
class CellResult:
    """A cell of the table.

    Attributes:
        cell: of the table's file.
        steps: last step that is used, by seed.
        metrics: by name.
        agents, levels: further figures that the runs log, by name of the figure by agent or level.
        rewards, validation: curves for the picture, value by step by seed.
    """

    cell: Cell
    steps: Mapping[int, int]
    metrics: Mapping[str, Summary]
    agents: Mapping[str, Mapping[str, Summary]]
    levels: Mapping[str, Mapping[str, Summary]]
    rewards: Mapping[int, Mapping[int, float]]
    validation: Mapping[int, Mapping[int, float]]

    @property
    def seeds(self) -> list[int]:
        """Seeds in the means."""
        return sorted(self.steps)


@dataclass(frozen=True)
class Difference:
    """A cell against another one in one metric.

    Attributes:
        cell, baseline, metric: names; the other cell is the table's baseline, or one that the claim sets against it.
        value: mean of the cell less mean of the other, in the shown unit.
        interval: Welch's 95 % interval; None where one side has a single seed.
        verdict: `SHOWN` (outside the noise, in the direction that the metric calls better), `OPPOSITE`, `NOT_SHOWN`
            (inside the noise) or `UNKNOWN` (one seed).
    """

    cell: str
    baseline: str
    metric: str
    value: float
    interval: Interval | None
    verdict: str


@dataclass(frozen=True)
class Beside:
    """A number of the paper beside ours (full scale).

    Attributes:
        published: the paper's, with its certainty.
        ours: the same quantity from our runs; None if there are none.
        interval: its 95 % interval over seeds; None if the noise is unknown.
    """

    published: Published
    ours: float | None
    interval: Interval | None

    @property
    def gap(self) -> float | None:
        """Ours less the paper's."""
        return None if self.ours is None else self.ours - self.published.value

    @property
    def inside(self) -> bool | None:
        """Is the paper's number inside our interval? None if that cannot be said."""
        return None if self.interval is None else self.interval.holds(self.published.value)


@dataclass(frozen=True)
class Result:
    """A collected table.

    Attributes:
        table: its definition.
        scale: the scale that was collected.
        folder: the table's folder among runs.
        cells: by name, in the table's order.
        differences: to the baseline, in the order of cells and metrics; then those of the scale's `versus`.
        beside: the paper's numbers beside ours; empty at laptop scale, where they are not comparable.
        versions: of the packages that the runs were made with, by name.
        dates: first and last day on which the runs were made (ISO), None if unknown.
        problems: what is missing, left out or odd, a sentence each.
        commands: that make this table.
    """

    table: Table
    scale: Scale
    folder: Path
    cells: Mapping[str, CellResult]
    differences: Sequence[Difference]
    beside: Sequence[Beside]
    versions: Mapping[str, Sequence[str]]
    dates: tuple[str, str] | None
    problems: Sequence[str]
    commands: Sequence[str]


def collect(table: Table, scale: str, out: Path) -> Result:
    """The numbers of a table, from its complete runs.

    Args:
        table: its definition; at laptop scale it may be one whose laptop scale is another table's.
        scale: ``full`` or ``laptop``.
        out: folder of all runs (``runs/reproduce``).

    Raises:
        CollectError: no run is complete; the message says which command makes or completes them.
    """
    table, part = scale_of(table, scale)
    folder = Path(out) / table.folder / scale
    notes = Notes()
    runs = _runs(table, part, Path(out), notes)
    if not runs:
        said = "".join(f"\n  {text}" for text in notes.texts())
        other = next((name for name in SCALES if name != scale and (folder.parent / name).is_dir()), None)
        if other is not None:
            said += f"\n  There are runs at {other} scale: --scale {other}"
        command, _ = _commands(table, part, Path(out))
        raise CollectError(f"no complete run of {table.name} at {scale} scale in {folder}.{said}\nRun: {command}")
    limits = _limits(runs, notes)

    cells = {}
    for name, cell in part.cells.items():
        own = {run.seed: run.until(limits[run.cell]) for run in runs if run.cell == name}
        if cell.runnable:
            for seed in part.seeds:
                if seed not in own:
                    notes.add("no complete run", f"{name}/seed_{seed}")
        cells[name] = _cell_result(cell, part, own, notes)
    return Result(
        table=table,
        scale=part,
        folder=folder,
        cells=cells,
        differences=_differences(part, cells),
        beside=_beside(table, cells) if scale == "full" else (),
        versions=_versions(runs, notes),
        dates=_dates(runs),
        problems=notes.texts(),
        commands=_commands(table, part, Path(out), runs),
    )


# --- runs ---------------------------------------------------------------------------------------------------------


class Notes:
    """Problems, each said once with the runs that have it."""

    def __init__(self) -> None:
        self._runs: dict[str, list[str]] = {}

    def add(self, text: str, run: str = "") -> None:
        """Note a problem of a run, by its name ``<cell>/seed_<n>``, or of the whole table."""
        runs = self._runs.setdefault(text, [])
        if run and run not in runs:
            runs.append(run)

    def texts(self) -> list[str]:
        """A sentence each, in the order in which they were first noted; seeds of a cell stand together."""
        out = []
        for text, runs in self._runs.items():
            cells: dict[str, list[str]] = {}
            for run in runs:
                cell, _, seed = run.rpartition("/seed_")
                cells.setdefault(cell, []).append(seed)
            names = [
                f"{cell}/seed_{seeds[0]}" if len(seeds) == 1 else f"{cell} (seeds {', '.join(seeds)})"
                for cell, seeds in cells.items()
            ]
            out.append(f"{', '.join(names)}: {text}" if names else text)
        return out


@dataclass(frozen=True)
class Run:
    """A complete run.

    Attributes:
        cell, seed: which.
        path: its folder.
        log: ``step``, ``metric`` and ``value``, a row for each value that was logged, in order of step. A value that
            was no number is NaN.
        planned: steps that it was to make, None if unknown.
        record: its ``cell.json``.
        sources: data sets that it validates on.
    """

    cell: str
    seed: int
    path: Path
    log: pandas.DataFrame
    planned: int | None
    record: Mapping[str, Any]
    sources: Sequence[str] = ()

    @property
    def name(self) -> str:
        """``<cell>/seed_<n>``."""
        return f"{self.cell}/seed_{self.seed}"

    @property
    def end(self) -> int:
        """Last step."""
        return int(self.log["step"].max())

    @cached_property
    def curves(self) -> dict[str, pandas.Series]:
        """Value by step of each metric, where it is logged; metrics in order of name."""
        return {key: own.set_index("step")["value"].rename(key) for key, own in self.log.groupby("metric")}

    def until(self, limit: int) -> Run:
        """The run up to a step."""
        return replace(self, log=self.log[self.log["step"] <= limit])


def long_log(steps: Mapping[int, Mapping[str, float]]) -> pandas.DataFrame:
    """Metrics by step as the `log` of a `Run`."""
    rows = [(step, key, value) for step, values in sorted(steps.items()) for key, value in values.items()]
    return pandas.DataFrame(rows, columns=["step", "metric", "value"]).astype({"value": float})


def _runs(table: Table, scale: Scale, out: Path, notes: Notes) -> list[Run]:
    """Complete runs of the table; all others are noted."""
    found = []
    for folder in find_runs(out, table, scale.name):
        run = _read(folder, table, scale, notes)
        if run is not None:
            found.append((run, folder.fingerprint_ok))
    # Runs that agree with each other, though not with the table, are comparable: those like the last one are used.
    kept: dict[str, Run] = {}
    for run, _ in sorted(found, key=lambda one: (one[1], str(one[0].record.get("started", "")))):
        kept[run.cell] = run
    runs = []
    for run, sound in found:
        if sound or run.record.get("settings") == kept[run.cell].record.get("settings"):
            runs.append(run)
        else:
            notes.add("left out: its settings are not those of the cell's other runs", run.name)
    extras = {run.name: " ".join(run.record.get("extra", ())) for run in runs}
    for name, extra in extras.items():
        if extra:
            notes.add(f"run with further overrides: {extra}", name)
    if len(set(extras.values())) > 1:
        notes.add("not all runs have the same further overrides: differences may come of those")
    return runs


def _read(folder: RunFolder, table: Table, scale: Scale, notes: Notes) -> Run | None:
    name = f"{folder.cell}/seed_{folder.seed}"
    record = folder.record
    cell = scale.cells.get(folder.cell)
    if cell is None:
        notes.add(f"left out: {table.name} has no such cell at {scale.name} scale", name)
        return None
    meant = identity(table, scale, cell, folder.seed)
    for problem in folder.problems:
        notes.add(_without(folder.path, problem), name)
    if any(record.get(key) != value for key, value in meant.items()):
        notes.add("left out: it is not known as a run of this cell and seed", name)
        return None
    complete = record.get("state") == COMPLETE
    try:
        log = read_run(folder.path, anew=True)
    except LogError as error:
        text = _without(folder.path, f"left out: {error}")
        notes.add(text if complete else "left out: no step is logged yet", name)
        return None
    for problem in log.problems:
        notes.add(_without(folder.path, problem), name)
    planned = record.get("steps") or scale.steps
    run = Run(folder.cell, folder.seed, folder.path, long_log(log.steps), planned, record, scale.data.get("val", ()))
    if not complete:
        state = f"{record.get('state')}, at step {run.end}{_of(run.planned)}"
        notes.add(f"left out: not complete ({state}); the run command goes on with it", name)
        return None
    if run.planned and run.end < run.planned:
        if 2 * run.end < run.planned:
            notes.add(f"its metrics end at step {run.end}{_of(run.planned)}, before the half of them: left out", name)
            return None
        notes.add(f"its metrics end at step {run.end}{_of(run.planned)}", name)
    if scale.steps and run.planned and run.planned != scale.steps:
        notes.add(f"a run of {run.planned} steps; the table has {scale.steps}", name)
    return run


def _without(folder: Path, text: str) -> str:
    """A problem of a run without the path of its folder, since the run's name stands before it."""
    return text.replace(f"{folder}/", "").replace(str(folder), "the folder")


def _of(planned: int | None) -> str:
    return f" of {planned}" if planned else ""


def _limits(runs: Sequence[Run], notes: Notes) -> dict[str, int]:
    """Last step that is used, by cell: the last that all runs have, of all cells that were to make as many steps."""
    rows = [(run.cell, run.name, run.planned, run.end) for run in runs]
    frame = pandas.DataFrame(rows, columns=["cell", "name", "planned", "end"])
    plans = frame.groupby("planned", sort=False, dropna=False)
    for _, same in plans:
        if same["end"].nunique() > 1:
            first = same.sort_values(["end", "name"]).head(6)
            said = ", ".join(f"{name} at {end}" for name, end in zip(first["name"], first["end"], strict=True))
            common = same["end"].min()
            notes.add(f"runs end at different steps ({said}): all are used up to step {common}, the last in common")
    return plans["end"].transform("min").groupby(frame["cell"]).min().to_dict()


def _versions(runs: Sequence[Run], notes: Notes) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for run in runs:
        given = run.record.get("versions")
        for package, version in given.items() if isinstance(given, dict) else ():
            if version and str(version) not in found.setdefault(str(package), []):
                found[str(package)].append(str(version))
    for package, versions in found.items():
        if len(versions) > 1:
            notes.add(f"the runs were made with different versions of {package}: {', '.join(versions)}")
    return {package: versions for package, versions in found.items() if versions}


def _dates(runs: Sequence[Run]) -> tuple[str, str] | None:
    """First and last day of the runs (ISO)."""
    days = sorted(str(run.record[key])[:10] for run in runs for key in ("started", "ended") if run.record.get(key))
    return (days[0], days[-1]) if days else None


def _commands(table: Table, scale: Scale, out: Path, runs: Sequence[Run] = ()) -> tuple[str, str]:
    """The commands that make the runs and the table."""
    options = ["--scale", scale.name]
    if out.absolute() != DEFAULT_OUT.absolute():
        where = out.absolute()
        options += ["--out", str(where.relative_to(Path.cwd()) if where.is_relative_to(Path.cwd()) else where)]
    own: list[str] = []
    seeds = sorted({run.seed for run in runs})
    if not set(seeds) <= set(scale.seeds):
        own += ["--seeds", *map(str, seeds)]
    planned = {run.planned for run in runs}
    if len(planned) == 1 and (steps := planned.pop()) is not None and steps != scale.steps:
        own += ["--steps", str(steps)]
    extras = {tuple(run.record.get("extra", ())) for run in runs}
    own += extras.pop() if len(extras) == 1 else ()
    start = ["verl-ext", "reproduce"]
    return shlex.join([*start, "run", table.name, *options, *own]), shlex.join(
        [*start, "collect", table.name, *options]
    )


# --- metrics of a run ---------------------------------------------------------------------------------------------

Say = Callable[[str], None]


def evaluate(spec: MetricSpec, run: Run, say: Say = lambda text: None) -> float | None:
    """A metric of a run, as it is logged (not yet times 100).

    Args:
        spec: the metric.
        run: up to the step that counts.
        say: called with what is odd about the run, though there is a value.

    Returns:
        The value; None for a score that does not reach its threshold.

    Raises:
        MetricMissing: there is no value.
    """
    if spec.kind in _OF_RUN:
        return _OF_RUN[spec.kind](spec, run, say)
    keys = matching(_names(spec.options["keys"]), list(run.curves))
    return statistics.fmean(_OF_CURVE[spec.kind](spec, run.curves[key], say) for key in keys)


def matching(
    patterns: Sequence[str], logged: Sequence[str], what: str = "metric", where: str = "is logged"
) -> list[str]:
    """Names that match one of the patterns, each once.

    Args:
        patterns: names, or patterns as in a shell (``*`` also stands for a ``/``).
        logged: what there is.
        what, where: for the message.

    Raises:
        MetricMissing: a pattern matches none; the message names the nearest.
    """
    found: list[str] = []
    for pattern in patterns:
        # A name may hold brackets, which would be a set of letters in a pattern.
        own = [pattern] if pattern in logged else [key for key in logged if fnmatchcase(key, pattern)]
        if not own:
            raise MetricMissing(f"no {what} {pattern!r} {where}{_near(pattern, logged)}")
        found += [key for key in own if key not in found]
    return found


def _names(option: Sequence[str] | str) -> list[str]:
    return [option] if isinstance(option, str) else list(option)


def _near(pattern: str, logged: Sequence[str]) -> str:
    names = difflib.get_close_matches(pattern, logged, n=3, cutoff=0.6)
    ending = pattern.rsplit("/", 1)[-1]
    names += [key for key in logged if key.rsplit("/", 1)[-1] == ending and key not in names][: 3 - len(names)]
    return f"; near are {', '.join(names)}" if names else ""


def _not_finite(curve: pandas.Series) -> str:
    """The steps at which a curve is not a finite number, as a text; empty if there are none."""
    steps = curve.index[~numpy.isfinite(curve)].tolist()
    shown = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
    return "" if not steps else f"step {shown}" if len(steps) == 1 else f"steps {shown}"


def _finite(curve: pandas.Series, say: Say) -> pandas.Series:
    """The numbers of a curve; what is none is said."""
    if bad := _not_finite(curve):
        say(f"{curve.name} is not a finite number at {bad}: left out there")
    return curve[numpy.isfinite(curve)]


def _some(curve: pandas.Series, say: Say) -> pandas.Series:
    """As `_finite`, and an error if there is none."""
    finite = _finite(curve, say)
    if finite.empty:
        raise MetricMissing(f"{curve.name} is not a finite number at any step")
    return finite


def _end(spec: MetricSpec, curve: pandas.Series, say: Say) -> float:
    window = int(spec.options.get("window", 1))
    used = curve.tail(window) if spec.kind == "last" else curve.head(window)
    if bad := _not_finite(used):
        raise MetricMissing(f"{curve.name} is not a finite number at {bad}")
    return statistics.fmean(used)


def _best(spec: MetricSpec, curve: pandas.Series, say: Say) -> float:
    finite = _some(curve, say)
    window = min(int(spec.options.get("window", 1)), len(finite))
    means = finite.rolling(window).apply(statistics.fmean, raw=True)
    return float(means.min() if spec.higher is False else means.max())


def _spike(spec: MetricSpec, curve: pandas.Series, say: Say) -> float:
    value = metrics.spike(_some(curve, say))
    if math.isnan(value):
        raise MetricMissing(f"the median of {curve.name} is 0")
    return value


_OF_CURVE: Mapping[str, Callable[[MetricSpec, pandas.Series, Say], float]] = {
    "last": _end,
    "first": _end,
    "mean": lambda spec, curve, say: statistics.fmean(_some(curve, say)),
    "best": _best,
    "spike": _spike,
    "spikes": lambda spec, curve, say: float(
        len(metrics.spike_steps(curve, spec.options.get("factor", metrics.SPIKE_FACTOR)))
    ),
}
"""Kinds of metrics that are the mean over keys of what each key's curve gives."""


def _token_counts(spec: MetricSpec, run: Run) -> pandas.Series:
    key = spec.options.get("tokens_key", metrics.TOKENS_KEY)
    if key not in run.curves:
        raise MetricMissing(f"no metric {key!r} is logged{_near(key, list(run.curves))}")
    counts = run.curves[key]
    if bad := _not_finite(counts.reindex(range(1, run.end + 1))):
        raise MetricMissing(f"{key} is not known at {bad}")
    return counts


def _tokens(spec: MetricSpec, run: Run, say: Say) -> float:
    return math.fsum(_token_counts(spec, run))


def _tokens_to(spec: MetricSpec, run: Run, say: Say) -> float | None:
    keys = matching(_names(spec.options["keys"]), list(run.curves))
    joint = pandas.concat([run.curves[key] for key in keys], axis=1, join="inner").sort_index()
    scores = _finite(joint.agg(statistics.fmean, axis=1).rename(", ".join(keys)), say)
    # `higher` speaks of the cost; a score is reached from below.
    return metrics.tokens_to(_token_counts(spec, run), scores, spec.options["threshold"], spec.options.get("window", 1))


def _samples(spec: MetricSpec, run: Run, say: Say) -> pandas.DataFrame:
    """Samples of the last validation with their ``source``, which is the same for all if none is asked for."""
    try:
        dump = last_dump(run.path / VALIDATION_FOLDER, run.end)
        samples, problems = read_dump(dump)
        samples = samples.assign(source="")
        wanted = _names(spec.options.get("source", ()))
        # With one data set there is nothing to tell apart.
        if wanted and len(run.sources) != 1:
            sources, unplaced = sources_of(dump, run.sources)
            names = matching(
                wanted, sorted(set(sources.values())), "sample of data source", "is in the validation dump"
            )
            samples["source"] = samples["task"].map(sources)
            samples, problems = samples[samples["source"].isin(names)], [*unplaced, *problems]
    except DumpMissing as error:
        raise MetricMissing(str(error)) from error
    for text in problems:
        say(text)
    return samples


def _field(samples: pandas.DataFrame, spec: MetricSpec, option: str, names: Sequence[str]) -> pandas.Series:
    """A number of each sample; NaN if it is null."""
    wanted = [spec.options[option]] if option in spec.options else names
    for name in wanted:
        if name in samples:
            return samples[name].map(lambda value: float(value) if isinstance(value, int | float) else math.nan)
    there = ", ".join(sorted(set(samples) - {"task", "source"}))
    raise MetricMissing(f"the validation dump has no field {' or '.join(map(repr, wanted))}; it has {there}")


def _score(samples: pandas.DataFrame, spec: MetricSpec) -> pandas.Series:
    return _field(samples, spec, "score_key", ("acc", "score"))


def _over_tasks(samples: pandas.DataFrame, values: pandas.Series, of_task: Callable[[pandas.Series], float]) -> float:
    """Mean over sources of the mean over tasks of what a task's values give."""
    tasks = values.groupby([samples["source"], samples["task"]]).agg(of_task)
    return statistics.fmean(tasks.groupby("source").agg(statistics.fmean))


def _at_k(spec: MetricSpec, run: Run, say: Say) -> float:
    """avg@k or pass@k. A sample without a score has failed; so have those that are missing up to k.

    With more than k samples of a task all of them are used: the expectation is the same and the noise is less.
    """
    k = int(spec.options.get("k", 1))
    samples = _samples(spec, run, say)
    scores = _score(samples, spec).fillna(0.0)
    if short := int((scores.groupby([samples["source"], samples["task"]]).size() < k).sum()):
        say(f"{spec.label}: {short} tasks have fewer than {k} samples; those missing count as failed")
    if spec.kind == "avg_at_k":
        return _over_tasks(samples, scores, lambda task: math.fsum(task) / max(len(task), k))
    correct = scores >= 1.0
    return _over_tasks(samples, correct, lambda task: metrics.pass_at_k(max(len(task), k), int(task.sum()), k))


def _fast_at(spec: MetricSpec, run: Run, say: Say) -> float:
    samples = _samples(spec, run, say)
    speedup = _field(samples, spec, "speedup_key", ("speedup",))
    fast = metrics.fast(_score(samples, spec) >= 1.0, speedup, spec.options["p"])
    return _over_tasks(samples, fast.astype(float), statistics.fmean)


_OF_RUN: Mapping[str, Callable[[MetricSpec, Run, Say], float | None]] = {
    "tokens": _tokens,
    "tokens_to": _tokens_to,
    "avg_at_k": _at_k,
    "pass_at_k": _at_k,
    "fast_at": _fast_at,
}
"""The other kinds."""


# --- cells and their differences ----------------------------------------------------------------------------------


def _cell_result(cell: Cell, scale: Scale, runs: Mapping[int, Run], notes: Notes) -> CellResult:
    runs = dict(sorted(runs.items()))
    log = pandas.concat([run.log.assign(seed=seed) for seed, run in runs.items()] or [long_log({}).assign(seed=0)])
    log["value"] = log["value"].where(numpy.isfinite(log["value"]))
    keys = sorted(log["metric"].unique())
    rewards = [_curves(log, (key,)) for key in REWARD_KEYS]
    return CellResult(
        cell=cell,
        steps={seed: run.end for seed, run in runs.items()},
        metrics={name: _summary(spec, runs, notes) for name, spec in scale.metrics.items()},
        agents=_agents(metrics.agent_figures(keys), log, list(runs)),
        levels=_figures(metrics.level_figures(keys), log, list(runs)),
        rewards={seed: rewards[0].get(seed) or rewards[1].get(seed, {}) for seed in runs},
        validation=_curves(log, VALIDATION_KEYS),
    )


def _summary(spec: MetricSpec, runs: Mapping[int, Run], notes: Notes) -> Summary:
    values: dict[int, float | None] = {}
    reasons: dict[int, str] = {}
    for seed, run in runs.items():
        values[seed] = None
        try:
            value = evaluate(spec, run, lambda text, run=run: notes.add(text, run.name))  # type: ignore[misc]
        except MetricMissing as error:
            reasons[seed] = str(error)
            notes.add(f"no value of {spec.label}: {error}", run.name)
            continue
        if value is None:
            reasons[seed] = NOT_REACHED
        else:
            values[seed] = value * spec.times * (100 if spec.percent else 1)
    return Summary(values, reasons)


def _by_seed(values: Mapping[int, float], seeds: Sequence[int]) -> Summary:
    return Summary({seed: float(values[seed]) if seed in values else None for seed in seeds})


def _figures(
    keys: Mapping[str, Mapping[str, str]], log: pandas.DataFrame, seeds: Sequence[int]
) -> dict[str, dict[str, Summary]]:
    """Means over the last steps of figures that are shown beside the table."""
    ends = log.dropna().groupby(["metric", "seed"])["value"].agg(lambda own: statistics.fmean(own.tail(FIGURE_WINDOW)))
    means = {key: own.droplevel("metric").to_dict() for key, own in ends.groupby("metric")}
    return {
        name: {figure: _by_seed(means.get(key, {}), seeds) for figure, key in own.items()} for name, own in keys.items()
    }


def _agents(
    keys: Mapping[str, Mapping[str, str]], log: pandas.DataFrame, seeds: Sequence[int]
) -> dict[str, dict[str, Summary]]:
    """Figures of the agents of a team, with the spikes of their gradients' norms where those are logged."""
    if len(keys) < 2:  # what a lone agent does is in the table already
        return {}
    out = _figures(keys, log, seeds)
    known = log.dropna()
    for name in keys:
        spikes = {}
        for seed, own in known.groupby("seed"):
            norms, peaks = (
                own.loc[own["metric"] == f"agent/{name}/grad_norm/{kind}", "value"] for kind in ("mean", "max")
            )
            spikes[seed] = metrics.spike(norms, peaks)
        spikes = {seed: value for seed, value in spikes.items() if math.isfinite(value)}
        if spikes:
            out[name][AGENT_SPIKE] = _by_seed(spikes, seeds)
    return out


def _curves(log: pandas.DataFrame, patterns: Sequence[str]) -> dict[int, dict[int, float]]:
    """By seed and step the mean over the metrics that match; a step is left out where one of them is not finite."""
    keys = [key for key in log["metric"].unique() if any(fnmatchcase(key, pattern) for pattern in patterns)]
    means = log[log["metric"].isin(keys)].groupby(["seed", "step"])["value"].agg(statistics.fmean).dropna()
    return {seed: curve.droplevel("seed").to_dict() for seed, curve in means.groupby("seed")}


def _differences(scale: Scale, cells: Mapping[str, CellResult]) -> list[Difference]:
    pairs = [(name, scale.baseline) for name in cells if scale.baseline not in (None, name)]
    out = []
    for cell, other in [*pairs, *(pair for pair in scale.versus.items() if pair not in pairs)]:
        for name, spec in scale.metrics.items():
            ours, theirs = cells[cell].metrics[name], cells[str(other)].metrics[name]
            if ours.mean is None or theirs.mean is None:
                continue
            interval = metrics.welch(ours.known, theirs.known)
            verdict = verdict_of(interval, spec.higher)
            out.append(Difference(cell, str(other), name, ours.mean - theirs.mean, interval, verdict))
    return out


def verdict_of(interval: Interval | None, higher: bool | None) -> str:
    """What a difference says of a claim that the cell is better than the other one.

    Args:
        interval: of the difference, None if the noise is unknown.
        higher: whether higher is better; None for a metric of which the claim does not speak: `SHOWN` then means that
            there is a difference.
    """
    if interval is None:
        return UNKNOWN
    if interval.holds(0.0):
        return NOT_SHOWN
    return SHOWN if higher is None or (interval.value > 0) == higher else OPPOSITE


def _beside(table: Table, cells: Mapping[str, CellResult]) -> list[Beside]:
    out = []
    for published in table.published:
        own = cells[published.cell].metrics[published.metric]
        ours, interval = own.mean, metrics.mean_interval(own.known)
        if published.relative_to is not None:
            other = cells[published.relative_to].metrics[published.metric]
            ours = None if own.mean is None or other.mean is None else own.mean - other.mean
            interval = metrics.welch(own.known, other.known)
            if published.ratio:
                ours, interval = _change(own, other)
        out.append(Beside(published, ours, interval if ours is not None else None))
    return out


def _change(own: Summary, other: Summary) -> tuple[float | None, Interval | None]:
    """Change from the other cell's mean in percent, and Welch's interval of the logarithms, in percent too."""
    if own.mean is None or other.mean is None or min(*own.known, *other.known) <= 0:
        return None, None
    ours, theirs = ([math.log(value) for value in one.known] for one in (own, other))
    interval = metrics.welch(ours, theirs)
    change = 100 * (own.mean / other.mean - 1)
    if interval is not None:
        ends = [100 * math.expm1(end) for end in (interval.low, interval.high)]
        interval = replace(interval, value=change, low=ends[0], high=ends[1])
    return change, interval
