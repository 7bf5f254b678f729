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

from verl_ext.demo.curve import smooth
from verl_ext.report.logs import LogError, read_lines, read_run
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

SHOWN, NOT_SHOWN, OPPOSITE, UNKNOWN = "shown", "not shown", "opposite", "unknown"


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
        unreached: seeds whose score did not reach its threshold: they have no token cost, and without them a mean
            would be too low.
    """

    values: Mapping[int, float | None]
    reasons: Mapping[int, str] = field(default_factory=dict)
    unreached: tuple[int, ...] = ()

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
        return metrics.deviation(self.known) if not self.unreached else None

    @property
    def n(self) -> int:
        """Number of seeds in the mean."""
        return len(self.known)


@dataclass(frozen=True)
class CellResult:
    """A cell of the table.

    Attributes:
        name, label, note: of the table's file.
        runnable: False for a row that is published only.
        steps: last step that is used, by seed.
        metrics: by name.
        agents, levels: further figures that the runs log, by name of the figure by agent or level.
        rewards, validation: curves for the picture, value by step by seed.
    """

    name: str
    label: str
    note: str
    runnable: bool
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
        steps: metrics by step, in order.
        planned: steps that it was to make, None if unknown.
        record: its ``cell.json``.
        sources: data sets that it validates on.
    """

    cell: str
    seed: int
    path: Path
    steps: Mapping[int, Mapping[str, float]]
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
        return max(self.steps)

    @cached_property
    def logged(self) -> list[str]:
        """Names of all metrics, sorted."""
        return sorted({key for values in self.steps.values() for key in values})

    def until(self, limit: int) -> Run:
        """The run up to a step."""
        kept = {step: values for step, values in self.steps.items() if step <= limit}
        return replace(self, steps=kept)


def _runs(table: Table, scale: Scale, out: Path, notes: Notes) -> list[Run]:
    """Complete runs of the table; all others are noted."""
    found = []
    for folder in find_runs(out, table, scale.name):
        run = _read(folder, table, scale, notes)
        if run is not None:
            found.append((run, folder.fingerprint_ok))
    runs = []
    for run, sound in found:
        # Runs that agree with each other, though not with the table, are comparable: those like the last one are used.
        of_cell = [(ok, str(other.record.get("started", "")), other) for other, ok in found if other.cell == run.cell]
        kept = max(of_cell, key=lambda one: one[:2])[2]
        same = run.record.get("settings") == kept.record.get("settings")
        if not (sound or same):
            notes.add("left out: its settings are not those of the cell's other runs", run.name)
            continue
        runs.append(run)
    extras = {run.name: " ".join(run.record.get("extra", ())) for run in runs}
    for extra in dict.fromkeys(extras.values()):
        if extra:
            for name, own in extras.items():
                if own == extra:
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
        log = read_run(folder.path)
    except LogError as error:
        text = _without(folder.path, f"left out: {error}")
        notes.add(text if complete else "left out: no step is logged yet", name)
        return None
    steps, back = dict(log.steps), None
    if log.source == "jsonl":
        back, in_order = latest_run(list(read_lines(log.path)))
        if back is not None:
            steps = {step: {key: _number(v) for key, v in data.items()} for step, data in sorted(in_order.items())}
            last, first = back
            notes.add(
                f"the steps of its metrics go back from {last} to {first}: two runs in one file. Of the earlier one "
                f"only what is before step {first} is used",
                name,
            )
    for problem in log.problems:
        if back is None or "steps go back" not in problem:
            notes.add(_without(folder.path, problem), name)
    planned = record.get("steps") or scale.steps
    run = Run(folder.cell, folder.seed, folder.path, steps, planned, record, scale.data.get("val", ()))
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


def latest_run(
    lines: Sequence[tuple[int, Mapping[str, Any]]],
) -> tuple[tuple[int, int] | None, dict[int, dict[str, Any]]]:
    """Metrics by step of a log whose steps may go back: a step back takes away all that was logged from there on.

    After a resume the steps that are run again replace those of before; a second run from the start replaces all.

    Args:
        lines: (step, metrics) in the order in which they were logged.

    Returns:
        The last step back as (from, to), or None; and metrics by step.
    """
    back, steps = None, dict[int, dict[str, Any]]()
    previous = -1
    for step, data in lines:
        if step < previous:
            back = (previous, step)
            steps = {earlier: values for earlier, values in steps.items() if earlier < step}
        steps.setdefault(step, {}).update(data)
        previous = step
    return back, steps


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _of(planned: int | None) -> str:
    return f" of {planned}" if planned else ""


