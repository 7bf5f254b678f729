# SPDX-License-Identifier: Apache-2.0
"""Metrics of a batch of rows, in verl's naming (``group/part/statistic``). Cheap: [B]-sized numpy on the driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

SHOWN_TURNS = 10
"""Per-turn metrics are given for this many turns; later turns are in the means over all rows."""


def trajectory_metrics(columns: Mapping[str, Any]) -> dict[str, float]:
    """Reward and length of whole trajectories.

    verl's ``critic/score`` is a mean over rows, so it weighs long trajectories more and repeats the final reward.
    Here every trajectory counts once, with the undiscounted sum of its turns' rewards.

    Args:
        columns: ``traj_uid`` [B] object, ``valid_row`` [B] bool, ``turn_reward`` [B] float64 if known.

    Returns:
        ``trajectory/turns/{mean,max}`` and, with rewards, ``trajectory/reward/{mean,std,min,max}``.
    """
    valid = np.asarray(columns["valid_row"], dtype=bool)
    if not valid.any():
        return {}
    _, member = np.unique(np.asarray(columns["traj_uid"])[valid].astype(str), return_inverse=True)
    turns = np.bincount(member)
    out = {"trajectory/turns/mean": float(turns.mean()), "trajectory/turns/max": float(turns.max())}
    if "turn_reward" in columns:
        rewards = np.bincount(member, weights=np.asarray(columns["turn_reward"], dtype=np.float64)[valid])
        for statistic in ("mean", "std", "min", "max"):
            out[f"trajectory/reward/{statistic}"] = float(getattr(np, statistic)(rewards))
    if "is_action_valid" in columns:
        out["rollout/valid_action_share"] = float(np.asarray(columns["is_action_valid"], dtype=bool)[valid].mean())
    return out


def row_advantages(advantages: torch.Tensor, response_mask: torch.Tensor) -> np.ndarray:
    """Mean advantage over the model tokens of each row, [B] float64; 0 for a row without tokens."""
    mask = response_mask.bool()
    total = torch.where(mask, advantages, 0.0).sum(-1, dtype=torch.float64)
    return (total / mask.sum(-1).clamp(min=1)).numpy()


def group_metrics(prefix: str, group: np.ndarray) -> dict[str, float]:
    """Sizes of the groups that rows are compared in.

    Args:
        prefix: name of the estimator.
        group: [V] int64 group ids of the valid rows.

    Returns:
        ``<prefix>/group_size/{mean,min,max}`` (over groups) and ``<prefix>/singleton_share`` (of rows).
    """
    if not group.size:
        return {}
    _, member = np.unique(group, return_inverse=True)
    sizes = np.bincount(member)
    return {
        f"{prefix}/group_size/mean": float(sizes.mean()),
        f"{prefix}/group_size/min": float(sizes.min()),
        f"{prefix}/group_size/max": float(sizes.max()),
        f"{prefix}/singleton_share": float((sizes[member] == 1).mean()),
    }


def turn_metrics(prefix: str, turn: np.ndarray, returns: np.ndarray, advantages: np.ndarray) -> dict[str, float]:
    """Mean return and advantage of each turn.

    Args:
        prefix: name of the estimator.
        turn: [V] int64 turn of each valid row.
        returns, advantages: [V] float64, one scalar a row.

    Returns:
        ``<prefix>/turn_<k>/{return,advantage}/mean`` and ``<prefix>/turn_<k>/rows`` for the first `SHOWN_TURNS` turns.
    """
    out = {}
    for k in np.unique(turn[turn < SHOWN_TURNS]):
        chosen = turn == k
        out[f"{prefix}/turn_{k}/return/mean"] = float(returns[chosen].mean())
        out[f"{prefix}/turn_{k}/advantage/mean"] = float(advantages[chosen].mean())
        out[f"{prefix}/turn_{k}/rows"] = float(chosen.sum())
    return out
