# SPDX-License-Identifier: Apache-2.0
"""Several recipes on one of the demo's tasks, over several seeds: runs what is missing, draws all of it.

::

    python -m verl_ext.demo.compare --task lake --recipes hgpo gigpo grpo --seeds 0 1 2 --out runs/lake

Each run is `verl-ext demo` in a folder of its own, ``<out>/<recipe>/seed_<seed>``. A run that is complete is not run
again and one that was interrupted goes on from its checkpoint, so the command may be stopped and given again, with more
seeds or recipes as well. Recipes joined by + go together (``dr_mas+kpo``). All recipes of a seed begin with the same
model, the same order of prompts and the same sampling seed.

It writes ``<out>/comparison.png`` (the mean over seeds with a band from the lowest to the highest seed, lines for the
random policy and the warm start) and ``<out>/comparison.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.demo import run
from verl_ext.demo.curve import COLOURS, Point, draw_references, estimated, read_metrics, smooth
from verl_ext.demo.tasks import TASKS, DemoTask
from verl_ext.recipes import RecipeError, find_recipe
from verl_ext.reproduce import metrics


@dataclass(frozen=True)
class Finished:
    """A complete run: its points and its summary (``summary.json``)."""

    points: list[Point]
    summary: dict[str, Any]


def folder_of(out: Path, recipe: str, seed: int) -> Path:
    """Folder of one run."""
    return out / recipe.replace("/", "_") / f"seed_{seed}"


def finished(folder: Path, task: DemoTask, recipes: Sequence[str], steps: int) -> Finished | None:
    """The run in a folder, if it is complete and is the one that is meant; its first `steps` steps."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    if summary.get("task") != task.name or summary.get("recipes") != list(recipes) or summary.get("steps", 0) < steps:
        return None
    return Finished([point for point in read_metrics(folder / "metrics.jsonl") if point.step <= steps], summary)


def complete(
    task: DemoTask, recipe: str, seed: int, steps: int, out: Path, overrides: Sequence[str]
) -> tuple[Finished | None, int]:
    """The run of a recipe and a seed, made now unless it is there.

    Returns:
        The run, and the exit code of the demo: 0 if all is well.
    """
    names, folder = recipe.split("+"), folder_of(out, recipe, seed)
    found = finished(folder, task, names, steps)
    if found is not None:
        print(f"{recipe}, seed {seed}: complete in {folder}", flush=True)
        return found, 0
    print(f"\n{recipe}, seed {seed}:", flush=True)
    code = run.run_task(task, names, steps=steps, seed=seed, out=folder, extra=overrides)
    return finished(folder, task, names, steps), code


@dataclass(frozen=True)
class Band:
    """A quantity over seeds by step; None where no seed knows it.

    Attributes:
        steps: in order.
        mean, low, high: over the seeds that have the step.
    """

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def band(curves: Sequence[Mapping[int, float]], width: int = 5) -> Band:
    """Mean and range over seeds of curves that are smoothed each by itself.

    Args:
        curves: value by step, one mapping a seed.
        width: steps of the running mean.
    """
    smoothed = []
    for curve in curves:
        steps = sorted(curve)
        smoothed.append(dict(zip(steps, smooth([curve[step] for step in steps], width), strict=True)))
    steps = sorted({step for curve in smoothed for step in curve})
    values = [[curve[step] for curve in smoothed if step in curve] for step in steps]
    return Band(steps, [statistics.fmean(v) for v in values], [min(v) for v in values], [max(v) for v in values])


def rewards(points: Sequence[Point]) -> dict[int, float]:
    """Training reward by step."""
    return {point.step: point.train_reward for point in points if point.train_reward is not None}


def agent_norms(points: Sequence[Point], agent: str) -> dict[int, float]:
    """:meth:`Point.agent_norm` by step."""
    norms = {point.step: point.agent_norm(agent) for point in points}
    return {step: norm for step, norm in norms.items() if norm is not None}


