# SPDX-License-Identifier: Apache-2.0
"""One pass over the logits: everything that training reads from the vocabulary, with a backward written by hand.

Log-probability of the label, entropy, sum of squared probabilities, and mass, size and membership of the safe set of
Dynamic Vocabulary Pruning (arXiv 2512.23087) come from one pass over [N, V] logits, in blocks that stay in the cache.
Forward reads the logits from memory once and keeps a few numbers a row; backward computes the probabilities again and
writes the gradient, in the dtype of the logits, which is the only [N, V] tensor that is ever allocated.

Notation, for one row of logits x and temperature T: z = x / T, m = max z, V_S = {a : z_a >= m + ln rho} (the whole
vocabulary without rho), e_a = exp(z_a - m), S = sum of e over V_S, pi(a) = e_a / S on V_S and 0 elsewhere, and

    log pi(y) = z_y - m - ln S        H = ln S - sum_{V_S} e_a (z_a - m) / S        sum pi^2 = sum_{V_S} e_a^2 / S^2
    kept mass = S / sum over the whole vocabulary of e

The set is a constant for the gradient:

    d log pi(y) / d x_b = (1[b = y] - pi(b)) / T        dH / d x_b = -pi(b) (log pi(b) + H) / T        0 off V_S

Sums over the vocabulary are of float32 terms; what is done once a row is in float64.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from types import ModuleType
from typing import Any, NamedTuple

import torch

from verl_ext.methods.logits import logits_torch
from verl_ext.methods.logits.logits_sums import Weights
from verl_ext.methods.logits.logits_torch import bound, compute_dtype

__all__ = ["OUT_OF_SET_FLOOR", "TokenStatistics", "token_statistics"]

#: Log-probability of a label outside the safe set is not below this, so that masked arithmetic on it stays finite.
OUT_OF_SET_FLOOR = -1e4

BACKENDS = ("auto", "torch", "triton")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class TokenStatistics(NamedTuple):
    """What :func:`token_statistics` returns; all of the policy restricted to the safe set and renormalised.

    Every tensor has the shape of the labels, or [number selected] with `select`. Float results are float32, float64
    for float64 logits.
    """

    log_probs: torch.Tensor  #: log pi(label), differentiable
    entropy: torch.Tensor | None = None  #: in nats, differentiable; None unless asked for
    sum_pi_squared: torch.Tensor | None = None  #: in (0, 1], no gradient; None unless asked for
    kept_mass: torch.Tensor | None = None  #: mass of the set under the unpruned policy, no gradient; None without rho
    set_size: torch.Tensor | None = None  #: int64, number of tokens in the set; None without rho
    in_set: torch.Tensor | None = None  #: bool, the label is in the set; None without rho


def token_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    rho: float = 0.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    select: torch.Tensor | None = None,
    backend: str = "auto",
) -> TokenStatistics:
    """Statistics of the next-token distribution at every position, in one pass over the logits.

    A label outside the safe set (``in_set`` False) gets the finite value z_label - logsumexp of the set, but at least
    ``OUT_OF_SET_FLOOR``; it lies below ln rho, and its gradient is exactly zero for the whole row. It must be masked
    out of the loss. The set is ``z >= max z + ln rho`` with z = logits / temperature in float32 (float64 for float64
    logits), the operations of the embedded sampler's ``min_p``, so that both sides agree on equal logits.

    Without rho, and with a rho so small that the whole vocabulary is in the set, results are equal bit for bit. Logits
    of -inf are tokens of probability zero; without rho a label among them has log-probability -inf.

    Args:
        logits: [..., V] float16, bfloat16, float32 or float64, before the temperature; not modified. They are kept
            for the backward pass and must not be modified before it.
        labels: [...] int64 in [0, V) at every position that is computed.
        temperature: > 0; a number, or a tensor that broadcasts to the labels. Without gradient.
        rho: threshold of the safe set, a probability relative to the largest, at most 1; <= 0 switches pruning off.
        entropy: compute the entropy.
        sum_pi_squared: compute the sum over the vocabulary of the squared probabilities.
        select: [...] bool; only these positions are read and computed, in order. The others have gradient zero.
        backend: ``torch``, ``triton`` (CUDA tensors; on CPU in Triton's interpreter), or ``auto``: Triton for CUDA
            tensors other than float64 where Triton can be imported, else torch.

    Raises:
        ValueError: shapes that do not match, an empty vocabulary, labels out of range, a temperature that is not
            positive and finite, rho above 1 or NaN, an unknown or unusable backend.
        TypeError: logits that are not floating point, labels that are not int64, a selection that is not bool.

    Source: arXiv 2512.23087 (the safe set), arXiv 2602.07078 (sum of squared probabilities).
    """
    if not isinstance(logits, torch.Tensor) or logits.dtype not in _FLOATS:
        found = getattr(logits, "dtype", type(logits).__name__)
        raise TypeError(f"logits must be a float16, bfloat16, float32 or float64 tensor, found {found}")
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have shape [..., V] with V > 0, found {list(logits.shape)}")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels must be int64, found {labels.dtype}")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels have shape {list(labels.shape)}, logits {list(logits.shape)}: expected {list(logits.shape[:-1])}"
        )
    rows = None
    shape = labels.shape
    if select is not None:
        if select.dtype != torch.bool:
            raise TypeError(f"select must be bool, found {select.dtype}")
        if select.shape != labels.shape:
            raise ValueError(f"select has shape {list(select.shape)}, labels {list(labels.shape)}: they must be equal")
        rows = select.reshape(-1).nonzero().squeeze(-1).to(logits.device)
        shape = rows.shape
    flat_labels = _selected(labels.to(logits.device).reshape(-1), rows)
    if flat_labels.numel():
        low, high = (int(bound) for bound in torch.aminmax(flat_labels))
        if low < 0 or high >= logits.shape[-1]:
            wrong = low if low < 0 else high
            raise ValueError(f"label {wrong} is out of range: the logits have a vocabulary of {logits.shape[-1]}")
    scale = _temperature(temperature, labels.shape, rows, logits)
    log_rho = _log_rho(rho)
    module = _module(backend, logits)
    needs_sums = entropy or sum_pi_squared or log_rho is not None or (logits.requires_grad and torch.is_grad_enabled())
    if module is logits_torch and not needs_sums and isinstance(scale, float) and scale == 1.0:
        return TokenStatistics(logits_torch.log_probs(logits, flat_labels, rows).reshape(shape))
    found = _Pass.apply(logits, flat_labels, rows, scale, log_rho, entropy, sum_pi_squared, module)
    return TokenStatistics(*(None if part is None else part.reshape(shape) for part in found))


def _selected(flat: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return flat if rows is None else flat.index_select(0, rows)


def _log_rho(rho: float) -> float | None:
    """ln rho, or None when pruning is off."""
    rho = float(rho)
    if math.isnan(rho) or rho > 1.0:
        raise ValueError(f"rho={rho} is out of range: expected at most 1 (0 or less switches pruning off)")
    return math.log(rho) if rho > 0.0 else None


def _temperature(
    temperature: float | torch.Tensor, shape: torch.Size, rows: torch.Tensor | None, logits: torch.Tensor
) -> float | torch.Tensor:
    """A number, rounded to the dtype of the computation, or a tensor of one value a computed row."""
    dtype = compute_dtype(logits)
    values = torch.as_tensor(temperature, dtype=dtype, device=logits.device).detach()
    low, high = (float(bound) for bound in torch.aminmax(values)) if values.numel() else (1.0, 1.0)
    if not (low > 0.0 and math.isfinite(high)):
        wrong = low if not low > 0.0 else high
        raise ValueError(f"temperature={wrong} is out of range: expected a positive, finite number")
    try:
        spread = values.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"temperature of shape {list(values.shape)} does not broadcast to the labels' shape {list(shape)}"
        ) from None
    return low if low == high else _selected(spread.reshape(-1), rows)


def _module(backend: str, logits: torch.Tensor) -> ModuleType:
    """The backend: its `sums` of forward and its `gradient` take the same arguments in both."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: expected one of {', '.join(BACKENDS)}")
    if backend == "auto":
        fits = logits.is_cuda and logits.dtype != torch.float64 and _triton_is_installed()
        backend = "triton" if fits else "torch"
    if backend == "torch":
        return logits_torch
    if not _triton_is_installed():
        raise ValueError("backend='triton' needs the package triton, which is not installed: use 'auto' or 'torch'")
    if logits.dtype == torch.float64:
        raise ValueError("backend='triton' does not compute in float64: use 'auto' or 'torch'")
    from verl_ext.methods.logits import logits_triton

    if not (logits.is_cuda or logits_triton.INTERPRETED):
        raise ValueError(
            f"backend='triton' needs CUDA tensors, found {logits.device}; on CPU it runs in Triton's interpreter alone "
            "(TRITON_INTERPRET=1 in the environment of the process): use 'auto' or 'torch'"
        )
    return logits_triton


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


