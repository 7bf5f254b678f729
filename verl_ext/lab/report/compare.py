# SPDX-License-Identifier: Apache-2.0
"""Runs beside each other: their names, groups of seeds, axes, panels and lines.

A group is one setting run with several seeds. Its line is the mean over its seeds at each step, after smoothing, and
its band is one standard deviation (ddof 1) or the range over them.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy
import pandas
import yaml

from verl_ext.lab.report.logs import METRICS_FILE, LogError, RunLog, find_runs, natural_order, read_run

#: Okabe and Ito's palette, which colour-blind readers can tell apart, without its black and yellow.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#7f7f7f")
#: Dashes (lengths of stroke and gap in points): groups beyond the palette differ in them.
DASHES: tuple[tuple[int, ...], ...] = ((), (6, 3), (2, 2), (8, 3, 2, 3))

_SEED = re.compile(r"^(?P<group>.*?)[-_./ ]*seed[-_= ]?(?P<seed>\d+)$", re.IGNORECASE)
_MODEL = re.compile(r"^model/(?P<model>[^/]+)/agent/(?P<agent>.+)/(?:sequences|rows)$")  # rows: before 0.2.0
_AGENT = re.compile(r"^agent/(?P<agent>.+?)/(?P<what>(?:score|grad_norm)/[^/]+|[^/]+)$")


@dataclass(frozen=True)
class Run:
    """One run of a comparison: a name that no other has, the group and seed it belongs to, and its metrics."""

    name: str
    group: str
    seed: int | None
    log: RunLog


@dataclass(frozen=True)
class Axis:
    """What can stand on the x axis: ``step``, ``tokens`` or ``time``; the sum of `metric` is divided by `scale`."""

    name: str
    label: str
    unit: str
    metric: str = ""
    scale: float = 1.0


class Panel(NamedTuple):
    """One chart: a metric and what it is."""

    title: str
    metric: str


@dataclass(frozen=True)
class Section:
    """Panels under one heading, with a line of text; those after the first `main` are shown on demand."""

    title: str
    panels: Sequence[Panel]
    main: int
    note: str = ""


def load(
    paths: Sequence[Path],
    groups: Mapping[str, str] | None = None,
    *,
    by_seed: bool = True,
    left_out: list[str] | None = None,
) -> list[Run]:
    """Read runs, in files or folders as `verl_ext.lab.report.logs.find_runs` takes them, and give them names.

    Args:
        groups: name -> pattern (as for file names) of names or paths of its runs; the first that fits counts.
        by_seed: put runs whose names differ in ``seed_<number>`` at the end alone into one group.
        left_out: takes a sentence for each run without a metric, such as one that has just begun. None: an error.

    Raises:
        LogError: there is nothing to read in a path or in all of them, or a pattern fits no run.
    """
    found: dict[Path, Path] = {}
    for run in (run for path in paths for run in find_runs(path)):
        found.setdefault(run.resolve(), run)
    logs = []
    for path in found.values():
        try:
            logs.append(read_run(path))
        except LogError as error:
            if left_out is None:
                raise
            left_out.append(str(error))
    if not logs:
        raise LogError(" ".join(left_out or []))
    short = _short_names([log.path for log in logs])
    names = [log.name or name for log, name in zip(logs, short, strict=True)]
    before = [names[:place].count(name) for place, name in enumerate(names)]
    names = [f"{name} ({count + 1})" if count else name for name, count in zip(names, before, strict=True)]
    groups, unused, runs = groups or {}, set(groups or {}), []
    for name, log in zip(names, logs, strict=True):
        match = _SEED.match(name)
        seed = int(match["seed"]) if match else None
        group = match["group"] if match and by_seed and match["group"] else name
        places = (name, str(log.path), str(log.path if log.path.is_dir() else log.path.parent))
        fits = (key for key, pattern in groups.items() if any(fnmatch.fnmatchcase(text, pattern) for text in places))
        if (chosen := next(fits, None)) is not None:
            group = chosen
            unused.discard(chosen)
        runs.append(Run(name, group, seed, _with_agent_norms(log)))
    if unused:
        lost = ", ".join(f"{name}={groups[name]}" for name in sorted(unused))
        raise LogError(f"--group {lost}: fits no run; the runs are {', '.join(names)}")
    order = group_names(runs)
    return sorted(runs, key=lambda run: order.index(run.group))


def group_names(runs: Iterable[Run]) -> list[str]:
    """Names of the groups, in the order of the runs."""
    return list(dict.fromkeys(run.group for run in runs))


def style(number: int) -> tuple[str, tuple[int, ...]]:
    """Colour and dashes of a group by its position."""
    return COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def _short_names(paths: Sequence[Path]) -> list[str]:
    """What tells the paths apart: their folders without those that all share; a lone seed keeps its parent."""
    parts = []
    for path in paths:
        whole = path.resolve()
        if not path.is_dir():
            whole = whole.parent if whole.name == METRICS_FILE else whole.with_suffix("")
        parts.append(whole.parts)
    # A folder of the logger's own inside each run's folder tells nothing.
    many = len(parts)
    while many > 1 and len({part[-1] for part in parts}) == 1 and len({part[:-1] for part in parts}) == many:
        parts = [part[:-1] for part in parts]
    shared = min(len(os.path.commonprefix(parts)), *(len(part) - 1 for part in parts))
    if any(re.fullmatch(r"seed[-_= ]?\d+", part[shared], re.IGNORECASE) for part in parts):
        shared -= 1
    return ["/".join(part[max(0, shared) :]) for part in parts]


def estimated_norms(curves: Mapping[str, pandas.Series]) -> dict[str, pandas.Series]:
    """From a run's metrics an estimate of the gradient norm of each agent's turns, by ``agent/<name>``: the whole norm
    times the root of the agent's share of the gradient energy, exact if the agents' gradients are orthogonal and their
    tokens' scores equally long. ``verl_ext.agent_gradients`` measures it.
    """
    suffix, norm = "/gradient_energy_share", curves.get("actor/grad_norm", pandas.Series(dtype=float))
    shares = fnmatch.filter(curves, f"agent/*{suffix}")
    return {name.removesuffix(suffix): norm * curves[name].pow(0.5) for name in shares}


def _with_agent_norms(log: RunLog) -> RunLog:
    """The log with `estimated_norms` of a team's agents, if none is measured."""
    estimates = {f"{agent}/grad_norm_estimate": curve for agent, curve in estimated_norms(log.curves).items()}
    if len(estimates) < 2 or fnmatch.filter(log.curves, "agent/*/grad_norm/mean"):
        return log
    more = pandas.concat(estimates, names=["metric", "step"]).dropna().rename("value").reset_index()
    return replace(log, values=pandas.concat([log.values, more]))


