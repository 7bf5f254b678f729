# SPDX-License-Identifier: Apache-2.0
"""Who speaks in an orchestra: agents, their demonstrations and replies, and the names of what can go wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.integration.settings.model_options import POLICY

#: Reasons for which a trajectory or a part of it can fail. They are counted in the metrics under these names.
ERROR = "error"  # the orchestration raised
ENGINE_TIMEOUT = "call_timeout"  # one call took longer than call_timeout_s
ENDPOINT_ERROR = "endpoint_error"  # a model that somebody else serves gave no answer
TIME_LIMIT = "time_limit"  # the trajectory took longer than time_limit_s
MAX_CALLS = "max_calls"
OVERLONG = "overlong_prompt"  # the prompt does not fit and may not (or can't) be shortened
REWARD_ERROR = "reward_error"
REWARD_TIMEOUT = "reward_timeout"
TOOL_ERROR = "tool_error"
RETRIEVER_TIMEOUT = "retriever_timeout"
RETRIEVER_ERROR = "retriever_error"
EMPTY = "empty_response"  # the engine returned no token
REASONS = (
    *(ERROR, ENGINE_TIMEOUT, ENDPOINT_ERROR, TIME_LIMIT, MAX_CALLS, OVERLONG),
    *(REWARD_ERROR, REWARD_TIMEOUT, TOOL_ERROR, RETRIEVER_TIMEOUT, RETRIEVER_ERROR, EMPTY),
)


class OrchestraFailure(Exception):
    """A call that could not be made or a judgement that could not be had. Uncaught, it ends its own trajectory.

    Attributes:
        reason: one of `REASONS`, or a short name of your own.
        detail: one line for a person.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Example:
    """A demonstration: one message to an agent and the answer it should give.

    Attributes:
        user: the message, in the form in which the orchestration would put it.
        assistant: the answer.
    """

    user: str
    assistant: str

    def __post_init__(self) -> None:
        for name in ("user", "assistant"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} is {value!r}; give text")


def as_examples(given: Any) -> tuple[Example, ...]:
    """Demonstrations of a list of `Example` or ``{user, assistant}``.

    Raises ValueError: something else was given; the message numbers the example, from 1.
    """
    if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
        raise ValueError(f"examples are {given!r:.80}; give a list of {{user: ..., assistant: ...}}")
    made = []
    for number, one in enumerate(given, start=1):
        if isinstance(one, Example):
            made.append(one)
            continue
        if not isinstance(one, Mapping) or set(one) != {"user", "assistant"}:
            raise ValueError(f"example {number} is {one!r:.80}; give {{user: ..., assistant: ...}}")
        try:
            made.append(Example(**one))
        except ValueError as error:
            raise ValueError(f"example {number}: {error}") from error
    return tuple(made)


@dataclass(frozen=True)
class Agent:
    """A member of a team. Usually made by the decorator `verl_ext.rollout.orchestra.agent`.

    Attributes:
        name: the turn field ``agent_id``; an identifier.
        role: what the agent is told it is and does; comes before the messages of every call. May be empty.
        read: takes the text of an answer and returns what it says. If it can't be read it returns None or raises
            ValueError, which makes the turn ``is_action_valid=False`` unless tools were called in it. None: the value
            of an answer is its text.
        tools: names of tools that the agent may call by itself: verl's (``rollout.multi_turn.tool_config_path``,
            ``function_tool_path``) or functions under verl's decorator ``function_tool``.
        model: name of the model that answers: `POLICY`, or one of ``verl_ext.models``.
        max_tokens: bound on the answer, on top of ``rollout.response_length``.
        ends: takes the text of an answer and returns the length with which it is over, None if it may go on. What the
            engine gave beyond is no part of the turn. None: the engine's end is the answer's.
        examples: demonstrations, chat turns between the role and the messages of every call. `read` must accept their
            answers (an agent with tools may show a tool call instead).
    """

    name: str
    role: str = ""
    read: Callable[[str], Any] | None = None
    tools: tuple[str, ...] = ()
    model: str = POLICY
    max_tokens: int | None = None
    ends: Callable[[str], int | None] | None = None
    examples: tuple[Example, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"agent name {self.name!r}: use an identifier, such as 'solver'")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"agent {self.name}: max_tokens={self.max_tokens} must be at least 1")
        for number, example in enumerate(self.examples, start=1):
            if self.tools:
                continue
            why = ""
            try:
                value = read_answer(self, example.assistant)
            except Exception as error:
                value, why = None, f" ({type(error).__name__}: {error})"
            if value is None:
                raise ValueError(
                    f"agent {self.name}: the answer of example {number}, {example.assistant!r:.80}, can't be read by "
                    f"the agent's own function: an agent that copies it would make no valid action{why}"
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"agent {self.name!r} answers inside a trajectory only: take it as a parameter of the orchestration, "
            f"`async def my_team(task, {self.name})`, and call that"
        )


@dataclass
class Reply:
    """What an agent answered. One reply is one turn; the orchestration may set the last three before it ends.

    Attributes:
        agent: name of the agent.
        text: the decoded answer, without special tokens.
        value: what the agent's ``read`` made of it; None if it could not be read.
        tokens: number of response tokens.
        truncated: the answer was cut at its longest length.
        valid: the turn field ``is_action_valid``; from the start, whether ``value`` is not None or tools were called.
        reward: reward of this call alone, on top of the outcome. See `Outcome`.
        observation: the turn field ``anchor_obs``; from the start, the content of the last message given.
    """

    agent: str
    text: str
    value: Any = None
    tokens: int = 0
    truncated: bool = False
    valid: bool = True
    reward: float = 0.0
    observation: Any = ""

    def __str__(self) -> str:
        return self.text


def read_answer(agent: Agent, text: str) -> Any:
    """What an answer says to the agent that gave it; None if it can't be read."""
    if agent.read is None:
        return text
    try:
        return agent.read(text)
    except ValueError:
        return None
