# SPDX-License-Identifier: Apache-2.0
"""The agent loop of the gateway: a user's own agent plays, and each of its requests is a turn.

Selected by the recipe ``gateway``, ``actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_gateway`` or the data
column ``agent_name``. It is the loop of orchestras (`verl_ext.rollout.orchestra.loop`, which has the turn fields, the
prompts, the judgement and what happens to failures) with one thing different: the calls come over HTTP (`server`), from
a function or a program that knows nothing of verl (`agent`). Turns are those of the same agent as an orchestra.

Turn fields beside those: ``sampling``, the parameters of the request that were not the run's
(``verl_ext.gateway.sampling=record``). Turns are in the order in which the requests came.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.tools.schemas import OpenAIFunctionToolSchema

from verl_ext.integration.settings.options import OptionError
from verl_ext.rollout.gateway import settings
from verl_ext.rollout.gateway.agent import (
    AGENT_ERROR,
    AGENT_TIMEOUT,
    MAX_BYTES,
    Door,
    Playing,
    outcome_of,
    plain_task,
    run_command,
)
from verl_ext.rollout.gateway.protocol import FIXED, SAMPLING, Answer, Asked, Refused
from verl_ext.rollout.gateway.server import Session, gateway
from verl_ext.rollout.orchestra import agents, core, prompts
from verl_ext.rollout.orchestra.agents import POLICY, Agent, OrchestraFailure
from verl_ext.rollout.orchestra.core import Task
from verl_ext.rollout.orchestra.loop import OrchestraLoop
from verl_ext.rollout.orchestra.registry import Orchestra
from verl_ext.rollout.orchestra.settings import Lineup
from verl_ext.rollout.orchestra.voices import Voice
from verl_ext.rollout.shared.per_config import once
from verl_ext.rollout.shared.plain_text import PlainText
from verl_ext.rollout.shared.probes import words
from verl_ext.rollout.shared.template import Chat
from verl_ext.rollout.shared.threads import HeldThreads, threads
from verl_ext.rollout.shared.tools import linear_parser, read_calls

AGENT_NAME = "verl_ext_gateway"

MOST_AGENTS = 32
"""Names that the agents of one trajectory may have: each is a series of metrics."""


@dataclass(frozen=True)
class Caller(Agent):
    """An agent as one request has it. Its name may be any that a model can have."""

    asked: Asked | None = None

    def __post_init__(self) -> None:
        """The name was checked with the request."""


class GatewayLoop(OrchestraLoop):
    """Plays one trajectory of a user's agent. See the module's text.

    Raises OptionError: a key or value that ``verl_ext.gateway`` does not take.
    """

    kind = "the agent"
    where = settings.WHERE
    reasons = (*agents.REASONS, AGENT_ERROR, AGENT_TIMEOUT, MAX_BYTES)
    settings: settings.GatewaySettings  # type: ignore[assignment]

    def _prepare(self, entry: dict[str, Any]) -> None:
        if entry:
            raise OptionError(f"the agent loop {AGENT_NAME} takes no {min(entry)}; its keys stand at {self.where}")
        self.settings = once(self.config, "gateway", lambda: settings.read(self.config))
        self.retriever = None
        self._calls: dict[str, core.Call] = {}
        self._names: Counter[str] = Counter()
        self._arrived = 0
        self._changed = self._rewarded = 0
        self._session: Session | None = None

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The run's sampling parameters, now (validation has its own) and in training."""
        training = {name: self.rollout_config.get(name) for name in SAMPLING}
        return [self._sampling, {name: value for name, value in training.items() if value is not None}]

    def _lineup(self, name: str | None) -> Lineup:
        played = Orchestra(self.settings.played, self._play_agent, (), {}, {})
        return Lineup(played, (Caller(self.settings.agent_id),), {})

    # The agent.

    async def _play_agent(self, task: Task, *_: Any) -> Any:
        """Have the agent play, until it has a result, fails, or has used up what it may."""
        here, limit = gateway(self.settings.host), self.settings.agent_timeout_s
        with here.session(self) as session:
            self._session = session
            door = Door(here.base_url, session.key, self.settings.agent_id)
            work = asyncio.ensure_future(self._run_agent(plain_task(task), door))
            try:
                await asyncio.wait({work, session.over}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if session.over.done():
                    raise session.over.result()
                if not work.done():
                    raise OrchestraFailure(AGENT_TIMEOUT, f"no result within {self.where}.agent_timeout_s={limit}")
                assert self._team is not None
                await session.settle()
                result = work.result()
                outcome = outcome_of(result, self._team, self._calls)
                self._rewarded = len(result.get("rewards") or ()) if isinstance(result, Mapping) else 0
                return outcome
            except HeldThreads as error:
                if self._team is not None:
                    self._team.fatal = error  # no agent can be begun any more
                raise
            except OrchestraFailure as failure:
                raise (session.failed if failure.reason == AGENT_ERROR else None) or failure from None
            except Exception as error:
                raise session.failed or OrchestraFailure(AGENT_ERROR, f"{type(error).__name__}: {error}") from error
            finally:
                work.cancel()
                await asyncio.wait({work}, timeout=5.0)

    async def _run_agent(self, task: Mapping[str, Any], door: Door) -> Any:
        chosen = self.settings
        if chosen.command:
            return await run_command(chosen, task, door)
        playing = Playing(settings.load(chosen.agent or ""), task, door)
        try:
            return await threads(self.config, "agents").run(playing.run)
        finally:
            playing.stop()

    # Its requests (server.Trajectory).

    async def answer(self, asked: Asked) -> Answer:
        """Make the call that a request asks for: one turn.

        Raises:
            Refused: it asks for what it may not have.
            OrchestraFailure: the call failed.
            Exception: what the engine raised.
        """
        caller = self._caller(asked)
        team, place = self._team, (self._arrived,)
        assert team is not None
        self._arrived += 1
        call = await team.call(caller, asked.messages, place)
        name = f"{'chatcmpl' if asked.prompt is None else 'cmpl'}-{uuid4().hex}"
        self._calls[name] = call
        ids, row = call.completion.response_ids, call.completion.row
        chat, tokenizer = self.voices[caller.model].chat, self.voices[caller.model].tokenizer
        text, tool_calls = await self._tool_calls(chat, asked, ids, call.completion.text)
        finish = "length" if call.completion.truncated else "stop"
        return Answer(
            id=name,
            asked=asked,
            text=text,
            finish="tool_calls" if tool_calls else finish,
            prompt_tokens=len(row.prompt_ids),
            tokens=len(ids),
            cached=row.engine_fields.get("num_cached_tokens"),
            tool_calls=tool_calls,
            logprobs=await self._logprobs(tokenizer, ids, row.response_logprobs) if asked.logprobs else None,
        )

    def lose(self, name: str) -> None:
        """The answer with this id has reached nobody: its turn is not trained on."""
        self._calls[name].received = False

    def _caller(self, asked: Asked) -> Caller:
        chosen = self.settings
        try:
            named = chosen.named(asked.agent)
        except OptionError as error:
            raise Refused(str(error), 404, "model_not_found") from None
        if asked.agent not in self._names and len(self._names) >= MOST_AGENTS:
            raise Refused(f"more than {MOST_AGENTS} names of agents in one trajectory")
        asks = [*asked.sampling, *asked.fixed]
        refused = asks if chosen.sampling == "refuse" else asked.fixed if chosen.sampling == "record" else ()
        if refused:
            runs = {**SAMPLING, **{name: values[0] for name, values in FIXED.items() if values}, **self.runs[-1]}
            raise Refused(
                f"{refused[0]} is not the run's{f' ({runs[refused[0]]})' if refused[0] in runs else ''}, and what is "
                f"sampled so is not what is trained. Leave it out, or set {self.where}.sampling=ignore"
                + ("" if refused[0] in FIXED else ", or record")
            )
        if asked.seed is not None and self.rollout_config.get("name") == "sglang":
            raise Refused("seed can't be had from sglang")
        if isinstance(asked.prompt, list):
            size = self.voices[named.model].chat.size
            if not all(0 <= token < size for token in asked.prompt):
                raise Refused(f"a token id of the prompt is not in the vocabulary of {size}")
        self._names[asked.agent] += 1
        self._changed += bool(asks)
        limit = min(filter(None, (named.max_tokens, asked.limit)), default=None)
        ends = functools.partial(_first, asked.stop) if asked.stop else None
        return Caller(asked.agent, model=named.model, max_tokens=limit, ends=ends, asked=asked)

    async def _tool_calls(
        self, chat: Chat, asked: Asked, ids: Sequence[int], text: str
    ) -> tuple[str, list[dict[str, Any]]]:
        """The answer's text without its tool calls, and these as OpenAI's messages have them."""
        if not asked.tools:
            return text, []
        parser = linear_parser(self.tools[POLICY].options.get("format") or "hermes", chat.tokenizer)
        ids = ids if self.settings.read_thinking else chat.spoken(ids)
        content, found = await read_calls(parser, ids, _for_parser(asked.tools))
        if not found:
            return text, []
        functions = [
            {"name": _sendable(call.name), "arguments": _sendable(call.arguments)}
            for call in found[: 1 if asked.one_tool else None]
        ]
        return content[: _first(asked.stop, content)], [
            {"id": uuid4().hex[:9], "type": "function", "function": function} for function in functions
        ]

    async def _logprobs(
        self, tokenizer: Any, ids: Sequence[int], logprobs: Sequence[float] | None
    ) -> list[tuple[str, float]]:
        decode = functools.partial(tokenizer.batch_decode, [[token] for token in ids])
        texts = await threads(self.config, "decoding").run(decode)
        return list(zip(texts, logprobs or [], strict=bool(logprobs)))

    # What is different in a call.

    async def _counted(self, voice: Voice, ids: Sequence[int], text: str, ended: Agent | None) -> str:
        return text  # the agent gets what the model wrote, and may want its thinking

    def _sampling_of(self, agent: Agent) -> dict[str, Any]:
        asked = _asked(agent)
        sampling = {**self._sampling, **(asked.sampling if self.settings.sampling == "record" else {})}
        if asked.seed is not None:
            sampling["seed"] = asked.seed
        return {**sampling, "logprobs": True} if asked.logprobs else sampling

    def _schemas(self, agent: Agent) -> list[dict[str, Any]]:
        if self.settings.tools_in_prompt:
            return []
        plain = PlainText(self.voices[agent.model].tokenizer)
        made = [plain.message(tool) for tool in _asked(agent).tools]
        self._split += plain.split
        return made

    def _prompt(self, agent: Agent, messages: list[dict[str, Any]]) -> tuple[list[int], int, int]:
        prompt = _asked(agent).prompt
        if prompt is None:
            try:
                return super()._prompt(agent, messages)
            except OrchestraFailure:
                raise
            except Exception as error:  # such as two messages of the user in a row
                raise OrchestraFailure(
                    AGENT_ERROR, f"the model's chat template can't take them: {words(error)}"
                ) from error
        voice = self.voices[agent.model]
        plain, limit = PlainText(voice.tokenizer), voice.prompt_length
        if len(prompt) > prompts.CHARACTERS_A_TOKEN * limit:
            raise OrchestraFailure(agents.OVERLONG, f"the prompt can't have rollout.prompt_length={limit} tokens only")
        ids = prompt if isinstance(prompt, list) else list(voice.tokenizer.encode(plain.text(prompt)))
        if len(ids) > limit:
            detail = f"the prompt has {len(ids)} tokens, more than rollout.prompt_length={limit}"
            raise OrchestraFailure(agents.OVERLONG, detail)
        return ids, 0, plain.split

    # Turns.

    async def _rows(self, team: core.Team, *args: Any) -> list[AgentLoopOutput]:
        outputs = await super()._rows(team, *args)
        noted = self.settings.sampling == "record"
        asked = [_asked(call.agent).sampling if noted else {} for call in team.calls] or [{}]
        for output, sampling in zip(outputs, asked, strict=True):
            output.extra_fields["sampling"] = dict(sampling)
        return outputs

    def _numbers(self, calls: Sequence[core.Call], lineup: Lineup, *args: Any) -> dict[str, float]:
        seen = dict.fromkeys(call.agent.name for call in calls)
        lineup = dataclasses.replace(lineup, agents=tuple(Caller(name) for name in seen) or lineup.agents)
        session = self._session
        counts = (session.refused, session.lost, session.retries) if session is not None else (0, 0, 0)
        numbers = dict(zip(("requests_refused", "calls_lost", "retries"), map(float, counts), strict=True))
        numbers.update(calls_rewarded=float(self._rewarded), sampling_changed=float(self._changed))
        return {**super()._numbers(calls, lineup, *args), **numbers}


def _first(stops: Sequence[str], text: str) -> int | None:
    """Where the first stop text begins."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def _sendable(text: str) -> str:
    """A lone surrogate, which JSON can spell and UTF-8 can't, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _asked(agent: Agent) -> Asked:
    assert isinstance(agent, Caller) and agent.asked is not None
    return agent.asked


def _for_parser(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Tools as verl's parsers take them, which need their types only; none where one says more than verl's can hold."""
    try:
        return [OpenAIFunctionToolSchema.model_validate(tool) for tool in tools]
    except ValueError:
        return []
