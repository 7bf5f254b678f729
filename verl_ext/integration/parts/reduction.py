# SPDX-License-Identifier: Apache-2.0
"""Our metrics of the updates of a step, reduced by what they are.

verl reduces a name by its substrings: one with "sum" in it is added up, one with "min" is a minimum, so that an agent
called ``summarizer`` or a size like ``mini_batch_sequences`` comes out wrong. Here only the last part of a name counts,
which is never a user's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

COUNTS = (
    "count",
    "turns",
    "sequences",
    "tokens",
    "tokens_by_call",
    "trajectories",
    "missing_trajectories",
    "failed_trajectories",
    "padding_sequences",
    "turns_of_other_agents",
)
"""Last parts of names that count something of a batch, which a step has as many of as its batches together."""

BEGINNINGS = {"rollout/failures/": "sum", "sandbox/": "sum", "trajectory/": "mean", "timing_s/": "sum"}
"""Beginnings of names that end in a name that an agent loop chose, and of times; and how they are reduced."""

OURS = ("trajectory/turns/", "trajectory/reward/")
"""Names of ours among those."""


def rule(name: str) -> str:
    """How the values of a metric are reduced over the updates of a step: ``max``, ``min``, ``sum`` or ``mean``."""
    for beginning, how in BEGINNINGS.items():
        if name.startswith(beginning) and not name.startswith(OURS):
            return how
    last = name.rsplit("/", 1)[-1]
    ending = last.rsplit("_", 1)[-1]
    if ending in ("max", "min"):
        return ending
    return "sum" if last in COUNTS else "mean"


def reduced(updates: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """The metrics of a step.

    Args:
        updates: for each update its number of sequences, the weight in a mean, and its metrics.

    Returns:
        One value a name, over the updates that have it.
    """
    values: dict[str, list[tuple[int, float]]] = {}
    for rows, metrics in updates:
        for name, value in metrics.items():
            values.setdefault(name, []).append((rows, value))
    return {name: _reduce(rule(name), found) for name, found in values.items()}


def _reduce(how: str, found: Sequence[tuple[int, float]]) -> float:
    if len(found) == 1:
        return found[0][1]
    plain = [value for _, value in found]
    if how in ("max", "min"):
        return max(plain) if how == "max" else min(plain)
    if how == "sum":
        return sum(plain)
    rows = sum(weight for weight, _ in found)
    return sum(weight * value for weight, value in found) / rows if rows else sum(plain) / len(plain)
