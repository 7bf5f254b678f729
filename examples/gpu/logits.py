# SPDX-License-Identifier: Apache-2.0
"""`logits.py DEVICE JSON [--tiny]`: the pass over the logits, by tile, and beside verl's fused losses.

1. For tiles of several widths, numbers of warps and of tiles on their way, the share of a copy's bandwidth that forward
   and forward with backward move (bfloat16, 151,936 logits a token).
2. From hidden states to log-probability and entropy with backward: the product with the head and the pass, against
   verl's `linear_cross_entropy` (Triton) and `FusedLinearForPPO`, in seconds and GiB beyond hidden states and head.

On the processors, where there are no tiles, the plain version is timed once, so that this code has run.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verl_ext.methods.logits.logits_pass import token_statistics

BLOCKS, WARPS, STAGES = (1024, 2048, 4096, 8192), (4, 8, 16), (2, 3, 4)
VARIANTS: dict[str, dict[str, Any]] = {
    "all, pruned": {"rho": 6.144e-6, "entropy": True, "sum_pi_squared": True},
    "entropy and squares": {"entropy": True, "sum_pi_squared": True},
    "log-probability alone": {},
}


def seconds(function: Callable[[], Any], cuda: bool, repeats: int = 5) -> float:
    """Median time of a call after one that is not kept."""
    function()
    taken = []
    for _ in range(repeats):
        if cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def tiles(
    device: str, rows: int, vocabulary: int, save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Shares of the copy's bandwidth, each combination of tile, warps and stages."""
    cuda = device == "cuda"
    x = torch.randn(rows, vocabulary, device=device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(vocabulary, (rows,), device=device)
    aside = torch.empty_like(x)
    with torch.no_grad():
        copy = seconds(lambda: aside.copy_(x), cuda)
    found: list[dict[str, Any]] = []
    every = itertools.product(BLOCKS, WARPS, STAGES) if cuda else [(0, 0, 0)]
    for block, warps, stages in every:
        if cuda:
            from verl_ext.methods.logits import logits_triton

            logits_triton.BLOCK, logits_triton.WARPS, logits_triton.STAGES = block, warps, stages
        entry: dict[str, Any] = {"block": block, "warps": warps, "stages": stages}
        for name, options in VARIANTS.items():

            def forward(options: dict[str, Any] = options) -> None:
                with torch.no_grad():
                    token_statistics(x, labels, **options)

            def both(options: dict[str, Any] = options) -> None:
                x.grad = None
                token_statistics(x, labels, **options).log_probs.sum().backward()

            try:
                # A copy reads and writes the logits; forward reads them, backward reads and writes them.
                shares = copy / 2 / seconds(forward, cuda), copy * 1.5 / seconds(both, cuda)
                entry[name] = [round(share, 3) for share in shares]
            except Exception as error:  # a tile that does not fit
                entry[name] = f"{type(error).__name__}: {error}"[:200]
        found.append(entry)
        save(found)
    return found


def best(found: list[dict[str, Any]]) -> dict[str, Any]:
    """By variant, the shares of forward and of both, and the tile that has the best of each."""
    said: dict[str, Any] = {}
    for name in VARIANTS:
        known = [entry for entry in found if isinstance(entry.get(name), list)]
        for at, what in enumerate(("forward", "with backward")):
            if known:
                top = max(known, key=lambda entry: entry[name][at])
                said[f"{name}, {what}"] = [top[name][at], top["block"], top["warps"], top["stages"]]
    return said


def fused(device: str, tokens: int, hidden: int, vocabulary: int) -> dict[str, Any]:
    """Log-probability and entropy of hidden states, with backward, three ways."""
    cuda = device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    states = torch.randn(tokens, hidden, device=device, dtype=dtype).requires_grad_()
    head = (torch.randn(vocabulary, hidden, device=device, dtype=dtype) * 0.02).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), device=device)

    def by_the_pass() -> tuple[torch.Tensor, torch.Tensor | None]:
        found = token_statistics(states @ head.T, labels, entropy=True)
        return found.log_probs, found.entropy

    def by_torch() -> Any:
        from verl.utils.experimental.torch_functional import FusedLinearForPPO

        return FusedLinearForPPO()(states[None], head, labels[None])

    def by_triton() -> Any:
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(states, head, labels, 1.0, "none")

    found: dict[str, Any] = {}
    for name, function in {"head and pass": by_the_pass, "verl torch": by_torch, "verl triton": by_triton}.items():

        def step(function: Callable[[], Any] = function) -> None:
            states.grad = head.grad = None
            function()[0].sum().backward()

        try:
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            taken = seconds(step, cuda, 3)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else 0.0
            found[name] = {"seconds": round(taken, 5), "gib": round(peak, 3)}
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def main(device: str, path: Path, tiny: bool) -> None:
    rows, tokens, hidden, vocabulary = (8, 8, 16, 512) if tiny else (4096, 4096, 896, 151_936)
    content: dict[str, Any] = {"rows": rows, "vocabulary": vocabulary}

    def save(**entries: Any) -> None:
        content.update(entries)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    save(fused=fused(device, tokens, hidden, vocabulary))
    found = tiles(device, rows, vocabulary, lambda so_far: save(tiles=so_far, result=best(so_far)))
    save(result={"share of the copy, block, warps, stages": best(found), "with the head": content["fused"]})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--tiny" in sys.argv[3:])
