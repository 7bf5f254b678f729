# SPDX-License-Identifier: Apache-2.0
"""Metrics of the rejection rules: what a rule left out, of which turns, and how far sampler and trainer were apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from verl_ext.methods.rejection import Rejection

SAMPLER = ("old_log_probs", "rollout_log_probs")
"""Token columns that compare the trainer with the sampler."""

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def rule_metrics(
    prefix: str,
    found: Rejection,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    tokens: Mapping[str, torch.Tensor],
) -> dict[str, float]:
    """What a rule did, over the turns with model tokens.

    Args:
        prefix: of the names.
        found: the rule's decision on B turns.
        mask: [B, T] before it.
        advantages: [B, T].
        tokens: [B, T] log-probabilities of trainer and sampler, where the run has both.

    Returns:
        ``kept_share``, the same by quartile of the turns' lengths (``kept_share_length_q1``: the shortest) and by the
        sign of their summed advantage, quantiles of the statistic, and the gap of the turns that it keeps.
    """
    some = mask.bool().any(-1)
    if not bool(some.any()):
        return {}
    kept, length = found.kept, mask.sum(-1).double()
    out = {f"{prefix}/kept_share": share_of(kept, some)}
    bounds = torch.quantile(length[some], torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    quartile = torch.bucketize(length, bounds)
    parts = {f"length_q{number + 1}": quartile == number for number in range(4)}
    signed = torch.where(mask.bool(), advantages.double(), 0.0).sum(-1)
    parts |= {"positive": signed > 0, "negative": signed < 0}
    for name, part in parts.items():
        if bool((part & some).any()):
            out[f"{prefix}/kept_share_{name}"] = share_of(kept, part & some)
    for name, values in statistics(found, mask).items():
        points = np.quantile(values.numpy(), QUANTILES).tolist()
        out |= {f"{prefix}/{name}/p{round(100 * q)}": point for q, point in zip(QUANTILES, points, strict=True)}
    if len(tokens) == len(SAMPLER):
        out[f"{prefix}/log_ppl_gap/kept"] = log_ppl_gap(found.response_mask, tokens)
    return out


def statistics(found: Rejection, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a rule compared with its bounds, of turns with model tokens or of the tokens, by the name of its metric."""
    value, some = found.statistic, mask.bool().any(-1)
    if value.ndim == 1:
        return {"statistic": value[some]}
    if value.shape == mask.shape:
        return {"statistic": value[mask.bool()]}
    return {"statistic_max": value[some, 0], "statistic_mean": value[some, 1]}


def log_ppl_gap(mask: torch.Tensor, tokens: Mapping[str, torch.Tensor]) -> float:
    """Mean over the turns of the log-perplexity of the trainer less that of the sampler, in nats; 0 without turns."""
    token = mask.bool()
    some = token.any(-1)
    ratio = torch.where(token, (tokens["old_log_probs"] - tokens["rollout_log_probs"]).double(), 0.0)
    gap = -ratio.sum(-1)[some] / token.sum(-1)[some]
    return float(gap.mean()) if len(gap) else 0.0


def share_of(kept: torch.Tensor, of: torch.Tensor) -> float:
    """Share of the turns `of` [B] that are `kept` [B]; 0 of none."""
    return float((kept & of).sum()) / max(int(of.sum()), 1)
