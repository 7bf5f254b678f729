# SPDX-License-Identifier: Apache-2.0
"""A collected table as Markdown, CSV, JSON and a picture."""

from __future__ import annotations

import itertools
import json
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy
import pandas

from verl_ext.lab.reproduce import plan
from verl_ext.lab.reproduce.collect import AGENT_SPIKE, FIGURE_WINDOW, CollectError, Result, collect, summarised
from verl_ext.lab.reproduce.tables import CERTAINTIES, MetricSpec, Scale, Table

LAPTOP = plan.LAPTOP.rstrip(".")
FULL = "Full scale: the paper's setting, as far as it is known"

#: Okabe and Ito: told apart by people who see colours differently, and in grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d1f")

NAMES = ("table.md", "table.csv", "table.json", "table.png")


def main(table: Table, scale: str, out: Path) -> int:
    """Collect a table (see `collect`), write its four files and print it; 1 if there is nothing to collect, else 0."""
    try:
        result = collect(table, scale, out)
    except CollectError as error:
        print(f"verl-ext reproduce: {error}", file=sys.stderr)
        return 1
    page = markdown(result)
    result.folder.mkdir(parents=True, exist_ok=True)
    paths = [result.folder / name for name in NAMES]
    texts = (page, csv_text(result), json.dumps(plain(result), indent=2, allow_nan=False) + "\n")
    for path, text in zip(paths, texts, strict=False):
        path.write_text(text, encoding="utf-8")
    draw(result, paths[-1])
    print("\n".join([page, *map(str, paths)]))
    return 0


def heading(result: Result) -> tuple[str, str]:
    """What stands over every form of the table: what was run (the paper's experiment, or at laptop scale the task and
    its model), and what kind of table it is.
    """
    from verl_ext.lab.demo.tasks import TASKS

    if result.scale.name == "laptop":
        task = str(result.scale.task)
        return f"Task {task}, with a model made for it: {TASKS[task].summary}", LAPTOP
    return result.table.title, FULL


def number(value: float | None, spec: MetricSpec, sign: bool = False, size: float | None = None) -> str:
    """A value in its metric's shown unit, with the metric's digits; ``-`` for None or NaN.

    `size` is the magnitude of the numbers that stand together (default: of the value). Where the metric's digits would
    show them all as 0, they are written with an exponent.
    """
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value) if size is None else size
    style = ".1e" if 0 < size < 0.5 * 10**-spec.digits else f",.{spec.digits}f"
    return f"{value:{'+' if sign else ''}{style}}"


def summary_text(row: Mapping[str, Any], spec: MetricSpec) -> str:
    """A row of `summarised`: ``0.71 ± 0.02``, and of how many seeds if not of all."""
    known, runs, unreached = (int(row[key]) for key in ("known", "runs", "unreached"))
    if unreached:
        return f"not reached ({unreached} of {runs})"
    if not known:
        return "-"
    size = numpy.nanmax([abs(row["mean"]), row["std"]])
    text = number(row["mean"], spec, size=size)
    if known > 1:
        text += f" ± {number(row['std'], spec, size=size)}"
    return text + (f" ({known} of {runs} seeds)" if known < runs else "")


def difference_texts(row: Any, spec: MetricSpec) -> list[str]:
    """A difference, its interval ``[low, high]``, and the effect that could have been shown; ``-`` if unknown."""
    size = numpy.nanmax(numpy.abs([row.difference, row.low, row.high]))
    value, low, high = (number(one, spec, sign=True, size=size) for one in (row.difference, row.low, row.high))
    return [value, "-" if low == "-" else f"[{low}, {high}]", number(row.detectable, spec, size=size)]


def head(spec: MetricSpec) -> str:
    """A metric's label with its unit and the direction that is better, if there is one."""
    arrow = "" if spec.higher is None else " ↑" if spec.higher else " ↓"
    return f"{spec.label}{' (%)' if spec.percent else ''}{arrow}"


