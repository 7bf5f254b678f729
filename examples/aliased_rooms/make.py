# SPDX-License-Identifier: Apache-2.0
"""Bias and variance of GRPO, GiGPO and HGPO where the right action hangs on what was seen before.

    python examples/aliased_rooms/make.py [--out DIR] [--groups 20000] [--numbers-only]

writes numbers.json and aliased_rooms.png; README.md beside this file has the plan and reads the numbers. The true
gradient is exact, by enumeration (rooms.py); the estimators' means and variances are of groups drawn with seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rooms import HISTORY, PAYS, POLICIES, STEPS, Episodes, episodes
from scipy import stats

from verl_ext.methods.dr_mas import dr_mas_advantage
from verl_ext.methods.gigpo import gigpo_advantage
from verl_ext.methods.hgpo import hgpo_advantage
from verl_ext.methods.trloo import trloo_advantage

GROUPS, SIZES, PROMPTS = 20_000, [4, 8, 16], 16
#: The groups are drawn and kept in so many blocks, which the jackknife leaves out in turn.
BLOCKS = 100

Method = Callable[[Episodes, np.ndarray], np.ndarray]


def by_step(function: Callable[..., Any], *names: str, **options: Any) -> Method:
    """An estimator of turns, a turn a step; `names` are the turn fields that it is given."""

    def advantages(all_of: Episodes, groups: np.ndarray) -> np.ndarray:
        number, size = groups.shape
        episode = groups.flatten()
        reward = all_of.reward[episode]
        fields = {
            "traj_uid": np.tile(np.arange(size).repeat(STEPS), number),
            "turn_index": np.tile(np.arange(STEPS), number * size),
            "turn_reward": reward.flatten(),
            "anchor_obs": all_of.observation[episode].flatten(),
        }
        returns = torch.from_numpy(reward.sum(1).repeat(STEPS))[:, None]
        mask = torch.ones(len(returns), 1, dtype=torch.long)
        index = np.arange(number).repeat(size * STEPS)
        found = function(returns, mask, index, **{name: fields[name] for name in names}, **options)[0]
        return found.double().numpy().reshape(number, size, STEPS)

    return advantages


def whole(all_of: Episodes, groups: np.ndarray) -> np.ndarray:
    """RLOO: the episode's return less the mean of the others', on every step."""
    number, size = groups.shape
    returns = torch.from_numpy(all_of.reward[groups.flatten()].sum(1))[:, None]
    found = trloo_advantage(returns, torch.ones(len(returns), 1, dtype=torch.long), np.arange(number).repeat(size))[0]
    return found.double().numpy().reshape(number, size, 1).repeat(STEPS, 2)


FIELDS = ("traj_uid", "turn_index", "turn_reward", "anchor_obs")
METHODS: dict[str, Method] = {
    "rloo": whole,
    "trloo": by_step(trloo_advantage, "traj_uid", "turn_index", "turn_reward"),
    "grpo": by_step(dr_mas_advantage, "traj_uid", level="global", norm_by_std=False),
    "gigpo": by_step(gigpo_advantage, *FIELDS, gamma=1.0, mode="mean_norm"),
    "hgpo K=0": by_step(hgpo_advantage, *FIELDS, gamma=1.0, mode="mean_norm", history_length=0),
    "hgpo": by_step(hgpo_advantage, *FIELDS, gamma=1.0, mode="mean_norm", history_length=HISTORY),
    "grpo, std": by_step(dr_mas_advantage, "traj_uid", level="global", norm_by_std=True),
    "gigpo, std": by_step(gigpo_advantage, *FIELDS, gamma=1.0, mode="mean_std_norm"),
    "hgpo, std": by_step(hgpo_advantage, *FIELDS, gamma=1.0, mode="mean_std_norm", history_length=HISTORY),
}
PAIRS = [("hgpo", "gigpo"), ("hgpo", "grpo"), ("gigpo", "grpo"), ("hgpo, std", "gigpo, std")]


def estimates(method: Method, all_of: Episodes, groups: np.ndarray) -> np.ndarray:
    """The gradient of each group, [groups, P]: the mean over its episodes of A times the score."""
    return np.einsum("gns,gnsp->gp", method(all_of, groups), all_of.score[groups]) / groups.shape[1]


def drawn(all_of: Episodes, number: int, size: int, seed: list[int]) -> np.ndarray:
    """Independent groups of episodes, [number, size]."""
    return np.random.default_rng(seed).choice(len(all_of.probability), size=(number, size), p=all_of.probability)


def quality(number: float, total: np.ndarray, squares: float, truth: np.ndarray) -> dict[str, float]:
    """Bias, variance and squared error of a gradient estimate, from the sum and the sum of squares of independent ones.

    In units of the true gradient's length (squared); `mean` is free of the noise that |mean of the estimates|^2 has.
    """
    unit = float(truth @ truth)
    mean = float(total @ total - squares) / (number * (number - 1)) / unit  # |E g|^2
    variance = squares / number / unit - mean
    along = float(total @ truth) / number / unit
    turned = mean / along**2 - 1.0
    at_length = variance / along**2
    return {
        "along": along,
        "bias squared": mean - 2 * along + 1.0,
        "variance": variance,
        "cosine": along / max(mean, 1e-300) ** 0.5,
        "turned": turned,
        "variance at equal length": at_length,
        "error of 1": at_length + turned,
        f"error of {PROMPTS}": at_length / PROMPTS + turned,
    }


def with_intervals(statistic: Callable[[np.ndarray], dict[str, float]]) -> dict[str, list[float]]:
    """Each figure of the statistic of all blocks with its 95 % interval, by the jackknife over blocks."""
    every = np.arange(BLOCKS)
    value = statistic(every)
    left = [statistic(np.delete(every, block)) for block in every]
    width = float(stats.t.ppf(0.975, BLOCKS - 1)) * (BLOCKS - 1) / BLOCKS**0.5
    found = {}
    for name, middle in value.items():
        half = width * float(np.std([one[name] for one in left]))
        found[name] = [middle, middle - half, middle + half]
    return found


def condition(pay: str, policy: str, size: int, groups: int) -> dict[str, Any]:
    """All figures of one problem, policy and group size; all methods see the same groups."""
    all_of = episodes(pay, policy)
    truth = all_of.gradient()
    number = max(2, groups // BLOCKS)
    totals: dict[str, np.ndarray] = {name: np.zeros((BLOCKS, len(truth))) for name in METHODS}
    squares = {name: np.zeros(BLOCKS) for name in METHODS}
    for block in range(BLOCKS):
        of_block = drawn(all_of, number, size, [list(PAYS).index(pay), list(POLICIES).index(policy), size, block])
        for name, method in METHODS.items():
            g = estimates(method, all_of, of_block)
            totals[name][block], squares[name][block] = g.sum(0), (g**2).sum()

    def of(name: str, blocks: np.ndarray) -> dict[str, float]:
        return quality(len(blocks) * number, totals[name][blocks].sum(0), float(squares[name][blocks].sum()), truth)

    found: dict[str, Any] = {name: with_intervals(lambda blocks, name=name: of(name, blocks)) for name in METHODS}
    error = f"error of {PROMPTS}"
    for one, other in PAIRS:

        def compared(blocks: np.ndarray, one: str = one, other: str = other) -> dict[str, float]:
            a, b = of(one, blocks), of(other, blocks)
            return {
                "turned, difference": a["turned"] - b["turned"],
                "variance at equal length, ratio": a["variance at equal length"] / b["variance at equal length"],
                f"{error}, ratio": a[error] / b[error],
            }

        found[f"{one} against {other}"] = with_intervals(compared)
    return found


def plot(found: dict[str, Any], target: Path) -> None:
    """Under the half-trained policy, over n: bias of direction, variance against GRPO's, error against GiGPO's."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.titlesize": 9.5})
    figure, axes = plt.subplots(1, 3, figsize=(12.6, 3.9), constrained_layout=True)

    def draw(axis: Any, pay: str, name: str, kind: str, place: int, style: str, color: str, label: str) -> None:
        y, low, high = np.array([found[f"{pay}, half-trained, {size}"][name][kind] for size in SIZES]).T
        x = np.array(SIZES) * 1.03**place
        look = {"fillstyle": "none"} if pay == "equal" else {}
        axis.errorbar(x, y, [y - low, high - y], fmt=style, color=color, capsize=2, markersize=5, label=label, **look)

    colors = {"grpo": "C2", "gigpo": "C0", "hgpo": "C1"}
    called = {"grpo": "GRPO", "gigpo": "GiGPO", "hgpo": "HGPO"}
    for place, (name, color) in enumerate(colors.items()):
        for way, style, words in (("", "o-", ""), (", std", "s--", ", with std")):
            label = called[name] + words
            draw(axes[0], "unequal", name + way, "turned", 2 * place - 2 + bool(way), style, color, label)
    axes[0].set(title="squared bias of direction, unequal pay")
    for place, (pay, style) in enumerate((("unequal", "o-"), ("equal", "o:"))):
        for name in ("gigpo", "hgpo"):
            label = f"{called[name]}, {pay} pay"
            kind = "variance at equal length, ratio"
            draw(axes[1], pay, f"{name} against grpo", kind, place, style, colors[name], label)
        for way, color, words in (("", "C1", "no std"), (", std", "C3", "both with std")):
            kind = f"error of {PROMPTS}, ratio"
            draw(axes[2], pay, f"hgpo{way} against gigpo{way}", kind, place, style, color, f"{words}, {pay} pay")
    axes[1].set(title="variance at equal length / GRPO's (no std)", ylim=(0.6, 1.05))
    axes[2].set(title=f"HGPO / GiGPO: squared error of {PROMPTS} prompts", ylim=(0.8, 2.0))
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(SIZES, [str(size) for size in SIZES])
        axis.set_xlabel("group size n")
        axis.axhline(float(axis is not axes[0]), color="k", linestyle=":", linewidth=1)
        axis.legend(fontsize=8)
    figure.savefig(target, dpi=100)
    plt.close(figure)


def main() -> int:
    """Compute, write numbers.json and the plot, and print where they are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here, help="folder to write (default: the script's own)")
    parser.add_argument("--groups", type=int, default=GROUPS, help="independent groups of each size")
    parser.add_argument("--numbers-only", action="store_true", help="no plot (needs no matplotlib)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"groups": args.groups}
    for pay in PAYS:
        for policy in POLICIES:
            for size in SIZES:
                found[f"{pay}, {policy}, {size}"] = condition(pay, policy, size, args.groups)
                print(f"{pay} pay, {policy} policy, groups of {size}", flush=True)
    rounded = json.loads(json.dumps(found), parse_float=lambda digits: float(f"{float(digits):.5g}"))
    (args.out / "numbers.json").write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    print(args.out / "numbers.json")
    if not args.numbers_only:
        plot(found, args.out / "aliased_rooms.png")
        print(args.out / "aliased_rooms.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
