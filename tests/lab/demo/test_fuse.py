# SPDX-License-Identifier: Apache-2.0
"""The demo's kernels: what the model imitates, that its tokens hold the language, that the warm-up teaches it."""

from __future__ import annotations

import random

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_ext.lab.demo.assets import DemoAssets
from verl_ext.lab.demo.fuse import RESPONSE_LENGTH, conversation, program, train_tokenizer
from verl_ext.lab.demo.model import Codec, sample
from verl_ext.lab.demo.prepare import prepare_fuse
from verl_ext.lab.demo.recipes import FuseRecipe
from verl_ext.rollout.kernels.languages import CandidateError, read
from verl_ext.rollout.kernels.loop import AGENT_NAME
from verl_ext.rollout.kernels.tasks import held_out, training

RECIPE = FuseRecipe()
SHORT = FuseRecipe(batch_size=16, warm_up_steps=60)


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> DemoAssets:
    return prepare_fuse(cache_dir=tmp_path_factory.mktemp("fuse"), seed=3, recipe=SHORT, progress=lambda line: None)


def test_what_is_imitated_is_a_program_of_the_chain_and_survives_the_tokenizer() -> None:
    codec, rng = Codec(train_tokenizer()), random.Random(0)
    right = FuseRecipe(mistakes=0.0)
    for task in (*training(), *held_out()):
        for _ in range(20):
            said = program(task.stages, right, rng)
            plan = read(said, "fuse", task).plan["parts"]
            assert [stage for _, stages in plan for stage in stages] == list(task.stages)
            ids = codec.answer(said)
            assert codec.tokenizer.unk_token_id not in ids and len(ids) <= RESPONSE_LENGTH
            again = codec.tokenizer.decode(ids, skip_special_tokens=True)
            assert read(again, "fuse", task).plan == read(said, "fuse", task).plan


def test_a_conversation_learns_the_answers_alone() -> None:
    codec, rng = Codec(train_tokenizer()), random.Random(0)
    for _ in range(50):
        ids, mask = conversation(codec, RECIPE, rng)
        assert len(ids) == len(mask) and codec.tokenizer.unk_token_id not in ids
        learned = [token for token, one in zip(ids, mask, strict=True) if one]
        assert learned.count(codec.end_id) == RECIPE.max_turns


def test_model_and_task_are_made(assets: DemoAssets) -> None:
    assert assets.task == "fuse" and assets.agent_loop == AGENT_NAME
    assert assets.response_length == RESPONSE_LENGTH and assets.measured["steps"] == SHORT.warm_up_steps
    train, val = (pq.read_table(file).to_pylist() for file in (assets.train_file, assets.val_file))
    assert len(train) == 24 and len(val) == 8


def test_warm_up_teaches_the_language(assets: DemoAssets) -> None:
    model = AutoModelForCausalLM.from_pretrained(assets.model_path)
    codec = Codec(AutoTokenizer.from_pretrained(assets.model_path))
    prompts = [codec.user(task.text) for task in training()]
    with torch.no_grad():
        answers = sample(
            model, prompts, codec, generator=torch.Generator().manual_seed(0), max_new_tokens=RESPONSE_LENGTH
        )
    valid = 0
    for task, ids in zip(training(), answers, strict=True):
        try:
            read(codec.tokenizer.decode(ids, skip_special_tokens=True), "fuse", task)
        except CandidateError:
            continue
        valid += 1
    assert valid >= 12
