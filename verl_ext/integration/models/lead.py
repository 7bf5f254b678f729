# SPDX-License-Identifier: Apache-2.0
"""Several models in one run: the run's trainer, which leads a trainer object for each further model (`members`).

Loop, data, replay buffer, agent loops, rewards, advantages and logging stay the run's, as does the model ``policy``.
Each model's trainer pads, balances, scores and updates with its own sequences, critic included: models of one pool in
turn, pools at the same time. Advantages are computed on all turns together and then split. A model without
sequences in a batch is passed over, one whose sequences have no token to train on is scored and not updated.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from verl_ext.integration import columns
from verl_ext.integration.compat.data_plane import fetch
from verl_ext.integration.engines import agent_gradients, update_step
from verl_ext.integration.models.members import member
from verl_ext.integration.models.side import ModelSide, own_parts
from verl_ext.integration.parts.advantage.columns import dicts
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.model_options import POLICY
from verl_ext.integration.settings.options import OptionError

RUNS = (f"actor/{agent_gradients.METRIC}/", f"actor/{update_step.FACTOR}")
"""Beginnings of the names that the engines report for parts of the run, which look for them there."""


class LeadMixin(ModelSide):
    """Mixin between `VerlExtTrainer` and a V1 trainer of verl; with one model every call goes straight to verl's."""

    config: Any
    global_steps: int
    use_reference_policy: bool
    checkpoint_manager: Any
    actor_rollout_wg: Any
    critic_wg: Any
    use_critic: bool
    _members: Mapping[str, Any] = {}
    _waiting = False
    _model_of: Mapping[str, str] = {}
    _trainable: frozenset[str] = frozenset()
    _own_reference = False

    # ---- set-up and checkpoints ----

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        further = model_options.of(self.config)
        if further:  # worker processes a GPU: verl's default is made for 3
            manager: Any = self.resource_pool_manager  # type: ignore[attr-defined]
            sharing = 2 + sum(model.pool is None for model in further)
            manager.max_colocate_count = max(manager.max_colocate_count, sharing)
            require_gpus(self.config, manager.resource_pool_spec)

    def _setup(self) -> None:
        further = model_options.of(self.config)
        self._waiting = bool(further)
        super()._setup()  # type: ignore[misc]
        if not further:
            return
        self.own_parts = own_parts(self.config, self)
        verls = type(self).__bases__[-1:]
        members: dict[str, Any] = {}
        for model in further:
            members[model.name] = member(model, self, verls)
            members[model.name]._setup()
        self._members = members
        self._own_reference = self.use_reference_policy
        self.use_reference_policy |= any(one.use_reference_policy for one in members.values())
        if self.use_reference_policy and not self._own_reference:
            self.ref_policy_wg = self.actor_rollout_wg  # verl's profiler asks for one
        self.checkpoint_manager = Together({name: one.checkpoint_manager for name, one in self._trainers().items()})
        self._waiting = False
        self._load_checkpoint()

    def get_llm_client(self) -> Any:
        client = super().get_llm_client()  # type: ignore[misc]
        if self._members:
            client.verl_ext_clients = {name: member.get_llm_client() for name, member in self._members.items()}
        return client

    def _load_checkpoint(self) -> Any:
        if self._waiting:  # for the further models
            self.global_steps = 0
            return None
        if not self._members:
            return super()._load_checkpoint()  # type: ignore[misc]
        model_options.require_same_models(self.config)
        with self._all_groups():
            return super()._load_checkpoint()  # type: ignore[misc]

    def _save_checkpoint(self) -> Any:
        with self._all_groups():
            return super()._save_checkpoint()  # type: ignore[misc]

    @contextmanager
    def _all_groups(self) -> Iterator[None]:
        """verl saves and loads the trained models together; the iteration that it writes last counts for all."""
        if not self._members:
            yield
            return
        trained = {name: one for name, one in self._trainers().items() if one is self or one.model.trained}
        own = {group: getattr(self, group) for group in ("actor_rollout_wg", *["critic_wg"] * self.use_critic)}
        for group in own:
            setattr(self, group, Groups({name: getattr(one, group) for name, one in trained.items()}))
        try:
            yield
        finally:
            for group, one in own.items():
                setattr(self, group, one)

    def _trainers(self) -> dict[str, Any]:
        return {POLICY: self, **self._members}

    def tokenizers(self) -> dict[str, Any]:
        """Tokenizers of all models, by name."""
        return {name: one.tokenizer for name, one in self._trainers().items()}

    def _rollout_server_managers(self) -> Any:
        managers = super()._rollout_server_managers()  # type: ignore[misc]
        if not self._members:
            return managers
        return [
            *managers,
            *(manager for member in self._members.values() for manager in member._rollout_server_managers()),
        ]

    def _get_n_gpus_for_throughput(self) -> Any:
        count = super()._get_n_gpus_for_throughput()  # type: ignore[misc]
        if not self._members:
            return count
        return count + sum(member._get_n_gpus_for_throughput() for member in self._members.values())

    # ---- a step: what each model does with its own sequences ----

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not self._members:
            return super()._balance_batch(batch, metrics, *args, **kwargs)
        self._model_of, self._trainable, agents = models_of(batch, self._trainers())
        parts = self._each(super(), "_balance_batch", batch, metrics, *args, **kwargs)
        self._model_of = {key: name for name, part in parts.items() for key in part.keys}
        for name in self._trainers():
            tags = [tag for tag in parts[name].tags if columns.is_real(tag)] if name in parts else []
            own = f"model/{name}"
            counts = {f"{own}/sequences": len(tags), f"{own}/tokens": sum(int(tag["seq_len"]) for tag in tags)}
            self._report(len(tags), counts)
        for (name, agent), count in agents.most_common(32):
            self._report(count, {f"model/{name}/agent/{agent}/sequences": count})
        return type(batch)(
            keys=[key for part in parts.values() for key in part.keys],
            tags=[tag for part in parts.values() for tag in part.tags],
            partition_id=batch.partition_id,
            extra_info=batch.extra_info,
        )

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if not self._members:
            return super()._compute_old_log_prob(batch, metrics)  # type: ignore[misc]
        self._each(super(), "_compute_old_log_prob", batch, metrics)
        return _joined(batch, {})  # as verl, whose later passes are told nothing of this one

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return self._by_each(super(), "_compute_ref_log_prob", batch, metrics)

    def _compute_values(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return self._by_each(super(), "_compute_values", batch, metrics)

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return self._by_each(super(), "_update_critic", batch, metrics)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if not self._members:
            return super()._update_actor(batch, metrics)
        factor = batch.extra_info.get(update_step.LEARNING_RATE)
        if not self._each(super(), "_update_actor", batch, metrics) and factor is not None:
            metrics[f"actor/{update_step.FACTOR}"] = factor  # no engine had a token; LengthLearningRate looks for it
        return _joined(batch, batch.extra_info)

    def updated_rows(self, batch: Any) -> frozenset[str]:
        """Keys of the sequences whose models are updated with this batch; all with one model."""
        if not self._members:
            return frozenset(batch.keys)
        of = {name: [key for key in batch.keys if self._model_of[key] == name] for name in self._trainers()}
        taking = [n for n, one in self._trainers().items() if self._takes_part(n, one, "_update_actor", of[n])]
        return frozenset(key for name in taking for key in of[name])

    def _takes_part(self, name: str, trainer: Any, method: str, keys: list[str]) -> bool:
        if not keys:
            return False
        if method == "_compute_ref_log_prob":
            return self._own_reference if trainer is self else trainer.use_reference_policy
        if method in ("_update_critic", "_update_actor"):
            return not self._trainable.isdisjoint(keys) and (trainer is self or trainer.model.trained)
        return True

    def _by_each(self, verls: Any, method: str, batch: Any, metrics: dict[str, Any]) -> Any:
        if not self._members:
            return getattr(verls, method)(batch, metrics)
        self._each(verls, method, batch, metrics)
        return _joined(batch, batch.extra_info)

    def _each(
        self, verls: Any, method: str, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Call a method of every model's trainer (`verls`: the lead's own class from verl's on) with its sequences,
        models of one pool in turn, pools at the same time; what it returned, by model. Metrics go under its name."""
        queues: dict[str, list[Callable[[], tuple[str, Any, dict[str, Any]]]]] = defaultdict(list)
        for name, trainer in self._trainers().items():
            keys = [key for key in batch.keys if self._model_of[key] == name]
            if not self._takes_part(name, trainer, method, keys):
                continue
            part = batch.select_keys(keys)
            part.fields = None  # a model may have columns that another lacks
            call = getattr(verls if trainer is self else trainer, method)

            def work(
                name: str = name, trainer: Any = trainer, keys: Any = keys, part: Any = part, call: Any = call
            ) -> Any:
                own: dict[str, Any] = {}
                begun = time.perf_counter()
                done = call(part, own, *args, **kwargs)
                own |= trainer.own_metrics()
                if self._trainable.isdisjoint(keys):  # means over no token; a NaN of an update stays
                    own = {key: value for key, value in own.items() if math.isfinite(value)}
                own[f"timing_s/{method.strip('_')}"] = time.perf_counter() - begun
                return name, done, own

            queues[POLICY if trainer is self or trainer.model.pool is None else name].append(work)
        if len(queues) > 1:
            with ThreadPoolExecutor(len(queues)) as threads:
                done = list(threads.map(lambda queue: [work() for work in queue], queues.values()))
        else:
            done = [[work() for work in queue] for queue in queues.values()]
        order = list(self._trainers())
        parts: dict[str, Any] = {}
        for name, part, own in sorted((one for queue in done for one in queue), key=lambda one: order.index(one[0])):
            parts[name] = part
            metrics.update({key: value for key, value in own.items() if key.startswith(RUNS)})
            rows = sum(columns.is_real(tag) for tag in part.tags)
            self._report(rows, {named(key, name): value for key, value in own.items() if not key.startswith(RUNS)})
        return parts

    def _report(self, rows: int, metrics: Mapping[str, float]) -> None:
        """Metrics that join those of the step after verl has reduced its own, by words that a model's name may have."""
        self._updates_metrics.append((rows, metrics))  # type: ignore[attr-defined]


def require_gpus(config: Any, pools: Mapping[str, Sequence[int]]) -> None:
    """Refuse more GPUs than the cluster has, before a model is loaded: verl compares a further model's with what is
    left when those before it are there, and waits for ever for those of rollout servers. One pool alone is verl's to
    check. Raises OptionError: names the pools.

    Args:
        config: of the run.
        pools: verl's own by their names, GPUs of each node.
    """
    import ray

    further = model_options.of(config)
    more = {f"verl_ext.models.{one.name}.pool": math.prod(one.pool.values()) for one in further if one.pool is not None}
    if model_options.separate(config):
        rollouts = {"actor_rollout_ref": config.actor_rollout_ref.rollout}
        rollouts |= {
            f"verl_ext.models.{one.name}": one.config(config).actor_rollout_ref.rollout
            for one in further
            if one.trained
        }
        more |= {f"{who}.rollout": int(one.n_gpus_per_node) * int(one.nnodes) for who, one in rollouts.items()}
    asked = {"trainer" if name == "global_pool" else name: sum(nodes) for name, nodes in pools.items()} | more
    has = ray.cluster_resources() if more else {}
    gpus = has.get("GPU") or has.get("NPU") or 0
    if more and sum(asked.values()) > gpus:
        raise OptionError(
            f"this run asks for {sum(asked.values())} GPUs, and the Ray cluster has {gpus:g}: "
            f"{', '.join(f'{name} {count}' for name, count in asked.items())}. Set n_gpus_per_node and nnodes there, "
            "give models the run's pool (leave out their pool), or add nodes."
        )


def _joined(batch: Any, extra_info: Mapping[str, Any]) -> Any:
    return type(batch)(
        keys=batch.keys, tags=batch.tags, partition_id=batch.partition_id, extra_info=dict(extra_info or {})
    )


def named(key: str, model: str) -> str:
    """``actor/grad_norm`` of the model ``small`` is ``actor/small/grad_norm``."""
    group, _, rest = key.partition("/")
    return f"{group}/{model}/{rest}" if rest else f"{key}/{model}"


def models_of(batch: Any, known: Mapping[str, Any]) -> tuple[dict[str, str], frozenset[str], Counter[tuple[str, str]]]:
    """The model of each sequence by its key, the keys of the sequences that have a token to train on, and the sequences
    of each model and agent. Raises BatchError: a sequence names a model that the run does not have."""
    data = fetch(batch, ["extra_fields", "loss_mask"])
    found = {}
    agents: Counter[tuple[str, str]] = Counter()
    for key, said in zip(batch.keys, dicts(data["extra_fields"]), strict=True):
        found[key] = str((said or {}).get("model") or POLICY)
        if found[key] not in known:
            raise columns.BatchError(f"{key} is of the model {found[key]!r}; this run has {', '.join(known)}.")
        if said and said.get("agent_id"):
            agents[found[key], str(said["agent_id"])] += 1
    masks = data["loss_mask"].unbind()
    return found, frozenset(key for key, mask in zip(batch.keys, masks, strict=True) if bool(mask.any())), agents


class Together:
    """verl's CheckpointEngineManager of all models as one: each call goes to all, one after the other, and what it has
    to report is named after the model."""

    def __init__(self, managers: Mapping[str, Any]) -> None:
        self.managers = managers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
            merged: dict[str, Any] = {}
            for model, manager in self.managers.items():
                found = getattr(manager, name)(*args, **kwargs) or {}
                merged.update({named(key, model): value for key, value in found.items()})
            return merged

        return call


class Groups:
    """Worker groups of all models as one, for checkpoints: each in a folder of its name."""

    def __init__(self, groups: Mapping[str, Any]) -> None:
        self.groups = groups

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None, step: int, max_ckpt_to_keep: int | None = None
    ) -> None:
        # A model that keeps one would remove it when it is saved itself; until all are, the run resumes from it.
        keep = 2 if max_ckpt_to_keep == 1 else max_ckpt_to_keep
        for name, group in self.groups.items():
            remote = None if hdfs_path is None else os.path.join(hdfs_path, name)
            group.save_checkpoint(os.path.join(local_path, name), remote, step, max_ckpt_to_keep=keep)

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        for name, group in self.groups.items():
            group.load_checkpoint(os.path.join(local_path, name), *args, **kwargs)
