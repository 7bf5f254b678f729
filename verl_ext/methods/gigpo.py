# SPDX-License-Identifier: Apache-2.0
"""GiGPO: group-in-group policy optimisation (arXiv 2505.10978).

R_i = sum over later steps j of gamma^(j-i) r_j          Y_i = R_i - c * [action invalid]
S_i = episode return of the row's trajectory - c * [action invalid]
A^E = (S - mean) / (std + epsilon)  or  S - mean         rows of the prompt; one row: S / (1 + epsilon) or S
A^S = (Y - mean) / (std + epsilon)  or  Y - mean         rows of the prompt with the same observation; one: 0
A   = A^E + w * A^S                                      both std unbiased
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from verl_ext.methods.dr_mas import row_advantage, trajectory_advantage
from verl_ext.methods.groups import Column, Segments, joint_ids
from verl_ext.methods.returns import turn_returns
from verl_ext.methods.rows import (
    RowFieldError,
    Rows,
    broadcast_rows,
    check_choice,
    check_range,
    check_tokens,
    invalid_actions,
)

MODES = ("mean_std_norm", "mean_norm")
EPISODE_STATS = ("rows", "trajectories")


class StepReturns(NamedTuple):
    """What the step-level methods need of every valid row; each field is [V]."""

    trajectory: np.ndarray  #: int64 trajectory ids
    turn: np.ndarray  #: int64 turn index
    discounted: np.ndarray  #: R_i, discounted return before the penalty
    target: np.ndarray  #: Y_i = R_i - penalty
    episode: np.ndarray | None  #: S_i = row score - penalty; None when it was not asked for


def step_returns(
    rows: Rows, token_level_rewards: torch.Tensor, *, gamma: float, penalty_coef: float, episode: bool
) -> StepReturns:
    """Discounted step returns and episode returns with the penalty taken off after discounting.

    A penalty taken off after discounting never reaches earlier steps. Single-turn data may leave out `turn_reward`
    together with `traj_uid` and `turn_index`: its reward is the row score.
    """
    single_turn = "traj_uid" not in rows and "turn_index" not in rows
    trajectory, turn = rows.turns()
    penalty = invalid_actions(rows, penalty_coef)
    from_score = single_turn and "turn_reward" not in rows
    score = rows.scores(token_level_rewards) if episode or from_score else None
    reward = score if from_score and score is not None else rows.floats("turn_reward")
    discounted = turn_returns(reward, trajectory, turn, gamma=gamma)
    return StepReturns(
        trajectory, turn, discounted, discounted - penalty, score - penalty if episode and score is not None else None
    )


def episode_advantage(
    score: np.ndarray,
    group: np.ndarray,
    trajectory: np.ndarray,
    *,
    mode: str,
    epsilon: float,
    episode_stats: str = "rows",
) -> np.ndarray:
    """A^E of every row, [V] float64.

    Args:
        score: [V] S_i.
        group: [V] int64 group ids (the prompt).
        trajectory: [V] int64 trajectory ids.
        mode: "mean_std_norm" or "mean_norm".
        epsilon: added to the unbiased standard deviation.
        episode_stats: "rows" (released): every row is a sample, so long trajectories weigh more. "trajectories"
            (paper): one sample a trajectory, the mean of its S_i, and every row takes the value of its trajectory.
    """
    by_std = mode == "mean_std_norm"
    if episode_stats == "rows":
        return row_advantage(score, group, norm_by_std=by_std, epsilon=epsilon)
    return trajectory_advantage(score, group, trajectory, norm_by_std=by_std, epsilon=epsilon)


def step_advantage(target: np.ndarray, group: np.ndarray, *, mode: str, epsilon: float) -> np.ndarray:
    """A^S of every row, [V] float64: Y against the rows of its step group (unbiased std); 0 in a group of one."""
    groups = Segments(group)
    deviation = groups.deviation(target)
    if mode == "mean_std_norm":
        deviation = deviation / (groups.std(deviation, ddof=1) + epsilon)
    return np.where(groups.rows > 1, deviation, 0.0)


def similarity_clusters(observations: Sequence[str], group: np.ndarray, threshold: float) -> np.ndarray:
    """Cluster texts within each group: a text joins the first cluster whose first member is similar enough.

    Similar enough means `difflib.SequenceMatcher(None, text, first_member).ratio() >= threshold`. Clusters are founded
    in row order, so the result depends on it, and the cost is quadratic in the number of different texts of a group.

    Returns:
        ids: [V] int64 cluster ids, unique across groups.
    """
    founders: dict[int, list[tuple[str, int]]] = {}
    known: dict[tuple[int, str], int] = {}
    number = 0
    for key, text in zip(group.tolist(), observations, strict=True):
        if (key, text) in known:
            continue
        for founder, cluster in founders.setdefault(key, []):
            matcher = difflib.SequenceMatcher(None, text, founder)
            # The two quick ratios are upper bounds, so most pairs are ruled out without the full comparison.
            if (
                matcher.real_quick_ratio() >= threshold
                and matcher.quick_ratio() >= threshold
                and matcher.ratio() >= threshold
            ):
                known[key, text] = cluster
                break
        else:
            founders[key].append((text, number))
            known[key, text] = number
            number += 1
    pairs = zip(group.tolist(), observations, strict=True)
    return np.fromiter((known[pair] for pair in pairs), dtype=np.int64, count=len(observations))


def _texts(rows: Rows) -> list[str]:
    texts = list(rows.column("anchor_obs"))
    for position, text in enumerate(texts):
        if not isinstance(text, str):
            raise RowFieldError(
                f"row field 'anchor_obs' must be text for enable_similarity, got {type(text).__name__} in "
                f"{rows.where(position)}; turn enable_similarity off to compare observations by value"
            )
    return texts


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
    gamma: float = 0.95,
    mode: str = "mean_std_norm",
    step_advantage_w: float = 1.0,
    episode_stats: str = "rows",
    enable_similarity: bool = False,
    similarity_thresh: float = 0.95,
    invalid_action_penalty_coef: float = 0.1,
    epsilon: float = 1e-6,
    group_by: Sequence[str] = ("index",),
    row_fields: Mapping[str, Column] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Episode-level group advantage plus a step-level advantage among rows with the same observation.

    Rejected rows (all-zero mask, valid_row True) stay in the groups; rows with valid_row False are removed and their
    reward counts 0. A group of zero variance gets exactly 0.

    Args:
        token_level_rewards: [B, T] float; its row sum is the episode return, the same on all rows of a trajectory.
        response_mask: [B, T] of 0 and 1.
        index: [B] prompt uid.
        traj_uid: [B] trajectory id.
        turn_index: [B] chronological step of the row in its trajectory.
        anchor_obs: [B] raw observation of the step, compared by value.
        turn_reward: [B] environment reward of the step.
        is_action_valid: [B] bool; None means that every action was valid.
        valid_row: [B] bool; None means all True.
        gamma: discount a step, in [0, 1]; 0.95 published.
        mode: "mean_std_norm" (ALFWorld) or "mean_norm" (WebShop).
        step_advantage_w: w; 1.0 published.
        episode_stats: "rows" (released) or "trajectories" (paper), see `episode_advantage`.
        enable_similarity: group observations by text similarity instead of equality; order dependent, quadratic.
        similarity_thresh: ratio in (0, 1] from which two texts are similar; 0.9 in the search setting.
        invalid_action_penalty_coef: c; 0.1 published (search 0.01).
        epsilon: added to the standard deviations.
        group_by: row fields that make an episode group; step groups split it by observation.
        row_fields: further columns for group_by.

    Returns:
        (advantages, returns): the same [B, T] float32 tensor twice.

    Raises:
        RowFieldError: a needed column is missing or cannot be used.
        ValueError: a shape, an option or a reward (NaN, infinity) is wrong.

    Source: langfengQ/verl-agent, gigpo/core_gigpo.py.
    """
    check_choice("mode", mode, MODES)
    check_choice("episode_stats", episode_stats, EPISODE_STATS)
    check_range("epsilon", epsilon, 0.0)
    if enable_similarity and not 0 < similarity_thresh <= 1:
        raise ValueError(f"similarity_thresh={similarity_thresh!r} must be in (0, 1]")
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
    step = step_returns(rows, token_level_rewards, gamma=gamma, penalty_coef=invalid_action_penalty_coef, episode=True)
    group = rows.keys(group_by)
    if enable_similarity:
        step_group = joint_ids(similarity_clusters(_texts(rows), group, similarity_thresh))
    else:
        step_group = joint_ids(group, rows.ids("anchor_obs"))
    assert step.episode is not None
    advantage = episode_advantage(
        step.episode, group, step.trajectory, mode=mode, epsilon=epsilon, episode_stats=episode_stats
    ) + step_advantage_w * step_advantage(step.target, step_group, mode=mode, epsilon=epsilon)
    tokens = broadcast_rows(rows.spread(advantage), response_mask)
    return tokens, tokens
