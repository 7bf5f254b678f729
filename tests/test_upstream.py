# SPDX-License-Identifier: Apache-2.0
"""The patches that we would send to verl apply to the installed one, and their tests need them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import copies
import pytest
import verl

FOLDER = Path(__file__).parents[1] / "examples" / "upstream"
PATCHES = sorted(FOLDER.glob("*.patch"))


def test_each_patch_is_small_and_in_the_docs() -> None:
    page = (FOLDER.parents[1] / "docs" / "upstream.md").read_text(encoding="utf-8")
    for patch in PATCHES:
        assert f"examples/upstream/{patch.name}" in page
        assert len(patch.read_text(encoding="utf-8").splitlines()) <= 120
    assert len(PATCHES) == 4


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_each_patch_applies_and_its_test_needs_it(patch: Path, tmp_path: Path) -> None:
    installed = str(Path(verl.__path__[0]).parent)
    done = subprocess.run(
        ["bash", str(FOLDER / "check.sh"), installed, str(patch)],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "PYTHON": str(copies.script(tmp_path / "python"))},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith(f"{patch.name}: ") and " passed" in done.stdout
