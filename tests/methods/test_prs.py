# SPDX-License-Identifier: Apache-2.0
"""The rule `prs`: it keeps by the published probability, with random numbers that belong to rows and not to places."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_ext.methods.kernel_reward import draws, prs, prs_keep_probability

ROWS = 20_000
NAMES = [f"{row % 7}/{row % 100}/{row}/0" for row in range(ROWS)]


def test_rows_are_kept_by_their_probability() -> None:
    mask = torch.ones(ROWS, 3, dtype=torch.int64)
    coverage, correct = np.full(ROWS, 0.34), np.ones(ROWS, dtype=bool)
    found = prs(mask, coverage=coverage, correct=correct, draw=NAMES)
    assert torch.equal(found.response_mask, mask * found.kept[:, None])
    np.testing.assert_allclose(found.statistic, 0.4)
    # The names are fixed, and so is what is drawn: five deviations of the binomial distribution are 0.017.
    assert float(found.kept.double().mean()) == pytest.approx(0.4, abs=0.017)
    other = prs(mask, coverage=coverage, correct=correct, draw=NAMES, seed=1)
    assert 0.4 < float((other.kept != found.kept).double().mean()) < 0.56


def test_a_draw_is_the_row_s_whatever_the_order_and_the_rest() -> None:
    numbers = draws(NAMES, 3)
    order = np.random.default_rng(0).permutation(ROWS)[: ROWS // 3]
    np.testing.assert_array_equal(draws([NAMES[row] for row in order], 3), numbers[order])
    assert numbers.min() >= 0 and numbers.max() < 1 and len(set(numbers.tolist())) == ROWS
    # Kolmogorov-Smirnov: below 1.95 / sqrt(n) for p = 0.001; the numbers do not change from run to run.
    assert np.abs(np.sort(numbers) - (np.arange(ROWS) + 0.5) / ROWS).max() < 1.95 / np.sqrt(ROWS)


def test_wrong_rows_full_ones_and_rows_without_tokens_stay_and_lazy_ones_go() -> None:
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1]])
    found = prs(mask, coverage=[0.0, 0.4, 0.1, 0.3], correct=[False, True, True, True], draw=list("abcd"))
    assert found.kept.tolist() == [True, True, True, False]
    assert found.response_mask.tolist() == [[1, 1], [1, 0], [0, 0], [0, 0]]


def test_a_trajectory_s_geometric_mean_leaves_rows_without_tokens_out() -> None:
    mask = torch.tensor([[1], [1], [0]])
    given = {"coverage": [0.2, 0.8, 1e-9], "correct": [True] * 3, "traj_uid": ["a"] * 3, "level": "geometric"}
    found = prs(mask, draw=list("abc"), **given)
    expected = prs_keep_probability(
        [0.2, 0.8], [True] * 2, traj_uid=["a"] * 2, level="geometric", threshold=0.3, factor=0.1
    )
    np.testing.assert_allclose(found.statistic[:2], expected)
    assert expected[0] == 1.0 and found.kept.all()
