# SPDX-License-Identifier: Apache-2.0
"""What every model of a run with several has for itself, in front of verl's trainer."""

from __future__ import annotations

import contextlib
from typing import Any

from verl_ext.integration import dvp
from verl_ext.integration.columns import ActiveBatch, has_token
from verl_ext.integration.parts.base import Part
from verl_ext.integration.parts.update.pruning import PrunedUpdates
from verl_ext.integration.parts.update.rejection import RejectionRules, SkippedUpdates
from verl_ext.integration.parts.update.updates import Updates


class ModelSide:
    """Mixin right in front of a V1 trainer of verl. The parts of a step that cut a batch, for a model's own sequences.

    Nothing is done without `own_parts`, as in a run with one model, whose parts are the trainer's.
    """

    own_parts: tuple[Part, ...] = ()

    def own_metrics(self) -> dict[str, float]:
        """What the parts have to report since the last call."""
        found: dict[str, float] = {}
        for part in self.own_parts:
            found.update(part.metrics)
            part.metrics.clear()
        return found

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        for part in self.own_parts:
            batch = part.on_sample(batch)
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)  # type: ignore[misc]
        if self.own_parts and any(map(has_token, batch.tags)):  # else the model is passed over in the update
            for part in self.own_parts:
                batch = part.on_batch(batch, ActiveBatch(columns={}), metrics)
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        multiple = super()._get_required_batch_multiple(dp_size)  # type: ignore[misc]
        for part in self.own_parts:
            multiple = part.row_multiple(multiple, dp_size)
        return multiple

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with contextlib.ExitStack() as stack:
            for part in self.own_parts:
                stack.enter_context(part.around_update("critic", batch))
            return super()._update_critic(batch, metrics)  # type: ignore[misc]

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with contextlib.ExitStack() as stack:
            for part in self.own_parts:
                stack.enter_context(part.around_update("actor", batch))
            batch = super()._update_actor(batch, metrics)  # type: ignore[misc]
        for part in self.own_parts:
            part.after_update(metrics)
        return batch


def own_parts(config: Any, trainer: Any) -> tuple[Part, ...]:
    """The parts that a model has for itself."""
    skipped = (SkippedUpdates(config, trainer),) if RejectionRules.wanted(config) else ()
    pruned = (PrunedUpdates(config, trainer),) if dvp.options(config) is not None else ()
    return Updates(config, trainer), *skipped, *pruned
