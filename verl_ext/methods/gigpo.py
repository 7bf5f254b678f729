# SPDX-License-Identifier: Apache-2.0
"""GiGPO: group-in-group policy optimisation (arXiv 2505.10978).

R_i = sum over later steps j of gamma^(j-i) r_j          Y_i = R_i - c * [action invalid]
S_i = episode return of the turn's trajectory - c * [action invalid]
A^E = (S - mean) / (std + epsilon)  or  S - mean         turns of the prompt; one turn: S / (1 + epsilon) or S
A^S = (Y - mean) / (std + epsilon)  or  Y - mean         turns of the prompt with the same observation; one: 0
A   = A^E + w * A^S                                      both std unbiased
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import torch

from verl_ext.methods.dr_mas import normalised, normalised_trajectories
from verl_ext.methods.groups import Column, Segments, joint_ids
from verl_ext.methods.observations import similarity_clusters, step_returns, texts
from verl_ext.methods.options import Discount, GroupBy, NotNegative, Positive, checked, positive
from verl_ext.methods.rows import Advantage, Rows, check_tokens


@checked
def gigpo_advantage(
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
    mode: Literal["mean_std_norm", "mean_norm"] = "mean_norm",
    step_advantage_w: float = 1.0,
    episode_stats: Literal["rows", "trajectories"] = "rows",
    enable_similarity: bool = False,
    similarity_thresh: Annotated[Discount, positive] = 0.9,
    invalid_action_penalty_coef: NotNegative = 0.1,
    epsilon: Positive = 1e-6,
    group_by: GroupBy = ("index",),
) -> Advantage:
    """Episode-level group advantage plus a step-level advantage among turns with the same observation.

    Turns with valid_row False are removed; their reward counts 0 in the returns of earlier steps.

    Args (tensors, columns and errors are those of every method: `verl_ext.methods`):
        token_level_rewards: the score is the episode return, the same on all turns of a trajectory.
        turn_reward: reward of the step from the environment; single-turn data may leave it out.
        gamma: discount a step, in [0, 1]; 0.95 published.
        mode: "mean_std_norm" (ALFWorld) or "mean_norm" (WebShop, released default).
        step_advantage_w: w; 1.0 published.
        episode_stats: samples of the episode part. "rows" (released): long trajectories weigh more. "trajectories"
            (paper): the mean of a trajectory's S_i is one sample, and every turn takes the value of its trajectory.
        enable_similarity: group observations by text similarity instead of equality; order dependent, quadratic.
        similarity_thresh: ratio in (0, 1] from which two texts are similar; 0.9 in the search setting.
        invalid_action_penalty_coef: c, at least 0; 0.1 published (search 0.01).
        epsilon: added to the standard deviations, above 0.
        group_by: columns of an episode group; step groups split it by observation.

    Returns:
        one value a turn; groups are the step groups.

    Source: langfengQ/verl-agent, gigpo/core_gigpo.py.
    """
    batch = check_tokens(token_level_rewards, response_mask)
    fields = {"index": index, "traj_uid": traj_uid, "turn_index": turn_index, "turn_reward": turn_reward}
    fields |= {"anchor_obs": anchor_obs, "is_action_valid": is_action_valid}
    rows = Rows(batch, valid_row=valid_row, row_fields=row_fields, **fields)
    trajectory, turn, penalty, Y = step_returns(rows, token_level_rewards, gamma, invalid_action_penalty_coef)
    S = rows.scores(token_level_rewards) - penalty

    group, by_std = rows.keys(group_by), mode == "mean_std_norm"
    if enable_similarity:
        step_group = similarity_clusters(texts(rows), group, similarity_thresh)
    else:
        step_group = joint_ids(group, rows.ids("anchor_obs"))
    if episode_stats == "rows":
        A_episode = normalised(S, group, by_std=by_std, epsilon=epsilon)
    else:
        A_episode = normalised_trajectories(S, group, trajectory, by_std=by_std, epsilon=epsilon)
    A = A_episode + step_advantage_w * step_advantage(Y, step_group, by_std=by_std, epsilon=epsilon)
    return Advantage.of_rows(A, response_mask, rows, step_group)


def step_advantage(target: np.ndarray, group: np.ndarray, *, by_std: bool, epsilon: float) -> np.ndarray:
    """A^S of every turn, [V] float64: Y against the turns of its step group; 0 in a group of one."""
    return np.where(Segments(group).rows > 1, normalised(target, group, by_std=by_std, epsilon=epsilon), 0.0)
