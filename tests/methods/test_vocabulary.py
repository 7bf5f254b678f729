# SPDX-License-Identifier: Apache-2.0
"""Sum of squared probabilities: exact in float32, also from bfloat16 logits, where the plain formula is not."""

from __future__ import annotations

import pytest
import torch

from verl_ext.methods.logits import logits_torch, vocabulary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_against_float64(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_torch, "BLOCK_ELEMENTS", 2048)  # several blocks
    logits = (torch.randn(3, 7, 1000, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    exact = torch.softmax(logits.double(), -1).square().sum(-1)
    got = vocabulary.sum_pi_squared(logits)
    assert got.shape == (3, 7) and got.dtype == torch.float32
    assert torch.allclose(got.double(), exact, rtol=1e-5, atol=0)


def test_the_plain_formula_is_wrong_in_bfloat16() -> None:
    """Why the engine's own function is replaced in runs that need it."""
    logits = (torch.randn(512, 4000, generator=torch.Generator().manual_seed(1)) * 3 + 20).bfloat16()
    exact = torch.softmax(logits.double(), -1).square().sum(-1)
    plain = torch.exp(torch.logsumexp(2.0 * logits, -1) - 2.0 * torch.logsumexp(logits, -1)).double()
    assert ((plain - exact).abs() / exact).max() > 0.1
    assert ((vocabulary.sum_pi_squared(logits).double() - exact).abs() / exact).max() < 1e-5


def test_extreme_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0], [float("-inf"), 0.0, 0.0]])
    assert torch.allclose(vocabulary.sum_pi_squared(logits), torch.tensor([1.0, 1 / 3, 0.5]))
