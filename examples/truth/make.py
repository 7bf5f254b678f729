# SPDX-License-Identifier: Apache-2.0
"""Bias and variance of the estimators by exact enumeration, as numbers and plots.

    python examples/truth/make.py [--out DIR] [--numbers-only]

writes six PNGs and numbers.json; README.md beside this file reads them. Nothing is sampled: every group of N samples
of a tiny softmax policy is enumerated with its probability (see enumeration.py), so no seed plays a part.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from enumeration import (
    NORMALISATIONS,
    RAGGED,
    agent_moments,
    as_rows,
    as_tokens,
    bandit,
    centred_then_summed,
    energy,
    forgetful_room,
    lemma,
    moments,
    quality,
    ragged_reward,
    second_try,
    sequences,
    step_method,
    stop_or_go_on,
    true_gradient,
    two_agents,
    two_turns,
)
from masking import chain, classical_bound, direction, kept_gradient, masked_bound, modulated, rejecting

from verl_ext.methods.gigpo import gigpo_advantage
from verl_ext.methods.hgpo import hgpo_advantage
from verl_ext.methods.trloo import trloo_advantage

Numbers = dict[str, Any]


def leave_one_out() -> Numbers:
    """TRLOO against the self-inclusive mean: length along the true gradient, and direction when episodes end early."""
    sizes = [2, 3, 4, 5, 6, 7]
    found: Numbers = {"sizes": sizes, "trloo": [], "mean": []}
    for size in sizes:
        for name, baseline in (("trloo", "leave_one_out"), ("mean", "mean")):
            method = as_rows(trloo_advantage, "turn_index", baseline=baseline)
            found[name].append(quality(moments(bandit(), size, method), true_gradient(bandit()))[0])
    found |= {"early_sizes": [2, 3, 4, 5], "early_trloo": [], "early_mean": []}
    samples = two_turns(early_stop=True)
    truth = true_gradient(samples)
    for size in found["early_sizes"]:
        for name, baseline in (("early_trloo", "leave_one_out"), ("early_mean", "mean")):
            method = as_rows(trloo_advantage, "turn_index", "turn_reward", baseline=baseline)
            mean = moments(samples, size, method).mean
            # Length of the first and of the second turn's part along the truth: 1 and 1 without bias.
            parts = [float(mean[p] @ truth[p] / (truth[p] @ truth[p])) for p in (slice(0, 2), slice(2, 6))]
            found[name].append(parts)
    return found


def agents() -> Numbers:
    """Agent-wise against common statistics, with the second agent's rewards scaled or shifted."""
    levels = ("agent", "global_rows")
    scales, offsets = [1.0, 2.0, 5.0, 10.0, 30.0, 100.0], [0.0, 1.0, 2.0, 5.0, 10.0]
    found: Numbers = {"scales": scales, "offsets": offsets}
    for level in levels:
        share, noise = [], []
        for scale in scales:
            x, y = (energy(agent_moments(two_agents(scale, 0.0), agent, level)) for agent in ("x", "y"))
            share.append(x / (x + y))
        for offset in offsets:
            x = agent_moments(two_agents(1.0, offset), "x", level)
            noise.append(x.variance / float((x.mean**2).sum()))
        found[f"{level}_share"], found[f"{level}_noise"] = share, noise
    return found


def normalisation() -> Numbers:
    """The four cells of Dr. MAS's ablation: each agent's energy by its lemma, and of groups of N."""
    sizes, worths = [2, 4, 6, 8], [1.0, 0.5, 0.1]
    found: Numbers = {"sizes": sizes, "worth": worths, "cells": list(NORMALISATIONS)}
    for worth in worths:
        samples = second_try(worth)
        for cell, options in NORMALISATIONS.items():
            sides = [lemma(samples, agent, cell) for agent in ("x", "y")]
            of_groups = [
                [energy(agent_moments(samples, agent, group_size=size, **options)) for size in sizes]
                for agent in ("x", "y")
            ]
            found[f"{cell}, worth {worth:g}"] = {
                "factor": [side.factor for side in sides],
                "energy": [side.energy for side in sides],
                "groups": of_groups,
            }
    return found