def _limits(runs: Sequence[Run], notes: Notes) -> dict[str, int]:
    """Last step that is used, by cell: the last that all runs have, of all cells that were to make as many steps."""
    limits: dict[str, int] = {}
    by_plan: dict[int | None, list[Run]] = {}
    for run in runs:
        by_plan.setdefault(run.planned, []).append(run)
    for same in by_plan.values():
        ends = sorted({run.end for run in same})
        if len(ends) > 1:
            said = ", ".join(
                f"{run.name} at {run.end}" for run in sorted(same, key=lambda run: (run.end, run.name))[:6]
            )
            notes.add(f"runs end at different steps ({said}): all are used up to step {ends[0]}, the last in common")
        for run in same:
            limits[run.cell] = min(limits.get(run.cell, ends[0]), ends[0])
    return limits


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
    return _EVALUATE[spec.kind](spec, run, say)


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


def _series(spec: MetricSpec, run: Run) -> dict[str, dict[int, float]]:
    """Value by step of each key of the metric."""
    return {
        key: {step: values[key] for step, values in run.steps.items() if key in values}
        for key in matching(_names(spec.options["keys"]), run.logged)
    }


def _over_keys(one: Callable[[MetricSpec, str, dict[int, float], Say], float]) -> Callable[..., float]:
    """An evaluation of a metric from that of one key's curve: the mean over keys."""

    def evaluation(spec: MetricSpec, run: Run, say: Say) -> float:
        return statistics.fmean(one(spec, key, curve, say) for key, curve in _series(spec, run).items())

    return evaluation


def _bad_steps(curve: Mapping[int, float]) -> list[int]:
    return [step for step, value in curve.items() if not math.isfinite(value)]


def _steps_text(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:5])) + (", ..." if len(steps) > 5 else "")
    return f"step {shown}" if len(steps) == 1 else f"steps {shown}"


def _finite(key: str, curve: Mapping[int, float], say: Say) -> list[float]:
    """The numbers of a curve; what is none is said."""
    bad = _bad_steps(curve)
    if bad:
        say(f"{key} is not a finite number at {_steps_text(bad)}: left out there")
    values = [value for value in curve.values() if math.isfinite(value)]
    if not values:
        raise MetricMissing(f"{key} is not a finite number at any step")
    return values


def _end(spec: MetricSpec, key: str, curve: dict[int, float], say: Say) -> float:
    window = int(spec.options.get("window", 1))
    used = dict(list(curve.items())[-window:] if spec.kind == "last" else list(curve.items())[:window])
    if bad := _bad_steps(used):
        raise MetricMissing(f"{key} is not a finite number at {_steps_text(bad)}")
    return metrics.last(list(used.values()), window)


def _mean(spec: MetricSpec, key: str, curve: dict[int, float], say: Say) -> float:
    return statistics.fmean(_finite(key, curve, say))


def _best(spec: MetricSpec, key: str, curve: dict[int, float], say: Say) -> float:
    values, window = _finite(key, curve, say), int(spec.options.get("window", 1))
    return metrics.best(smooth(values, window)[min(window, len(values)) - 1 :], spec.higher is not False)


def _spike(spec: MetricSpec, key: str, curve: dict[int, float], say: Say) -> float:
    value = metrics.spike(_finite(key, curve, say))
    if math.isnan(value):
        raise MetricMissing(f"the median of {key} is 0")
    return value


def _spikes(spec: MetricSpec, key: str, curve: dict[int, float], say: Say) -> float:
    return float(len(metrics.spike_steps(list(curve.values()), spec.options.get("factor", metrics.SPIKE_FACTOR))))


def _token_counts(spec: MetricSpec, run: Run) -> dict[int, float]:
    key = spec.options.get("tokens_key", metrics.TOKENS_KEY)
    counts = {step: values[key] for step, values in run.steps.items() if key in values}
    if not counts:
        raise MetricMissing(f"no metric {key!r} is logged{_near(key, run.logged)}")
    missing = [step for step in range(1, run.end + 1) if not math.isfinite(counts.get(step, math.nan))]
    if missing:
        raise MetricMissing(f"{key} is not known at {_steps_text(missing)}")
    return counts