TOKENS, SECONDS = "perf/total_num_tokens", "timing_s/step"


def axes(runs: Sequence[Run]) -> list[Axis]:
    """The x axes that at least one run can be drawn on."""
    out = [Axis("step", "training step", "steps")]
    logged = {name for run in runs for name in run.log.curves}
    if TOKENS in logged:
        out.append(Axis("tokens", "tokens (prompts and responses, cumulated)", "tokens", TOKENS))
    if SECONDS in logged:
        longest = max(finite(run.log.curves[SECONDS]).sum() for run in runs if SECONDS in run.log.curves)
        unit, scale = ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0) if longest > 120 else ("seconds", 1.0)
        out.append(Axis("time", f"training time in {unit}", unit, SECONDS, scale))
    return out


def positions(run: Run, axis: Axis) -> pandas.Series:
    """x by step of a run: the sum up to there, to which a step that has not logged it adds nothing. Empty if no step
    has logged what the axis needs."""
    steps = list(run.log.steps)
    if not axis.metric:
        return pandas.Series(steps, index=steps, dtype=float)
    if axis.metric not in run.log.curves:
        return pandas.Series(dtype=float)
    return finite(run.log.curves[axis.metric]).reindex(steps).fillna(0.0).cumsum() / axis.scale


def finite(curve: pandas.Series) -> pandas.Series:
    """The curve with NaN for the infinities, too."""
    return curve.where(numpy.isfinite(curve))


_REWARD = ("trajectory/reward/mean", "critic/score/mean", "critic/rewards/mean")
_MISMATCH = re.compile("training/rollout_|rollout_corr/|mismatch/|dvp/")
_PANELS = yaml.safe_load(resources.files("verl_ext.lab.report").joinpath("assets", "panels.yaml").read_text("utf-8"))
_TITLES = {metric: title for own in (*_PANELS["sections"].values(), _PANELS["titles"]) for metric, title in own.items()}


