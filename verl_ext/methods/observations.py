# SPDX-License-Identifier: Apache-2.0
"""Turns as steps: returns, and groups of equal histories (HGPO) and similar texts (GiGPO, `enable_similarity`)."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import numpy as np
import torch

from verl_ext.methods.groups import joint_ids
from verl_ext.methods.returns import chronology, turn_returns
from verl_ext.methods.rows import RowFieldError, Rows


def step_returns(
    rows: Rows, token_level_rewards: torch.Tensor, gamma: float, penalty: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Trajectory ids, turn indices, penalties and penalised returns Y = R - penalty of the turns as steps, each [V].

    R discounts `turn_reward`, or the turn score of single-turn data, which has neither it nor trajectories. The
    penalty, `penalty` where the action is invalid, comes after discounting: no earlier step pays for it.
    """
    single_turn = not any(name in rows for name in ("turn_reward", "traj_uid", "turn_index"))
    reward = rows.scores(token_level_rewards) if single_turn else rows.floats("turn_reward")
    penalties = rows.penalty(penalty)
    trajectory, turn = rows.turns()
    return trajectory, turn, penalties, turn_returns(reward, trajectory, turn, gamma=gamma) - penalties


def history_groups(
    observation: np.ndarray, trajectory: np.ndarray, turn: np.ndarray, group: np.ndarray, levels: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each level k = 1..`levels` that has turns: the turns with k observations, and their contiguous group ids.

    Two turns share a group of level k when they agree in `group` and in their last k observations. A level's key is
    that of the level below at the previous step together with the current observation: one pass over the turns each.

    Args:
        observation, trajectory, turn, group: [V] int64 ids of observation and trajectory, step, ids of the prompt.
        levels: K + 1.
    """
    order, place = chronology(trajectory, turn)
    observation, group = observation[order], group[order]
    history, result = observation, []
    for k in range(1, levels + 1):
        enough = np.flatnonzero(place >= k - 1)
        if enough.size == 0:
            break
        if k > 1:
            longer = np.zeros_like(history)
            longer[enough] = joint_ids(history[enough - 1], observation[enough])
            history = longer
        result.append((order[enough], joint_ids(group[enough], history[enough])))
    return result


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
    pairs = list(zip(group.tolist(), observations, strict=True))
    for key, text in pairs:
        if (key, text) in known:
            continue
        for founder, cluster in founders.setdefault(key, []):
            if _similar(text, founder, threshold):
                known[key, text] = cluster
                break
        else:
            founders[key].append((text, number))
            known[key, text] = number
            number += 1
    return np.array([known[pair] for pair in pairs], dtype=np.int64)


def _similar(text: str, other: str, threshold: float) -> bool:
    matcher = difflib.SequenceMatcher(None, text, other)
    # The two quick ratios are upper bounds, so most pairs are ruled out without the full comparison.
    ratios = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)
    return all(ratio() >= threshold for ratio in ratios)


def texts(rows: Rows) -> list[str]:
    """`anchor_obs` of the valid turns as text; RowFieldError names a turn where it is something else."""
    observations = rows.column("anchor_obs").tolist()
    for row, text in enumerate(observations):
        if not isinstance(text, str):
            raise RowFieldError(
                f"turn field 'anchor_obs' must be text for enable_similarity, got {type(text).__name__} in "
                f"{rows.where(row)}; turn enable_similarity off to compare observations by value"
            )
    return observations
