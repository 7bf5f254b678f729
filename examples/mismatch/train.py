# SPDX-License-Identifier: Apache-2.0
"""Training with a sampler that disagrees with the trainer, with and without pruning.

    python examples/mismatch/train.py [--steps N] [--seeds 0 1 2] [--noise STD] [--rho RHO] [--out DIR]

Runs the demo's model and task through verl's trainer with GRPO and token-level importance weights, while the embedded
engine adds normal noise to every logit before it samples. Cells: no pruning, `+recipe=dvp`, and no pruning without
noise. A run that is complete is not run again, one that was killed resumes. Writes training_noiseSTD.png and .json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from verl_ext.lab.report.logs import read_lines

#: Curves: key of the metrics file, title.
CURVES = {
    "critic/score/mean": "reward a trajectory, training",
    "actor/grad_norm": "gradient norm",
    "rollout_corr/kl": "KL of sampler and trainer",
    "rollout_corr/rollout_is_eff_sample_size": "effective sample size of the weights",
}
CORRECTION = ["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.rollout_is_threshold=2.0"]


def cells(noise: float, rho: float) -> dict[str, tuple[list[str], list[str]]]:
    """Name of a cell -> its recipes and overrides."""
    key = "+actor_rollout_ref.rollout.engine_kwargs.embedded.logits_noise"
    return {
        f"noise {noise:g}, no pruning": (["grpo"], [*CORRECTION, f"{key}={noise}"]),
        f"noise {noise:g}, rho {rho:g}": (["grpo", "dvp"], [*CORRECTION, f"{key}={noise}", f"dvp.rho={rho}"]),
        "no noise, no pruning": (["grpo"], CORRECTION),
    }


def read(path: Path) -> dict[int, dict[str, float]]:
    """Metrics by step."""
    found: dict[int, dict[str, float]] = {}
    for step, data in read_lines(path):
        found.setdefault(step, {}).update(data)
    return found


def run(recipes: list[str], extra: list[str], folder: Path, steps: int, seed: int) -> dict[int, dict[str, float]]:
    """One run of verl's trainer in `folder`, unless it is there; its metrics by step."""
    metrics = folder / "metrics.jsonl"
    if max(read(metrics), default=0) < steps:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "verl_ext.cli", "demo", "--steps", str(steps), "--seed", str(seed)]
        for recipe in recipes:
            command += ["--recipe", recipe]
        with (folder / "demo.txt").open("ab") as log:
            words = ["--out", str(folder), f"trainer.test_freq={steps}", f"trainer.save_freq={steps}", *extra]
            subprocess.run([*command, *words], stdout=log, stderr=subprocess.STDOUT, check=True)
    return read(metrics)


def summary(runs: list[dict[int, dict[str, float]]], steps: int) -> dict[str, Any]:
    """Mean and spread over seeds of the last fifth of the steps, and the largest value of any step."""
    tail = max(1, steps // 5)
    rows: dict[str, Any] = {}
    for key in CURVES:
        series = [[run[step][key] for step in range(1, steps + 1) if key in run.get(step, {})] for run in runs]
        if not all(series):
            continue
        last = [statistics.fmean(values[-tail:]) for values in series]
        rows[key] = {
            "last": statistics.fmean(last),
            "spread": statistics.stdev(last) if len(last) > 1 else math.nan,
            "largest": max(max(values) for values in series),
            "curves": series,
        }
    return rows


def plot(found: dict[str, dict[str, Any]], path: Path) -> None:
    """One panel a curve, one colour a cell, thin lines the seeds and a thick one their mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.titlesize": 9.5})
    figure, axes = plt.subplots(1, len(CURVES), figsize=(3.6 * len(CURVES), 3.3), constrained_layout=True)
    for axis, (key, title) in zip(axes, CURVES.items(), strict=True):
        for (name, rows), color in zip(found.items(), ("C1", "C2", "C7"), strict=True):
            for values in rows.get(key, {}).get("curves", []):
                axis.plot(range(1, len(values) + 1), values, color=color, linewidth=0.6, alpha=0.5)
            curves = rows.get(key, {}).get("curves", [])
            mean = [statistics.fmean(values) for values in zip(*curves, strict=False)]
            axis.plot(range(1, len(mean) + 1), mean, color=color, linewidth=2, label=name)
        axis.set(title=title, xlabel="step")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    """Run all cells, write the figures and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--noise", type=float, default=1.0, help="standard deviation on each logit")
    parser.add_argument("--rho", type=float, default=0.02)
    parser.add_argument("--out", type=Path, default=here, help="folder of the plot and the numbers")
    parser.add_argument("--runs", type=Path, default=Path("runs/mismatch"), help="folder of the runs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for number, (name, (recipes, extra)) in enumerate(cells(args.noise, args.rho).items()):
        runs = []
        for seed in args.seeds:
            folder = args.runs.absolute() / f"noise{args.noise:g}_rho{args.rho:g}" / f"cell{number}_seed{seed}"
            print(f"{name}, seed {seed}: {folder}", flush=True)
            runs.append(run(recipes, extra, folder, args.steps, seed))
        found[name] = summary(runs, args.steps)
        for key, row in found[name].items():
            print(f"  {key}: last {row['last']:.4g} +- {row['spread']:.2g}, largest {row['largest']:.4g}", flush=True)
    target = args.out / f"training_noise{args.noise:g}.png"
    plot(found, target)
    for rows in found.values():
        for row in rows.values():
            del row["curves"]
    report = {"steps": args.steps, "seeds": args.seeds, "noise": args.noise, "rho": args.rho, "cells": found}
    target.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
