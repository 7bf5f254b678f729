# SPDX-License-Identifier: Apache-2.0
"""OTB: the optimal token baseline (arXiv 2602.07078).

    w_t = 1 - 2 pi_old(y_t) + sum_v pi_old(v)^2              = |onehot(y_t) - pi_old|^2, times rollout weight^2 if given
    W_t = sum over j <= t of w_j m_j                         gradient energy of the prefix
    G_t = sum over j >= t of r_j m_j                         reward-to-go, no discount
    B_t = sum_i G_t^i W_t^i / (sum_i W_t^i + epsilon)        over the samples of the prompt that have a model token at t
    A_t = (G_t - B_t) m_t

Statistics are float64: w_t of a confident token is a difference of numbers near 1, which float32 rounds to about 1e-7,
more than epsilon.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from verl_ext.methods.groups import Column
from verl_ext.methods.options import GroupBy, NotNegative, checked
from verl_ext.methods.rows import Advantage, Rows, check_token_field, check_tokens, on_model_tokens

#: Elements that are worked on at once: memory beyond the outputs is some ten float64 tensors of this size.
BLOCK_ELEMENTS = 1 << 16


@checked
def otb_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Column,
    *,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    valid_row: Column | None = None,
    row_fields: Mapping[str, Column] | None = None,
    alignment: Literal["model_tokens", "column"] = "model_tokens",
    baseline: Literal["self_inclusive", "leave_one_out"] = "self_inclusive",
    handle_zero_tail: bool = True,
    epsilon: NotNegative = 1e-8,
    group_by: GroupBy = ("index",),
) -> Advantage:
    """Token advantages against a baseline a position, weighted by the gradient energy of each sample's prefix.

    Rejected turns (all-zero mask) leave the sums, and a sample that nothing can be compared with keeps A = G. Identical
    rewards leave A = G epsilon / (W + epsilon): rounding size, as nothing divides by a spread here.

    Args (tensors, columns and errors are those of every method: `verl_ext.methods`):
        token_level_rewards: those of model tokens count.
        old_log_probs: [B, T] log-probability of the sampled token under the policy at batch start.
        sum_pi_squared: [B, T] sum over the vocabulary of the squared probabilities, from float32 logits.
        rollout_is_weights: [B, T] detached importance weights; w_t is multiplied by their square inside the sum.
        alignment: "model_tokens": position t is the t-th model token of a turn, so tool tokens do not shift the
            comparison. "column": position t is the column, the numbers of verl's optimal_token_baseline.
        baseline: "self_inclusive" (released, biased for few samples) or "leave_one_out" (unbiased; no released code):
            the sums of B without the sample itself, 0 where no other sample is alive.
        handle_zero_tail: B = 0 where fewer than two samples are alive (otherwise A = 0 on the tail of the longest).
        epsilon: added to the sum of weights, at least 0; 1e-8 released.

    Returns:
        A and G.

    Source: arXiv 2602.07078; verl 0.9.1, verl/trainer/ppo/core_algos.py, (tir_)optimal_token_baseline.
    """
    batch, length = check_tokens(token_level_rewards, response_mask), response_mask.shape[1]
    fields = {"old_log_probs": old_log_probs, "sum_pi_squared": sum_pi_squared}
    if rollout_is_weights is not None:
        fields["rollout_is_weights"] = rollout_is_weights
    for name, field in fields.items():
        check_token_field(name, field, response_mask)
    rows = Rows(batch, valid_row=valid_row, row_fields=row_fields, index=index)
    groups = rows.keys(group_by)

    advantages, returns = torch.zeros(2, batch, length, device=response_mask.device)
    for members in _blocks(groups, length):
        at = torch.from_numpy(rows.kept[members]).to(response_mask.device)
        m = response_mask[at].double()
        r, log_pi, pi_squared, *rho = (
            on_model_tokens(name, field.detach()[at].double(), m.bool(), lambda g, i, of=members: rows.where(of[g, i]))
            for name, field in {"token_level_rewards": token_level_rewards, **fields}.items()
        )
        w = (1 - 2 * log_pi.exp() + pi_squared).clamp(min=0)  # below 0 by rounding, and where m is 0
        if rho:
            w = w * rho[0] ** 2
        W = w.cumsum(-1) * m
        G = r.flip(-1).cumsum(-1).flip(-1) * m
        B = _baseline(G, W, m, alignment, baseline, handle_zero_tail, epsilon)
        advantages[at], returns[at] = A, G = ((G - B) * m).float(), G.float()
        if not torch.isfinite(A.sum(dtype=torch.float64) + G.sum(dtype=torch.float64)):
            raise ValueError("the optimal token baseline overflows: rewards or importance weights are too large")
    return Advantage(advantages, returns, rows, groups)


def _baseline(
    G: Tensor, W: Tensor, m: Tensor, alignment: str, baseline: str, handle_zero_tail: bool, epsilon: float
) -> Tensor:
    """B at every column; all tensors are [g, n, T] float64: g groups of n samples."""
    samples, columns = G.shape[1:]
    position = torch.arange(columns, device=G.device).expand(G.shape)
    GW = G * W
    if alignment == "model_tokens":
        position = (m.cumsum(-1) - 1).clamp(min=0).long()  # a tool token shares its place and adds G = W = 0
        W, GW = (torch.zeros_like(x).scatter_add_(-1, position, x) for x in (W, GW))

    GW, W = (x.sum(1, keepdim=True) if baseline == "self_inclusive" else _sum_of_others(x) for x in (GW, W))
    B = torch.where(W + epsilon > 0, GW / (W + epsilon), 0.0).expand_as(G).gather(-1, position)
    if baseline == "leave_one_out":
        return B
    # Fewer than two samples are alive from the length of the second longest on. As in verl that is a number of model
    # tokens in the column alignment too, and turns without tokens count as samples there.
    length = m.sum(-1, keepdim=True)
    second = length.sort(1).values[:, -2:-1] if samples > 1 else torch.zeros_like(length)
    if not handle_zero_tail:  # then only a sample that is alone has no baseline
        second = torch.where((second == 0) & (samples == 1 or alignment == "model_tokens"), second, columns)
    return B.masked_fill_(position >= torch.where(length > second, second, columns), 0.0)


def _sum_of_others(x: Tensor) -> Tensor:
    """Sum over the other samples, [g, n, T]; a sample's own value taken off the total would drown small ones."""
    before, after = torch.zeros_like(x), torch.zeros_like(x)
    torch.cumsum(x[:, :-1], 1, out=before[:, 1:])
    after[:, :-1] = x[:, 1:].flip(1).cumsum(1).flip(1)
    return before + after


def _blocks(groups: np.ndarray, length: int) -> Iterator[np.ndarray]:
    """[g, n] positions of samples: g groups of one size n at a time, of BLOCK_ELEMENTS in all or a single group."""
    order, size = np.argsort(groups, kind="stable"), np.bincount(groups)
    start = np.cumsum(size) - size
    for n in np.unique(size):
        members = order[start[size == n, None] + np.arange(n)]
        step = max(1, BLOCK_ELEMENTS // max(1, n * length))
        yield from (members[first : first + step] for first in range(0, len(members), step))
