# SPDX-License-Identifier: Apache-2.0
"""A collected table as Markdown, CSV, JSON and a picture."""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas

from verl_ext.reproduce.collect import (
    AGENT_SPIKE,
    FIGURE_WINDOW,
    NOT_SHOWN,
    OPPOSITE,
    SHOWN,
    UNKNOWN,
    Beside,
    CellResult,
    CollectError,
    Difference,
    Result,
    Summary,
    collect,
)
from verl_ext.reproduce.metrics import Interval
from verl_ext.reproduce.tables import MetricSpec, Published, Scale, Table

LAPTOP = "Laptop scale: a test of the claim's direction, not the paper's number"

VERDICTS = {
    SHOWN: "shown in the claim's direction",
    NOT_SHOWN: "not shown (inside the noise)",
    OPPOSITE: "opposite",
}
NOISE = {SHOWN: "better, outside the noise", NOT_SHOWN: "inside the noise", OPPOSITE: "worse, outside the noise"}
ONE_SEED = "one seed: noise unknown"

CERTAINTIES = {
    "certain": "read in the paper's text, public code or a launch script",
    "abstract-or-blog": "stated by the authors in an abstract, README or blog",
    "secondary": "from third-party notes, reviews or reproduction logs",
    "unverified": "no usable source",
}

#: Okabe and Ito: told apart by people who see colours differently, and in grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d1f")

WIDEST = 8
"""Metrics that stand side by side on a page; more stand below each other."""

NAMES = ("table.md", "table.csv", "table.json", "table.png")


