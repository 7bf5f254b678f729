# SPDX-License-Identifier: Apache-2.0
"""What an orchestration is made of: the task, calls and outcomes, and the team that one trajectory runs.

Nothing here knows verl. `verl_ext.rollout.orchestra.loop` connects it to the rollout engine and the trainer.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Protocol

from verl_ext.rollout.orchestra.agents import (
    EMPTY,
    MAX_CALLS,
    REWARD_ERROR,
    Agent,
    OrchestraFailure,
    Reply,
    read_answer,
)
from verl_ext.rollout.orchestra.branches import here, start
from verl_ext.rollout.retrieval import Retrieval, Retriever
from verl_ext.rollout.shared.contain import contained
from verl_ext.rollout.shared.scores import storable

Messages = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """What an orchestration may return when a number or a text does not say enough.

    Attributes:
        reward: reward of the whole trajectory; None: the run's reward function judges `answer`.
        answer: the team's answer.
        info: further numbers for verl's validation metrics, finite ones and booleans.
        rewards: a reward for each agent that was called, by name, instead of one for all; see the turn field
            ``agent_reward`` and ``lowest_reward`` of `orchestra`.
    """

    reward: float | None = None
    answer: str | None = None
    info: Mapping[str, float] = field(default_factory=dict)
    rewards: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.reward is None and self.answer is None and self.rewards is None:
            raise ValueError("Outcome needs a reward, one for each agent, or an answer for the reward function")


@dataclass(frozen=True)
class Result:
    """How a trajectory ended.

    Attributes:
        outcome: its reward.
        answer: the team's answer, if the orchestration named one.
        info: further numbers of the reward function and of the orchestration.
        summed: the outcome is the sum of the calls' own rewards.
        rewards: of each agent by name, where they have one each; the outcome is their mean.
    """

    outcome: float
    answer: str = ""
    info: Mapping[str, float] = field(default_factory=dict)
    summed: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Completion:
    """One model call as the engine made it.

    Attributes:
        response_ids: token ids of the answer; empty if the engine gave none.
        text: the decoded answer, without special tokens.
        truncated: the answer was cut at its longest length.
        prompt_tokens_cut: tokens taken off the prompt to make it fit.
        row: what the loop makes the turn of; a team only carries it.
        outside: tokens of an answer that a model outside of the run gave, which is no turn; None: one of the run's did.
    """

    response_ids: list[int]
    text: str
    truncated: bool = False
    prompt_tokens_cut: int = 0
    row: Any = None
    outside: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.response_ids) if self.outside is None else self.outside


@dataclass
class Call:
    """A finished call: who, in which place of the trajectory, on what prompt, with what answer.

    `received` is False for an answer that reached nobody: its turn is in no statistic and not trained on.
    """

    agent: Agent
    position: tuple[int, ...]
    completion: Completion
    reply: Reply
    received: bool = True


class Engine(Protocol):
    """What a team needs from the outside."""

    async def complete(self, agent: Agent, messages: list[dict[str, Any]]) -> Completion:
        """Answer `messages` as `agent`. Raises `OrchestraFailure` for what is this trajectory's own misfortune."""

    async def use_tools(
        self, agent: Agent, completion: Completion, messages: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Messages (the agent's own and the tools') that follow from the tool calls in an answer to `messages`; []
        without any."""

    async def score(self, task: Task, answer: str) -> tuple[float, dict[str, float]]:
        """Judge an answer with the run's reward function: (score, further numbers)."""


@dataclass(frozen=True)
class Task:
    """One prompt of the dataset, as an orchestration sees it.

    Attributes:
        messages: the row's chat messages.
        ground_truth: ``reward_model.ground_truth`` of the row, None if it has none.
        data_source: ``data_source`` of the row.
        extra_info: ``extra_info`` of the row.
    """

    messages: list[dict[str, Any]]
    ground_truth: Any = None
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    team: Team | None = field(default=None, repr=False)

    @property
    def question(self) -> str:
        """Content of the last user message."""
        users = [message for message in self.messages if message.get("role") == "user"]
        return str(users[-1]["content"]) if users else ""

    def count(self, failure: OrchestraFailure | str) -> None:
        """Count a failure that the orchestration has dealt with, so that it shows in the metrics."""
        _team(self).count(failure.reason if isinstance(failure, OrchestraFailure) else failure)

    async def score(self, answer: str) -> float:
        """The run's reward function on `answer`, for rewards of single calls.

        Raises OrchestraFailure: the function raised, gave no number that is finite in float32, or took too long.
        """
        return (await _team(self).judge(str(answer)))[0]

    async def search(self, query: str, top_k: int = 3) -> Retrieval:
        """Passages for `query` from the configured retriever; a failure is in the result, and counted.

        Raises RuntimeError: no retriever is configured.
        """
        team = _team(self)
        if team.retriever is None:
            raise RuntimeError(
                "this orchestration searches, but no retriever is configured: set verl_ext.orchestra.retriever, for "
                "example {kind: bm25, corpus: corpus.jsonl} or {kind: http, url: 'http://localhost:8000/retrieve'}"
            )
        (found,) = await team.retriever.search([query], top_k)
        if found.failure:
            team.count(found.failure)
        return found


def _team(task: Task) -> Team:
    if task.team is None:
        raise RuntimeError("this task belongs to no running team")
    return task.team


def as_messages(messages: Messages) -> list[dict[str, Any]]:
    """A text is one user message; a message is a conversation of one. Raises TypeError: something else was given."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    given: Any = [messages] if isinstance(messages, Mapping) else messages
    if isinstance(given, Sequence) and given and all(isinstance(message, Mapping) for message in given):
        return [dict(message) for message in given]
    raise TypeError(f"an agent takes a text or chat messages ({{role, content}}), not {messages!r:.80}")


@dataclass(frozen=True)
class BoundAgent:
    """An agent in a running trajectory: what an orchestration calls."""

    agent: Agent
    team: Team

    @property
    def name(self) -> str:
        """Name of the agent."""
        return self.agent.name

    def __call__(self, messages: Messages) -> Awaitable[Reply]:
        """Ask the agent. The turn's place in the trajectory is taken now, not when the answer comes.

        Args:
            messages: a text, a chat message, or a list of them. The role comes before them.

        Returns:
            An awaitable of the `Reply`. An agent with tools may make several calls (rows); the last is returned.

        Raises:
            OrchestraFailure: when awaited; see `REASONS`.
        """
        return self.team.converse(self.agent, as_messages(messages), here().next())


class Team:
    """One trajectory: keeps the calls that were made, counts what went wrong, and bounds both.

    `retriever` answers `Task.search`; the bounds are those of `OrchestraSettings`.
    """

    def __init__(
        self, engine: Engine, retriever: Retriever | None = None, max_calls: int = 64, max_tool_rounds: int = 4
    ) -> None:
        self.engine = engine
        self.retriever = retriever
        self.max_calls = max_calls
        self.max_tool_rounds = max_tool_rounds
        self.events: Counter[str] = Counter()
        self.fatal: BaseException | None = None
        self._task: Task | None = None
        self.finished: list[Call] = []
        self._started = 0
        self._open = True
        self._pending: set[asyncio.Future[Any]] = set()

    @property
    def calls(self) -> list[Call]:
        """Finished calls of the run's models, in the order of the turns."""
        return sorted(
            (call for call in self.finished if call.completion.outside is None), key=lambda call: call.position
        )

    def count(self, reason: str) -> None:
        """Count something that went wrong without ending the trajectory."""
        self.events[reason] += 1

    async def converse(self, agent: Agent, messages: list[dict[str, Any]], place: tuple[int, ...]) -> Reply:
        """A call, and those that follow from the tools that it uses. See `BoundAgent.__call__`."""
        call = await self.call(agent, messages, place)
        for turn in range(self.max_tool_rounds if agent.tools else 0):
            more = await self._while_open(self.engine.use_tools(agent, call.completion, messages))
            if not more:
                break
            call.reply.valid = True  # it has called tools: `read` is for answers
            messages = [*messages, *more]
            call = await self.call(agent, messages, (*place, turn))
        return call.reply

    async def call(self, agent: Agent, messages: list[dict[str, Any]], place: tuple[int, ...]) -> Call:
        """One model call, the turn at `place` of the trajectory. Raises as `play` does."""
        if self._started >= self.max_calls:
            raise OrchestraFailure(MAX_CALLS, f"more than verl_ext.orchestra.max_calls={self.max_calls} model calls")
        self._started += 1
        completion = await self._while_open(self.engine.complete(agent, messages))
        if not completion.tokens:
            self.count(EMPTY)
        reply = Reply(
            agent=agent.name,
            text=completion.text,
            tokens=completion.tokens,
            truncated=completion.truncated,
            valid=False,
            observation=messages[-1].get("content", ""),
        )
        call = Call(agent, place, completion, reply)
        self.finished.append(call)  # a turn, also if the reader raises on what the model wrote
        reply.value = read_answer(agent, completion.text)
        reply.valid = reply.value is not None and bool(completion.tokens)
        return call

    async def _while_open(self, work: Awaitable[Any]) -> Any:
        """Wait for outside work, which is cancelled when the trajectory ends before it."""
        future = asyncio.ensure_future(work)
        if not self._open:
            future.cancel()
            await asyncio.gather(future, return_exceptions=True)
            raise RuntimeError("an agent was called after its trajectory had ended")
        self._pending.add(future)
        try:
            return await future
        except OrchestraFailure:
            raise
        except Exception as error:
            # The engine itself failed: not this trajectory's misfortune, and no orchestration may hide it.
            self.fatal = error
            raise
        finally:
            self._pending.discard(future)

    async def judge(self, answer: str) -> tuple[float, dict[str, float]]:
        """The run's reward function on an answer: (score, further numbers).

        Raises OrchestraFailure: the function raised, gave no number that is finite in float32, or took too long.
        """
        assert self._task is not None
        score, info = await self.engine.score(self._task, answer)
        if not storable(score):
            detail = f"the reward function gave {score} (no finite number in float32) for the answer {answer!r:.200}"
            raise OrchestraFailure(REWARD_ERROR, detail)
        return score, info

    async def play(
        self, orchestration: Callable[..., Awaitable[Any]], task: Task, agents: Sequence[Agent], options: Mapping
    ) -> Result:
        """Run an orchestration to its end and settle the outcome.

        Raises:
            OrchestraFailure: a call or the judgement failed and the orchestration did not catch it.
            Exception: whatever the orchestration or the engine raises.
        """
        start()
        task = self._task = replace(task, team=self)
        try:
            with contained("the orchestration"):
                result = await orchestration(task, *(BoundAgent(agent, self) for agent in agents), **options)
        finally:
            await self.close()
        if self.fatal is not None:
            raise self.fatal
        return await self._settle(result)

    async def _settle(self, result: Any) -> Result:
        for call in self.finished:
            if _finite(call.reply.reward, f"gave an answer of agent {call.agent.name}") and call not in self.calls:
                raise TypeError(f"an orchestration rewarded agent {call.agent.name}, whose model is not of this run")
        settled = await self._result(result)
        ends = list(settled.rewards.values()) or ([] if settled.summed else [settled.outcome])
        amounts = [abs(float(reward)) for reward in [*(call.reply.reward for call in self.calls), *ends]]
        _finite(
            sum(amounts), "gave, for calls and outcome together and without their signs,"
        )  # a turn has a sum of some
        return settled

    async def _result(self, result: Any) -> Result:
        if result is None:
            return Result(_finite(sum(call.reply.reward for call in self.calls)), summed=True)
        if isinstance(result, Reply):
            raise TypeError("an orchestration returned a Reply: return its text (to be judged), a reward or an Outcome")
        if isinstance(result, str):
            result = Outcome(answer=result)
        if not isinstance(result, Outcome):
            return Result(_finite(result))
        info = _numbers(result.info)
        if result.rewards is not None:
            rewards = {name: _finite(reward) for name, reward in result.rewards.items()}
            called = {call.agent.name for call in self.calls}
            if lacking := sorted(called - set(rewards)):
                raise ValueError(
                    f"Outcome(rewards=...) has no reward for the agent {lacking[0]}, which was called; it has some "
                    f"for: {', '.join(rewards) or 'nobody'}"
                )
            earned = [rewards[name] for name in called] or [0.0]
            return Result(fmean(earned), result.answer or "", info, rewards=rewards)
        if result.reward is not None:
            return Result(_finite(result.reward), result.answer or "", info)
        score, more = await self.judge(str(result.answer))
        return Result(score, str(result.answer), {**more, **info})

    async def close(self) -> None:
        """End the trajectory: calls under way are cancelled, later ones refused."""
        self._open = False
        pending = list(self._pending)
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def _numbers(info: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an outcome. Raises ValueError: one is none, or not finite; names its key."""
    for name, value in info.items():
        try:
            finite = math.isfinite(value)
        except Exception:  # whatever a value may be
            finite = False
        if not finite:
            kind = type(value).__name__
            raise ValueError(f"Outcome(info=...) takes finite numbers and booleans; its {name!r} ({kind}) is none")
    return {name: float(value) for name, value in info.items()}


def _finite(value: Any, did: str = "returned") -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise TypeError(
            f"an orchestration {did} {value!r:.80}: return a reward (number), an answer (text), an Outcome, or None "
            "for the sum of its calls' rewards"
        ) from None
    if not storable(number):
        raise ValueError(f"an orchestration {did} the reward {number}; a reward must be finite, in float32 too")
    return number
