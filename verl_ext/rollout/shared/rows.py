# SPDX-License-Identifier: Apache-2.0
"""From model calls to the outputs that verl stores: what the agent loops that make one output a call share.

A loop collects a :class:`ModelCall` for every answer of the model (:func:`generate`), fills its turn fields in
``fields`` and hands the list to :func:`make_rows`. A trajectory that failed before the model said anything is one
:func:`placeholder`, so that it is counted and its group keeps its size.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.utils.profiler import simple_timer

from verl_ext.common.log_filter import Once
from verl_ext.rollout.shared.scores import storable
from verl_ext.rollout.shared.template import chat_of
from verl_ext.rollout.shared.threads import threads

# verl makes a loop object for every trajectory, which says each time which token builder it takes.
logging.getLogger("verl.utils.tokenizer.continuous_token_wiring").addFilter(Once())
# verl's store says for each sequence that this machine has fewer cores than it would use.
logging.getLogger("transfer_queue.utils.common").addFilter(Once())

HOPELESS = 20
"""So many failed trajectories before the first good one are a mistake in what they play or in its settings."""
TOLD = 5
"""So many failures of each reason are written to the log of a process."""


@dataclass
class ModelCall:
    """One prompt and the model's answer to it.

    Attributes:
        prompt_ids: tokens of the prompt.
        response_ids: tokens of the answer, cut to the response length.
        response_logprobs: log-probability of each token of the answer under the sampler; None if not asked for.
        engine_fields: what the engine adds (``min_global_steps``, ``max_global_steps`` and so on).
        metrics: verl's timings of the call.
        fields: turn fields (methods' names: ``agent_id``, ``turn_reward``, ``anchor_obs``, ...).
        trained: False for a turn that is in no statistic and not in the loss (``valid_row`` False, mask 0).
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_logprobs: list[float] | None
    engine_fields: dict[str, Any] = field(default_factory=dict)
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    fields: dict[str, Any] = field(default_factory=dict)
    trained: bool = True


class Fates:
    """How the trajectories of one kind have ended in this process.

    Args:
        kind: what they play, for the log.
        logger: gets the first `TOLD` failures of each reason; the metrics count all.
    """

    def __init__(self, kind: str, logger: logging.Logger) -> None:
        self.kind, self.logger = kind, logger
        self.failures: Counter[str] = Counter()
        self.fine = False

    def note(self, failure: str, detail: str) -> bool:
        """Note how a trajectory ended; whether it is hopeless: at least `HOPELESS` have failed and none was good.

        Args:
            failure: in one word; empty for a trajectory that is as it should be.
            detail: what happened, for a person.
        """
        if not failure:
            self.fine = True
            return False
        self.failures[failure] += 1
        told = self.failures[failure]
        if told <= TOLD:
            more = "; further ones are counted in the metrics only" if told == TOLD else ""
            self.logger.warning("a trajectory in %s ended by %s: %s%s", self.kind, failure, detail, more)
        return not self.fine and self.failures.total() >= HOPELESS


def request_name(loop: AgentLoopBase, priority: int, session_id: Any) -> str:
    """The name under which a trajectory's requests go to the engine.

    One name for all calls of a trajectory keeps them on one server, where a common prefix is cached.
    """
    if loop.rollout_config.get("full_determinism", False):
        return f"det-{int(priority)}-{session_id}"
    return uuid4().hex


def tokens_of(loop: Any, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
    """Tokens of a chat, as :func:`encode` makes them; blocks this thread.

    Raises:
        Refusal: the chat template does not take it; its words.
    """
    return chat_of(loop.tokenizer, loop.continuous_token_builder).prompt(messages, tools)


async def encode(
    loop: AgentLoopBase, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """Tokens of a chat with the opening of the next answer, made outside the event loop.

    The chat template shows the schemas `tools`. Control tokens in the messages are what they are: see
    `verl_ext.rollout.shared.plain_text` for what others wrote.
    """
    build = functools.partial(tokens_of, loop, messages, tools)
    return await threads(loop.config, "tokenising").run(build)


async def decode(loop: AgentLoopBase, ids: Sequence[int]) -> str:
    """The text of an answer, without special tokens, made outside the event loop."""
    chat = chat_of(loop.tokenizer, loop.continuous_token_builder)
    return await threads(loop.config, "decoding").run(
        lambda: loop.tokenizer.decode(chat.unclosed(ids), skip_special_tokens=True)
    )


async def generate(
    loop: AgentLoopBase,
    request_id: str,
    prompt_ids: Sequence[int],
    sampling_params: Mapping[str, Any],
    priority: int = 0,
    *,
    limit: int | None = None,
) -> ModelCall:
    """Have the engine answer one prompt.

    Args:
        loop: the agent loop.
        request_id: see :func:`request_name`.
        prompt_ids: tokens of the prompt.
        sampling_params: temperature and so on, passed to the engine unchanged.
        priority: scheduling priority of the request.
        limit: tokens of the answer that are kept; None: ``rollout.response_length``.

    Returns:
        The call. ``response_ids`` is empty if the engine gave no token.

    Raises:
        RuntimeError: the engine cancelled the call, which nobody had asked for; or it says which experts it took
            (``rollout.enable_rollout_routing_replay``), which outputs do not carry.
        Exception: what the engine raises.
    """
    timing: dict[str, float] = {}
    try:
        with simple_timer("generate_sequences", timing):
            output = await loop.server_manager.generate(
                request_id=request_id,
                prompt_ids=list(prompt_ids),
                sampling_params=dict(sampling_params),
                priority=priority,
            )
    except asyncio.CancelledError as error:
        own = getattr(asyncio.current_task(), "cancelling", lambda: True)  # Python 3.10 can't tell
        if own():  # it is this trajectory that is cancelled
            raise
        raise RuntimeError("the engine cancelled the call") from error
    if getattr(output, "routed_experts", None) is not None:
        raise RuntimeError(
            "the engine returned routed experts, which the agent loops of verl_ext do not hand on. Set "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=false, or play with verl's own loops."
        )
    response_ids = list(output.token_ids[: limit or int(loop.rollout_config.response_length)])
    logprobs = [float(x) for x in output.log_probs[: len(response_ids)]] if output.log_probs is not None else None
    if response_ids and not logprobs:
        logprobs = None  # as verl's client of the asynchronous modes says it: an empty list
    preempted = -1 if output.num_preempted is None else int(output.num_preempted)
    return ModelCall(
        prompt_ids=list(prompt_ids),
        response_ids=response_ids,
        response_logprobs=logprobs,
        engine_fields=dict(output.extra_fields),
        metrics=AgentLoopMetrics(generate_sequences=timing["generate_sequences"], num_preempted=preempted),
    )


def placeholder(
    loop: AgentLoopBase, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], global_steps: Any
) -> ModelCall:
    """The single turn of a trajectory in which the model said nothing; in no statistic and not in the loss.

    Args:
        loop: the agent loop, for its tokenizer and ``rollout.prompt_length``.
        prompt_ids: any prompt; cut to the prompt length.
        sampling_params: log-probabilities are given exactly if these ask for them, as for answers of the engine.
        global_steps: the training step; the weights are taken to be those that the step before it left.
    """
    steps = max(int(global_steps or 0) - 1, 0)
    return ModelCall(
        prompt_ids=list(prompt_ids)[: int(loop.rollout_config.prompt_length)],
        response_ids=[int(loop.tokenizer.eos_token_id)],
        response_logprobs=[0.0] if sampling_params.get("logprobs") else None,
        engine_fields={"global_steps": steps, "min_global_steps": steps, "max_global_steps": steps},
        trained=False,
    )


def make_rows(
    calls: Sequence[ModelCall],
    *,
    outcome: float,
    info: Mapping[str, float],
    common: Mapping[str, Any] | None = None,
    failure: str = "",
) -> list[AgentLoopOutput]:
    """The turns of one trajectory, in the order of `calls`.

    Args:
        calls: at least one.
        outcome: reward of the trajectory; verl stores it on every turn (``reward_score``).
        info: numbers about the trajectory. verl reports them in validation, and training metrics
            ``trajectory/<name>`` are their means over the trajectories of a batch.
        common: fields that all turns share, such as ``stop_reason``.
        failure: why the trajectory ended before its time, in one word; counted as ``rollout/failures/<failure>``.
            Empty for a trajectory that is as it should be. Stored in the last turn.

    Returns:
        One output a call. ``extra_fields`` hold the engine's fields, `common`, the call's own fields, ``valid_row``,
        ``failure`` and ``reward_extra_info``.

    Raises:
        ValueError: no call, or an outcome or ``turn_reward`` that is not finite in float32.
    """
    if not calls:
        raise ValueError(
            "a trajectory without any model call has no turns; use verl_ext.rollout.shared.rows.placeholder"
        )
    turns = [call.fields["turn_reward"] for call in calls if "turn_reward" in call.fields]
    for what, reward in [("the outcome of a trajectory", outcome), *(("the reward of a turn", turn) for turn in turns)]:
        if not storable(reward):
            raise ValueError(f"{what} is {reward}; a reward must be finite, in float32 too")
    # verl builds the columns from the keys of the first turn, so all turns have them or none has.
    has_logprobs = all(call.response_logprobs is not None for call in calls)
    rows = []
    for index, call in enumerate(calls):
        rows.append(
            AgentLoopOutput(
                prompt_ids=call.prompt_ids,
                response_ids=call.response_ids,
                response_mask=[int(call.trained)] * len(call.response_ids),
                response_logprobs=call.response_logprobs if has_logprobs else None,
                multi_modal_data={},
                reward_score=float(outcome),
                num_turns=2 * (index + 1),
                metrics=call.metrics,
                extra_fields={
                    "turn_scores": [],
                    "tool_rewards": [],
                    **call.engine_fields,
                    **(common or {}),
                    **call.fields,
                    "valid_row": call.trained,
                    "failure": failure if index == len(calls) - 1 else "",
                    "reward_extra_info": {name: float(value) for name, value in info.items()},
                },
            )
        )
    return rows
