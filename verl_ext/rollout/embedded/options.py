# SPDX-License-Identifier: Apache-2.0
"""The embedded engine's own settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.workers.config import RolloutConfig

from verl_ext.rollout.embedded.sampling import LOGPROBS_MODES

__all__ = ["EmbeddedOptions"]


@dataclass(frozen=True)
class EmbeddedOptions:
    """``actor_rollout_ref.rollout.engine_kwargs.embedded``.

    Args:
        num_threads: torch threads of the server process.
        num_cpus: logical CPUs that Ray reserves for the server actor.
        max_batch_size: rows decoded at once; ``None`` takes ``rollout.max_num_seqs``.
        kv_cache_mb: bound on the key-value cache in MiB, at any time; a longest prompt and response must fit.
        weight_bucket_mb: size of one weight transfer in MiB; the smaller of this and
            ``rollout.checkpoint_engine.update_weights_bucket_megabytes`` holds.
        attn_implementation: ``sdpa`` or ``eager``.
        logprobs_mode: overrides ``rollout.logprobs_mode``; see :mod:`verl_ext.rollout.embedded.sampling`.
        mask_padded_vocab: never sample ids that the tokenizer does not have (verl's vLLM server does the same).
        logits_noise: standard deviation of noise on every logit, for studies of samplers that disagree with the
            trainer; 0, none, else.
        top_logprobs: so many largest log-probabilities at each position come back with every row that is sampled,
            greedy ones excepted, for ``algorithm.trm.divergence``, which sets it; -1: the whole vocabulary.

    Raises:
        ValueError: an unknown key or a value out of range.
    """

    num_threads: int = 1
    num_cpus: float = 0.1
    max_batch_size: int | None = None
    kv_cache_mb: int = 2048
    weight_bucket_mb: int = 64
    attn_implementation: str = "sdpa"
    logprobs_mode: str | None = None
    mask_padded_vocab: bool = True
    logits_noise: float = 0.0
    top_logprobs: int = 0

    @classmethod
    def from_config(cls, config: RolloutConfig) -> EmbeddedOptions:
        """Read and check the options of a rollout config."""
        where = "actor_rollout_ref.rollout.engine_kwargs.embedded"
        raw: Any = (config.engine_kwargs or {}).get("embedded") or {}
        if isinstance(raw, DictConfig):
            raw = OmegaConf.to_container(raw, resolve=True)
        allowed = [f.name for f in fields(cls)]
        unknown = sorted(set(raw) - set(allowed))
        if unknown:
            raise ValueError(f"{where} has unknown key(s) {unknown}; allowed: {allowed}")
        given = {k: v for k, v in raw.items() if v is not None}
        for name in ("num_threads", "max_batch_size", "kv_cache_mb", "weight_bucket_mb"):
            value = given.get(name, 1)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{where}.{name}={value!r} must be an integer of at least 1")
        noise = given.get("logits_noise", 0.0)
        if not isinstance(noise, int | float) or not 0 <= noise < math.inf:
            raise ValueError(f"{where}.logits_noise={noise!r} must be a finite number of at least 0")
        top = given.get("top_logprobs", 0)
        if not isinstance(top, int) or isinstance(top, bool) or top < -1:
            raise ValueError(f"{where}.top_logprobs={top!r} must be -1 (all), 0 (none) or the number of ids")
        if not isinstance(given.get("num_cpus", 0), int | float) or given.get("num_cpus", 0) < 0:
            raise ValueError(f"{where}.num_cpus={given['num_cpus']!r} must be a number >= 0")
        if given.get("attn_implementation", "sdpa") not in ("sdpa", "eager"):
            raise ValueError(f"{where}.attn_implementation={given['attn_implementation']!r} is neither sdpa nor eager")
        options = cls(**given)
        mode = options.logprobs_mode or config.logprobs_mode or "processed_logprobs"
        if mode not in LOGPROBS_MODES:
            name = f"{where}.logprobs_mode" if options.logprobs_mode else "actor_rollout_ref.rollout.logprobs_mode"
            raise ValueError(f"{name}={mode!r} is not one of {list(LOGPROBS_MODES)}")
        return options
