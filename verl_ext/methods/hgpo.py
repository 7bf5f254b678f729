# SPDX-License-Identifier: Apache-2.0
"""HGPO: hierarchy-of-groups policy optimisation (arXiv 2602.22817).

R_i = sum over later steps j of gamma^(j-i) r_j          Y_i = R_i - c * [action invalid]
level k = 1..K+1:  group = rows of the prompt whose last k observations are equal (the current one included)
a_k = (Y - mean) / (std + epsilon)  or  Y - mean         population std; only groups of at least two rows
a_0 = GiGPO's episode advantage                          option base_group
w_k = (k+1)^alpha / (sum of the kept + 1e-6)             items that are exactly 0 are dropped first
A   = sum over kept k of w_k a_k                         nothing kept: 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from verl_ext.methods.gigpo import MODES, episode_advantage, step_returns
from verl_ext.methods.groups import Column, Segments, compact_ids, joint_ids
from verl_ext.methods.rows import Rows, broadcast_rows, check_choice, check_range, check_tokens

LEVEL_WEIGHTS = ("released", "paper")

#: Added to the sum of the level weights.
WEIGHT_EPSILON = 1e-6
#: An item within this fraction of its group's mean is 0 up to rounding and is dropped.
ZERO_ITEM_RTOL = 1e-6


def history_groups(
    observation: np.ndarray, trajectory: np.ndarray, turn: np.ndarray, group: np.ndarray, levels: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows and group ids of each level of the hierarchy.

    Two rows share a group of level k when they agree in `group` and in their last k observations. The key of level k is
    built from the key of level k-1 at the previous step and the current observation, so the cost of a level is one pass
    over the rows whatever k is.

    Args:
        observation: [V] int64 observation ids.
        trajectory: [V] int64 trajectory ids.
        turn: [V] int64 chronological position.
        group: [V] int64 group ids (the prompt).
        levels: number of levels, K + 1.

    Returns:
        for each level that has rows: the row numbers that have k observations, and their contiguous group ids.
    """
    order = np.lexsort((turn, trajectory))
    sorted_trajectory = trajectory[order]
    first = np.ones(order.size, dtype=bool)
    first[1:] = sorted_trajectory[1:] != sorted_trajectory[:-1]
    position = np.arange(order.size) - np.maximum.accumulate(np.where(first, np.arange(order.size), 0))
    sorted_observation, sorted_group = observation[order], group[order]

    result = []
    history = sorted_observation
    for level in range(1, levels + 1):
        enough = np.flatnonzero(position >= level - 1)
        if enough.size == 0:
            break
        if level > 1:
            longer = np.zeros_like(history)
            longer[enough] = joint_ids(history[enough - 1], sorted_observation[enough])
            history = longer
        result.append((order[enough], joint_ids(sorted_group[enough], compact_ids(history[enough]))))
    return result


