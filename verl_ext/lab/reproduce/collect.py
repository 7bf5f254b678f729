# SPDX-License-Identifier: Apache-2.0
"""From the finished runs of a table to its numbers: values by cell, metric and seed, and how they differ.

What a run has of a metric is computed by :mod:`verl_ext.lab.reproduce.metrics`, the noise by
:mod:`verl_ext.lab.reproduce.noise`. All that follows from the runs is in a few long frames, which are also what
``table.json`` holds.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy
import pandas

from verl_ext.common.overrides import Failure
from verl_ext.lab.report.logs import LogError, natural_order, read_run
from verl_ext.lab.reproduce import noise
from verl_ext.lab.reproduce.catalogue import scale_of
from verl_ext.lab.reproduce.metrics import MetricMissing, Run, Say, evaluate, spike
from verl_ext.lab.reproduce.noise import Interval
from verl_ext.lab.reproduce.runs import COMPLETE, DEFAULT_OUT, TRAINED, find_runs
from verl_ext.lab.reproduce.runs import Run as RunFolder
from verl_ext.lab.reproduce.tables import SCALES, Cell, Scale, Table

FIGURE_WINDOW = 5
"""Steps at the end of a run over which figures of agents and levels are averaged."""

#: Figures that stand beside the table, and the metrics that they are read from.
FIGURES = {
    "agent": r"agent/(?P<owner>.+)/(?P<figure>score/mean|gradient_energy_share|grad_norm/mean)",
    "level": r"(?P<owner>[^/]+/level_\d+)/(?P<figure>usable_share|group_size/mean)",
}
AGENT_SPIKE = "largest grad_norm of an update over the steps' median"

#: Curves of the picture: metrics or patterns, of which the first that a run has logged counts.
CURVES = {
    "training reward (mean of 5 steps)": ("trajectory/reward/mean", "critic/score/mean"),
    "validation": ("val-core/*/mean@*",),
}

SHOWN = "shown: better, outside the noise"
OPPOSITE = "reversed: worse, outside the noise"
NOT_SHOWN = "not shown: inside the noise"
DIFFERENT, SAME = "outside the noise (no direction is better)", "inside the noise (no direction is better)"
UNKNOWN = "one seed: noise unknown"
NO_SPREAD = "no spread among the seeds: noise unknown"
NOT_REACHED = "not reached"


class CollectError(Failure):
    """A table or a run cannot be used; the message says why, and which command makes it."""


@dataclass(frozen=True)
class Result:
    """A collected table. Values are in the unit in which they are shown (times 100 if a percentage)."""

    table: Table
    scale: Scale
    folder: Path  # the table's folder among runs
    # ``cell``, ``seed``, ``step``: the runs that are used, and the last step that is used of each
    ends: pandas.DataFrame
    # ``cell``, ``metric``, ``seed``, ``value`` (NaN if there is none) and ``reason`` (why there is none)
    values: pandas.DataFrame
    # ``what`` (agent or level), ``cell``, ``owner``, ``figure``, ``seed``, ``value``: means over the last steps
    figures: pandas.DataFrame
    # ``what``, ``cell``, ``seed``, ``step``, ``value``, for the picture
    curves: pandas.DataFrame
    # ``cell``, ``baseline``, ``metric``, ``difference``, ``verdict``, and the columns of `Interval`, NaN where a side
    # has a single seed or the seeds have no spread. To the table's baseline, in the order of cells and metrics; then
    # those of the scale's `versus`.
    differences: pandas.DataFrame
    # The paper's numbers (columns of `PublishedNumber`) with ``ours``, its ``low`` and ``high``, ``gap`` (ours less the
    # paper's) and ``verdict``; empty at laptop scale, where they are not comparable.
    beside: pandas.DataFrame
    panels: Mapping[
        str, str
    ]  # of environments' tasks, by data set: how many, and the digest, by seed where they differ
    versions: Mapping[str, Sequence[str]]  # of the packages that the runs were made with, by name
    dates: tuple[str, str] | None  # first and last day on which the runs were made (ISO)
    problems: Sequence[str]  # what is missing, left out or odd, a sentence each
    commands: Sequence[str]  # that make this table

    @property
    def shown(self) -> list[Cell]:
        """Cells that have runs, in the table's order."""
        return [cell for name, cell in self.scale.cells.items() if name in set(self.ends["cell"])]

    @cached_property
    def summary(self) -> pandas.DataFrame:
        """`summarised` values by cell and metric."""
        return summarised(self.values, ["cell", "metric"])


