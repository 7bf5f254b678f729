# SPDX-License-Identifier: Apache-2.0
"""The mathematics reward: verdicts, and what happens to answers that keep a computer algebra system busy for ever."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import numpy as np
import pytest
from verl.utils.import_utils import load_extern_object

from verl_ext.rewards.caged import load_math
from verl_ext.rewards.judge import REASONS
from verl_ext.rewards.math import compute_score


def reasons(result: dict[str, float]) -> set[str]:
    """Why there was no verdict."""
    assert {f"judge_{reason}" for reason in REASONS} <= set(result)
    return {reason for reason in REASONS if result[f"judge_{reason}"]}


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        (r"So the answer is \boxed{0.5}.", "1/2", 1.0),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{1+x}", "x+1", 1.0),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
        ("There are 72 apples.", "72", 1.0),
        (r"\boxed{13}", "12", 0.0),
        (r"\boxed{12}", 12, 1.0),
        (r"\boxed{12}", ["11", "12"], 1.0),
        (r"\boxed{12}", np.array(["12"], dtype=object), 1.0),
        ("", "12", 0.0),
        ("no number", "12", 0.0),
    ],
)
def test_verdicts(answer: str, truth: Any, score: float) -> None:
    result = compute_score("math", answer, truth)
    assert result["score"] == result["acc"] == score and not reasons(result)
    assert all(type(value) is float for value in result.values())


@pytest.mark.parametrize(
    ("truth", "answer", "score"),
    [
        *(("50", r"50\%", 1.0), (r"50\%", "50", 1.0), (r"50\%", "0.5", 1.0), (r"50\%", r"\frac12", 1.0)),
        *(("0.5", "50%", 1.0), ("50", "0.5", 0.0), ("0.5", "50", 0.0), (r"50\%", r"0.5\%", 0.0), ("5", r"12.5\%", 0.0)),
        *(("1000", r"1\,000", 1.0), ("1000", "1 000", 1.0), ("1000", r"\$1{,}000", 1.0), ("1000", "1,001", 0.0)),
        *((r"\frac32", "1 1/2", 1.0), ("-1.5", r"-1\frac12", 1.0), ("1.5", "1½", 1.0), ("1/3", r"0.\overline{3}", 1.0)),
        *(
            ("90", "90°", 1.0),
            ("5", "5 dollars", 1.0),
            ("5", "€5", 1.0),
            ("12", "12 m/s", 1.0),
            ("5", r"5~\text{km}", 1.0),
        ),
        *(
            ("1500", "1.5e3", 1.0),
            ("0.0015", "1.5e-3", 1.0),
            ("2x", "2 x", 1.0),
            (r"2\pi", "2 pi", 1.0),
            ("x^{12}", "x¹²", 1.0),
        ),
        *(
            (r"(-\infty,3]", "(-∞, 3]", 1.0),
            (r"\emptyset", r"\varnothing", 1.0),
            (r"\sqrt2", "√2", 1.0),
            ("-5", "−5", 1.0),
        ),
        *(
            ("A", r"\text{A.}", 1.0),
            ("A", "(A)", 1.0),
            ("A", "B", 0.0),
            ("no", "on", 0.0),
            ("5", "5.", 1.0),
            ("0", "-0", 1.0),
        ),
        *(("2", r"\boxed{2}", 1.0), ("6:30", "7:30", 0.0), ("(1,2)", "[1,2]", 0.0), (r"\pm 2", r"\{2,-2\}", 1.0)),
    ],
)
def test_the_same_in_other_signs(truth: str, answer: str, score: float) -> None:
    assert compute_score("math", rf"so it is \boxed{{{answer}}}", truth, timeout_s=60.0)["score"] == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (r"\boxed{12} or better \boxed{13", 0.0),
        (r"\boxed{13} or better \boxed{12", 0.0),
        (r"\boxed{12} or better \boxed{}", 0.0),
        (r"\boxed{13}, no, that is wrong, it must be \boxed{12}", 1.0),
        (r"\boxed{12}, no, that is wrong, it must be \boxed{13}", 0.0),
        (r"so $x = \boxed 12$.", 1.0),
        (r"\boxed{{12}}", 1.0),
        (r"\fbox{12}", 1.0),
    ],
)
def test_the_last_box_is_the_answer(text: str, score: float) -> None:
    """As verl's reward for MATH has it, also where the answer was cut in that box."""
    assert compute_score("math", text, "12", timeout_s=60.0)["score"] == score