def level_items(
    target: np.ndarray, group: np.ndarray, *, mode: str, epsilon: float, ddof: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Items a_k of one level and whether each is kept, both [n].

    An item is kept when its group has at least two rows and it differs from 0 by more than rounding.
    """
    groups = Segments(group)
    mean = groups.mean(target)[group]
    deviation = groups.deviation(target)
    kept = (groups.rows > 1) & (np.abs(deviation) > ZERO_ITEM_RTOL * np.maximum(1.0, np.abs(mean)))
    if mode == "mean_std_norm":
        deviation = deviation / (groups.std(deviation, ddof) + epsilon)
    return deviation, kept


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
    gamma: float = 0.95,
    history_length: int = 2,
    mode: str = "mean_std_norm",
    length_weight_alpha: float = 1.0,
    base_group: bool = False,
    level_weights: str = "released",
    invalid_action_penalty_coef: float = 0.1,
    epsilon: float = 1e-6,
    group_by: Sequence[str] = ("index",),
    row_fields: Mapping[str, Column] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Step advantages combined over groups that share 0, 1, ..., K past observations.

    Early steps have fewer levels; revisits of a state inside one trajectory join its groups; actions are not part of a
    key. Rejected rows (all-zero mask, valid_row True) stay in the groups; rows with valid_row False are removed from
    groups and histories and their reward counts 0. A lone trajectory without revisits gets 0 everywhere.

    Args:
        token_level_rewards: [B, T] float; its row sum is the episode return, used by base_group.
        response_mask: [B, T] of 0 and 1.
        index: [B] prompt uid.
        traj_uid: [B] trajectory id.
        turn_index: [B] chronological step of the row in its trajectory.
        anchor_obs: [B] raw observation of the step, without history or template, compared by value.
        turn_reward: [B] environment reward of the step.
        is_action_valid: [B] bool; None means that every action was valid.
        valid_row: [B] bool; None means all True.
        gamma: discount a step, in [0, 1]; 0.95 published.
        history_length: K, the number of past steps that the prompt shows; 2 or 4 published.
        mode: "mean_std_norm" (ALFWorld) or "mean_norm" (WebShop).
        length_weight_alpha: alpha; 1.0 published.
        base_group: add GiGPO's episode advantage (unbiased std) as the item of level 0, weight 1.
        level_weights: "released": (k+1)^alpha for k = 1..K+1, i.e. 2:3:4 for K = 2. "paper": k^alpha, i.e. 1:2:3.
        invalid_action_penalty_coef: c; 0.1 published.
        epsilon: added to the standard deviations.
        group_by: row fields that make a group; each level splits it by observations.
        row_fields: further columns for group_by.

    Returns:
        (advantages, returns): the same [B, T] float32 tensor twice.

    Raises:
        RowFieldError: a needed column is missing or cannot be used.
        ValueError: a shape, an option or a reward (NaN, infinity) is wrong.

    Source: langfengQ/verl-agent, recipe/hgpo/core_hgpo.py.
    """
    check_choice("mode", mode, MODES)
    check_choice("level_weights", level_weights, LEVEL_WEIGHTS)
    check_range("history_length", history_length, 0)
    check_range("epsilon", epsilon, 0.0)
    batch, _ = check_tokens(token_level_rewards, response_mask)
    rows = Rows(
        batch,
        valid_row=valid_row,
        row_fields=row_fields,
        index=index,
        traj_uid=traj_uid,
        turn_index=turn_index,
        anchor_obs=anchor_obs,
        turn_reward=turn_reward,
        is_action_valid=is_action_valid,
    )
    step = step_returns(
        rows, token_level_rewards, gamma=gamma, penalty_coef=invalid_action_penalty_coef, episode=base_group
    )
    group = rows.keys(group_by)

    combined = np.zeros(step.target.size)
    weight_sum = np.zeros(step.target.size)
    if step.episode is not None:
        item = episode_advantage(step.episode, group, step.trajectory, mode=mode, epsilon=epsilon)
        kept = _base_item_kept(step.episode, group)
        combined += np.where(kept, item, 0.0)
        weight_sum += kept
    levels = history_groups(rows.ids("anchor_obs"), step.trajectory, step.turn, group, history_length + 1)
    for level, (members, level_group) in enumerate(levels, start=1):
        item, kept = level_items(step.target[members], level_group, mode=mode, epsilon=epsilon)
        weight = float(level + 1 if level_weights == "released" else level) ** length_weight_alpha
        combined[members] += np.where(kept, weight * item, 0.0)
        weight_sum[members] += np.where(kept, weight, 0.0)
    advantage = combined / (weight_sum + WEIGHT_EPSILON)
    tokens = broadcast_rows(rows.spread(advantage), response_mask)
    return tokens, tokens


def _base_item_kept(score: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Whether the item of level 0 differs from 0 by more than rounding; a group of one is its raw score."""
    groups = Segments(group)
    centred = groups.centre(score)
    scale = np.where(groups.rows > 1, np.maximum(1.0, np.abs(groups.mean(score)[group])), 0.0)
    return np.abs(centred) > ZERO_ITEM_RTOL * scale
