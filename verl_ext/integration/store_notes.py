# SPDX-License-Identifier: Apache-2.0
"""Notes that the agent loop workers leave for the trainer in verl's store, each in a partition that verl does not read.

`LOST`: a rollout whose agent loop raised, which verl logs and drops. `GUARDED`: a process in which the sampler's client
sent a request with pruning.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from verl_ext.integration.compat import data_plane

logger = logging.getLogger(__name__)

LOST, GUARDED = "verl_ext_lost", "verl_ext_guarded"

_guarded = False


async def guarded(rho: float) -> None:
    """Note, once in each process, that the client sends ``min_p``."""
    global _guarded
    import ray

    if not _guarded and ray.is_initialized():  # not in a client that is called by hand
        _guarded = True
        await put(GUARDED, f"{os.uname().nodename}/{os.getpid()}", {"rho": rho})


async def put(partition: str, key: str, tag: dict[str, Any]) -> None:
    """Leave a note. What cannot be noted is logged: the trainer refuses what was not noted."""
    try:
        await data_plane.put_tag(partition, key, tag)
    except Exception:
        logger.exception("%s could not be noted in %s", key, partition)
