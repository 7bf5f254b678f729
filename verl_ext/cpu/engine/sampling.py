# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters and the batched sampler of the embedded engine.

Order of operations for one row, on float32 logits ``z`` of shape ``(vocab,)`` (the order that vLLM uses):

1. ids at and beyond ``vocab_limit`` are removed (padded vocabulary);
2. stop tokens are removed while fewer than ``min_tokens`` tokens exist;
3. repetition, then frequency and presence penalties;
4. division by ``temperature`` (0 means greedy: the arg-max of step 3, no truncation);
5. ``min_p``: keep ids with ``p >= min_p * max(p)``;
6. ``top_k``: keep the ``k`` largest (ids that tie with the k-th are kept as well);
7. ``top_p``: of what is left, renormalised, keep the smallest set whose mass reaches ``top_p``
   (with the ids that tie with its last).

A token is drawn by inverting the cumulative distribution at one uniform number of the request's own generator, so that
a row's sample does not depend on the other rows of the batch (up to floating-point rounding of the batched forward).

Log-probabilities of the sampled token follow ``logprobs_mode``:

``processed_logprobs`` (verl's default)
    ``log_softmax`` after steps 1 to 7: the log-probability under the distribution that was really sampled from.
``policy_logprobs``
    ``log_softmax(z / temperature)``: what verl's trainer computes for the same tokens, before truncation and penalties.
``raw_logprobs``
    ``log_softmax(z)``: before temperature as well, the meaning that vLLM gives this name.

Greedy rows use temperature 1 in all three. With ``top_p=1``, ``top_k=-1``, ``min_p=0``, no penalties and no padded
vocabulary, ``processed_logprobs`` and ``policy_logprobs`` are the same number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

import numpy as np
import torch

__all__ = ["LOGPROBS_MODES", "BatchSampling", "SamplingParams", "sample"]

LOGPROBS_MODES = ("processed_logprobs", "policy_logprobs", "raw_logprobs")

#: What a parameter may be, where not every value of its type will do: a test and its words.
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_tokens": (lambda value: value >= 1, "at least 1"),
    # float32 logits divided by less are no longer finite
    "temperature": (lambda value: value == 0 or 1e-6 <= value < math.inf, "0 (greedy) or a finite number >= 1e-6"),
    "top_p": (lambda value: 0 < value <= 1, "0 < top_p <= 1"),
    "top_k": (lambda value: value >= -1, "-1 or 0 (off) or a positive integer"),
    "min_p": (lambda value: 0 <= value <= 1, "0 <= min_p <= 1"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "a number > 0"),
    "presence_penalty": (math.isfinite, "a finite number"),
    "frequency_penalty": (math.isfinite, "a finite number"),
    "min_tokens": (lambda value: value >= 0, "at least 0"),
    "stop_token_ids": (lambda value: min(value, default=0) >= 0, "ids of at least 0"),
}

# Keeps u * total strictly below total in float64, so that the inverse of the CDF never falls off its end.
_MAX_UNIFORM = 1.0 - 1e-12


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"sampling parameter {name}={value!r} is not a number") from None


def _integer(name: str, value: Any) -> int:
    try:
        whole = int(value)  # of the value as given: float() rounds seeds above 2**53
        if isinstance(value, str) or whole == value:
            return whole
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"sampling parameter {name}={value!r} is not an integer")


def _boolean(name: str, value: Any) -> bool:
    if value not in (True, False):
        raise ValueError(f"sampling parameter {name}={value!r} is neither true nor false")
    return bool(value)


def _ids(name: str, value: Any) -> frozenset[int]:
    ids = [value] if isinstance(value, Integral) else value
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise ValueError(f"sampling parameter {name}={value!r} is neither an id nor a list of ids")
    return frozenset(_integer(name, one) for one in ids)


#: How a value that somebody sent is read, by the annotation of its field.
_READERS: dict[str, Callable[[str, Any], Any]] = {
    "float": _number,
    "int": _integer,
    "int | None": _integer,
    "bool": _boolean,
    "frozenset[int]": _ids,
}


