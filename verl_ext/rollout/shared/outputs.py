# SPDX-License-Identifier: Apache-2.0
"""What an agent loop has returned, whoever wrote it: checked before it is scored, and completed before it is stored.

verl finds most of it out a step later and in other words: a turn without the versions of its weights ends the first
step with ``int() ... NoneType``, one without ``reward_extra_info`` the trajectory with a ``KeyError``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_ext.integration.settings.options import select

STEPS = ("min_global_steps", "max_global_steps")


def check(outputs: Sequence[Any]) -> None:
    """Raises ValueError: an output cannot be stored; says which and what to give."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    for place, output in enumerate(outputs):
        where = f"output {place} of the agent loop"
        if not isinstance(output, AgentLoopOutput):
            raise ValueError(
                f"{where} is a {type(output).__name__}; run() returns an AgentLoopOutput or a list of them"
            )
        tokens = len(output.response_ids)
        if not tokens:
            raise ValueError(f"{where} has no response_ids; leave out a call to which the engine gave no token")
        if len(output.response_mask) != tokens:
            raise ValueError(f"{where} has {tokens} response_ids and a response_mask of {len(output.response_mask)}")
        log_probs = output.response_logprobs
        if log_probs is not None and len(log_probs) != tokens:
            raise ValueError(f"{where} has {tokens} response_ids and {len(log_probs)} response_logprobs")
        if (log_probs is None) != (outputs[0].response_logprobs is None):
            raise ValueError(
                "some outputs of the agent loop have response_logprobs and some have None; give all or none"
            )


def complete(config: Any, outputs: Sequence[Any], step: int) -> None:
    """Fill in, in place, what verl reads of every output: ``num_turns``, ``reward_extra_info``, and the versions of the
    weights where they follow from the training step. Raises ValueError: they don't, and what to give."""
    known = select(select(config.trainer, "v1"), "trainer_mode", "sync") == "sync"
    for place, output in enumerate(outputs):
        if "num_turns" not in output.model_fields_set:  # what is not set is not stored, and verl's metrics want it
            output.num_turns = 2 * (place + 1)
        said = output.extra_fields
        said.setdefault("reward_extra_info", {})
        lacking = [name for name in STEPS if said.get(name) is None]
        if lacking and not known:
            raise ValueError(
                f"output {place} of the agent loop has no {' and no '.join(lacking)} in extra_fields, and the weights "
                "change while rollouts run (trainer.v1.trainer_mode). Put the extra_fields of the engine's answer into "
                "it: extra_fields={**answer.extra_fields, ...}."
            )
        said.update(dict.fromkeys(lacking, max(step - 1, 0)))  # those that the step before has left
