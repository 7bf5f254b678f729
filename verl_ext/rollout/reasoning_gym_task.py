# SPDX-License-Identifier: Apache-2.0
"""Tasks of the PyPI package ``reasoning-gym`` as multi-turn problems: parse an answer, score it, say what was wrong.

The score is always the one of the task's own verifier (``dataset.score_answer``). What is added here is the parsing of
a model's text and one line of feedback that a model can act on. A dataset row carries everything needed (the dataset's
name, its configuration and the generated entry, as JSON), so nothing is generated again while training.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

TOO_LOW = "Too low."
TOO_HIGH = "Too high."
NOT_A_NUMBER = "Not a number."
EMPTY = "No answer."
WRONG = "Wrong."
RIGHT = "Right."

#: Every line of feedback that :meth:`ReasoningGymTask.judge` can give; the demo's tokenizer is trained on them.
FEEDBACK = (TOO_LOW, TOO_HIGH, NOT_A_NUMBER, EMPTY, WRONG, RIGHT)

_NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?")


def _parse_strict(text: str, numeric: bool) -> str | None:
    answer = text.strip()
    if not answer:
        return None
    return answer if not numeric or _NUMBER.fullmatch(answer) else None


def _parse_last_number(text: str, numeric: bool) -> str | None:
    stripped = text.strip()
    if not stripped:
        return None
    first_line = stripped.splitlines()[0]
    if not numeric:
        return first_line.strip()
    numbers = _NUMBER.findall(first_line)
    return numbers[-1].rstrip(",") if numbers else None


#: How an answer is read from the model's text. ``strict``: the whole text, which must be a number if the true answer
#: is one. ``last_number``: the last number of the first non-empty line (for models that answer in a sentence).
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
    """

    score: float
    solved: bool
    parsed: str | None
    feedback: str


@functools.lru_cache(maxsize=32)
def load_dataset(name: str, config_json: str) -> Any:
    """Build a reasoning-gym dataset, once per name and configuration in a process.

    Args:
        name: the dataset's registered name, e.g. ``chain_sum``.
        config_json: its configuration as a JSON object.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: unknown dataset or configuration key.
    """
    try:
        # One of its dependencies has invalid comparisons in its source, reported each time it is compiled.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
    except ImportError as e:
        raise ImportError("the task needs the package reasoning-gym: pip install 'reasoning-gym==0.1.25'") from e
    try:
        return reasoning_gym.create_dataset(name, **json.loads(config_json))
    except (TypeError, AssertionError, ValueError) as e:
        raise ValueError(f"reasoning-gym dataset {name!r} can't be built with {config_json}: {e}") from e


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
                "its config_json and the entry_json (make them with verl_ext.demo.data.build_rows)"
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

    def judge(self, text: str) -> Verdict:
        """Score a model's text with the dataset's verifier.

        Args:
            text: the decoded response, without special tokens.

        Returns:
            The verdict. A text that can't be parsed scores 0 and is not shown to the verifier.

        Raises:
            ValueError: the verifier returned something that is not a finite number in [0, 1].
            Exception: whatever the verifier raises.
        """
        truth = _as_number(str(self.entry["answer"]))
        parsed = PARSERS[self.parser](text, truth is not None)
        if parsed is None:
            return Verdict(0.0, False, None, NOT_A_NUMBER if truth is not None and text.strip() else EMPTY)
        score = float(load_dataset(self.dataset, self.config_json).score_answer(parsed, self.entry))
        if not 0.0 <= score <= 1.0:  # also false for NaN
            raise ValueError(
                f"the verifier of {self.dataset} scored {parsed!r} as {score}; expected a number in [0, 1]"
            )
        if score >= self.success_threshold:
            return Verdict(score, True, parsed, RIGHT)
        value = _as_number(parsed)
        if truth is None or value is None or value == truth:
            return Verdict(score, False, parsed, WRONG)
        return Verdict(score, False, parsed, TOO_LOW if value < truth else TOO_HIGH)