def sections(runs: Sequence[Run], chosen: Sequence[str] = ()) -> list[Section]:
    """The panels of a comparison; a panel is left out if no run has its metric, a section if it has no panel.

    `chosen` are names or patterns of further metrics, shown first. Raises LogError: one of them fits no metric.
    """
    counts = Counter(metric for run in runs for metric in run.log.curves)
    known = sorted(counts, key=natural_order)
    first: list[str] = []
    for pattern in chosen:
        fitting = fnmatch.filter(known, pattern)
        if not fitting:
            near = difflib.get_close_matches(pattern, known, n=3)
            near = near or [name for name in known if pattern.strip("*") in name][:3]
            hint = f"near it: {', '.join(near)}" if near else f"there are {len(known)}, all in the page's list"
            raise LogError(f"--metric {pattern}: no run has such a metric; {hint}")
        first += fitting
    rewards = [name for name in _REWARD if name in counts]
    reward = [Panel("Training reward", max(rewards, key=counts.__getitem__))] if rewards else []
    core = [Panel(_title(name), name) for name in known if name.startswith("val-core/")]
    out = [_section("Chosen", dict.fromkeys(first)), Section("Reward", [*reward, *core], len([*reward, *core]))]
    for title, panels in _PANELS["sections"].items():
        main = [name for name in panels if name in counts]
        more = [name for name in known if title == "Sampler and trainer" and _MISMATCH.match(name)]
        out.append(_section(title, dict.fromkeys([*main, *more]), len(main)))
    mix = sorted(fnmatch.filter(known, "mix/*"), key=lambda name: not name.endswith("/share"))
    out += [replace(_agents(known), note=_models(runs)), _section("Components of the mix", mix)]
    return [section for section in out if section.panels]


def _section(title: str, names: Iterable[str], main: int | None = None) -> Section:
    panels = [Panel(_title(name), name) for name in names]
    return Section(title, panels, len(panels) if main is None else main)


def _agents(known: Sequence[str]) -> Section:
    parts = [match for name in known if (match := _AGENT.match(name))]
    agents = list(dict.fromkeys(match["agent"] for match in parts))
    titles = _PANELS["agent"] | _PANELS["agent_more"]
    kinds = list(dict.fromkeys([*titles, *(match["what"] for match in parts)]))
    ordered = sorted(parts, key=lambda match: (kinds.index(match["what"]), agents.index(match["agent"])))
    panels = [Panel(f"{match['agent']}: {titles.get(match['what'], match['what'])}", match[0]) for match in ordered]
    # Panels of a lone agent repeat those of the run.
    main = sum(match["what"] in _PANELS["agent"] for match in parts)
    return Section("Agents", panels, main if len(agents) > 1 else 0)


def _models(runs: Sequence[Run]) -> str:
    """Which model the agents of each group have used, of the groups that had several."""
    said = {}
    for run in runs:
        used = sorted((match["agent"], match["model"]) for name in run.log.curves if (match := _MODEL.match(name)))
        if used:
            said[run.group] = f"{run.group}: " + ", ".join(f"{agent} on {model}" for agent, model in used)
    return "Models of the agents. " + "; ".join(said.values()) if said else ""


def _title(metric: str) -> str:
    if metric.startswith("val-core/"):
        parts = metric.split("/")
        return f"Validation: {'/'.join(parts[1:-2])}, {' '.join(parts[-2:])}" if len(parts) > 3 else metric
    return _TITLES.get(metric, metric)


def smoothed(curve: pandas.Series, window: int) -> pandas.Series:
    """Trailing mean: at each step the mean of the finite values of the last `window` steps, NaN if there is none."""
    if window <= 1:
        return finite(curve)
    # pandas has windows by place or by time, not by step: a step is taken as a second.
    timed = finite(curve).set_axis(pandas.to_timedelta(curve.index, unit="s"))
    return timed.rolling(f"{window}s", min_periods=1).mean().set_axis(curve.index)


def group_line(runs: Sequence[Run], metric: str, axis: Axis, window: int = 1) -> pandas.DataFrame:
    """The line of a group: its seeds smoothed, then met at each step.

    A row a step, ascending: ``step``, ``x`` (`shared_positions`), and over the seeds that have a finite value ``mean``,
    ``std`` (ddof 1; 0 for one seed), ``low``, ``high`` and their number ``seeds``.
    """
    places = {run.name: positions(run, axis) for run in runs if metric in run.log.curves}
    seeds = [run for run in runs if len(places.get(run.name, ()))]
    curves = [smoothed(run.log.curves[metric], window).dropna() for run in seeds] or [pandas.Series(dtype=float)]
    steps = pandas.concat(curves).rename_axis("step").groupby(level="step")
    values = steps.agg(mean="mean", std="std", low="min", high="max", seeds="count").fillna({"std": 0.0})
    x = shared_positions([places[run.name] for run in seeds]) if axis.metric and seeds else values.index.to_series()
    return values.assign(x=x.reindex(values.index)).reset_index()


def shared_positions(places: Sequence[pandas.Series]) -> pandas.Series:
    """x by step of seeds together: what a step adds is the mean over the seeds that reach it. While all go on that is
    the mean of their x, and it grows from step to step also where some have ended.
    """
    table = pandas.concat(places, axis=1).sort_index()
    table = table.ffill().where(table.bfill().notna())
    return table.diff().fillna(table).mean(axis=1).cumsum()
