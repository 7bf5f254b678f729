# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the pass over the logits: the sums of forward and the gradient, for CUDA tensors.

Same definitions and same results, up to the order of additions, as the plain torch of `logits_torch`; `logits_pass`
calls this module and documents what is computed. One program works on one row in forward and on one tile of one row
in backward.

Forward reads the row once. The largest logit is followed while it goes: the accumulators are rescaled when it grows,
which is rare, because it starts at the label's logit, and a sampled label is most often the largest or close to it.
The safe set is followed too: a logit under the running bound is under the final one, so what is left out stays out,
and what was let in is right if its smallest logit meets the final bound. If not, the row's sums over the set are made
in a second reading, of a row that is still in the cache. With TRITON_INTERPRET=1 in the environment the kernels run on
CPU tensors, slowly, which is how they are tested without a GPU.
"""

from __future__ import annotations

import math
import os

import torch
import triton
import triton.language as tl

from verl_ext.methods.logits.logits_sums import Sums, Weights

#: Columns of one tile, warps of one program, and tiles of forward that are on their way at once.
BLOCK, WARPS, STAGES = 2048, 8, 4

#: The kernels run in Triton's interpreter; decided, as in Triton itself, when this module is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

_LOG2E = tl.constexpr(1.4426950408889634)
# Exponents of e below it count as it where they multiply e, which is zero there: 0 times -inf has no value.
_LOWEST = tl.constexpr(-200.0)


@triton.jit
def _quotient(x, temperature, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    # Rounded to nearest, as in the sampler: the plain operator may be an approximation on a GPU.
    if SCALED:
        return tl.div_rn(x, tl.zeros_like(x) + temperature)
    else:
        return x


@triton.jit
def _offset(offsets, row, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    # What is known of the first address of a row decides whether it is read 16 bytes at a time.
    offset = tl.load(offsets + row)
    return tl.multiple_of(offset, 16) if ALIGNED else offset


@triton.jit
def _pruned_sums(  # type: ignore[no-untyped-def]
    base,
    vocabulary,
    stride,
    top,
    factor,
    temperature,
    bound,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    # The sums of a row over the logits of at least `bound`, by lane, once its largest is known.
    columns = tl.arange(0, BLOCK).to(tl.int64)
    kept = tl.zeros([BLOCK], tl.float32)
    size = tl.zeros([BLOCK], tl.float32)
    surprise = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
        valid = start + columns < vocabulary
        x = tl.load(base + (start + columns) * stride, mask=valid, other=-float("inf")).to(tl.float32)
        inside = (_quotient(x, temperature, SCALED) >= bound) & valid
        u = (x - top) * factor
        e = tl.where(inside, tl.exp2(u), 0.0)
        kept += e
        size += inside.to(tl.float32)
        if ENTROPY:
            surprise += e * tl.maximum(u, _LOWEST)
        if SQUARES:
            squares += e * e
    return kept, size, surprise, squares


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    logits,
    offsets,
    labels,
    temperatures,
    temperature_step,
    sums,
    count,
    log_rho,
    vocabulary,
    stride,
    PRUNED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARES: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + _offset(offsets, row, ALIGNED)
    temperature = tl.load(temperatures + row * temperature_step)
    factor = _LOG2E / temperature
    at_label = tl.load(base + tl.load(labels + row) * stride).to(tl.float32)
    columns = tl.arange(0, BLOCK).to(tl.int64)
    top = at_label
    full = tl.zeros([BLOCK], tl.float32)
    kept = tl.zeros([BLOCK], tl.float32)
    size = tl.zeros([BLOCK], tl.float32)
    surprise = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    for start in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
        valid = start + columns < vocabulary
        x = tl.load(base + (start + columns) * stride, mask=valid, other=-float("inf")).to(tl.float32)
        highest = tl.max(x, 0)
        if highest > top:
            # nothing but zeros was summed while the largest was -inf
            shift = tl.where(top == -float("inf"), 0.0, (top - highest) * factor)
            scale = tl.exp2(shift)
            if ENTROPY:
                surprise = (surprise + shift * (kept if PRUNED else full)) * scale
            if SQUARES:
                squares = squares * (scale * scale)
            full = full * scale
            kept = kept * scale
            top = highest
        reference = tl.where(top == -float("inf"), 0.0, top)
        u = (x - reference) * factor
        e = tl.exp2(u)
        full += e
        if PRUNED:
            z = _quotient(x, temperature, SCALED)
            inside = (z >= _quotient(top, temperature, SCALED) + log_rho) & valid
            e = tl.where(inside, e, 0.0)
            smallest = tl.minimum(smallest, tl.where(inside, z, float("inf")))
            kept += e
            size += inside.to(tl.float32)
        if ENTROPY:
            surprise += e * tl.maximum(u, _LOWEST)
        if SQUARES:
            squares += e * e
    if PRUNED:
        bound = _quotient(top, temperature, SCALED) + log_rho
        if tl.min(smallest, 0) < bound:
            kept, size, surprise, squares = _pruned_sums(
                base, vocabulary, stride, top, factor, temperature, bound, ENTROPY, SQUARES, SCALED, BLOCK, STAGES
            )
    tl.store(sums + row, top)
    tl.store(sums + count + row, at_label)
    tl.store(sums + 2 * count + row, tl.sum(full, 0))
    if PRUNED:
        tl.store(sums + 3 * count + row, tl.sum(kept, 0))
        tl.store(sums + 4 * count + row, tl.sum(size, 0))
    if ENTROPY:
        tl.store(sums + 5 * count + row, tl.sum(surprise, 0))
    if SQUARES:
        tl.store(sums + 6 * count + row, tl.sum(squares, 0))


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    logits,
    gradient,
    offsets,
    slots,
    labels,
    temperatures,
    temperature_step,
    largest,
    constants,
    slopes,
    at_labels,
    log_rho,
    vocabulary,
    stride,
    PRUNED: tl.constexpr,
    SLOPE: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    flat = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    valid = columns < vocabulary
    target = gradient + flat * vocabulary + columns
    slot = tl.load(slots + flat)
    if slot < 0:
        tl.store(target, tl.zeros([BLOCK], gradient.dtype.element_ty), mask=valid)
    else:
        temperature = tl.load(temperatures + slot * temperature_step)
        top = tl.load(largest + slot)
        base = logits + _offset(offsets, slot, ALIGNED)
        x = tl.load(base + columns * stride, mask=valid, other=-float("inf")).to(tl.float32)
        u = (x - top) * (_LOG2E / temperature)
        weight = tl.zeros([BLOCK], tl.float32) + tl.load(constants + slot)
        if SLOPE:
            weight += tl.load(slopes + slot) * tl.maximum(u, _LOWEST)
        value = tl.exp2(u) * weight
        if PRUNED:
            bound = _quotient(top, temperature, SCALED) + log_rho
            value = tl.where(_quotient(x, temperature, SCALED) >= bound, value, 0.0)
        value = tl.where(columns == tl.load(labels + slot), tl.load(at_labels + slot), value)
        tl.store(target, value.to(gradient.dtype.element_ty), mask=valid)


def _offsets(logits: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """[N] int64, elements from the first logit to the first of each computed row, whatever the strides."""
    left = torch.arange(logits[..., 0].numel(), device=logits.device) if rows is None else rows
    offsets = torch.zeros_like(left)
    for size, stride in zip(reversed(logits.shape[:-1]), reversed(logits.stride()[:-1]), strict=True):
        offsets += left % size * stride
        left = left // size
    return offsets


def _aligned(logits: torch.Tensor) -> bool:
    return logits.stride(-1) == 1 and all(step % 16 == 0 for step in logits.stride()[:-1])


def _temperatures(temperature: float | torch.Tensor, device: torch.device) -> tuple[torch.Tensor, int, bool]:
    """A tensor, the step from one row to the next in it, and whether the division by it does something."""
    if isinstance(temperature, torch.Tensor):
        return temperature.contiguous(), 1, True
    return torch.full((1,), temperature, dtype=torch.float32, device=device), 0, temperature != 1.0


def _tile(vocabulary: int) -> int:
    return min(BLOCK, triton.next_power_of_2(vocabulary))


def sums(
    logits: torch.Tensor,
    labels: torch.Tensor,
    rows: torch.Tensor | None,
    temperature: float | torch.Tensor,
    log_rho: float | None,
    entropy: bool,
    squares: bool,
) -> Sums:
    """The sums of forward. Arguments as in `logits_pass`."""
    count = labels.shape[0]
    pruned = log_rho is not None
    found = torch.empty(7, count, dtype=torch.float32, device=logits.device)
    if count:
        temperatures, step, scaled = _temperatures(temperature, logits.device)
        _forward[(count,)](
            logits, _offsets(logits, rows), labels.contiguous(), temperatures, step, found, count,
            0.0 if log_rho is None else log_rho, logits.shape[-1], logits.stride(-1),
            PRUNED=pruned, ENTROPY=entropy, SQUARES=squares, SCALED=scaled,
            ALIGNED=_aligned(logits), BLOCK=_tile(logits.shape[-1]), STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
    # What was not asked for has not been written.
    largest, label, full, kept, size, surprise, square = found
    return Sums(
        largest,
        label,
        full.double(),
        (kept if pruned else full).double(),
        surprise.double() * math.log(2.0) if entropy else None,
        square.double() if squares else None,
        size if pruned else None,
    )


def gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    rows: torch.Tensor | None,
    temperature: float | torch.Tensor,
    largest: torch.Tensor,
    log_rho: float | None,
    weights: Weights,
) -> torch.Tensor:
    """The gradient of the logits, contiguous, in their dtype. Arguments as in `logits_pass`."""
    written = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    vocabulary = logits.shape[-1]
    total = written.numel() // vocabulary
    if total:
        slots = torch.full((total,), -1, dtype=torch.int64, device=logits.device)
        computed = torch.arange(labels.shape[0], device=logits.device)
        slots[slice(None) if rows is None else rows] = torch.where(weights.active, computed, -1)
        constant, label = weights.constant.float(), weights.label.float()
        slope = constant if weights.slope is None else (weights.slope * math.log(2.0)).float()  # of powers of 2
        temperatures, step, scaled = _temperatures(temperature, logits.device)
        tile = _tile(vocabulary)
        _backward[(total, triton.cdiv(vocabulary, tile))](
            logits, written, _offsets(logits, rows), slots, labels.contiguous(), temperatures, step, largest,
            constant, slope, label,
            0.0 if log_rho is None else log_rho, vocabulary, logits.stride(-1),
            PRUNED=log_rho is not None, SLOPE=weights.slope is not None, SCALED=scaled,
            ALIGNED=_aligned(logits), BLOCK=tile, num_warps=WARPS,
        )  # fmt: skip
    return written
