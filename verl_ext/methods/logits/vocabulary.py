# SPDX-License-Identifier: Apache-2.0
"""Statistics of the whole next-token distribution, from logits."""

from __future__ import annotations

import torch

from verl_ext.methods.logits.logits_pass import token_statistics


@torch.no_grad()
def sum_pi_squared(logits: torch.Tensor) -> torch.Tensor:
    """Sum over the vocabulary of the squared probabilities, in float32 whatever the dtype of the logits.

        sum_v pi(v)^2 = sum_v e^{2 (z_v - max z)} / (sum_v e^{z_v - max z})^2

    In bfloat16 the log-sum-exp keeps three digits, which makes the result wrong by up to half and the gradient energy
    1 - 2 pi + sum pi^2 negative. The logits are read once, in blocks.

    Args:
        logits: [..., V] float, already divided by the temperature.

    Returns:
        [...] float32, in (0, 1]; without gradient.

    Raises:
        TypeError, ValueError: logits that are not floating point, or an empty vocabulary.

    Source: arXiv 2602.07078; the identity is verl 0.9.1's, utils/torch_functional.py.
    """
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    found = token_statistics(logits, labels, sum_pi_squared=True).sum_pi_squared
    assert found is not None
    return found.float()
