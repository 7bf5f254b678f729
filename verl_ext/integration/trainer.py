# SPDX-License-Identifier: Apache-2.0
"""A mixin over verl's V1 trainers that calls the parts of a step where they belong, and does nothing else.

`extend_registry` puts it in front of each class of verl's trainer registry, under the same name, so
``trainer.v1.trainer_mode`` keeps its meaning. A run that uses nothing of verl_ext has no parts, and every method is
verl's own. What the parts are and their order: `verl_ext.integration.parts`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from verl_ext.integration import checks, columns, names, parts, turns
from verl_ext.integration.compat import verl_api, wraps
from verl_ext.integration.models.lead import LeadMixin
from verl_ext.integration.models.separate import SeparateLead
from verl_ext.integration.models.side import ModelSide
from verl_ext.integration.parts import checkpoints
from verl_ext.integration.parts.base import Part
from verl_ext.integration.parts.reduction import reduced
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.options import OptionError


class VerlExtTrainer:
    """Mixin over a V1 trainer of verl. See the module's text."""

    config: Any
    parts: tuple[Part, ...] = ()

    def __init__(self, config: Any) -> None:
        if parts.uses_verl_ext(config):
            names.require(config)
            checks.complete(config)
            checks.check(config)
            verl_api.require(config)  # again: this machine may be another than the launcher's
            self.parts = parts.active(config, self)
        self._rows: columns.ActiveBatch = columns.ActiveBatch(columns={})
        self._updates_metrics: list[tuple[int, dict[str, float]]] = []
        super().__init__(config)  # type: ignore[call-arg]

    # ---- around the run ----

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()  # type: ignore[misc]
        for part in self.parts:
            buffer = part.replay_buffer(buffer)
        return buffer

    def get_llm_client(self) -> Any:
        client = super().get_llm_client()  # type: ignore[misc]
        for part in self.parts:
            client = part.client(client)
        return client

    def fit(self, agent_loop_manager: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.around_fit())
            return super().fit(agent_loop_manager)  # type: ignore[misc]

    def _save_checkpoint(self) -> Any:
        checkpoints.save(self.config, self.global_steps, self.parts)  # type: ignore[attr-defined]
        return super()._save_checkpoint()  # type: ignore[misc]

    def _load_checkpoint(self) -> Any:
        found = super()._load_checkpoint()  # type: ignore[misc]
        checkpoints.load(self.config, self.global_steps, self.parts)  # type: ignore[attr-defined]
        return found

    # ---- a step: `step` is one or more times `_step_once` (parameter_sync_step) ----

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        started = time.monotonic()
        batch = super().step(metrics, timing_raw)  # type: ignore[misc]
        metrics.update(reduced(self._updates_metrics))  # after verl has reduced its own, by other rules
        self._updates_metrics.clear()
        if "sandbox/seconds" in metrics:  # of all its processes; 1.0: one was busy all the time
            metrics["sandbox/share_of_step"] = metrics["sandbox/seconds"] / (time.monotonic() - started)
        return batch

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, Any], sample_batch_size: int) -> Any:
        batch = super()._step_once(metrics, timing_raw, sample_batch_size)  # type: ignore[misc]
        rows = sum(columns.is_real(tag) for tag in batch.tags)
        for part in self.parts:
            self._updates_metrics.append((rows, dict(part.metrics)))
            part.metrics.clear()
        return batch

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        for part in self.parts:  # after sampling and the reward, before padding
            batch = part.on_sample(batch)
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)  # type: ignore[misc]
        self._rows = columns.ActiveBatch(columns={})
        for part in self.parts:
            batch = part.on_batch(batch, self._rows, metrics)
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        multiple = super()._get_required_batch_multiple(dp_size)  # type: ignore[misc]
        for part in self.parts:
            multiple = part.row_multiple(multiple, dp_size)
        return multiple

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        for part in self.parts:
            batch = part.before_old_log_prob(batch)
        batch = super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
        for part in self.parts:
            batch = part.after_old_log_prob(batch, metrics)
        return batch

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        for part in self.parts:
            batch = part.before_reference(batch)
        return super()._compute_ref_log_prob(batch, metrics)  # type: ignore[misc]

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if not self.parts:
            return super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        # verl's step 3, after KL in reward and rollout correction: the only place where keys and data meet
        with wraps.must_be_called(wraps.ADVANTAGE), wraps.replaced(wraps.ADVANTAGE, self._advantage):
            return super()._compute_advantage(batch, metrics)  # type: ignore[misc]

    def _advantage(self, original: Any) -> Any:
        def compute(data: Any, batch_keys: list[str], adv_estimator: Any, **kwargs: Any) -> Any:
            active = self._rows
            if active.stored and list(batch_keys) != active.stored:
                raise RuntimeError("the sequences were put in another order after their turn fields were read")
            rows, keys = turns.unpacked(data, active.turns), list(active.keys or batch_keys)
            for part in self.parts:
                part.before_advantage(rows, keys, active)
            rows = parts.methods.estimate(original, rows, keys, adv_estimator, active, **kwargs)
            for part in self.parts:
                part.after_advantage(rows, keys, active)
            return turns.packed(rows, data, active.turns)

        return compute

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.around_update("critic", batch))
            return super()._update_critic(batch, metrics)  # type: ignore[misc]

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        for part in self.parts:
            batch = part.before_update(batch)
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.around_update("actor", batch))
            batch = super()._update_actor(batch, metrics)  # type: ignore[misc]
        for part in self.parts:
            part.after_update(metrics)
        return batch

    # ---- validation: verl has its samples and is about to make metrics of them ----

    def _val_metrics_update(
        self, data_sources: Any, sample_uids: Any, reward_extra_infos_dict: Any, *args: Any, **kwargs: Any
    ) -> Any:
        samples = data_sources, sample_uids, reward_extra_infos_dict
        for part in self.parts:
            part.on_validation(*samples, **kwargs)
        found = super()._val_metrics_update(*samples, *args, **kwargs)  # type: ignore[misc]
        for part in self.parts:
            found.update(part.metrics)
            part.metrics.clear()
        return found