def _tokens(spec: MetricSpec, run: Run, say: Say) -> float:
    return metrics.total_tokens(_token_counts(spec, run))


def _tokens_to(spec: MetricSpec, run: Run, say: Say) -> float | None:
    curves = _series(spec, run)
    steps = set.intersection(*(set(curve) for curve in curves.values()))
    joint = {step: statistics.fmean(curve[step] for curve in curves.values()) for step in sorted(steps)}
    if bad := _bad_steps(joint):
        say(f"{', '.join(curves)} is not a finite number at {_steps_text(bad)}: left out there")
    scores = {step: value for step, value in joint.items() if math.isfinite(value)}
    # `higher` speaks of the cost; a score is reached from below.
    return metrics.tokens_to(_token_counts(spec, run), scores, spec.options["threshold"], spec.options.get("window", 1))


# --- validation dumps ---------------------------------------------------------------------------------------------


def _dumped_tasks(spec: MetricSpec, run: Run, say: Say) -> list[list[list[Mapping[str, Any]]]]:
    """Records by data source, task and sample; one source if none is asked for."""
    try:
        dump = read_dump(last_dump(run.path / VALIDATION_FOLDER, run.end))
        groups = [list(dump.samples)]
        wanted = _names(spec.options.get("source", ()))
        # With one data set there is nothing to tell apart.
        if wanted and len(run.sources) != 1:
            sources, problems = sources_of(dump, run.sources)
            names = matching(
                wanted, sorted(set(sources.values())), "sample of data source", "is in the validation dump"
            )
            groups = [[sample for sample in dump.samples if sources.get(sample.task) == name] for name in names]
            for text in problems:
                say(text)
    except DumpMissing as error:
        raise MetricMissing(str(error)) from error
    for text in dump.problems:
        say(text)
    out = []
    for own in groups:
        tasks: dict[str, list[Mapping[str, Any]]] = {}
        for sample in own:
            tasks.setdefault(sample.task, []).append(sample.fields)
        out.append(list(tasks.values()))
    return out


def _field(record: Mapping[str, Any], spec: MetricSpec, option: str, names: Sequence[str]) -> float:
    """A number of a sample; NaN if it is null."""
    wanted = [spec.options[option]] if option in spec.options else names
    for name in wanted:
        if name in record:
            value = record[name]
            return float(value) if isinstance(value, int | float) else math.nan
    raise MetricMissing(
        f"the validation dump has no field {' or '.join(map(repr, wanted))}; it has {', '.join(sorted(record))}"
    )


def _scores(spec: MetricSpec, run: Run, say: Say, least: int) -> list[list[list[float]]]:
    """Scores by source, task and sample. A sample without a score has failed; so have those missing up to `least`."""
    out = []
    short = 0
    for tasks in _dumped_tasks(spec, run, say):
        rows = [[_field(record, spec, "score_key", ("acc", "score")) for record in task] for task in tasks]
        rows = [[0.0 if math.isnan(score) else score for score in task] for task in rows]
        short += sum(len(task) < least for task in rows)
        out.append([task + [0.0] * (least - len(task)) for task in rows])
    if short:
        say(f"{spec.label}: {short} tasks have fewer than {least} samples; those missing count as failed")
    return out


def _avg_at_k(spec: MetricSpec, run: Run, say: Say) -> float:
    least = int(spec.options.get("k", 1))
    return statistics.fmean(metrics.avg_at_k(tasks, least) for tasks in _scores(spec, run, say, least))


def _pass_at_k(spec: MetricSpec, run: Run, say: Say) -> float:
    k = int(spec.options["k"])
    return statistics.fmean(
        metrics.mean_pass_at_k([[score >= 1.0 for score in task] for task in tasks], k)
        for tasks in _scores(spec, run, say, k)
    )


def _fast_at(spec: MetricSpec, run: Run, say: Say) -> float:
    shares = []
    for tasks in _dumped_tasks(spec, run, say):
        own = []
        for task in tasks:
            correct = [_field(record, spec, "score_key", ("acc", "score")) >= 1.0 for record in task]
            speedup = [_field(record, spec, "speedup_key", ("speedup",)) for record in task]
            own.append(metrics.fast_at(correct, speedup, spec.options["p"]))
        shares.append(statistics.fmean(own))
    return statistics.fmean(shares)


