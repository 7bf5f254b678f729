# SPDX-License-Identifier: Apache-2.0
"""KPO: a causal Kalman filter of the token log ratio inside the policy loss (arXiv 2602.10609).

    z_t = sg[log pi(y_t) - log pi_old(y_t)] m_t               observation
    q = Q/R,  K_0 = 0,  K_t = (K_{t-1} + q) / (K_{t-1} + q + 1)
    x_0 = 0,  x_t = (1 - K_t) x_{t-1} + K_t z_t               filtered log ratio
    rho_t = exp(min(log pi - sg[log pi] + x_t, 10))           value e^{x_t}, gradient through the current token only
    L_t = max(-A rho_t, -A clip(rho_t, 1 - eps_low, 1 + eps_high))   or   -A rho_t

The gains depend on t and q alone, so the filter is a linear recurrence with known coefficients. With p_t the product of
(1 - K) since the start of a chunk, x_t = p_t (x_start + sum over the chunk of K_j z_j / p_j): a cumulative sum. A chunk
ends before p falls below e^-20, so nothing over- or underflows, and the chunk ends are joined by doubling, in log2 of
their number steps. Nothing is approximated, whatever the length and q.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch

from verl_ext.methods.rows import check_choice, check_range, check_token_field

MASK_MODES = ("zero_observation", "skip")

#: A chunk of the filter ends before its product of (1 - K) falls below e^-20.
CHUNK_DECAY = 20.0
#: Elements of a block of rows in the loss, so that its temporaries stay in the cache.
BLOCK_ELEMENTS = 1 << 18


def steady_state_gain(q: float) -> float:
    """K for t to infinity, (-q + sqrt(q^2 + 4 q)) / 2, about sqrt(q) for small q.

    Args:
        q: ratio Q/R of process to observation noise, > 0.
    """
    _check_q(q)
    return 2.0 * q / (q + math.sqrt(q * q + 4.0 * q))  # the same number without cancellation


def time_constant(q: float) -> float:
    """Tokens after which the filter has followed a change to 1 - 1/e, 1/sqrt(q) for small q: -1 / log(1 - K)."""
    return -1.0 / math.log1p(-steady_state_gain(q))


def _check_q(q: float) -> None:
    if not (q > 0 and math.isfinite(q)):
        raise ValueError(f"q = Q/R = {q!r} must be a positive number")


@functools.lru_cache(maxsize=16)
def _gains(q: float, capacity: int) -> np.ndarray:
    gains = np.empty(capacity)
    gain = 0.0
    for t in range(capacity):
        following = (gain + q) / (gain + q + 1.0)
        if following == gain:  # the recurrence has reached its fixed point
            gains[t:] = gain
            break
        gains[t] = gain = following
    gains.setflags(write=False)
    return gains


def kalman_gains(length: int, q: float) -> np.ndarray:
    """Gains K_1..K_length by the recurrence in float64, cached.

    Args:
        length: number of columns T.
        q: ratio Q/R, > 0.

    Returns:
        [length] float64, read-only.
    """
    _check_q(q)
    check_range("length", length, 0)
    capacity = 1024
    while capacity < length:
        capacity *= 2
    return _gains(float(q), capacity)[:length]


class _Tables:
    """Chunk size and the two factors of every column for one (T, q, dtype, device).

    Attributes:
        chunk: columns of a chunk.
        decay: [T] p_t, product of (1 - K) since the start of the chunk.
        weight: [T] K_t / p_t.
        ends: [n] float64 decay over each full chunk.
    """

    def __init__(self, length: int, q: float, dtype: torch.dtype, device: torch.device):
        gains = kalman_gains(length, q)
        self.chunk = max(1, int(CHUNK_DECAY / -math.log1p(-steady_state_gain(q))))
        chunks = np.zeros((-(-length // self.chunk), self.chunk))
        chunks.reshape(-1)[:length] = np.log1p(-gains)
        decay = np.exp(np.cumsum(chunks, axis=1)).reshape(-1)[:length]
        self.decay = torch.from_numpy(decay).to(device=device, dtype=dtype)
        self.weight = torch.from_numpy(gains / decay).to(device=device, dtype=dtype)
        full = length // self.chunk
        self.ends = torch.from_numpy(decay[self.chunk - 1 : full * self.chunk : self.chunk].copy()).to(device)


@functools.lru_cache(maxsize=16)
def _tables(length: int, q: float, dtype: torch.dtype, device: torch.device) -> _Tables:
    return _Tables(length, q, dtype, device)


def _recur(carry: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """s_c = carry_c s_{c-1} + values_c along the last dimension, [R, n] float64, by doubling."""
    total, carry = values.clone(), carry.clone()
    distance = 1
    while distance < total.shape[-1]:
        shifted = total[:, :-distance].clone()
        total[:, distance:] += carry[distance:] * shifted
        carry[distance:] *= carry[:-distance].clone()
        carry[:distance] = 0.0
        distance *= 2
    return total


def _filter_(z: torch.Tensor, q: float) -> torch.Tensor:
    """Replace the observations z [R, T] by the filtered x, in place."""
    length = z.shape[-1]
    tables = _tables(length, float(q), z.dtype, z.device)
    z.mul_(tables.weight)
    full = length // tables.chunk
    if length <= tables.chunk:
        z.copy_(z.cumsum(-1)) if not z.is_contiguous() else torch.cumsum(z, -1, out=z)
        return z.mul_(tables.decay)
    cut = full * tables.chunk
    head = z[:, :cut].unflatten(-1, (full, tables.chunk))
    head.copy_(head.cumsum(-1)).mul_(tables.decay[:cut].view(full, tables.chunk))
    state = _recur(tables.ends, head[:, :, -1].double())
    shift = state.to(z.dtype)
    head[:, 1:].addcmul_(shift[:, :-1].unsqueeze(-1), tables.decay[tables.chunk : cut].view(full - 1, tables.chunk))
    if cut < length:
        tail = z[:, cut:]
        tail.copy_(tail.cumsum(-1)).add_(shift[:, -1:]).mul_(tables.decay[cut:])
    return z


def _filter_skipping(z: torch.Tensor, alive: torch.Tensor, q: float) -> torch.Tensor:
    """Filter over the model tokens alone, [R, T]; columns in between hold the last value (0 before the first)."""
    count = alive.cumsum(-1).long()
    packed = z.new_zeros(z.shape[0], z.shape[1] + 1)
    packed.scatter_(1, count * alive.long(), z)  # masked columns go to column 0
    packed[:, 0] = 0.0
    _filter_(packed[:, 1:], q)
    return packed.gather(1, count)


def kalman_filter(
    z: torch.Tensor, q: float, mask: torch.Tensor | None = None, mask_mode: str = "zero_observation"
) -> torch.Tensor:
    """Causal Kalman estimate x of the observations z, exact for every length.

    Args:
        z: [B, T] observations, float32 or float64 (half precision is read as float32).
        q: ratio Q/R, > 0.
        mask: [B, T] of 0 and 1, or None for all ones. What z holds at masked columns plays no part.
        mask_mode: "zero_observation" (released): a masked column is an observation of 0 and the filter advances.
            "skip": state and gain advance on model tokens only; masked columns repeat the last state.

    Returns:
        x: [B, T] in the dtype of the computation. The gradient does not flow.

    Raises:
        ValueError: q or mask_mode is out of range, or the shapes differ.

    Source: arXiv 2602.10609; shuohe1995/verl-kpo, verl/trainer/ppo/core_algos.py, without its floor on the gains.
    """
    check_choice("mask_mode", mask_mode, MASK_MODES)
    _check_q(q)
    if z.ndim != 2:
        raise ValueError(f"z must be [B, T], got shape {tuple(z.shape)}")
    dtype = torch.float64 if z.dtype == torch.float64 else torch.float32
    x = z.detach().to(dtype, copy=True).contiguous()
    if mask is not None:
        mask = check_token_field("mask", mask, z).to(torch.bool)
        x = torch.where(mask, x, 0.0)
        if mask_mode == "skip":
            return _filter_skipping(x, mask.to(dtype), q)
    return _filter_(x, q) if x.numel() else x


class _Loss(torch.autograd.Function):
    """The loss matrix with the gradient -A rho (0 where clipped) written down instead of traced."""

    @staticmethod
    def forward(ctx: Any, log_prob: torch.Tensor, terms: _Terms) -> torch.Tensor:
        loss, slope = terms.compute(log_prob.detach(), log_prob.requires_grad)
        ctx.dtype = log_prob.dtype
        if slope is not None:
            ctx.save_for_backward(slope)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slope,) = ctx.saved_tensors
        return (grad_outputs[0] * slope).to(ctx.dtype), None


class _Terms:
    """Inputs and options of the loss, and its sums over model tokens."""

    def __init__(
        self,
        old_log_prob: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        weights: torch.Tensor | None,
        ratio: float,
        bounds: tuple[float, float] | None,
        max_log_ratio: float,
        mask_mode: str,
    ):
        self.old_log_prob, self.advantages, self.mask, self.weights = old_log_prob, advantages, mask, weights
        self.ratio, self.bounds, self.max_log_ratio, self.mask_mode = ratio, bounds, max_log_ratio, mask_mode
        self.sums = torch.zeros(9, dtype=torch.float64)
        self.peaks = torch.zeros(2, dtype=torch.float64)

    def compute(self, log_prob: torch.Tensor, want_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = torch.promote_types(torch.promote_types(log_prob.dtype, self.old_log_prob.dtype), torch.float32)
        device = log_prob.device
        batch, length = log_prob.shape
        loss = torch.empty(batch, length, dtype=dtype, device=device)
        slope = torch.empty_like(loss) if want_slope else None
        on_cpu = device.type == "cpu"
        step = max(1, BLOCK_ELEMENTS // max(1, length)) if on_cpu else max(1, batch)
        sums, peaks = [], []
        for start in range(0, batch, step) if length else ():
            at = slice(start, start + step)
            target = (loss[at], None if slope is None else slope[at])
            # Multiplying by the mask is many times faster on a CPU; selection is needed when padding holds NaN.
            block = self._block(log_prob[at], at, dtype, *target, select=not on_cpu)
            if on_cpu and not bool(torch.isfinite(block[0].sum())):
                block = self._block(log_prob[at], at, dtype, *target, select=True)
            sums.append(block[0])
            peaks.append(block[1])
        if sums:
            self.sums, self.peaks = torch.stack(sums).sum(0), torch.stack(peaks).amax(0)
        return loss, slope

    def _block(
        self,
        log_prob: torch.Tensor,
        at: slice,
        dtype: torch.dtype,
        loss: torch.Tensor,
        slope: torch.Tensor | None,
        select: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        alive = self.mask[at].to(dtype)

        def masked(tensor: torch.Tensor) -> torch.Tensor:
            return torch.where(self.mask[at] != 0, tensor, 0.0) if select else tensor.mul_(alive)

        z = masked(torch.sub(log_prob, self.old_log_prob[at]).to(dtype))
        raw = (z.sum(), _square_sum(z), z.abs().amax())
        if self.mask_mode == "skip" and bool((alive[:, 1:] > alive[:, :-1]).any()):
            x = _filter_skipping(z, alive, self.ratio)
        else:
            x = _filter_(z, self.ratio)
        x.mul_(alive)
        filtered = (x.sum(), _square_sum(x), x.abs().amax())

        # While x stays below its clamp, and that is nearly always, no token has to be looked up for it.
        beyond = (x > self.max_log_ratio).to(dtype) if bool(filtered[2] > self.max_log_ratio) else None
        rho = torch.exp_(x if beyond is None else x.clamp_(max=self.max_log_ratio))
        negative = masked(torch.neg(self.advantages[at]).to(dtype))
        if self.weights is not None:
            negative = masked(negative.mul_(self.weights[at]))
        plain = torch.mul(negative, rho, out=None if slope is None else slope)
        clipped = signed = torch.zeros((), dtype=dtype, device=alive.device)
        if self.bounds is None:
            loss.copy_(plain)
        else:
            bounded = rho.clamp_(*self.bounds).mul_(negative)
            torch.maximum(plain, bounded, out=loss)
            outside = (bounded > plain).to(dtype)
            clipped, signed = outside.sum(), (outside * torch.sign(negative)).sum()
            if slope is not None:
                slope.mul_(1.0 - outside)
        if slope is not None and beyond is not None:
            slope.mul_(1.0 - beyond)
        length = alive.sum(-1)
        sums = (
            *(length.sum(), (length > 0).sum(), *raw[:2], *filtered[:2], clipped, signed),
            *(beyond.sum() if beyond is not None else torch.zeros_like(clipped),),
        )
        total = torch.stack([value.to(torch.float64) for value in sums])
        # NaN at a masked column also shows in the loss through the advantage or the weight.
        total[0] += 0.0 * loss.sum().to(torch.float64)
        return total, torch.stack([raw[2], filtered[2]]).to(torch.float64)

    def stats(self) -> dict[str, Any]:
        tokens, rows, raw, raw_square, x, x_square, clipped, signed, beyond = self.sums
        tokens = tokens.clamp(min=1.0)

        def spread(total: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
            return (square / tokens - (total / tokens) ** 2).clamp(min=0.0).sqrt()

        return {
            "log_ratio_mean": raw / tokens,
            "log_ratio_std": spread(raw, raw_square),
            "log_ratio_abs_max": self.peaks[0],
            "filtered_log_ratio_mean": x / tokens,
            "filtered_log_ratio_std": spread(x, x_square),
            "filtered_log_ratio_abs_max": self.peaks[1],
            "clip_fraction": clipped / tokens,
            "clip_fraction_low": (clipped + signed) / (2.0 * tokens),
            "clip_fraction_high": (clipped - signed) / (2.0 * tokens),
            "max_log_ratio_fraction": beyond / tokens,
            "mean_response_length": self.sums[0] / rows.clamp(min=1.0),
            "steady_state_gain": steady_state_gain(self.ratio),
            "time_constant": time_constant(self.ratio),
        }


def _square_sum(x: torch.Tensor) -> torch.Tensor:
    return torch.dot(x.reshape(-1), x.reshape(-1))


def kpo_loss_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    q: float = 1e-6,
    r: float = 1.0,
    is_clip: bool = True,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
    max_log_ratio: float = 10.0,
    mask_mode: str = "zero_observation",
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Token losses of KPO, before aggregation.

    The gradient with respect to log_prob is -A rho_t (times the rollout weight) where the token is neither clipped nor
    beyond max_log_ratio, and 0 elsewhere; it never flows through the filter. There is no dual clip. Masked columns give
    loss 0 and gradient 0 whatever they hold; NaN on a model token stays visible in the loss.

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
        stats: over model tokens, 0-dim float64 tensors: log_ratio_{mean,std,abs_max},
            filtered_log_ratio_{mean,std,abs_max}, clip_fraction (and _low, _high: rho below 1 - clip_ratio_low at
            A < 0, above 1 + clip_ratio_high at A > 0), max_log_ratio_fraction, mean_response_length (tokens, rows
            without tokens left out); and the floats steady_state_gain and time_constant (tokens).

    Raises:
        ValueError: an option is out of range or the shapes differ.

    Source: arXiv 2602.10609; shuohe1995/verl-kpo, verl/trainer/ppo/core_algos.py, evaluated exactly.
    """
    check_choice("mask_mode", mask_mode, MASK_MODES)
    for name, value in (("q", q), ("r", r), ("max_log_ratio", max_log_ratio)):
        if not value > 0:
            raise ValueError(f"{name}={value!r} must be positive")
    check_range("clip_ratio_low", clip_ratio_low, 0.0)
    check_range("clip_ratio_high", clip_ratio_high, 0.0)
    if log_prob.ndim != 2:
        raise ValueError(f"log_prob must be [B, T], got shape {tuple(log_prob.shape)}")
    for name, field in (("old_log_prob", old_log_prob), ("advantages", advantages), ("response_mask", response_mask)):
        if field.shape != log_prob.shape:
            raise ValueError(f"{name} has shape {tuple(field.shape)}, log_prob has shape {tuple(log_prob.shape)}")
    if rollout_is_weights is not None:
        check_token_field("rollout_is_weights", rollout_is_weights, response_mask)
    terms = _Terms(
        old_log_prob.detach(),
        advantages.detach(),
        response_mask.detach(),
        None if rollout_is_weights is None else rollout_is_weights.detach(),
        float(q) / float(r),
        (1.0 - clip_ratio_low, 1.0 + clip_ratio_high) if is_clip else None,
        float(max_log_ratio),
        mask_mode,
    )
    loss: torch.Tensor = _Loss.apply(log_prob, terms)
    return loss, terms.stats()
