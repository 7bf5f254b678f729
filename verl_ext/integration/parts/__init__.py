# SPDX-License-Identifier: Apache-2.0
"""The parts of a training step, one file each, and their order.

A new feature is a class in a file of its own and its line in `PARTS`. What a part can do: `base.Part`.
"""

from __future__ import annotations

from typing import Any

from verl_ext.integration.estimators import ESTIMATORS
from verl_ext.integration.options import select
from verl_ext.integration.parts import (
    agent_gradients,
    agent_loops,
    columns,
    imitation,
    length_lr,
    losses,
    methods,
    metrics_file,
    missing,
    models,
    modifiers,
    nodes,
    pruning,
    record,
    rejection,
    rewards,
    rollouts,
    rows,
    train_agents,
    transcripts,
    updates,
    variance_proxy,
)
from verl_ext.integration.parts.base import Part

__all__ = ["PARTS", "active", "methods", "uses_verl_ext"]

PARTS: tuple[type[Part], ...] = (
    models.Models,  # its checks come first: further models inherit what the others complete
    metrics_file.MetricsFile,
    nodes.Nodes,
    agent_loops.AgentLoops,
    rewards.Rewards,
    missing.Missing,
    updates.Updates,  # may put the rows in another order
    columns.Columns,  # row fields in the order of the rows, for all that follow
    train_agents.TrainAgents,  # takes rows out, and gives the others what these earned
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
)
"""Every part in the order in which their hooks are called; also the order of the checks at launch."""


def uses_verl_ext(config: Any) -> bool:
    """Whether a run names anything of ours: one of our nodes, or an estimator that we registered."""
    if any(select(config.algorithm, name) for name in ("rejection", "modifiers")) or select(
        config.get("trainer"), "length_lr"
    ):
        return True
    if config.get("verl_ext") is not None or config.get("dvp") is not None:
        return True
    name = select(config.algorithm, "adv_estimator")
    return getattr(name, "value", name) in {*ESTIMATORS, "mix"}


def active(config: Any, trainer: Any) -> tuple[Part, ...]:
    """The parts of a run of ours, in order."""
    return tuple(part(config, trainer) for part in PARTS if part.wanted(config))