def test_a_parser_that_fails_is_noticed_before_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """As math-verify's does with Hydra's version of ANTLR: it raises on percentages, and math-verify keeps that."""
    from latex2sympy2_extended.antlr_parser import PSParser

    def missing(_: Any) -> None:
        raise AttributeError("'AtomContext' object has no attribute 'FUNC_GAMMA'")

    monkeypatch.setattr(PSParser.AtomContext, "FUNC_GAMMA", missing, raising=False)
    with pytest.raises(
        RuntimeError, match=r"does not see that '20.*%' is '10.*', with math-verify .*antlr4-python3-runtime"
    ):
        load_math.__wrapped__()


def test_unparsable_is_told_from_wrong() -> None:
    assert compute_score("math", "no number", "12")["parsed"] == 0.0
    assert compute_score("math", r"\boxed{13}", "12")["parsed"] == 1.0


@pytest.mark.parametrize("answer", [r"\boxed{9^{9^{9}}}", r"\boxed{9^{9^{9^{9}}}}"])
def test_a_tower_of_powers_is_stopped_and_counted(answer: str) -> None:
    result = compute_score("math", answer, "3", timeout_s=0.5)
    assert result["score"] == 0.0 and reasons(result) == {"timeout"}
    assert reasons(compute_score("math", r"\boxed{\frac{6}{2}}", "3")) == set()


@pytest.mark.seconds
def test_a_right_answer_does_not_wait_behind_towers() -> None:
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        towers = [
            pool.submit(compute_score, "math", rf"\boxed{{{i}^{{9^{{9^9}}}}}}", "3", timeout_s=2.0) for i in range(5, 9)
        ]
        assert compute_score("math", r"\boxed{\frac{6}{2}}", "3", timeout_s=60.0)["score"] == 1.0
        assert not any(tower.done() for tower in towers)
        assert all(reasons(tower.result()) == {"timeout"} for tower in towers)


@pytest.mark.seconds
def test_an_answer_that_fills_the_memory_is_wrong() -> None:
    result = compute_score("math", r"\boxed{10^{10^{10}}}", "3", timeout_s=2.0)
    assert result["score"] == 0.0 and reasons(result) <= {"memory", "timeout"} and reasons(result)


def test_long_answers_are_read_from_their_end() -> None:
    text = r"\boxed{7}" + "x" * 200 + r"\boxed{\frac{6}{2}}"
    assert compute_score("math", text, "3", max_chars=60)["score"] == 1.0
    assert compute_score("math", text, "7", max_chars=60)["score"] == 0.0


def test_from_many_threads() -> None:
    results: dict[int, float] = {}

    def judge(i: int) -> None:
        results[i] = compute_score("math", rf"\boxed{{\frac{{{2 * i}}}{{2}}}}", str(i if i % 2 else i + 1))["score"]

    threads = [threading.Thread(target=judge, args=(i,)) for i in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: float(i % 2) for i in range(1, 17)}


def test_as_verl_loads_it() -> None:
    function: Any = load_extern_object("pkg://verl_ext.rewards.math", "compute_score")
    arguments = {"data_source": "math", "solution_str": r"\boxed{3}", "ground_truth": "3", "extra_info": {}}
    assert function(**arguments, reward_router_address=None, reward_model_tokenizer=None)["score"] == 1.0
    with pytest.raises(TypeError, match="reward_kwargs.time_limit is not an option .*known options: timeout_s"):
        function(**arguments, time_limit=1)
    with pytest.raises(ValueError, match="timeout_s=0"):
        function(**arguments, timeout_s=0)
    with pytest.raises(ValueError, match="no answer to compare with: the ground truth is None"):
        function(**{**arguments, "ground_truth": None})