def write(result: Result) -> list[Path]:
    """Write the table's four files into its folder.

    Returns:
        Their paths.
    """
    result.folder.mkdir(parents=True, exist_ok=True)
    paths = [result.folder / name for name in NAMES]
    paths[0].write_text(markdown(result), encoding="utf-8")
    paths[1].write_text(csv_text(result), encoding="utf-8")
    paths[2].write_text(json.dumps(plain(result), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    draw(result, paths[3])
    return paths


def caption(result: Result) -> str:
    """What the table is, in a line: it stands over every form of it."""
    if result.scale.name == "laptop":
        return LAPTOP
    return "Full scale: the paper's setting, as far as it is known"


# --- numbers as text ----------------------------------------------------------------------------------------------


def number(value: float | None, spec: MetricSpec, sign: bool = False, size: float | None = None) -> str:
    """A value with its metric's digits.

    Args:
        value: in the metric's shown unit; None gives ``-``.
        spec: the metric.
        sign: write a sign always.
        size: magnitude of the numbers that stand together (default: of the value). Where the metric's digits would
            show them all as 0, they are written with an exponent.
    """
    if value is None or not math.isfinite(value):
        return "-"
    size = abs(value) if size is None else size
    style = ".1e" if 0 < size < 0.5 * 10**-spec.digits else f",.{spec.digits}f"
    return f"{value:{'+' if sign else ''}{style}}"


def summary_text(summary: Summary, spec: MetricSpec, seeds: int) -> str:
    """Mean and deviation of a cell: ``0.71 ± 0.02``, and of how many seeds if not of all."""
    if summary.unreached:
        return f"not reached ({len(summary.unreached)} of {seeds})"
    if summary.mean is None:
        return "-"
    size = max(abs(summary.mean), summary.std or 0.0)
    text = number(summary.mean, spec, size=size)
    if summary.std is not None:
        text += f" ± {number(summary.std, spec, size=size)}"
    return text + (f" ({len(summary.known)} of {seeds} seeds)" if len(summary.known) < seeds else "")


def difference_texts(difference: Difference, spec: MetricSpec) -> tuple[str, str]:
    """A difference and its interval ``[low, high]``, or ``-`` if there is none."""
    interval = difference.interval
    if interval is None:
        return number(difference.value, spec, sign=True), "-"
    size = max(abs(interval.low), abs(interval.high))
    value, low, high = (
        number(one, spec, sign=True, size=size) for one in (difference.value, interval.low, interval.high)
    )
    return value, f"[{low}, {high}]"


def verdict_text(result: Result, difference: Difference) -> str:
    """What a difference to the baseline says at the table's scale."""
    words = VERDICTS if result.scale.name == "laptop" else NOISE
    if difference.verdict == UNKNOWN:
        return ONE_SEED
    if result.scale.metrics[difference.metric].higher is None:
        return f"{'inside' if difference.verdict == NOT_SHOWN else 'outside'} the noise (no direction is better)"
    return words[difference.verdict]


def paper_verdict(beside: Beside) -> str:
    """Whether the paper's number is inside our noise."""
    if beside.ours is None:
        return "no value of ours"
    if beside.inside is None:
        return ONE_SEED
    return "inside the noise" if beside.inside else "outside the noise"


def head(spec: MetricSpec) -> str:
    """A metric's label with its unit and the direction that is better, if there is one."""
    arrow = "" if spec.higher is None else " ↑" if spec.higher else " ↓"
    return f"{spec.label}{' (%)' if spec.percent else ''}{arrow}"


# --- Markdown -----------------------------------------------------------------------------------------------------


def main(table: Table, scale: str, out: Path) -> int:
    """Collect a table, write its files and print it.

    Args:
        table, scale, out: as in `collect`.

    Returns:
        0, or 1 if there is nothing to collect.
    """
    try:
        result = collect(table, scale, out)
    except CollectError as error:
        print(f"verl-ext reproduce: {error}", file=sys.stderr)
        return 1
    print(markdown(result))
    for path in write(result):
        print(path)
    return 0


def markdown(result: Result) -> str:
    """The table as a Markdown page: cells by metrics, differences, the paper's numbers, seeds, versions, commands.

    Its text is ``assets/table.md.jinja``.
    """
    import jinja2

    table, scale, full = result.table, result.scale, result.table.full
    shown = [one for one in result.cells.values() if one.seeds]
    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("verl_ext.reproduce", "assets"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    pages.filters["line"] = _inline
    page = pages.get_template("table.md.jinja").render(
        table=table,
        scale=scale,
        laptop=scale.name == "laptop",
        caption=caption(result),
        grid=_grid,
        cells=_cell_rows(scale, shown),
        one_seed=all(len(one.seeds) <= 1 for one in shown),
        differences=_difference_rows(result),
        published=lambda numbers: _published_rows(numbers, full),
        published_only=[one for one in table.published if not full.cells[one.cell].runnable],
        beside=[_beside_row(one, full) for one in result.beside if full.cells[one.published.cell].runnable],
        certainties=[(m, text) for m, text in CERTAINTIES.items() if m in {one.certainty for one in table.published}],
        figures=[
            ("Agents", *_figure_rows("agent", [(one, one.agents) for one in shown])),
            ("Levels of the hierarchy of groups", *_figure_rows("level", [(one, one.levels) for one in shown])),
        ],
        lists=[
            ("Cells", [f"{one.cell.label}: {one.cell.note}" for one in shown if one.cell.note]),
            ("Missing, left out or odd", result.problems),
            ("What paper and code leave open", table.open if scale.name == "full" else ()),
            ("Runs", _run_facts(result, shown)),
        ],
        commands=result.commands,
    )  # fmt: skip
    return page.rstrip() + "\n"


def _cell_rows(scale: Scale, cells: Sequence[CellResult]) -> str:
    rows = []
    for one in cells:
        label = one.cell.label + (" (baseline)" if one.cell.name == scale.baseline else "")
        values = (summary_text(one.metrics[name], spec, len(one.seeds)) for name, spec in scale.metrics.items())
        rows.append([label, *values, str(len(one.seeds))])
    return _grid(["", *map(head, scale.metrics.values()), "seeds"], rows)


def _difference_rows(result: Result) -> list[tuple[str, list[list[str]], list[str]]]:
    """For each cell that others are set against: its label, rows, and what has no difference to it."""
    out = []
    for other in dict.fromkeys(one.baseline for one in result.differences):
        own = {(one.cell, one.metric): one for one in result.differences if one.baseline == other}
        rows, lacking = [], []
        for cell in dict.fromkeys(name for name, _ in own):
            label = result.cells[cell].cell.label
            for metric, spec in result.scale.metrics.items():
                if one := own.get((cell, metric)):
                    rows.append([label, head(spec), *difference_texts(one, spec), verdict_text(result, one)])
                else:
                    lacking.append(f"{label} in {spec.label}")
        out.append((result.cells[other].cell.label, rows, lacking))
    return out


def _beside_row(beside: Beside, full: Scale) -> list[str]:
    one, relative = beside.published, beside.published.relative_to is not None
    what, spec = _paper_quantity(one, full)
    numbers = number(beside.ours, spec, sign=relative), number(beside.gap, spec, sign=True)
    paper = _paper_number(one.value, spec, relative)
    return [what, head(spec), paper, one.certainty, *numbers, paper_verdict(beside), one.note]


def _published_rows(published: Sequence[Published], scale: Scale) -> str:
    """Numbers of the paper as a table of its own: a row for each cell, certainty and note."""
    heads: dict[str, None] = {}
    values: dict[tuple[str, str, str], dict[str, str]] = {}
    for one in published:
        what, spec = _paper_quantity(one, scale)
        heads[head(spec)] = None
        row = values.setdefault((what, one.certainty, one.note), {})
        row[head(spec)] = _paper_number(one.value, spec, one.relative_to is not None)
    noted = any(note for _, _, note in values)
    rows = [
        [what, certainty, *(own.get(name, "") for name in heads), *([note] if noted else [])]
        for (what, certainty, note), own in values.items()
    ]
    return _grid(["", "certainty", *heads, *(["note"] if noted else [])], rows, others=3 if noted else 2)


def _paper_quantity(published: Published, scale: Scale) -> tuple[str, MetricSpec]:
    """Whose number it is, and of what."""
    what, spec = scale.cells[published.cell].label, scale.metrics[published.metric]
    if published.relative_to is None:
        return what, spec
    other = scale.cells[published.relative_to].label
    if published.ratio:
        return f"{what} against {other}", replace(spec, label=f"change of {spec.label}", percent=True, digits=1)
    return f"{what} less {other}", spec


def _paper_number(value: float, spec: MetricSpec, relative: bool) -> str:
    """As the paper writes it: never with fewer digits than were published."""
    text = f"{value:{'+' if relative else ''},.10f}".rstrip("0").rstrip(".")
    digits = len(text.partition(".")[2])
    return text if digits >= spec.digits else number(value, spec, sign=relative)


def _figure_rows(what: str, cells: Sequence[tuple[CellResult, Mapping[str, Mapping[str, Summary]]]]) -> tuple[str, str]:
    """The figures of agents or levels as a table, empty if there are none, and what they are."""
    names = list(dict.fromkeys(key for _, own in cells for values in own.values() for key in values))
    spec = MetricSpec(name="", label="", kind="last", options={})
    rows = []
    for one, own in cells:
        for name, values in own.items():
            texts = [summary_text(values[key], spec, len(one.seeds)) if key in values else "-" for key in names]
            rows.append([one.cell.label, name, *texts])
    note = f"Mean of the last {FIGURE_WINDOW} steps, ± standard deviation over seeds."
    note += f" The {AGENT_SPIKE}: of all steps." if AGENT_SPIKE in names else ""
    heads = ["", what, *(name if " " in name else f"`{name}`" for name in names)]
    return _grid(heads, rows, others=len(heads)) if rows else "", note


def _run_facts(result: Result, cells: Sequence[CellResult]) -> list[str]:
    scale = result.scale
    facts = []
    for one in cells:
        ends = sorted(set(one.steps.values()))
        steps = f"{ends[0]}" if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"
        seeds = ", ".join(map(str, one.seeds))
        facts.append(f"{one.cell.label} (`{one.cell.name}`): seeds {seeds}; steps used: {steps}")
    if scale.task:
        facts.append(f"task: `{scale.task}` on the embedded CPU model")
    if scale.models:
        facts.append(f"model: {', '.join(scale.models)}")
    if result.versions:
        facts.append("versions: " + ", ".join(f"{name} {' / '.join(own)}" for name, own in result.versions.items()))
    if result.dates:
        first, last = result.dates
        facts.append(f"run on {first}" if first == last else f"run from {first} to {last}")
    return facts


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]], others: int = 2) -> str:
    """A table; one with many columns, beside `others` that are no numbers, and few rows stands on its side."""
    if WIDEST < len(heads) - others > len(rows):
        heads, *rows = map(list, zip(heads, *rows, strict=True))
    lines = [[_inline(field) for field in row] for row in (heads, *rows)]
    lines.insert(1, ["---"] * len(heads))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _inline(text: str) -> str:
    """Text for a field of a table."""
    return " ".join(text.split()).replace("|", "\\|")


