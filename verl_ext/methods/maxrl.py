# SPDX-License-Identifier: Apache-2.0
"""MaxRL: maximum-likelihood reinforcement learning (arXiv 2602.02710).

r = turn score >= 0; of a trajectory of several turns, their mean
A = (r - mean) / mean          mean over the trajectories of the prompt; 0 where the mean is 0
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from verl_ext.methods.dr_mas import trajectory_means
from verl_ext.methods.groups import Column, Segments
from verl_ext.methods.options import GroupBy, checked
from verl_ext.methods.rows import TRAJECTORY, Advantage, Rows, check_tokens


@checked
def maxrl_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Column,
    *,
    traj_uid: Column | None = None,
    valid_row: Column | None = None,
    row_fields: Mapping[str, Column] | None = None,
    group_by: GroupBy = ("index",),
) -> Advantage:
    """Advantages divided by the prompt's success rate instead of its standard deviation.

    Of rewards 0 and 1 and N samples the expected update is the gradient of the log-likelihood of success, expanded to
    order N - 1: the rarer the successes of a prompt, the more each of them weighs.

    Args (tensors, columns and errors are those of every method: `verl_ext.methods`):
        token_level_rewards: the score is the outcome of the turn's trajectory; ValueError if it is negative.
        traj_uid: a trajectory is one sample. None: every turn is a trajectory.

    Returns:
        one value a turn.

    Source: arXiv 2602.02710.
    """
    batch = check_tokens(token_level_rewards, response_mask)
    rows = Rows(batch, valid_row=valid_row, row_fields=row_fields, index=index, traj_uid=traj_uid)
    r = rows.scores(token_level_rewards)
    what = "at least 0, since maxrl divides by their mean (shift them, without KL or length penalties in the reward)"
    rows.refuse("token_level_rewards", what, r, r < 0)
    group = rows.keys(group_by)
    trajectory = rows.keys(TRAJECTORY) if "traj_uid" in rows else np.arange(len(r))
    sample, r, group_of_sample = trajectory_means(r, group, trajectory)
    prompts = Segments(group_of_sample)
    mean = prompts.mean(r)[group_of_sample]
    A = np.where(mean > 0, prompts.deviation(r) / np.where(mean > 0, mean, 1.0), 0.0)
    return Advantage.of_rows(A[sample], response_mask, rows, group)
