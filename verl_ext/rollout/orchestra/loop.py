# SPDX-License-Identifier: Apache-2.0
"""The agent loop that plays an orchestra: verl hands it a prompt, it returns one output (row) for each agent call.

Selected by ``actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra`` or the data column ``agent_name``.
Which orchestra: the data column ``orchestra``, or else ``verl_ext.orchestra.name`` (`OrchestraSettings` lists all
keys), or the entry of an agent loop config::

    - name: my_team
      _target_: verl_ext.rollout.orchestra.loop.OrchestraLoop
      orchestra: solver_verifier
      options: {max_loops: 3}

Row fields in ``extra_fields``: ``agent_id``, ``turn_reward`` (the call's own reward; the last call's also has the
outcome, so that a trajectory's turns sum to everything it earned), ``is_action_valid``, ``valid_row``, ``anchor_obs``.
For reading: ``orchestra``, ``model``, ``answer``, ``prompt_tokens_cut``, and in the last row ``failure`` (why the
trajectory failed, ``""`` when it did not), ``failure_detail`` and ``failures`` (counts by reason, also of what did not
end it). ``reward_score`` of every row is the outcome.

What goes wrong ends its own trajectory at most: its rows so far are returned with outcome 0 (or taken out of the
batch, ``on_failure``), and a trajectory without any call is one row with an empty loss mask and ``valid_row=False``.
Two things end more: an engine that fails is raised, and an orchestra of which each of the first `rows.HOPELESS`
trajectories of a process has failed is taken for a mistake (in it, the reward function or a limit), and raised too.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op

from verl_ext.integration.options import OptionError
from verl_ext.integration.verl_api import loop_arguments
from verl_ext.rollout import rows
from verl_ext.rollout.orchestra import core, settings
from verl_ext.rollout.orchestra.core import Agent, Completion, OrchestraFailure, Result, Task, Team
from verl_ext.rollout.retrieval import Retriever
from verl_ext.rollout.rows import ModelCall

logger = logging.getLogger(__name__)

AGENT_NAME = "verl_ext_orchestra"
CUT = "\n[...]\n"
"""Stands where the middle of a message was taken out."""

_prepared: dict[tuple[int, str], tuple[Any, settings.OrchestraSettings, Retriever | None, dict[str, Any]]] = {}
_reward_functions: dict[int, tuple[Any, Any]] = {}
_fates: dict[str, rows.Fates] = {}


class OrchestraLoop(AgentLoopBase):
    """Plays one trajectory of a team. See the module's text.

    Args:
        **kwargs: verl's, and any key of `OrchestraSettings` from the entry of an agent loop config, where the
            orchestra's name is called ``orchestra``.

    Raises:
        OptionError: a key or value that an orchestra does not take.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        verls = loop_arguments()
        entry = {key: value for key, value in kwargs.items() if key not in verls}
        super().__init__(*args, **{key: value for key, value in kwargs.items() if key in verls})
        entry["name"] = entry.pop("orchestra", None)
        self.settings, self.retriever, self._lineups = _prepare(self.config, entry)
        self.prompt_length = int(self.rollout_config.prompt_length)
        self.response_length = int(self.rollout_config.response_length)
        self.clients = {core.POLICY: self.server_manager}
        tools = kwargs.get("tools")
        self._tools = {tool.name: tool for tool in getattr(tools, "tools", tools) or []}
        self._sampling: dict[str, Any] = {}
        self._request = ""
        self._requests = 0
        self._priority = 0
        self._judging = 0.0
        self._deterministic = bool(self.rollout_config.get("full_determinism", False))
        self._team: Team | None = None

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> list[AgentLoopOutput]:
        """Play one trajectory.

        Args:
            sampling_params: temperature and so on, passed to the engine.
            priority: scheduling priority of the requests.
            **kwargs: the dataset row: ``raw_prompt``, and if there are ``orchestra``, ``reward_model``,
                ``data_source``, ``extra_info``.

        Returns:
            One output a call, in the order of the orchestration; never empty.

        Raises:
            OptionError: no such orchestra, or a setting that it does not take.
            RuntimeError: see `rows.HOPELESS`.
            Exception: what the engine raised.
        """
        chosen = kwargs.get("orchestra")
        lineup = self._lineup(None if chosen is None else str(chosen))
        task = Task(
            messages=[dict(message) for message in kwargs["raw_prompt"]],
            ground_truth=(kwargs.get("reward_model") or {}).get("ground_truth"),
            data_source=str(kwargs.get("data_source") or ""),
            extra_info=dict(kwargs.get("extra_info") or {}),
        )
        self._sampling, self._priority = dict(sampling_params), int(priority)
        self._request = rows.request_name(self, self._priority, kwargs.get("session_id", 0))
        team = self._team = Team(self, self.retriever, self.settings.max_calls, self.settings.max_tool_rounds)
        result, failure, detail = await self._play(team, lineup, task)
        if team.fatal is not None:
            raise team.fatal
        name = lineup.orchestra.name
        fates = _fates.setdefault(name, rows.Fates(f"the orchestra {name!r}", logger))
        if fates.note(failure, detail):
            raise RuntimeError(
                f"the orchestra {name!r} failed in each of its first {fates.failures.total()} trajectories in this "
                f"process, last with {failure}: {detail}. Mend the orchestration, the reward function, the data or "
                "verl_ext.orchestra.*"
            )
        if failure:
            team.count(failure)
        return await self._rows(team, lineup, task, result, failure, detail, kwargs)

    async def _play(self, team: Team, lineup: settings.Lineup, task: Task) -> tuple[Result, str, str]:
        """Run the orchestration within its time; what goes wrong becomes a reason and a line of detail."""
        work = asyncio.ensure_future(team.play(lineup.orchestra.play, task, lineup.agents, lineup.options))
        try:
            done, _ = await asyncio.wait({work}, timeout=self.settings.time_limit_s)
            if not done:
                work.cancel()
                await asyncio.wait({work}, timeout=10.0)  # an orchestration that will not be cancelled is left behind
                return Result(0.0), core.TIME_LIMIT, f"no end within {self.settings.time_limit_s} s"
            return work.result(), "", ""
        except OrchestraFailure as error:
            return Result(0.0), error.reason, error.detail
        except asyncio.CancelledError:
            if not work.done():  # it is this loop that is cancelled
                work.cancel()
                raise
            return Result(0.0), core.ERROR, "the orchestration cancelled itself"
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
            return Result(0.0), core.ERROR, f"{type(error).__name__}: {error}{at}"

    def _lineup(self, name: str | None) -> settings.Lineup:
        key = name or ""
        if key not in self._lineups:
            self._lineups[key] = settings.line_up(self.settings, name, tuple(self.clients))
        return self._lineups[key]

    # What the team asks for (core.Engine).

    async def complete(self, agent: Agent, messages: list[dict[str, Any]]) -> Completion:
        """One model call: the prompt as tokens, the answer as tokens, and its text.

        Raises:
            OrchestraFailure: the prompt does not fit, or the answer did not come in time.
        """
        prompt_ids, cut = await self.loop.run_in_executor(None, self._prompt, agent, messages)
        limit = min(self.response_length, agent.max_tokens or self.response_length)
        self._requests += 1
        request = f"{self._request}-{agent.name}" + (f"-{self._requests}" if self._deterministic else "")
        sampling = {**self._sampling, "max_tokens": limit}
        client = self.clients[agent.model]
        try:
            call = await asyncio.wait_for(
                rows.generate(self, request, prompt_ids, sampling, self._priority, client=client, limit=limit),
                timeout=self.settings.call_timeout_s,
            )
        except asyncio.TimeoutError:
            raise OrchestraFailure(
                core.ENGINE_TIMEOUT, f"no answer of agent {agent.name} within {self.settings.call_timeout_s} s"
            ) from None
        ids = call.response_ids
        return Completion(
            response_ids=ids,
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            truncated=len(ids) >= limit and ids[-1] != self.tokenizer.eos_token_id,
            prompt_tokens_cut=cut,
            row=call,
        )

    async def use_tools(self, agent: Agent, completion: Completion) -> list[dict[str, Any]]:
        """Run the tool calls in an answer. A tool that is unknown, raises or hangs answers with its error."""
        from verl.experimental.agent_loop.tool_parser import ToolParser

        options = self.rollout_config.get("multi_turn") or {}
        tools = {name: self._tool(agent, name) for name in agent.tools}
        parser = ToolParser.get_tool_parser(options.get("format") or "hermes", self.tokenizer)
        content, calls = await parser.extract_tool_calls(
            completion.response_ids, [t.tool_schema for t in tools.values()]
        )
        calls = calls[: int(options.get("max_parallel_calls") or 1)]
        if not calls:
            return []
        timing: dict[str, float] = {}
        with simple_timer("tool_calls", timing):
            answers = await asyncio.gather(*(self._use_tool(tools, call.name, call.arguments) for call in calls))
        completion.row.metrics.tool_calls += timing["tool_calls"]
        longest = int(options.get("max_tool_response_length") or 2**31)
        asked = [
            {"type": "function", "function": {"name": c.name, "arguments": _arguments(c.arguments)}} for c in calls
        ]
        return [
            {"role": "assistant", "content": content or "", "tool_calls": asked},
            *({"role": "tool", "content": answer[:longest]} for answer in answers),
        ]

    def _tool(self, agent: Agent, name: str) -> Any:
        from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY

        known = {**FUNCTION_TOOL_REGISTRY, **self._tools}
        if name not in known:
            raise OptionError(
                f"agent {agent.name} has the tool {name!r}, which is not there (there are: {', '.join(known) or 'none'}"
                "). Name it in rollout.multi_turn.tool_config_path or function_tool_path, or put verl's decorator "
                "function_tool on a function of your module."
            )
        return known[name]

    async def _use_tool(self, tools: Mapping[str, Any], name: str, arguments: str) -> str:
        from verl.tools.function_tool import FunctionTool

        async def use() -> str:
            if name not in tools:
                raise ValueError(f"there is no tool {name!r}; there are: {', '.join(tools)}")
            given = json.loads(arguments)
            tool = tools[name]
            if isinstance(tool, FunctionTool):
                result = await tool.call(given)
                return result if isinstance(result, str) else str(getattr(result, "text", result))
            instance, _ = await tool.create()
            try:
                result, _, _ = await tool.execute(instance, given)
                return result.text or ""
            finally:
                await tool.release(instance)

        try:
            return await asyncio.wait_for(use(), timeout=self.settings.tool_timeout_s)
        except Exception as error:
            if self._team is not None:
                self._team.count(core.TOOL_ERROR)
            logger.warning("tool %s failed: %s: %s", name, type(error).__name__, error)
            return f"Error: {type(error).__name__}: {error}"

    async def score(self, task: Task, answer: str) -> tuple[float, dict[str, float]]:
        """The run's reward function (``reward.custom_reward_function``, else verl's default for the data source).

        Raises:
            OrchestraFailure: it raised, gave no number, or took longer than ``reward_timeout_s``.
        """
        function = _reward_function(self.config)
        arguments = {
            "data_source": task.data_source,
            "solution_str": answer,
            "ground_truth": task.ground_truth,
            "extra_info": dict(task.extra_info),
        }
        timing: dict[str, float] = {}
        try:
            with simple_timer("compute_score", timing):
                work = (
                    function(**arguments)
                    if inspect.iscoroutinefunction(function)
                    else self.loop.run_in_executor(None, lambda: function(**arguments))
                )
                result = await asyncio.wait_for(work, timeout=self.settings.reward_timeout_s)
            score = float(result["score"] if isinstance(result, Mapping) else result)
        except asyncio.TimeoutError:
            raise OrchestraFailure(
                core.REWARD_TIMEOUT,
                f"no score within {self.settings.reward_timeout_s} s for the answer {answer!r:.200}",
            ) from None
        except Exception as error:
            raise OrchestraFailure(core.REWARD_ERROR, f"{type(error).__name__}: {error}") from error
        finally:
            self._judging += timing.get("compute_score", 0.0)
        info = {"acc": score}
        if isinstance(result, Mapping):
            info = {key: float(value) for key, value in result.items() if _is_number(value)}
        return score, info

    # Prompts.

    def _prompt(self, agent: Agent, messages: list[dict[str, Any]]) -> tuple[list[int], int]:
        """Tokens of a prompt that fits, and how many were taken off for it.

        Raises:
            OrchestraFailure: it does not fit and may not, or can't, be shortened.
        """
        schemas = [
            self._tool(agent, name).tool_schema.model_dump(exclude_unset=True, exclude_none=True)
            for name in agent.tools
        ]

        def tokens(body: Sequence[Mapping[str, Any]]) -> list[int]:
            return list(
                self.continuous_token_builder.build_initial_tokens(self._with_role(agent, body), tools=schemas or None)
            )

        ids = tokens(messages)
        if len(ids) <= self.prompt_length:
            return ids, 0
        if self.settings.overlong_prompt == "shorten":
            shorter = _shorten(messages, tokens, self.prompt_length)
            if shorter is not None:
                return shorter, len(ids) - len(shorter)
        raise OrchestraFailure(
            core.OVERLONG,
            f"the prompt of agent {agent.name} has {len(ids)} tokens, more than rollout.prompt_length="
            f"{self.prompt_length}"
            + (", and it does not fit without its messages" if self.settings.overlong_prompt != "end" else "")
            + (f" (role and {len(agent.examples)} examples stay whole)" if agent.examples else ""),
        )

    def _with_role(self, agent: Agent, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The whole conversation: role, the messages' own system messages, examples, the other messages."""
        body = [dict(message) for message in messages]
        shown = [
            {"role": role, "content": text}
            for example in agent.examples
            for role, text in (("user", example.user), ("assistant", example.assistant))
        ]
        first = next((i for i, message in enumerate(body) if message.get("role") != "system"), len(body))
        body[first:first] = shown
        if not agent.role:
            return body
        if self.settings.role_as == "system":
            return [{"role": "system", "content": agent.role}, *body]
        for message in body:
            if message.get("role") == "user":
                message["content"] = f"{agent.role}\n\n{message['content']}"
                return body
        return [{"role": "user", "content": agent.role}, *body]

    # Rows.

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
        kept = not failure or self.settings.on_failure != "exclude"
        rewards = core.turn_rewards(calls, result.outcome, result.summed)
        made: list[ModelCall] = []
        for call, reward in zip(calls, rewards, strict=True):
            row: ModelCall = call.completion.row
            row.trained = kept
            row.fields = {
                "turn_reward": reward,
                "agent_id": call.agent.name,
                "is_action_valid": bool(call.reply.valid),
                "anchor_obs": call.reply.observation,
                "model": call.agent.model,
                "prompt_tokens_cut": call.completion.prompt_tokens_cut,
            }
            made.append(row)
        if not made:
            ids = await rows.encode(self, task.messages)
            row = rows.placeholder(self, ids, self._sampling, columns.get("global_steps"))
            row.fields = {
                "turn_reward": 0.0,
                "agent_id": lineup.agents[0].name,
                "is_action_valid": True,
                "anchor_obs": task.question,
                "model": lineup.agents[0].model,
                "prompt_tokens_cut": 0,
            }
            made.append(row)
        made[-1].metrics.compute_score = self._judging
        made[-1].fields.update(failure_detail=detail, failures=dict(team.events), answer=result.answer)
        empty = [not row.response_ids for row in made]
        for row, nothing in zip(made, empty, strict=True):
            if nothing:
                # verl puts the reward on a row's last token, so a row needs one. It is not the model's: no loss on it.
                row.response_ids = [int(self.tokenizer.eos_token_id or 0)]
                row.response_logprobs = None if row.response_logprobs is None else [0.0]
        outputs = rows.make_rows(
            made,
            outcome=result.outcome,
            info=self._numbers(calls, lineup, result, failure, team.events),
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
            **result.info,
            "failed": float(bool(failure)),
            "calls": float(len(calls)),
            "prompts_cut": float(sum(call.completion.prompt_tokens_cut > 0 for call in calls)),
            "answers_cut": float(sum(call.completion.truncated for call in calls)),
        }
        for agent in lineup.agents:
            own = [call.reply for call in calls if call.agent.name == agent.name]
            info[f"calls_{agent.name}"] = float(len(own))
            info[f"invalid_{agent.name}"] = float(sum(not reply.valid for reply in own))
        for reason in {*core.REASONS, *events}:
            info[f"failure_{reason}"] = float(events.get(reason, 0))
        return info


def _prepare(
    config: Any, entry: Mapping[str, Any]
) -> tuple[settings.OrchestraSettings, Retriever | None, dict[str, settings.Lineup]]:
    """Settings, retriever and line-ups, made once a process for each config: a loop object lives for one trajectory."""
    key = id(config), repr(sorted(entry.items(), key=lambda item: item[0]))
    if key not in _prepared:
        read = settings.read(config, entry)
        _prepared[key] = config, read, settings.retriever(read), {}  # the config is kept, so its id stays its own
    return _prepared[key][1:]


def _reward_function(config: Any) -> Any:
    if id(config) not in _reward_functions:
        from verl.trainer.ppo.reward import get_custom_reward_fn
        from verl.utils.reward_score import default_compute_score

        _reward_functions[id(config)] = config, get_custom_reward_fn(config) or default_compute_score
    return _reward_functions[id(config)][1]


def _shorten(messages: Sequence[Mapping[str, Any]], tokens: Any, limit: int) -> list[int] | None:
    """Tokens of the messages, the longest of them cut in the middle until all fits in `limit` tokens.

    Args:
        messages: chat messages; those whose content is not text stay whole.
        tokens: makes prompt tokens of messages.
        limit: tokens that fit.

    Returns:
        The tokens, with as much text as fits; None if it does not fit without any.
    """
    body = [dict(message) for message in messages]
    texts = [i for i, message in enumerate(body) if isinstance(message.get("content"), str)]
    for i in sorted(texts, key=lambda i: len(body[i]["content"]), reverse=True):
        text = body[i]["content"]

        def cut(kept: int, i: int = i, text: str = text) -> list[int]:
            head = text[: kept - kept // 2]
            body[i]["content"] = head + CUT + text[len(text) - kept // 2 :]
            return tokens(body)

        ids = cut(0)
        if len(ids) > limit:
            continue  # this message is down to its mark; the next longest is cut too
        low, high = 0, len(text)
        while high - low > 1:
            middle = (low + high) // 2
            longer = cut(middle)
            if len(longer) <= limit:
                low, ids = middle, longer
            else:
                high = middle
        return ids
    return None


def _is_number(value: Any) -> bool:
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    return isinstance(value, bool | int | float)


def _arguments(text: str) -> Any:
    """The arguments of a tool call as an object, which chat templates expect; as they came if they are no JSON."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, TypeError):
        return text
