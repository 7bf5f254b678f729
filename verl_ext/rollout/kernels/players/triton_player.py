# SPDX-License-Identifier: Apache-2.0
"""The player of the back end `triton_interpret`: Triton's own interpreter, on the processor.

It says whether a kernel is right and whether it matters, not how fast it would be.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported, and in this process alone

import linecache
from collections.abc import Sequence
from typing import Any

import torch
import triton

from verl_ext.rollout.kernels.players import player

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
_WARM = """
import triton.language as tl
@triton.jit
def ones(y, count, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(y + at, tl.exp(tl.sum(at * 0.0, 0)), mask=at < count)
class ModelNew:
    def forward(self, x, a, b):
        ones[(1,)](x, 2, size=4)
        return x
"""


def play(wire: int, memory: int, shape: list[int], plan: dict[str, Any], names: list[str], lost: list[str]) -> None:
    """As `player.play`, of a program in Triton; `names` is empty."""
    player.serve(wire, player.views(memory, *shape), lambda: program(plan["code"], lost))


def program(code: str, lost: Sequence[str] = (), left_out: Sequence[str] = ()) -> player.Run:
    """What is done with one input."""
    return player.model(space(code, lost, left_out)["ModelNew"]())


def space(code: str, lost: Sequence[str] = (), left_out: Sequence[str] = ()) -> dict[str, Any]:
    """What a program defines. Interpreted, an autotuner takes its first configuration: nothing is timed.

    Args:
        code: of the program.
        lost: kernels whose results are lost.
        left_out: kernels that are not launched at all.
    """
    jit, autotune = triton.jit, triton.autotune

    def jit_or_lost(function: Any = None, **options: Any) -> Any:
        if function is None:
            return lambda later: jit_or_lost(later, **options)
        kernel = jit(function, **options)
        if function.__name__ in lost:
            kernel.run = player.losing(kernel.run)
        if function.__name__ in left_out:
            kernel.run = lambda *_, **__: None
        return kernel

    triton.jit = jit_or_lost
    if INTERPRETED:
        triton.autotune = lambda configs, *given, **options: autotune(configs[:1], *given, **options)
    linecache.cache[player.FILE] = (len(code), None, code.splitlines(keepends=True), player.FILE)  # Triton reads it
    return player.space(code, triton=triton)


# Once in the process that players are forked from, for what Triton does and imports at its first launch.
if INTERPRETED:
    program(_WARM)(*(torch.ones(4) for _ in range(4)))
    triton.jit, triton.autotune = triton.runtime.jit.jit, triton.runtime.autotuner.autotune