class _Pass(torch.autograd.Function):
    """Forward and backward of :func:`token_statistics` over checked arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        rows: torch.Tensor | None,
        temperature: float | torch.Tensor,
        log_rho: float | None,
        entropy: bool,
        sum_pi_squared: bool,
        backend: ModuleType,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        dtype = compute_dtype(logits)
        divisor = temperature if isinstance(temperature, float) else temperature.double()
        with torch.autocast(logits.device.type, enabled=False):
            sums = backend.sums(logits.detach(), labels, rows, temperature, log_rho, entropy, sum_pi_squared)
            log_kept = sums.kept.log()
            log_probs = (sums.label.double() - sums.largest.double()) / divisor - log_kept
            in_set = kept_mass = size = spread = squares = None
            if log_rho is not None and sums.size is not None:
                scaled = sums.label / torch.as_tensor(temperature, dtype=dtype, device=logits.device)
                in_set = scaled >= bound(sums.largest, temperature, log_rho)
                log_probs = torch.where(in_set, log_probs, log_probs.clamp(min=OUT_OF_SET_FLOOR))
                kept_mass = (sums.kept / sums.full).to(dtype)
                size = sums.size.long()
            if sums.surprise is not None:
                spread = log_kept - sums.surprise / sums.kept
            if sums.squares is not None:
                squares = (sums.squares / sums.kept.square()).to(dtype)
        per_row = None if isinstance(temperature, float) else temperature
        ctx.save_for_backward(logits, labels, rows, per_row, sums.largest, sums.kept, log_probs, spread, in_set)
        ctx.temperature, ctx.log_rho, ctx.backend = temperature if per_row is None else None, log_rho, backend
        found = (log_probs.to(dtype), None if spread is None else spread.to(dtype), squares, kept_mass, size, in_set)
        ctx.mark_non_differentiable(*(part for part in found[2:] if part is not None))
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None, *_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        nothing = (None,) * 7
        if grad_log_probs is None and grad_entropy is None:
            return None, *nothing
        logits, labels, rows, per_row, largest, kept, log_probs, entropy, in_set = ctx.saved_tensors
        temperature = ctx.temperature if per_row is None else per_row
        with torch.autocast(logits.device.type, enabled=False):
            weights = _weights(temperature, kept, log_probs, entropy, in_set, grad_log_probs, grad_entropy)
            gradient = ctx.backend.gradient(logits, labels, rows, temperature, largest, ctx.log_rho, weights)
        return gradient, *nothing


def _weights(
    temperature: float | torch.Tensor,
    kept: torch.Tensor,
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    in_set: torch.Tensor | None,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
) -> Weights:
    """Weights of the gradient from the gradients of the results. float64, as are `kept`, `log_probs`, `entropy`.

    With g and h the gradients of log pi(y) and H, and log pi = ln e - ln S:

        T S d/dx_b = e_b (-g - h (H - ln S) - h ln e_b)            T d/dx_y = g (1 - pi(y)) - h pi(y) (log pi(y) + H)
    """
    g = torch.zeros_like(kept) if grad_log_probs is None else grad_log_probs.double()
    probability = log_probs.exp()
    if in_set is not None:
        g, probability = (torch.where(in_set, x, 0.0) for x in (g, probability))
    active, constant, slope = g != 0.0, -g, None
    label = -g * log_probs.expm1()  # 1 - p, accurate also where p is almost 1
    if grad_entropy is not None and entropy is not None:
        h = grad_entropy.double()
        active, constant, slope = active | (h != 0.0), constant - h * (entropy - kept.log()), -h
        label = label - h * (probability * entropy - torch.special.entr(probability))
    divisor = temperature if isinstance(temperature, float) else temperature.double()
    scale = kept * divisor
    return Weights(constant / scale, None if slope is None else slope / scale, label / divisor, active)
