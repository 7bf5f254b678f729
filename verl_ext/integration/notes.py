# SPDX-License-Identifier: Apache-2.0
"""Notes that the agent loop workers leave for the trainer in verl's store, each in a partition that verl does not read.

`LOST`: a rollout whose agent loop raised, which verl logs and drops. `GUARDED`: a process in which the sampler's client
sent a request with pruning.
"""

from __future__ import annotations

import functools
import logging
import os
import traceback
from contextvars import ContextVar
from typing import Any

from verl_ext.rollout.shared import garbage
from verl_ext.rollout.shared.contain import contained
from verl_ext.rollout.shared.turns import in_turn

logger = logging.getLogger(__name__)

LOST, GUARDED = "verl_ext_lost", "verl_ext_guarded"

LONGEST = 6000
"""Characters of a traceback that are kept, from its end."""

validating: ContextVar[bool] = ContextVar("validating", default=False)
"""Whether the trajectory under way is one of validation, of which verl says nothing to its agent loop."""

_guarded = False


def noting(run_agent_loop: Any) -> Any:
    """verl's `AgentLoopWorker._run_agent_loop`, which notes what it raises. An exception goes on to verl unchanged."""

    @functools.wraps(run_agent_loop)
    async def run(self: Any, sampling_params: Any, trajectory: Any, **kwargs: Any) -> Any:
        validating.set(bool(trajectory["validate"]))  # each trajectory is a task of its own
        garbage.collect()
        await in_turn()
        try:
            with contained("the agent loop"):
                return await run_agent_loop(self, sampling_params, trajectory, **kwargs)
        except Exception:
            if "session_id" in kwargs:
                partition = "val" if trajectory["validate"] else "train"
                text = traceback.format_exc()[-LONGEST:]
                key = f"{kwargs['uid']}_{kwargs['session_id']}"
                source = kwargs.get("data_source", "unknown")
                await _put(LOST, key, {"partition_id": partition, "data_source": source, "traceback": text})
            raise

    return run


async def guarded(rho: float) -> None:
    """Note, once in each process, that the client sends ``min_p``."""
    global _guarded
    import ray

    if not _guarded and ray.is_initialized():  # not in a client that is called by hand
        _guarded = True
        await _put(GUARDED, f"{os.uname().nodename}/{os.getpid()}", {"rho": rho})


async def _put(partition: str, key: str, tag: dict[str, Any]) -> None:
    import transfer_queue as tq

    try:
        await tq.async_kv_put(key=key, partition_id=partition, tag=tag)
    except Exception:  # the trainer refuses what was not noted
        logger.exception("%s could not be noted in %s", key, partition)


def read(partition: str) -> dict[str, dict[str, Any]]:
    """The notes of a partition by key."""
    import transfer_queue as tq

    return dict((tq.kv_list(partition) or {}).get(partition, {}))
