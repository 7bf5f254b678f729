# SPDX-License-Identifier: Apache-2.0
"""Dr. MAS: agent-wise advantage normalisation (arXiv 2602.08847).

r_i = S_i - c * [action of row i invalid]                    the penalty stays on the offending row
level "agent":        samples = rows of the same prompt and agent
level "global_rows":  samples = rows of the same prompt
level "global":       samples = trajectories of the prompt (mean of their rows); each row takes its trajectory's
A = (r - mean) / (std + epsilon)   or   r - mean             std unbiased; one sample: r / (1 + epsilon) or r
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from verl_ext.methods.groups import Column, Segments, joint_ids
from verl_ext.methods.rows import (
    RowFieldError,
    Rows,
    broadcast_rows,
    check_choice,
    check_range,
    check_tokens,
    invalid_actions,
)

LEVELS = ("agent", "global", "global_rows")


def dr_mas_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Column,
    *,
    traj_uid: Column | None = None,
    turn_index: Column | None = None,
    agent_id: Column | None = None,
    is_action_valid: Column | None = None,
    valid_row: Column | None = None,
    level: str = "agent",
    norm_by_std: bool = True,
    invalid_action_penalty_coef: float = 0.0,
    epsilon: float = 1e-6,
    group_by: Sequence[str] | None = None,
    row_fields: Mapping[str, Column] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages normalised with the reward statistics of each agent, or of the prompt as a baseline.

    Rows, not trajectories, are the samples of "agent" and "global_rows", so an agent that speaks often in a trajectory
    weighs that trajectory more. Statistics are float64; a group of zero variance gets exactly 0.

    Args:
        token_level_rewards: [B, T] float; its row sum is the outcome of the trajectory, the same on all of its rows.
        response_mask: [B, T] of 0 and 1.
        index: [B] prompt uid.
        traj_uid: [B] trajectory id; required by level "global".
        turn_index: [B] turn of the row; used in error messages only.
        agent_id: [B] agent that produced the row; required by level "agent".
        is_action_valid: [B] bool; None means that every action was valid.
        valid_row: [B] bool; None means all True. Rows with False are no samples and get 0.
        level: "agent" (the method), "global" (the released baseline, equal to GRPO over trajectories) or "global_rows".
        norm_by_std: divide by the unbiased standard deviation + epsilon.
        invalid_action_penalty_coef: c; published 0.1 (math), 0.01 (search).
        epsilon: added to the standard deviation; 1e-6 released.
        group_by: row fields that make a group; by default [index, agent_id] at level "agent" and [index] otherwise.
        row_fields: further columns for group_by.

    Returns:
        (advantages, returns): the same [B, T] float32 tensor twice.

    Raises:
        RowFieldError: a needed column is missing or cannot be used.
        ValueError: a shape, an option or a reward (NaN, infinity) is wrong.

    Source: langfengQ/DrMAS, verl/trainer/ppo/core_algos.py and ray_trainer.py.
    """
    check_choice("level", level, LEVELS)
    check_range("epsilon", epsilon, 0.0)
    batch, _ = check_tokens(token_level_rewards, response_mask)
    rows = Rows(
        batch,
        valid_row=valid_row,
        row_fields=row_fields,
        index=index,
        traj_uid=traj_uid,
        turn_index=turn_index,
        agent_id=agent_id,
        is_action_valid=is_action_valid,
    )
    if group_by is None:
        group_by = ("index", "agent_id") if level == "agent" else ("index",)
    reward = rows.scores(token_level_rewards) - invalid_actions(rows, invalid_action_penalty_coef)
    group = rows.keys(group_by)

    if level == "global":
        if "traj_uid" not in rows:
            raise RowFieldError("row field 'traj_uid' is required by level=global; single-turn data: level=global_rows")
        advantage = trajectory_advantage(reward, group, rows.trajectories(), norm_by_std=norm_by_std, epsilon=epsilon)
    else:
        advantage = row_advantage(reward, group, norm_by_std=norm_by_std, epsilon=epsilon)
    tokens = broadcast_rows(rows.spread(advantage), response_mask)
    return tokens, tokens


def row_advantage(reward: np.ndarray, group: np.ndarray, *, norm_by_std: bool, epsilon: float) -> np.ndarray:
    """Group-normalised reward with every row as one sample, [B] float64; a group of one keeps its raw reward."""
    groups = Segments(group)
    if norm_by_std:
        return groups.standardise(reward, ddof=1, epsilon=epsilon)
    return groups.centre(reward)


def trajectory_advantage(
    reward: np.ndarray, group: np.ndarray, trajectory: np.ndarray, *, norm_by_std: bool, epsilon: float
) -> np.ndarray:
    """Group-normalised reward with every trajectory (the mean of its rows) as one sample, [B] float64."""
    member = joint_ids(group, trajectory)
    sample = Segments(member).mean(reward)
    sample_group = np.zeros(sample.size, dtype=np.int64)
    sample_group[member] = group
    return row_advantage(sample, sample_group, norm_by_std=norm_by_std, epsilon=epsilon)[member]
