# SPDX-License-Identifier: Apache-2.0
"""Several Ray nodes on this machine, each with its own processes, and the settings that make a run use them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from verl_ext.cpu.platform import fork_worker

# A node that is gone refuses each check at once and is dead after three seconds; a busy one has 90 to answer.
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 30000,
    "health_check_failure_threshold": 3,
}


class Nodes:
    """A Ray cluster of named nodes on this machine; the first one is the head. Leave the block to end it."""

    def __init__(self, *names: str) -> None:
        from ray.cluster_utils import Cluster

        fork_worker.set_up_workers()
        self._folder = tempfile.TemporaryDirectory(prefix="nodes")  # not where others look for a running cluster
        self._before = os.environ.get("RAY_TMPDIR")
        os.environ["RAY_TMPDIR"] = self._folder.name
        self.cluster = Cluster(shutdown_at_exit=False)
        self.by_name: dict[str, Any] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """A further node, with a logical GPU for one training process."""
        self.by_name[name] = self.cluster.add_node(
            node_name=name,
            num_cpus=8 if self.by_name else 20,
            num_gpus=1,
            object_store_memory=100 << 20,
            include_dashboard=False,
            **({} if self.by_name else {"_system_config": HEALTH}),
        )

    def kill(self, name: str) -> None:
        """As if the machine had lost its power: its Ray processes are killed, what they started ends by itself."""
        self.cluster.remove_node(self.by_name.pop(name), allow_graceful=False)

    def overrides(self, folder: Path) -> list[str]:
        """Settings of a run in `folder` that uses one process on each of the nodes."""
        return [
            f"+ray_kwargs.ray_init.address={self.cluster.address}",
            f"+ray_kwargs.ray_init.runtime_env.py_executable='{fork_worker.py_executable()}'",
            f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH={folder / 'metrics.jsonl'}",
            f"trainer.nnodes={len(self.by_name)}",
            "trainer.n_gpus_per_node=1",
        ]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.shutdown()
        os.environ.pop("RAY_TMPDIR")
        if self._before is not None:
            os.environ["RAY_TMPDIR"] = self._before
        self._folder.cleanup()