def markdown(result: Result) -> str:
    """The table as a Markdown page, whose text is ``assets/table.md.jinja``."""
    table, scale, full = result.table, result.scale, result.table.full
    laptop, (title, caption) = scale.name == "laptop", heading(result)
    cells = [
        [
            cell.label + (" (baseline)" if cell.name == scale.baseline else ""),
            *(summary_text(result.summary.loc[cell.name, name], spec) for name, spec in scale.metrics.items()),
            str((result.ends["cell"] == cell.name).sum()),
        ]
        for cell in result.shown
    ]
    published = [one for one in table.numbers if laptop or not full.cells[one.cell].runnable]
    page = plan.template("table.md.jinja").render(
        result=result,
        table=table,
        scale=scale,
        laptop=laptop,
        title=title,
        caption=caption,
        line=_inline,
        grid=_grid,
        cells=_grid(["", *map(head, scale.metrics.values()), "seeds"], cells),
        differences=_difference_rows(result),
        published=_published_rows(published, full),
        beside=[_paper(row, full) for row in result.beside.itertuples() if full.cells[row.cell].runnable],
        certainties=CERTAINTIES,
        figures={what: _figure_rows(result, what) for what in ("agent", "level")},
        figures_note=f"Mean of the last {FIGURE_WINDOW} steps, ± standard deviation over seeds.",
        spike=AGENT_SPIKE,
    )
    return page.rstrip() + "\n"


def _difference_rows(result: Result) -> list[tuple[str, list[list[str]], list[str]]]:
    """For each cell that others are set against: its label, rows, and what has no difference to it."""
    out = []
    cells, metrics = result.scale.cells, result.scale.metrics
    for other, own in result.differences.groupby("baseline", sort=False):
        rows, lacking = [], []
        found = {(row.cell, row.metric): row for row in own.itertuples()}
        for cell, (name, spec) in itertools.product(own["cell"].unique(), metrics.items()):
            if (row := found.get((cell, name))) is None:
                lacking.append(f"{cells[cell].label} in {spec.label}")
            else:
                rows.append([cells[cell].label, head(spec), *difference_texts(row, spec), row.verdict])
        out.append((cells[other].label, rows, lacking))
    return out


def _paper(one: Any, scale: Scale) -> list[str]:
    """A number of the paper, or a row of `Result.beside`, as texts: whose it is, of what, the number, never with fewer
    digits than were published, its certainty, ours, ours less the paper's and the verdict where they are known, and the
    note."""
    what, spec = scale.cells[one.cell].label, scale.metrics[one.metric]
    if one.relative_to:
        what += f" {'against' if one.ratio else 'less'} {scale.cells[one.relative_to].label}"
    if one.ratio:
        spec = replace(spec, label=f"change of {spec.label}", percent=True, digits=1)
    sign = bool(one.relative_to)
    text = f"{one.value:{'+' if sign else ''},.10f}".rstrip("0").rstrip(".")
    if len(text.partition(".")[2]) < spec.digits:
        text = number(one.value, spec, sign)
    ours = [number(one.ours, spec, sign), number(one.gap, spec, sign=True), one.verdict] if hasattr(one, "ours") else []
    return [what, head(spec), text, one.certainty, *ours, one.note]


def _published_rows(published: Sequence[Any], scale: Scale) -> str:
    """Numbers of the paper as a table of its own: a row for each cell, certainty and note."""
    if not published:
        return ""
    rows = [_paper(one, scale) for one in published]
    frame = pandas.DataFrame(rows, columns=["", "metric", "value", "certainty", "note"])
    wide = frame.pivot_table("value", ["", "certainty", "note"], "metric", "first", sort=False, fill_value="")
    wide = wide.reindex(columns=frame["metric"].unique()).reset_index()
    wide = wide[["", "certainty", *frame["metric"].unique(), *(["note"] if any(frame["note"]) else [])]]
    return _grid(list(wide), wide.values.tolist(), others=len(wide.columns) - frame["metric"].nunique())


