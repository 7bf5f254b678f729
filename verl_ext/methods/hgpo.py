# SPDX-License-Identifier: Apache-2.0
"""HGPO: hierarchy-of-groups policy optimisation (arXiv 2602.22817).

R_i = sum over later steps j of gamma^(j-i) r_j          Y_i = R_i - c * [action invalid]
level k = 1..K+1:  group = turns of the prompt whose last k observations are equal (the current one included)
a_k = (Y - mean) / (std + epsilon)  or  Y - mean         population std; only groups of at least two turns
a_0 = GiGPO's episode advantage                          option base_group
w_k = (k+1)^alpha / (sum of the kept + 1e-6)             items that are exactly 0 are dropped first
A   = sum over kept k of w_k a_k                         nothing kept: 0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch

from verl_ext.methods.groups import Column, Segments
from verl_ext.methods.observations import history_groups, step_returns
from verl_ext.methods.options import Count, Discount, GroupBy, NotNegative, Positive, checked
from verl_ext.methods.rows import Advantage, Rows, check_tokens

#: Added to the sum of the level weights.
WEIGHT_EPSILON = 1e-6
#: An item within this fraction of its group's mean is 0 up to rounding and is dropped.
ZERO_ITEM_RTOL = 1e-6


@checked
def hgpo_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Column,
    *,
    traj_uid: Column | None = None,
    turn_index: Column | None = None,
    anchor_obs: Column | None = None,
    turn_reward: Column | None = None,
    is_action_valid: Column | None = None,
    valid_row: Column | None = None,
    row_fields: Mapping[str, Column] | None = None,
    gamma: Discount = 0.95,
    history_length: Count = 2,
    mode: Literal["mean_std_norm", "mean_norm"] = "mean_std_norm",
    length_weight_alpha: float = 1.0,
    base_group: bool = False,
    level_weights: Literal["released", "paper"] = "released",
    invalid_action_penalty_coef: NotNegative = 0.1,
    epsilon: Positive = 1e-6,
    group_by: GroupBy = ("index",),
) -> Advantage:
    """Step advantages combined over groups that share 0, 1, ..., K past observations.

    Early steps have fewer levels; revisits of a state inside one trajectory join its groups; actions are not part of a
    key. Turns with valid_row False are removed from groups and histories, and their reward counts 0. A lone trajectory
    without revisits gets 0 everywhere.

    Args (tensors, columns and errors are those of every method: `verl_ext.methods`):
        token_level_rewards: the score is the episode return, used by base_group.
        turn_reward: reward of the step from the environment; single-turn data may leave it out.
        gamma: discount a step, in [0, 1]; 0.95 published.
        history_length: K, the number of past steps that the prompt shows; 2 or 4 published.
        mode: "mean_std_norm" (ALFWorld) or "mean_norm" (WebShop).
        length_weight_alpha: alpha; 1.0 published.
        base_group: add GiGPO's episode advantage (unbiased std) as the item of level 0, weight 1.
        level_weights: "released": (k+1)^alpha for k = 1..K+1, i.e. 2:3:4 for K = 2. "paper": k^alpha, i.e. 1:2:3.
        invalid_action_penalty_coef: c, at least 0; 0.1 published.
        epsilon: added to the standard deviations, above 0.
        group_by: columns of a group; each level splits it by observations.

    Returns:
        one value a turn; details: levels, the group ids of each level.

    Source: langfengQ/verl-agent, recipe/hgpo/core_hgpo.py.
    """
    batch = check_tokens(token_level_rewards, response_mask)
    fields = {"index": index, "traj_uid": traj_uid, "turn_index": turn_index, "turn_reward": turn_reward}
    fields |= {"anchor_obs": anchor_obs, "is_action_valid": is_action_valid}
    rows = Rows(batch, valid_row=valid_row, row_fields=row_fields, **fields)
    trajectory, turn, penalty, Y = step_returns(rows, token_level_rewards, gamma, invalid_action_penalty_coef)
    group = rows.keys(group_by)
    levels = history_groups(rows.ids("anchor_obs"), trajectory, turn, group, history_length + 1)

    A, weight_sum, by_std = np.zeros_like(Y), np.zeros_like(Y), mode == "mean_std_norm"
    items = [(k, members, *level_items(Y[members], ids, by_std, epsilon)) for k, (members, ids) in enumerate(levels, 1)]
    if base_group:
        S = rows.scores(token_level_rewards) - penalty
        items.append((0, np.arange(len(S)), *level_items(S, group, by_std, epsilon, ddof=1, keep_singles=True)))
    for k, members, a, kept in items:
        w = float(k + 1 if level_weights == "released" or k == 0 else k) ** length_weight_alpha
        A[members] += np.where(kept, w * a, 0.0)
        weight_sum[members] += np.where(kept, w, 0.0)
    A = A / (weight_sum + WEIGHT_EPSILON)
    return Advantage.of_rows(A, response_mask, rows, group, levels=[ids for _, ids in levels])


def level_items(
    target: np.ndarray, group: np.ndarray, by_std: bool, epsilon: float, *, ddof: int = 0, keep_singles: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Items a_k, and whether each is kept: not 0 up to rounding, with company unless `keep_singles` (GiGPO)."""
    groups = Segments(group)
    single = groups.rows == 1
    size = np.maximum(1.0, np.abs(groups.mean(target)[group]))
    kept = np.where(single, keep_singles & (target != 0), np.abs(groups.deviation(target)) > ZERO_ITEM_RTOL * size)
    return (groups.standardise(target, ddof=ddof, epsilon=epsilon) if by_std else groups.centre(target)), kept
