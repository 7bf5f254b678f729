# SPDX-License-Identifier: Apache-2.0
"""Reading the metrics of a run and drawing its curve."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Point:
    """One step of a run: mean training reward, mean validation score, seconds, sampler-trainer difference."""

    step: int
    train_reward: float | None
    val_reward: float | None
    step_seconds: float | None
    prob_diff: float | None


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(step, metrics) of every whole line of verl's jsonl; a line that is still being written is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
            yield int(record["step"]), dict(record["data"])
        except (ValueError, KeyError, TypeError):
            continue


def read_metrics(path: Path) -> list[Point]:
    """The points of a run in order of step; several lines of one step are merged, the later line wins."""
    merged: dict[int, dict[str, Any]] = {}
    for step, data in read_lines(path):
        merged.setdefault(step, {}).update(data)
    return [_point(step, merged[step]) for step in sorted(merged)]


def _point(step: int, data: dict[str, Any]) -> Point:
    validation = [value for key, value in data.items() if key.startswith("val-core/") and "/mean@" in key]
    return Point(
        step=step,
        train_reward=data.get("trajectory/reward/mean", data.get("critic/score/mean")),
        val_reward=sum(validation) / len(validation) if validation else None,
        step_seconds=data.get("timing_s/step"),
        prob_diff=data.get("training/rollout_probs_diff_max"),
    )


def smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Mean over the last `width` values at every position."""
    return [
        sum(values[max(0, i + 1 - width) : i + 1]) / len(values[max(0, i + 1 - width) : i + 1])
        for i in range(len(values))
    ]


def draw(points: Sequence[Point], path: Path, title: str) -> None:
    """Write a PNG: training reward (raw and smoothed) and validation score by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    train = [(point.step, point.train_reward) for point in points if point.train_reward is not None]
    val = [(point.step, point.val_reward) for point in points if point.val_reward is not None]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=120)
    if train:
        steps, rewards = zip(*train, strict=True)
        axes.plot(steps, rewards, color="#9ecae1", linewidth=1, label="training reward")
        axes.plot(steps, smooth(rewards), color="#08519c", linewidth=2, label="mean of 5 steps")
    if val:
        steps, rewards = zip(*val, strict=True)
        axes.plot(steps, rewards, color="#d94801", marker="o", linestyle="--", label="validation")
    axes.set_xlabel("training step")
    axes.set_ylabel("reward a trajectory")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