@dataclass(frozen=True)
class SamplingParams:
    """Validated sampling parameters of one request.

    Args:
        max_tokens: number of new tokens at most, at least 1.
        temperature: 0 is greedy decoding; otherwise at least 1e-6.
        top_p: nucleus mass in (0, 1].
        top_k: number of ids kept; -1 or 0 keeps all.
        min_p: probability floor relative to the most likely id, in [0, 1].
        repetition_penalty: > 0; 1 is off. Applies to ids of the prompt and of the response.
        presence_penalty: subtracted once from the logit of each id already generated.
        frequency_penalty: subtracted once per occurrence among the generated ids.
        min_tokens: stop tokens are not sampled before this many tokens exist.
        stop_token_ids: ids that end the response (and stay in it), next to the model's end-of-sequence ids.
        ignore_eos: do not stop at the model's end-of-sequence ids.
        seed: seed of the request's generator; ``None`` lets the engine derive one.
        logprobs: return the log-probability of each sampled token.

    Raises:
        ValueError: a value is out of range; the message names it and the allowed range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: bool = True

    def __post_init__(self) -> None:
        for name, (fits, allowed) in _RANGES.items():
            value = getattr(self, name)
            if not fits(value):
                raise ValueError(f"sampling parameter {name}={value!r} is out of range: expected {allowed}")

    @classmethod
    def from_dict(
        cls,
        params: Mapping[str, Any],
        *,
        default_max_tokens: int,
        max_tokens_limit: int,
        repetition_penalty: float = 1.0,
        ignore_eos: bool = False,
    ) -> SamplingParams:
        """Build from the dictionary that verl's agent loops pass.

        A value of ``None`` stands for "not given". ``max_tokens`` (or ``max_new_tokens``) is clamped to
        ``[1, max_tokens_limit]`` as verl's vLLM server does.

        Args:
            params: names and values: the fields of this class, ``max_new_tokens``, and ``n``, which must be 1.
                Without ``logprobs`` none are returned; a number asks for the sampled token's all the same.
            default_max_tokens: used when neither ``max_tokens`` nor ``max_new_tokens`` is given.
            max_tokens_limit: room left in the model's context, at least 1.
            repetition_penalty, ignore_eos: defaults of the rollout config.

        Raises:
            ValueError: unknown names, ``n`` other than 1, wrong types or values out of range.
        """
        kinds = {field.name: str(field.type) for field in fields(cls)} | {"max_new_tokens": "int", "n": "Any"}
        given = {name: value for name, value in params.items() if value is not None}
        unknown = sorted(set(given) - set(kinds))
        if unknown:
            raise ValueError(
                f"unknown sampling parameter(s) {unknown} for the embedded rollout engine; it accepts {sorted(kinds)}"
            )
        n = given.pop("n", 1)
        if n != 1:
            raise ValueError(
                f"sampling parameter n={n!r}: the embedded rollout engine samples one response a request; "
                "send n requests"
            )
        if "max_tokens" in given:
            given.pop("max_new_tokens", None)
        given = {"repetition_penalty": repetition_penalty, "ignore_eos": ignore_eos, "logprobs": False, **given}
        if isinstance(given["logprobs"], Integral):
            given["logprobs"] = bool(given["logprobs"])  # a number of them is read as verl's vLLM server reads it
        values = {name: _READERS[kinds[name]](name, value) for name, value in given.items()}
        wanted = values.pop("max_new_tokens", default_max_tokens)
        values["max_tokens"] = max(1, min(values.get("max_tokens", wanted), max_tokens_limit))
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def edits_logits(self) -> bool:
        """Whether the row needs its token history (penalties or ``min_tokens``)."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.min_tokens > 0
        )


class BatchSampling:
    """The parameters of a batch as tensors, built once per change of the batch.

    Args:
        params: one entry a row.
        vocab_size: number of logits.
        device: where the logits live.
    """

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        greedy = [p.greedy for p in params]
        temperature = [1.0 if p.greedy else p.temperature for p in params]
        top_k = [vocab_size if p.greedy or p.top_k <= 0 else min(p.top_k, vocab_size) for p in params]
        top_p = [1.0 if p.greedy else p.top_p for p in params]
        min_p = [0.0 if p.greedy else p.min_p for p in params]
        #: rows with penalties or ``min_tokens``
        self.edited_rows = [i for i, p in enumerate(params) if p.edits_logits]
        self.all_greedy = all(greedy)
        self.any_greedy = any(greedy)
        self.greedy = torch.tensor(greedy, device=device) if self.any_greedy else None
        self.temperature = (
            torch.tensor(temperature, dtype=torch.float32, device=device)[:, None]
            if any(t != 1.0 for t in temperature)
            else None
        )
        # log(min_p): the test p >= min_p * max(p) reads z >= max(z) + log(min_p) on logits.
        self.log_min_p: torch.Tensor | None = None
        if any(m > 0 for m in min_p):
            logs = [math.log(m) if m > 0 else -math.inf for m in min_p]
            self.log_min_p = torch.tensor(logs, dtype=torch.float32, device=device)[:, None]
        sorted_rows = [i for i in range(len(params)) if top_k[i] < vocab_size or top_p[i] < 1.0]
        self.sorted_rows: torch.Tensor | None = None
        if sorted_rows:
            self.sorted_rows = torch.tensor(sorted_rows, device=device)
            self.top_k = torch.tensor([top_k[i] for i in sorted_rows], device=device)[:, None]
            # inf switches the row's nucleus off: rounding of a cumulative sum must not cut its tail.
            self.top_p = (
                torch.tensor(
                    [top_p[i] if top_p[i] < 1.0 else math.inf for i in sorted_rows], dtype=torch.float64, device=device
                )[:, None]
                if any(top_p[i] < 1.0 for i in sorted_rows)
                else None
            )