def summarised(values: pandas.DataFrame, by: Sequence[str]) -> pandas.DataFrame:
    """Over seeds: ``mean``, ``std`` (ddof 1), number of ``known`` values, of ``runs``, and of ``unreached`` ones.

    A run that does not reach its threshold has no token cost, and without it a mean would be too low: there is none.
    """
    groups = values.groupby(list(by), sort=False)
    found = groups["value"].agg(mean="mean", std="std", known="count", runs="size")
    found["unreached"] = groups["reason"].agg(lambda own: int((own == NOT_REACHED).sum()))
    return found.assign(**{key: found[key].where(found["unreached"] == 0) for key in ("mean", "std")})


def collect(table: Table, scale: str, out: Path) -> Result:
    """The numbers of a table, from its complete runs in `out`, the folder of all runs (``runs/reproduce``). Raises
    CollectError: no run is complete; the message says which command makes or completes them.
    """
    table, part = scale_of(table, scale)
    folder = Path(out) / table.folder / scale
    notes = Notes()
    runs = _runs(table, part, Path(out), notes)
    if not runs:
        others = [other for other in SCALES if other != scale and (folder.parent / other).is_dir()]
        said = [*notes.texts(), *(f"There are runs at {other} scale: --scale {other}" for other in others)]
        head = f"no complete run of {table.name} at {scale} scale in {folder}."
        raise CollectError("\n  ".join([head, *said]) + f"\nRun: {_commands(table, part, Path(out))[0]}")
    limits = _limits(runs, notes)
    runs = [run.until(limits[run.cell]) for run in runs]
    there = {(run.cell, run.seed) for run in runs}
    for cell, seed in itertools.product(part.runnable, part.seeds):
        if (cell, seed) not in there:
            notes.add("no complete run", cell, seed)
    values = _values(part, runs, notes)
    days = sorted(str(run.record[key])[:10] for run in runs for key in ("started", "ended") if run.record.get(key))
    log = pandas.concat(
        curve[numpy.isfinite(curve)].rename("value").to_frame().assign(cell=run.cell, seed=run.seed, metric=key)
        for run in runs for key, curve in run.curves.items()
    )  # fmt: skip
    return Result(
        table=table,
        scale=part,
        folder=folder,
        ends=pandas.DataFrame([(run.cell, run.seed, run.end) for run in runs], columns=["cell", "seed", "step"]),
        values=values,
        figures=_figures(log),
        curves=_curves(runs),
        differences=_differences(part, values),
        beside=_beside(table, values) if scale == "full" else pandas.DataFrame(),
        panels=_panels(runs, notes),
        versions=_versions(runs, notes),
        dates=(days[0], days[-1]) if days else None,
        problems=notes.texts(),
        commands=_commands(table, part, Path(out), runs),
    )


