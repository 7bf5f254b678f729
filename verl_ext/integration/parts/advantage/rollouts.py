# SPDX-License-Identifier: Apache-2.0
"""What agent loops say about their trajectories, as training metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_ext.integration.columns import ActiveBatch, BatchError, split_key, truth
from verl_ext.integration.parts.base import Part

JUDGED = ("score", "acc", "em", "f1")
"""Numbers of reward functions that say how right an answer is."""

OURS = ("turns", "reward")
"""Beginnings of metrics ``trajectory/<name>/<statistic>`` of ours: what a loop calls so is ``.../reported``."""


class Rollouts(Part):
    """Reports what the loops say of a batch, and refuses one of which nothing can be trained on."""

    def on_batch(self, batch: Any, active: ActiveBatch, metrics: dict[str, Any]) -> Any:
        rows = list(zip(active.keys, active.extra_fields, strict=True))
        said = {
            "traj_uid": active.columns["traj_uid"],
            "turn_index": [split_key(key)[2] for key, _ in rows],  # calls made side by side share a turn
            "valid_row": [truth(row, "valid_row", key) for key, row in rows],  # also of what other parts took out
        }
        self.metrics.update(rollout_metrics(said, active.tags, active.extra_fields))
        require_a_row(active.columns, self.metrics)
        return batch


def rollout_metrics(columns: Mapping[str, Any], tags: Sequence[Any], extra_fields: Sequence[Any]) -> dict[str, float]:
    """Means of the numbers that came with the trajectories, and counts of what went wrong.

    Each trajectory counts once, by its last turn, whatever the number of its turns and whether it is trained on.

    Args:
        columns: ``traj_uid``, ``turn_index`` (the largest is the last turn) and ``valid_row``, all [B].
        tags: verl's tags of their sequences; those that verl made to fill a mini-batch (``is_padding``) are left out.
        extra_fields: the agent loop's dict of every turn, of which ``reward_extra_info`` (numbers by name), ``failure``
            and ``stop_reason`` (str) are read where they are present.

    Returns:
        ``trajectory/<name>`` (mean) for each number of ``reward_extra_info`` (a valid trajectory that failed and was
        not judged has 0 of `JUDGED`), but ``sandbox/<name>`` (sum) for a ``sandbox_<name>``, and
        ``trajectory/<name>/reported`` for one of `OURS`; and, if the loops report failures at all,
        ``rollout/failed_trajectories`` and ``rollout/failures/<reason>`` (counts).
    """
    turns = columns["turn_index"]
    last: dict[str, int] = {}
    for row, (trajectory, tag) in enumerate(zip(columns["traj_uid"], tags, strict=True)):
        if not tag.get("is_padding", False) and (trajectory not in last or turns[row] > turns[last[trajectory]]):
            last[trajectory] = row
    numbers: dict[str, list[float]] = defaultdict(list)
    failures: dict[str, int] = defaultdict(int)
    reported = False
    unjudged = 0
    for row in last.values():
        fields = extra_fields[row] or {}
        said = fields.get("reward_extra_info") or {}
        for name, value in said.items():
            if isinstance(value, int | float | np.number) and np.isfinite(value):
                numbers[str(name)].append(float(value))
        if isinstance(fields.get("failure"), str):
            reported = True
            if fields["failure"]:
                failures[fields["failure"]] += 1
                unjudged += bool(columns["valid_row"][row]) and not any(name in said for name in JUDGED)
    for name in JUDGED:
        if name in numbers:  # a trajectory that failed before it was judged has not been right
            numbers[name] += [0.0] * unjudged
    own = {name: f"{name}/reported" for name in OURS}  # MLflow keeps files, and one cannot be a folder too
    out = {f"trajectory/{own.get(name, name)}": float(np.mean(values)) for name, values in numbers.items()}
    for name in [name for name in numbers if name.startswith("sandbox_")]:
        del out[f"trajectory/{name}"]
        out[name.replace("_", "/", 1)] = float(sum(numbers[name]))
    if reported:
        out["rollout/failed_trajectories"] = float(sum(failures.values()))
        out.update({f"rollout/failures/{reason}": float(count) for reason, count in failures.items()})
    return out


def require_a_row(columns: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Refuse a batch of which no turn may be trained on; verl would divide by nothing or fail in its own words. Raises
    BatchError: names the reasons that the agent loops gave."""
    if np.asarray(columns["valid_row"], dtype=bool).any():
        return
    prefix = "rollout/failures/"
    reasons = [f"{name[len(prefix) :]}: {n:.0f}" for name, n in metrics.items() if name.startswith(prefix)]
    raise BatchError(
        f"no turn of this batch can be trained on (failed trajectories: {', '.join(reasons) or 'none reported'}). The "
        "log of the agent loop workers says what happened in each."
    )
