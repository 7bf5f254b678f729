# SPDX-License-Identifier: Apache-2.0
"""A further model of a run: an object of the run's trainer class without a loop, data or rewards of its own.

verl's `PPOTrainer._setup` makes everything that belongs to one model; another object of the class makes it for another
model. What would collide are names: verl names servers and weight channels by the replica's number, so those of the
k-th further model are numbered from k * `STRIDE`, on the server's end (`numbered_servers`, `numbered_standalone`) and
on the worker's (`numbered_worker`).
"""

from __future__ import annotations

import functools
import os
from typing import Any

from omegaconf import open_dict

from verl_ext.integration import checks
from verl_ext.integration.compat import wraps
from verl_ext.integration.models.side import ModelSide, own_parts
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.options import updated

STRIDE = 5040
"""A multiple of every usual number of GPUs a node: SGLang's replica takes its first GPU from its number modulo that."""


class MemberMixin(ModelSide):
    """Mixin in front of a V1 trainer of verl, whose class has the model and the run's trainer (`member`)."""

    config: Any
    model: model_options.Model
    lead: Any

    def __init__(self, config: Any) -> None:
        own = self.model.config(config)
        checks.complete(own)
        self.own_parts = own_parts(own, self)
        super().__init__(own)  # type: ignore[call-arg]

    @property
    def global_steps(self) -> int:
        return self.lead.global_steps

    def _build_replay_buffer(self) -> Any:
        return self.lead.replay_buffer

    def _init_dump_executor(self) -> None:
        """None: what is dumped is the run's."""

    def _load_checkpoint(self) -> None:
        """Nothing: the lead loads all models together."""

    def _init_dataloader(self) -> None:
        """No data; only the length of the learning-rate schedules, which verl sets here."""
        steps = self.lead.total_training_steps * self.lead.parameter_sync_step
        with open_dict(self.config):
            for section in updated(self.config).values():
                section.optim.total_training_steps = steps

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        first = STRIDE * self.model.number
        self.role_worker_mapping = {
            role: numbered_worker(worker, first) if hasattr(worker.__ray_actor_class__, "init_model") else worker
            for role, worker in self.role_worker_mapping.items()  # type: ignore[has-type]
        }
        manager: Any = self.resource_pool_manager  # type: ignore[has-type]
        if self.model.pool is None:
            self.resource_pool_manager = _shared_pools(self.lead.resource_pool_manager, self.mapping)  # type: ignore
        else:  # Ray's placement groups are named after the pool
            name = f"pool_{self.model.name}"
            manager.resource_pool_spec = {name: manager.resource_pool_spec["global_pool"]}
            self.mapping = manager.mapping = dict.fromkeys(self.mapping, name)  # type: ignore[has-type]

    def _setup(self) -> None:
        first = STRIDE * self.model.number
        with (
            wraps.must_be_called(wraps.REWARD_LOOP),
            wraps.must_be_called(wraps.STANDALONE_SERVERS, model_options.separate(self.config)),
            wraps.replaced(wraps.REWARD_LOOP, lambda original: lambda **kwargs: self.lead.reward_loop_manager),
            wraps.replaced(wraps.LLM_SERVERS, functools.partial(numbered_servers, first=first)),
            wraps.replaced(wraps.STANDALONE_SERVERS, functools.partial(numbered_standalone, first=first)),
        ):
            super()._setup()  # type: ignore[misc]


def member(model: model_options.Model, lead: Any, bases: tuple[type, ...]) -> Any:
    """The trainer of a further model, or its servers alone if it is not trained; `bases` begins with verl's trainer
    class of the run's mode."""
    if not model.trained:
        from verl_ext.integration.models.served import Served

        return Served(model, lead, bases[0], STRIDE * model.number)
    made = type("Member", (MemberMixin, *bases), {"model": model, "lead": lead, "__module__": __name__})
    return made(lead.config)


def _shared_pools(manager: Any, mapping: Any) -> Any:
    """A resource pool manager for a model in the pools that the lead has created."""

    class SharedPools(type(manager)):  # type: ignore[misc]
        def create_resource_pool(self) -> None:
            """They are there."""

    return SharedPools(resource_pool_spec={}, mapping=mapping, resource_pool_dict=manager.resource_pool_dict)


def numbered_servers(original: Any, first: int) -> Any:
    """verl's LLMServerManager, whose replicas are numbered from `first`.

    A hybrid replica finds its workers by its number in the group and is renumbered after that.
    """
    from verl.workers.rollout.replica import get_rollout_replica_class

    class NumberedServers(original):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            replica: Any = get_rollout_replica_class(config.actor_rollout_ref.rollout.name)

            class NumberedReplica(replica):
                async def launch_servers(self) -> None:
                    self.replica_rank += first
                    await super().launch_servers()

            self.rollout_replica_class = NumberedReplica
            super().__init__(config, *args, **kwargs)

    return NumberedServers


def numbered_standalone(original: Any, first: int) -> Any:
    """verl's LLMServerManager of servers apart from training, which take their workers by no number."""

    class NumberedStandalone(original):
        def __init__(self, config: Any, *args: Any, start_rank: int = 0, **kwargs: Any) -> None:
            super().__init__(config, *args, start_rank=first + start_rank, **kwargs)

    return NumberedStandalone


def numbered_worker(worker: Any, first: int) -> Any:
    """verl's actor worker, whose end of the weight sync talks to replicas numbered from `first`."""
    import ray
    from verl.single_controller.base.decorator import Dispatch, register

    class NumberedWorker(worker.__ray_actor_class__):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def init_model(self) -> None:
            served = "rollout" in self.role
            with (
                wraps.must_be_called(wraps.ROLLOUT_CLASS, served),
                wraps.replaced(wraps.ROLLOUT_CLASS, functools.partial(numbered_rollout, first=first)),
            ):
                super().init_model()

    return ray.remote(NumberedWorker)


def numbered_rollout(original: Any, first: int) -> Any:
    """verl's `get_rollout_class`, whose classes take their replica's number from `first` on."""

    def get(rollout_name: str, mode: str = "async") -> Any:
        cls = original(rollout_name, mode)

        def make(config: Any, **kwargs: Any) -> Any:
            size = config.tensor_model_parallel_size * config.data_parallel_size * config.pipeline_model_parallel_size
            return cls(config=config, replica_rank=first + int(os.environ["RANK"]) // size, **kwargs)

        return make

    return get