_EVALUATE: Mapping[str, Callable[[MetricSpec, Run, Say], float | None]] = {
    "last": _over_keys(_end),
    "first": _over_keys(_end),
    "mean": _over_keys(_mean),
    "best": _over_keys(_best),
    "spike": _over_keys(_spike),
    "spikes": _over_keys(_spikes),
    "tokens": _tokens,
    "tokens_to": _tokens_to,
    "avg_at_k": _avg_at_k,
    "pass_at_k": _pass_at_k,
    "fast_at": _fast_at,
}


# --- cells and their differences ----------------------------------------------------------------------------------


def _cell_result(cell: Cell, scale: Scale, runs: Mapping[int, Run], notes: Notes) -> CellResult:
    summaries = {}
    for name, spec in scale.metrics.items():
        values: dict[int, float | None] = {}
        reasons: dict[int, str] = {}
        unreached = []
        for seed, run in sorted(runs.items()):
            try:
                value = evaluate(spec, run, lambda text, run=run: notes.add(text, run.name))  # type: ignore[misc]
            except MetricMissing as error:
                values[seed], reasons[seed] = None, str(error)
                notes.add(f"no value of {spec.label}: {error}", run.name)
                continue
            if value is None:
                unreached.append(seed)
                reasons[seed] = "not reached"
            values[seed] = None if value is None else value * spec.times * (100 if spec.percent else 1)
        summaries[name] = Summary(values, reasons, tuple(unreached))
    logged = sorted({key for run in runs.values() for key in run.logged})
    return CellResult(
        name=cell.name,
        label=cell.label,
        note=cell.note,
        runnable=cell.runnable,
        steps={seed: run.end for seed, run in sorted(runs.items())},
        metrics=summaries,
        agents=_agent_figures(logged, runs),
        levels=_figures(metrics.level_figures(logged), runs),
        rewards={seed: _curve(run, REWARD_KEYS[:1]) or _curve(run, REWARD_KEYS[1:]) for seed, run in runs.items()},
        validation={seed: _curve(run, VALIDATION_KEYS) for seed, run in runs.items()},
    )


def _figures(keys: Mapping[str, Mapping[str, str]], runs: Mapping[int, Run]) -> dict[str, dict[str, Summary]]:
    """Means over the last steps of figures that are shown beside the table."""
    out: dict[str, dict[str, Summary]] = {}
    for name, figures in keys.items():
        for figure, key in figures.items():
            values: dict[int, float | None] = {}
            for seed, run in sorted(runs.items()):
                curve = [step[key] for step in run.steps.values() if math.isfinite(step.get(key, math.nan))]
                values[seed] = metrics.last(curve, FIGURE_WINDOW) if curve else None
            out.setdefault(name, {})[figure] = Summary(values)
    return out


AGENT_SPIKE = "largest grad_norm of an update over the steps' median"


def _agent_figures(logged: Sequence[str], runs: Mapping[int, Run]) -> dict[str, dict[str, Summary]]:
    """Figures of the agents of a team, with the spikes of their gradients' norms where those are logged."""
    agents = metrics.agent_figures(logged)
    if len(agents) < 2:  # what a lone agent does is in the table already
        return {}
    out = _figures(agents, runs)
    for name in agents:
        values: dict[int, float | None] = {}
        for seed, run in sorted(runs.items()):
            norms, peaks = (
                [v for v in (step.get(f"agent/{name}/grad_norm/{kind}", math.nan) for step in run.steps.values())
                 if math.isfinite(v)]
                for kind in ("mean", "max")
            )  # fmt: skip
            value = metrics.spike(norms, peaks)
            values[seed] = value if math.isfinite(value) else None
        if any(value is not None for value in values.values()):
            out[name][AGENT_SPIKE] = Summary(values)
    return out


def _curve(run: Run, patterns: Sequence[str]) -> dict[int, float]:
    """Mean by step over the logged metrics that match; steps without a finite value are left out."""
    keys = [key for key in run.logged if any(fnmatchcase(key, pattern) for pattern in patterns)]
    out = {}
    for step, values in run.steps.items():
        own = [values[key] for key in keys if key in values]
        if own and all(map(math.isfinite, own)):
            out[step] = statistics.fmean(own)
    return out


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
