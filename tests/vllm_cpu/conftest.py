# SPDX-License-Identifier: Apache-2.0
"""The environment with vLLM, in which the runs of this folder are started, and a model that vLLM serves on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from harness import Lab  # noqa: E402
from served import make_lab, standing  # noqa: E402

from verl_ext.cpu.platform import vllm_cpu  # noqa: E402

PYTHON = os.environ.get("VERL_EXT_VLLM_PYTHON") or str(ROOT / ".venv-vllm" / "bin" / "python")


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The Python that has vllm-cpu: VERL_EXT_VLLM_PYTHON, or the one that `make venv-vllm` sets up."""
    assert Path(PYTHON).exists(), (
        f"{PYTHON} is not there; `make venv-vllm` sets it up, `-m 'not vllm'` leaves these out"
    )
    return PYTHON


@pytest.fixture(scope="session")
def vllm_lab(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> Lab:
    """Every run starts as a user's command does."""
    return make_lab(tmp_path_factory.mktemp("vllm"), vllm_python)


@pytest.fixture(scope="module")
def standing_lab(vllm_lab: Lab) -> Iterator[Lab]:
    yield from standing(vllm_lab, vllm_cpu.ENVIRONMENT, HERE / "vllm_imports.py")


@pytest.fixture(scope="session")
def vllm_version(vllm_python: str) -> str:
    code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    return subprocess.run([vllm_python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
