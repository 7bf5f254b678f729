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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from verl_ext.methods.logits_sums import Sums, Weights

__all__ = ["OUT_OF_SET_FLOOR", "TokenStatistics", "token_statistics"]

#: Bytes of a core's second-level cache where the system does not tell.
USUAL_CACHE = 1 << 20


def cache_bytes(index: int) -> int:
    """Bytes of a cache of the first processor as Linux numbers them (0 first level, 2 second, 3 third); 0: unknown."""
    try:
        return 1024 * int(Path(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size").read_text().strip("K\n"))
    except (OSError, ValueError):
        return 0


#: Elements of one block on CPU, a thread: it and three float32 work buffers fill the second-level cache; of 256 kB at
#: least, so that the calls into torch cost little beside it.
BLOCK_ELEMENTS = max(1 << 16, (cache_bytes(2) or USUAL_CACHE) // 16)
#: Elements of one block at most, and where plain torch runs on an accelerator: buffers of 4 MB.
BLOCK_ELEMENTS_MOST = 1 << 20

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
    found = _Pass.apply(
        logits, flat_labels, rows, scale, log_rho, entropy, sum_pi_squared, _use_triton(backend, logits)
    )
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
    dtype = _compute_dtype(logits)
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


def _use_triton(backend: str, logits: torch.Tensor) -> bool:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown: expected one of {', '.join(BACKENDS)}")
    if backend == "auto":
        return logits.is_cuda and logits.dtype != torch.float64 and _triton_is_installed()
    if backend == "torch":
        return False
    if not _triton_is_installed():
        raise ValueError("backend='triton' needs the package triton, which is not installed: use 'auto' or 'torch'")
    if logits.dtype == torch.float64:
        raise ValueError("backend='triton' does not compute in float64: use 'auto' or 'torch'")
    from verl_ext.methods import logits_triton

    if not (logits.is_cuda or logits_triton.INTERPRETED):
        raise ValueError(
            f"backend='triton' needs CUDA tensors, found {logits.device}; on CPU it runs in Triton's interpreter alone "
            "(TRITON_INTERPRET=1 in the environment of the process): use 'auto' or 'torch'"
        )
    return True


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _compute_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


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
        triton: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        dtype = _compute_dtype(logits)
        divisor = temperature if isinstance(temperature, float) else temperature.double()
        with torch.autocast(logits.device.type, enabled=False):
            forward = _implementation(triton)[0]
            sums = forward(logits.detach(), labels, rows, temperature, log_rho, entropy, sum_pi_squared)
            log_kept = sums.kept.log()
            log_probs = (sums.label.double() - sums.largest.double()) / divisor - log_kept
            in_set = kept_mass = size = spread = squares = None
            if log_rho is not None and sums.size is not None:
                scaled = sums.label / torch.as_tensor(temperature, dtype=dtype, device=logits.device)
                in_set = scaled >= _bound(sums.largest, temperature, log_rho)
                log_probs = torch.where(in_set, log_probs, log_probs.clamp(min=OUT_OF_SET_FLOOR))
                kept_mass = (sums.kept / sums.full).to(dtype)
                size = sums.size.long()
            if sums.surprise is not None:
                spread = log_kept - sums.surprise / sums.kept
            if sums.squares is not None:
                squares = (sums.squares / sums.kept.square()).to(dtype)
        per_row = None if isinstance(temperature, float) else temperature
        ctx.save_for_backward(logits, labels, rows, per_row, sums.largest, sums.kept, log_probs, spread, in_set)
        ctx.temperature, ctx.log_rho, ctx.triton = temperature if per_row is None else None, log_rho, triton
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
            backward = _implementation(ctx.triton)[1]
            gradient = backward(logits, labels, rows, temperature, largest, ctx.log_rho, weights)
        return gradient, *nothing


def _implementation(triton: bool) -> tuple[Callable[..., Sums], Callable[..., torch.Tensor]]:
    """The sums of forward and the gradient: functions of the same arguments in both backends."""
    if not triton:
        return _sums, _gradient
    from verl_ext.methods import logits_triton

    return logits_triton.sums, logits_triton.gradient


def _weights(
    temperature: float | torch.Tensor,
    kept: torch.Tensor,
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    in_set: torch.Tensor | None,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
) -> Weights:
    """Weights of the gradient from the gradients of the results. float64, as are `kept`, `log_probs`, `entropy`."""
    divisor = temperature if isinstance(temperature, float) else temperature.double()
    constant, label = torch.zeros_like(kept), torch.zeros_like(kept)
    slope = None
    if grad_log_probs is not None:
        grad = grad_log_probs.double()
        if in_set is not None:
            grad = torch.where(in_set, grad, 0.0)
        constant = constant - grad
        # 1 - p, accurate also where p is almost 1; a row of no weight counts as zero, NaN or not
        label = label - torch.where(grad == 0.0, 0.0, grad * log_probs.expm1())
    if grad_entropy is not None and entropy is not None:
        grad = grad_entropy.double()
        # log pi = ln e - ln kept
        constant = constant - torch.where(grad == 0.0, 0.0, grad * (entropy - kept.log()))
        slope = -grad
        probability = log_probs.exp()
        outside = (grad == 0.0) | (probability == 0.0)
        if in_set is not None:
            outside = outside | ~in_set
        label = label - torch.where(outside, 0.0, grad * probability * (log_probs + entropy))
    active = (constant != 0.0) | (label != 0.0)
    scale = kept * divisor
    if slope is not None:
        active = active | (slope != 0.0)
        slope = slope / scale
    return Weights(constant / scale, slope, label / divisor, active)


def _bound(largest: torch.Tensor, temperature: float | torch.Tensor, log_rho: float) -> torch.Tensor:
    """max z + ln rho, by the operations and in the precision of the embedded sampler."""
    # Not by a number: on CUDA that is a multiplication by its reciprocal.
    divisor = torch.as_tensor(temperature, dtype=largest.dtype, device=largest.device)
    return largest / divisor + torch.as_tensor(log_rho, dtype=largest.dtype, device=largest.device)


# --- plain torch ------------------------------------------------------------------------------------------------------


def _views(logits: torch.Tensor) -> list[torch.Tensor]:
    """The rows of the logits, in order, as [n, V] views: no copy is made, whatever the strides."""
    if logits.dim() == 1:
        return [logits[None]]
    try:
        return [logits.view(-1, logits.shape[-1])]
    except RuntimeError:
        if logits.dim() == 2:
            return [logits]
        return [view for part in logits.unbind(0) for view in _views(part)]


class _Span(NamedTuple):
    """Consecutive rows, all of them computed: [first, last) of the view, which are the computed rows from `start`."""

    view: torch.Tensor
    first: int
    last: int
    start: int


def _spans(views: list[torch.Tensor], rows: np.ndarray | None) -> Iterator[_Span]:
    """The computed rows, in order; `rows` are their flat numbers, or None for all."""
    base = start = 0
    for view in views:
        count = view.shape[0]
        if rows is None:
            bounds = [(0, count)] if count else []
        else:
            inside = rows[np.searchsorted(rows, base) : np.searchsorted(rows, base + count)] - base
            cuts = np.flatnonzero(np.diff(inside) != 1) + 1
            bounds = [(int(run[0]), int(run[-1]) + 1) for run in np.split(inside, cuts) if len(run)]
        for first, last in bounds:
            yield _Span(view, first, last, start)
            start += last - first
        base += count


class _Blocks:
    """The cut of spans into blocks of whole rows, and work buffers of a block's size."""

    def __init__(self, logits: torch.Tensor, buffers: int):
        self.dtype = _compute_dtype(logits)
        on_cpu = logits.device.type == "cpu"
        elements = min(BLOCK_ELEMENTS * torch.get_num_threads(), BLOCK_ELEMENTS_MOST) if on_cpu else BLOCK_ELEMENTS_MOST
        self.rows = max(1, min(math.prod(logits.shape[:-1]), elements // logits.shape[-1]))
        shape = (self.rows, logits.shape[-1])
        self._buffers = [torch.empty(shape, dtype=self.dtype, device=logits.device) for _ in range(buffers)]
        self._copy = None
        if logits.dtype != self.dtype:
            self._copy = torch.empty(shape, dtype=self.dtype, device=logits.device)

    def of(self, span: _Span) -> Iterator[tuple[int, int, slice]]:
        """First and last row in the view, and the computed rows, of each block of the span."""
        for first in range(span.first, span.last, self.rows):
            last, start = min(first + self.rows, span.last), span.start + first - span.first
            yield first, last, slice(start, start + last - first)

    def load(self, block: torch.Tensor) -> torch.Tensor:
        """The block in the dtype of the computation; a copy is overwritten by the next load."""
        return block if self._copy is None else self._copy[: block.shape[0]].copy_(block)

    def buffers(self, rows: int) -> list[torch.Tensor]:
        return [buffer[:rows] for buffer in self._buffers]


def _column(value: float | torch.Tensor) -> float | torch.Tensor:
    return value[:, None] if isinstance(value, torch.Tensor) else value


def _exponent(tile: torch.Tensor, largest: torch.Tensor, temperature: float | torch.Tensor, out: torch.Tensor) -> Any:
    """ln e of every logit, in `out`: zero for the largest, to the last digit."""
    torch.sub(tile, largest[:, None], out=out)
    return out if isinstance(temperature, float) and temperature == 1.0 else out.mul_(_column(1.0 / temperature))


def _inside(
    tile: torch.Tensor, largest: torch.Tensor, temperature: float | torch.Tensor, log_rho: float, out: torch.Tensor
) -> torch.Tensor:
    """1.0 where a logit is in the safe set and 0.0 where it is not, in `out`."""
    if not (isinstance(temperature, float) and temperature == 1.0):
        divisor = torch.as_tensor(temperature, dtype=largest.dtype, device=largest.device)
        tile = torch.div(tile, _column(divisor) if divisor.dim() else divisor, out=out)
    return torch.ge(tile, _bound(largest, temperature, log_rho)[:, None], out=out)


def _lowest(dtype: torch.dtype) -> float:
    """Logarithm of a number that is 0 in `dtype`: an exponent is raised to it where e, zero there, multiplies it, since
    0 times -inf has no value."""
    return -760.0 if dtype == torch.float64 else -140.0


def _sums(
    logits: torch.Tensor,
    labels: torch.Tensor,
    rows: torch.Tensor | None,
    temperature: float | torch.Tensor,
    log_rho: float | None,
    entropy: bool,
    squares: bool,
) -> Sums:
    """The sums of forward. A block is read from memory once; the operations on it find it in the cache."""
    blocks = _Blocks(logits, buffers=1 + entropy + (log_rho is not None))
    names = ["largest", "label", "full"] + ["size", "kept"] * (log_rho is not None)
    names += ["surprise"] * entropy + ["squares"] * squares
    parts = [torch.empty(len(names), 0, dtype=blocks.dtype, device=logits.device)]
    for span in _spans(_views(logits), None if rows is None else rows.cpu().numpy()):
        for first, last, computed in blocks.of(span):
            block = blocks.load(span.view[first:last])
            largest = block.amax(-1)
            scale = temperature if isinstance(temperature, float) else temperature[computed]
            u, *spare = blocks.buffers(last - first)
            _exponent(block, largest, scale, u)
            e = torch.exp(u, out=spare.pop() if entropy else u)
            found = [largest, block.gather(-1, labels[computed, None]).squeeze(-1), e.sum(-1)]
            if log_rho is not None:
                inside = _inside(block, largest, scale, log_rho, spare.pop())
                found += [inside.sum(-1), e.mul_(inside).sum(-1)]
            if entropy:
                found.append(u.clamp_(min=_lowest(blocks.dtype)).mul_(e).sum(-1))
            if squares:
                found.append(e.mul_(e).sum(-1))
            parts.append(torch.stack(found))
    table = dict(zip(names, torch.cat(parts, dim=1), strict=True))
    double = {name: sums.double() for name, sums in table.items()}
    full = double["full"]
    kept, surprise, square = double.get("kept", full), double.get("surprise"), double.get("squares")
    return Sums(table["largest"], table["label"], full, kept, surprise, square, double.get("size"))


def _gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    rows: torch.Tensor | None,
    temperature: float | torch.Tensor,
    largest: torch.Tensor,
    log_rho: float | None,
    weights: Weights,
) -> torch.Tensor:
    """The gradient of the logits, in their dtype, written block by block."""
    vocabulary = logits.shape[-1]
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    flat = gradient.view(-1, vocabulary)
    numbers = torch.arange(flat.shape[0], device=logits.device) if rows is None else rows
    active = numbers if bool(weights.active.all()) else numbers[weights.active]
    dtype = _compute_dtype(logits)

    def of_active(part: torch.Tensor) -> torch.Tensor:
        return part if active is numbers else part[weights.active]

    constant, top = of_active(weights.constant).to(dtype)[:, None], of_active(largest)
    slope = None if weights.slope is None else of_active(weights.slope).to(dtype)[:, None]
    scales = temperature if isinstance(temperature, float) else of_active(temperature)
    converts = logits.dtype != dtype
    blocks = _Blocks(logits, buffers=(slope is not None) + (log_rho is not None))
    written = 0
    for span in _spans(_views(logits), None if active.shape[0] == flat.shape[0] else active.cpu().numpy()):
        base = int(active[span.start]) - span.first
        flat[written : base + span.first].zero_()
        written = base + span.last
        for first, last, computed in blocks.of(span):
            block = blocks.load(span.view[first:last])
            scale = scales if isinstance(scales, float) else scales[computed]
            target = flat[base + first : base + last]
            spare = blocks.buffers(last - first)
            inside = None if log_rho is None else _inside(block, top[computed], scale, log_rho, spare.pop())
            e = block if converts else target
            if slope is None:
                _exponent(block, top[computed], scale, e).exp_().mul_(constant[computed])
            else:
                u = _exponent(block, top[computed], scale, spare.pop())
                torch.exp(u, out=e).mul_(u.clamp_(min=_lowest(dtype)).mul_(slope[computed]).add_(constant[computed]))
            if inside is not None:
                e.mul_(inside)
            if converts:
                target.copy_(e)
    flat[written:].zero_()
    flat[active, of_active(labels)] = of_active(weights.label).to(logits.dtype)
    return gradient
