# SPDX-License-Identifier: Apache-2.0
"""The numbers of a page: every metric of every run, thinned out where there are too many, as plain JSON values.

The page is one HTML file that a browser opens from disk (:mod:`verl_ext.lab.pages.html_page`). Names come from the data
and are put on it as text nodes, never as markup; its script (``assets/page.js``) draws the charts with uPlot.

A metric that has more values in some run than there is room for is put into buckets of equally many steps, the same
for all runs; each bucket keeps the mean, the smallest and the largest of its finite values, so that a spike stays
visible, and a mark if there were others. Numbers keep five significant digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas

from verl_ext.lab.report.compare import Axis, Run, Section, axes, finite, group_names, positions, style


def page_data(
    runs: Sequence[Run],
    sections: Sequence[Section],
    *,
    title: str,
    smooth: int = 1,
    left_out: Sequence[str] = (),
    budget: int = 1_500_000,
) -> dict[str, Any]:
    """What the page's script reads: of runs (each group's together) and `verl_ext.lab.report.compare.sections`.

    The page opens with a window of `smooth` steps; `left_out` could not be read at all, a sentence each. `budget` is
    how many numbers a page holds, about; the default bounds the size of the file at some 12 MB.
    """
    metrics = sorted({name for run in runs for name in run.log.curves})
    number = {name: position for position, name in enumerate(metrics)}
    curves = [run.log.curves for run in runs]
    lengths = {name: max(len(own[name]) for own in curves if name in own) for name in metrics}
    # At least 60 values, however many metrics and runs there are; three numbers a bucket.
    room = max(60, budget // max(1, sum(map(len, curves))))
    steps = [step for run in runs for step in run.log.steps]
    width = math.ceil((max(steps) - min(steps) + 1) / (room // 3))
    chosen_axes = axes(runs)
    groups = group_names(runs)
    out_runs, series = [], []
    for run, own in zip(runs, curves, strict=True):
        kept = {name: _thin(curve, width if lengths[name] > room else 1) for name, curve in own.items()}
        places = sorted({step for points in kept.values() for step in points.index})
        where = {place: position for position, place in enumerate(places)}
        steps, x = list(run.log.steps), {axis.name: _places(run, axis, places) for axis in chosen_axes}
        rare = {name for name, curve in own.items() if 2 * len(curve) <= len(steps)}
        series.append({str(number[name]): _columns(points, where, rare=name in rare) for name, points in kept.items()})
        log = {"source": run.log.source, "path": str(run.log.path), "problems": run.log.problems}
        reach = {"first": min(steps), "last": max(steps), "steps": len(steps)}
        out_runs.append({"name": run.name, "group": groups.index(run.group), **log, **reach, "x": x})
    return {
        "title": title,
        "smooth": smooth,
        "left_out": list(left_out),
        "width": width if any(length > room for length in lengths.values()) else 1,
        "axes": [asdict(axis) for axis in chosen_axes],
        "groups": [
            {"name": name, "colour": style(place)[0], "dash": " ".join(map(str, style(place)[1]))}
            for place, name in enumerate(groups)
        ],
        "runs": out_runs,
        "metrics": metrics,
        "series": series,
        "sections": [
            {**asdict(one), "panels": [{"title": panel.title, "metric": number[panel.metric]} for panel in one.panels]}
            for one in sections
        ],
    }


def _thin(curve: pandas.Series, width: int) -> pandas.DataFrame:
    """``v`` (mean), ``lo``, ``hi`` and ``bad`` (whether a value is not finite) of each bucket, by the bucket's middle.

    With a width of one step, the values themselves.
    """
    known = finite(curve)
    if width == 1:
        return pandas.DataFrame({"v": curve, "lo": known, "hi": known, "bad": known.isna()})
    buckets = curve.index // width
    parts = known.groupby(buckets)
    out = parts.agg(v="mean", lo="min", hi="max")
    out = out.assign(v=out["v"].fillna(curve.groupby(buckets).first()), bad=parts.count() < parts.size())
    return out.set_axis(out.index * width + (width - 1) / 2)


def _columns(points: pandas.DataFrame, where: dict[float, int], *, rare: bool) -> dict[str, Any]:
    """The points column by column: positions in the run's x, means, lows and highs where they differ, marks; and
    whether the metric is logged in at most half of the steps, as validation is."""
    at = [where[step] for step in points.index]
    contiguous = at == list(range(at[0], at[0] + len(at)))
    keys = ("v", "lo", "hi") if (points["lo"] < points["hi"]).any() else ("v",)
    out = {"i": at[0] if contiguous else at, **{key: [_short(one) for one in points[key]] for key in keys}}
    if rare:
        out["rare"] = 1
    if points["bad"].any():
        out["bad"] = points["bad"].to_numpy().nonzero()[0].tolist()
    return out


def _places(run: Run, axis: Axis, places: Sequence[float]) -> list[float | str | None] | None:
    """The x of each kept step of a run; that of a bucket is that of the last step up to its middle."""
    if axis.name == "step":
        return [_short(place, 10) for place in places]
    known = positions(run, axis)
    return [_short(x, 7) for x in known.reindex(places, method="ffill").bfill()] if len(known) else None


def _short(value: float, digits: int = 5) -> float | str | None:
    """A number of so many significant digits, as JSON can hold it: null for NaN, a word for the infinities."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
