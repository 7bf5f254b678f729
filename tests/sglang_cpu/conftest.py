# SPDX-License-Identifier: Apache-2.0
"""The environment with SGLang, in which the runs of this folder are started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from harness import Lab  # noqa: E402
from served import make_lab, standing  # noqa: E402

from verl_ext.cpu.platform import sglang_cpu  # noqa: E402

PYTHON = os.environ.get("VERL_EXT_SGLANG_PYTHON") or str(ROOT / ".venv-sglang" / "bin" / "python")


@pytest.fixture(scope="session")
def sglang_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Every run starts as a user's command does."""
    assert Path(PYTHON).exists(), (
        f"{PYTHON} is not there; `make venv-sglang` sets it up, `-m 'not sglang'` leaves these out"
    )
    return make_lab(tmp_path_factory.mktemp("sglang"), PYTHON)


@pytest.fixture(scope="module")
def standing_lab(sglang_lab: Lab) -> Iterator[Lab]:
    yield from standing(sglang_lab, sglang_cpu.ENVIRONMENT, HERE / "sglang_imports.py")
