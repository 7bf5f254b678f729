# SPDX-License-Identifier: Apache-2.0
"""What the demo's chains and kernels share: a tokenizer with a token a word, and a supervised warm-up in one phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from verl_ext.lab.demo.assets import Progress
from verl_ext.lab.demo.model import CHAT_TEMPLATE, END, PAD, START, Codec, sequence_loss
from verl_ext.lab.demo.recipes import ChainRecipe, FuseRecipe


def word_tokenizer(words: Sequence[str], pre_tokenizer: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with a token a word, which `pre_tokenizer` tells apart, and the special tokens of ChatML."""
    named = dict.fromkeys(["[UNK]", PAD, START, END, "user", "assistant", *words])
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(named)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        unk_token="[UNK]",
        additional_special_tokens=[START, END],
        chat_template=CHAT_TEMPLATE,
    )


def imitate(
    model: LlamaForCausalLM,
    codec: Codec,
    lesson: Callable[[], tuple[list[int], list[int]]],
    recipe: ChainRecipe | FuseRecipe,
    tell: Progress,
) -> float:
    """Supervised learning of ``recipe.warm_up_steps`` batches, with one cycle of the learning rate.

    Args:
        model: trained in place.
        lesson: makes token ids, and 1 for each that is learned.
        tell: called with a line every ``recipe.tell_every`` steps.

    Returns:
        The loss of the last batch.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.warm_up_steps, pct_start=0.1
    )
    loss = torch.zeros(())
    for step in range(1, recipe.warm_up_steps + 1):
        loss = sequence_loss(model, [lesson() for _ in range(recipe.batch_size)], codec.pad_id)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % recipe.tell_every == 0:
            tell(f"  warm-up: step {step}, loss {float(loss.detach()):.3f}")
    return float(loss.detach())
