# SPDX-License-Identifier: Apache-2.0
"""Models with random weights and data for them, made where they are used: shapes are what is measured, not answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.common.overrides import hydra_value

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# No two answers are likely to get the same: every update has a gradient, whatever was sampled.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(map(ord, solution_str)) % 97 / 97
"""


@dataclass(frozen=True)
class Shape:
    """Of a Qwen2."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    dtype: str = "bfloat16"


HALF_BILLION = Shape("half_billion", 896, 24, 14, 2, 4864, 151_936)  #: Qwen2-0.5B's
SMALL = Shape("small", 512, 8, 8, 2, 1536, 32_768)
TINY = Shape("tiny", 64, 2, 2, 1, 128, 512, "float32")


@dataclass(frozen=True)
class Made:
    """A folder with a model, and its data and reward beside it."""

    model: Path
    plain: Path
    conversation: Path
    reward: Path


def make(folder: Path, shape: Shape) -> Made:
    """Make a model, prompts of 40 letters, each a token, and questions in several turns, unless they are there."""
    made = Made(folder / "model", folder / "plain.parquet", folder / "train.parquet", folder / "reward.py")
    if made.reward.exists():
        return made
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    from verl_ext.lab.demo.data import write_parquet, write_task

    made.model.mkdir(parents=True, exist_ok=True)
    # transformers reads a Qwen2's tokenizer as one of bytes and merges, whatever its file says: here without merges.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *letters, *(f"w{number}" for number in range(shape.vocabulary - len(SPECIAL) - len(letters)))]
    core = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(made.model)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).to(getattr(torch, shape.dtype)).save_pretrained(made.model)
    rows = [
        {
            "prompt": [{"role": "user", "content": "".join(chr(97 + (row * 7 + at) % 26) for at in range(40))}],
            "data_source": "toy",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": row},
        }
        for row in range(256)
    ]
    write_parquet(rows, made.plain)
    sums = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    write_task(folder, "chain_sum", sums, train_size=256, val_size=16, seed=0, split=False)
    made.reward.write_text(REWARD, encoding="utf-8")
    return made


def words(
    made: Made, *, prompts: int, samples: int, prompt_tokens: int, tokens: int, folder: Path, conversation: bool = False
) -> list[str]:
    """Overrides of a run with it, which neither validates nor saves."""
    data = hydra_value(made.conversation if conversation else made.plain)
    task = (
        ["actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_multi_turn"]
        if conversation
        else [
            f"reward.custom_reward_function.path={hydra_value(made.reward)}",
            "reward.custom_reward_function.name=compute_score",
        ]
    )
    return [
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"actor_rollout_ref.model.path={hydra_value(made.model)}",
        f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={prompt_tokens}",
        f"data.max_response_length={tokens}",
        f"actor_rollout_ref.rollout.n={samples}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        *task,
        "trainer.total_epochs=1000",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={hydra_value(folder / 'checkpoints')}",
        f"hydra.run.dir={hydra_value(folder / 'hydra')}",
    ]


def read_json(path: Path) -> dict[str, Any]:
    """What a process has written so far; nothing if it has not."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