# --- CSV and JSON -------------------------------------------------------------------------------------------------

CSV_FIELDS = (
    "scale", "cell", "label", "metric", "percent", "higher", "mean", "std", "seeds", "values", "unreached",
    "baseline", "difference", "low", "high", "verdict",
    "paper", "paper_relative_to", "paper_ratio", "certainty", "paper_gap", "paper_verdict",
)  # fmt: skip


def csv_text(result: Result) -> str:
    """One line a cell and metric, or more where it is set against several cells or published several times.

    ``values`` are ``seed:value`` joined by spaces, numbers in full precision. With ``paper_ratio`` the paper's number
    and ours are changes in percent from ``paper_relative_to``, without it differences.
    """
    data, lines = plain(result), []
    for cell, own in result.cells.items():
        for name, summary in own.metrics.items():
            line = {
                **_fields(result.scale.metrics[name], "percent", "higher"),
                **_fields(summary, "mean", "std"),
                "scale": result.scale.name,
                "cell": cell,
                "label": own.cell.label,
                "metric": name,
                "seeds": len(own.seeds),
                "values": " ".join(f"{s}:{'' if v is None else v}" for s, v in sorted(summary.values.items())),
                "unreached": " ".join(map(str, summary.unreached)),
            }
            against, beside = (
                [one for one in data[what] if (one["cell"], one["metric"]) == (cell, name)]
                for what in ("differences", "beside")
            )
            # A quantity may be published twice, as itself and as a difference.
            papers = [
                {"paper": one["paper"], "certainty": one["certainty"]}
                | {f"paper_{key}": one[key] for key in ("relative_to", "ratio", "gap", "verdict")}
                for one in beside
            ]
            first, *further = [one | (one["interval"] or {}) for one in against] or [{}]
            lines += [line | first | paper for paper in papers or [{}]] + [line | one for one in further]
    return pandas.DataFrame(lines, columns=list(CSV_FIELDS), dtype=object).to_csv(index=False)