def agent_peaks(points: Sequence[Point], agent: str) -> dict[int, float]:
    """:meth:`Point.agent_peak` by step."""
    peaks = {point.step: point.agent_peak(agent) for point in points}
    return {step: norm for step, norm in peaks.items() if norm is not None}


def agent_scores(points: Sequence[Point], agent: str) -> dict[int, float]:
    """Mean score of an agent's rows by step."""
    return {point.step: point.agents[agent].score for point in points if agent in point.agents}


def spike(norms: Mapping[int, float], peaks: Mapping[int, float]) -> float:
    """How far the largest norm stands out: the largest peak over the median norm. NaN without a positive median.

    Args:
        norms: mean of a step's updates, by step.
        peaks: largest of a step's updates, by step.
    """
    return metrics.spike(list(norms.values()), list(peaks.values()))


def draw_comparison(runs: Mapping[str, Mapping[int, Finished]], task: DemoTask, path: Path) -> None:
    """Write the PNG: the reward, and for a team a row of panels for each agent (score and norm of its gradient).

    Args:
        runs: complete runs by recipe and seed.
        task: that was trained on.
        path: the file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = 1 + len(task.agents)
    columns = 2 if task.agents else 1
    figure, axes = pyplot.subplots(rows, columns, figsize=(7.5 * columns, 4 * rows), dpi=110, squeeze=False)
    _bands(axes[0, 0], {name: [rewards(one.points) for one in seeds.values()] for name, seeds in runs.items()})
    summaries = [one.summary for seeds in runs.values() for one in seeds.values()]
    starts = [summary["val_before"] for summary in summaries if math.isfinite(summary["val_before"])]
    lines = {"random policy": statistics.fmean(summary["reward_random"] for summary in summaries)}
    if starts:
        lines["warm start"] = statistics.fmean(starts)
    draw_references(axes[0, 0], lines)
    axes[0, 0].set_ylabel("training reward a trajectory")
    if task.agents:
        norms = {
            name: [{p.step: p.grad_norm for p in one.points if p.grad_norm is not None} for one in seeds.values()]
            for name, seeds in runs.items()
        }
        _bands(axes[0, 1], norms, width=1)
        axes[0, 1].set_ylabel("norm of the gradient, all rows")
    guess = any(estimated(one.points, task.agents) for seeds in runs.values() for one in seeds.values())
    norm_label = "norm of its gradient" + (" (estimate)" if guess else "")
    for row, agent in enumerate(task.agents, start=1):
        for column, (what, width, label) in enumerate(
            ((agent_scores, 5, "score of its rows"), (agent_norms, 1, norm_label))
        ):
            curves = {name: [what(one.points, agent) for one in seeds.values()] for name, seeds in runs.items()}
            _bands(axes[row, column], curves, width=width)
            axes[row, column].set_ylabel(f"{agent}: {label}")
    for one in axes.flat:
        one.set_xlabel("training step")
        one.set_ylim(bottom=0)
        one.grid(alpha=0.3)
        if one.lines:
            one.legend(loc="best", frameon=False, fontsize="small")
    counts = " or ".join(map(str, sorted({len(seeds) for seeds in runs.values()})))
    figure.suptitle(f"{task.name}, number of seeds: {counts} (mean, lowest to highest)", fontsize=11)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _bands(axes: Any, curves: Mapping[str, Sequence[Mapping[int, float]]], width: int = 5) -> None:
    for number, (name, own) in enumerate(curves.items()):
        one, colour = band([curve for curve in own if curve], width), COLOURS[number % len(COLOURS)]
        axes.plot(one.steps, one.mean, color=colour, linewidth=2, label=name)
        axes.fill_between(one.steps, one.low, one.high, color=colour, alpha=0.15, linewidth=0)


def report(runs: Mapping[str, Mapping[int, Finished]], task: DemoTask) -> dict[str, Any]:
    """The comparison in numbers.

    Returns:
        ``task`` and by recipe ``seeds``, ``reward_before`` and ``reward_after`` (one value a seed, from the runs'
        summaries) and for a team by agent ``score_after``, ``energy_share_after``, ``grad_norm_median`` of the steps,
        ``norm_spike`` (:func:`spike`) and whether these norms are ``estimated``.
    """
    out: dict[str, Any] = {"task": task.name, "recipes": {}}
    for name, seeds in runs.items():
        summaries = [one.summary for one in seeds.values()]
        entry: dict[str, Any] = {
            "seeds": list(seeds),
            "reward_random": [summary["reward_random"] for summary in summaries],
            "reward_before": [summary["reward_before"] for summary in summaries],
            "reward_after": [summary["reward_after"] for summary in summaries],
            "agents": {},
        }
        for agent in task.agents:
            entry["agents"][agent] = {
                "score_after": [summary["agents"][agent]["score_after"] for summary in summaries],
                "energy_share_after": [summary["agents"][agent]["energy_share_after"] for summary in summaries],
                "grad_norm_median": [
                    statistics.median(agent_norms(one.points, agent).values() or [math.nan]) for one in seeds.values()
                ],
                "norm_spike": [
                    spike(agent_norms(one.points, agent), agent_peaks(one.points, agent)) for one in seeds.values()
                ],
                "estimated": [estimated(one.points, [agent]) for one in seeds.values()],
            }
        out["recipes"][name] = entry
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of the module's text.

    Returns:
        0, or the exit code of the first run that failed (130 after Ctrl-C); what is complete by then is drawn.
    """
    parser = argparse.ArgumentParser(
        prog="python -m verl_ext.demo.compare", description="Compare recipes on one of the demo's tasks, over seeds."
    )
    parser.add_argument("--task", required=True, choices=tuple(TASKS), help="what to train on")
    parser.add_argument("--recipes", required=True, nargs="+", metavar="NAME[+NAME]", help="what to compare")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--steps", type=int, default=None, help="training steps (default: the task's own)")
    parser.add_argument("--out", type=Path, default=None, help="folder (default: runs/compare_<task>)")
    parser.add_argument("--draw", action="store_true", help="run nothing, draw what is complete")
    parser.add_argument(
        "--override", action="append", default=[], metavar="KEY=VALUE", help="a Hydra override for all runs"
    )
    args = parser.parse_args(arguments)
    task = TASKS[args.task]
    steps = task.settings.steps if args.steps is None else args.steps
    if steps < 1 or min(args.seeds) < 0:
        parser.error("--steps must be at least 1 and --seeds at least 0")
    for recipe in args.recipes:
        try:
            for name in recipe.split("+"):
                find_recipe(name)
        except RecipeError as error:
            parser.error(str(error))
    out = (args.out or Path("runs") / f"compare_{task.name}").absolute()

    runs: dict[str, dict[int, Finished]] = {}
    code = 0
    # All recipes of a seed before the next seed: an interrupted comparison is then one over fewer seeds.
    for seed in args.seeds:
        for recipe in args.recipes:
            if args.draw or code:
                found = finished(folder_of(out, recipe, seed), task, recipe.split("+"), steps)
            else:
                found, code = complete(task, recipe, seed, steps, out, args.override)
            if found is not None:
                runs.setdefault(recipe, {})[seed] = found
    if not runs:
        print(f"no complete run of {steps} steps in {out}", file=sys.stderr)
        return code or 1
    runs = {recipe: runs[recipe] for recipe in args.recipes if recipe in runs}
    draw_comparison(runs, task, out / "comparison.png")
    numbers = report(runs, task)
    (out / "comparison.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
    for name, entry in numbers["recipes"].items():
        after = ", ".join(f"{value:.3f}" for value in entry["reward_after"])
        print(f"{name}: reward after {steps} steps {after} (seeds {', '.join(map(str, entry['seeds']))})")
    print(f"see {out / 'comparison.png'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
