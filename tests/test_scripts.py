# SPDX-License-Identifier: Apache-2.0
"""Every shell script, and every block of shell in the documents, is one that bash can read to its end."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted([*ROOT.glob("examples/**/*.sh"), *ROOT.glob("recipe/**/*.sh"), ROOT / ".ci" / "run"])
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("recipe/**/*.md")]
)
BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(block[1], id=f"{document.relative_to(ROOT)}-{number}")
    for document in DOCUMENTS
    for number, block in enumerate(BLOCK.finditer(document.read_text(encoding="utf-8")), start=1)
]


def complaint(*words: str, text: str | None = None) -> str:
    """What bash says of a script that it reads and does not run; nothing if all is well."""
    done = subprocess.run(["bash", "-n", *words], input=text, capture_output=True, text=True)
    return done.stderr or ("" if done.returncode == 0 else f"exit code {done.returncode}")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_bash_reads_it(script: Path) -> None:
    assert not complaint(str(script))


@pytest.mark.parametrize("block", BLOCKS)
def test_bash_reads_the_blocks_of_the_documents(block: str) -> None:
    assert not complaint(text=block)


def test_an_apostrophe_and_an_open_block_are_found() -> None:
    """What ended a script of ours once; and the documents have blocks at all."""
    assert "unexpected EOF" in complaint(text=': "${A:?the cluster\'s server}"\n')
    assert len(BLOCKS) > 20
