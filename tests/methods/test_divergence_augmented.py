# SPDX-License-Identifier: Apache-2.0
"""`verl_ext.methods.divergence_augmented` against its formula, token by token, and its limits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_ext.methods.divergence_augmented import divergence_augmented_terms


def batch(seed: int, rows: int = 4, length: int = 9) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, length, generator=generator, dtype=torch.float64)
    new = old + 0.6 * torch.randn(rows, length, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    mask = (torch.rand(rows, length, generator=generator) < 0.7).long()
    return old, new, advantages, mask


@pytest.mark.seconds
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_against_the_recurrence(seed: int, c: float) -> None:
    old, new, advantages, mask = batch(seed)
    new = new.requires_grad_()
    loss, divergence = divergence_augmented_terms(old, new, advantages, mask, beta=0.7, c=c, rho_bar=1.0)
    for row in range(len(mask)):
        ahead = 0.0
        for t in reversed(range(mask.shape[1])):
            if not mask[row, t]:
                assert loss[row, t] == 0 and divergence[row, t] == 0
                continue
            d = float(new[row, t].detach() - old[row, t])
            assert float(divergence[row, t]) == pytest.approx(d + ahead, abs=1e-12)
            effective = float(advantages[row, t]) - 0.7 * (d + ahead)
            assert float(loss[row, t].detach()) == pytest.approx(-effective * math.exp(d), abs=1e-12)
            ahead = min(1.0, math.exp(d)) * d + min(c, math.exp(d)) * ahead
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    torch.testing.assert_close(gradient, loss.detach())  # the ratio alone carries a gradient: d ratio = ratio


def test_nothing_changes_in_the_first_update_and_without_weight() -> None:
    old, new, advantages, mask = batch(1)
    first, divergence = divergence_augmented_terms(old, old, advantages, mask, beta=1.0)
    assert not divergence.any()
    torch.testing.assert_close(first, -advantages * mask)
    plain, _ = divergence_augmented_terms(old, new, advantages, mask, beta=0.0)
    torch.testing.assert_close(plain, -advantages * (new - old).exp() * mask)


def test_padding_and_bad_input() -> None:
    old, new, advantages, mask = batch(2)
    wide = [torch.nn.functional.pad(x, (0, 3), value=float("nan")) for x in (old, new, advantages)]
    padded, _ = divergence_augmented_terms(*wide, torch.nn.functional.pad(mask, (0, 3)))
    torch.testing.assert_close(padded[:, :9], divergence_augmented_terms(old, new, advantages, mask)[0])
    assert not padded[:, 9:].any()
    assert divergence_augmented_terms(*[torch.zeros(2, 0)] * 4)[0].shape == (2, 0)
    with pytest.raises(ValueError, match="beta=-1: it must be at least 0"):
        divergence_augmented_terms(old, new, advantages, mask, beta=-1)
    with pytest.raises(ValueError, match="advantages has shape"):
        divergence_augmented_terms(old, new, advantages[:, :2], mask)
