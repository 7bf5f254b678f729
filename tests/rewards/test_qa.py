# SPDX-License-Identifier: Apache-2.0
"""Exact match and F1 of short answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from verl.utils.import_utils import load_extern_object

from verl_ext.rewards.qa import compute_score, exact_match, extract, f1, normalize


def test_normalization() -> None:
    assert normalize("  The  Eiffel-Tower, in a PARIS! ") == "eiffeltower in paris"
    assert normalize("another theme") == "another theme"  # articles are words, not letters
    assert (normalize("The  A."), normalize(" +"), normalize(" ")) == ("the a", "+", "")  # nothing else is there


@pytest.mark.parametrize(
    ("answer", "accepted", "em", "overlap"),
    [
        ("The Beatles", ["beatles"], 1.0, 1.0),
        ("in Paris, France", ["Paris"], 0.0, 0.5),
        ("Paris France", ["Paris", "France Paris"], 0.0, 1.0),
        ("red red blue", ["red blue blue"], 0.0, 2 / 3),
        ("London", ["Paris"], 0.0, 0.0),
        ("yes it is", ["yes"], 0.0, 0.0),
        ("yes", ["Yes."], 1.0, 1.0),
        ("the", ["a"], 0.0, 0.0),
        (".", ["A"], 0.0, 0.0),
        ("A.", ["a"], 1.0, 1.0),
        ("-", ["+"], 0.0, 0.0),
        (" + ", ["+"], 1.0, 1.0),
        (".", [""], 0.0, 0.0),
    ],
)
def test_scores(answer: str, accepted: list[str], em: float, overlap: float) -> None:
    assert exact_match(answer, accepted) == em
    assert f1(answer, accepted) == pytest.approx(overlap)


@pytest.mark.parametrize(
    ("text", "truth", "options", "score", "answered"),
    [
        ("<answer>London</answer> no, <answer> Paris </answer>", "paris", {}, 1.0, 1.0),
        ("Paris", ["Paris"], {}, 1.0, 1.0),
        ("Paris", ["Paris"], {"require_tags": True}, 0.0, 0.0),
        ("<answer></answer>", "Paris", {}, 0.0, 0.0),
        ("", "Paris", {}, 0.0, 0.0),
        ("Paris France", {"target": np.array(["Paris"], dtype=object)}, {"metric": "f1"}, 2 / 3, 1.0),
        ("7", 7, {}, 1.0, 1.0),
    ],
)
def test_reward_function(text: str, truth: Any, options: dict[str, Any], score: float, answered: float) -> None:
    result = compute_score("nq", text, truth, **options)
    assert result["score"] == pytest.approx(score) and result["answered"] == answered
    assert set(result) == {"score", "acc", "f1", "answered"}


def test_tags_of_a_hostile_text_are_read_in_linear_time() -> None:
    """Where each opening is followed to the end of the text, these take a quarter of an hour."""
    assert extract("<answer>" * 100_000) is None
    assert extract("<answer>" * 100_000 + "</answer><ANSWER>\ud800 İris\n</answer>") == "? İris"


def test_as_verl_loads_it() -> None:
    function: Any = load_extern_object("pkg://verl_ext.rewards.qa", "compute_score")
    arguments = {"data_source": "nq", "solution_str": "Paris", "ground_truth": "Paris", "extra_info": None}
    assert function(**arguments, reward_router_address=None)["score"] == 1.0
    with pytest.raises(TypeError, match="reward_kwargs.metrics is not an option"):
        function(**arguments, metrics="f1")
    with pytest.raises(ValueError, match="metric is 'rouge'; choose em or f1"):
        function(**arguments, metric="rouge")
    with pytest.raises(ValueError, match="has no key 'target'"):
        function(**{**arguments, "ground_truth": {"answers": []}})
