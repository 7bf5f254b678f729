# SPDX-License-Identifier: Apache-2.0
"""Statistics of the whole next-token distribution, from logits."""

from __future__ import annotations

import torch

#: Elements of logits that are held in float32 at once.
BLOCK_ELEMENTS = 1 << 22


@torch.no_grad()
def sum_pi_squared(logits: torch.Tensor) -> torch.Tensor:
    """Sum over the vocabulary of the squared probabilities, in float32 whatever the dtype of the logits.

        sum_v pi(v)^2 = sum_v e^{2 (z_v - max z)} / (sum_v e^{z_v - max z})^2

    In bfloat16 the log-sum-exp keeps three digits, which makes the result wrong by up to half and the gradient energy
    1 - 2 pi + sum pi^2 negative. Blocks of rows keep the float32 copy small.

    Args:
        logits: [..., V] float, already divided by the temperature.

    Returns:
        [...] float32, in (0, 1]; without gradient.

    Source: arXiv 2602.07078; the identity is verl 0.9.1's, utils/torch_functional.py.
    """
    flat = logits.detach().reshape(-1, logits.shape[-1])
    out = torch.empty(flat.shape[0], dtype=torch.float32, device=flat.device)
    step = max(1, BLOCK_ELEMENTS // max(1, flat.shape[-1]))
    for start in range(0, flat.shape[0], step):
        block = flat[start : start + step].float()
        weights = (block - block.amax(-1, keepdim=True)).exp_()
        total = weights.sum(-1)
        out[start : start + step] = weights.square_().sum(-1) / total.square()
    return out.reshape(logits.shape[:-1])
