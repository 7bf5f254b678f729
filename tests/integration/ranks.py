# SPDX-License-Identifier: Apache-2.0
"""A script run as several processes that talk to each other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_ranks(script: Path, *arguments: object, world: int, environment: Mapping[str, str] | None = None) -> None:
    """Run ``script *arguments rank world port`` once for each rank; all have to end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, [*arguments, rank, world, port])],
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for rank in ranks:
            log, _ = rank.communicate(timeout=300)
            assert rank.returncode == 0, log[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
