# SPDX-License-Identifier: Apache-2.0
"""What verl's V1 trainers need in order to feed our estimators: a mixin over the registered classes, no copy.

`extend_registry` puts the mixin in front of each class of verl's trainer registry, under the same name, so
``trainer.v1.trainer_mode`` keeps its meaning. The mixin hands every call straight to verl unless the run uses
verl_ext (an estimator of ours, or the top-level config node ``verl_ext`` that our recipes bring).

In such a run it

* checks the configuration before any worker starts;
* asks the engine for the columns that the chosen estimators need, together with the old log-probabilities, computed
  in one pass over the logits; with ``dvp.rho`` they are those of the pruned policy, and the sampler prunes too;
* cuts the batch into a fixed number of updates if ``verl_ext.updates_per_batch`` says so;
* takes the norm of each agent's part of the gradient if ``verl_ext.agent_gradients`` says so;
* makes the row fields available to the estimators while verl computes the advantages;
* keeps the metrics of the steps before a resume, which verl's file logger would delete.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from verl_ext.integration import agent_gradients, checks, columns, dvp, updates, verl_api, wraps
from verl_ext.integration.estimators import ESTIMATORS
from verl_ext.integration.metrics import learning_signal, trajectory_metrics
from verl_ext.integration.metrics_file import keep_earlier_metrics
from verl_ext.integration.mix import component_names
from verl_ext.integration.options import select
from verl_ext.integration.rollout_metrics import require_a_row, rollout_metrics

logger = logging.getLogger(__name__)


def uses_verl_ext(config: Any) -> bool:
    """Whether a run names anything of ours: the ``verl_ext`` or ``dvp`` node, or an estimator that we registered."""
    if config.get("verl_ext") is not None or config.get("dvp") is not None:
        return True
    name = select(config.algorithm, "adv_estimator")
    return getattr(name, "value", name) in {*ESTIMATORS, "mix"}


def inert(method: Any) -> Any:
    """Hand the call to verl's own method unless the run uses verl_ext."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._verl_ext:
            return getattr(super(VerlExtTrainer, self), method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return call


class VerlExtTrainer:
    """Mixin over a V1 trainer of verl. See the module's text."""

    config: Any
    _agent_gradients = False
    _agent_of: Mapping[str, str] = {}

    def __init__(self, config: Any) -> None:
        self._verl_ext = uses_verl_ext(config)
        if self._verl_ext:
            checks.check(config)
            names = component_names(config.algorithm)
            self._needs = {column for name in names if name in ESTIMATORS for column in ESTIMATORS[name].columns}
            if checks.VERL_OTB & set(names):  # verl's own need it too, and V1 never asks for it
                self._needs.add("sum_pi_squared")
            self._pruning = dvp.Pruning.of(config)
        self._variance_batch: Any = None
        self._updates = updates.updates_per_batch(config) if self._verl_ext else None
        self._agent_gradients = self._verl_ext and agent_gradients.wanted(config)
        self._transcripts: Any = None
        self._shown: Any = None
        super().__init__(config)  # type: ignore[call-arg]

    @inert
    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()  # type: ignore[misc]
        poll = select(self.config.get("verl_ext"), "poll_interval_s")
        if poll is not None:
            buffer.poll_interval = float(poll)
        return buffer

    @inert
    def fit(self, agent_loop_manager: Any) -> Any:
        make = functools.partial(keep_earlier_metrics, resumed_step=self.global_steps)  # type: ignore[attr-defined]
        try:
            to_file = "file" in self.config.trainer.logger
            with wraps.must_be_called(wraps.FILE_LOGGER, to_file), wraps.replaced(wraps.FILE_LOGGER, make):
                return super().fit(agent_loop_manager)  # type: ignore[misc]
        finally:
            if self._transcripts is not None:
                self._transcripts.close()

    @inert
    def _get_required_batch_multiple(self, dp_size: int) -> int:
        if self._updates is None:
            return super()._get_required_batch_multiple(dp_size)  # type: ignore[misc]
        return updates.row_multiple(self.config, self._updates_now, dp_size, critic=self.use_critic)  # type: ignore[attr-defined]

    @inert
    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self._updates is None:
            return super()._balance_batch(batch, metrics, *args, **kwargs)  # type: ignore[misc]
        self._updates_now = min(self._updates, len(batch))
        if self._updates_now < self._updates:
            logger.warning("a batch of %d rows gets as many updates, not %s=%d", len(batch), updates.KEY, self._updates)
        batch = super()._balance_batch(batch, metrics, *args, **kwargs)  # type: ignore[misc]
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1  # type: ignore[attr-defined]
        metrics.update(updates.balance(batch, self._updates_now, ranks))
        return batch

    def _told(self, batch: Any, section: Any, worker_group: Any, method: str, metrics: dict[str, Any]) -> Any:
        """The sizes that the workers of actor or critic are to cut this batch by; see `updates`."""
        n = int(self.config.actor_rollout_ref.rollout.n)
        changes = None
        if self._updates is not None:
            changes = updates.settings(batch.keys, batch.tags, n, self._updates_now, str(section.loss_agg_mode))
        if method == "update_actor":
            rows = changes["mini_batch_size"] if changes else int(section.ppo_mini_batch_size) * n
            metrics.update(updates.step_metrics(batch.keys, batch.tags, rows, int(section.ppo_epochs)))
        return updates.told(worker_group, method, changes)

    @inert
    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self._told(batch, self.config.critic, self.critic_wg, "train_mini_batch", metrics):  # type: ignore[attr-defined]
            return super()._update_critic(batch, metrics)  # type: ignore[misc]

    @inert
    def get_llm_client(self) -> Any:
        return self._pruning.guard(super().get_llm_client())  # type: ignore[misc]

    @inert
    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if "sum_pi_squared" in self._needs:
            batch.extra_info["calculate_sum_pi_squared"] = True
        batch.extra_info.update(self._pruning.info("old"))
        batch = super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
        return self._pruning.after_old_log_prob(batch, metrics)

    @inert
    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info.update(self._pruning.info("reference"))
        return super()._compute_ref_log_prob(batch, metrics)  # type: ignore[misc]

    @inert
    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        active = self._active_batch(batch)
        metrics.update(self._completeness(batch))

        def make(original: Any) -> Any:
            def compute(data: Any, batch_keys: list[str], adv_estimator: Any, **kwargs: Any) -> Any:
                if "sum_pi_squared" in active.columns:
                    data.batch["sum_pi_squared"] = active.columns.pop("sum_pi_squared")
                trained = self._pruning.show_outside(data, batch_keys)
                _complete(active, data)
                checks.check_rewards(active.columns, data.batch["token_level_rewards"], batch_keys)

                def component(name: str) -> tuple[torch.Tensor, torch.Tensor]:
                    # verl writes its results into the batch it is given; a shallow copy keeps `data` as it was.
                    part = type(data)(
                        batch=data.batch.clone(recurse=False),
                        non_tensor_batch=dict(data.non_tensor_batch),
                        meta_info=dict(data.meta_info),
                    )
                    part = original(part, batch_keys=batch_keys, adv_estimator=name, **kwargs)
                    return part.batch["advantages"], part.batch["returns"]

                active.component = component
                with columns.active(active):
                    data = original(data, batch_keys=batch_keys, adv_estimator=adv_estimator, **kwargs)
                dvp.hide_outside(data, trained)
                checks.check_advantages(data.batch["advantages"], batch_keys, str(adv_estimator))
                active.metrics.update(trajectory_metrics(active.columns))
                active.metrics.update(
                    learning_signal(active.columns, data.batch["advantages"], data.batch["response_mask"])
                )
                self._after_advantage(active, data, batch_keys)
                self._shown = (data.batch["token_level_rewards"], data.batch["advantages"], data.batch["response_mask"])
                self._variance_batch = self._for_variance_proxy(active, data)
                return data

            return compute

        with wraps.must_be_called(wraps.ADVANTAGE), wraps.replaced(wraps.ADVANTAGE, make):
            batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        metrics.update(active.metrics)
        if self._agent_gradients:
            with columns.active(active):
                self._agent_of = agent_gradients.agent_by_key(active.columns, batch.keys)
        self._write_transcripts(batch, active)
        return batch

    @inert
    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        actor = self.config.actor_rollout_ref.actor
        agents: list[str] = []
        if self._agent_gradients:
            batch, agents = self._with_agents(batch)
        batch.extra_info.update(self._pruning.info("update"))
        with self._told(batch, actor, self.actor_rollout_wg, "update_actor", metrics):  # type: ignore[attr-defined]
            batch = super()._update_actor(batch, metrics)  # type: ignore[misc]
        self._pruning.check_update(metrics)
        metrics.update(agent_gradients.named_metrics(metrics, agents))
        if self._variance_batch is not None:
            from verl.trainer.ppo.metric_utils import compute_variance_proxy_metrics

            metrics.update(compute_variance_proxy_metrics(self._variance_batch, metrics.get("actor/grad_norm")))
            self._variance_batch = None
        return batch

    def _with_agents(self, batch: Any) -> tuple[Any, list[str]]:
        """The batch with a column that says whose each row is, and the agents' names."""
        import transfer_queue as tq
        from tensordict import TensorDict

        padding = [_padding(tag) for tag in batch.tags]
        names, column = agent_gradients.number_agents(self._agent_of, batch.keys, padding)
        fields = TensorDict({agent_gradients.AGENT: column}, batch_size=len(batch))
        batch = tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        batch.extra_info[agent_gradients.AGENTS] = len(names)
        return batch, names

    def _active_batch(self, batch: Any) -> columns.ActiveBatch:
        """Row fields of the batch from its keys, tags and the agent loops' extra fields."""
        extra = _fetch(batch, ["extra_fields"]).get("extra_fields")
        extra = None if extra is None else _dicts(extra)
        found, missing = columns.row_fields(batch.keys, batch.tags, extra)
        active = columns.ActiveBatch(columns=found, missing=missing)
        if extra is not None:
            active.metrics.update(rollout_metrics(found, batch.tags, extra))
        require_a_row(found, active.metrics)
        if "sum_pi_squared" in self._needs:
            from verl.workers.utils.padding import response_from_nested

            data = _fetch(batch, ["sum_pi_squared", "response_mask"])
            if "sum_pi_squared" not in data:
                raise columns.RowFieldMissing(
                    "the training engine returned no sum_pi_squared with the old log-probabilities. It needs "
                    "actor_rollout_ref.model.use_fused_kernels=false and an FSDP or Megatron engine."
                )
            nested = response_from_nested(data["sum_pi_squared"], data["response_mask"])
            active.columns["sum_pi_squared"] = nested.to_padded_tensor(0.0).float()
        return active

    def _completeness(self, batch: Any) -> dict[str, float]:
        """How many rollouts of the batch are missing, because their agent loop raised (verl logs the traceback)."""
        real = [columns.split_key(key) for key, tag in zip(batch.keys, batch.tags, strict=True) if not _padding(tag)]
        expected = int(self.config.actor_rollout_ref.rollout.n) * len({uid for uid, _, _ in real})
        present = len({traj for _, traj, _ in real})
        if present < expected:
            logger.warning(
                "%d of %d rollouts of this batch are missing: their agent loop raised (look for 'Error in "
                "_run_prompt' above). Groups are smaller by that much.",
                expected - present,
                expected,
            )
        return {
            "rollout/trajectories": present,
            "rollout/missing_trajectories": max(expected - present, 0),
            "rollout/rows": len(real),
        }

    def _for_variance_proxy(self, active: columns.ActiveBatch, data: Any) -> Any:
        """The real rows with what verl's variance-proxy metrics read, or None without sum_pi_squared."""
        if "sum_pi_squared" not in active.columns:
            return None
        return data.select_idxs(np.asarray(active.columns["valid_row"], dtype=bool))

    def _after_advantage(self, active: columns.ActiveBatch, data: Any, batch_keys: list[str]) -> None:
        """Write one line a row (who, which turn, reward, advantage) if ``verl_ext.rows_dir`` is set."""
        folder = select(self.config.get("verl_ext"), "rows_dir")
        if folder:
            from verl_ext.integration.rows_file import row_records, write_rows

            first = self.local_trigger_step == 0  # type: ignore[attr-defined]
            records = row_records(active.columns, data, batch_keys)
            write_rows(folder, self.global_steps, records, start=first)  # type: ignore[attr-defined]

    def _write_transcripts(self, batch: Any, active: columns.ActiveBatch) -> None:
        """Hand the texts of the batch to the transcripts' thread if ``verl_ext.rollouts_dir`` is set."""
        node = self.config.get("verl_ext")
        folder = select(node, "rollouts_dir")
        if not folder:
            return
        step = int(self.global_steps)  # type: ignore[attr-defined]
        if (step - 1) % int(select(node, "rollouts_freq", 1)):
            return
        from verl_ext.integration.metrics import row_advantages
        from verl_ext.transcripts.write import TranscriptWriter, trajectories

        if self._transcripts is None:
            self._transcripts = TranscriptWriter(folder, self.tokenizer.batch_decode)  # type: ignore[attr-defined]
        data = _fetch(batch, ["prompts", "responses", "extra_fields"])
        rewards, advantages, mask = self._shown
        records = trajectories(
            step,
            batch.keys,
            active.columns,
            _dicts(data["extra_fields"]) if "extra_fields" in data else [{}] * len(batch.keys),
            score=rewards.double().sum(-1).numpy(),
            advantage=row_advantages(advantages, mask),
            padding=[_padding(tag) for tag in batch.tags],
        )
        first = self.local_trigger_step == 0  # type: ignore[attr-defined]
        self._transcripts.add(records, data["prompts"].unbind(), data["responses"].unbind(), start=first)


def _padding(tag: Mapping[str, Any]) -> bool:
    return bool(tag.get("is_padding", False))


def _dicts(column: Any) -> list[Any]:
    """The entries of an object column; tensordict keeps them in a stack of wrappers or in a plain list."""
    entries = column.tolist() if hasattr(column, "tolist") else list(column)
    return [entry if isinstance(entry, Mapping) else getattr(entry, "data", entry) for entry in entries]


def _fetch(batch: Any, fields: list[str]) -> Any:
    import transfer_queue as tq

    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)


