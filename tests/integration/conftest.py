# SPDX-License-Identifier: Apache-2.0
"""What several tests here start from: verl's store of rollouts, and the model of the tests of its engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_process as cases
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    """Our estimators and losses are in verl's registries, as in the processes of a run of ours."""
    from verl_ext.integration import names

    names.register()


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """verl's store of rollouts in a Ray of its own."""
    import transfer_queue as tq
    from own_ray import own_ray

    with own_ray(8, "transfer_queue"):
        tq.init()
        yield tq
        tq.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose logits have a spread of about 1, so that a safe set holds about half of the vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("engine") / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=cases.VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    made = LlamaForCausalLM(config)
    made.lm_head.weight.data *= 9.0
    made.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(cases.VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder
