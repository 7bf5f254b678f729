# SPDX-License-Identifier: Apache-2.0
"""Tasks of the PyPI package ``reasoning-gym`` as multi-turn problems: parse an answer, score it, say what was wrong.

The score is always the one of the task's own verifier (``dataset.score_answer``), in the sandbox unless it only
compares texts or decimal numbers: some evaluate the answer (:mod:`verl_ext.rewards.caged`). What is added here is the
parsing of a model's text and one line of feedback that a model can act on. A dataset row carries everything
needed (the dataset's name, its configuration and the generated entry, as JSON), so nothing is generated again while
training.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from verl_ext.rewards import caged
from verl_ext.rewards.judge import Judgement, judge, judge_async

_CAGED = "verl_ext.rewards.caged"
_loading = ThreadPoolExecutor(1, thread_name_prefix="reasoning-gym")  # one builds a dataset, the others find it

TOO_LOW = "Too low."
TOO_HIGH = "Too high."
NOT_A_NUMBER = "Not a number."
EMPTY = "No answer."
WRONG = "Wrong."
RIGHT = "Right."

#: Every line of feedback that :meth:`ReasoningGymTask.judge` can give; the demo's tokenizer is trained on them.
FEEDBACK = (TOO_LOW, TOO_HIGH, NOT_A_NUMBER, EMPTY, WRONG, RIGHT)

# Of an exponent few digits: some verifiers write the number out.
_NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?!\d))?")


def _parse_strict(text: str, numeric: bool) -> str | None:
    answer = text.strip()
    if not answer:
        return None
    return answer if not numeric or _NUMBER.fullmatch(answer) else None


def _parse_last_number(text: str, numeric: bool) -> str | None:
    stripped = text.strip()
    if not stripped or not numeric:
        return stripped or None
    numbers = _NUMBER.findall(stripped.splitlines()[0])
    return numbers[-1].rstrip(",") if numbers else None


#: How an answer is read from the model's text. ``strict``: the whole text, which must be a number if the true answer
#: is one. ``last_number``: the last number of the first non-empty line (for models that answer in a sentence); the
#: whole text if the true answer is no number, since it may have many lines.
PARSERS: dict[str, Callable[[str, bool], str | None]] = {"strict": _parse_strict, "last_number": _parse_last_number}


def _as_number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


@dataclass(frozen=True)
class Verdict:
    """What the verifier says of one answer.

    Attributes:
        score: the verifier's score, a float in [0, 1].
        solved: ``score >= success_threshold`` of the task.
        parsed: the answer as read from the text; None if it could not be read.
        feedback: one line for the model's next turn.
        reason: why a parsed answer is wrong without a verdict, one of `verl_ext.rewards.judge.REASONS`; else empty.
        cost: calls of the sandbox that it took, and the seconds that their processes have lived.
    """

    score: float
    solved: bool
    parsed: str | None
    feedback: str
    reason: str = ""
    cost: tuple[int, float] = (0, 0.0)


@dataclass(frozen=True)
class ReasoningGymTask:
    """One question with its verifier.

    Attributes:
        dataset: reasoning-gym's name of the dataset.
        config_json: the dataset's configuration, a JSON object.
        entry: the generated entry: ``question`` (str), ``answer`` (str), ``metadata`` (dict).
        parser: a name of :data:`PARSERS`.
        success_threshold: the score from which an answer counts as right. Some verifiers give part of the score to an
            answer that merely contains the true one, so the default is the full score.
    """

    dataset: str
    config_json: str
    entry: dict[str, Any]
    parser: str = "strict"
    success_threshold: float = 1.0

    def __post_init__(self) -> None:
        if self.parser not in PARSERS:
            raise ValueError(f"extra_info.parser={self.parser!r} is unknown; use one of {sorted(PARSERS)}")

    @classmethod
    def from_extra_info(
        cls, extra_info: Mapping[str, Any] | None, *, success_threshold: float = 1.0
    ) -> ReasoningGymTask:
        """Read the task from a dataset row's ``extra_info``.

        Raises:
            ValueError: a key is missing or is not JSON; the message names it.
        """
        info = extra_info or {}
        missing = [key for key in ("dataset", "config_json", "entry_json") if not info.get(key)]
        if missing:
            raise ValueError(
                f"extra_info lacks {', '.join(missing)}: rows of the multi-turn loop carry the reasoning-gym dataset, "
                "its config_json and the entry_json (`verl-ext prepare reasoning_gym` makes such rows)"
            )
        try:
            entry = json.loads(info["entry_json"])
        except json.JSONDecodeError as e:
            raise ValueError(f"extra_info.entry_json is not valid JSON: {e}") from e
        return cls(
            dataset=str(info["dataset"]),
            config_json=str(info["config_json"]),
            entry=entry,
            parser=str(info.get("parser") or "strict"),
            success_threshold=success_threshold,
        )

    @property
    def question(self) -> str:
        """The question's text."""
        return str(self.entry["question"])

    def judge(self, text: str, *, timeout_s: float = 30.0) -> Verdict:
        """Score a model's text with the dataset's verifier, in the sandbox; blocks this thread.

        Args:
            text: the decoded response, without special tokens.
            timeout_s: seconds of processor time; an answer that takes longer is wrong.

        Returns:
            The verdict. A text that can't be parsed scores 0 and is not shown to the verifier. An answer that brings
            about a score outside of [0, 1] scores 0 too, with the reason ``error``.

        Raises:
            ValueError: a verifier that only compares returned something that is not a finite number in [0, 1].
            JudgeError: the verifier is broken: it fails on the reference answer too, or can't be run.
        """
        parsed, verdict = self._parse(text)
        if verdict is None and caged.only_compares(self.dataset, self.config_json):
            verdict = self._compare(parsed)
        return verdict or self._verdict(parsed, judge(*self._questions(parsed), **self._how(timeout_s)))

    async def judge_async(self, text: str, *, timeout_s: float = 30.0) -> Verdict:
        """:meth:`judge` that leaves the event loop to others."""
        parsed, verdict = self._parse(text)
        if verdict is None and await self._only_compares():
            verdict = self._compare(parsed)
        return verdict or self._verdict(parsed, await judge_async(*self._questions(parsed), **self._how(timeout_s)))

    async def _only_compares(self) -> bool:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_loading, caged.only_compares, self.dataset, self.config_json)

    def _parse(self, text: str) -> tuple[str, Verdict | None]:
        numeric = _as_number(str(self.entry["answer"])) is not None
        parsed = PARSERS[self.parser](text, numeric)
        if parsed is None:
            return "", Verdict(0.0, False, None, NOT_A_NUMBER if numeric and text.strip() else EMPTY)
        return parsed, None

    def _compare(self, parsed: str) -> Verdict:
        dataset = caged.load_dataset(self.dataset, self.config_json)
        return self._verdict(parsed, Judgement(dataset.score_answer(parsed, self.entry)))

    def _questions(self, parsed: str) -> tuple[str, list[Any], list[Any]]:
        of = [self.dataset, self.config_json]
        return f"{_CAGED}:reasoning_gym", [*of, parsed, self.entry], [*of, str(self.entry["answer"]), self.entry]

    def _how(self, timeout_s: float) -> dict[str, Any]:
        return {"timeout_s": timeout_s, "warm": (f"{_CAGED}:load_dataset", self.dataset, self.config_json)}

    def _verdict(self, parsed: str, given: Judgement) -> Verdict:
        cost = given.calls, given.seconds
        if given.reason:
            return Verdict(0.0, False, parsed, WRONG, given.reason, cost)
        score = given.value
        if not isinstance(score, int | float) or not 0.0 <= score <= 1.0:  # also false for NaN
            raise ValueError(
                f"the verifier of {self.dataset} scored {parsed!r} as {score!r:.80}; expected a number in [0, 1]"
            )
        if score >= self.success_threshold:
            return Verdict(score, True, parsed, RIGHT, "", cost)
        truth, value = _as_number(str(self.entry["answer"])), _as_number(parsed)
        if truth is None or value is None or value == truth:
            return Verdict(score, False, parsed, WRONG, "", cost)
        return Verdict(score, False, parsed, TOO_LOW if value < truth else TOO_HIGH, "", cost)