def plain(result: Result) -> dict[str, Any]:
    """The table as plain containers for JSON; what is unknown is null."""
    table, scale = result.table, result.scale
    return {
        "table": table.name,
        **_fields(table, "title", "paper", "claim"),
        "scale": scale.name,
        "caption": caption(result),
        "claim_tested": scale.claim,
        "baseline": scale.baseline,
        "metrics": {
            name: _fields(spec, "label", "kind", "percent", "higher") | {"options": dict(spec.options)}
            for name, spec in scale.metrics.items()
        },
        "cells": {
            name: {
                "label": one.cell.label,
                "steps": {str(seed): step for seed, step in one.steps.items()},
                "metrics": {metric: _plain_summary(summary) for metric, summary in one.metrics.items()},
                "agents": _plain_figures(one.agents),
                "levels": _plain_figures(one.levels),
            }
            for name, one in result.cells.items()
        },
        "differences": [
            _fields(one, "cell", "baseline", "metric")
            | {"difference": one.value, "interval": _plain_interval(one.interval), "verdict": verdict_text(result, one)}
            for one in result.differences
        ],
        "published": [
            _fields(one, "cell", "metric", "value", "relative_to", "ratio", "certainty", "note")
            for one in table.published
        ],
        "beside": [
            _fields(one.published, "cell", "metric", "relative_to", "ratio", "certainty")
            | {"paper": one.published.value, "ours": one.ours, "gap": one.gap}
            | {"interval": _plain_interval(one.interval), "verdict": paper_verdict(one)}
            for one in result.beside
        ],
        "versions": {name: list(own) for name, own in result.versions.items()},
        "dates": list(result.dates) if result.dates else None,
        "problems": list(result.problems),
        "commands": list(result.commands),
    }