def token_baseline() -> Numbers:
    """OTB, self-inclusive and leave-one-out, against the leave-one-out group mean on three problems."""
    spread = {(0,): 0.0, (1,): 5.0, (2,): 5.5, (3,): 6.0}
    problems = {
        "ragged": (RAGGED, ragged_reward),
        "stop or go on": ({(): [0.0, 0.0], (0,): [0.3, -0.2]}, {(1,): 0.0, (0, 0): 5.0, (0, 1): 6.0}.__getitem__),
        "equal energy": ({(): [0.0] * 4}, spread.__getitem__),
        "confident": ({(): [3.0, 0.0, 0.0, 0.0]}, spread.__getitem__),
        "rare answer": ({(): [3.0, 0.0, 0.0]}, lambda tokens: float(tokens == (1,))),
    }
    sizes = [2, 3, 4, 5]
    found: Numbers = {"sizes": sizes, "problems": list(problems)}
    for name, (logits, reward) in problems.items():
        samples, length = sequences(logits, reward)
        truth = true_gradient(samples, length)
        methods = {
            "self_inclusive": as_tokens(length),
            "leave_one_out": as_tokens(length, baseline="leave_one_out"),
            "mean": as_tokens(length, trloo_advantage),
        }
        found[name] = {}
        for method, estimator in methods.items():
            bias, along, variance = [], [], []
            for size in sizes:
                measured = moments(samples, size, estimator, length)
                bias.append(float(np.linalg.norm(measured.mean - truth) / np.linalg.norm(truth)))
                along.append(quality(measured, truth)[0])
                variance.append(quality(measured, truth)[2])
            found[name][method] = {"bias": bias, "along": along, "variance": variance}
    return found


def histories() -> Numbers:
    """HGPO against GiGPO where the best action depends on what was seen before, for two gaps between the histories."""
    sizes = [2, 3, 4, 5, 6]
    methods = {
        "gigpo": step_method(gigpo_advantage),
        "hgpo K=0": step_method(hgpo_advantage, history_length=0),
        "hgpo K=1": step_method(hgpo_advantage, history_length=1),
        "finest level": step_method(hgpo_advantage, history_length=1, length_weight_alpha=20.0),
    }
    found: Numbers = {"sizes": sizes, "methods": list(methods)}
    for gap in (0.0, 5.0):
        samples = forgetful_room(gap)
        truth = true_gradient(samples)
        for name, method in methods.items():
            measured = [quality(moments(samples, size, method), truth) for size in sizes]
            columns = ([float(value) for value in column] for column in zip(*measured, strict=True))
            found[f"{name}, gap {gap:g}"] = dict(zip(("along", "cosine", "variance"), columns, strict=True))
    return found


def masking() -> Numbers:
    """Trust region masking on a chain of 64 tokens, what dividing by the kept rows adds, and EMPG's direction."""
    steps = [0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2]
    found: Numbers = {"steps": steps}
    chains = [chain(step) for step in steps]
    for name in ("gain", "surrogate", "masked", "lost", "kept"):
        found[name] = [getattr(one, name) for one in chains]
    found["divergence"] = [one.divergence.tolist() for one in chains]
    found["classical_bound"] = [classical_bound(one) for one in chains]
    found["masked_bound"] = [masked_bound(one) for one in chains]
    found["guaranteed"] = [one.masked - one.lost - masked_bound(one) for one in chains]
    found |= {"sizes": [2, 3, 4, 5, 6], "rejected": [0.0, 2.5]}
    for divisor in ("all", "kept"):
        for rejected in found["rejected"]:
            measured = [moments(bandit(), n, rejecting(divisor, rejected)) for n in found["sizes"]]
            found[f"{divisor} {rejected:g}"] = [quality(one, kept_gradient(rejected))[:2] for one in measured]
    found |= {"k": [0.0, 0.5, 1.0, 2.0, 4.0], "zeta": [0.0, 0.05, 0.1, 0.2, 0.5]}
    found["of_k"] = [direction(modulated(k, 0.0)) for k in found["k"]]
    found["of_zeta"] = [direction(modulated(0.0, zeta)) for zeta in found["zeta"]]
    found["published"] = list(direction(modulated(1.0, 0.1)))
    return found


def turn_rewards() -> Numbers:
    """Rewards centred turn by turn and then summed, against the return to go with a leave-one-out baseline: the
    derivative for the logit of going on."""
    methods = {
        "leave_one_out": as_rows(trloo_advantage, "turn_index", "turn_reward"),
        "centred_then_summed": centred_then_summed,
    }
    sizes, chances = [2, 3, 4, 5, 6], [0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0]
    found: Numbers = {"sizes": sizes, "chances": chances, "truth": float(true_gradient(stop_or_go_on())[1])}
    found["truth_by_chance"] = [float(true_gradient(stop_or_go_on(chance))[1]) for chance in chances]
    for name, method in methods.items():
        found[name] = [float(moments(stop_or_go_on(), size, method).mean[1]) for size in sizes]
        found[f"{name}_by_chance"] = [
            float(moments([one for one in stop_or_go_on(chance) if one.probability], 4, method).mean[1])
            for chance in chances
        ]
    return found


