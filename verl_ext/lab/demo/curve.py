# SPDX-License-Identifier: Apache-2.0
"""Reading the metrics of a run and drawing its curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

from verl_ext.lab.report.compare import estimated_norms
from verl_ext.lab.report.logs import read_lines

#: Colours of curves and of agents, in order.
COLOURS = ("#08519c", "#d94801", "#238b45", "#6a51a3", "#a50f15", "#525252")
_REFERENCES = (("#737373", ":"), ("#969696", "-."))


def read_metrics(path: Path) -> pandas.DataFrame:
    """All metrics of a run, a row a step, NaN where one is not logged; of several lines of a step the later one wins.

    Beside what is logged: ``train_reward`` (of trajectories, else of turns), ``val_reward`` (mean over validation
    sets), and for each agent ``agent/<name>/norm``, the norm of its part of the gradient (mean of the step's updates),
    which is measured with ``verl_ext.agent_gradients`` and else estimated
    (`verl_ext.lab.report.compare.estimated_norms`).
    """
    merged: dict[int, dict[str, Any]] = {}
    for step, data in read_lines(path):
        merged.setdefault(step, {}).update({key: one for key, one in data.items() if isinstance(one, int | float)})
    points = pandas.DataFrame.from_dict(merged, orient="index", dtype=float).sort_index()

    def first(*names: str) -> pandas.Series:
        found = pandas.Series(math.nan, index=points.index)
        for name in names:
            found = found.fillna(column(points, name))
        return found

    validation = [key for key in points if key.startswith("val-core/") and "/mean@" in key]
    more = {
        "train_reward": first("trajectory/reward/mean", "critic/score/mean"),
        "val_reward": points[validation].mean(axis=1),
    }
    for agent, estimate in estimated_norms(points).items():
        more[f"{agent}/norm"] = first(f"{agent}/grad_norm/mean").fillna(estimate)
    return points.assign(**more)


def column(points: pandas.DataFrame, name: str) -> pandas.Series:
    """A metric by step; NaN everywhere if it is not logged."""
    return points[name] if name in points else pandas.Series(math.nan, index=points.index)


def merged_turns(points: pandas.DataFrame) -> str:
    """How many turns became one sequence in the run, and what that saves, in a line; empty where none was merged."""
    names = ("turns", "sequences", "tokens", "tokens_by_call")
    turns, sequences, tokens, by_call = (float(column(points, f"rollout/{name}").sum()) for name in names)
    if not sequences < turns:
        return ""
    return (
        f"turns that continue each other were trained as one sequence: {turns:.0f} turns in {sequences:.0f} sequences, "
        f"{tokens:.0f} tokens in place of {by_call:.0f} (verl_ext.merge_turns)"
    )


def estimated(points: pandas.DataFrame, agents: Sequence[str]) -> bool:
    """Whether the norm of any of the agents' gradients is an estimate in any step."""
    return any(
        (column(points, f"agent/{name}/norm").notna() & column(points, f"agent/{name}/grad_norm/mean").isna()).any()
        for name in agents
    )


def draw(
    points: pandas.DataFrame,
    path: Path,
    title: str,
    *,
    references: Mapping[str, float] | None = None,
    agents: Sequence[str] = (),
) -> None:
    """Write a PNG: training reward (raw and smoothed) and validation score by step.

    Args:
        points: of :func:`read_metrics`.
        path: the file.
        title: of the figure.
        references: names and heights of horizontal lines, such as a random policy's reward.
        agents: names of a team's agents: two more panels show the mean score of their turns, and their shares of the
            gradient's norm.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = 3 if agents else 1
    figure, all_axes = pyplot.subplots(1, panels, figsize=(7 if panels == 1 else 15, 4.2), dpi=120, squeeze=False)
    axes = all_axes[0, 0]
    reward = column(points, "train_reward").dropna()
    _line(axes, reward, color="#9ecae1", linewidth=1, label="training reward")
    _line(axes, smooth(reward), color=COLOURS[0], linewidth=2, label="mean of 5 steps")
    validation = column(points, "val_reward")
    _line(axes, validation, color=COLOURS[1], marker="o", linestyle="--", label="validation")
    for (colour, style), (name, height) in zip(_REFERENCES, (references or {}).items(), strict=False):
        axes.axhline(height, color=colour, linestyle=style, linewidth=1.2, label=f"{name} ({height:.3f})")
    axes.set_ylabel("reward a trajectory")
    if agents:
        _, scores, norms = all_axes[0]
        _line(norms, column(points, "actor/grad_norm"), color="#bdbdbd", linewidth=2, label="all turns")
        for number, agent in enumerate(agents):
            colour = COLOURS[number % len(COLOURS)]
            score = smooth(column(points, f"agent/{agent}/score/mean").dropna())
            # A step without any reward has no place on a logarithmic axis: it is a gap.
            _line(scores, score.where(score > 0), gaps=True, color=colour, linewidth=2, label=agent)
            _line(norms, column(points, f"agent/{agent}/norm"), color=colour, linewidth=1.2, label=agent)
        # Agents whose rewards differ in scale share the axis.
        scores.set_yscale("log")
        scores.set_ylabel("mean score of the agent's turns")
        norms.set_ylim(bottom=0)
        norms.set_ylabel("norm of the gradient" + (" (agents: estimate)" if estimated(points, agents) else ""))
    for one in all_axes[0]:
        one.set_xlabel("training step")
        one.grid(alpha=0.3)
        if one.lines:
            one.legend(loc="best", frameon=False, fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def smooth(values: pandas.Series, width: int = 5) -> pandas.Series:
    """Mean over the last `width` values at every position."""
    return values.rolling(width, min_periods=1).mean()


def _line(axes: Any, curve: pandas.Series, gaps: bool = False, **style: Any) -> None:
    known = curve.dropna()
    if len(known):
        shown = curve if gaps else known
        axes.plot(shown.index, shown, **style)
