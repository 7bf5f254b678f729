# SPDX-License-Identifier: Apache-2.0
"""The demo's chains: what is right, what is imitated, that the tokens hold it and the warm-up teaches it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_ext.lab.demo.chain import chain, compute_score, count_right, lesson, make_tokenizer, measure
from verl_ext.lab.demo.model import Codec
from verl_ext.lab.demo.prepare import prepare_chain
from verl_ext.lab.demo.recipes import ChainRecipe, samples_recipe, tail_recipe

RECIPES = {"chain": ChainRecipe(), "ends": samples_recipe(), "tail": tail_recipe()}
SHORT = ChainRecipe(circle=6, steps=(1, 2), lengths=(8, 12), ends=True, wanted=8, train_size=24, val_size=12)


def test_each_word_counts_from_the_word_before_it() -> None:
    assert count_right("5 8 11 14 1", 2, 3, 16) == (5, 5)
    assert count_right("5 9 12 15", 2, 3, 16) == (3, 4)  # 9 is wrong, 12 is right again
    assert count_right("5 x 8 +3 11", 2, 3, 16) == (3, 5)  # what is no number is wrong, and counted over
    assert count_right("5 40 11", 2, 3, 16) == (2, 3)  # of the tail, where one goes on as well: 43 % 16
    assert count_right("", 2, 3, 16) == (0, 0)
    assert count_right("\u0665 " + "9" * 5000, 2, 3, 16) == (0, 2)  # another script's 5, a number too long to read


def test_the_score_is_the_share_of_the_words_that_are_wanted_and_at_most_one() -> None:
    assert compute_score("chain", "5 8 11 15", "2 3 16 6") == {"score": 3 / 6, "acc": 3 / 4}
    assert compute_score("chain", "5 8 11 14", "2 3 16 2") == {"score": 1.0, "acc": 1.0}
    assert compute_score("chain", "", "2 3 16 6") == {"score": 0.0, "acc": 0.0}
    with pytest.raises(TypeError, match="strict is not an option"):
        compute_score("chain", "5", "2 3 16 6", strict=True)


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_imitated_is_as_right_as_the_recipe_says_and_survives_the_tokenizer(name: str) -> None:
    recipe, rng = RECIPES[name], random.Random(0)
    codec = Codec(make_tokenizer(recipe))
    if name == "tail":
        assert len(codec.tokenizer) == 4096
    right = words = 0
    for _ in range(100):
        said = " ".join(map(str, chain(3, 5, recipe, rng)))
        assert codec.decode(codec.answer(said)) == said and codec.tokenizer.unk_token_id not in codec.answer(said)
        found, count = count_right(said, 3, 5, recipe.circle)
        right, words = right + found, words + count
        ids, mask = lesson(codec, recipe, rng)
        learned = [token for token, one in zip(ids, mask, strict=True) if one]
        assert (codec.end_id in learned) == recipe.ends and len(learned) <= recipe.response_length
    expected = recipe.skill + (1 - recipe.skill - recipe.tail_share) / recipe.circle
    assert right / words == pytest.approx(expected, abs=0.03)


@pytest.mark.seconds
def test_model_and_task_are_made_and_the_warm_up_teaches_what_comes_next(tmp_path: Path) -> None:
    recipe = replace(SHORT, warm_up_steps=150, skill=0.9)
    assets = prepare_chain(cache_dir=tmp_path, seed=3, recipe=recipe, progress=lambda line: None)
    train, val = (pq.read_table(file).to_pylist() for file in (assets.train_file, assets.val_file))
    assert len(train) == 24 and len(val) == 12 and len({row["prompt"][0]["content"] for row in val}) == 12
    assert {row["reward_model"]["ground_truth"] for row in val} == {f"{n} {s} 6 8" for n in range(6) for s in (1, 2)}
    codec = Codec(AutoTokenizer.from_pretrained(assets.model_path))
    model = AutoModelForCausalLM.from_pretrained(assets.model_path)
    right, words = measure(codec, model, recipe, seed=3)
    assert right > 0.5 and 8 <= words <= 12.5
    assert assets.measured == {"right": round(right, 4), "words": round(words, 1), "steps": 150}
    assert assets.response_length == 13 and len(codec.user("0 +2")) == assets.prompt_length
