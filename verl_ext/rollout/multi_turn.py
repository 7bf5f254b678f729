# SPDX-License-Identifier: Apache-2.0
"""The multi-turn loop: the model answers, the task's verifier gives feedback, the model may revise.

One :class:`AgentLoopOutput` is returned for each turn, so a turn-level estimator sees every model call. Turns
are token-in-token-out: the prompt of turn ``k + 1`` begins with the prompt and the response tokens of turn ``k``,
unchanged. A trajectory is ragged: it ends at the first right answer.

The model may call tools before it answers (``tools``, ``mcp``). A model call that calls tools is a turn like the
others, with a ``turn_index`` of its own, and what the tools said is in the next prompt. It is no answer: it is not
judged, its ``turn_reward`` is 0, and not ``max_turns`` but ``max_tool_rounds`` bounds it, anew for each answer; what
the model says after that is its answer, whatever it is. So all returns and groups see it as a turn that led to the
later ones.

Options live at ``actor_rollout_ref.rollout.custom.multi_turn`` (see :class:`MultiTurnOptions`), for example
``+actor_rollout_ref.rollout.custom.multi_turn.max_turns=3``. What belongs to the question (dataset, entry, parser)
comes with the data's row, in ``extra_info`` (see :mod:`verl_ext.rollout.reasoning_gym_task`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op

from verl_ext.integration.settings.options import read, select
from verl_ext.methods.options import AtLeastOne, Positive, fraction
from verl_ext.rewards.judge import REASONS
from verl_ext.rollout.reasoning_gym_task import ReasoningGymTask, Verdict
from verl_ext.rollout.shared import rows
from verl_ext.rollout.shared.plain_text import PlainText
from verl_ext.rollout.shared.probes import Refusal
from verl_ext.rollout.shared.template import ChatLoop
from verl_ext.rollout.shared.text_only import prompt_of
from verl_ext.rollout.shared.threads import HeldThreads, threads
from verl_ext.rollout.shared.tools import Tools, ToolSettings
from verl_ext.rollout.shared.turns import in_turn

#: The name to use in the dataset column ``agent_name`` or in ``rollout.agent.default_agent_loop``.
AGENT_NAME = "verl_ext_multi_turn"
OPTIONS_KEY = "actor_rollout_ref.rollout.custom.multi_turn"

#: Why a trajectory ended (``extra_fields["stop_reason"]`` of every turn of it).
STOP_SOLVED = "solved"
STOP_MAX_TURNS = "max_turns"
STOP_OVERLONG = "overlong_prompt"
STOP_EMPTY = "empty_response"
STOP_PROMPT = "prompt_error"
FAILURES = (STOP_EMPTY, STOP_PROMPT)

_fates = rows.Fates("the multi-turn loop", logging.getLogger(__name__))


@dataclass(frozen=True)
class MultiTurnOptions(ToolSettings):
    """Options of the loop, at ``actor_rollout_ref.rollout.custom.multi_turn``.

    Attributes:
        max_turns: answers the model may give to one question, at least 1.
        turn_reward: what one turn earns.
            ``success``: 1 for the turn whose answer is right (which ends the trajectory), else 0. Undiscounted, the
            turns of a trajectory sum to its success.
            ``improvement``: the rise of the best verifier score so far. Undiscounted, the turns sum to the best score.
            ``score``: the verifier's score of the turn. Right answers count 1, and an answer with partial credit earns
            it each time it is given, so the sum can exceed 1.
        success_threshold: verifier score in (0, 1] from which an answer is right.
        verifier_timeout_s: seconds of processor time for a verdict; an answer that takes longer is wrong.
        agent_id: the turn field ``agent_id``.
        tools: names of tools that the model may call before it answers: of the servers in `mcp`, or verl's
            (``rollout.multi_turn.tool_config_path``, ``function_tool_path``).
    """

    max_turns: AtLeastOne = 3
    turn_reward: Literal["success", "improvement", "score"] = "success"
    success_threshold: Annotated[Positive, fraction] = 1.0
    verifier_timeout_s: Positive = 30.0
    agent_id: str = "solver"
    tools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mcp and not self.tools:
            raise ValueError("mcp has servers, but tools names none of their tools; name those that the model may call")

    @classmethod
    def from_rollout_config(cls, rollout_config: Any) -> MultiTurnOptions:
        """Read the options from verl's rollout config (``actor_rollout_ref.rollout``).

        Raises:
            OptionError: unknown key or bad value; the message names the key and what is allowed.
        """
        return read(select(rollout_config, "custom"), "multi_turn", cls, where=OPTIONS_KEY)


@dataclass
class _Turn:
    """One model call before it becomes a turn; without a verdict it has called tools."""

    call: rows.ModelCall
    anchor_obs: str
    verdict: Any = None


@dataclass
class _Play:
    """A trajectory as far as it has come.

    Attributes:
        task, question: what the data ask, and their messages.
        messages: those of the conversation.
        anchor_obs, prompt_ids, schemas: what the next call is shown: observation, prompt, tools.
        turns: the calls so far.
        said: what each of them added to the conversation.
        answers, tool_rounds: answers so far; calls that used tools since the last of them.
        stop_reason, stop_detail: why it has ended; empty while it has not.
    """

    task: Any
    question: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    anchor_obs: str
    prompt_ids: list[int]
    schemas: list[dict[str, Any]] | None
    turns: list[_Turn] = field(default_factory=list)
    said: list[list[dict[str, Any]]] = field(default_factory=list)
    answers: int = 0
    tool_rounds: int = 0
    stop_reason: str = ""
    stop_detail: str = ""


def turn_rewards(verdicts: list[Verdict | None], kind: str) -> list[float]:
    """The reward of each turn of one trajectory.

    Args:
        verdicts: the verdict of each turn in order; None where there is none, which earns 0.
        kind: ``turn_reward`` of :class:`MultiTurnOptions`.

    Returns:
        One float a turn.
    """
    rewards, best = [], 0.0
    for verdict in verdicts:
        score = 0.0 if verdict is None else verdict.score
        solved = verdict is not None and verdict.solved
        if kind == "success":
            rewards.append(float(solved))
        elif kind == "score":
            rewards.append(score)
        else:
            rewards.append(max(score - best, 0.0))
        best = max(best, score)
    return rewards


@register(AGENT_NAME)
class MultiTurnVerifierLoop(ChatLoop):
    """Answer, feedback, revision, up to ``max_turns`` answers, one output a model call.

    Turn fields in ``extra_fields``: ``turn_reward`` (float), ``is_action_valid`` (bool: the answer could be parsed, or
    tools were called), ``agent_id`` (str), ``anchor_obs`` (str: the question and the latest feedback or answer of
    tools, without history), and for reading ``stop_reason`` (str), ``stop_detail`` (str), ``turn_score`` (float: the
    verifier's score); in the last turn ``failure`` (str: the stop reason if it is one of `FAILURES`), counted in
    ``rollout/failures/<reason>``.

    ``reward_score`` of every turn is the trajectory's outcome, so estimators that know no turns (GRPO) work on the same
    rollout: 1 or 0 for ``turn_reward: success``, the best score for ``improvement``, the last score for ``score``.
    ``reward_extra_info`` holds numbers that verl reports in validation: ``acc`` (right in the end), ``first_turn_acc``,
    ``turns`` (answers), ``valid_share`` (answers that could be parsed), ``overlong``, ``control_tokens_split`` (see
    `verl_ext.rollout.shared.plain_text`), and ``judge_<reason>``: answers that are wrong because they kept their
    judgement from an end (`verl_ext.rewards.judge`); with tools also ``tool_rounds`` (model calls that called some) and
    ``failure_tool_error`` (tools that failed, which the model has read). ``sandbox_calls`` and ``sandbox_seconds`` say
    what judging has cost.

    Over-long prompts: a first prompt longer than ``rollout.prompt_length`` is an error (set
    ``data.filter_overlong_prompts=True``, or raise ``data.max_prompt_length``); nothing is cut silently. A later one
    ends the trajectory with what it has, ``stop_reason="overlong_prompt"``; so does an answer of which no prompt can be
    made, since the chat template or verl's builder raises on it, by ``stop_reason="prompt_error"``.
    A verifier that is broken, whatever the answer, ends its trajectory: the loop raises, and the rollout is missing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = self.read_options()
        self.tools: Tools | None = None
        self.tools_failed = 0
        if getattr(self.options, "tools", ()):
            verls, given = self.rollout_config.get("multi_turn") or {}, kwargs.get("tools")
            own = threads(self.config, "tools")
            self.tools = Tools(
                verls, given, self.tokenizer, self.options, OPTIONS_KEY, self._tool_failed, own, self.chat
            )
        self.prompt_length = int(self.rollout_config.prompt_length)
        self.plain = PlainText(self.tokenizer)

    def _tool_failed(self) -> None:
        self.tools_failed += 1

    def read_options(self) -> Any:
        """What the run says of the loop: at least ``max_turns`` and ``agent_id``."""
        return MultiTurnOptions.from_rollout_config(self.rollout_config)

    def task(self, row: Mapping[str, Any]) -> Any:
        """What the dataset row asks, with its ``question``."""
        threshold = self.options.success_threshold
        return ReasoningGymTask.from_extra_info(row.get("extra_info"), success_threshold=threshold)

    async def judge(self, task: Any, text: str) -> Any:
        """The verdict on an answer: its ``feedback``, and whether the trajectory is ``solved``, which ends it."""
        return await task.judge_async(text, timeout_s=self.options.verifier_timeout_s)

    def max_turns(self) -> int:
        """Answers in this trajectory, at most."""
        return int(self.options.max_turns)

    def kept(self, turns: list[_Turn]) -> list[int] | None:
        """Numbers of the turns that the next prompt shows; None: those of this one and the last, token by token."""
        return None

    @rollout_trace_op
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> list[AgentLoopOutput]:
        """Play one trajectory.

        Args:
            sampling_params: temperature and so on, passed to the engine.
            priority: scheduling priority of the request.
            **kwargs: the dataset row: ``raw_prompt`` (chat messages), ``extra_info`` (the task), and for tools
                ``tools_kwargs``.

        Returns:
            One output a turn, in order; never empty.

        Raises:
            ValueError: the first prompt is too long or not text, the row has no task, or the verifier gave no score.
            JudgeError: the verifier is broken, whatever the answer.
            HeldThreads: too many calls of tools hang for another to begin.
            RuntimeError: the engine returned no token for the first turn; or see `rows.HOPELESS`.
        """
        request_id = rows.request_name(self, int(priority), kwargs.get("session_id", 0))
        play = await self._begin(request_id, kwargs)
        while not play.stop_reason:
            call = await rows.generate(self, request_id, play.prompt_ids, sampling_params, int(priority))
            if call.response_ids:
                play.turns.append(_Turn(call, play.anchor_obs))
                said = await self._use_tools(play) or await self._judge_answer(play)
                if not play.stop_reason:
                    await self._continue(play, said)
            elif play.turns:
                play.stop_reason = STOP_EMPTY
            else:
                raise RuntimeError(
                    f"the rollout engine returned no token for row index={kwargs.get('index', '?')}; "
                    "check rollout.response_length, max_model_len and the engine's log"
                )
        await in_turn()
        return self._rows(play.turns, play.stop_reason, play.stop_detail)

    async def _begin(self, request_id: str, row: Mapping[str, Any]) -> _Play:
        """The trajectory before its first call."""
        messages = prompt_of(row)
        task = self.task(row)
        schemas = None
        if self.tools:
            self.tools.begin(request_id, row.get("tools_kwargs"), {})
            if not self.options.tools_in_prompt:
                schemas = self.tools.schemas(OPTIONS_KEY, self.options.tools)
        prompt_ids = await rows.encode(self, messages, schemas)
        if len(prompt_ids) > self.prompt_length:
            bare = len(await rows.encode(self, messages)) if schemas else len(prompt_ids)
            raise ValueError(
                f"the prompt of row index={row.get('index', '?')} has {len(prompt_ids)} tokens, more than "
                f"rollout.prompt_length={self.prompt_length}: raise data.max_prompt_length or "
                + (
                    "set data.filter_overlong_prompts=True"
                    if bare > self.prompt_length
                    else f"name fewer tools, whose schemas are {len(prompt_ids) - bare} of them "
                    "(data.filter_overlong_prompts does not see them)"
                )
            )
        return _Play(task, messages, messages, task.question, prompt_ids, schemas)

    async def _use_tools(self, play: _Play) -> list[dict[str, Any]]:
        """What the last call's tools said, after the call itself; empty where it is an answer."""
        if not self.tools or play.tool_rounds >= self.options.max_tool_rounds:
            return []
        said = await self.tools.use(OPTIONS_KEY, self.options.tools, play.turns[-1].call, play.messages)
        play.tool_rounds += bool(said)
        return list(said)

    async def _judge_answer(self, play: _Play) -> list[dict[str, Any]]:
        """The last call as an answer, and the feedback on it; sets the stop reason where it is the last one."""
        turn = play.turns[-1]
        text = await rows.decode(self, turn.call.response_ids)
        timing: dict[str, float] = {}
        with simple_timer("compute_score", timing):
            turn.verdict = await self.judge(play.task, await self._counted(turn.call.response_ids, text))
        turn.call.metrics.compute_score = timing["compute_score"]
        play.answers, play.tool_rounds = play.answers + 1, 0
        if turn.verdict.solved:
            play.stop_reason = STOP_SOLVED
        elif play.answers >= self.max_turns():
            play.stop_reason = STOP_MAX_TURNS
        return [{"role": "assistant", "content": text}, {"role": "user", "content": turn.verdict.feedback}]

    async def _continue(self, play: _Play, said: list[dict[str, Any]]) -> None:
        """Make the prompt of the next call of what was `said`, the last call first; or set the stop reason."""
        kept = self.kept(play.turns)
        try:
            play.said.append([self.plain.message(message) for message in said])
            if kept is None:
                messages, last = play.messages + play.said[-1], play.turns[-1].call
                answered = len(play.messages) + 1
                play.prompt_ids = await threads(self.config, "tokenising").run(
                    self.chat.follow,
                    messages[:answered],
                    messages[answered:],
                    last.prompt_ids + last.response_ids,
                    play.schemas,
                )
            else:
                messages = play.question + [message for number in kept for message in play.said[number]]
                play.prompt_ids = await rows.encode(self, messages)
        except HeldThreads:
            raise
        except Refusal as error:  # such as a chat template that can't take what the model gave a tool
            play.stop_reason, play.stop_detail = STOP_PROMPT, str(error)
            return
        if len(play.prompt_ids) > self.prompt_length:
            play.stop_reason = STOP_OVERLONG
            play.stop_detail = f"{len(play.prompt_ids)} tokens > rollout.prompt_length={self.prompt_length}"
        play.messages = messages
        play.anchor_obs = "\n".join([play.task.question, *(message["content"] for message in said[1:])])

    async def _counted(self, ids: Sequence[int], text: str) -> str:
        """The part of an answer that is judged."""
        if getattr(self.options, "read_thinking", False):
            return text
        return str(await threads(self.config, "decoding").run(self.chat.said, ids))

    def _rows(self, turns: list[_Turn], stop_reason: str, stop_detail: str) -> list[AgentLoopOutput]:
        failure = stop_reason if stop_reason in FAILURES else ""
        # An empty answer is the model's own; of many prompts that can't be made another is the cause.
        if _fates.note(failure if failure == STOP_PROMPT else "", stop_detail):
            raise RuntimeError(
                f"no prompt of a further turn could be made in the first {_fates.failures.total()} trajectories of "
                f"this process, last: {stop_detail}. Mend the chat template, the tools or {OPTIONS_KEY}.*"
            )
        verdicts = [turn.verdict for turn in turns]
        rewards = turn_rewards(verdicts, self.options.turn_reward)
        answers = [verdict for verdict in verdicts if verdict is not None]  # the other turns call tools
        solved = [verdict.solved for verdict in answers] or [False]
        unjudged = [verdict.reason for verdict in answers]
        last = answers[-1].score if answers else 0.0
        info = {
            "acc": float(solved[-1]),
            "first_turn_acc": float(solved[0]),
            "turns": float(len(answers)),
            "valid_share": sum(verdict.parsed is not None for verdict in answers) / max(len(answers), 1),
            "overlong": float(stop_reason == STOP_OVERLONG),
            **{f"judge_{reason}": float(unjudged.count(reason)) for reason in REASONS},
            "sandbox_calls": float(sum(verdict.cost[0] for verdict in answers)),
            "sandbox_seconds": sum(verdict.cost[1] for verdict in answers),
            "control_tokens_split": float(self.plain.split),
        }
        if self.tools:
            calls, failed = len(turns) - len(answers), self.tools_failed
            info |= {"tool_rounds": float(calls), "failure_tool_error": float(failed)}
        scores = [0.0 if verdict is None else verdict.score for verdict in verdicts]
        for turn, reward, score in zip(turns, rewards, scores, strict=True):
            turn.call.fields = {
                "turn_reward": reward,
                "turn_score": score,
                "is_action_valid": turn.verdict is None or turn.verdict.parsed is not None,
                "agent_id": self.options.agent_id,
                "anchor_obs": turn.anchor_obs,
                "turn_scores": scores,
            }
        return rows.make_rows(
            [turn.call for turn in turns],
            outcome=last if self.options.turn_reward == "score" else sum(rewards),
            info=info,
            common={"stop_reason": stop_reason, "stop_detail": stop_detail},
            failure=failure,
        )
