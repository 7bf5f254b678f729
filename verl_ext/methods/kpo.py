# SPDX-License-Identifier: Apache-2.0
"""KPO: a causal Kalman filter of the token log ratio inside the policy loss (arXiv 2602.10609).

    z_t = sg[log pi(y_t) - log pi_old(y_t)] m_t               observation
    q = Q/R,  K_0 = 0,  K_t = (K_{t-1} + q) / (K_{t-1} + q + 1)
    x_0 = 0,  x_t = (1 - K_t) x_{t-1} + K_t z_t               filtered log ratio
    rho_t = exp(min(log pi - sg[log pi] + x_t, 10))           value e^{x_t}, gradient through the current token only
    L_t = max(-A rho_t, -A clip(rho_t, 1 - eps_low, 1 + eps_high))   or   -A rho_t

The gains depend on t and q alone. The recurrence of K is a fraction of linear functions with the fixed points f > 0 and
-q/f, so that K_t = f (1 - d^t) / (1 + d^t f^2 / q) with d = (1 - f)^2. The recurrence of x is linear: with p_t the
product of (1 - K) since the start of a chunk, x_t = p_t (x_start + sum over the chunk of K_j z_j / p_j), a cumulative
sum. A chunk ends before p falls below e^-20, so nothing over- or underflows, and nothing is approximated, whatever the
length and q.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import numpy as np
import torch

from verl_ext.methods.options import NotNegative, OptionError, Positive, checked
from verl_ext.methods.rows import check_token_field, on_model_tokens

#: A chunk of the filter ends before its product of (1 - K) falls below e^-20.
CHUNK_DECAY = 20.0
MaskMode = Literal["zero_observation", "skip"]


def steady_state_gain(q: float) -> float:
    """K for t to infinity, (-q + sqrt(q^2 + 4 q)) / 2, about sqrt(q) for small q = Q/R > 0."""
    if not (q > 0 and math.isfinite(q)):
        raise ValueError(f"q = Q/R = {q!r} must be a positive number")
    return 2.0 * q / (q + math.sqrt(q * q + 4.0 * q))  # the same number without cancellation


def time_constant(q: float) -> float:
    """Tokens after which the filter has followed a change to 1 - 1/e, 1/sqrt(q) for small q: -1 / log(1 - K)."""
    return -1.0 / math.log1p(-steady_state_gain(q))


def kalman_gains(length: int, q: float) -> np.ndarray:
    """Gains K_1..K_length of the ratio q = Q/R > 0 in closed form, [length] float64."""
    f = steady_state_gain(q)
    exponent = 2.0 * np.arange(1, length + 1) * math.log1p(-f)
    return f * -np.expm1(exponent) / (1.0 + np.exp(exponent) * (f * f / q))


def _filter(z: torch.Tensor, q: float) -> torch.Tensor:
    """x of the observations z, [R, T]."""
    rows, length = z.shape
    chunk = min(max(1, int(CHUNK_DECAY * time_constant(q))), max(1, length))
    chunks = -(-length // chunk)
    K = kalman_gains(chunks * chunk, q).reshape(chunks, chunk)
    p = np.exp(np.cumsum(np.log1p(-K), axis=1))
    decay, weight = (torch.from_numpy(table).to(z) for table in (p, K / p))
    x = torch.nn.functional.pad(z, (0, chunks * chunk - length)).view(rows, chunks, chunk)
    x = (x * weight).cumsum(-1) * decay  # as if every chunk started at 0
    end = x[:, :, -1].to(torch.float64, copy=True)
    for c in range(1, chunks):
        end[:, c] += float(p[c, -1]) * end[:, c - 1]
    x[:, 1:] += end[:, :-1, None].to(z.dtype) * decay[1:]
    return x.flatten(1)[:, :length]


def _filter_skipping(z: torch.Tensor, mask: torch.Tensor, q: float) -> torch.Tensor:
    """Filter over the model tokens alone, [R, T]; columns in between hold the last value (0 before the first)."""
    count = mask.long().cumsum(-1)
    packed = z.new_zeros(z.shape[0], z.shape[1] + 1).scatter_add_(1, count, z)  # z is 0 at masked columns
    packed[:, 1:] = _filter(packed[:, 1:], q)
    return packed.gather(1, count)


def kalman_filter(
    z: torch.Tensor, q: float, mask: torch.Tensor | None = None, mask_mode: MaskMode = "zero_observation"
) -> torch.Tensor:
    """Causal Kalman estimate x of the observations z, exact for every length.

    Args:
        z: [B, T] observations, float32 or float64 (half precision is read as float32).
        q: ratio Q/R, > 0.
        mask: [B, T] of 0 and 1, or None for all ones. What z holds at masked columns plays no part.
        mask_mode: "zero_observation" (released): a masked column is an observation of 0 and the filter advances.
            "skip": state and gain advance on model tokens only; masked columns repeat the last state.

    Returns:
        x: [B, T] in the dtype of the computation, without gradient.

    Source: arXiv 2602.10609; shuohe1995/verl-kpo, verl/trainer/ppo/core_algos.py, without its floor on the gains.
    """
    if mask_mode not in get_args(MaskMode):
        raise OptionError(f"mask_mode={mask_mode!r} is not one of {', '.join(get_args(MaskMode))}")
    steady_state_gain(q)
    if z.ndim != 2:
        raise ValueError(f"z must be [B, T], got shape {tuple(z.shape)}")
    z = z.detach().to(torch.promote_types(z.dtype, torch.float32))
    mask = torch.ones_like(z, dtype=torch.bool) if mask is None else check_token_field("mask", mask, z).bool()
    z = torch.where(mask, z, 0.0)
    return _filter_skipping(z, mask, q) if mask_mode == "skip" else _filter(z, q)


@checked
def kpo_loss_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    q: Positive = 1e-6,
    r: Positive = 1.0,
    is_clip: bool = True,
    clip_ratio_low: NotNegative = 3e-4,
    clip_ratio_high: NotNegative = 4e-4,
    max_log_ratio: Positive = 10.0,
    mask_mode: MaskMode = "zero_observation",
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Token losses of KPO, before aggregation.

    The gradient with respect to log_prob is -A rho_t (times the rollout weight) where the token is neither clipped nor
    beyond max_log_ratio, and 0 elsewhere. There is no dual clip. Masked columns give loss 0 whatever they hold.

    Args:
        old_log_prob: [B, T] log-probabilities under the policy at batch start.
        log_prob: [B, T] log-probabilities under the current policy, with gradient.
        advantages: [B, T].
        response_mask: [B, T] of 0 and 1.
        q: process noise Q; 1e-6 published. The filter's time constant is sqrt(R/Q) tokens: 1000 at 1e-6.
        r: observation noise R; 1.0 published.
        is_clip: clip the filtered ratio.
        clip_ratio_low: lower clip range; 3e-4 published.
        clip_ratio_high: upper clip range; 4e-4 published.
        max_log_ratio: clamp of the filtered log ratio; 10 released.
        mask_mode: "zero_observation" (released) or "skip", see `kalman_filter`.
        rollout_is_weights: [B, T] detached importance weights, or None.

    Returns:
        loss_mat: [B, T] float32 (float64 for float64 inputs), to be aggregated over response_mask.
        stats: over model tokens, 0-dim float64 tensors: (filtered_)log_ratio_{mean,std,abs_max}, clip_fraction (and
            _low at A < 0, _high at A > 0), max_log_ratio_fraction, mean_response_length (tokens, of rows with tokens);
            and the floats steady_state_gain and time_constant (tokens).

    Source: arXiv 2602.10609; shuohe1995/verl-kpo, verl/trainer/ppo/core_algos.py, evaluated exactly.
    """
    if log_prob.ndim != 2:
        raise ValueError(f"log_prob must be [B, T], got shape {tuple(log_prob.shape)}")
    fields = {"old_log_prob": old_log_prob, "log_prob": log_prob, "advantages": advantages}
    if rollout_is_weights is not None:
        fields["rollout_is_weights"] = rollout_is_weights
    for name, field in fields.items():
        check_token_field(name, field, response_mask)
    ratio = q / r
    dtype = torch.promote_types(torch.promote_types(log_prob.dtype, old_log_prob.dtype), torch.float32)
    mask = response_mask.bool()

    def finite(name: str, field: torch.Tensor) -> torch.Tensor:
        return on_model_tokens(name, field.to(dtype), mask, "row {} of the micro-batch".format)

    log_pi = finite("log_prob", log_prob)
    z = (log_pi - finite("old_log_prob", old_log_prob)).detach()
    x = kalman_filter(z, ratio, mask, mask_mode=mask_mode)
    rho = torch.exp((log_pi - log_pi.detach() + x).clamp(max=max_log_ratio))
    advantage = finite("advantages", advantages.detach())
    if rollout_is_weights is not None:
        advantage = advantage * finite("rollout_is_weights", rollout_is_weights.detach())
    loss = unclipped = -advantage * rho
    if is_clip:
        loss = torch.maximum(unclipped, -advantage * rho.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high))

    clipped, count = loss > unclipped, mask.sum(dtype=torch.float64)
    tokens = count.clamp(min=1)
    stats = {
        **_spread("log_ratio", z, mask),
        **_spread("filtered_log_ratio", x, mask),
        "clip_fraction": clipped.sum() / tokens,
        "clip_fraction_low": (clipped & (advantage < 0)).sum() / tokens,
        "clip_fraction_high": (clipped & (advantage > 0)).sum() / tokens,
        "max_log_ratio_fraction": (mask & (x > max_log_ratio)).sum() / tokens,
        "mean_response_length": count / mask.any(-1).sum().clamp(min=1),
    }
    return loss, {**stats, "steady_state_gain": steady_state_gain(ratio), "time_constant": time_constant(ratio)}


def _spread(name: str, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean, standard deviation and largest magnitude over the model tokens, in float64; 0 where there are none."""
    tokens = mask.sum().clamp(min=1)
    x = torch.where(mask, x.double(), 0.0)
    mean = x.sum() / tokens
    variance = torch.where(mask, (x - mean) ** 2, 0.0).sum() / tokens
    largest = x.abs().amax() if x.numel() else mean
    return {f"{name}_mean": mean, f"{name}_std": variance.sqrt(), f"{name}_abs_max": largest}