def check_task_runner(config: Any, task_runner: Any) -> None:
    """Raise OptionError if this Ray actor class is one of verl's that build a trainer of the older family."""
    for one in task_runner.__ray_metadata__.modified_class.__mro__[1:]:  # the first is of Ray's making
        if _module(one).startswith(("verl.experimental.", "verl.trainer.main_ppo_v0")):
            refuse_older(config, one)


def refuse_older(config: Any, what: type) -> None:
    """Raise OptionError in a run of ours that `what` would train with a trainer of verl's older family."""
    if parts.uses_verl_ext(config):
        lost = ", ".join(part.__name__ for part in parts.all_parts() if part.wanted(config))
        raise OptionError(
            f"{_module(what)}.{what.__name__} trains with a trainer of verl's older family, whatever trainer.use_v1 "
            f"says. It calls no part of verl_ext and would leave out {lost}. Start verl.trainer.main_ppo, whose "
            "asynchronous modes are trainer.v1.trainer_mode=separate_async and colocate_async, or leave out the "
            "recipes."
        )


def _module(what: type) -> str:
    """Where a class is defined, also in the module that ``python -m`` runs."""
    spec = sys.modules["__main__"].__spec__
    return spec.name if what.__module__ == "__main__" and spec else what.__module__


def extend_registry() -> None:
    """Put the mixin in front of every registered V1 trainer, keeping its name. Idempotent."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    for name, trainer in list(TRAINER_REGISTRY.items()):
        if not issubclass(trainer, VerlExtTrainer):
            ours = (VerlExtTrainer, SeparateLead if name == model_options.SEPARATE else LeadMixin)
            for mixin in (*ours, ModelSide):
                verl_api.check_overrides(mixin, trainer)
            TRAINER_REGISTRY[name] = type(
                trainer.__name__, (*ours, trainer), {"__doc__": trainer.__doc__, "__module__": __name__}
            )