class Notes:
    """Problems, each said once with the runs that have it."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, list[int | None]]] = {}

    def add(self, text: str, cell: str = "", seed: int | None = None) -> None:
        """Note a problem of a run, or of the whole table."""
        seeds = self._found.setdefault(text, {}).setdefault(cell, [])
        if seed not in seeds:
            seeds.append(seed)

    def texts(self) -> list[str]:
        """A sentence each, in the order in which they were first noted; seeds of a cell stand together."""
        said = []
        for text, cells in self._found.items():
            own = [(cell, ", ".join(map(str, seeds)), len(seeds)) for cell, seeds in cells.items() if cell]
            runs = [f"{cell}/seed_{seeds}" if n == 1 else f"{cell} (seeds {seeds})" for cell, seeds, n in own]
            said.append(f"{', '.join(runs)}: {text}" if runs else text)
        return said


def _runs(table: Table, scale: Scale, out: Path, notes: Notes) -> list[Run]:
    """Complete runs of the table; all others are noted."""
    found = []
    for folder in find_runs(out, table, scale):
        said: list[str] = []
        try:
            found.append((_read(folder, said.append), not folder.problems))
        except CollectError as error:
            said.append(f"left out: {error}")
        for text in said:  # before which the run's name stands
            text = text.replace(f"{folder.path}/", "").replace(str(folder.path), "the folder")
            notes.add(text, folder.cell, folder.seed)
    # Runs that agree with each other, though not with the table, are comparable: those like the last one are used.
    by_start = sorted(found, key=lambda one: (one[1], str(one[0].record.get("started", ""))))
    kept = {run.cell: run.record.get("settings") for run, _ in by_start}
    plans = {cell: [run.planned for run, _ in found if run.cell == cell] for cell in kept}
    lengths = {cell: max(own, key=own.count) for cell, own in plans.items()}
    runs = []
    for run, sound in found:
        if not sound and run.record.get("settings") != kept[run.cell]:
            notes.add("left out: its settings are not those of the cell's other runs", run.cell, run.seed)
        elif run.planned != lengths[run.cell]:
            notes.add("left out: it was to make another number of steps than the cell's other runs", run.cell, run.seed)
        else:
            runs.append(run)
            if run.seed not in scale.seeds:
                notes.add("a seed that the table does not have", run.cell, run.seed)
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{cell} {length or 'the whole length'}" for cell, length in lengths.items())
        notes.add(f"cells were to make different numbers of steps ({each}): differences may come of those")
    extras = [" ".join(run.record.get("extra", [])) for run in runs]
    for run, extra in zip(runs, extras, strict=True):
        if extra:
            notes.add(f"run with further overrides: {extra}", run.cell, run.seed)
    if len(set(extras)) > 1:
        notes.add("not all runs have the same further overrides: differences may come of those")
    return runs


def _read(folder: RunFolder, note: Say) -> Run:
    table, scale, record = folder.table, folder.scale, folder.record
    if folder.cell not in scale.cells:
        raise CollectError(f"{table.name} has no such cell at {scale.name} scale")
    for problem in folder.problems:
        note(problem)
    if any(record.get(key) != value for key, value in folder.identity.items()):
        raise CollectError("it is not known as a run of this cell and seed")
    complete = record.get("state") == COMPLETE
    try:
        log = read_run(folder.path, anew=True)
    except LogError as error:
        raise CollectError(str(error) if complete else "no step is logged yet") from error
    for problem in log.problems:
        note(problem)
    planned = record.get("steps") or scale.steps
    run = Run(folder.cell, folder.seed, folder.path, log.curves, planned, record)
    reached = f"step {run.end}{f' of {planned}' if planned else ''}"
    if not complete:
        raise CollectError(f"not complete ({record.get('state')}, at {reached}); the run command goes on with it")
    if planned and 2 * run.end < planned:
        raise CollectError(f"its metrics end at {reached}, before the half of them")
    if planned and run.end < planned:
        note(f"its metrics end at {reached}")
    trained = {step for name, curve in run.curves.items() if name.startswith(TRAINED) for step in curve.index}
    if gaps := sorted({*range(1, run.end + 1)} - trained):
        note(f"no metrics of {len(gaps)} of its {run.end} steps, the first is step {gaps[0]}")
    if scale.steps and planned and planned != scale.steps:
        note(f"a run of {planned} steps; the table has {scale.steps}")
    return run


def _limits(runs: Sequence[Run], notes: Notes) -> dict[str, int]:
    """Last step that is used, by cell: the last that all runs have, of all cells that were to make as many steps."""
    rows = [(run.cell, f"{run.cell}/seed_{run.seed}", run.planned, run.end) for run in runs]
    frame = pandas.DataFrame(rows, columns=["cell", "name", "planned", "end"])
    plans = frame.groupby("planned", sort=False, dropna=False)
    for _, same in plans:
        if same["end"].nunique() > 1:
            first = same.sort_values(["end", "name"]).head(6)
            said = ", ".join(f"{name} at {end}" for name, end in zip(first["name"], first["end"], strict=True))
            last = f"all are used up to step {same['end'].min()}, the last in common"
            notes.add(f"runs end at different steps ({said}): {last}")
    return plans["end"].transform("min").groupby(frame["cell"]).min().to_dict()


def _panels(runs: Sequence[Run], notes: Notes) -> dict[str, str]:
    found: dict[str, dict[int, str]] = {}
    for run in runs:
        for name, panel in (run.record.get("panels") or {}).items():
            own = found.setdefault(name, {}).setdefault(run.seed, panel)
            if own != panel:
                notes.add(f"{name}: other tasks ({panel}) than in another cell ({own})", run.cell, run.seed)
    texts = {}
    for name, by_seed in found.items():
        one = set(by_seed.values())
        texts[name] = (
            one.pop() if len(one) == 1 else "; ".join(f"seed {key}: {by_seed[key]}" for key in sorted(by_seed))
        )
    return texts


def _versions(runs: Sequence[Run], notes: Notes) -> dict[str, list[str]]:
    frame = pandas.DataFrame([run.record.get("versions") or {} for run in runs])
    found = {package: frame[package].dropna().unique().tolist() for package in frame}
    for package, versions in found.items():
        if len(versions) > 1:
            notes.add(f"the runs were made with different versions of {package}: {', '.join(versions)}")
    return found


def _commands(table: Table, scale: Scale, out: Path, runs: Sequence[Run] = ()) -> tuple[str, str]:
    """The commands that make the runs and the table."""
    options, where = [table.name, "--scale", scale.name], out.absolute()
    if where != DEFAULT_OUT.absolute():
        options += ["--out", str(where.relative_to(Path.cwd()) if where.is_relative_to(Path.cwd()) else where)]
    own: list[str] = []
    seeds = sorted({run.seed for run in runs})
    if not set(seeds) <= set(scale.seeds):
        own += ["--seeds", *map(str, seeds)]
    steps = {run.planned for run in runs}
    if len(steps) == 1 and not steps <= {None, scale.steps}:
        own += ["--steps", str(*steps)]
    extras = {tuple(run.record.get("extra", ())) for run in runs}
    own += extras.pop() if len(extras) == 1 else ()
    start = ["verl-ext", "reproduce"]
    return shlex.join([*start, "run", *options, *own]), shlex.join([*start, "collect", *options])


def _values(scale: Scale, runs: Sequence[Run], notes: Notes) -> pandas.DataFrame:
    rows = []
    for run in runs:
        for name, spec in scale.metrics.items():
            try:
                value = evaluate(spec, run, partial(notes.add, cell=run.cell, seed=run.seed))
                reason = NOT_REACHED if value is None else ""
            except MetricMissing as error:
                value, reason = None, str(error)
                notes.add(f"no value of {spec.label}: {error}", run.cell, run.seed)
            shown = math.nan if value is None else value * spec.times * (100 if spec.percent else 1)
            rows.append((run.cell, name, run.seed, shown, reason))
    return pandas.DataFrame(rows, columns=["cell", "metric", "seed", "value", "reason"])


def _figures(log: pandas.DataFrame) -> pandas.DataFrame:
    """Figures of the agents of a team, with the spikes of their gradients' norms where those are logged, and of the
    levels of a hierarchy of groups."""
    runs = ["cell", "seed"]
    ends = log.groupby([*runs, "metric"], sort=False)["value"].agg(lambda own: own.tail(FIGURE_WINDOW).mean())
    ends = ends.reset_index()
    found = [ends.join(ends["metric"].str.extract(f"^{own}$")).assign(what=what) for what, own in FIGURES.items()]
    log = log.reset_index(drop=True)
    norms = log.join(log["metric"].str.extract(r"^agent/(?P<owner>.+)/grad_norm/(?P<of>mean|max)$"))
    spikes = (
        norms.dropna(subset="owner")
        .groupby([*runs, "owner"])[["of", "value"]]
        .apply(lambda own: spike(own.loc[own["of"] == "mean", "value"], own.loc[own["of"] == "max", "value"]))
    )
    if len(spikes):
        found.append(spikes.rename("value").reset_index().assign(figure=AGENT_SPIKE, what="agent"))
    frame = pandas.concat(found, ignore_index=True).dropna(subset=["owner", "value"]).drop(columns="metric")
    # What a lone agent does is in the table already.
    lone = (frame["what"] == "agent") & (frame.groupby(["what", "cell"])["owner"].transform("nunique") < 2)
    frame = frame[~lone].assign(owner=frame["owner"].str.replace("/level_", " level "), reason="")
    return frame.sort_values("owner", key=lambda names: names.map(natural_order), kind="stable")


def _curves(runs: Sequence[Run]) -> pandas.DataFrame:
    """The mean over the metrics that match; a step is left out where one of them is not finite."""
    found = []
    for run in runs:
        for what, patterns in CURVES.items():
            fits = ([curve for key, curve in run.curves.items() if fnmatchcase(key, one)] for one in patterns)
            if own := next(filter(None, fits), []):
                bad = pandas.concat([~numpy.isfinite(curve) for curve in own], axis=1).any(axis=1)
                curve = pandas.concat(own, axis=1).mean(axis=1)[~bad].rename("value").rename_axis("step").reset_index()
                found.append(curve.assign(what=what, cell=run.cell, seed=run.seed))
    return pandas.concat(found) if found else pandas.DataFrame(columns=["what", "cell", "seed", "step", "value"])


def _known(values: pandas.DataFrame, cell: str | None, metric: str) -> pandas.Series:
    """Values by seed; none where a run has not reached its threshold."""
    own = values[(values["cell"] == cell) & (values["metric"] == metric)].set_index("seed")
    return own["value"].dropna() if NOT_REACHED not in set(own["reason"]) else own["value"].iloc[:0]


def _contrast(
    values: pandas.DataFrame, cell: str, other: str | None, metric: str, ratio: bool = False
) -> tuple[float, Interval | None]:
    """A cell's mean, less that of another cell or as a change of it in percent (`ratio`), and its interval: NaN where
    there is none, None where a side has a single seed.
    """
    own = _known(values, cell, metric)
    if not len(own):
        return math.nan, None
    if other is None:
        return float(own.mean()), noise.mean_interval(own)
    theirs = _known(values, other, metric)
    if not len(theirs) or (ratio and min(own.min(), theirs.min()) <= 0):
        return math.nan, None
    if not ratio:
        return noise.difference(own, theirs)
    # Change of the mean, and the interval of the logarithms, in percent too, over the pairs if there are two.
    pairs = own.index.intersection(theirs.index)
    own, theirs = (own[pairs], theirs[pairs]) if len(pairs) > 1 else (own, theirs)
    change = 100 * (float(own.mean() / theirs.mean()) - 1)
    _, logs = noise.difference(numpy.log(own), numpy.log(theirs))
    if logs is None:
        return change, None
    low, high = (100 * math.expm1(end) for end in (logs.low, logs.high))
    return change, Interval(change, low, high, logs.dof, math.nan)


def _differences(scale: Scale, values: pandas.DataFrame) -> pandas.DataFrame:
    pairs = [(name, scale.baseline) for name in scale.cells if scale.baseline not in (None, name)]
    rows: list[dict[str, Any]] = []
    for cell, other in [*pairs, *(pair for pair in scale.versus.items() if pair not in pairs)]:
        for name, spec in scale.metrics.items():
            value, interval = _contrast(values, cell, other, name)
            if not math.isnan(value):
                noise_of = asdict(interval) if interval else {}
                found = {"cell": cell, "baseline": other, "metric": name, "difference": value}
                rows.append({**found, **noise_of, "verdict": verdict_of(interval, spec.higher)})
    columns = ["cell", "baseline", "metric", "difference", "low", "high", "dof", "detectable", "verdict"]
    return pandas.DataFrame(rows, columns=columns)


def verdict_of(interval: Interval | None, higher: bool | None) -> str:
    """What a difference (None: the noise is unknown) says of a claim that the cell is better than the other one;
    `higher`: whether higher is better, None for a metric of which the claim does not speak.
    """
    if interval is None:
        return UNKNOWN
    if math.isnan(interval.low) and interval.value:
        return NO_SPREAD
    if not interval.value or interval.holds(0.0):
        return SAME if higher is None else NOT_SHOWN
    return DIFFERENT if higher is None else SHOWN if (interval.value > 0) == higher else OPPOSITE


def _beside(table: Table, values: pandas.DataFrame) -> pandas.DataFrame:
    rows = []
    for one in table.numbers:
        ours, interval = _contrast(values, one.cell, one.relative_to, one.metric, one.ratio)
        verdict = "no value of ours" if math.isnan(ours) else UNKNOWN
        if interval is not None:
            inside = "inside the noise" if interval.holds(one.value) else "outside the noise"
            verdict = NO_SPREAD if math.isnan(interval.low) else inside
        found = (asdict(interval) if interval else {}) | asdict(one) | {"relative_to": one.relative_to or ""}
        rows.append({**found, "ours": ours, "gap": ours - one.value, "verdict": verdict})
    columns = ["cell", "metric", "value", "certainty", "section", "relative_to", "note", "ratio", "ours", "low", "high"]
    return pandas.DataFrame(rows, columns=[*columns, "gap", "verdict"])