def _sort_ascending(values: torch.Tensor) -> torch.Tensor:
    # numpy sorts float32 rows an order of magnitude faster than torch on CPU
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values


def _truncate(logits: torch.Tensor, batch: BatchSampling) -> torch.Tensor:
    """Set the logits outside min_p, top_k and top_p to ``-inf``; ``logits`` are already divided by the temperature."""
    if batch.log_min_p is not None:
        floor = logits.amax(dim=-1, keepdim=True) + batch.log_min_p
        logits = logits.masked_fill(logits < floor, -math.inf)
    if batch.sorted_rows is not None:
        rows = logits[batch.sorted_rows]
        ordered = _sort_ascending(rows).flip(-1)
        drop = torch.arange(rows.shape[-1], device=rows.device)[None, :] >= batch.top_k
        if batch.top_p is not None:
            probs = ordered.masked_fill(drop, -math.inf).double().softmax(dim=-1)
            # the mass before an id decides: the id that crosses top_p stays in the nucleus
            drop |= probs.cumsum(dim=-1) - probs >= batch.top_p
        # Comparing with the smallest value kept avoids sorting the ids along; equal values are kept together.
        last_kept = (~drop).sum(dim=-1, keepdim=True) - 1
        rows = rows.masked_fill(rows < ordered.gather(-1, last_kept), -math.inf)
        logits = logits.index_copy(0, batch.sorted_rows, rows)
    return logits


def sample(
    raw: torch.Tensor,
    edited: torch.Tensor,
    batch: BatchSampling,
    uniforms: Sequence[float],
    logprobs_mode: str = "processed_logprobs",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row.

    Args:
        raw: ``(rows, vocab)`` float32, the model's logits.
        edited: the same after penalties and removed ids (steps 1 to 3); ``raw`` itself when there are none.
        batch: the rows' parameters.
        uniforms: one number in [0, 1) a row.
        logprobs_mode: one of :data:`LOGPROBS_MODES`.

    Returns:
        ``(tokens, logprobs)``: ``(rows,)`` int64, and of all ids ``(rows, vocab)`` float32.
    """
    scaled = edited if batch.temperature is None else edited / batch.temperature
    logp = torch.log_softmax(_truncate(scaled, batch), dim=-1)
    if batch.all_greedy:
        tokens = edited.argmax(dim=-1)
    else:
        cdf = logp.exp().cumsum(dim=-1, dtype=torch.float64)
        u = torch.tensor(uniforms, dtype=torch.float64, device=raw.device).clamp_(max=_MAX_UNIFORM)
        # right=True steps over ids of probability zero, whose CDF equals their predecessor's
        tokens = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True).squeeze(-1)
        # only NaN logits lead beyond the last id; their NaN log-probability tells the caller
        tokens.clamp_(max=raw.shape[-1] - 1)
        if batch.greedy is not None:
            tokens = torch.where(batch.greedy, edited.argmax(dim=-1), tokens)
    if logprobs_mode == "policy_logprobs":
        logp = torch.log_softmax(raw if batch.temperature is None else raw / batch.temperature, dim=-1)
    elif logprobs_mode == "raw_logprobs":
        logp = torch.log_softmax(raw, dim=-1)
    return tokens, logp


class LogitsNoise:
    """Normal noise on the logits of every step, for studies of a sampler that disagrees with the trainer.

    Args:
        deviation: of the noise; 0: none.
        below: only tokens whose probability is below it have the noise; 1: all tokens.
        seed: of the noise.

    Raises:
        ValueError: a deviation below 0 or not finite, or a probability outside of (0, 1].
    """

    def __init__(self, deviation: float, below: float, seed: int) -> None:
        if not (math.isfinite(deviation) and deviation >= 0):
            raise ValueError(f"logits_noise={deviation!r} must be a finite number of at least 0")
        if not 0 < below <= 1:
            raise ValueError(f"logits_noise_below={below!r} must be above 0 and at most 1")
        self.deviation, self.below = deviation, below
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits ``(rows, vocab)`` with noise; without a deviation themselves."""
        if self.deviation == 0:
            return logits
        noisy = logits + self.deviation * torch.randn(logits.shape, generator=self._generator).to(logits.device)
        return noisy if self.below == 1 else torch.where(logits.softmax(-1) < self.below, noisy, logits)
