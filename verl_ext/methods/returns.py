# SPDX-License-Identifier: Apache-2.0
"""Returns: the discounted return of a turn, the reward-to-go of a token, and the mask of regressed turns."""

from __future__ import annotations

import numpy as np
import torch

from verl_ext.methods.rows import check_range


def turn_returns(
    rewards: np.ndarray,
    trajectory: np.ndarray,
    turn_index: np.ndarray,
    *,
    gamma: float,
    valid_row: np.ndarray | None = None,
) -> np.ndarray:
    """Discounted return of every row over the later turns of its trajectory, [B] float64.

        G_i = R_i + gamma^(turn_index[next(i)] - turn_index[i]) * G_next(i)

    `next(i)` is the row of the same trajectory with the next larger turn_index, so the exponent of a reward is the
    distance in turns even when a turn in between is missing. A row with `valid_row` False contributes reward 0 but
    still discounts.

    Args:
        rewards: [B] float64, reward of each row alone.
        trajectory: [B] int64 trajectory ids that already separate prompts.
        turn_index: [B] int64, chronological position in the trajectory; row order plays no part.
        gamma: discount a turn, in [0, 1].
        valid_row: [B] bool, all True when None.
    """
    check_range("gamma", gamma, 0.0, 1.0)
    rewards = np.asarray(rewards, dtype=np.float64)
    if valid_row is not None:
        rewards = np.where(valid_row, rewards, 0.0)
    if rewards.size == 0:
        return rewards.copy()
    order = np.lexsort((turn_index, trajectory))
    same = trajectory[order][1:] == trajectory[order][:-1]
    gap = np.where(same, turn_index[order][1:] - turn_index[order][:-1], 0)
    total = rewards[order]
    # Doubling: after step d, total[i] sums the next 2d rows and carry[i] discounts the rest; log2(turns) steps.
    carry = np.append(np.where(same, np.power(float(gamma), gap.astype(np.float64)), 0.0), 0.0)
    distance = 1
    while distance < total.size and carry.any():
        total[:-distance] += carry[:-distance] * total[distance:]
        carry = np.append(carry[:-distance] * carry[distance:], np.zeros(distance))
        distance *= 2
    result = np.empty_like(total)
    result[order] = total
    return result


def regressed_turns(rewards: np.ndarray, trajectory: np.ndarray, turn_index: np.ndarray) -> np.ndarray:
    """Whether a turn with reward <= 0 follows an earlier turn of its trajectory with reward > 0, [B] bool.

    Rewards 1.2, 0, 1.5 give False, True, False. Source: hkust-nlp/KernelGYM, option mask_void_turn (not in the paper,
    arXiv 2602.05885); selecting rows by their outcome biases the baseline of the later turns.
    """
    order = np.lexsort((turn_index, trajectory))
    positive = (rewards[order] > 0).astype(np.int64)
    before = np.cumsum(positive) - positive
    first = np.ones(order.size, dtype=bool)
    first[1:] = trajectory[order][1:] != trajectory[order][:-1]
    start = np.maximum.accumulate(np.where(first, np.arange(order.size), 0))
    regressed = np.empty(order.size, dtype=bool)
    regressed[order] = (before - before[start] > 0) & (positive == 0)
    return regressed


def token_reward_to_go(rewards: torch.Tensor) -> torch.Tensor:
    """Undiscounted reward-to-go along the last dimension, G_t = sum over j >= t of r_j, in the dtype of `rewards`."""
    return rewards.flip(-1).cumsum(-1).flip(-1)
