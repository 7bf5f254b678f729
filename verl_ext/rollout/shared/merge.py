# SPDX-License-Identifier: Apache-2.0
"""Turns of a trajectory that continue each other, token for token, as one sequence (``verl_ext.merge_turns``).

A loop gives one output a model call, each with all tokens before it as its prompt. Where the next prompt begins with
the prompt and the answer of an earlier call, the two become one sequence: that prompt, then the answers with mask 1 and
what lies between with mask 0. Nothing is tokenised again, so a history that was trimmed, rewritten or rendered anew
begins a new sequence; so do another agent or model, and a call with images. What each turn alone has said is kept under
``extra_fields["turns"]``, from which `verl_ext.integration.turns` makes the turns again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ext.integration.turns import PER_TOKEN, TURNS

if TYPE_CHECKING:  # whose import loads the plugin, which loads this
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

SUMS = ("generate_sequences", "tool_calls", "compute_score")
"""Of verl's timings of a call; a sequence has their sums."""

DRAFTS = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
"""Counts of speculative decoding, likewise."""


def merge(outputs: Sequence[AgentLoopOutput]) -> list[AgentLoopOutput]:
    """The sequences of one trajectory.

    Args:
        outputs: one a turn, in order, scored; the last one's ``reward_extra_info`` is the trajectory's.

    Returns:
        The outputs themselves where none continues another; otherwise a sequence each, in the order of their last
        turns, so that the last sequence holds the last turn.
    """
    chains: list[list[int]] = []
    ends: list[tuple[Any, list[int]]] = []  # of each chain: whose it is, and its tokens
    for place, output in enumerate(outputs):
        owner, prompt = _owner(output), output.prompt_ids
        found = [
            number
            for number, (other, tokens) in enumerate(ends)
            if owner is not None and other == owner and prompt[: len(tokens)] == tokens
        ]
        number = max(found, key=lambda one: len(ends[one][1]), default=len(chains))
        if number == len(chains):
            chains.append([])
            ends.append((owner, []))
        chains[number].append(place)
        ends[number] = (owner, prompt + output.response_ids)
    if len(chains) == len(outputs):
        return list(outputs)
    return [_sequence(outputs, chain) for chain in sorted(chains, key=lambda chain: chain[-1])]


def _owner(output: AgentLoopOutput) -> Any:
    """Whose tokens these are; None for a call that is a sequence of its own."""
    if any(one is not None for one in (output.multi_modal_data or {}).values()) or output.routed_experts is not None:
        return None
    said = output.extra_fields
    return said.get("agent_id"), said.get("model"), output.response_logprobs is None


def _sequence(outputs: Sequence[AgentLoopOutput], chain: Sequence[int]) -> AgentLoopOutput:
    turns = [outputs[place] for place in chain]
    prompt = turns[0].prompt_ids
    responses, mask, spans = list[int](), list[int](), list[list[int]]()
    log_probs: list[float] | None = None if turns[0].response_logprobs is None else []
    for turn in turns:
        between = turn.prompt_ids[len(prompt) + len(responses) :]
        trained = turn.extra_fields.get("valid_row") in (None, True)
        responses += between + turn.response_ids
        mask += [0] * len(between) + [int(trained and one) for one in turn.response_mask]
        if log_probs is not None:
            log_probs += [0.0] * len(between) + (turn.response_logprobs or [])
        spans.append([len(responses) - len(turn.response_ids), len(responses)])
    last, metrics = turns[-1], [turn.metrics for turn in turns]
    sums = {name: sum(getattr(one, name) for one in metrics) for name in SUMS}
    return last.model_copy(
        update={
            "prompt_ids": prompt,
            "response_ids": responses,
            "response_mask": mask,
            "response_logprobs": log_probs,
            "metrics": last.metrics.model_copy(update=sums),
            "extra_fields": _said(turns, chain, spans),
        }
    )


def _said(turns: Sequence[AgentLoopOutput], chain: Sequence[int], spans: list[list[int]]) -> dict[str, Any]:
    """What all turns have said alike as it is, and the rest a turn each; where verl reads a sequence's, the last
    turn's."""
    said = [turn.extra_fields for turn in turns]
    single = {"reward_extra_info", *PER_TOKEN}
    names = dict.fromkeys(name for one in said for name in one if name not in single)
    own = [name for name in names if not all(name in one and _same(one[name], said[0][name]) for one in said)]
    steps = {
        name: pick([one[name] for one in said if one.get(name) is not None], default=None)
        for name, pick in (("min_global_steps", min), ("max_global_steps", max))
        if name in names
    }
    steps |= {name: sum(one[name] for one in said) for name in DRAFTS if all(name in one for one in said)}
    sampled = [one for one in said if one.get("valid_row") in (None, True)]
    if "valid_row" in names:
        steps["valid_row"] = bool(sampled)
    tokens = {
        name: np.concatenate([one[name] for one in sampled])
        for name in PER_TOKEN
        if sampled and all(name in one for one in sampled)
    }
    layout = {
        "spans": spans,
        "places": list(chain),
        "own": [{name: one[name] for name in own if name in one} for one in said],
    }
    return {**said[-1], **steps, **tokens, TURNS: layout}


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, np.ndarray):
        return False
    try:
        return bool(one == other)
    except (ValueError, TypeError, RuntimeError):  # of arrays in it
        return False
