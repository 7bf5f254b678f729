# SPDX-License-Identifier: Apache-2.0
"""Metrics of a batch of turns, in verl's naming (``group/part/statistic``). Cheap: [B]-sized numpy on the driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from verl_ext.methods.rows import Advantage

SHOWN_TURNS = 10
"""Per-turn metrics are given for this many turns; later turns are in the means over all turns."""


def of_groups(name: str, result: Advantage, inputs: Mapping[str, Any]) -> dict[str, float]:
    """An estimator's metrics, where it has no others: `group_metrics`.

    Args:
        name: of the estimator.
        result: what its method returned.
        inputs: the method's arguments by name, ``response_mask`` and the columns.
    """
    return group_metrics(name, result.groups)


def of_turns(name: str, result: Advantage, inputs: Mapping[str, Any]) -> dict[str, float]:
    """`group_metrics` and `turn_metrics`."""
    advantage = row_advantages(result.advantages, inputs["response_mask"])[result.rows.kept]
    turn, turn_return = result.details["turn"], result.details["turn_return"]
    return {**group_metrics(name, result.groups), **turn_metrics(name, turn, turn_return, advantage)}


def of_levels(name: str, result: Advantage, inputs: Mapping[str, Any]) -> dict[str, float]:
    """`level_metrics`."""
    return level_metrics(name, result.details["levels"], len(result.rows.kept))


def of_baseline(name: str, result: Advantage, inputs: Mapping[str, Any]) -> dict[str, float]:
    """`group_metrics` and `baseline_metrics`."""
    tokens = (inputs["old_log_probs"], inputs["sum_pi_squared"], inputs["response_mask"])
    energy = path_energy(*tokens, inputs.get("rollout_is_weights"))[result.rows.kept]
    baseline = baseline_metrics(name, result.advantages, result.returns, tokens[2], energy, result.groups)
    return {**group_metrics(name, result.groups), **baseline}


def trajectory_metrics(columns: Mapping[str, Any], earned: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Reward and length of whole trajectories: each counts once, with the undiscounted sum of its turns' rewards.

    Args:
        columns: ``traj_uid`` [B] object, ``valid_row`` [B] bool, ``score`` [B] float64 (the turn's score, the same on
            all turns of a trajectory), ``turn_reward`` [B] float64 if known.
        earned: ``valid_row``, ``score`` and ``turn_reward`` of the rewards, if they are not those of `columns`.

    Returns:
        ``trajectory/turns/{mean,max}`` and ``trajectory/reward/{mean,std,min,max}``: sums of the turns' rewards, or the
        scores where rewards of turns are not known.
    """
    valid = np.asarray(columns["valid_row"], dtype=bool)
    if not valid.any():
        return {}
    _, member = np.unique(np.asarray(columns["traj_uid"])[valid].astype(str), return_inverse=True)
    turns = np.bincount(member)
    out = {"trajectory/turns/mean": float(turns.mean()), "trajectory/turns/max": float(turns.max())}
    earned = columns if earned is None else earned
    sample = np.asarray(earned["valid_row"], dtype=bool)
    _, member = np.unique(np.asarray(columns["traj_uid"])[sample].astype(str), return_inverse=True)
    reward = np.asarray(earned.get("turn_reward", earned["score"]), dtype=np.float64)[sample]
    rewards = np.bincount(member, weights=reward)
    if "turn_reward" not in earned:
        rewards = rewards / np.bincount(member)
    for statistic in ("mean", "std", "min", "max"):
        out[f"trajectory/reward/{statistic}"] = float(getattr(np, statistic)(rewards))
    if "is_action_valid" in columns:
        out["rollout/valid_action_share"] = float(np.asarray(columns["is_action_valid"], dtype=bool)[valid].mean())
    return out


def at_limit(columns: Mapping[str, Any], response_mask: torch.Tensor, limit: int) -> dict[str, float]:
    """``rollout/responses_at_limit``: the share of turns [B] with a token of the model in the last place there is.

    verl's ``response_length/clip_ratio`` is the share of sequences that are as long as the longest of the batch.
    """
    valid = torch.as_tensor(np.asarray(columns["valid_row"], dtype=bool))
    if not valid.any():
        return {}
    full = response_mask[:, limit - 1 : limit].bool().any(-1)
    return {"rollout/responses_at_limit": float(full[valid].double().mean())}


