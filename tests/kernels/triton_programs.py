# SPDX-License-Identifier: Apache-2.0
"""Programs in Triton for the tests with a processor in the GPU's place, and for those on a GPU."""

from __future__ import annotations

from verl_ext.rollout.kernels.tasks import Task

TASK = Task.of("mul add relu")
TRITON = """import torch, triton, time
import triton.language as tl
@triton.jit
def fused(x, a, b, y, R: tl.constexpr, C: tl.constexpr):
    c = tl.arange(0, C)[None, :]
    at = tl.arange(0, R)[:, None] * C + c
    tl.store(y + at, tl.maximum(tl.load(x + at) * tl.load(a + c) + tl.load(b + c), 0.0))
def launch(x, a, b):
    y = torch.empty_like(x)
    fused[(1,)](x, a, b, y, *x.shape)
    return y
def in_torch(x, a, b):
    return torch.relu(x * a + b)
class ModelNew:
    def __init__(self):
        self.calls = 0
    def forward(self, x, a, b):
        self.calls += 1
        return launch(x, a, b)
"""
GOES = "return launch(x, a, b)\n"


def forward(*lines: str) -> str:
    """The program with another body of `forward`."""
    head, _, tail = TRITON.rpartition(GOES)
    return head + "\n        ".join(lines) + "\n" + tail
