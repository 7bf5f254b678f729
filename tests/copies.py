# SPDX-License-Identifier: Apache-2.0
"""Processes that are copies of one which has done their imports, and which lives as long as the one with the tests."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from verl_ext.cpu.platform import fork_worker

COPIED = Path(__file__).with_name("copied.py")
#: What says which process is copied: the one that it lives with, and its name.
ASKS = ("RAY_RAYLET_PID", "RAY_JOB_ID")
#: What a process of a run imports that is neither Ray's nor verl's nor ours.
IMPORTS = (
    "torch,torch._dynamo,torch._inductor.config,torch.distributed.checkpoint,torch.distributed.fsdp,"
    "torch.utils.tensorboard,torchdata.stateful_dataloader,tensordict,transformers.generation,"
    "transformers.models.llama.modeling_llama,accelerate,peft,datasets,hydra,pandas,pyarrow.parquet,aiohttp,fastapi,"
    "uvicorn,zmq"
)


@functools.cache
def start(name: str, modules: str, variables: tuple[tuple[str, str], ...] = ()) -> None:
    """The process `name` with these modules, imported with these variables of the environment."""
    asks = dict(zip(ASKS, (str(os.getpid()), name), strict=True))
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**dict(variables), **asks, fork_worker.MODULES: modules, fork_worker.IDLE_S: "inf"}.items():
            patch.setenv(key, value)
        fork_worker.connect(os.getpid()).close()


def command(name: str, file: Path, *words: object) -> list[str]:
    """``python *words`` in a copy of the process `name`; its exit code goes to `file`, and none if it was killed."""
    asks = [f"{key}={value}" for key, value in zip(ASKS, (os.getpid(), name), strict=True)]
    start = ["env", *asks, sys.executable, "-I", "-S", fork_worker.__file__, str(COPIED), str(file)]
    return [*start, *map(str, words)]


def python(*words: object, env: Mapping[str, str] = os.environ, **settings: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run([sys.executable, *words])`` of a process that imports verl, for what it says and ends with."""
    start("imports", IMPORTS)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "code"
        done = subprocess.run(
            command("imports", file, *words), capture_output=True, text=True, env=dict(env), **settings
        )
        done.returncode = int(file.read_text()) if file.exists() else -signal.SIGKILL
    return done