def _figure_rows(result: Result, what: str) -> str:
    """The figures of agents or levels as a table; empty if there are none."""
    own = result.figures[result.figures["what"] == what]
    names = sorted(own["figure"].unique(), key=lambda name: name == AGENT_SPIKE)
    spec = MetricSpec(name="", label="", kind="last", options={})
    found = summarised(own, ["cell", "owner", "figure"])
    rows = []
    for cell in result.shown:
        for owner in own.loc[own["cell"] == cell.name, "owner"].unique():
            keys = [(cell.name, owner, name) for name in names]
            texts = [summary_text(found.loc[key], spec) if key in found.index else "-" for key in keys]
            rows.append([cell.label, owner, *texts])
    heads = ["", what, *(name if " " in name else f"`{name}`" for name in names)]
    return _grid(heads, rows, others=len(heads)) if rows else ""


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]], others: int = 2) -> str:
    """A table; one with more than 8 columns, beside `others` that are no numbers, and few rows stands on its side."""
    if 8 < len(heads) - others > len(rows):
        heads, *rows = map(list, zip(heads, *rows, strict=True))
    lines = [[_inline(field) for field in row] for row in (heads, *rows)]
    lines.insert(1, ["---"] * len(heads))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _inline(text: str) -> str:
    """Text for a field of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def csv_text(result: Result) -> str:
    """One line a cell and metric, or more where it is set against several cells or published several times.

    ``values`` are ``seed:value`` joined by spaces, numbers in full precision.
    """
    on = ["cell", "metric"]
    scale = result.scale
    lines = pandas.DataFrame([(cell, metric) for cell in scale.cells for metric in scale.metrics], columns=on)
    seeds = result.values.groupby(on)[["seed", "value"]].apply(
        lambda own: " ".join(f"{row.seed}:{row.value}" for row in own.dropna().itertuples())
    )
    lines = lines.merge(result.summary, "left", left_on=on, right_index=True)
    lines = lines.merge(seeds.rename("values"), "left", left_on=on, right_index=True)
    lines = lines.merge(result.differences, "left", on=on)
    if len(result.beside):
        own = {key: f"paper_{key}" for key in ("verdict", "gap", "relative_to", "ratio", "note")} | {"value": "paper"}
        lines = lines.merge(result.beside.rename(columns=own).drop(columns=["low", "high"]), "left", on=on)
    lines.insert(0, "scale", scale.name)
    lines.insert(2, "label", lines["cell"].map({name: cell.label for name, cell in scale.cells.items()}))
    return lines.to_csv(index=False)


def plain(result: Result) -> dict[str, Any]:
    """The table as plain containers for JSON: its frames as lists of rows; what is unknown is null."""
    table, scale = result.table, result.scale
    frames = {name: getattr(result, name) for name in ("values", "differences", "beside", "figures")}
    frames |= {"summary": result.summary.reset_index(), "steps": result.ends}
    return {
        "table": table.name,
        **{key: getattr(table, key) for key in ("title", "paper", "claim")},
        "scale": scale.name,
        "caption": heading(result)[1],
        "claim_tested": scale.claim,
        "baseline": scale.baseline,
        "cells": {name: cell.label for name, cell in scale.cells.items()},
        "metrics": {name: asdict(spec) for name, spec in scale.metrics.items()},
        "published": [asdict(one) for one in table.numbers],
        **{key: json.loads(frame.to_json(orient="records", double_precision=15)) for key, frame in frames.items()},
        **{key: getattr(result, key) for key in ("panels", "versions", "dates", "problems", "commands")},
    }


#: Of the picture, for matplotlib.
STYLE = {"font.size": 8, "axes.titlesize": 9, "legend.frameon": False, "axes.grid": True, "grid.alpha": 0.3}


def draw(result: Result, path: Path) -> None:
    """Write the PNG: the curves of the rewards, then a panel for each metric with its mean and seeds by cell.

    At full scale a panel also has the paper's numbers, as open diamonds.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scale = result.scale
    colours = {cell.name: COLOURS[place % len(COLOURS)] for place, cell in enumerate(result.shown)}
    papers = _paper_marks(result)
    titles = list(result.curves["what"].unique())
    panels = len(titles) + len(scale.metrics)
    columns = min(3, panels)
    deep = math.ceil(panels / columns)
    size = (4.6 * columns + 1.2, max(2.6, 0.9 + 0.42 * len(set(colours).union(*papers.values()))) * deep + 0.9)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(deep, columns, figsize=size, dpi=120, squeeze=False, layout="constrained")
        places = list(axes.flat)
        for axis, title in zip(places, titles, strict=False):
            for name, own in result.curves[result.curves["what"] == title].groupby("cell", sort=False):
                width = 5 if "5 steps" in title else 1
                _draw_curve(axis, own, width, color=colours[name], label=scale.cells[name].label)
            axis.set(title=title, xlabel="training step")
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend()
        for axis, name in zip(places[len(titles) :], scale.metrics, strict=False):
            _draw_metric(axis, result, name, colours, papers.get(name, {}))
        for axis in places[panels:]:
            axis.set_visible(False)
        under = "points: seeds; bar: mean; dotted line: mean of the baseline; curves: mean and range of seeds"
        if papers:
            under += "; open diamond: the paper's number (faint: not certain)"
        figure.suptitle("\n".join(heading(result)), fontsize=11)
        figure.supxlabel(under, fontsize=8, color="#555555")
        figure.savefig(path)
        pyplot.close(figure)


