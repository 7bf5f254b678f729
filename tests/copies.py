# SPDX-License-Identifier: Apache-2.0
"""Processes that are copies of one which has done their imports, and which lives as long as the one with the tests."""

from __future__ import annotations

import functools
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
#: And what these imports read of the environment of a run on the CPU.
OF_A_RUN = (
    *(("OMP_NUM_THREADS", "1"), ("MKL_NUM_THREADS", "1")),
    *(("TOKENIZERS_PARALLELISM", "false"), ("HF_HUB_OFFLINE", "1")),
)
CONNECT = "import runpy, sys; print(runpy.run_path(sys.argv[1])['connect'](int(sys.argv[2])).getpeername())"


def imports() -> str:
    """The address of the process with `IMPORTS`, of which all others are copies."""
    return start("imports", IMPORTS, OF_A_RUN)


@functools.cache
def start(name: str, modules: str, variables: tuple[tuple[str, str], ...] = (), python: str = sys.executable) -> str:
    """The address of the process `name` with these modules, imported with these variables of the environment."""
    source = {fork_worker.FROM: imports()} if name != "imports" and python == sys.executable else {}
    asks = dict(zip(ASKS, (str(os.getpid()), name), strict=True))
    settings = {**dict(variables), **asks, **source, fork_worker.MODULES: modules, fork_worker.IDLE_S: "inf"}
    begin = [python, "-I", "-S", "-c", CONNECT, fork_worker.__file__, asks[ASKS[0]]]
    done = subprocess.run(begin, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def interpreter(lives_with: object, name: str) -> list[str]:
    """``python`` as a copy of the process `name` that lives with the process of this number.

    A file comes next, for the exit code (none if it was killed), and then the words.
    """
    asks = [f"{key}={value}" for key, value in zip(ASKS, (lives_with, name), strict=True)]
    return ["env", *asks, sys.executable, "-I", "-S", fork_worker.__file__, str(COPIED)]


def command(name: str, file: Path, *words: object) -> list[str]:
    """``python *words`` in a copy of the process `name`; its exit code goes to `file`."""
    return [*interpreter(os.getpid(), name), str(file), *map(str, words)]


def script(path: Path, copied: Sequence[str] = ()) -> Path:
    """A file at `path` that is ``python`` as a copy, for programs that start it: `copied` of `interpreter`, or else of
    the process with `IMPORTS`."""
    if not copied:
        imports()
        copied = interpreter(os.getpid(), "imports")
    path.write_text(f'#!/bin/sh\n{shlex.join(copied)} "$0.$$" "$@"\nexit "$(cat "$0.$$" || echo 137)"\n')
    path.chmod(0o755)
    return path


def python(*words: object, env: Mapping[str, str] = os.environ, **settings: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run([sys.executable, *words])`` of a process that imports verl, for what it says and ends with."""
    imports()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "code"
        done = subprocess.run(
            command("imports", file, *words), capture_output=True, text=True, env=dict(env), **settings
        )
        done.returncode = int(file.read_text()) if file.exists() else -signal.SIGKILL
    return done