def _complete(active: columns.ActiveBatch, data: Any) -> None:
    """Add the token columns that verl already fetched, and settle the reward of each row.

    A trajectory of one row has the reward of its row. KL-in-reward is part of `token_level_rewards` only, so its
    share is added to the rewards that came with the rows.
    """
    for name in columns.TOKEN_COLUMNS:
        if name in data.batch.keys() and name not in active.columns:
            active.columns[name] = data.batch[name]
    scores = data.batch["token_level_scores"].double().sum(-1)
    rewards = data.batch["token_level_rewards"].double().sum(-1)
    valid = active.columns["valid_row"]
    active.columns["score"] = rewards.numpy()
    if "turn_reward" not in active.columns:
        if columns.one_row_each(active.columns["traj_uid"], valid):
            active.columns["turn_reward"] = np.where(valid, rewards.numpy(), 0.0)
            active.missing.pop("turn_reward", None)
    else:
        active.columns["turn_reward"] = active.columns["turn_reward"] + (rewards - scores).numpy()


def extend_registry() -> None:
    """Put the mixin in front of every registered V1 trainer, keeping its name. Idempotent."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    for name, trainer in list(TRAINER_REGISTRY.items()):
        if not issubclass(trainer, VerlExtTrainer):
            verl_api.check_overrides(VerlExtTrainer, trainer)
            TRAINER_REGISTRY[name] = type(
                trainer.__name__, (VerlExtTrainer, trainer), {"__doc__": trainer.__doc__, "__module__": __name__}
            )
