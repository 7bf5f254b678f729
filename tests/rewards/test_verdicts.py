# SPDX-License-Identifier: Apache-2.0
"""The table of verdicts: verl's and ours, computed anew; and answers made in many spellings of one value."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.utils.reward_score import default_compute_score, search_r1_like_qa_em

from verl_ext.rewards import caged, default, math, qa
from verl_ext.rewards.notation import LONGEST, normal

ROOT = Path(__file__).parents[2]
TABLE = [json.loads(line) for line in (Path(__file__).parent / "verdicts.jsonl").read_text("utf-8").splitlines()]
CODE = {*default.PROGRAMS}


def score(given: Any) -> float:
    return float(given["score"] if isinstance(given, dict) else given)


def ours(row: dict[str, Any]) -> float:
    asked = row["source"], row["answer"], row["truth"]
    if row["judge"] == "qa":
        return score(qa.compute_score(*asked))
    return score({"math": math, "default": default}[row["judge"]].compute_score(*asked, timeout_s=60.0))


def kind(row: dict[str, Any]) -> str:
    return row["judge"] if row["judge"] != "default" else "programs" if row["source"] in CODE else row["source"][:6]


@pytest.mark.seconds
@pytest.mark.parametrize("judge", sorted({kind(row) for row in TABLE}))
def test_both_verdicts_are_those_of_the_table(judge: str) -> None:
    wrong = []
    for row in TABLE:
        if kind(row) == judge:
            asked = row["source"], row["answer"], row["truth"]
            found = score(default_compute_score(*asked)), ours(row)
            if found != (row["verl"], row["ours"]):
                wrong.append((row, found))
    assert not wrong


def test_each_difference_is_documented_and_every_source_is_there() -> None:
    page = (ROOT / "docs" / "verdicts.md").read_text("utf-8")
    documented = set(re.findall(r"^\| ([\w ]+) \| (math|qa|programs) \| ([01]) \| ([01]) \|", page, re.MULTILINE))
    found = {
        (row["why"], kind(row), f"{row['verl']:.0f}", f"{row['ours']:.0f}")
        for row in TABLE
        if row["verl"] != row["ours"]
    }
    assert found == documented and all(("why" in row) == (row["verl"] != row["ours"]) for row in TABLE)
    assert len(TABLE) >= 300 and f"holds {len(TABLE)} answers" in page and f"know {len(caged.KNOWN)} equ" in page
    sources = {row["source"] for row in TABLE}
    assert {*default.COMPARED, *default.PROGRAMS, "aime2024", "searchR1_nq", "numina_olympiads"} <= sources


# ---- one value in many spellings ----


@pytest.fixture(scope="module", autouse=True)
def math_verify() -> Iterator[None]:
    """math-verify in this process: no answer here is a model's."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    caged.load_math()
    yield
    logging.disable(before)


def right(answer: str, truth: str) -> bool:
    return bool(caged._judged(answer, [truth])["right"])


BLANKS = st.sampled_from(["", " ", "  ", "\u00a0", "~", r"\ "])
AROUND = st.sampled_from(
    ["{}", "so {}.", "$x = {}$", "**{}**\n\n", "first $7$, then {} !", r"\boxed{{999}}, which is wrong. {}"]
)
WHOLE = st.integers(-9999, 9999)
UNITS = ["", "%", r"\%", r"^\circ", "°", r"\text{ cm}", " dollars", " km/h", "."]


def spelled(number: int, style: int) -> str:
    """A whole number as models write it."""
    sign, digits = "-" * (number < 0), str(abs(number))
    grouped = f"{abs(number):,}"
    return [
        *(
            f"{number}",
            f"{number}.0",
            f"{sign}{grouped}",
            f"{sign}{grouped.replace(',', '{,}')}",
            f"{'−' * bool(sign)}{digits}",
        ),
        *(
            rf"{sign}{grouped.replace(',', chr(92) + ',')}",
            rf"{sign}\frac{{{2 * abs(number)}}}{{2}}",
            f"{sign}{digits}/1",
        ),
    ][style]


