# SPDX-License-Identifier: Apache-2.0
"""TRLOO: turn-level REINFORCE leave-one-out (Dr. Kernel, arXiv 2602.05885).

R_i = turn reward                                     G_i = R_i + gamma^gap * G_next(i)
group(i) = valid turns of the same prompt and index    N = |group(i)|
A_i = N/(N-1) * (G_i - mean of the group) = G_i - mean of the others          N > 1
A_i = G_i                                                                     N = 1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch

from verl_ext.methods.groups import Column, Segments
from verl_ext.methods.options import Discount, GroupBy, checked
from verl_ext.methods.returns import regressed_turns, turn_returns
from verl_ext.methods.rows import Advantage, Rows, check_tokens

#: Added to the variance when advantages are whitened over the batch.
WHITEN_EPSILON = 1e-8


@checked
def trloo_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Column,
    *,
    traj_uid: Column | None = None,
    turn_index: Column | None = None,
    turn_reward: Column | None = None,
    valid_row: Column | None = None,
    row_fields: Mapping[str, Column] | None = None,
    gamma: Discount = 1.0,
    baseline: Literal["leave_one_out", "mean"] = "leave_one_out",
    batch_std: bool = False,
    mask_regressions: bool = False,
    group_by: GroupBy = ("index", "turn_index"),
) -> Advantage:
    """Turn-level leave-one-out advantages.

    Rejected turns (all-zero mask, valid_row True) stay in N and in the mean, which keeps the baseline unbiased; turns
    with valid_row False do not, their reward counts 0 in earlier returns and they get advantage 0. Single-turn data
    gives neither traj_uid nor turn_index: every turn is a trajectory of one turn.

    Args (tensors, columns and errors are those of every method: `verl_ext.methods`):
        turn_reward: None: the turn's score.
        gamma: discount a turn, in [0, 1]; 1.0 published.
        baseline: "leave_one_out", or "mean" for the self-inclusive turn mean without std (a group of one keeps A = G).
        batch_std: whiten the turn advantages over the valid turns of the batch afterwards (unbiased variance + 1e-8).
        mask_regressions: treat a turn with reward <= 0 after an earlier positive one as valid_row False (released
            option mask_void_turn; biased, off by default).

    Returns:
        one value a turn; details: turn [V] int64, turn_return G [V] float64.

    Source: arXiv 2602.05885; hkust-nlp/KernelGYM, drkernel/kernel/kernel_trainer.py.
    """
    batch = check_tokens(token_level_rewards, response_mask)
    fields = {"index": index, "traj_uid": traj_uid, "turn_index": turn_index, "turn_reward": turn_reward}
    rows = Rows(batch, valid_row=valid_row, row_fields=row_fields, **fields)
    trajectory, turn = rows.turns()
    reward = rows.scores(token_level_rewards) if turn_reward is None else rows.floats("turn_reward")
    sample = np.ones(len(reward), dtype=bool)
    if mask_regressions:
        sample = ~regressed_turns(reward, trajectory, turn)
    G = turn_returns(np.where(sample, reward, 0.0), trajectory, turn, gamma=gamma)[sample]
    rows.keep(sample)

    group = rows.keys(group_by)
    A = Segments(group).leave_one_out(G) if baseline == "leave_one_out" else Segments(group).centre(G)
    if batch_std:
        A = _whiten(A)
    return Advantage.of_rows(A, response_mask, rows, group, turn=turn[sample], turn_return=G)


def _whiten(values: np.ndarray) -> np.ndarray:
    """(x - mean) / sqrt(unbiased variance + 1e-8) over all values; fewer than two values stay as they are."""
    if values.size < 2:
        return values
    whole = Segments(np.zeros(values.size, dtype=np.int64))
    deviation = whole.deviation(values)
    return deviation / np.sqrt(whole.std(deviation, ddof=1) ** 2 + WHITEN_EPSILON)