def row_advantages(advantages: torch.Tensor, response_mask: torch.Tensor) -> np.ndarray:
    """Mean advantage over the model tokens of each turn, [B] float64; 0 for a turn without tokens."""
    mask = response_mask.bool()
    total = torch.where(mask, advantages, 0.0).sum(-1, dtype=torch.float64)
    return (total / mask.sum(-1).clamp(min=1)).numpy()


def group_metrics(prefix: str, group: np.ndarray) -> dict[str, float]:
    """Sizes of the groups that turns are compared in, of the valid turns' group ids [V] int64:
    ``<prefix>/group_size/{mean,min,max}`` (over groups) and ``<prefix>/singleton_share`` (of turns)."""
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
    """``<prefix>/turn_<k>/{return,advantage}/mean`` and ``<prefix>/turn_<k>/count`` for the first `SHOWN_TURNS` turns;
    of the valid turns' numbers [V] int64 and their returns and advantages [V] float64."""
    out = {}
    for k in np.unique(turn[turn < SHOWN_TURNS]):
        chosen = turn == k
        out[f"{prefix}/turn_{k}/return/mean"] = float(returns[chosen].mean())
        out[f"{prefix}/turn_{k}/advantage/mean"] = float(advantages[chosen].mean())
        out[f"{prefix}/turn_{k}/count"] = float(chosen.sum())
    return out


def level_metrics(prefix: str, levels: list[np.ndarray], rows: int) -> dict[str, float]:
    """How far a hierarchy of groups can be used: share of turns with company, and a histogram of group sizes.

    Args:
        levels: group ids of the turns that have a group at level 1, 2, ...
        rows: number of valid turns of the batch.

    Returns:
        ``<prefix>/level_<k>/usable_share`` (turns in a group of at least two, of all valid turns), its
        ``group_size/mean``, and ``<prefix>/level_<k>/groups/{1,2_3,4_7,8_15,16_up}``, counts of groups by size.
    """
    out = {}
    for k, group in enumerate(levels, start=1):
        sizes = np.bincount(group)
        sizes = sizes[sizes > 0]
        name = f"{prefix}/level_{k}"
        out[f"{name}/usable_share"] = float(sizes[sizes > 1].sum()) / rows if rows else 0.0
        out[f"{name}/group_size/mean"] = float(sizes.mean()) if sizes.size else 0.0
        for low, high in ((1, 1), (2, 3), (4, 7), (8, 15), (16, None)):
            chosen = (sizes >= low) & (sizes <= high if high is not None else True)
            label = "1" if high == 1 else f"{low}_{'up' if high is None else high}"
            out[f"{name}/groups/{label}"] = float(chosen.sum())
    return out


def effective_sample_size(weights: np.ndarray) -> float:
    """Kish's effective number of samples, (sum w)^2 / sum w^2, of non-negative weights; 0 if all are 0."""
    squares = float(np.square(weights).sum())
    return float(weights.sum()) ** 2 / squares if squares > 0 else 0.0


def zero_share(largest: np.ndarray) -> float:
    """Share of turns that nothing is learned from, by their largest |A| [B]: a millionth of the batch's is rounding."""
    return float((largest <= 1e-6 * largest.max(initial=0.0)).mean()) if largest.size else 0.0


