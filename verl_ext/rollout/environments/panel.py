# SPDX-License-Identifier: Apache-2.0
"""Which task a seed is, on every machine: fingerprints of tasks, noted in the data and checked when they are played.

A seed picks a task by its number in a list that depends on what is there: game files, products, the version of a
generator. A row whose ``extra_info`` has a ``task``, a fingerprint, is played only where the seed gives that task.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from verl_ext.rollout.environments import protocol
from verl_ext.rollout.environments.protocol import EnvironmentUnavailable, Observation
from verl_ext.rollout.environments.registry import is_async, load


def fingerprint(environment: Any, seed: int, seen: Observation) -> str:
    """16 hex digits of what the environment's ``identify`` says of a seed; without it, or where it says None, of the
    first observation. `environment` has just been reset with the seed, and `seen` is what it returned.
    """
    identify = getattr(environment, "identify", None)
    said = None if identify is None else identify(seed)
    if said is None:
        said = [seen.text, seen.actions, seen.task, seen.anchor]
    text = json.dumps(protocol.plain(said, "what identifies a task"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_task(environment: Any, seed: int, seen: Observation, task: str) -> None:
    """Raise EnvironmentUnavailable if the seed's task is not `task` (empty: any will do): the panel is another."""
    if task and (found := fingerprint(environment, seed, seen)) != task:
        raise EnvironmentUnavailable(
            f"environment {type(environment).__name__}: seed {seed} is task {found} here, and the data says {task}: "
            "other files, products or versions than those that the panel was prepared with. Prepare it again, or "
            "bring the same ones."
        )


def task_of_row(row: Mapping[str, Any]) -> str:
    """The fingerprint that a row of the data names, or an empty text."""
    return str((row.get("extra_info") or {}).get("task") or "")


def fingerprints(environment: str, kwargs: Mapping[str, Any], seeds: Iterable[int]) -> dict[int, str]:
    """Fingerprints of seeds, each played to its first observation in this process. Raises EnvironmentUnavailable: the
    environment is not here, or has coroutines.
    """
    kind = load(environment)
    if is_async(kind):
        raise EnvironmentUnavailable(
            f"environment {environment!r} is played by a server: its tasks have no fingerprint"
        )
    found: dict[int, str] = {}
    made: Any = None
    try:
        for seed in seeds:
            if seed not in found:
                if made is None or not getattr(kind, "reuse", False):
                    _close(made)
                    made = kind(**kwargs)
                found[seed] = fingerprint(made, seed, protocol.reset_result(made.reset(seed)))
    finally:
        _close(made)
    return found


def _close(environment: Any) -> None:
    with contextlib.suppress(Exception):
        environment.close()