@settings(max_examples=40, deadline=None)
@given(WHOLE, st.integers(0, 7), BLANKS, BLANKS, st.sampled_from(UNITS), AROUND)
def test_a_number_is_itself_and_no_other(
    number: int, style: int, before: str, after: str, unit: str, around: str
) -> None:
    answer = around.format(f"\\boxed{{{before}{spelled(number, style)}{unit}{after}}}")
    assert right(answer, str(number)), answer
    assert not right(answer, str(number + 1)), answer


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 999), st.booleans(), st.sampled_from(["%", r"\%", " percent", "％"]))
def test_a_percentage_is_its_number_or_its_hundredth(number: int, turned: bool, sign: str) -> None:
    for plain in (str(number), f"{number / 100:.2f}", rf"\frac{{{number}}}{{100}}"):
        answer, truth = (f"{number}{sign}", plain) if not turned else (plain, f"{number}\\%")
        assert right(rf"\boxed{{{answer}}}", truth)
        assert not right(rf"\boxed{{{answer}}}", f"{number + 1}\\%")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=4, unique=True), st.randoms(use_true_random=False))
def test_a_set_has_no_order_and_a_point_has(numbers: list[int], chance: Any) -> None:
    other = [*numbers]
    chance.shuffle(other)
    in_order, shuffled = (", ".join(map(str, some)) for some in (numbers, other))
    assert right(rf"\boxed{{\{{{shuffled}\}}}}", rf"\{{{in_order}\}}")
    assert not right(rf"\boxed{{\{{{in_order}, 77\}}}}", rf"\{{{in_order}\}}")
    assert right(rf"\boxed{{({shuffled})}}", f"({in_order})") is (numbers == other)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 20), st.integers(1, 9), st.integers(2, 10), st.booleans())
def test_mixed_numbers(whole: int, top: int, bottom: int, negative: bool) -> None:
    sign, value = "-" * negative, f"{whole * bottom + top}/{bottom}"
    for answer in (
        f"{whole} {top}/{bottom}",
        rf"{whole}\frac{{{top}}}{{{bottom}}}",
        rf"{whole} \dfrac{{{top}}}{{{bottom}}}",
    ):
        assert right(rf"\boxed{{{sign}{answer}}}", f"{sign}{value}"), answer


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40))
def test_any_text_can_be_normalised(text: str) -> None:
    once = normal(text)
    assert len(once) <= 20 * len(text) + 20


PUNCTUATION = st.sampled_from(["", ".", "!", ",", "'", "-"])


@pytest.mark.parametrize("unit", ["1", "1.", "12", "⁹", "1:", "1 111", "1,111", "x<1 or ", "1\\text{ab}", "1 aaaa "])
def test_a_text_longer_than_any_answer_is_left_as_it_is(unit: str) -> None:
    for end in ("", ".", "...", ":1:2"):
        text = unit * (LONGEST // len(unit)) + end
        normal(text[-LONGEST:])  # within the time of a test, and without an error
        longer = unit * LONGEST + end + unit
        assert normal(longer) == longer


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("aAbBtThHeE9 é", min_size=1, max_size=6), min_size=1, max_size=4),
    st.lists(st.text("aAbBtThHeE9 é", min_size=1, max_size=6), min_size=1, max_size=4),
    PUNCTUATION,
)
def test_exact_match_is_verls_where_more_than_articles_is_said(answer: list[str], truth: list[str], mark: str) -> None:
    said, accepted = " ".join(answer) + mark, " ".join(truth)
    plain = search_r1_like_qa_em.normalize_answer
    if plain(said) and plain(accepted):
        found = qa.compute_score("searchR1_nq", f"<answer>{said}</answer>", {"target": [accepted]})
        assert found["score"] == search_r1_like_qa_em.em_check(said, [accepted])
