# SPDX-License-Identifier: Apache-2.0
"""The parts of a training step, one file each, and their order.

A new feature is a class in a file of its own and its line in `_PARTS`. What a part can do: `base.Part`. Parts of other
wings and packages are put among them by `insert`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from verl_ext.integration import names
from verl_ext.integration.compat import registrations
from verl_ext.integration.parts import models
from verl_ext.integration.parts.advantage import columns, methods, modifiers, rollouts, train_agents, variance_proxy
from verl_ext.integration.parts.base import Part
from verl_ext.integration.parts.outputs import metrics_file, record, rows, transcripts
from verl_ext.integration.parts.recovery import missing, nodes
from verl_ext.integration.parts.update import (
    agent_gradients,
    imitation,
    length_lr,
    losses,
    pruning,
    rejection,
    updates,
)
from verl_ext.integration.settings.options import select

__all__ = ["active", "all_parts", "insert", "methods", "uses_verl_ext"]

_PARTS: list[type[Part]] = [
    models.Models,  # its checks come first: further models inherit what the others complete
    metrics_file.MetricsFile,
    nodes.Nodes,
    missing.Missing,
    updates.Updates,  # may put the sequences in another order
    columns.Columns,  # turn fields in the order of the turns, for all that follow
    train_agents.TrainAgents,  # takes turns out, and gives the others what these earned
    rollouts.Rollouts,
    losses.Losses,
    imitation.Imitation,  # what the loss hybrid_imitation reads of a teacher
    rejection.RejectionRules,  # decides before the advantage on what is trained, takes out of the loss after it
    rejection.SkippedUpdates,
    pruning.Pruning,  # shows the estimators tokens outside the safe set, and hides them again
    pruning.PrunedUpdates,
    methods.Methods,  # settles the rewards; after the estimator checks what came out
    record.Record,  # what the estimator sees, as it sees it
    modifiers.Modifiers,
    methods.LearningSignal,
    variance_proxy.VarianceProxy,
    agent_gradients.AgentGradients,
    length_lr.LengthLearningRate,
    rows.Rows,
    transcripts.Transcripts,
]
_called: list[Any] = []
"""Those of `registrations.PARTS` and of the entry points that have been called."""

GROUP = "verl_ext.parts"
"""Entry points of packages with parts of their own: functions without arguments that call `insert`."""


def insert(part: type[Part], after: type[Part]) -> None:
    """Put a part of another wing or package right after one that is there. Twice is once.

    Raises:
        ValueError: `after` is not a part of the list, or another part has the same key.
    """
    if after not in _PARTS:
        raise ValueError(f"the part {part.__name__} is to stand after {after.__name__}, which is not registered")
    if part not in _PARTS:
        if part.key and (other := next((one for one in _PARTS if one.key == part.key), None)):
            raise ValueError(f"the parts {other.__name__} and {part.__name__} have the same key, {part.key!r}")
        _PARTS.insert(_PARTS.index(after) + 1, part)


def all_parts() -> tuple[type[Part], ...]:
    """Every part in the order in which their hooks are called; also the order of the checks at launch. Raises
    RuntimeError: the parts of a package (entry point of the group `GROUP`) cannot be put among them."""
    for register in registrations.PARTS:
        if register not in _called:
            _called.append(register)
            register()
    for point in entry_points(group=GROUP):
        if point.value not in _called:
            try:
                point.load()()
            except Exception as error:
                raise RuntimeError(
                    f"the entry point {point.name} = {point.value} ({GROUP}) failed: {error!r}"
                ) from error
            _called.append(point.value)
    return tuple(_PARTS)


def uses_verl_ext(config: Any) -> bool:
    """Whether a run names anything of ours: one of our nodes, or an estimator of ours."""
    if any(select(config.algorithm, name) for name in ("rejection", "modifiers")) or select(
        config.get("trainer"), "length_lr"
    ):
        return True
    if config.get("verl_ext") is not None or config.get("dvp") is not None:
        return True
    return names.is_ours(select(config.algorithm, "adv_estimator"))


def active(config: Any, trainer: Any) -> tuple[Part, ...]:
    """The parts of a run of ours, in order."""
    return tuple(part(config, trainer) for part in all_parts() if part.wanted(config))
