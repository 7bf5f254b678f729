# SPDX-License-Identifier: Apache-2.0
"""Norm of each agent's part of the gradient, on the trainer's side: ``verl_ext.agent_gradients``.

The engine's side, and what the figure is: `verl_ext.integration.engines.agent_gradients`. Here the sequences get a
column that says whose they are, and the norms, which the engine logs by number, get the agents' names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl_ext.integration import columns
from verl_ext.integration.columns import ActiveBatch, demand
from verl_ext.integration.compat import data_plane
from verl_ext.integration.engines.agent_gradients import AGENT, AGENTS, KEY, metric
from verl_ext.integration.parts.advantage.methods import told
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings.options import not_extended, option, require_fsdp
from verl_ext.integration.turns import Turns


class AgentGradients(Part):
    """See the module's text."""

    _agent_of: Mapping[str, str] = {}
    _names: Sequence[str] = ()

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return option(config, "agent_gradients", bool, False)

    @classmethod
    def check(cls, config: Any) -> list[str]:
        if cls.wanted(config):
            require_fsdp(config, f"{KEY}=true separates the agents", f", or {KEY}=false")
            return told(config, KEY, "agent_id")
        return []

    def on_batch(self, batch: Any, active: ActiveBatch, metrics: dict[str, Any]) -> Any:
        with columns.active(active):
            self._agent_of = agent_by_key(active.columns, batch.keys, active.turns)
        return batch

    def before_update(self, batch: Any) -> Any:
        updated = self.trainer.updated_rows(batch)
        others = [
            key not in updated or not columns.is_trained(tag) for key, tag in zip(batch.keys, batch.tags, strict=True)
        ]
        self._names, column = number_agents(self._agent_of, batch.keys, others)
        told = dict(batch.extra_info or {})  # by other parts; what the store returns has none
        batch = data_plane.write(batch, {AGENT: column})
        batch.extra_info.update(told | {AGENTS: len(self._names)})
        return batch

    def after_update(self, metrics: dict[str, Any]) -> None:
        self.metrics.update(named_metrics(metrics, self._names))


def agent_by_key(columns: Mapping[str, Any], keys: Sequence[str], turns: Turns | None = None) -> dict[str, str]:
    """The agent of each sequence, whose turns are all of one, by its storage key. Raises RowFieldMissing: the sequences
    carry no ``agent_id``."""
    if "agent_id" not in columns:
        raise demand("agent_id", KEY)
    rows = range(len(keys)) if turns is None or turns.sequence is None else turns.sequence.tolist()
    return {keys[row]: str(agent) for row, agent in zip(rows, columns["agent_id"], strict=True)}


def number_agents(
    agent_of: Mapping[str, str], keys: Sequence[str], others: Sequence[bool]
) -> tuple[list[str], torch.Tensor]:
    """The agents of the sequences [B] of a batch in alphabetical order, and the column `AGENT`; `others` [B] are the
    sequences that no update is made of."""
    of_row = [None if other else agent_of[key] for key, other in zip(keys, others, strict=True)]
    names = sorted({name for name in of_row if name is not None})
    place = {name: number for number, name in enumerate(names)}
    return names, torch.tensor([-1 if name is None else place[name] for name in of_row], dtype=torch.int64)


def named_metrics(metrics: dict[str, Any], names: Sequence[str]) -> dict[str, float]:
    """What the engine reported by number, taken out of verl's metrics of the step: ``agent/<name>/grad_norm/*``
    over the updates in which the agent has sequences. Raises RuntimeError: the engine has reported nothing."""
    out = {}
    for number, name in enumerate(names):
        for statistic in ("mean", "max"):
            value = metrics.pop(f"actor/{metric(number, statistic)}", None)
            if value is not None:
                out[f"agent/{name}/grad_norm/{statistic}"] = float(value)
    if names and not out:
        raise not_extended(f"{KEY}=true, but the training engine has not separated the agents", f"; or set {KEY}=false")
    return out
