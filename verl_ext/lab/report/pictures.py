# SPDX-License-Identifier: Apache-2.0
"""The panels of a comparison as PNG files, with the page's lines, bands and colours."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas

from verl_ext.lab.report.compare import Axis, Panel, Run, Section, axes, group_line, group_names, style


def write_pictures(runs: Sequence[Run], sections: Sequence[Section], folder: Path, *, smooth: int = 1) -> list[Path]:
    """Write a PNG of each panel that the page shows at first, and one of all of them, over training steps.

    Returns the files: ``overview.png`` first, then one for each metric, named by it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list({panel.metric: panel for section in sections for panel in section.panels[: section.main]}.values())
    folder.mkdir(parents=True, exist_ok=True)
    if not panels:
        return []
    axis, rows = axes(runs)[0], math.ceil(len(panels) / 3)
    figure, grid = pyplot.subplots(rows, 3, figsize=(15, 3.2 * rows), dpi=100, squeeze=False)
    for panel, one in zip(panels, grid.flat, strict=False):
        _draw(one, runs, panel, axis, smooth, legend=False)
    for one in list(grid.flat)[len(panels) :]:
        one.axis("off")
    lines = {label: line for one in grid.flat for line, label in zip(*one.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=min(6, len(lines)), frameon=False)
    figure.set_layout_engine("constrained")
    written = [folder / "overview.png"]
    figure.savefig(written[0])
    pyplot.close(figure)
    for panel in panels:
        figure, one = pyplot.subplots(figsize=(6, 4), dpi=120, layout="constrained")
        _draw(one, runs, panel, axis, smooth, legend=True)
        written.append(folder / f"{_file_name(panel.metric, written)}.png")
        figure.savefig(written[-1])
        pyplot.close(figure)
    return written


def _draw(one: Any, runs: Sequence[Run], panel: Panel, axis: Axis, smooth: int, *, legend: bool) -> None:
    for number, name in enumerate(group_names(runs)):
        colour, dashes = style(number)
        members = [run for run in runs if run.group == name]
        line = _with_gaps(group_line(members, panel.metric, axis, smooth), members, panel.metric)
        if line["mean"].isna().all():
            continue
        if smooth > 1:
            raw = _with_gaps(group_line(members, panel.metric, axis), members, panel.metric)
            one.plot(raw["x"], raw["mean"], color=colour, alpha=0.3, linewidth=0.8)
        if (line["std"] > 0).any():
            low, high = line["mean"] - line["std"], line["mean"] + line["std"]
            one.fill_between(line["x"], low, high, color=colour, alpha=0.18, linewidth=0)
        sparse = len(line) * 2 <= max(len(run.log.steps) for run in members) or len(line) <= 2
        label = _plain(f"{name} ({len(members)} seeds)" if len(members) > 1 else name)
        look: dict[str, Any] = {"linestyle": (0, dashes) if dashes else "-", "marker": "o" if sparse else None}
        one.plot(line["x"], line["mean"], color=colour, linewidth=1.8, markersize=4, label=label, **look)
    one.set_title(_plain(panel.title), fontsize="medium", wrap=True)
    one.set_xlabel(axis.label)
    one.grid(alpha=0.3)
    if legend and one.lines:
        one.legend(frameon=False, fontsize="small")


def _with_gaps(line: pandas.DataFrame, runs: Sequence[Run], metric: str) -> pandas.DataFrame:
    """A group's line with a row, of NaN, for each step of which no seed has logged a finite value: a gap."""
    logged = sorted({step for run in runs if metric in run.log.curves for step in run.log.curves[metric].index})
    return line.set_index("step").reindex(logged).reset_index()


def _plain(text: str) -> str:
    """Text that matplotlib takes as it is: no formula, and no label that it hides for its first character."""
    text = text.encode("utf-8", "replace").decode().replace("$", r"\$")
    return "\u200b" + text if text.startswith("_") else text


def _file_name(metric: str, taken: Sequence[Path]) -> str:
    """The metric's name with what does not belong into a file name replaced, and numbered if another has that name."""
    name = base = re.sub(r"[^A-Za-z0-9_.-]+", "_", metric).strip("._")[:120] or "metric"
    number = 1
    while name in {path.stem for path in taken}:
        number += 1
        name = f"{base}_{number}"
    return name
