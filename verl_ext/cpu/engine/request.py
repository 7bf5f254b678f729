# SPDX-License-Identifier: Apache-2.0
"""A request on its way through the embedded engine, and the seed that it draws from."""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from verl_ext.cpu.engine.sampling import SamplingParams

__all__ = ["DefaultSeeds", "Request", "seed_from"]

#: Uniform numbers drawn from a request's generator at a time.
_UNIFORM_BLOCK = 64
#: Prompts whose occurrences are counted for default seeds; the oldest are forgotten beyond that.
_MAX_COUNTED_PROMPTS = 1 << 18
_SEED_MASK = 0x7FFF_FFFF_FFFF_FFFF


def seed_from(number: int) -> int:
    """Any integer as a seed that torch takes."""
    return number & _SEED_MASK


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine.

    Args:
        prompt_ids: token ids, not empty.
        params: sampling parameters.
        request_id: free name, used by :meth:`~verl_ext.cpu.engine.engine.GenerationEngine.abort`.

    Attributes:
        token_ids: sampled ids, the stop token included.
        logprobs: log-probability of each of them.
        top_logprobs: the engine's largest log-probabilities where each was sampled, float32 [K], and their ids, int32
            [K] (None: the whole vocabulary in order); empty unless the engine keeps them.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"`` once finished.
        error: set instead of ``finish_reason`` when the model failed.
        min_version, max_version: weight version at admission and at the end.
    """

    prompt_ids: list[int]
    params: SamplingParams
    request_id: str = ""
    seed: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[np.ndarray, np.ndarray | None]] = field(default_factory=list)
    finish_reason: str | None = None
    error: Exception | None = None
    min_version: int | None = None
    max_version: int | None = None
    _stop: frozenset[int] = frozenset()
    _generator: torch.Generator | None = None
    _uniforms: list[float] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """Key-value slots of the request at its full possible length."""
        return len(self.prompt_ids) + self.params.max_tokens

    def _next_uniform(self) -> float:
        if self.params.greedy:
            return 0.0
        if not self._uniforms:
            if self._generator is None:
                self._generator = torch.Generator().manual_seed(self.seed)
            block = torch.rand(_UNIFORM_BLOCK, generator=self._generator, dtype=torch.float64).tolist()
            block.reverse()
            self._uniforms = block
        return self._uniforms.pop()


class DefaultSeeds:
    """Seeds of requests without one, from (engine seed, weight version, prompt, how often it was seen at this version).

    The same prompts get the same set of samples in whatever order they arrive.

    Attributes:
        version: of the weights; see :meth:`set_version`.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed_from(seed)
        self._counts: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self.version: int | None = None

    def set_version(self, version: int | None) -> None:
        """Record a new weight version and restart the counts."""
        with self._lock:
            if version != self.version:
                self.version = version
                self._counts.clear()

    def next(self, prompt_ids: Sequence[int]) -> int:
        """The seed of the next request with this prompt."""
        with self._lock:
            version = -1 if self.version is None else self.version
            numbers = array("q", [self._seed, version, *prompt_ids])
            digest = hashlib.blake2b(numbers.tobytes(), digest_size=16).digest()
            count = self._counts.get(digest, 0)
            self._counts[digest] = count + 1
            if len(self._counts) > _MAX_COUNTED_PROMPTS:
                del self._counts[next(iter(self._counts))]
        final = hashlib.blake2b(digest + count.to_bytes(8, "little"), digest_size=8).digest()
        return seed_from(int.from_bytes(final, "little"))
