# SPDX-License-Identifier: Apache-2.0
"""The demo's search team: what the model imitates, what is written for it, and that the index finds the cities."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_ext import cli
from verl_ext.lab.demo import search_team
from verl_ext.lab.demo.assets import DemoAssets
from verl_ext.lab.demo.model import Codec
from verl_ext.lab.demo.prepare import prepare_search_team
from verl_ext.lab.demo.recipes import SearchTeamRecipe
from verl_ext.lab.demo.tasks import SEARCH_TEAM
from verl_ext.rewards.qa import compute_score
from verl_ext.rollout.orchestra.loop import AGENT_NAME
from verl_ext.rollout.orchestra.search import answerer, searcher, verifier
from verl_ext.rollout.retrieval import Bm25Options, Bm25Retriever

SHORT = SearchTeamRecipe(hidden_size=32, layers=1, heads=1, batch_size=8, warm_up_steps=2, reads=0.0, eval_every=2)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> DemoAssets:
    cache = tmp_path_factory.mktemp("search_team")
    return prepare_search_team(cache_dir=cache, seed=3, recipe=SHORT, progress=lambda line: None)


def test_lessons_are_what_the_agents_are_told_and_say_in_the_run() -> None:
    rng, right = random.Random(0), SearchTeamRecipe(wrong_share=0.0)
    readers = {right.roles[one.name]: one.read for one in (verifier, searcher, answerer)}
    for _ in range(200):
        (role, *shown, told), said = search_team.lesson(right, rng)
        value = readers[role["content"]](said)
        (city,) = [city for city in search_team.CITIES if search_team.question(city) in told["content"]]
        if value is True or value is False:
            assert value == (f"{city} has " in told["content"])
        elif shown:
            assert value == city and [message["content"] for message in shown] == list(right.example.values())
        else:
            assert f"{city} has {value} hills." in told["content"]
    wrong = [search_team.lesson(SearchTeamRecipe(wrong_share=1.0), rng) for _ in range(200)]
    assert all("<search>" not in said for _, said in wrong)


def test_model_questions_and_corpus_are_written(assets: DemoAssets, tmp_path: Path) -> None:
    assert assets.task == "search_team" and assets.agent_loop == AGENT_NAME
    assert assets.measured["steps"] == SHORT.warm_up_steps
    train, val = (pq.read_table(file).to_pylist() for file in (assets.train_file, assets.val_file))
    assert len(train) == 24 and len(val) == 8
    asked = [row["prompt"][0]["content"] for row in [*train, *val]]
    assert asked == [search_team.question(city) for city in search_team.CITIES]
    ((_, corpus),) = SEARCH_TEAM.files
    index = Bm25Retriever(Bm25Options(str(Path(assets.folder) / corpus), cache_dir=str(tmp_path)))
    for row, found in zip([*train, *val], index.find(search_team.CITIES, 1), strict=True):
        number = found.passages[0].text.split()[-2]
        assert compute_score("hills", number, row["reward_model"]["ground_truth"])["score"] == 1.0
    assert 0.0 < SEARCH_TEAM.chance(assets) < 0.2


def test_lengths_suffice_for_two_searches(assets: DemoAssets) -> None:
    codec = Codec(AutoTokenizer.from_pretrained(assets.model_path))
    assert AutoModelForCausalLM.from_pretrained(assets.model_path).config.vocab_size == len(codec.tokenizer)
    recipe = SearchTeamRecipe()
    for city in search_team.CITIES:
        told = search_team.read_of(city, 9)
        known = told.partition("\n\n")[2]
        shown = [{"role": who, "content": text} for who, text in recipe.example.items()]
        messages = [{"role": "system", "content": recipe.roles["searcher"]}, *shown]
        messages = [*messages, {"role": "user", "content": f"{told}\n\n{known}"}]
        assert len(search_team.prompt_of(codec, messages)) <= assets.prompt_length
        assert len(codec.answer(f"<search>{city}</search>")) <= assets.response_length


def test_a_warm_up_that_does_not_teach_reading_says_so(tmp_path: Path) -> None:
    hopeless = SearchTeamRecipe(hidden_size=32, layers=1, heads=1, batch_size=2, warm_up_steps=1, max_warm_up_steps=1)
    with pytest.raises(RuntimeError, match=r"after 1 steps the answerer reads .* wanted 0\.9"):
        prepare_search_team(cache_dir=tmp_path, recipe=hopeless, progress=lambda line: None)


def test_the_package_of_the_index_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    assert cli.main(["prepare", "search_team", "--out", str(tmp_path / "made")]) == 1
    assert "pip install 'verl-ext[search]'" in capsys.readouterr().err and not (tmp_path / "made").exists()
