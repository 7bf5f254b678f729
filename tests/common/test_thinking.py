# SPDX-License-Identifier: Apache-2.0
"""What an answer says, apart from its thinking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.common.thinking import MARKS, said


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("12", "12"),
        ("<think>11, no</think>12", "12"),
        ("<think>\n\n</think>\n\n12", "\n\n12"),
        ("11, no</think>12", "12"),  # the prompt has opened it
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>the answer is 12", ""),  # cut
        ("12 <think>or 13", "12 "),
        ("<think>a</think>", ""),
        ("[THINK]11[/THINK]12", "12"),
        ("<|channel|>analysis<|message|>11<|end|><|start|>assistant<|channel|>final<|message|>12", "12"),
        ("<|channel|>analysis<|message|>11", ""),
    ],
)
def test_what_comes_after_the_thinking_counts(text: str, counts: str) -> None:
    assert said(text) == counts


def test_thinking_that_the_prompt_has_opened() -> None:
    assert said("the answer is 12", opened=True) == ""
    assert said("it is 11</think>12", opened=True) == "12"


@given(st.lists(st.sampled_from([*(mark for pair in MARKS for mark in pair), "7", " "]), max_size=8).map("".join))
def test_no_mark_is_ever_said(text: str) -> None:
    assert not any(mark in said(text) for pair in MARKS for mark in pair)
    assert said(text) in text
