# SPDX-License-Identifier: Apache-2.0
"""Returns: the discounted return of a turn, the reward-to-go of a token, and the mask of regressed turns."""

from __future__ import annotations

import numpy as np
import torch


def chronology(trajectory: np.ndarray, turn_index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An order of the rows in which those of a trajectory follow each other in time, and each one's place in it.

    Returns:
        (order, place), both [B] int64: row numbers, and for each of them how many rows of its trajectory come before.
    """
    order = np.lexsort((turn_index, trajectory))
    first = np.diff(trajectory[order], prepend=-1) != 0
    number = np.arange(order.size)
    return order, number - np.maximum.accumulate(np.where(first, number, 0))


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
        trajectory: [B] int64 trajectory ids, at least 0, that already separate prompts.
        turn_index: [B] int64, chronological position in the trajectory; row order plays no part.
        gamma: discount a turn, in [0, 1].
        valid_row: [B] bool, all True when None.
    """
    order, place = chronology(trajectory, turn_index)
    total = np.asarray(rewards, dtype=np.float64)[order]
    if valid_row is not None:
        total[~valid_row[order]] = 0.0
    gap = np.diff(turn_index[order], append=0)
    has_next = np.append(place[1:] > 0, False)
    carry = np.where(has_next, np.power(float(gamma), np.where(has_next, gap, 0)), 0.0)
    # Doubling: after step d, total[i] sums the next 2d rows and carry[i] discounts the rest; log2(turns) steps.
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
    order, place = chronology(trajectory, turn_index)
    positive = rewards[order] > 0
    before = np.cumsum(positive) - positive
    regressed = np.empty(order.size, dtype=bool)
    regressed[order] = (before > before[np.arange(order.size) - place]) & ~positive
    return regressed


def token_reward_to_go(rewards: torch.Tensor) -> torch.Tensor:
    """Undiscounted reward-to-go along the last dimension, G_t = sum over j >= t of r_j, in the dtype of `rewards`."""
    return rewards.flip(-1).cumsum(-1).flip(-1)
