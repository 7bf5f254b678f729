# SPDX-License-Identifier: Apache-2.0
"""A script run as several processes that talk to each other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from ports import free_port

OF_A_RUN = {
    "VERL_PLATFORM": "cpu",
    "VERL_EXT_STRICT": "1",
    "VERL_USE_EXTERNAL_MODULES": "verl_ext.plugin",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
"""Environment of a training process of ours on the CPU."""


def starts_ranks(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs such processes; the limit is a guard only, for a machine with much else to do."""
    return pytest.mark.slow(pytest.mark.timeout(1800)(test))


def run_ranks(script: Path, *arguments: object, world: int, environment: Mapping[str, str] = OF_A_RUN) -> None:
    """Run ``script *arguments rank world`` once for each rank, in torch's environment; all have to end well.

    How long they may take is said by the time limit of the test.
    """
    port = str(free_port())
    group = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, [*arguments, rank, world])],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment, **group, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in map(str, range(world))
    ]
    try:
        for rank in ranks:
            log, _ = rank.communicate()
            assert rank.returncode == 0, log[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