def _draw_curve(axis: Any, own: pandas.DataFrame, width: int, *, color: str, label: str) -> None:
    """Mean and range over seeds of curves, each of which is smoothed by a running mean over `width` steps."""
    wide = own.pivot(index="step", columns="seed", values="value")
    smooth = wide.apply(lambda seed: seed.dropna().rolling(width, min_periods=1).mean())
    marker = "o" if len(smooth) <= 12 and width == 1 else None
    axis.plot(smooth.index, smooth.mean(axis=1), color=color, label=label, linewidth=1.8, marker=marker, markersize=3.5)
    axis.fill_between(smooth.index, smooth.min(axis=1), smooth.max(axis=1), color=color, alpha=0.15, linewidth=0)


def _paper_marks(result: Result) -> dict[str, dict[str, tuple[float, str]]]:
    """The paper's values of a metric by cell, with certainty; a difference is put on top of our baseline's mean."""
    marks: dict[str, dict[str, tuple[float, str]]] = {}
    for one in result.beside.itertuples():
        value = one.value
        if one.relative_to:
            base = result.summary["mean"].get((one.relative_to, one.metric), math.nan)
            value = base * (1 + value / 100) if one.ratio else base + value
        if math.isfinite(value):
            marks.setdefault(one.metric, {}).setdefault(one.cell, (value, one.certainty))
    return marks


def _draw_metric(
    axis: Any, result: Result, name: str, colours: Mapping[str, str], papers: Mapping[str, tuple[float, str]]
) -> None:
    """A row a cell: seeds as points, their mean as a bar across the row."""
    spec = result.scale.metrics[name]
    cells = [cell for cell in result.scale.cells.values() if cell.name in colours or cell.name in papers]
    for row, cell in enumerate(cells):
        colour = colours.get(cell.name, "#555555")
        if cell.name in colours:
            own = result.values[(result.values["cell"] == cell.name) & (result.values["metric"] == name)]
            known, summary = own["value"].dropna(), result.summary.loc[cell.name, name]
            # Seeds with nearly the same value lie beside each other instead of on top.
            step = min(0.16, 0.64 / max(len(known) - 1, 1))
            spread = [row + step * (place - (len(known) - 1) / 2) for place in range(len(known))]
            axis.scatter(known, spread, color=colour, s=18, alpha=0.75, zorder=3)
            if math.isfinite(summary["mean"]):
                axis.plot([summary["mean"]] * 2, [row - 0.32, row + 0.32], color=colour, linewidth=2.4, zorder=2)
                if cell.name == result.scale.baseline:
                    axis.axvline(summary["mean"], color="#888888", linewidth=0.8, linestyle=":", zorder=1)
            else:
                said = summary_text(summary, spec) if summary.unreached else "no value"
                look: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 7, "color": "#555555"}
                axis.text(0.98, row, said, transform=axis.get_yaxis_transform(), **look)
        if cell.name in papers:
            value, certainty = papers[cell.name]
            alpha = 1.0 if certainty == "certain" else 0.45
            axis.scatter([value], [row], marker="D", s=42, facecolor="none", edgecolor="black", alpha=alpha, zorder=4)
    axis.set_yticks(range(len(cells)), [textwrap.fill(cell.label, 20) for cell in cells])
    axis.set(title=head(spec), ylim=(len(cells) - 0.5, -0.5))
    axis.grid(visible=False, axis="y")
    axis.ticklabel_format(axis="x", useOffset=False, scilimits=(-3, 5))
    axis.margins(x=0.12)
