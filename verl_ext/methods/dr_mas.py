# SPDX-License-Identifier: Apache-2.0
"""Dr. MAS: agent-wise advantage normalisation (arXiv 2602.08847).

r_i = S_i - c * [action of turn i invalid]                    the penalty stays on the offending turn
level "agent":        samples = turns of the same prompt and agent
level "global_rows":  samples = turns of the same prompt
level "global":       samples = trajectories of the prompt (mean of their turns); each turn takes its trajectory's
A = (r - mean) / (std + epsilon)   or   r - mean             one sample: r / (1 + epsilon) or r
statistics "mean", "std": only that one is of level "agent", the other of level "global"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from verl_ext.methods.groups import Column, Segments, joint_ids
from verl_ext.methods.options import GroupBy, NotNegative, Positive, checked
from verl_ext.methods.rows import TRAJECTORY, Advantage, RowFieldError, Rows, check_tokens


@checked
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
    row_fields: Mapping[str, Column] | None = None,
    level: Literal["agent", "global", "global_rows"] = "agent",
    statistics: Literal["both", "mean", "std"] = "both",
    norm_by_std: bool = True,
    std: Literal["released", "paper"] = "released",
    invalid_action_penalty_coef: NotNegative = 0.1,
    epsilon: Positive = 1e-6,
    group_by: GroupBy | None = None,
) -> Advantage:
    """Advantages normalised with the reward statistics of each agent, or of the prompt as a baseline.

    Turns, not trajectories, are the samples of "agent" and "global_rows", so an agent that speaks often in a trajectory
    weighs that trajectory more.

    Args (tensors, columns and errors are those of every method: `verl_ext.methods`):
        token_level_rewards: the score is the outcome of the trajectory, the same on all of its turns.
        traj_uid: required by level "global", and by `statistics` other than "both".
        turn_index: used in error messages only.
        agent_id: required by level "agent".
        level: "agent" (the method), "global" (the released baseline, equal to GRPO over trajectories) or "global_rows".
        statistics: which of an agent's statistics level "agent" takes: "both", its "mean" or its "std". The other one
            is that of the prompt's trajectories; a turn gets 0 where the deviation is 0.
        norm_by_std: divide by the standard deviation + epsilon.
        std: "released" is the unbiased one (ddof 1), "paper" that of the population (ddof 0).
        invalid_action_penalty_coef: c, at least 0; published 0.1 (math), 0.01 (search).
        epsilon: added to the standard deviation, above 0; 1e-6 released.
        group_by: by default [index, agent_id] at level "agent" and [index] otherwise.

    Returns:
        one value a turn.

    Source: langfengQ/DrMAS, verl/trainer/ppo/core_algos.py and ray_trainer.py.
    """
    batch = check_tokens(token_level_rewards, response_mask)
    fields = {"index": index, "traj_uid": traj_uid, "turn_index": turn_index, "agent_id": agent_id}
    rows = Rows(batch, valid_row=valid_row, row_fields=row_fields, is_action_valid=is_action_valid, **fields)
    r = rows.scores(token_level_rewards) - rows.penalty(invalid_action_penalty_coef)
    group = rows.keys(group_by or (("index", "agent_id") if level == "agent" else ("index",)))
    how: dict[str, Any] = {"by_std": norm_by_std, "epsilon": epsilon, "ddof": 1 if std == "released" else 0}
    if statistics != "both" and level != "agent":
        raise ValueError(
            f"statistics={statistics!r} is of level='agent', and level={level!r} has no agent's statistics"
        )
    if level != "global" and statistics == "both":
        A = normalised(r, group, **how)
    elif "traj_uid" not in rows:
        asks = "level=global" if level == "global" else f"statistics={statistics}"
        raise RowFieldError(f"turn field 'traj_uid' is required by {asks}; single-turn data: level=global_rows")
    elif level == "global":
        A = normalised_trajectories(r, group, rows.keys(TRAJECTORY), **how)
    else:
        A = _mixed(r, group, rows.keys(("index",)), rows.keys(TRAJECTORY), statistics, **how)
    return Advantage.of_rows(A, response_mask, rows, group)


def _mixed(
    r: np.ndarray,
    group: np.ndarray,
    prompt: np.ndarray,
    trajectory: np.ndarray,
    agents: str,
    *,
    by_std: bool,
    epsilon: float,
    ddof: int,
) -> np.ndarray:
    """One statistic of the turn's agent (`agents`: "mean" or "std"), the other of the prompt's trajectories, [V]."""
    sample, outcome, prompt_of_sample = trajectory_means(r, prompt, trajectory)
    own, whole = (_statistics(r, group, ddof), _statistics(outcome, prompt_of_sample, ddof))
    means, deviations = zip(own, (one[sample] for one in whole), strict=True)
    centred = r - means[0 if agents == "mean" else 1]
    if not by_std:
        return centred
    scale = deviations[0 if agents == "std" else 1]
    return np.divide(centred, scale + epsilon, out=np.zeros_like(centred), where=scale > 0)


def _statistics(values: np.ndarray, group: np.ndarray, ddof: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each sample's group, as `normalised` takes them: 0 and 1 in a group of one."""
    groups = Segments(group)
    single = groups.rows == 1
    deviation = groups.std(groups.deviation(values), ddof)
    return np.where(single, 0.0, groups.mean(values)[group]), np.where(single, 1.0, deviation)


def normalised(values: np.ndarray, group: np.ndarray, *, by_std: bool, epsilon: float, ddof: int = 1) -> np.ndarray:
    """(x - mean) / (std + epsilon) or x - mean, every turn a sample, [V]; a group of one keeps its raw value."""
    if by_std:
        return Segments(group).standardise(values, ddof=ddof, epsilon=epsilon)
    return Segments(group).centre(values)


def trajectory_means(values: np.ndarray, group: np.ndarray, trajectory: np.ndarray) -> tuple[np.ndarray, ...]:
    """Trajectories as samples: the number of each turn's sample [V], each sample's mean value and its group [S]."""
    sample = joint_ids(group, trajectory)
    group_of_sample = np.zeros(sample.max(initial=-1) + 1, dtype=np.int64)
    group_of_sample[sample] = group
    return sample, Segments(sample).mean(values), group_of_sample


def normalised_trajectories(
    values: np.ndarray, group: np.ndarray, trajectory: np.ndarray, *, by_std: bool, epsilon: float, ddof: int = 1
) -> np.ndarray:
    """`normalised` with every trajectory (the mean of its turns) as one sample; its turns take its value, [V]."""
    sample, mean, group_of_sample = trajectory_means(values, group, trajectory)
    return normalised(mean, group_of_sample, by_std=by_std, epsilon=epsilon, ddof=ddof)[sample]
