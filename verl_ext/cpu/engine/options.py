# SPDX-License-Identifier: Apache-2.0
"""The embedded engine's own settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from verl.workers.config import RolloutConfig

from verl_ext.cpu.engine.sampling import LOGPROBS_MODES
from verl_ext.integration.settings.options import OptionError, read, select
from verl_ext.methods.options import AtLeastOne, NotNegative

__all__ = ["EmbeddedOptions"]


def _count_or_all(value: int) -> str | None:
    return None if value >= -1 else "it must be -1 (all), 0 (none) or the number of ids"


def _share(value: float) -> str | None:
    return None if 0 < value <= 1 else "it must be above 0 and at most 1"


@dataclass(frozen=True)
class EmbeddedOptions:
    """``actor_rollout_ref.rollout.engine_kwargs.embedded``.

    Args:
        num_threads: torch threads of the server process.
        num_cpus: logical CPUs that Ray reserves for the server actor.
        max_batch_size: sequences decoded at once; ``None`` takes ``rollout.max_num_seqs``.
        kv_cache_mb: bound on the key-value cache in MiB, at any time; a longest prompt and response must fit.
        weight_bucket_mb: size of one weight transfer in MiB; the smaller of this and
            ``rollout.checkpoint_engine.update_weights_bucket_megabytes`` holds.
        attn_implementation: ``sdpa`` or ``eager``.
        logprobs_mode: overrides ``rollout.logprobs_mode``; see :mod:`verl_ext.cpu.engine.sampling`.
        mask_padded_vocab: never sample ids that the tokenizer does not have (verl's vLLM server does the same).
        logits_noise: standard deviation of noise on every logit, for studies of samplers that disagree with the
            trainer; 0, none, else.
        logits_noise_below: only tokens whose probability is below it have that noise; 1: all tokens.
        top_logprobs: so many largest log-probabilities at each position come back with every answer that is sampled,
            greedy ones excepted, for ``algorithm.trm.divergence``, which sets it; -1: the whole vocabulary.

    Raises:
        OptionError: an unknown key or a value out of range.
    """

    num_threads: AtLeastOne = 1
    num_cpus: NotNegative = 0.1
    max_batch_size: AtLeastOne | None = None
    kv_cache_mb: AtLeastOne = 2048
    weight_bucket_mb: AtLeastOne = 64
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    logprobs_mode: str | None = None
    mask_padded_vocab: bool = True
    logits_noise: NotNegative = 0.0
    logits_noise_below: Annotated[float, _share] = 1.0
    top_logprobs: Annotated[int, _count_or_all] = 0

    @classmethod
    def from_config(cls, config: RolloutConfig) -> EmbeddedOptions:
        """Read and check the options of a rollout config."""
        where = "actor_rollout_ref.rollout.engine_kwargs.embedded"
        given = {
            name: value for name, value in (select(config.engine_kwargs, "embedded") or {}).items() if value is not None
        }
        options = read({"embedded": given}, "embedded", cls, where=where)
        mode = options.logprobs_mode or config.logprobs_mode or "processed_logprobs"
        if mode not in LOGPROBS_MODES:
            name = f"{where}.logprobs_mode" if options.logprobs_mode else "actor_rollout_ref.rollout.logprobs_mode"
            raise OptionError(f"{name}={mode!r} is not one of {list(LOGPROBS_MODES)}")
        return options
