# SPDX-License-Identifier: Apache-2.0
"""Tiny models with the tokenizers and chat templates of Qwen2.5 and of Gemma: some of their answers end, some are cut.

Their weights are random, but for one coordinate that is the same in every hidden state and lifts a few tokens far above
the others of the vocabulary: the end of the turn, digits, some words.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

TOKENIZERS = Path(__file__).resolve().parents[2] / "build" / "tokenizers"
RULES = "Answer with a number."
SUMS = [(3, 4), (2, 5), (6, 1), (5, 2), (4, 3), (1, 6), (7, 0), (0, 7)]
#: What the models say, each a token; how much likelier some are, in logits.
WORDS = ["7", "3", "5", "0", " I", " think", " that", " because", " maybe", "\n"]
LIKELIER = {"7": 1.8}
END = 1.2
WIDTH, LIFTED = 32, 17.0


def write_rows(folder: Path) -> Path:
    """Questions for the multi-turn loop, every other one after rules of the system."""
    import pandas

    rows = []
    for number, (a, b) in enumerate(SUMS):
        question = f"What is {a} plus {b}?"
        entry = {"question": question, "answer": "7", "metadata": {}}
        system = [{"role": "system", "content": RULES}] if number % 2 else []
        rows.append(
            {
                "data_source": "reasoning_gym/chain_sum",
                "agent_name": "verl_ext_multi_turn",
                "prompt": [*system, {"role": "user", "content": question}],
                "reward_model": {"style": "rule", "ground_truth": "7"},
                "extra_info": {
                    "index": number,
                    "dataset": "chain_sum",
                    "config_json": json.dumps({"seed": 0, "size": 1}),
                    "entry_json": json.dumps(entry),
                    "parser": "strict",
                },
            }
        )
    path = folder / "sums.parquet"
    pandas.DataFrame(rows).to_parquet(path)
    return path


def make(name: str, folder: Path) -> Path:
    """The folder of a model: ``qwen2``, or ``gemma`` with the template of Gemma and Gemma 2."""
    import torch
    from transformers import AutoTokenizer, GemmaConfig, GemmaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    shutil.copytree(TOKENIZERS / {"qwen2": "qwen2_5", "gemma": "gemma3"}[name], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if name == "gemma":
        tokenizer.chat_template = (TOKENIZERS / "trl/trl/chat_templates/gemma.jinja").read_text(encoding="utf-8")
        tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": WIDTH // 2,
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "tie_word_embeddings": False,
    }
    if name == "qwen2":
        model: Any = Qwen2ForCausalLM(Qwen2Config(**shape))
    else:
        model = GemmaForCausalLM(GemmaConfig(**shape))
    logits = {tokenizer.eos_token_id: LIFTED + END}
    for word in WORDS:
        ids = tokenizer.encode(word, add_special_tokens=False)
        logits[ids[-1]] = LIFTED + LIKELIER.get(word, 0.0)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10.0
        model.lm_head.weight[:, 0] = 0.0
        for token, logit in logits.items():
            model.lm_head.weight[token, 0] = logit / WIDTH**0.5  # what the last norm leaves of that coordinate
    model.save_pretrained(folder)
    return folder
