# SPDX-License-Identifier: Apache-2.0
"""verl's agent loop worker in a run of ours: each trajectory in turn, contained and noted where it is lost, its outputs
checked, completed and merged before they are stored."""

from __future__ import annotations

import functools
import traceback
from contextvars import ContextVar
from typing import Any

from verl_ext.integration import estimators, store_notes
from verl_ext.integration.mix import component_names
from verl_ext.integration.settings import merging
from verl_ext.rollout.shared import garbage, one_output, outputs
from verl_ext.rollout.shared.contain import contained
from verl_ext.rollout.shared.merge import merge
from verl_ext.rollout.shared.per_config import once
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


def merging_turns(compute_score: Any) -> Any:
    """verl's `AgentLoopWorker._compute_score`, which verl calls between the loop and its store with the list of outputs
    that it stores: afterwards that holds the sequences."""

    @functools.wraps(compute_score)
    async def run(self: Any, found: list[Any], kwargs: dict[str, Any]) -> None:
        outputs.check(found)
        await compute_score(self, found, kwargs=kwargs)
        outputs.complete(self.config, found, int(kwargs.get("global_steps", 0)))
        merges, sees_turns, needed = once(self.config, merging.KEY, lambda: _asked(self.config))
        if sees_turns and len(found) == 1:
            one_output.lay_out(found[0], needed, self.tokenizer)
        if merges:
            found[:] = merge(found)

    return run


def _asked(config: Any) -> tuple[bool, bool, set[str]]:
    """Whether outputs are merged, whether a single one holds turns, and what has to be known of these."""
    estimators.load_others()
    used = [name for name in component_names(config.algorithm) if name in estimators.ESTIMATORS]
    needed = {field for name in used for field in estimators.of_loops(name, config.algorithm)}
    return merging.merges(config), merging.sees_turns(config, bool(used)), needed
