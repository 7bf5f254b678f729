# SPDX-License-Identifier: Apache-2.0
"""In the agent loop workers: a rollout whose agent loop raises is noted in verl's store before verl drops it."""

from __future__ import annotations

import functools
import logging
import traceback
from typing import Any

logger = logging.getLogger(__name__)

PARTITION = "verl_ext_lost"
"""Partition of verl's store with one key, ``{uid}_{session}``, for each lost rollout."""

LONGEST = 6000
"""Characters of a traceback that are kept, from its end."""


def noting(run_agent_loop: Any) -> Any:
    """verl's `AgentLoopWorker._run_agent_loop`, which notes what it raises. The error goes on to verl unchanged."""

    @functools.wraps(run_agent_loop)
    async def run(self: Any, sampling_params: Any, trajectory: Any, **kwargs: Any) -> Any:
        try:
            return await run_agent_loop(self, sampling_params, trajectory, **kwargs)
        except Exception:
            if "session_id" in kwargs:
                await _note(f"{kwargs['uid']}_{kwargs['session_id']}", bool(trajectory["validate"]))
            raise

    return run


async def _note(key: str, validate: bool) -> None:
    import transfer_queue as tq

    tag = {"partition_id": "val" if validate else "train", "traceback": traceback.format_exc()[-LONGEST:]}
    try:
        await tq.async_kv_put(key=key, partition_id=PARTITION, tag=tag)
    except Exception:
        logger.exception("the loss of rollout %s could not be noted", key)
