# SPDX-License-Identifier: Apache-2.0
"""The demo's lake: what is shown to the model, what it imitates, that the warm-up teaches, and what is written."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_ext.lab.demo.assets import DemoAssets
from verl_ext.lab.demo.lake import (
    WORDS,
    Walk,
    careful,
    demonstrations,
    environment,
    message,
    success_rate,
    tiles,
    uniform,
)
from verl_ext.lab.demo.model import Codec
from verl_ext.lab.demo.prepare import prepare_lake
from verl_ext.lab.demo.recipes import LakeRecipe
from verl_ext.rollout.environments.protocol import Observation

RECIPE = LakeRecipe()
SHORT = LakeRecipe(
    train_size=12,
    val_size=4,
    walks=60,
    random_share=0.0,
    batch_size=48,
    warm_up_steps=40,
    max_warm_up_steps=40,
    eval_size=32,
    success_range=(0.0, 1.0),
    valid_target=0.0,
)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> DemoAssets:
    return prepare_lake(cache_dir=tmp_path_factory.mktemp("lake"), seed=3, recipe=SHORT, progress=lambda line: None)


def test_a_careful_walker_looks_where_it_goes_and_whence_it_came() -> None:
    rng = random.Random(0)

    def word(view: str, *past: str) -> str:
        seen = Observation(f"on F; {view}", WORDS, "")
        return careful(seen, [("", said) for said in past], rng)

    assert word("left: F, down: H, right: G, up: F") == "right"
    assert word("left: F, down: F, right: H, up: F") == "down"
    assert word("left: F, down: H, right: edge, up: F", "right") == "up"  # back only where nothing else is left
    assert word("left: F, down: H, right: edge, up: H", "right") == "left"
    # The same view, another past, another right step: this is what the history in the prompt is for.
    view = "left: F, down: edge, right: H, up: F"
    assert word(view, "right") == "up" and word(view, "down") == "left"
    assert tiles("on S; left: edge, down: F, right: H, up: edge") == {
        "left": "edge",
        "down": "F",
        "right": "H",
        "up": "edge",
    }


def test_walks_end_and_chance_is_low() -> None:
    rng = random.Random(1)
    maps = range(300)
    at_random, with_care = (success_rate(policy, maps, RECIPE, rng) for policy in (uniform, careful))
    assert at_random < 0.06 and with_care > 0.85
    walk = Walk.start(5, RECIPE)
    for _ in range(RECIPE.max_steps):
        assert not walk.done
        walk.say("sing", RECIPE)  # no action: the step is spent
    assert walk.done and not walk.success and len({seen for seen, _ in walk.past}) == 1


def test_prompts_show_the_last_k_steps() -> None:
    walk = Walk.start(5, RECIPE)
    first = message(walk.seen, walk.past, RECIPE)
    assert ">" not in first and walk.seen.text in first
    for count in range(1, 5):
        walk.say("up", RECIPE)
        text = message(walk.seen, walk.past, RECIPE)
        assert text.count("> up") == min(count, RECIPE.history_length)


def test_demonstrations_are_half_noise_where_asked() -> None:
    clean = demonstrations(range(20), dataclasses.replace(RECIPE, random_share=0.0), random.Random(0))
    noisy = demonstrations(range(20), dataclasses.replace(RECIPE, random_share=1.0), random.Random(0))
    assert {word for _, word in clean} <= set(WORDS)

    def onto_hole(pairs: list[tuple[str, str]]) -> float:
        views = [(tiles(text.splitlines()[-2]), word) for text, word in pairs]
        return sum(view[word] in ("H", "edge") for view, word in views) / len(views)

    assert onto_hole(clean) == 0 and onto_hole(noisy) > 0.2


@pytest.mark.seconds
def test_files_are_what_the_loop_and_verl_read(assets: DemoAssets) -> None:
    assert assets.task == "lake" and assets.agent_loop == "verl_ext_step_wise"
    seeds = []
    for file, size in ((assets.train_file, 12), (assets.val_file, 4)):
        rows = pq.read_table(file).to_pylist()
        assert len(rows) == size and {row["agent_name"] for row in rows} == {assets.agent_loop}
        seeds += [row["extra_info"]["env_seed"] for row in rows]
    assert len(set(seeds)) == 16
    tokenizer = AutoTokenizer.from_pretrained(assets.model_path)
    codec = Codec(tokenizer)
    walk = Walk.start(7, SHORT)
    while not walk.done:
        text = message(walk.seen, walk.past, SHORT)
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        assert ids == codec.user(text) and len(ids) <= assets.prompt_length
        walk.say("up", SHORT)
    assert all(len(codec.answer(word)) < assets.response_length + 1 for word in WORDS)
    model = AutoModelForCausalLM.from_pretrained(assets.model_path)
    assert model.config.vocab_size == len(tokenizer) and model.config.eos_token_id == codec.end_id


@pytest.mark.seconds
def test_warm_up_beats_chance_and_is_seeded(assets: DemoAssets, tmp_path: Path) -> None:
    assert assets.measured["valid_answers"] > 0.4 and assets.measured["random"] < 0.2
    assert assets.measured["success"] > assets.measured["random"]
    again = prepare_lake(cache_dir=tmp_path, seed=3, recipe=SHORT, progress=lambda line: None)
    weights = [Path(one.model_path, "model.safetensors").read_bytes() for one in (assets, again)]
    assert weights[0] == weights[1] and again.measured == assets.measured
    assert prepare_lake(cache_dir=tmp_path, seed=3, recipe=SHORT, progress=lambda line: None).cached


@pytest.mark.seconds
def test_a_range_that_is_not_reached_is_said(tmp_path: Path) -> None:
    hopeless = dataclasses.replace(SHORT, warm_up_steps=2, max_warm_up_steps=4, eval_every=2, success_range=(0.99, 1.0))
    with pytest.raises(RuntimeError, match=r"wanted 0.99 to 1.0 .* random_share"):
        prepare_lake(cache_dir=tmp_path, recipe=hopeless, progress=lambda line: None)
    assert not any((tmp_path / "lake").iterdir())


def test_environment_is_the_one_of_the_data() -> None:
    assert environment(RECIPE)["view"] == "local" and environment(RECIPE)["is_slippery"] is False
