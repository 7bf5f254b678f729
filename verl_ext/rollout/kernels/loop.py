# SPDX-License-Identifier: Apache-2.0
"""The agent loop ``verl_ext_kernels``: a kernel, what the judge says of it, a better kernel, up to ``max_turns`` turns.

It is the multi-turn loop (:mod:`verl_ext.rollout.multi_turn`) with another judge. All turns are played: a right kernel
can get faster. A row of the data says its task in ``extra_info["task"]``, a name or a chain (`tasks.Task.of`), or is a
problem of KernelBench as ``verl-ext reproduce prepare`` writes it.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, register

from verl_ext.integration.settings.options import select
from verl_ext.methods.kernel_reward import stts_select
from verl_ext.rollout.kernels.feedback import feedback, note, prompt
from verl_ext.rollout.kernels.judge import Verdict
from verl_ext.rollout.kernels.options import FAST, KernelOptions, Stts, read_options
from verl_ext.rollout.kernels.pool import Pool
from verl_ext.rollout.kernels.problems import task_of
from verl_ext.rollout.kernels.seat import Infrastructure
from verl_ext.rollout.kernels.tasks import Task
from verl_ext.rollout.multi_turn import FAILURES, MultiTurnVerifierLoop
from verl_ext.rollout.shared import rows
from verl_ext.rollout.shared.worker import validating

AGENT_NAME = "verl_ext_kernels"
INFRA = "infra"

_fates = rows.Fates("kernels", logging.getLogger(__name__))


@functools.lru_cache(maxsize=4)
def _pool(options: str, cage: str) -> Pool:
    return Pool(KernelOptions(**json.loads(options)), cage)


@dataclass(frozen=True)
class Judged:
    """A verdict as the conversation takes it.

    Attributes:
        verdict: the judge's; None if there is none.
        reward: of the turn.
        feedback: for the next one.
        solved: nothing more is to be said.
        problem: why there is no verdict.
    """

    verdict: Verdict | None
    reward: float
    feedback: str
    solved: bool
    problem: str = ""


@dataclass(frozen=True)
class Question:
    """A task with the words that ask it."""

    task: Task
    question: str
    index: int


@register(AGENT_NAME)
class KernelLoop(MultiTurnVerifierLoop):
    """Kernel, verdict, revision; one output a turn.

    Turn fields in ``extra_fields``: ``turn_reward`` (float), ``correct`` (bool), ``speedup`` and ``coverage`` (floats,
    0.0 unless right), ``decoy`` (bool), ``kernel_status`` and ``kernel_note`` (str: the times with their interval, or
    the error), ``prompt_index`` (int, ``extra_info.index``), ``is_action_valid`` (bool: there was code), ``agent_id``,
    ``anchor_obs``, ``stop_reason`` and ``stop_detail``.

    ``reward_score`` of every turn is the best turn's reward. ``reward_extra_info``: ``acc`` (the last kernel is right),
    ``speedup_last``, ``speedup_best``, ``coverage_last``, ``decoys`` (share of the turns), ``turns``, and
    ``fast_<p>_last``, ``fast_<p>_best`` (right, no decoy and at least so fast; best of the whole history). Validation
    may be played by sequential test-time scaling (`Stts`).

    A trajectory without a verdict, for which the machine is to blame, pays nothing, is in no statistic (it reports
    none of these numbers) and is not trained on; it is counted in ``rollout/failures/infra``.
    """

    def read_options(self) -> Any:
        return read_options(self.config)

    def task(self, row: Mapping[str, Any]) -> Any:
        info = row.get("extra_info") or {}
        if "task" in info:
            task = Task.of(str(info["task"]))
        elif "def get_inputs" in str((row.get("reward_model") or {}).get("ground_truth")):
            task = task_of(row)
        else:
            raise ValueError("extra_info lacks 'task': make the data with `verl-ext kernels data`")
        said = task.text if self.options.language == "fuse" else prompt(task, self.options.language)
        return Question(task, said, int(info.get("index", 0)))

    async def judge(self, task: Any, text: str) -> Any:
        self._prompt_index = task.index  # a loop object lives for one trajectory
        cage = str(select(select(select(self.config, "verl_ext"), "sandbox"), "cage", "required"))
        given = {name: getattr(self.options, name) for name in KernelOptions.__dataclass_fields__}
        try:
            verdict = await _pool(json.dumps(given, sort_keys=True), cage).evaluate(task.task, text)
        except Infrastructure as error:
            return Judged(None, 0.0, "", True, str(error))
        stop = self.options.stop_at
        done = stop is not None and verdict.speedup >= stop and not verdict.decoy
        pay = verdict.reward(self.options.speedup_rule, self.options.pay_decoys, **self.options.reward)
        return Judged(verdict, pay, feedback(verdict, self.options.language), done)

    def stts(self) -> Stts | None:
        """How a trajectory of validation is played; None: as in training."""
        stts = Stts(**self.options.stts)
        return stts if stts.iterations and validating.get() else None

    def max_turns(self) -> int:
        stts = self.stts()
        return super().max_turns() if stts is None else stts.max_turns

    def kept(self, turns: Any) -> list[int] | None:
        stts = self.stts()
        if stts is None or len(turns) < stts.turns:
            return None
        rewards = [turn.verdict.reward for turn in turns]
        return [int(number) for number in stts_select(rewards, stts.window, select=stts.select)]

    def _rows(self, turns: Any, stop_reason: str, stop_detail: str) -> list[AgentLoopOutput]:
        judged: list[Judged] = [turn.verdict for turn in turns]
        problem = next((one.problem for one in judged if one.verdict is None), "")
        if problem:
            stop_reason, stop_detail = INFRA, problem
        failure = stop_reason if stop_reason in (*FAILURES, INFRA) else ""
        if _fates.note(failure, stop_detail):
            raise RuntimeError(f"{rows.HOPELESS} trajectories have failed and none was well; the last: {stop_detail}")
        verdicts = [one.verdict or Verdict(INFRA) for one in judged]
        for turn, one, verdict in zip(turns, judged, verdicts, strict=True):
            turn.call.trained = not problem
            turn.call.fields = {
                "turn_reward": one.reward,
                "turn_scores": [each.reward for each in judged],
                "correct": verdict.correct,
                "speedup": verdict.speedup,
                "coverage": verdict.coverage,
                "decoy": verdict.decoy,
                "kernel_status": verdict.status,
                "kernel_note": note(verdict) or one.problem,
                "prompt_index": self._prompt_index,
                "is_action_valid": verdict.status != "no_code",
                "agent_id": self.options.agent_id,
                "anchor_obs": turn.anchor_obs,
            }
        worth = [verdict.worth for verdict in verdicts]
        info = {
            "acc": float(verdicts[-1].correct and not verdicts[-1].decoy),
            "speedup_last": worth[-1],
            "speedup_best": max(worth),
            "coverage_last": verdicts[-1].coverage,
            "decoys": sum(verdict.decoy for verdict in verdicts) / len(verdicts),
            "turns": float(len(verdicts)),
            **{f"fast_{p}_last": float(worth[-1] >= p) for p in FAST},
            **{f"fast_{p}_best": float(max(worth) >= p) for p in FAST},
        }
        outcome = 0.0 if problem else max(one.reward for one in judged)
        common = {"stop_reason": stop_reason, "stop_detail": stop_detail}
        calls = [turn.call for turn in turns]
        # Of a trajectory without a verdict nothing is known: it is in no mean of these numbers.
        return rows.make_rows(calls, outcome=outcome, info={} if problem else info, common=common, failure=failure)
