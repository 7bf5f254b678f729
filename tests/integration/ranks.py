# SPDX-License-Identifier: Apache-2.0
"""A script run as several processes that talk to each other."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import copies
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

IMPORTS = (
    "verl.trainer.main_ppo,verl.workers.engine_workers,transformers.models.llama.modeling_llama,"
    "verl_ext.integration.trainer"
)
"""What all of them import."""


def starts_ranks(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that needs such processes; the limit is a guard only, for a machine with much else to do."""
    return pytest.mark.slow(pytest.mark.timeout(1800)(test))


def run_ranks(script: Path, *arguments: object, world: int) -> None:
    """Run ``script *arguments rank world`` once for each rank, in torch's environment; all have to end well.

    How long they may take is said by the time limit of the test.
    """
    environment = {"OMP_NUM_THREADS": "1", **OF_A_RUN}
    copies.start("ranks", IMPORTS, tuple(environment.items()))
    port = str(free_port())
    group = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with tempfile.TemporaryDirectory() as folder:
        codes = [Path(folder) / str(rank) for rank in range(world)]
        ranks = [
            subprocess.Popen(
                copies.command("ranks", code, script, *arguments, code.name, world),
                env={**os.environ, **environment, **group, "RANK": code.name, "LOCAL_RANK": code.name},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for code in codes
        ]
        try:
            for rank, code in zip(ranks, codes, strict=True):
                log, _ = rank.communicate()
                assert code.exists() and code.read_text() == "0", log[-4000:]
        finally:
            for rank in ranks:
                rank.terminate()  # reaches the copy, whose stand-in this is
