# SPDX-License-Identifier: Apache-2.0
"""Rejected rows and modified advantages, exactly: what `examples/truth` says about masking and EMPG."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from enumeration import bandit, moments, quality, true_gradient
from masking import (
    ODD,
    PLAIN,
    chain,
    classical_bound,
    direction,
    kept_gradient,
    masked_bound,
    modulated,
    policies,
    rejecting,
    sure_and_unsure,
)

from verl_ext.methods.rejection import trm


def test_chain_agrees_with_all_its_paths_masked_by_trm() -> None:
    length, step = 5, 0.2
    mu, pi = policies(step)
    found = chain(step, length)
    paths = list(itertools.product(range(3), repeat=length))
    kinds = np.array([[PLAIN, *(ODD if token == 2 else PLAIN for token in path[:-1])] for path in paths])
    taken = np.array(paths)
    sampler, trainer = mu[kinds, taken], pi[kinds, taken]
    reward = ((taken == 1).sum(1) >= length / 2).astype(float)
    kl = torch.from_numpy(found.divergence[kinds])
    kept = trm(kl, torch.ones_like(kl), max=0.1, avg=None).kept.numpy()
    assert 0 < kept.sum() < len(paths)
    p, change = sampler.prod(1), (trainer / sampler - 1).sum(1)
    assert p.sum() == pytest.approx(1.0)
    expected = {
        "gain": (trainer.prod(1) - p) @ reward,
        "surrogate": p @ (reward * change),
        "masked": p @ (kept * reward * change),
        "lost": p @ (~kept * reward),
        "kept": p @ kept,
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(float(value), abs=1e-12), name


@pytest.mark.parametrize("step", [0.005, 0.01, 0.02, 0.05, 0.1])
def test_masked_bound_holds_over_64_tokens_where_the_classical_one_says_nothing(step: float) -> None:
    found = chain(step)
    bound = masked_bound(found)
    assert classical_bound(found) > 1000 and bound < 1  # rewards lie in [0, 1]
    assert found.gain >= found.masked - found.lost - bound
    assert abs(found.gain - found.surrogate) < classical_bound(found)
    if step in (0.005, 0.01, 0.02):  # small steps are guaranteed to improve
        assert found.masked - found.lost - bound > 0.25 * found.gain


@pytest.mark.parametrize("rejected", [0.0, 2.5])
def test_dividing_by_the_kept_rows_is_longer_and_turns_the_gradient(rejected: float) -> None:
    truth = kept_gradient(rejected)
    for size in (2, 3, 4):
        whole = moments(bandit(), size, rejecting("all", rejected)).mean
        np.testing.assert_allclose(whole, truth, atol=2e-7)
        along, cosine, _ = quality(moments(bandit(), size, rejecting("kept", rejected)), truth)
        assert along > 1.1 and cosine < 1 - 1e-4


def test_empg_shrinks_and_turns_the_gradient() -> None:
    plain = modulated(0.0, 0.0)
    np.testing.assert_allclose(plain.mean, true_gradient(sure_and_unsure()), atol=2e-7)
    length, cosine, unsure = zip(*(direction(modulated(k, 0.0)) for k in (0.0, 1.0, 4.0)), strict=True)
    assert list(length) == sorted(length, reverse=True) and list(cosine) == sorted(cosine, reverse=True)
    assert list(unsure) == sorted(unsure, reverse=True)  # what is unsure learns less
    assert direction(modulated(0.0, 0.5))[1] < 0.95  # the bonus for a sure next step is no part of the reward
