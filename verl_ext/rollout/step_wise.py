# SPDX-License-Identifier: Apache-2.0
"""The step-wise loop: an environment is played one action a model call, and each call is a turn of its own.

Every step is a fresh prompt: the task, the last K observation-action pairs, the current observation and the
admissible actions, filled into a template (:mod:`verl_ext.rollout.environments.templates`). So a prompt does not grow
with the episode, and HGPO, which compares steps that share their last K observations, sees what the model saw.

Use it as ``actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_step_wise`` (or in the data's column
``agent_name``). The settings of a run are ``verl_ext.environment.*``
(:class:`verl_ext.rollout.environments.options.EnvironmentOptions`); what belongs to one prompt is in its
``extra_info``: ``env_seed`` (else ``index``), and optionally ``environment`` and ``environment_kwargs`` (JSON), which
win over the run's. All rollouts of a prompt have the prompt's seed, so they begin in the same state.

**K has one key.** In a run with HGPO it is ``algorithm.hgpo.history_length``; ``verl_ext.environment.history_length``
is for runs without it, and a different value there is refused.

**Actions.** How one is read from a response: `verl_ext.rollout.environments.action`.

**A conversation.** With ``verl_ext.environment.history=continue`` a prompt is the tokens so far, with the answer, and a
message with the new observation. So the steps of an episode are one sequence (``verl_ext.merge_turns``). A prompt that
no longer fits, or that the chat template refuses, is rendered anew with the last K steps (``rendered_anew`` counts).

**Over-long prompts.** A prompt of more than ``rollout.prompt_length`` tokens is shortened: first the oldest pairs of
the history are left out, one by one; then the current observation is cut at its end; then the list of admissible
actions is cut at its end (the actions stay valid). The turn has ``prompt_truncated`` True and is counted. If the rest
is still too long the trajectory ends, ``failure="prompt_too_long"``.

**When something breaks.** An environment that raises, hangs, dies or returns garbage ends its own trajectory by name
(:data:`verl_ext.rollout.environments.protocol.FAULTS`). If it does so upon an action, and a new one of the same seed
can begin, the action has broken it and the model has failed (``failed_trajectories=keep``): its turns are trained on,
what it had earned is lost (rewards above 0 become 0, and the last step pays what is missing to ``failed_reward``, which
belongs at or below the lowest reward of the task), ``failure`` says which, ``stop_detail`` how, and the metric
``rollout/failures/<reason>`` counts it. So no model gains by breaking things, and none can end the run by it. A fault
before the first action, or of an environment that no longer begins, is nobody's failure: the loop raises, the rollout
is missing. ``raise`` does so with every fault. With ``mask`` the turns are in no statistic and not in the loss, and so
is the one placeholder turn of a trajectory in which the model has not answered yet. What no trajectory could do (a
package is missing, a wrong argument) raises and ends the run; so does an environment in which each of the first
:data:`~verl_ext.rollout.shared.rows.HOPELESS` trajectories of a process has failed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op

from verl_ext.rollout.environments.action import Action, parse_action
from verl_ext.rollout.environments.options import of_row, read_options
from verl_ext.rollout.environments.panel import task_of_row
from verl_ext.rollout.environments.protocol import (
    FAULTS,
    GARBAGE,
    EnvironmentFault,
    EnvironmentUnavailable,
    Observation,
    Step,
)
from verl_ext.rollout.environments.registry import load
from verl_ext.rollout.environments.runner import open_session
from verl_ext.rollout.environments.sessions import Session
from verl_ext.rollout.environments.templates import Template, load_template
from verl_ext.rollout.shared import rows
from verl_ext.rollout.shared.plain_text import PlainText
from verl_ext.rollout.shared.probes import Refusal
from verl_ext.rollout.shared.scores import storable
from verl_ext.rollout.shared.template import ChatLoop
from verl_ext.rollout.shared.text_only import prompt_of
from verl_ext.rollout.shared.threads import threads
from verl_ext.rollout.shared.turns import in_turn

logger = logging.getLogger(__name__)

#: The name to use in the dataset column ``agent_name`` or in ``rollout.agent.default_agent_loop``.
AGENT_NAME = "verl_ext_step_wise"

#: Why a trajectory ended (``extra_fields["stop_reason"]`` of every turn of it), beside ``environment_*``.
STOP_DONE = "done"
STOP_MAX_STEPS = "max_steps"
STOP_TOO_LONG = "prompt_too_long"
STOP_EMPTY = "empty_response"
FAILURES = (*FAULTS, STOP_TOO_LONG, STOP_EMPTY)

_fates: dict[str, rows.Fates] = {}

#: Characters a token that an observation is taken to have at most, before it is tokenised.
CHARACTERS_A_TOKEN = 32
CUT = " ..."


@dataclass
class _Episode:
    """What has happened so far in one trajectory."""

    task: str
    observation: Observation
    shown: Observation
    calls: list[rows.ModelCall] = field(default_factory=list)
    past: list[tuple[str, str]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    truncated: int = 0
    rendered_anew: int = 0
    success: bool | None = None
    stop_reason: str = STOP_MAX_STEPS
    stop_detail: str = ""

    def fail(self, fault: EnvironmentFault) -> None:
        self.stop_reason, self.stop_detail = fault.reason, fault.detail

    @property
    def failure(self) -> str:
        return self.stop_reason if self.stop_reason in FAILURES else ""


class _TooLong(Exception):
    """A prompt does not fit even when everything is cut that may be."""


@register(AGENT_NAME)
class StepWiseLoop(ChatLoop):
    """One prompt, one action, one turn a step; see the module's text.

    Turn fields in ``extra_fields``: ``turn_reward`` (float: the step's reward), ``is_action_valid`` (bool),
    ``agent_id`` (str), ``anchor_obs`` (the raw observation), ``valid_row`` (bool), ``failure`` (str, in the last turn),
    and for reading ``observation``, ``action``, ``stop_reason``, ``stop_detail`` (str) and ``prompt_truncated`` (bool).

    ``reward_score`` of every turn is the episode's return, so estimators that know no steps work on the same rollout.
    ``reward_extra_info`` holds what verl reports in validation and training metrics ``trajectory/<name>`` repeat:
    ``success``, ``steps``, ``valid_share``, ``truncated_prompts``, ``failed`` and ``control_tokens_split`` (see
    `verl_ext.rollout.shared.plain_text`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = read_options(self.config)
        self.template: Template = load_template(self.options.template)
        self.prompt_length = int(self.rollout_config.prompt_length)
        self.plain = PlainText(self.tokenizer)

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> list[AgentLoopOutput]:
        """Play one episode.

        Args:
            sampling_params: temperature and so on, passed to the engine.
            priority: scheduling priority of the requests.
            **kwargs: the dataset row: ``raw_prompt`` (chat messages) and ``extra_info`` (see the module's text).

        Returns:
            One output a step, in order; never empty.

        Raises:
            EnvironmentFault: the environment broke; which of them are raised, ``failed_trajectories`` says.
            EnvironmentUnavailable: the environment cannot be played on this machine, or all trajectories in it fail.
            ValueError: the row names no environment or no seed, or its prompt is not text.
        """
        options = self.options
        name, arguments, seed = of_row(options, kwargs)
        messages = prompt_of(kwargs)
        system, prompt = self._given(messages)
        request_id = rows.request_name(self, int(priority), kwargs.get("session_id", 0))
        rule = str(options.invalid_action or getattr(load(name), "invalid_action", "pass"))

        episode = _Episode("", Observation(""), Observation(""))
        broken: EnvironmentFault | None = None
        session = self._session(name, arguments)
        try:
            self._see(episode, await session.reset(seed, task_of_row(kwargs)))
            episode.task = self.plain.text(episode.observation.task)
            for _ in range(options.max_steps):
                ids, cut = await self._further(prompt, episode), False
                if ids is None:
                    ids, cut = await self._prompt(system, prompt, episode)
                episode.truncated += cut
                call = await rows.generate(self, request_id, ids, sampling_params, int(priority))
                if not call.response_ids:
                    episode.stop_reason, episode.stop_detail = STOP_EMPTY, "the engine returned no token"
                    break
                if await self._act(session, episode, call, rule, cut):
                    episode.stop_reason = STOP_DONE
                    break
        except EnvironmentFault as fault:
            broken = fault
            episode.fail(fault)
        except _TooLong as error:
            episode.stop_reason, episode.stop_detail = STOP_TOO_LONG, str(error)
        finally:
            await session.close()
        self._note(name, seed, episode)
        if broken is not None and options.failed_trajectories != "mask":
            if options.failed_trajectories == "raise" or not episode.rewards:
                raise broken
            await self._require_sound(name, arguments, seed, broken)
            episode.rewards = [min(reward, 0.0) for reward in episode.rewards]
            episode.rewards[-1] += min(0.0, options.failed_reward - sum(episode.rewards))
            for call, reward in zip(episode.calls, episode.rewards, strict=True):
                call.fields["turn_reward"] = reward
        if not episode.calls:
            ids = await rows.encode(self, messages)
            call = rows.placeholder(self, ids, sampling_params, kwargs.get("global_steps"))
            call.fields = self._fields(episode.observation, Action("", False), 0.0, False)
            episode.calls.append(call)
        await in_turn()
        return self._rows(episode)

    def _given(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """The data's system messages, and the text of its prompt.

        Raises ValueError: a message of another role, which no prompt would show.
        """
        system: list[dict[str, Any]] = []
        asked: list[dict[str, Any]] = []
        for message in messages:
            if message["role"] not in ("system", "developer", "user"):
                raise ValueError(
                    f"{AGENT_NAME} shows the system's and the user's messages of the data, and raw_prompt has one of "
                    f"the role {message['role']!r}; leave it out, or put its text into the user's."
                )
            (asked if message["role"] == "user" else system).append(message)
        return system, "\n\n".join(message["content"] for message in asked)

    def _session(self, name: str, arguments: Mapping[str, Any]) -> Session:
        options = self.options
        return open_session(
            name,
            arguments,
            reset_timeout_s=options.reset_timeout_s,
            step_timeout_s=options.step_timeout_s,
            processes=options.processes,
        )

    async def _require_sound(
        self, name: str, arguments: Mapping[str, Any], seed: int, broken: EnvironmentFault
    ) -> None:
        """Raise `broken` if a new environment of this seed cannot begin either: then no action has done it."""
        session = self._session(name, arguments)
        try:
            await session.reset(seed)
        except EnvironmentFault as fault:
            raise broken from fault
        finally:
            await session.close()

    def _see(self, episode: _Episode, seen: Observation) -> None:
        """Take in an observation: as it is for turns and rules, and as the prompt may show it."""
        actions = None if seen.actions is None else tuple(map(self.plain.text, seen.actions))
        text = seen.text[: CHARACTERS_A_TOKEN * self.prompt_length + 1]  # more is cut anyway
        episode.observation, episode.shown = seen, Observation(self.plain.text(text), actions)

    @staticmethod
    def _note(name: str, seed: int, episode: _Episode) -> None:
        """Log a failure; raise if nothing but failures came from this environment."""
        fates = _fates.setdefault(name, rows.Fates(f"environment {name!r}", logger))
        if fates.note(episode.failure, f"seed {seed}, {episode.stop_detail}"):
            raise EnvironmentUnavailable(
                f"each of the first {fates.failures.total()} trajectories in {name!r} has failed, the last one by "
                f"{episode.stop_reason}: {episode.stop_detail}"
            )

    async def _act(self, session: Session, episode: _Episode, call: rows.ModelCall, rule: str, cut: bool) -> bool:
        """Carry out the action of an answer; whether the episode is over.

        Raises EnvironmentFault: the environment broke, or the rewards so far are too large for float32.
        """
        seen = episode.observation
        answer = await rows.decode(self, call.response_ids)
        said = None
        if not self.options.read_thinking:
            said = await threads(self.config, "decoding").run(self.chat.said, call.response_ids)
        action = parse_action(answer, seen.actions, self.options, said)
        call.fields = self._fields(seen, action, 0.0, cut)
        episode.calls.append(call)
        episode.rewards.append(0.0)
        if not action.valid and rule == "noop":
            step = Step(seen, seen.noop_reward, False, {})
        else:
            timing: dict[str, float] = {}
            with simple_timer("tool_calls", timing):
                step = await session.step(action.text)
            call.metrics.tool_calls = timing["tool_calls"]
        reward = self.options.reward_scale * step.reward
        if not storable(sum(map(abs, [*episode.rewards, reward]))):  # so that no part of them is too large either
            raise EnvironmentFault(GARBAGE, f"a step earned {reward}: the episode's return is not finite in float32")
        episode.rewards[-1] = call.fields["turn_reward"] = reward
        episode.past.append((episode.shown.text, self.plain.text(action.text)))
        episode.messages.append(dict(self.plain.message({"role": "assistant", "content": answer})))
        if step.observation is not seen:
            self._see(episode, step.observation)
        won = step.info.get("success", step.info.get("won"))
        if won is not None:
            episode.success = bool(won)
        return step.done

    def _fields(self, seen: Observation, action: Action, reward: float, cut: bool) -> dict[str, Any]:
        return {
            "turn_reward": reward,
            "is_action_valid": action.valid,
            "agent_id": self.options.agent_id,
            "anchor_obs": seen.anchor_obs,
            "observation": seen.text,
            "action": action.text,
            "prompt_truncated": cut,
        }

    def _rows(self, episode: _Episode) -> list[AgentLoopOutput]:
        if episode.failure and self.options.failed_trajectories == "mask":
            for call in episode.calls:
                call.trained = False
        played = len(episode.rewards)
        total = float(sum(episode.rewards))
        success = total > 0 if episode.success is None else episode.success
        valid = sum(call.fields["is_action_valid"] for call in episode.calls)
        return rows.make_rows(
            episode.calls,
            outcome=total,
            info={
                "success": float(success and not episode.failure),
                "steps": float(played),
                "valid_share": valid / max(played, 1),
                "truncated_prompts": float(episode.truncated),
                "failed": float(bool(episode.failure)),
                "control_tokens_split": float(self.plain.split),
                **({"rendered_anew": float(episode.rendered_anew)} if self.options.history == "continue" else {}),
            },
            common={"stop_reason": episode.stop_reason, "stop_detail": episode.stop_detail},
            failure=episode.failure,
        )

    async def _further(self, prompt: str, episode: _Episode) -> list[int] | None:
        """Tokens of the next prompt of a conversation that goes on; None: it has to be rendered."""
        if self.options.history != "continue" or not episode.calls:
            return None
        last = episode.calls[-1]
        new = self._messages(prompt, episode, episode.shown.text, episode.shown.actions, [], goes_on=True)
        try:
            ids = await threads(self.config, "tokenising").run(
                self.chat.follow, episode.messages, new, last.prompt_ids + last.response_ids
            )
        except Refusal as error:
            logger.warning("a prompt of the step-wise loop is rendered anew: %s", error)
            ids = []
        if not 0 < len(ids) <= self.prompt_length:
            episode.rendered_anew += 1
            return None
        episode.messages += new
        return list(ids)

    def _messages(
        self,
        prompt: str,
        episode: _Episode,
        text: str,
        actions: Sequence[str] | None,
        history: Sequence[Any],
        goes_on: bool = False,
    ) -> list[dict[str, str]]:
        """Those of the next step, by the template."""
        return self.template.messages(
            task=episode.task,
            prompt=prompt,
            observation=text,
            actions=actions,
            history=history,
            step=len(episode.past) + 1,
            max_steps=self.options.max_steps,
            goes_on=goes_on,
        )

    async def _prompt(
        self, system: Sequence[Mapping[str, Any]], prompt: str, episode: _Episode
    ) -> tuple[list[int], bool]:
        """Tokens of the next prompt, and whether something had to be left out.

        Raises:
            _TooLong: it does not fit.
        """
        past, seen = episode.past, episode.shown
        first = max(0, len(past) - int(self.options.history_length or 0))
        pairs = [(number + 1, *past[number]) for number in range(first, len(past))]

        async def tokens(history: Sequence[Any], text: str, actions: Sequence[str] | None) -> list[int]:
            episode.messages = [*map(dict, system), *self._messages(prompt, episode, text, actions, history)]
            return await rows.encode(self, episode.messages)

        # What is far too long is not worth the time to tokenise it.
        limit = CHARACTERS_A_TOKEN * self.prompt_length
        text, actions, cut = seen.text, seen.actions, False
        if len(text) > limit:
            text, cut = text[:limit] + CUT, True
        while pairs and sum(len(pair[1]) + len(pair[2]) for pair in pairs) > limit:
            pairs, cut = pairs[1:], True
        ids = await tokens(pairs, text, actions)
        while len(ids) > self.prompt_length and pairs:
            pairs, cut = pairs[1:], True
            ids = await tokens(pairs, text, actions)
        if len(ids) > self.prompt_length:
            cut, full = True, text
            kept, ids = await self._longest(len(full), lambda n: tokens([], full[:n] + CUT, actions))
            text = full[:kept] + CUT
        if len(ids) > self.prompt_length and actions:
            listed = actions
            _, ids = await self._longest(len(listed), lambda n: tokens([], text, (*listed[:n], CUT.strip())))
        if len(ids) > self.prompt_length:
            raise _TooLong(
                f"step {len(past) + 1}: {len(ids)} tokens without history, observation and actions, but "
                f"rollout.prompt_length={self.prompt_length}; raise data.max_prompt_length or shorten the template"
            )
        return ids, cut

    async def _longest(self, most: int, tokens: Any) -> tuple[int, list[int]]:
        """The largest n <= most for which ``tokens(n)`` fits, by bisection, and the tokens; n=0 if none does."""
        low, high = 0, most
        best = await tokens(0)
        while low < high and len(best) <= self.prompt_length:
            middle = (low + high + 1) // 2
            ids = await tokens(middle)
            if len(ids) <= self.prompt_length:
                low, best = middle, ids
            else:
                high = middle - 1
        return low, best
