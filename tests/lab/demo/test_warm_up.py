# SPDX-License-Identifier: Apache-2.0
"""The warm-up's parts: what it imitates, how it samples, that it teaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from verl_ext.lab.demo.data import dataset_config, generate
from verl_ext.lab.demo.model import (
    GIVE_UP,
    Codec,
    conversation,
    make_model,
    measure,
    sample,
    train_tokenizer,
    warm_up,
)
from verl_ext.lab.demo.recipes import WarmupRecipe
from verl_ext.rollout.reasoning_gym_task import ReasoningGymTask

CONFIG = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def entries() -> list[dict[str, Any]]:
    return generate("chain_sum", CONFIG, 512, seed=5, held_out=False)


@pytest.fixture(scope="module")
def codec(entries: list[dict[str, Any]]) -> Codec:
    return Codec(train_tokenizer([entry["question"] for entry in entries]))


def small_model(codec: Codec) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make_model(codec, hidden_size=64, layers=2, heads=2, init_std=0.05)


def tasks_of(entries: list[dict[str, Any]]) -> list[ReasoningGymTask]:
    return [ReasoningGymTask("chain_sum", dataset_config(CONFIG, 0, 1), entry) for entry in entries]


@pytest.mark.parametrize("given_up", [0, 1, 2])
def test_a_conversation_marks_one_answer_after_turns_that_gave_up(
    codec: Codec, entries: list[dict[str, Any]], given_up: int
) -> None:
    for task in tasks_of(entries[:50]):
        truth = str(task.entry["answer"])
        for last in (truth, GIVE_UP):
            ids, mask = conversation(task, codec, given_up, last)
            assert len(ids) == len(mask)
            marked = [i for i, m in zip(ids, mask, strict=True) if m]
            before = given_up if truth != "0" else 0  # a trajectory ends with the first right answer
            assert codec.tokenizer.decode(marked) == "<|im_end|>" * before + f"{last}<|im_end|>"
            text = codec.tokenizer.decode(ids)
            assert text.count(GIVE_UP) == before + (last == GIVE_UP)
            assert text.count("Too low.") + text.count("Too high.") == before


def test_sampling_does_not_depend_on_the_company_in_the_batch(codec: Codec) -> None:
    model = small_model(codec)
    prompts = [codec.user(text) for text in ("1 + 2 =", "State the final answer to the following: 3 - 4 =", "7")]
    together = sample(model, prompts, codec, generator=None)
    alone = [sample(model, [prompt], codec, generator=None)[0] for prompt in prompts]
    assert together == alone
    assert all(codec.end_id not in response[:-1] and 1 <= len(response) <= 8 for response in together)


@pytest.mark.seconds
def test_warm_up_teaches(codec: Codec, entries: list[dict[str, Any]]) -> None:
    model = small_model(codec)
    tasks = tasks_of(entries[:128])
    before = measure(model, codec, tasks, 3, seed=1)
    recipe = WarmupRecipe(
        config=CONFIG,
        batch_size=96,
        skill_steps=80,
        habit_steps=10,
        max_habit_steps=10,
        give_up_share=0.25,
        success_range=(0.0, 1.0),
        valid_target=0.0,
        eval_size=64,
        eval_every=10,
    )
    lines: list[str] = []
    measured = warm_up(model, codec, entries, recipe, 0, lines.append)
    after = measure(model, codec, tasks, 3, seed=1)
    assert before.any_turn < 0.05 and before.valid < 0.2
    assert after.first_turn > 0.2 and after.valid > 0.8
    assert after.any_turn >= after.first_turn
    assert measured["steps"] <= 90 and lines
