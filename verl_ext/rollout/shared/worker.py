# SPDX-License-Identifier: Apache-2.0
"""verl's agent loop worker in a run of ours: each trajectory in turn, contained, and noted where it is lost."""

from __future__ import annotations

import functools
import traceback
from contextvars import ContextVar
from typing import Any

from verl_ext.integration import store_notes
from verl_ext.rollout.shared import garbage
from verl_ext.rollout.shared.contain import contained
from verl_ext.rollout.shared.turns import in_turn

LONGEST = 6000
"""Characters of a traceback that are kept, from its end."""

validating: ContextVar[bool] = ContextVar("validating", default=False)
"""Whether the trajectory under way is one of validation, of which verl says nothing to its agent loop."""


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
                await store_notes.put(
                    store_notes.LOST, key, {"partition_id": partition, "data_source": source, "traceback": text}
                )
            raise

    return run
