# SPDX-License-Identifier: Apache-2.0
"""The pass over the logits in plain torch: sums of forward and gradient, in blocks that stay in the cache.

Notation and definitions are those of `logits_pass`, which checks the arguments; `logits_triton` has the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from verl_ext.methods.logits.logits_sums import Sums, Weights

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


def compute_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def bound(largest: torch.Tensor, temperature: float | torch.Tensor, log_rho: float) -> torch.Tensor:
    """max z + ln rho, by the operations and in the precision of the embedded sampler."""
    # Not by a number: on CUDA that is a multiplication by its reciprocal.
    divisor = torch.as_tensor(temperature, dtype=largest.dtype, device=largest.device)
    return largest / divisor + torch.as_tensor(log_rho, dtype=largest.dtype, device=largest.device)


class _Blocks:
    """The computed rows of the logits in blocks that stay in the cache, and work buffers of a block's size.

    Args:
        logits: [..., V], of any strides.
        rows: [N] int64 flat numbers of the computed rows; None for all.
        buffers: number of work buffers.
    """

    def __init__(self, logits: torch.Tensor, rows: torch.Tensor | None, buffers: int):
        self.dtype = compute_dtype(logits)
        self._logits = logits if logits.dim() > 1 else logits[None]
        *batch, vocabulary = self._logits.shape
        try:
            self._flat: torch.Tensor | None = logits.view(-1, vocabulary)
        except RuntimeError:  # strides that no view has: row by row
            self._flat = None
            rows = torch.arange(math.prod(batch), device=logits.device) if rows is None else rows
        self._rows, self._count = rows, math.prod(batch) if rows is None else rows.shape[0]
        on_cpu = logits.device.type == "cpu"
        elements = min(BLOCK_ELEMENTS * torch.get_num_threads(), BLOCK_ELEMENTS_MOST) if on_cpu else BLOCK_ELEMENTS_MOST
        self._step = max(1, min(self._count, elements // vocabulary))

        def buffer(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(self._step, vocabulary, dtype=dtype, device=logits.device)

        self._buffers = [buffer(self.dtype) for _ in range(buffers)]
        self._copy = None if logits.dtype == self.dtype else buffer(self.dtype)
        self._taken = None if rows is None or self._flat is None else buffer(logits.dtype)

    def __iter__(self) -> Iterator[tuple[slice, torch.Tensor, list[torch.Tensor]]]:
        """For each block the computed rows that it is, their logits in the dtype of the computation, and the buffers.

        All but the first are overwritten by the next block."""
        for first in range(0, self._count, self._step):
            part = slice(first, min(first + self._step, self._count))
            block = self._of(part)
            size = block.shape[0]
            if self._copy is not None:
                block = self._copy[:size].copy_(block)
            yield part, block, [buffer[:size] for buffer in self._buffers]

    def _of(self, part: slice) -> torch.Tensor:
        if self._flat is not None and self._rows is None:
            return self._flat[part]
        assert self._rows is not None
        rows = self._rows[part]
        if self._flat is None or self._taken is None:
            return self._logits[torch.unravel_index(rows, self._logits.shape[:-1])]
        return torch.index_select(self._flat, 0, rows, out=self._taken[: rows.shape[0]])


def _column(value: float | torch.Tensor) -> float | torch.Tensor:
    return value[:, None] if isinstance(value, torch.Tensor) else value


def _exponent(
    tile: torch.Tensor, largest: torch.Tensor, temperature: float | torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
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
    return torch.ge(tile, bound(largest, temperature, log_rho)[:, None], out=out)


def _lowest(dtype: torch.dtype) -> float:
    """Logarithm of a number that is 0 in `dtype`: an exponent is raised to it where e, zero there, multiplies it, since
    0 times -inf has no value."""
    return -760.0 if dtype == torch.float64 else -140.0


def log_probs(logits: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """log pi(label) at temperature 1 where nothing else is asked for: torch's own log-softmax, without gradient, [N].

    Its one fused loop is not slower than the sums below on any processor.
    """
    blocks = _Blocks(logits.detach(), rows, buffers=1)
    found = torch.empty(labels.shape, dtype=blocks.dtype, device=logits.device)
    for part, block, (out,) in blocks:
        torch.log_softmax(block, -1, out=out)
        found[part] = out.gather(-1, labels[part, None]).squeeze(-1)
    return found


def sums(
    logits: torch.Tensor,
    labels: torch.Tensor,
    rows: torch.Tensor | None,
    temperature: float | torch.Tensor,
    log_rho: float | None,
    entropy: bool,
    squares: bool,
) -> Sums:
    """The sums of forward. A block is read from memory once; the operations on it find it in the cache."""
    blocks = _Blocks(logits, rows, buffers=1 + entropy + (log_rho is not None))
    names = ["largest", "label", "full"] + ["size", "kept"] * (log_rho is not None)
    names += ["surprise"] * entropy + ["squares"] * squares
    parts = [torch.empty(len(names), 0, dtype=blocks.dtype, device=logits.device)]
    for part, block, (u, *spare) in blocks:
        largest = block.amax(-1)
        scale = temperature if isinstance(temperature, float) else temperature[part]
        _exponent(block, largest, scale, u)
        e = torch.exp(u, out=spare.pop() if entropy else u)
        found = [largest, block.gather(-1, labels[part, None]).squeeze(-1), e.sum(-1)]
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


def gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    rows: torch.Tensor | None,
    temperature: float | torch.Tensor,
    largest: torch.Tensor,
    log_rho: float | None,
    weights: Weights,
) -> torch.Tensor:
    """The gradient of the logits, in their dtype, written block by block."""
    active = weights.active
    if rows is not None or not bool(active.all()):
        rows = active.nonzero().squeeze(-1) if rows is None else rows[active]
        labels, largest, weights = labels[active], largest[active], weights.of(active)
        temperature = temperature if isinstance(temperature, float) else temperature[active]
    make = torch.empty if rows is None else torch.zeros
    gradient = make(logits.shape, dtype=logits.dtype, device=logits.device)
    flat = gradient.view(-1, logits.shape[-1])
    in_place = rows is None and logits.dtype == compute_dtype(logits)
    buffers = (weights.slope is not None) + (log_rho is not None) + (not in_place)
    blocks = _Blocks(logits, rows, buffers)
    constant = weights.constant.to(blocks.dtype)[:, None]
    slope = None if weights.slope is None else weights.slope.to(blocks.dtype)[:, None]
    for part, block, spare in blocks:
        scale = temperature if isinstance(temperature, float) else temperature[part]
        e = flat[part] if in_place else spare.pop()
        inside = None if log_rho is None else _inside(block, largest[part], scale, log_rho, spare.pop())
        if slope is None:
            _exponent(block, largest[part], scale, e).exp_().mul_(constant[part])
        else:
            u = _exponent(block, largest[part], scale, spare.pop())
            torch.exp(u, out=e).mul_(u.clamp_(min=_lowest(blocks.dtype)).mul_(slope[part]).add_(constant[part]))
        if inside is not None:
            e.mul_(inside)
        if rows is not None:
            flat[rows[part]] = e.to(flat.dtype)
        elif not in_place:
            flat[part] = e
    numbers = torch.arange(flat.shape[0], device=flat.device) if rows is None else rows
    flat[numbers, labels] = weights.label.to(flat.dtype)
    return gradient
