# SPDX-License-Identifier: Apache-2.0
"""Returns: the discounted return of a turn, the reward-to-go of a token, and the mask of regressed turns."""

from __future__ import annotations

import numpy as np
import torch


def chronology(trajectory: np.ndarray, turn_index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(order, place), both [B] int64: turns by trajectory and time, and the place of each in its trajectory."""
    order = np.lexsort((turn_index, trajectory))
    first = np.diff(trajectory[order], prepend=-1) != 0
    number = np.arange(order.size)
    return order, number - np.maximum.accumulate(np.where(first, number, 0))


def turn_returns(rewards: np.ndarray, trajectory: np.ndarray, turn_index: np.ndarray, *, gamma: float) -> np.ndarray:
    """Discounted return of every turn over the later turns of its trajectory, [B] float64.

        G_i = R_i + gamma^(turn_index[next(i)] - turn_index[i]) * G_next(i)

    `next(i)` is the turn of the same trajectory with the next larger turn_index, so the exponent of a reward is the
    distance in turns even when a turn in between is missing.

    Args:
        rewards: [B] float64, reward of each turn alone.
        trajectory: [B] int64 trajectory ids, at least 0, that already separate prompts.
        turn_index: [B] int64, chronological; the rows' order plays no part.
        gamma: discount a turn, in [0, 1].
    """
    order, place = chronology(trajectory, turn_index)
    has_next = np.append(place[1:] > 0, False)[: order.size]
    gap = np.where(has_next, np.diff(turn_index[order], append=0), 0)
    carry = np.where(has_next, float(gamma) ** gap, 0.0)
    return accumulated(torch.from_numpy(rewards[order]), torch.from_numpy(carry)).numpy()[np.argsort(order)]


def accumulated(value: torch.Tensor, carry: torch.Tensor) -> torch.Tensor:
    """V_t = value_t + carry_t V_{t+1} along the last dimension, in as many passes as the length has binary digits.

    After the pass with distance d, V_t has the terms up to t + 2d - 1, and carry_t is the weight of those beyond.
    """
    value, distance = value.clone(), 1
    while distance < value.shape[-1] and carry.any():
        value[..., :-distance] += carry[..., :-distance] * value[..., distance:]
        carry = torch.nn.functional.pad(carry[..., :-distance] * carry[..., distance:], (0, distance))
        distance *= 2
    return value


def regressed_turns(rewards: np.ndarray, trajectory: np.ndarray, turn_index: np.ndarray) -> np.ndarray:
    """Whether a turn with reward <= 0 follows an earlier turn of its trajectory with reward > 0, [B] bool.

    Rewards 1.2, 0, 1.5 give False, True, False. Source: hkust-nlp/KernelGYM, option mask_void_turn (not in the paper,
    arXiv 2602.05885); selecting turns by their outcome biases the baseline of the later turns.
    """
    order, place = chronology(trajectory, turn_index)
    positive = rewards[order] > 0
    before = np.cumsum(positive) - positive
    return ((before > before[np.arange(order.size) - place]) & ~positive)[np.argsort(order)]
