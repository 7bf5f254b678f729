# SPDX-License-Identifier: Apache-2.0
"""Several models with ``trainer.v1.trainer_mode=separate_async``: rollout servers apart from training, for each model.

verl's trainer of this mode makes standalone servers, their load balancer and the manager that sends them weights; each
model's trainer does so for its own (`members`). While the training GPUs are lent to rollouts, for validation or between
two steps, the servers there join the balancer: those of all models at once.
"""

from __future__ import annotations

from typing import Any

from verl_ext.integration.models.lead import LeadMixin, Together
from verl_ext.integration.settings.model_options import POLICY
from verl_ext.integration.settings.options import bypass


class SeparateLead(LeadMixin):
    """`LeadMixin` in front of verl's trainer of this mode; with one model every call goes straight to verl's."""

    standalone_checkpoint_manager: Any
    local_trigger_step: int
    parameter_sync_step: int

    def _setup(self) -> None:
        super()._setup()
        if self._members:
            managers = {name: one.standalone_checkpoint_manager for name, one in self._trainers().items()}
            self.standalone_checkpoint_manager = Together(managers)

    def _trained_members(self) -> list[Any]:
        return [member for member in self._members.values() if member.model.trained]

    def add_replicas_to_balancer(self) -> None:
        super().add_replicas_to_balancer()  # type: ignore[misc]
        for member in self._trained_members():
            member.add_replicas_to_balancer()

    def remove_replicas_from_balancer(self) -> None:
        super().remove_replicas_from_balancer()  # type: ignore[misc]
        for member in self._trained_members():
            member.remove_replicas_from_balancer()

    def clear_sticky_cache(self) -> Any:
        found = super().clear_sticky_cache()  # type: ignore[misc]
        for member in self._trained_members():
            member.clear_sticky_cache()
        return found

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Every mini-batch between two synchronisations is scored with the weights that the servers have, which verl
        keeps at the first one: also of a model that has no sequence in that one."""
        if not self._members:
            return super()._compute_old_log_prob(batch, metrics)
        first = self.local_trigger_step == 0 and self.parameter_sync_step > 1 and not bypass(self.config)
        present = {self._model_of[key] for key in batch.keys}
        for trainer in (self, *self._trained_members()):
            trainer.local_trigger_step = self.local_trigger_step
            name = POLICY if trainer is self else trainer.model.name
            if first and name not in present:
                trainer.actor_rollout_wg.save_model_to_cpu(0)
        return super()._compute_old_log_prob(batch, metrics)