def _fields(one: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(one, name) for name in names}


def _plain_summary(summary: Summary) -> dict[str, Any]:
    return {
        **_fields(summary, "mean", "std"),
        "n": len(summary.known),
        "values": {str(seed): value for seed, value in sorted(summary.values.items())},
        "reasons": {str(seed): reason for seed, reason in sorted(summary.reasons.items())},
    }


def _plain_figures(figures: Mapping[str, Mapping[str, Summary]]) -> dict[str, Any]:
    return {name: {key: _plain_summary(one) for key, one in own.items()} for name, own in figures.items()}


def _plain_interval(interval: Interval | None) -> dict[str, float | None] | None:
    if interval is None:
        return None
    return _fields(interval, "low", "high") | {"dof": interval.dof if math.isfinite(interval.dof) else None}


# --- picture ------------------------------------------------------------------------------------------------------

PANELS_A_ROW = 3


def draw(result: Result, path: Path) -> None:
    """Write the PNG: the curves of the rewards, then a panel for each metric with its mean and seeds by cell.

    At full scale a panel also has the paper's numbers, as open diamonds.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scale = result.scale
    cells = [one for one in result.cells.values() if one.seeds]
    colours = {one.cell.name: COLOURS[place % len(COLOURS)] for place, one in enumerate(cells)}
    curves = [
        ("training reward (mean of 5 steps)", 5, {one.cell.name: one.rewards for one in cells}),
        ("validation", 1, {one.cell.name: one.validation for one in cells}),
    ]
    curves = [one for one in curves if any(curve for own in one[2].values() for curve in own.values())]
    papers = _paper_marks(result)
    base = result.cells[scale.baseline] if scale.baseline else None
    rows = [one for one in result.cells.values() if one.seeds or any(one.cell.name in own for own in papers.values())]
    panels = len(curves) + len(scale.metrics)
    columns = min(PANELS_A_ROW, panels)
    deep = math.ceil(panels / columns)
    size = (4.6 * columns + 1.2, max(2.6, 0.9 + 0.42 * len(rows)) * deep + 0.9)
    figure, axes = pyplot.subplots(deep, columns, figsize=size, dpi=120, squeeze=False, layout="constrained")
    places = list(axes.flat)
    for axis, (label, width, own) in zip(places, curves, strict=False):
        for name, by_seed in own.items():
            _draw_curve(axis, by_seed, width, color=colours[name], label=scale.cells[name].label)
        axis.set_title(label, fontsize=9)
        axis.set_xlabel("training step", fontsize=8)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
        axis.legend(frameon=False, fontsize=8, loc="best")
    for axis, (name, spec) in zip(places[len(curves) :], scale.metrics.items(), strict=False):
        marks = papers.get(name, {})
        _draw_metric(axis, name, spec, [one for one in rows if one.seeds or one.cell.name in marks], colours, marks)
        if base is not None and (mean := base.metrics[name].mean) is not None:
            axis.axvline(mean, color="#888888", linewidth=0.8, linestyle=":", zorder=1)
    for axis in places[panels:]:
        axis.set_visible(False)
    under = "points: seeds; bar: mean; dotted line: mean of the baseline; curves: mean and range of seeds"
    if any(papers.values()):
        under += "; open diamond: the paper's number (faint: not certain)"
    figure.suptitle(f"{result.table.title}\n{caption(result)}", fontsize=11)
    figure.supxlabel(under, fontsize=8, color="#555555")
    figure.savefig(path)
    pyplot.close(figure)


def _draw_curve(axis: Any, by_seed: Mapping[int, Mapping[int, float]], width: int, *, color: str, label: str) -> None:
    """Mean and range over seeds of curves, each of which is smoothed by a running mean over `width` steps."""
    seeds = [pandas.Series(curve).sort_index() for curve in by_seed.values() if curve]
    if not seeds:
        return
    smooth = pandas.concat([one.rolling(width, min_periods=1).mean() for one in seeds], axis=1).sort_index()
    marker = "o" if len(smooth) <= 12 and width == 1 else None
    axis.plot(smooth.index, smooth.mean(axis=1), color=color, label=label, linewidth=1.8, marker=marker, markersize=3.5)
    axis.fill_between(smooth.index, smooth.min(axis=1), smooth.max(axis=1), color=color, alpha=0.15, linewidth=0)


def _paper_marks(result: Result) -> dict[str, dict[str, tuple[float, str]]]:
    """The paper's values of a metric by cell, with certainty; a difference is put on top of our baseline's mean."""
    marks: dict[str, dict[str, tuple[float, str]]] = {}
    for beside in result.beside:
        one = beside.published
        value: float | None = one.value
        if one.relative_to is not None:
            base = result.cells[one.relative_to].metrics[one.metric].mean
            value = None if base is None else base * (1 + one.value / 100) if one.ratio else base + one.value
        if value is not None:
            marks.setdefault(one.metric, {}).setdefault(one.cell, (value, one.certainty))
    return marks


def _draw_metric(
    axis: Any,
    name: str,
    spec: MetricSpec,
    cells: Sequence[CellResult],
    colours: Mapping[str, str],
    papers: Mapping[str, tuple[float, str]],
) -> None:
    """A row a cell: seeds as points, their mean as a bar across the row."""
    for row, cell in enumerate(cells):
        summary, colour = cell.metrics[name], colours.get(cell.cell.name, "#555555")
        known = summary.known
        # Seeds with nearly the same value lie beside each other instead of on top.
        spread = [0.16 * (place - (len(known) - 1) / 2) for place in range(len(known))]
        axis.scatter(known, [row + shift for shift in spread], color=colour, s=18, alpha=0.75, zorder=3)
        if summary.mean is not None:
            axis.plot([summary.mean] * 2, [row - 0.32, row + 0.32], color=colour, linewidth=2.4, zorder=2)
        elif cell.seeds:
            said = f"not reached ({len(summary.unreached)} of {len(cell.seeds)})" if summary.unreached else "no value"
            axis.text(0.98, row, said, transform=axis.get_yaxis_transform(), ha="right", va="center", fontsize=7,
                      color="#555555")  # fmt: skip
        if cell.cell.name in papers:
            value, certainty = papers[cell.cell.name]
            alpha = 1.0 if certainty == "certain" else 0.45
            axis.scatter([value], [row], marker="D", s=42, facecolor="none", edgecolor="black", alpha=alpha, zorder=4)
    axis.set_yticks(range(len(cells)), [textwrap.fill(cell.cell.label, 20) for cell in cells], fontsize=8)
    axis.set_ylim(len(cells) - 0.5, -0.5)
    axis.set_title(head(spec), fontsize=9)
    axis.grid(alpha=0.3, axis="x")
    axis.tick_params(axis="x", labelsize=8)
    axis.ticklabel_format(axis="x", useOffset=False, scilimits=(-3, 5))
    axis.xaxis.get_offset_text().set_fontsize(8)
    axis.margins(x=0.12)
