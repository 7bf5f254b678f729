# SPDX-License-Identifier: Apache-2.0
"""What a micro-batch of verl's engine says beside its tensors, and which of its tokens are the response."""

from __future__ import annotations

from typing import Any

import torch

#: "on": log-probabilities and what goes with them come from one pass over the logits.
ONE_PASS = "verl_ext_one_pass"


def said(micro_batch: Any, key: str, default: Any) -> Any:
    from verl.utils import tensordict_utils as tu

    return tu.get_non_tensor_data(data=micro_batch, key=key, default=default)


def positions(offsets: torch.Tensor, response_lengths: torch.Tensor) -> torch.Tensor:
    """[tokens] bool: the positions whose output belongs to a response token (the one before it)."""
    ends = offsets[1:] - 1
    lengths = offsets.diff()
    place = torch.arange(int(offsets[-1]), device=offsets.device)
    end = torch.repeat_interleave(ends, lengths)
    return (place < end) & (place >= end - torch.repeat_interleave(response_lengths.to(offsets.device), lengths))


def response_positions(micro_batch: Any) -> torch.Tensor | None:
    """[tokens] bool, or None (all) where the batch does not say which tokens are the response."""
    prompts, responses = micro_batch.get("prompts", None), micro_batch.get("responses", None)
    if not all(isinstance(part, torch.Tensor) and part.is_nested for part in (prompts, responses)):
        return None
    offsets = micro_batch["input_ids"].offsets()
    prompt, response = (part.offsets().diff().to(offsets.device) for part in (prompts, responses))
    if bool((prompt + response != offsets.diff()).any()) or bool((prompt == 0).any()):
        return None
    return positions(offsets, response)


def full(logits: Any) -> torch.Tensor:
    """Logits sharded over the vocabulary by tensor parallelism are gathered, as verl does."""
    return logits.full_tensor() if hasattr(logits, "full_tensor") else logits
