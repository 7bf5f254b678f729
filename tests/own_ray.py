# SPDX-License-Identifier: Apache-2.0
"""A Ray of the tests of one file, whose workers are copies of one process that has done their imports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import copies
import ray

from verl_ext.cpu.platform import fork_worker


@contextlib.contextmanager
def own_ray(num_cpus: int, modules: str) -> Iterator[None]:
    """Whatever else runs on this machine; `modules`, separated by commas, are what the actors need."""
    fork_worker.set_up_workers()
    variables = {
        fork_worker.MODULES: f"ray._private.workers.default_worker,{modules}",
        fork_worker.IDLE_S: "inf",
        fork_worker.FROM: copies.imports(),
    }
    ray.init(
        "local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"py_executable": fork_worker.py_executable(), "env_vars": variables},
    )
    try:
        yield
    finally:
        ray.shutdown()
