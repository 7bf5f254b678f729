# SPDX-License-Identifier: Apache-2.0
"""Reading the metrics of a run and drawing its curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.report.logs import read_lines

#: Colours of curves and of agents, in order.
COLOURS = ("#08519c", "#d94801", "#238b45", "#6a51a3", "#a50f15", "#525252")
_REFERENCES = (("#737373", ":"), ("#969696", "-."))


@dataclass(frozen=True)
class AgentPoint:
    """An agent in one step.

    Attributes:
        score: mean score of its rows.
        energy_share: its share of the batch's gradient energy, the squared advantages summed over model tokens.
        grad_norm: norm of its part of the gradient, mean of the step's updates; None without
            ``verl_ext.agent_gradients``.
    """

    score: float
    energy_share: float
    grad_norm: float | None = None


@dataclass(frozen=True)
class Point:
    """One step of a run: mean training reward, mean validation score, seconds, sampler-trainer difference, norm of the
    gradient (mean of the step's updates) and what is known of each agent, by name."""

    step: int
    train_reward: float | None
    val_reward: float | None
    step_seconds: float | None
    prob_diff: float | None
    grad_norm: float | None = None
    agents: Mapping[str, AgentPoint] = field(default_factory=dict)

    def agent_norm(self, agent: str) -> float | None:
        """Norm of an agent's part of the gradient, mean of the step's updates: as logged, else an estimate.

        The estimate is the whole norm times the root of the agent's share of energy. It is right if the agents'
        gradients are orthogonal and all tokens' score functions equally long.
        """
        if agent not in self.agents:
            return None
        own = self.agents[agent]
        if own.grad_norm is not None or self.grad_norm is None:
            return own.grad_norm
        return self.grad_norm * math.sqrt(own.energy_share)


def estimated(points: Sequence[Point], agents: Sequence[str]) -> bool:
    """Whether the norm of any of the agents' gradients is an estimate in any of the points."""
    return any(p.agents[name].grad_norm is None for p in points for name in agents if name in p.agents)


def read_metrics(path: Path) -> list[Point]:
    """The points of a run in order of step; several lines of one step are merged, the later line wins."""
    merged: dict[int, dict[str, Any]] = {}
    for step, data in read_lines(path):
        merged.setdefault(step, {}).update(data)
    return [_point(step, merged[step]) for step in sorted(merged)]


def _point(step: int, data: dict[str, Any]) -> Point:
    validation = [value for key, value in data.items() if key.startswith("val-core/") and "/mean@" in key]
    suffix = "/gradient_energy_share"
    shares = {
        key[len("agent/") : -len(suffix)]: share
        for key, share in data.items()
        if key.startswith("agent/") and key.endswith(suffix)
    }
    return Point(
        step=step,
        train_reward=data.get("trajectory/reward/mean", data.get("critic/score/mean")),
        val_reward=sum(validation) / len(validation) if validation else None,
        step_seconds=data.get("timing_s/step"),
        prob_diff=data.get("training/rollout_probs_diff_max"),
        grad_norm=data.get("actor/grad_norm"),
        agents={
            name: AgentPoint(
                score=data.get(f"agent/{name}/score/mean", 0.0),
                energy_share=share,
                grad_norm=data.get(f"agent/{name}/grad_norm/mean"),
            )
            for name, share in shares.items()
        },
    )


def smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Mean over the last `width` values at every position."""
    return [
        sum(values[max(0, i + 1 - width) : i + 1]) / len(values[max(0, i + 1 - width) : i + 1])
        for i in range(len(values))
    ]


def draw(
    points: Sequence[Point],
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
        agents: names of a team's agents: two more panels show the mean score of their rows, and their shares of the
            gradient's norm.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = 3 if agents else 1
    figure, all_axes = pyplot.subplots(1, panels, figsize=(7 if panels == 1 else 15, 4.2), dpi=120, squeeze=False)
    axes = all_axes[0, 0]
    train = [(point.step, point.train_reward) for point in points if point.train_reward is not None]
    val = [(point.step, point.val_reward) for point in points if point.val_reward is not None]
    if train:
        steps, rewards = zip(*train, strict=True)
        axes.plot(steps, rewards, color="#9ecae1", linewidth=1, label="training reward")
        axes.plot(steps, smooth(rewards), color=COLOURS[0], linewidth=2, label="mean of 5 steps")
    if val:
        steps, rewards = zip(*val, strict=True)
        axes.plot(steps, rewards, color=COLOURS[1], marker="o", linestyle="--", label="validation")
    draw_references(axes, references or {})
    axes.set_ylabel("reward a trajectory")
    if agents:
        draw_scores(all_axes[0, 1], points, agents)
        draw_norms(all_axes[0, 2], points, agents)
    for one in all_axes[0]:
        one.set_xlabel("training step")
        one.grid(alpha=0.3)
        if one.lines:
            one.legend(loc="best", frameon=False, fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def draw_references(axes: Any, references: Mapping[str, float]) -> None:
    """Horizontal lines with their names and heights in the legend."""
    for number, (name, height) in enumerate(references.items()):
        colour, style = _REFERENCES[number % len(_REFERENCES)]
        axes.axhline(height, color=colour, linestyle=style, linewidth=1.2, label=f"{name} ({height:.3f})")


def draw_scores(axes: Any, points: Sequence[Point], agents: Sequence[str]) -> None:
    """Mean score of each agent's rows, on a logarithmic axis: agents whose rewards differ in scale share it."""
    for number, agent in enumerate(agents):
        known = [(p.step, p.agents[agent].score) for p in points if agent in p.agents]
        if known:
            steps, scores = zip(*known, strict=True)
            # A step without any reward has no place on a logarithmic axis: it is a gap.
            shown = [score if score > 0 else math.nan for score in smooth(scores)]
            axes.plot(steps, shown, color=COLOURS[number % len(COLOURS)], linewidth=2, label=agent)
    axes.set_yscale("log")
    axes.set_ylabel("mean score of the agent's rows")


def draw_norms(axes: Any, points: Sequence[Point], agents: Sequence[str]) -> None:
    """Norm of the gradient, and of each agent's part of it (:meth:`Point.agent_norm`)."""
    whole = [(p.step, p.grad_norm) for p in points if p.grad_norm is not None]
    if whole:
        axes.plot(*zip(*whole, strict=True), color="#bdbdbd", linewidth=2, label="all rows")
    for number, agent in enumerate(agents):
        known = [(p.step, p.agent_norm(agent)) for p in points if p.agent_norm(agent) is not None]
        if known:
            axes.plot(*zip(*known, strict=True), color=COLOURS[number % len(COLOURS)], linewidth=1.2, label=agent)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("norm of the gradient" + (" (agents: estimate)" if estimated(points, agents) else ""))
