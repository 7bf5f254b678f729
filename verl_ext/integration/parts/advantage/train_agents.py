# SPDX-License-Identifier: Apache-2.0
"""``verl_ext.train_agents``: turns of other agents are in the transcripts, in no statistic, and not trained on.

A turn of another agent is taken out as if its agent loop had said ``valid_row: false``. What it earned stays: the
``turn_reward`` of each turn that is left becomes

    R_i = G_i - gamma^(turn_index[next(i)] - turn_index[i]) * G_next(i)

with gamma that of the run's estimators, G_i the discounted return over all turns of the trajectory and next(i) the next
turn that is left. So the returns of the agents that are trained are what they would be with all turns: a planner gets
what its workers earn after it. Of agents that have a reward each (``agent_reward``), none gets another's.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from verl_ext.integration.columns import ActiveBatch, BatchError, is_real, own_trajectories
from verl_ext.integration.compat.data_plane import fetch
from verl_ext.integration.estimators import ESTIMATORS
from verl_ext.integration.mix import component_names
from verl_ext.integration.parts.advantage.columns import dicts, take_out
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings.options import OptionError, coerce, discount, select
from verl_ext.methods.groups import value_ids
from verl_ext.methods.returns import chronology, turn_returns

logger = logging.getLogger(__name__)


def train_agents(config: Any) -> tuple[str, ...]:
    """``verl_ext.train_agents``; () for all. Raises OptionError: it is no list of names, or an empty one."""
    given = select(config.get("verl_ext"), "train_agents")
    if given is None:
        return ()
    names = coerce(list(given) if not isinstance(given, str) else given, tuple[str, ...], "verl_ext.train_agents")
    if not names:
        raise OptionError("verl_ext.train_agents is empty: nothing would be trained. Name agents, or set it to null.")
    return names


def turn_discount(algorithm: Any) -> float:
    """The discount a turn of the run's estimators, or ``algorithm.gamma`` where none has one. Raises OptionError: they
    have several, and a turn would have earned a different amount for each."""
    used = {name: ESTIMATORS[name] for name in component_names(algorithm) if name in ESTIMATORS}
    found = {name: one.settings(algorithm)["gamma"] for name, one in used.items() if "gamma" in one.parameters.options}
    if len(set(found.values())) > 1:
        said = ", ".join(f"{name}: {gamma:g}" for name, gamma in found.items())
        raise OptionError(
            "verl_ext.train_agents gives turns what those after them earned, discounted by one gamma, but the "
            f"estimators have several ({said}). Set algorithm.gamma, and no algorithm.<method>.gamma but the same."
        )
    return float(next(iter(found.values()), discount(algorithm)))


class TrainAgents(Part):
    """See the module's text."""

    def __init__(self, config: Any, trainer: Any = None) -> None:
        super().__init__(config, trainer)
        self.names = train_agents(config)
        self._warned: set[str] = set()

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return bool(train_agents(config))

    @classmethod
    def check(cls, config: Any) -> list[str]:
        names = train_agents(config)
        if names:
            turn_discount(config.algorithm)
        return []

    def on_sample(self, batch: Any) -> Any:
        found = fetch(batch, ["extra_fields"]).get("extra_fields")
        names = [(row or {}).get("agent_id") for row in ([{}] * len(batch) if found is None else dicts(found))]
        if not set(names) & set(self.names):
            known = sorted({str(name) for name in names})
            raise BatchError(
                f"verl_ext.train_agents names {', '.join(self.names)}; the turns are of {', '.join(known)}."
            )
        unseen = [name for name in self.names if name not in names and name not in self._warned]
        if unseen:
            self._warned |= set(unseen)
            known = sorted({str(name) for name in names})
            logger.warning(
                "verl_ext.train_agents names %s, of whom this batch has no turn; its turns are of %s",
                ", ".join(unseen),
                ", ".join(known),
            )
        out = [key for key, name in zip(batch.keys, names, strict=True) if name not in self.names]
        return take_out(batch, out) if out else batch

    def on_batch(self, batch: Any, active: ActiveBatch, metrics: dict[str, Any]) -> Any:
        columns, valid = active.columns, active.columns["valid_row"]
        trained = valid & np.isin(np.array([row.get("agent_id") for row in active.extra_fields], dtype=str), self.names)
        if "turn_reward" in columns:
            gamma = turn_discount(self.config.algorithm)
            own = {**columns, "traj_uid": own_trajectories(columns)}
            columns["turn_reward"] = carried(own, valid, trained, gamma)
        columns["valid_row"] = trained
        real = [is_real(tag) for tag in active.tags]
        self.metrics["rollout/turns_of_other_agents"] = float(np.sum(valid & real) - np.sum(trained & real))
        return batch


def carried(columns: Any, valid: np.ndarray, trained: np.ndarray, gamma: float) -> np.ndarray:
    """The rewards of the turns that are trained on with what the turns after them earned.

    Args:
        columns: ``traj_uid`` [B] object, ``turn_index`` [B] int64 and ``turn_reward`` [B] float64.
        valid: [B] bool, turns that are samples.
        trained: [B] bool, those of them that are trained on.
        gamma: discount a turn.

    Returns:
        [B] float64; 0 for samples that are not trained on. What was earned before a trajectory's first turn that is
        left is nobody's.
    """
    samples = np.flatnonzero(valid)
    trajectory, turn = value_ids(columns["traj_uid"][samples]), columns["turn_index"][samples]
    returns = np.zeros(len(valid))
    returns[samples] = turn_returns(columns["turn_reward"][samples], trajectory, turn, gamma=gamma)
    left = samples[trained[samples]]
    order, place = chronology(trajectory[trained[samples]], columns["turn_index"][left])
    rows = left[order]
    following = np.append(place[1:] > 0, False)[: rows.size]  # another turn of its trajectory comes after it
    after = np.where(following, np.roll(returns[rows], -1), 0.0)
    gap = np.where(following, np.diff(columns["turn_index"][rows], append=0), 0)
    rewards = np.where(valid & ~trained, 0.0, columns["turn_reward"])
    rewards[rows] = returns[rows] - np.where(following, float(gamma) ** gap, 0.0) * after
    return rewards
