# SPDX-License-Identifier: Apache-2.0
"""A further model that is never updated (``trained: false``): verl's rollout servers, with weights from disk.

It has no trainer. In the run's pool its servers sleep while other models train, as those of verl's reward models do; in
a pool of their own, which it must have with ``separate_async``, they stay awake. Nothing scores its sequences: its
sampler is its only policy, and its reference.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from omegaconf import open_dict
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.single_controller.ray.base import split_resource_pool
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import get_rollout_replica_class

from verl_ext.integration import checks
from verl_ext.integration.compat import data_plane
from verl_ext.integration.engines import token_kl
from verl_ext.integration.settings import model_options


class Served:
    """What the lead asks of a model's trainer, for a model without one.

    Args:
        model: of the config.
        lead: the run's trainer.
        trainer: verl's class of the run's mode, which knows the mode's client.
        first: number of its first server.
    """

    def __init__(self, model: model_options.Model, lead: Any, trainer: Any, first: int) -> None:
        self.model, self.lead, self.trainer, self.first = model, lead, trainer, first
        self.config = model.config(lead.config)
        checks.complete(self.config)
        self.use_reference_policy = need_reference_policy(self.config)
        node, run = self.config.actor_rollout_ref, self.config.trainer
        with open_dict(self.config):
            node.rollout.n_gpus_per_node, node.rollout.nnodes = run.n_gpus_per_node, run.nnodes
            if node.rollout.load_format == "dummy":  # verl's default, for servers that are sent their weights
                node.rollout.load_format = "auto"
            node.model.lora_rank = node.model.lora.rank = 0  # of a model that is trained

    def _setup(self) -> None:
        node = self.config.actor_rollout_ref
        self.tokenizer = omega_conf_to_dataclass(node.model).tokenizer
        replica: Any = get_rollout_replica_class(node.rollout.name)
        if self.model.pool is None:
            replica = _sharing(replica, self.lead.resource_pool_manager.resource_pool_dict["global_pool"], self.first)
        servers: Any = type("Servers", (LLMServerManager,), {"rollout_replica_class": replica})
        self.llm_server_manager = servers.create(config=self.config, start_rank=self.first)
        replicas = self.llm_server_manager.get_replicas()
        engine = omega_conf_to_dataclass(node.rollout.checkpoint_engine)
        apart = model_options.separate(self.config)
        self.checkpoint_manager = KeptWeights(engine, None, [] if apart else replicas)
        self.checkpoint_manager.sleep_replicas()
        if apart:  # by the names of verl's trainer of that mode
            self.standalone_server_manager = self.llm_server_manager
            self.standalone_checkpoint_manager = KeptWeights(engine, None, replicas)

    def get_llm_client(self) -> Any:
        return self.trainer.get_llm_client(self)

    def _rollout_server_managers(self) -> list[Any]:
        return [self.llm_server_manager]

    def _get_n_gpus_for_throughput(self) -> int:
        if self.model.pool is None:  # counted with the run's
            return 0
        return int(self.config.trainer.n_gpus_per_node) * int(self.config.trainer.nnodes)

    def own_metrics(self) -> dict[str, float]:
        return {}

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return batch  # no engine cuts it

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        found = data_plane.fetch(batch, ["rollout_log_probs"])["rollout_log_probs"]
        data_plane.write(batch, {"old_log_probs": found})
        if batch.extra_info.get(token_kl.WANTED):  # of each token, in an engine's form: one more before the response
            rows = [torch.zeros(len(row) + 1) for row in found.unbind()]
            data_plane.write(batch, {token_kl.COLUMN: torch.nested.as_nested_tensor(rows, layout=torch.jagged)})
        return batch

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        data_plane.write(batch, {"ref_log_prob": data_plane.fetch(batch, ["rollout_log_probs"])["rollout_log_probs"]})
        return batch


def _sharing(replica: Any, pool: Any, first: int) -> Any:
    """A class of verl's replicas whose workers are beside those of training on the GPUs of `pool`."""

    class Sharing(replica):
        async def init_standalone(self) -> None:
            await self.init_colocated(split_resource_pool(pool, self.world_size)[self.replica_rank - first])

    return Sharing


class KeptWeights(CheckpointEngineManager):
    """verl's manager of servers that nobody sends weights: an update wakes those that sleep and tells all the step."""

    asleep = False  # SGLang ends when one that is awake is woken

    @auto_await
    async def sleep_replicas(self) -> None:
        await super().sleep_replicas()
        self.asleep = all(replica.config.free_cache_engine for replica in self.replicas)

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> None:
        if self.asleep:
            await self.wake_up_replicas()
        self.asleep = False
        servers = [server for replica in self.replicas for server in replica.servers]
        await asyncio.gather(*[server.set_global_steps.remote(global_steps) for server in servers])
