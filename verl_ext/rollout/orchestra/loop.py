# SPDX-License-Identifier: Apache-2.0
"""The agent loop that plays an orchestra: verl hands it a prompt, it returns one output (row) for each agent call.

Selected by ``actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra`` or the data column ``agent_name``.
Which orchestra: the data column ``orchestra``, or else ``verl_ext.orchestra.name`` (`OrchestraSettings` lists all
keys), or the entry of an agent loop config::

    - name: my_team
      _target_: verl_ext.rollout.orchestra.loop.OrchestraLoop
      orchestra: solver_verifier
      options: {max_loops: 3}

Turn fields in ``extra_fields``: ``agent_id``, ``turn_reward`` (the call's own reward; the last call's also has the
outcome, so that a trajectory's turns sum to everything it earned; where agents have a reward each, it is in the last
call of each, and in ``agent_reward`` of all of its turns), ``is_action_valid``, ``valid_row``, ``anchor_obs``.
For reading: ``orchestra``, ``model``, ``answer``, ``prompt_tokens_cut``, and in the last turn ``failure`` (why the
trajectory failed, ``""`` when it did not), ``failure_detail`` and ``failures`` (counts by reason, also of what did not
end it). ``reward_score`` of every turn is the outcome.

What goes wrong ends its own trajectory at most: its turns so far are returned with outcome ``failed_reward`` (0; where
agents have a reward each, the least that one can get; or taken out of the batch, ``on_failure``), and a trajectory
without any call is one turn with an empty loss mask and ``valid_row=False``.
Two things end more: an engine that fails is raised, and an orchestra of which each of the first `rows.HOPELESS`
trajectories of a process has failed is taken for a mistake (in it, the reward function or a limit), and raised too.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op

from verl_ext.integration.compat.verl_api import loop_arguments
from verl_ext.integration.settings import endpoints
from verl_ext.integration.settings.options import OptionError
from verl_ext.rollout.environments.protocol import EnvironmentUnavailable
from verl_ext.rollout.orchestra import agents, core, judging, outside, prompts, settings
from verl_ext.rollout.orchestra.agents import Agent, OrchestraFailure, Reply
from verl_ext.rollout.orchestra.core import Completion, Result, Task, Team
from verl_ext.rollout.orchestra.voices import Voice, voices
from verl_ext.rollout.retrieval import Retriever
from verl_ext.rollout.shared import rows
from verl_ext.rollout.shared.per_config import once
from verl_ext.rollout.shared.plain_text import PlainText
from verl_ext.rollout.shared.probes import words
from verl_ext.rollout.shared.rows import ModelCall
from verl_ext.rollout.shared.template import ChatLoop
from verl_ext.rollout.shared.text_only import prompt_of
from verl_ext.rollout.shared.threads import HeldThreads, threads
from verl_ext.rollout.shared.tools import Tools
from verl_ext.rollout.shared.turns import in_turn

logger = logging.getLogger(__name__)

AGENT_NAME = "verl_ext_orchestra"

_fates: dict[str, rows.Fates] = {}


class OrchestraLoop(ChatLoop):
    """Plays one trajectory of a team. See the module's text.

    Attributes:
        kind, where: what plays and where its settings stand, for messages.
        reasons: for which a trajectory can fail; each is a number of its own.

    Args:
        **kwargs: verl's, and any key of `OrchestraSettings` from the entry of an agent loop config, where the
            orchestra's name is called ``orchestra``.

    Raises:
        OptionError: a key or value that an orchestra does not take.
    """

    kind = "the orchestra"
    where = settings.WHERE
    reasons: tuple[str, ...] = agents.REASONS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        verls = loop_arguments()
        entry = {key: value for key, value in kwargs.items() if key not in verls}
        super().__init__(*args, **{key: value for key, value in kwargs.items() if key in verls})
        self._prepare(entry)
        self.voices = voices(self)
        self.endpoints = endpoints.of(self.config)
        options = self.rollout_config.get("multi_turn") or {}
        given, own = kwargs.get("tools"), threads(self.config, "tools")
        self.tools = {
            name: Tools(options, given, voice.tokenizer, self.settings, self.where, self._tool_failed, own, voice.chat)
            for name, voice in self.voices.items()
        }
        self._sampling: dict[str, Any] = {}
        self._request = ""
        self._requests = 0
        self._priority = 0
        self._judging = 0.0
        self._data: list[dict[str, Any]] = []
        self._split = 0
        self._deterministic = bool(self.rollout_config.get("full_determinism", False))
        self._team: Team | None = None

    def _prepare(self, entry: dict[str, Any]) -> None:
        """Read the settings, with what the entry of an agent loop config says."""
        entry["name"] = entry.pop("orchestra", None)
        self.settings, self.retriever, self._lineups = once(
            self.config, repr(sorted(entry.items())), lambda: _prepare(self.config, entry)
        )

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> list[AgentLoopOutput]:
        """Play one trajectory.

        Args:
            sampling_params: temperature and so on, passed to the engine.
            priority: scheduling priority of the requests.
            **kwargs: the dataset row: ``raw_prompt``, and if there are ``orchestra``, ``reward_model``,
                ``data_source``, ``extra_info``, ``tools_kwargs``.

        Returns:
            One output a call, in the order of the orchestration; never empty.

        Raises:
            OptionError: no such orchestra, or a setting that it does not take.
            ValueError: the row's prompt is not text.
            EnvironmentUnavailable: what it plays can't be played on this machine.
            RuntimeError: see `rows.HOPELESS`.
            Exception: what the engine raised.
        """
        chosen = kwargs.get("orchestra")
        lineup = self._lineup(None if chosen is None else str(chosen))
        task = Task(
            messages=prompt_of(kwargs),
            ground_truth=(kwargs.get("reward_model") or {}).get("ground_truth"),
            data_source=str(kwargs.get("data_source") or ""),
            extra_info=dict(kwargs.get("extra_info") or {}),
        )
        self._data = [dict(message) for message in task.messages]  # an orchestra may add to the task's
        self._sampling, self._priority = dict(sampling_params), int(priority)
        self._request = rows.request_name(self, self._priority, kwargs.get("session_id", 0))
        session: dict[str, Any] = {}
        for tools in self.tools.values():
            tools.begin(self._request, kwargs.get("tools_kwargs"), session)
        team = self._team = Team(self, self.retriever, self.settings.max_calls, self.settings.max_tool_rounds)
        result, failure, detail = await self._play(team, lineup, task)
        if team.fatal is not None:
            raise team.fatal
        name = lineup.orchestra.name
        fates = _fates.setdefault(name, rows.Fates(f"{self.kind} {name!r}", logger))
        if fates.note(failure, detail):
            raise RuntimeError(
                f"{self.kind} {name!r} failed in each of its first {fates.failures.total()} trajectories in this "
                f"process, last with {failure}: {detail}. Mend what plays, the reward function, the data or "
                f"{self.where}.*"
            )
        if failure:
            team.count(failure)
        await in_turn()
        return await self._rows(team, lineup, task, result, failure, detail, kwargs)

    async def _play(self, team: Team, lineup: settings.Lineup, task: Task) -> tuple[Result, str, str]:
        """Run the orchestration within its time; what goes wrong becomes a reason and a line of detail."""
        failed = lineup.failed(self.settings.failed_reward)
        work = asyncio.ensure_future(team.play(lineup.orchestra.play, task, lineup.agents, lineup.options))
        try:
            done, _ = await asyncio.wait({work}, timeout=self.settings.time_limit_s)
            if not done:
                work.cancel()
                await asyncio.wait({work}, timeout=10.0)
                await team.close()  # an orchestration that will not be cancelled is left behind, and can ask no more
                return failed, agents.TIME_LIMIT, f"no end within {self.settings.time_limit_s} s"
            return lineup.checked(work.result()), "", ""
        except OrchestraFailure as error:
            return failed, error.reason, error.detail
        except asyncio.CancelledError:
            if not work.done():  # it is this loop that is cancelled
                work.cancel()
                raise
            return failed, agents.ERROR, "the orchestration cancelled itself"
        except EnvironmentUnavailable:
            raise  # no trajectory of the run can play it
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
            return failed, agents.ERROR, f"{type(error).__name__}: {error}{at}"

    def _lineup(self, name: str | None) -> settings.Lineup:
        key = name or ""
        if key not in self._lineups:
            self._lineups[key] = settings.line_up(self.settings, name, (*self.voices, *self.endpoints))
        return self._lineups[key]

    def _tool_failed(self) -> None:
        if self._team is not None:
            self._team.count(agents.TOOL_ERROR)

    # What the team asks for (core.Engine).

    async def complete(self, agent: Agent, messages: list[dict[str, Any]]) -> Completion:
        """See `core.Engine`. Raises EndpointRefused: a model that somebody else serves will not serve this run."""
        if agent.model in self.endpoints:
            return await self._outside(agent, messages)
        try:
            prompt_ids, cut, split = await threads(self.config, "tokenising").run(self._prompt, agent, messages)
        except (OrchestraFailure, HeldThreads, OptionError):
            raise
        except Exception as error:  # such as a chat template that can't take what a model gave a tool
            detail = f"no prompt can be made for agent {agent.name}: {words(error)}"
            raise OrchestraFailure(agents.ERROR, detail) from error
        self._split += split
        voice = self.voices[agent.model]
        limit = min(voice.response_length, agent.max_tokens or voice.response_length)
        self._requests += 1
        request = f"{self._request}-{agent.name}" + (f"-{self._requests}" if self._deterministic else "")
        sampling = {**self._sampling_of(agent), "max_tokens": limit}
        try:
            call = await asyncio.wait_for(
                rows.generate(voice, request, prompt_ids, sampling, self._priority, limit=limit),
                timeout=self.settings.call_timeout_s,
            )
        except asyncio.TimeoutError:
            raise self._late(agent) from None
        ids = call.response_ids
        text = await rows.decode(voice, ids)
        end = self._end(agent, text)
        if end is not None:
            size = await threads(self.config, "decoding").run(_fewest, voice.tokenizer, ids, agent.ends)
            call.response_ids = ids = ids[:size]
            call.response_logprobs = None if call.response_logprobs is None else call.response_logprobs[:size]
            text = text[:end]
        text = await self._counted(voice, ids, text, None if end is None else agent)
        return Completion(
            response_ids=ids,
            text=text,
            truncated=end is None and len(ids) >= limit and ids[-1] != voice.tokenizer.eos_token_id,
            prompt_tokens_cut=cut,
            row=call,
        )

    async def _counted(self, voice: Voice, ids: Sequence[int], text: str, ended: Agent | None) -> str:
        """What an answer says: its text after the thinking, cut anew where `ended` had it cut."""
        if self.settings.read_thinking:
            return text
        counts = str(await threads(self.config, "decoding").run(voice.chat.said, ids))
        return counts if ended is None else counts[: self._end(ended, counts)]

    async def _outside(self, agent: Agent, messages: list[dict[str, Any]]) -> Completion:
        """A call that a model outside of the run answers, from words to words."""
        limit = agent.max_tokens or int(self.rollout_config.response_length)
        whole = prompts.with_role(agent, messages, self.settings.role_as)
        try:
            asked = outside.client(self.endpoints[agent.model]).ask(whole, limit)
            answer = await asyncio.wait_for(asked, timeout=self.settings.call_timeout_s)
        except asyncio.TimeoutError:
            raise self._late(agent) from None
        except endpoints.EndpointFailed as error:
            raise OrchestraFailure(agents.ENDPOINT_ERROR, f"agent {agent.name}: {error}") from None
        end = self._end(agent, answer.text)
        return Completion([], answer.text[:end], end is None and answer.truncated, outside=answer.tokens)

    def _end(self, agent: Agent, text: str) -> int | None:
        """What `agent.ends` says of a text. If it raises, that is counted and the answer stays as it is."""
        try:
            return agent.ends(text) if agent.ends else None
        except Exception as error:
            logger.warning("agent %s: `ends` raised %s: %s", agent.name, type(error).__name__, error)
            if self._team is not None:
                self._team.count(agents.ERROR)
            return None

    def _late(self, agent: Agent) -> OrchestraFailure:
        limit = self.settings.call_timeout_s
        return OrchestraFailure(agents.ENGINE_TIMEOUT, f"no answer of agent {agent.name} within {limit} s")

    def _sampling_of(self, agent: Agent) -> dict[str, Any]:
        """Parameters of the sampler for a call of this agent."""
        return self._sampling

    def _schemas(self, agent: Agent) -> list[dict[str, Any]]:
        """Tools that the chat template shows the agent."""
        if self.settings.tools_in_prompt:
            return []
        return self.tools[agent.model].schemas(f"agent {agent.name}", agent.tools)

    async def use_tools(
        self, agent: Agent, completion: Completion, messages: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Run the tool calls in an answer; see `Tools.use`."""
        return await self.tools[agent.model].use(f"agent {agent.name}", agent.tools, completion.row, messages)

    async def score(self, task: Task, answer: str) -> tuple[float, dict[str, float]]:
        """The run's reward function on an answer, see `judging.judge`."""
        timing: dict[str, float] = {}
        try:
            with simple_timer("compute_score", timing):
                return await judging.judge(self.config, task, answer, self.settings.reward_timeout_s)
        except HeldThreads as error:
            if self._team is not None:
                self._team.fatal = error  # nothing can be judged any more
            raise
        finally:
            self._judging += timing.get("compute_score", 0.0)

    def _prompt(self, agent: Agent, messages: list[dict[str, Any]]) -> tuple[list[int], int, int]:
        """Tokens of a prompt that fits, how many were taken off for it, and how many control tokens were split."""
        voice, schemas = self.voices[agent.model], self._schemas(agent)
        plain = PlainText(voice.tokenizer)
        messages, shortened = prompts.bound(messages, voice.prompt_length)
        if shortened and self.settings.overlong_prompt != "shorten":
            raise OrchestraFailure(
                agents.OVERLONG,
                f"a message to agent {agent.name} is of a length that rollout.prompt_length={voice.prompt_length} "
                f"tokens can't have (at {prompts.CHARACTERS_A_TOKEN} characters each)",
            )
        # What the data says is the user's own; all else may quote a model, a tool or a passage.
        messages = [message if message in self._data else plain.message(message) for message in messages]

        def tokens(body: Sequence[Mapping[str, Any]]) -> list[int]:
            whole = prompts.with_role(agent, body, self.settings.role_as)
            return rows.tokens_of(voice, whole, schemas or None)

        ids = tokens(messages)
        if len(ids) <= voice.prompt_length:
            return ids, int(shortened), plain.split
        if self.settings.overlong_prompt == "shorten":
            shorter = prompts.shorten(messages, tokens, voice.prompt_length)
            if shorter is not None:
                return shorter, len(ids) - len(shorter), plain.split
        raise OrchestraFailure(
            agents.OVERLONG,
            f"the prompt of agent {agent.name} has {len(ids)} tokens, more than rollout.prompt_length="
            f"{voice.prompt_length}"
            + (", and it does not fit without its messages" if self.settings.overlong_prompt != "end" else "")
            + (f" (role and {len(agent.examples)} examples stay whole)" if agent.examples else ""),
        )

    # Turns.

    async def _rows(
        self,
        team: Team,
        lineup: settings.Lineup,
        task: Task,
        result: Result,
        failure: str,
        detail: str,
        columns: Mapping[str, Any],
    ) -> list[AgentLoopOutput]:
        calls = team.calls
        # Of a trajectory that failed the outcome alone counts: a reward given before may not outlive what ended by it.
        rewards = [0.0 if failure or not call.received else float(call.reply.reward) for call in calls]
        if result.rewards:
            for name, place in {call.agent.name: place for place, call in enumerate(calls)}.items():
                rewards[place] += result.rewards[name]
        elif calls and not result.summed:
            rewards[max((place for place, call in enumerate(calls) if call.received), default=-1)] += result.outcome
        for call in calls:
            call.completion.row.trained = call.received and not (failure and self.settings.on_failure == "exclude")
        if not calls:
            agent = next(agent for agent in lineup.agents if agent.model in self.voices)
            voice = self.voices[agent.model]
            ids = await rows.encode(voice, task.messages)
            row = rows.placeholder(voice, ids, self._sampling, columns.get("global_steps"))
            reply = Reply(agent.name, "", observation=task.question)
            calls, rewards = [core.Call(agent, (), Completion([], "", row=row), reply)], [0.0]
        made: list[ModelCall] = [call.completion.row for call in calls]
        for row, call, reward in zip(made, calls, rewards, strict=True):
            row.fields = {
                "turn_reward": reward,
                "agent_id": call.agent.name,
                "is_action_valid": bool(call.reply.valid),
                "anchor_obs": call.reply.observation,
                "model": call.agent.model,
                "prompt_tokens_cut": call.completion.prompt_tokens_cut,
            }
            if result.rewards:
                # All who were called have one; the agent of a placeholder was not.
                row.fields["agent_reward"] = result.rewards.get(call.agent.name, 0.0)
        made[-1].metrics.compute_score = self._judging
        made[-1].fields.update(failure_detail=detail, failures=dict(team.events), answer=result.answer)
        empty = [not row.response_ids for row in made]
        for row, nothing in zip(made, empty, strict=True):
            if nothing:
                # verl puts the reward on a turn's last token, so a turn needs one. It is not the model's: no loss.
                row.response_ids = [int(self.voices[row.fields["model"]].tokenizer.eos_token_id or 0)]
                row.response_logprobs = None if row.response_logprobs is None else [0.0]
        outputs = rows.make_rows(
            made,
            outcome=result.outcome,
            info=self._numbers(team.finished, lineup, result, failure, team.events),
            common={"orchestra": lineup.orchestra.name},
            failure=failure,
        )
        for output, nothing in zip(outputs, empty, strict=True):
            if nothing:
                output.response_mask = [0]
        return outputs

    def _numbers(
        self,
        calls: Sequence[core.Call],
        lineup: settings.Lineup,
        result: Result,
        failure: str,
        events: Mapping[str, int],
    ) -> dict[str, float]:
        """``reward_extra_info``: what verl reports of a trajectory in validation."""
        info: dict[str, float] = {
            **{name: value for name, value in result.info.items() if name != "reward"},  # verl's name of the score
            "failed": float(bool(failure)),
            "calls": float(len(calls)),
            "prompts_cut": float(sum(call.completion.prompt_tokens_cut > 0 for call in calls)),
            "control_tokens_split": float(self._split),
            "answers_cut": float(sum(call.completion.truncated for call in calls)),
        }
        for agent in lineup.agents:
            own = [call.reply for call in calls if call.agent.name == agent.name]
            info[f"calls_{agent.name}"] = float(len(own))
            info[f"invalid_{agent.name}"] = float(sum(not reply.valid for reply in own))
            if agent.name in result.rewards:
                info[f"reward_{agent.name}"] = result.rewards[agent.name]
        for reason in {*self.reasons, *events}:
            info[f"failure_{reason}"] = float(events.get(reason, 0))
        return judging.all_scores(self.config, lineup.orchestra.name, info, bool(failure))


def _prepare(
    config: Any, entry: Mapping[str, Any]
) -> tuple[settings.OrchestraSettings, Retriever | None, dict[str, settings.Lineup]]:
    read = settings.read(config, entry)
    return read, settings.retriever(read), {}


def _fewest(tokenizer: Any, ids: Sequence[int], ends: Callable[[str], int | None]) -> int:
    """The fewest tokens whose text is over: where an engine that knew of it would have ended."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        try:
            over = ends(tokenizer.decode(list(ids[:middle]), skip_special_tokens=True)) is not None
        except Exception:  # it looks for what is not there yet
            over = False
        low, high = (low, middle) if over else (middle + 1, high)
    return low