def learning_signal(
    columns: Mapping[str, Any], advantages: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """How many turns carry the update, and which agent owns how much of it.

    The gradient energy of a turn is taken as the sum over its model tokens of the squared advantage: the squared norm
    of its gradient up to the (unknown) squared norm of each token's score function. It needs no backward pass.

    Args:
        columns: turn fields; ``score`` [B] float64; ``agent_id`` [B] object if there are agents.
        advantages: [B, T] float.
        response_mask: [B, T] 0/1.

    Returns:
        ``advantage/effective_turns`` (Kish, of the turns' energies), ``advantage/zero_turn_share``, and for up to 32
        agents ``agent/<id>/{turns,score/mean,score/std,gradient_energy_share}`` beside ``rollout/score/{mean,std}``
        over all turns (the score is what Dr. MAS and GRPO normalise).
    """
    valid = np.asarray(columns["valid_row"], dtype=bool)
    if not valid.any():
        return {}
    masked = torch.where(response_mask.bool(), advantages, 0.0)
    energy = masked.square().sum(-1, dtype=torch.float64).numpy()[valid]
    out = {
        "advantage/effective_turns": effective_sample_size(energy),
        "advantage/zero_turn_share": zero_share(masked.abs().amax(-1).numpy()[valid]),
    }
    if "agent_id" in columns:
        names, member = np.unique(np.asarray(columns["agent_id"])[valid].astype(str), return_inverse=True)
        total = float(energy.sum())
        score = np.asarray(columns["score"], dtype=np.float64)[valid]
        out["rollout/score/mean"], out["rollout/score/std"] = float(score.mean()), float(score.std())
        for k, name in enumerate(names[:32]):
            own = member == k
            out[f"agent/{name}/turns"] = float(own.sum())
            out[f"agent/{name}/gradient_energy_share"] = float(energy[own].sum()) / total if total > 0 else 0.0
            out[f"agent/{name}/score/mean"] = float(score[own].mean())
            out[f"agent/{name}/score/std"] = float(score[own].std())
    return out


def path_energy(
    old_log_probs: torch.Tensor, sum_pi_squared: torch.Tensor, response_mask: torch.Tensor, weights: Any = None
) -> np.ndarray:
    """Gradient energy of each turn's whole path, sum over its tokens of (1 - 2 pi + sum pi^2) w^2, [B] float64; of
    columns [B, T], `weights` w those of importance, or None."""
    energy = 1.0 - 2.0 * old_log_probs.exp() + sum_pi_squared
    if weights is not None:
        energy = energy * weights.square()
    return torch.where(response_mask.bool(), energy, 0.0).clamp(min=0.0).sum(-1, dtype=torch.float64).numpy()


def logit_update(
    advantages: torch.Tensor, old_log_probs: torch.Tensor, sum_pi_squared: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """Length of a token's policy gradient with respect to its logits, |A| |onehot(y) - pi| (arXiv 2506.12912).

    Of columns [B, T]: ``actor/logit_update/{mean,max}`` over model tokens; nothing without any.
    """
    token = response_mask.bool()
    if not bool(token.any()):
        return {}
    energy = 1.0 - 2.0 * old_log_probs[token].double().exp() + sum_pi_squared[token].double()
    length = advantages[token].double().abs() * energy.clamp(min=0.0).sqrt()
    return {"actor/logit_update/mean": float(length.mean()), "actor/logit_update/max": float(length.max())}


def baseline_metrics(
    prefix: str,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    response_mask: torch.Tensor,
    energy: np.ndarray,
    group: np.ndarray,
) -> dict[str, float]:
    """What a token baseline takes off, and on how many samples it rests.

    Args:
        prefix: name of the estimator.
        advantages, returns: [B, T] float; the baseline is their difference.
        response_mask: [B, T] 0/1.
        energy: [V] float64, gradient energy of each valid turn's whole path.
        group: [V] int64 group of each valid turn.

    Returns:
        ``<prefix>/baseline/{mean,std}`` over model tokens, ``<prefix>/advantage_over_return_energy`` (sum of squares
        after over before; below 1 the baseline reduces the second moment) and ``<prefix>/effective_samples`` (Kish, of
        the energies in a group, mean over groups).
    """
    chosen = response_mask.bool()
    if not bool(chosen.any()):
        return {}
    after, before = advantages[chosen].double(), returns[chosen].double()
    baseline = before - after
    raw = float(before.square().sum())
    sums = np.bincount(group, weights=energy)
    squares = np.bincount(group, weights=np.square(energy))
    used = squares > 0
    return {
        f"{prefix}/baseline/mean": float(baseline.mean()),
        f"{prefix}/baseline/std": float(baseline.std(unbiased=False)),
        f"{prefix}/advantage_over_return_energy": float(after.square().sum()) / raw if raw > 0 else 0.0,
        f"{prefix}/effective_samples": float((np.square(sums[used]) / squares[used]).mean()) if used.any() else 0.0,
    }
