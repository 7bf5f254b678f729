# SPDX-License-Identifier: Apache-2.0
"""Parsing, scoring and feedback, with reasoning-gym's own verifiers."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from verl_ext.rewards.caged import load_dataset
from verl_ext.rewards.judge import Judgement
from verl_ext.rollout.reasoning_gym_task import FEEDBACK, PARSERS, ReasoningGymTask


def task(answer: str = "12", parser: str = "strict", dataset: str = "chain_sum", **kwargs: Any) -> ReasoningGymTask:
    entry = {"question": "3 + 9 =", "answer": answer, "metadata": {}}
    return ReasoningGymTask(dataset, json.dumps({"seed": 0, "size": 1}), entry, parser, **kwargs)


@pytest.mark.parametrize(
    ("text", "solved", "feedback"),
    [
        ("12", True, "Right."),
        (" 12\n", True, "Right."),
        ("+12.0", True, "Right."),
        ("11", False, "Too low."),
        ("-12", False, "Too low."),
        ("13", False, "Too high."),
        ("1,200", False, "Too high."),
        ("twelve", False, "Not a number."),
        ("1e99999999", False, "Not a number."),
        ("12 34", False, "Not a number."),
        ("the answer is 12", False, "Not a number."),
        ("", False, "No answer."),
        ("  \n", False, "No answer."),
    ],
)
def test_strict_number(text: str, solved: bool, feedback: str) -> None:
    verdict = task().judge(text)
    assert (verdict.solved, verdict.feedback) == (solved, feedback)
    assert (verdict.parsed is None) == (feedback in ("Not a number.", "No answer."))
    assert verdict.feedback in FEEDBACK


def test_last_number_of_the_first_line() -> None:
    lenient = task(parser="last_number")
    assert lenient.judge("3 + 9 = 12.\nSo 13").solved
    assert lenient.judge("\n it is 12, yes").solved
    assert lenient.judge("it is 13").feedback == "Too high."
    assert lenient.judge("no idea").feedback == "Not a number."
    assert task("1.75e-22", "last_number").judge("about 1.74e-22").feedback == "Too low."


def test_part_of_the_score_is_not_success() -> None:
    # The verifier gives 2/3 to "112" because it contains "12".
    verdict = task().judge("112")
    assert verdict.score == pytest.approx(2 / 3)
    assert not verdict.solved and verdict.feedback == "Too high."
    assert task(success_threshold=0.5).judge("112").solved


def test_answers_that_are_no_numbers() -> None:
    words = ReasoningGymTask(
        "spell_backward",
        json.dumps({"seed": 0, "size": 1}),
        {"question": "Spell dog backward", "answer": "god", "metadata": {"word": "dog", "word_len": 3}},
    )
    assert words.judge("god").solved
    assert words.judge("dog").feedback == "Wrong."
    assert words.judge("").feedback == "No answer."


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "dataset",
    ["power_function", "coin_flip", "decimal_arithmetic", "spell_backward", "sudoku", "n_queens", "rotate_matrix"],
)
def test_reference_answers_are_right(dataset: str, parser: str) -> None:
    """Numbers with an exponent and answers of many lines among them."""
    made = load_dataset(dataset, '{"seed": 1, "size": 40}')
    for entry in itertools.islice(made, 40 if dataset in ("power_function", "coin_flip") else 3):
        text = str(entry["answer"])
        parsed, verdict = ReasoningGymTask(dataset, "{}", entry, parser)._parse(text)
        assert verdict is None and made.score_answer(parsed, entry) == 1.0, text


def test_rows_are_read_from_extra_info() -> None:
    info = {"dataset": "chain_sum", "config_json": '{"seed": 1}', "entry_json": '{"question": "q", "answer": "1"}'}
    read = ReasoningGymTask.from_extra_info({**info, "parser": None})
    assert read.question == "q" and read.parser == "strict"
    with pytest.raises(ValueError, match="extra_info lacks dataset, config_json, entry_json"):
        ReasoningGymTask.from_extra_info(None)
    with pytest.raises(ValueError, match="extra_info lacks entry_json"):
        ReasoningGymTask.from_extra_info({**info, "entry_json": ""})
    with pytest.raises(ValueError, match="entry_json is not valid JSON"):
        ReasoningGymTask.from_extra_info({**info, "entry_json": "{"})
    with pytest.raises(ValueError, match=f"unknown; use one of {sorted(PARSERS)!r}".replace("[", r"\[")):
        ReasoningGymTask.from_extra_info({**info, "parser": "telepathy"})


def test_unknown_dataset_and_bad_configuration_are_named() -> None:
    with pytest.raises(ValueError, match="'chain_of_fools'"):
        load_dataset("chain_of_fools", "{}")
    with pytest.raises(ValueError, match="chain_sum.*min_turms"):
        load_dataset("chain_sum", '{"min_turms": 2}')


def test_an_answer_that_brings_about_a_score_out_of_range_is_wrong() -> None:
    """Nine right letters and one more: nine ninths are 1.0000000000000002. The rollout was missing."""
    entry = {"question": "Spell ihgfedcba backward", "answer": "abcdefghi", "metadata": {}}
    spelled = ReasoningGymTask("spell_backward", json.dumps({"seed": 0, "size": 1}), entry)
    verdict = spelled.judge("abcdefghij")
    assert (verdict.score, verdict.solved, verdict.reason) == (0.0, False, "error")
    assert spelled.judge("abcdefghi").solved and spelled.judge("abcdefghx").score == pytest.approx(8 / 9)


@pytest.mark.parametrize("score", [-0.5, 1.5, None, "1.0", [1.0]])
def test_scores_out_of_range_are_refused(score: Any) -> None:
    with pytest.raises(ValueError, match="expected a number in"):
        task()._verdict("12", Judgement(score))


@pytest.mark.parametrize("answer", ["nan", "NaN", "-nanj", "nan + nani", "(nan)"])
def test_what_is_no_number_is_near_to_none(answer: str) -> None:
    """complex_arithmetic takes exp(-distance), at most 1, and of min(1, NaN) Python makes 1."""
    config = '{"seed": 1, "size": 1}'
    entry = load_dataset("complex_arithmetic", config)[0]
    made = ReasoningGymTask("complex_arithmetic", config, entry)
    assert made.judge(answer).score == 0.0 and made.judge(entry["answer"]).solved