def numbers() -> Numbers:
    """Every number of the page."""
    return {
        "leave_one_out": leave_one_out(),
        "agents": agents(),
        "normalisation": normalisation(),
        "token_baseline": token_baseline(),
        "histories": histories(),
        "turn_rewards": turn_rewards(),
        "masking": masking(),
    }


def plots(found: Numbers, out: Path) -> list[Path]:
    """Draw the four figures into `out`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.titlesize": 9.5})
    written = []

    def page(name: str, panels: int) -> tuple[Any, Any]:
        return plt.subplots(1, panels, figsize=(4.2 * panels, 3.5), constrained_layout=True, num=name, clear=True)

    def save(figure: Any, name: str) -> None:
        for axis in figure.axes:
            if axis.get_xlabel() == "group size N":
                axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.savefig(out / name, dpi=100)
        plt.close(figure)
        written.append(out / name)

    data = found["turn_rewards"]
    figure, (left, right) = page("turn_rewards", 2)
    names = {"leave_one_out": "return to go, leave-one-out", "centred_then_summed": "centred by turn, then summed"}
    for name, label in names.items():
        left.plot(data["sizes"], data[name], "os"[name != "leave_one_out"] + "-", label=label)
        right.plot(data["chances"], data[f"{name}_by_chance"], "os"[name != "leave_one_out"] + "-")
    left.axhline(data["truth"], color="k", ls=":", label="truth")
    right.plot(data["chances"], data["truth_by_chance"], "k:")
    left.set(title="derivative for going on", xlabel="group size N", ylim=(-0.25, 0.1))
    right.set(title="N = 4", xlabel="chance of the reward after going on")
    left.legend()
    save(figure, "turn_rewards.png")

    data = found["leave_one_out"]
    figure, (left, right) = page("leave_one_out", 2)
    left.plot(data["sizes"], data["trloo"], "o-", label="leave-one-out (TRLOO)")
    left.plot(data["sizes"], data["mean"], "s-", label="self-inclusive mean")
    left.plot(data["sizes"], [1 - 1 / n for n in data["sizes"]], "k:", label="1 - 1/N")
    left.set(title="one turn: length of E[g] along the truth", xlabel="group size N", ylim=(0.4, 1.1))
    early = np.array(data["early_mean"])
    right.plot(data["early_sizes"], np.array(data["early_trloo"]), "o-", color="C0")
    right.plot(data["early_sizes"], early[:, 0], "s-", color="C1", label="mean, turn 1")
    right.plot(data["early_sizes"], early[:, 1], "s--", color="C1", label="mean, turn 2")
    right.set(title="episodes that may end after turn 1", xlabel="group size N", ylim=(0.4, 1.1))
    right.plot([], [], "o-", color="C0", label="TRLOO, both turns")
    for axis in (left, right):
        axis.legend(loc="lower right")
    save(figure, "leave_one_out.png")

    data = found["agents"]
    figure, (left, right) = page("agents", 2)
    for level, label, style in (("agent", "agent-wise", "o-"), ("global_rows", "common", "s-")):
        left.semilogx(data["scales"], data[f"{level}_share"], style, label=label)
        right.semilogy(data["offsets"], data[f"{level}_noise"], style, label=label)
    left.set(title="share of agent 1 in the gradient energy", xlabel="reward scale of agent 2", ylim=(0, 0.6))
    right.set(title="agent 1: variance / |mean|$^2$", xlabel="offset of agent 2's rewards")
    for axis in (left, right):
        axis.legend()
    save(figure, "agents.png")

    data = found["token_baseline"]
    figure, axes = page("token_baseline", 3)
    styles = {"self_inclusive": ("s-", "OTB self-inclusive"), "leave_one_out": ("o-", "OTB leave-one-out")}
    for axis, problem in ((axes[0], "ragged"), (axes[1], "rare answer")):
        for method, (style, label) in styles.items():
            axis.plot(data["sizes"], data[problem][method]["bias"], style, label=label)
        axis.plot(data["sizes"], data[problem]["mean"]["bias"], "k:", label="leave-one-out mean")
        axis.set(title=f"|E[g] - truth| / |truth|, {problem}", xlabel="group size N", ylim=(-0.03, 1.0))
    place = np.arange(len(data["problems"]))
    last = data["sizes"].index(4)
    for offset, (method, (_, label)) in zip((0.0, 0.4), reversed(list(styles.items())), strict=True):
        ratio = [data[p][method]["variance"][last] / data[p]["mean"]["variance"][last] for p in data["problems"]]
        axes[2].bar(place + offset, ratio, 0.38, label=label, color="C1" if offset == 0.0 else "C0")
    axes[2].axhline(1.0, color="k", linestyle=":")
    axes[2].set_xticks(place + 0.2, [name.replace(" ", "\n", 1) for name in data["problems"]], fontsize=8)
    axes[2].set(title="variance / that of the mean, N = 4")
    for axis in axes:
        axis.legend(fontsize=8)
    save(figure, "token_baseline.png")

    data = found["histories"]
    figure, axes = page("histories", 3)
    for name, style in zip(data["methods"], ("o-", "s-", "^-", "v--"), strict=True):
        entry = data[f"{name}, gap 5"]
        # GiGPO and HGPO with K=0 coincide in two panels: a larger open marker shows both.
        look = {"markersize": 9, "fillstyle": "none"} if name == "gigpo" else {}
        for axis, kind in zip(axes, ("along", "cosine", "variance"), strict=True):
            axis.plot(data["sizes"], entry[kind], style, label=name, **look)
    axes[2].set_yscale("log")
    axes[0].set(title="length of E[g] along the truth")
    axes[1].set(title="cosine of E[g] with the truth")
    axes[2].set(title="variance at equal length")
    for axis in axes:
        axis.set(xlabel="group size N")
        axis.legend(fontsize=8)
    save(figure, "histories.png")

    data = found["masking"]
    figure, axes = page("masking", 3)
    axes[0].plot(data["steps"], data["gain"], "k-", label="J(pi) - J(mu), exact")
    axes[0].plot(data["steps"], data["masked"], "o--", label="masked surrogate")
    axes[0].plot(data["steps"], data["masked_bound"], "s-", label="bound of its error", color="C0", alpha=0.5)
    axes[0].plot(data["steps"], data["classical_bound"], "^-", label="classical bound, no mask", color="C1")
    axes[0].axhline(1.0, color="k", linestyle=":")
    axes[0].text(data["steps"][0], 1.5, "vacuous above 1", fontsize=8)
    axes[0].set(title="64 tokens: gain, surrogate, bounds", xlabel="step", xscale="log", yscale="log")
    for rejected, share, color in ((0.0, "13%", "C0"), (2.5, "60%", "C1")):
        for divisor, style in (("all", "o-"), ("kept", "s--")):
            along = [one[0] for one in data[f"{divisor} {rejected:g}"]]
            axes[1].plot(data["sizes"], along, style, color=color, label=f"divided by {divisor}, {share} rejected")
    axes[1].set(title="rejected rows: length along the truth", xlabel="group size N", ylim=(0.8, 3.3))
    for place, (knob, label) in enumerate((("k", "of k, zeta = 0"), ("zeta", "of zeta, k = 0"))):
        columns = list(zip(*data[f"of_{knob}"], strict=True))
        x = np.array(data[knob]) / data[knob][-1]
        axes[2].plot(x, columns[0], "o-", color=f"C{place}", label=f"length, {label}")
        axes[2].plot(x, columns[1], "s--", color=f"C{place}", label=f"cosine, {label}")
    axes[2].set(title="EMPG against the true gradient", xlabel="k / 4 and zeta / 0.5", ylim=(0.2, 1.2))
    for axis in axes:
        axis.legend(fontsize=8)
    save(figure, "masking.png")
    return written


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return round(value, 6) if isinstance(value, float) else value


def main() -> int:
    """Compute, write numbers.json and the plots, and print where they are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here, help="folder to write (default: the script's own)")
    parser.add_argument("--numbers-only", action="store_true", help="no plots (needs no matplotlib)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = numbers()
    target = args.out / "numbers.json"
    target.write_text(json.dumps(_rounded(found), indent=1) + "\n", encoding="utf-8")
    print(target)
    for path in [] if args.numbers_only else plots(found, args.out):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
