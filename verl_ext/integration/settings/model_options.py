# SPDX-License-Identifier: Apache-2.0
"""``verl_ext.models``: further models that one run trains beside that of ``actor_rollout_ref``, which is ``policy``.

A model's node holds what differs from ``actor_rollout_ref``; the rest is inherited. The launcher turns
it into the list of keys that change, interpolations followed, so that every process can make the model's whole config
from the resolved one.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_ext.integration.compat import verl_api
from verl_ext.integration.settings import endpoints
from verl_ext.integration.settings.options import OptionError, coerce, has_critic, near, option, select, updated
from verl_ext.methods.options import AtLeastOne
from verl_ext.recipes import leaves_of

KEY = "verl_ext.models"
SCALE = "verl_ext.loss_scale"
POLICY = "policy"
"""Name of the model of ``actor_rollout_ref``, the default of every agent."""

SECTIONS = ("model", "actor", "ref", "rollout")
SEPARATE = "separate_async"
"""verl's mode in which rollout servers have GPUs of their own."""
CRITIC = "critic"
"""Of a model's node: what differs from the run's ``critic``."""
OWN = ("pool", "trained", "updates_per_batch")
CHANGES = "changes"
"""Key of a model's node that `complete` writes: the keys of the whole config that differ, with their values."""

SHARED = ("n", "temperature", "top_p", "top_k", "val_kwargs", "agent", "multi_turn", "calculate_log_probs", "mode")
"""Keys of ``rollout`` that belong to the run: agent loops are told one value for all."""

ENGINES = ("embedded", "vllm", "sglang")
"""Rollout engines whose servers and weight channels follow from a replica's number alone."""

NCCL = ("nccl", "delta_sharded")
"""verl's transfers of weights by a NCCL group, whose id Ray keeps under the group's name."""

GPU_MEMORY = 0.9
"""Share of a GPU's memory that the servers on it may take together."""

FREE = ("override", "kwargs", "custom", "lora")
"""Parts of names of verl's nodes that take any key."""

REFUSED = {
    "adapter_of": "verl 0.9.1 has one adapter slot in its engines, optimiser, weight sync and checkpoints. Give the "
    "model a base of its own and model.lora_rank.",
}


@dataclass(frozen=True)
class Model:
    """A further model of the run.

    Attributes:
        name: an identifier other than ``policy``.
        number: 1, 2, ... in the order of the config; the numbers of its servers follow from it.
        changes: keys of the whole config that differ, with their values.
        pool: ``{n_gpus_per_node, nnodes}`` of its own, or None for the run's.
        trained: whether it is updated; without, it is served from its path and has no trainer.
        updates_per_batch: of its sequences; None: the run's.
    """

    name: str
    number: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    pool: Mapping[str, int] | None = None
    trained: bool = True
    updates_per_batch: int | None = None

    def config(self, base: Any) -> DictConfig:
        """The run's config as a run of this model alone would have it, resolved; `base` is left as it is."""
        own = pickle.loads(pickle.dumps(base))  # what a deep copy is, in a sixth of its time
        with open_dict(own):
            own.pop("hydra", None)  # has values that only a started job has
            for key in ("models", "orchestra", "gateway", "environment", "rows_dir", "rollouts_dir"):
                own.get("verl_ext", {}).pop(key, None)
            OmegaConf.resolve(own)
            own.trainer.resume_mode = "disable"  # the run loads all models together
            for key, value in self.changes.items():
                OmegaConf.update(own, key, value, merge=False, force_add=True)
            if self.updates_per_batch is not None:
                own.verl_ext.updates_per_batch = self.updates_per_batch
            if self.pool is not None:
                own.trainer.n_gpus_per_node, own.trainer.nnodes = self.pool["n_gpus_per_node"], self.pool["nnodes"]
                key = "actor_rollout_ref.rollout.n_gpus_per_node"  # of a node, as verl's servers are told
                if not separate(own) and key not in self.changes:
                    own.actor_rollout_ref.rollout.n_gpus_per_node = self.pool["n_gpus_per_node"]
            transfer = own.actor_rollout_ref.rollout.checkpoint_engine
            key = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{transfer.backend}.group_name"
            if transfer.backend in NCCL and key not in self.changes:
                OmegaConf.update(own, key, f"verl_ext_{self.name}", force_add=True)
        return own


def of(config: Any) -> list[Model]:
    """The further models that a run serves, in order; none without ``verl_ext.models``. Raises OptionError: a name, key
    or value that a model does not take."""
    nodes = select(select(config, "verl_ext"), "models") or {}
    nodes = OmegaConf.to_container(nodes, resolve=False) if isinstance(nodes, DictConfig) else nodes
    if not isinstance(nodes, Mapping):
        raise OptionError(f"{KEY} is {nodes!r}; give a node for each model by its name, such as {{checker: {{...}}}}.")
    outside = endpoints.of(config)
    served = {str(name): node for name, node in nodes.items() if name not in outside}
    for name in outside:
        _check_name(name)
    return [_model(name, number, node) for number, (name, node) in enumerate(served.items(), start=1)]


def separate(config: Any) -> bool:
    """Whether the run has ``trainer.v1.trainer_mode=separate_async``."""
    return OmegaConf.select(config, "trainer.v1.trainer_mode") == SEPARATE


def names(config: Any) -> tuple[str, ...]:
    """All models of a run that an agent may have, ``policy`` first."""
    return POLICY, *(model.name for model in of(config)), *endpoints.of(config)


def _check_name(name: str) -> None:
    if not name.isidentifier() or name == POLICY:
        raise OptionError(
            f"{KEY}.{name}: a model's name is an identifier other than {POLICY!r}, which is the model of "
            "actor_rollout_ref (set its keys there)."
        )


def _model(name: str, number: int, node: Any) -> Model:
    where = f"{KEY}.{name}"
    _check_name(name)
    if not isinstance(node, Mapping):
        raise OptionError(f"{where} is {node!r}; give what differs from actor_rollout_ref, such as model.path.")
    known = (*SECTIONS, CRITIC, *OWN)
    for key in node:
        if key in REFUSED:
            raise OptionError(f"{where}.{key} is not supported: {REFUSED[key]}")
        if key not in (*known, CHANGES):
            raise OptionError(f"{where}.{key} is not a key of a model.{near(key, known)} Known: {', '.join(known)}.")
    for key in (*SECTIONS, CRITIC):
        coerce(node.get(key, {}), dict[str, Any], f"{where}.{key}")
    for key in node.get("rollout", {}):
        if key in SHARED:
            raise OptionError(
                f"{where}.rollout.{key} cannot differ between models: agent loops are told one value for all. Set "
                f"actor_rollout_ref.rollout.{key}."
            )
    if "enable" in node.get(CRITIC, {}):
        raise OptionError(
            f"{where}.critic.enable cannot differ between models: all have one, or none. Set critic.enable."
        )
    trained = coerce(node.get("trained", True), bool, f"{where}.trained")
    remedy = "give a whole number of at least 1, or null"
    updates = coerce(node.get("updates_per_batch"), AtLeastOne | None, f"{where}.updates_per_batch", remedy)
    return Model(name, number, dict(node.get(CHANGES) or {}), _pool(node.get("pool"), where), trained, updates)


def _pool(node: Any, where: str) -> dict[str, int] | None:
    if node is None:
        return None
    if not isinstance(node, Mapping) or "n_gpus_per_node" not in node or set(node) - {"n_gpus_per_node", "nnodes"}:
        raise OptionError(f"{where}.pool is {node!r}; give {{n_gpus_per_node: ..., nnodes: ...}}, or leave it out.")
    remedy = "give a whole number of at least 1"
    return {key: coerce(one, AtLeastOne, f"{where}.pool.{key}", remedy) for key, one in {"nnodes": 1, **node}.items()}


def complete(config: Any) -> None:
    """Write into each model's node the keys that change, by their names in the whole config. In place; idempotent.
    Raises OptionError: see `of`; or a key that verl's config lacks."""
    for model in of(config):
        node = config.verl_ext.models[model.name]
        if CHANGES in node:
            continue
        for key in (*SECTIONS, CRITIC):
            if key in node:
                base = config.critic if key == CRITIC else config.actor_rollout_ref[key]
                _require_known(base, node[key], f"{KEY}.{model.name}.{key}")
        if CRITIC in node and not has_critic(config):
            raise OptionError(
                f"{KEY}.{model.name}.critic: this run has no critic. Leave it out, or set critic.enable=true or "
                "algorithm.adv_estimator=gae."
            )
        before, after = dict(_leaves_of(config)), dict(_leaves_of(overlaid(config, model)))
        changes = {key: value for key, value in after.items() if key not in before or before[key] != value}
        with open_dict(config):
            node[CHANGES] = changes


def _require_known(base: Any, keys: Any, where: str) -> None:
    """Refuse a key that verl's node `base` lacks, as Hydra does."""
    if not isinstance(base, DictConfig) or not base or any(part in where.rsplit(".", 1)[-1] for part in FREE):
        return
    for key in keys:
        if key not in base:
            raise OptionError(f"{where}.{key}: verl's config has no such key.{near(key, list(base))}")
        if isinstance(keys, DictConfig) and isinstance(keys._get_node(key), DictConfig) and keys[key] is not None:
            _require_known(base._get_node(key), keys[key], f"{where}.{key}")


def overlaid(config: Any, model: Model) -> DictConfig:
    """A copy of the run's config with what a model's node says in place of the run's. The critic of a model with a path
    starts from it, unless the node says otherwise."""
    whole = pickle.loads(pickle.dumps(config))
    node = config.verl_ext.models[model.name]
    own = {"actor_rollout_ref": {key: node[key] for key in SECTIONS if key in node}, CRITIC: node.get(CRITIC, {})}
    path = {"path": node.model.path} if has_critic(config) and "path" in node.get("model", {}) else {}
    with open_dict(whole):
        whole.merge_with(OmegaConf.create({CRITIC: {"model": path}}), OmegaConf.create(own))
    return whole


def _leaves_of(config: Any) -> Iterator[tuple[str, Any]]:
    """The resolved leaves of the sections that a model may change."""
    for section in ("actor_rollout_ref", *[CRITIC] * has_critic(config)):
        yield from leaves_of(OmegaConf.to_container(config[section], resolve=True), section)


# ---- refusals -------------------------------------------------------------------------------------------------------


def check(config: Any) -> list[str]:
    """Refuse what several models do not go together with; each model's whole config is checked by `checks.check`.
    Returns warnings. Raises OptionError: names the key and what to do."""
    further = of(config)
    loss_scale(config)
    require_same_models(config)
    endpoints.check(config)
    with_agents = {"verl_ext_orchestra", "verl_ext_gateway"}
    if len(names(config)) > 1 and with_agents.isdisjoint(verl_api.agent_loops(config)):
        loop = OmegaConf.select(config, "actor_rollout_ref.rollout.agent.default_agent_loop")
        raise OptionError(
            f"{KEY} does not go with actor_rollout_ref.rollout.agent.default_agent_loop={loop}: only agents of an "
            f"orchestra or of the gateway have models. Set it to verl_ext_orchestra or verl_ext_gateway, or leave out "
            f"{KEY}."
        )
    if not further:
        return []
    _check_run(config)
    engine = config.actor_rollout_ref.rollout.name
    if engine not in ENGINES:
        raise OptionError(
            f"{KEY} with actor_rollout_ref.rollout.name={engine}: the numbers of its servers are not known to go with "
            f"several models. Choose one of {', '.join(ENGINES)}, or leave out {KEY}."
        )
    for model in further:
        own = model.changes.get("actor_rollout_ref.rollout.name", engine)
        if own != engine:
            raise OptionError(
                f"{KEY}.{model.name}.rollout.name={own}: all models of a run have one engine. Leave it out, or set "
                f"actor_rollout_ref.rollout.name={own} for all."
            )
    return _check_models(config, further)


def loss_scale(config: Any) -> str:
    """``verl_ext.loss_scale``: whether a model's loss is divided by its own sequences or tokens, or by nothing."""
    return option(config, "loss_scale", Literal["own", "joint"], "own", "choose own or joint")


def _check_run(config: Any) -> None:
    """What of the run itself cannot be with several models."""
    get = lambda key: OmegaConf.select(config, key)  # noqa: E731
    refused = {
        "distillation.enabled=true: verl's teachers know one student": get("distillation.enabled"),
        "reward.reward_model.enable=true without enable_resource_pool: it reads all sequences with one tokenizer": (
            get("reward.reward_model.enable") and not get("reward.reward_model.enable_resource_pool")
        ),
        "actor_rollout_ref.rollout.disaggregation.enabled=true": get(
            "actor_rollout_ref.rollout.disaggregation.enabled"
        ),
        "algorithm.kl_ctrl.type=adaptive: it follows the divergence of one model. Set it to fixed": (
            get("algorithm.use_kl_in_reward") and get("algorithm.kl_ctrl.type") == "adaptive"
        ),
    }
    for what, holds in refused.items():
        if holds:
            raise OptionError(f"{KEY} does not go with {what}; or leave out {KEY}.")
    if has_critic(config):
        require_engines(config, "a critic (algorithm.adv_estimator=gae or critic.enable=true)", "the value")
    for section, node in updated(config).items():
        if loss_scale(config) == "joint" and node.loss_agg_mode != "token-sum":
            raise OptionError(
                f"{SCALE}=joint with {section}.loss_agg_mode={node.loss_agg_mode}: what a loss is divided by is "
                "counted by each model's engine, which has its own sequences only. Set "
                f"{section}.loss_agg_mode=token-sum, which divides by nothing, or {SCALE}=own."
            )


def require_engines(config: Any, who: str, column: str) -> None:
    """Refuse what needs a column of all turns that a training engine computes. Raises OptionError: a model has none."""
    for model in of(config):
        if not model.trained:
            raise OptionError(
                f"{who} needs {column} of every turn, which a training engine computes, and {KEY}.{model.name}.trained="
                f"false has none. Set {KEY}.{model.name}.actor.optim.lr=0 instead of it, or leave out {who}."
            )


def _check_models(config: Any, further: Sequence[Model]) -> list[str]:
    decoded = [
        key for key in ("validation_data_dir", "rollout_data_dir", "log_val_generations") if select(config.trainer, key)
    ]
    warnings = []
    for model in further:
        where, own = f"{KEY}.{model.name}", model.config(config)
        if separate(config):
            _check_separate(model, own, where)
        _check_servers(model, own, where)
        if decoded and _tokenizer(own) != _tokenizer(config):
            key = next(key for key in ("path", "tokenizer_path") if f"actor_rollout_ref.model.{key}" in model.changes)
            raise OptionError(
                f"{where}.model.{key} with trainer.{decoded[0]}: verl decodes all sequences with the policy's "
                f"tokenizer there. Use verl_ext.rollouts_dir, which has each turn's own, and leave out "
                f"trainer.{decoded[0]}; or set actor_rollout_ref.model.tokenizer_path, if all models have that one."
            )
        if not model.trained and own.actor_rollout_ref.model.lora_adapter_path:
            raise OptionError(
                f"{where}.trained=false with model.lora_adapter_path: its servers load model.path without an "
                f"adapter. Merge it into them, and set {where}.model.lora_adapter_path=null."
            )
        if not model.trained and not config.actor_rollout_ref.rollout.calculate_log_probs:
            raise OptionError(
                f"{where}.trained=false: its turns have the log-probabilities of their sampler alone. Set "
                "actor_rollout_ref.rollout.calculate_log_probs=true."
            )
        for section in updated(config):
            mode = str(model.changes.get(f"{section}.loss_agg_mode", "token-sum"))
            if loss_scale(config) == "joint" and mode != "token-sum":
                key = section.removeprefix("actor_rollout_ref.")
                raise OptionError(f"{SCALE}=joint: {where}.{key}.loss_agg_mode is {mode}; leave it out.")
    here = [config, *(model.config(config) for model in further if model.pool is None)]
    share = sum(float(one.actor_rollout_ref.rollout.gpu_memory_utilization) for one in here)
    if config.actor_rollout_ref.rollout.name != "embedded" and share > GPU_MEMORY:
        warnings.append(
            f"{KEY}: {len(here)} models of one pool answer at the same time, and their "
            f"rollout.gpu_memory_utilization adds up to {share:g} of each GPU, over {GPU_MEMORY:g}. Lower it, in "
            f"actor_rollout_ref or for one model, or give a model a pool of its own."
        )
    if config.actor_rollout_ref.rollout.prometheus.enable:
        warnings.append(
            f"{KEY} with actor_rollout_ref.rollout.prometheus.enable=true: verl writes the addresses of one model's "
            "servers over those of the one before, so that Prometheus reads the last model alone. Add the others to "
            "rollout.prometheus.file, or set it to false."
        )
    if select(config.get("verl_ext"), "updates_per_batch") is None:
        warnings.append(
            f"{KEY}: with verl_ext.updates_per_batch=null a model with few sequences gets a mini-batch that is mostly "
            "padding, and its number of updates follows its sequences. Set verl_ext.updates_per_batch."
        )
    return warnings


def _tokenizer(config: Any) -> str:
    """Where verl loads the tokenizer of a model from."""
    model = config.actor_rollout_ref.model
    return str(model.get("tokenizer_path") or model.path)


def _check_servers(model: Model, own: Any, where: str) -> None:
    """Refuse GPUs of which verl would leave some, or all, without a server."""
    rollout, run = own.actor_rollout_ref.rollout, own.trainer
    shape = [int(rollout[f"{kind}_parallel_size"]) for kind in ("tensor_model", "data", "pipeline_model")]
    pool = "trainer" if model.pool is None else f"{where}.pool"
    gpus = {f"{pool}.n_gpus_per_node and nnodes": int(run.n_gpus_per_node) * int(run.nnodes)}
    if separate(own) and model.trained:
        gpus[f"{where}.rollout.n_gpus_per_node and nnodes"] = int(rollout.n_gpus_per_node) * int(rollout.nnodes)
    for key, count in gpus.items():
        if count % math.prod(shape):
            raise OptionError(
                f"{where}: the {count} GPUs of {key} cannot be divided into servers of {math.prod(shape)} "
                f"(rollout.tensor_model_parallel_size={shape[0]} x data_parallel_size={shape[1]} x "
                f"pipeline_model_parallel_size={shape[2]}, from actor_rollout_ref unless the model's own). Set "
                f"{where}.rollout.tensor_model_parallel_size, or give other GPUs."
            )


def _check_separate(model: Model, own: Any, where: str) -> None:
    """What a model of a run with ``separate_async`` cannot be."""
    mode = f"trainer.v1.trainer_mode={SEPARATE}"
    if not model.trained:
        if model.pool is None:
            raise OptionError(
                f"{where}.trained=false with {mode}: on the run's GPUs its servers would sleep while the others "
                f"answer. Give it a pool of its own, {where}.pool.n_gpus_per_node=1, or set sync or colocate_async."
            )
        return
    size = "actor_rollout_ref.actor.ppo_mini_batch_size"
    if size in model.changes:
        raise OptionError(
            f"{where}.actor.ppo_mini_batch_size={model.changes[size]} with {mode}: verl wants data.train_batch_size to "
            f"be parameter_sync_step times it. Leave it out, and set {where}.updates_per_batch."
        )
    rollout = own.actor_rollout_ref.rollout
    for key in ("nnodes", "n_gpus_per_node"):
        if int(rollout[key]) < 1:
            raise OptionError(
                f"{where}.rollout.{key} is {rollout[key]} with {mode}: each model has rollout servers of its own. Set "
                f"it, or actor_rollout_ref.rollout.{key}, to at least 1."
            )


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def trained(config: Any) -> list[str]:
    """Names of the models that are updated, and so have checkpoints."""
    return [POLICY, *(model.name for model in of(config) if model.trained)]


def require_same_models(config: Any) -> None:
    """Refuse to resume from the checkpoint of a run with other models. Raises OptionError: names the models that are
    missing or left over in it."""
    folder = _resumed(config)
    actor = folder / "actor" if folder is not None else None
    if actor is None or not actor.is_dir():
        return
    several = (actor / POLICY).is_dir()
    found = {path.name for path in actor.iterdir() if path.is_dir()} if several else {POLICY}
    wanted = set(trained(config))
    wants_several = bool(of(config))
    if (several or wants_several) and (found != wanted or several != wants_several):
        raise OptionError(
            f"the checkpoint {folder} holds {'the models ' + ', '.join(sorted(found)) if several else 'one model'}, "
            f"but this run trains {', '.join(sorted(wanted))}. Start with the same {KEY}, or start anew: another "
            "trainer.default_local_dir, or trainer.resume_mode=disable, and the paths of the weights in model.path."
        )


def _resumed(config: Any) -> Path | None:
    """The folder that verl will resume from, as far as this machine sees it."""
    mode = config.trainer.get("resume_mode")
    if mode == "resume_path":
        return Path(str(config.trainer.resume_from_path)).absolute()
    tracker = Path(str(config.trainer.get("default_local_dir"))) / "latest_checkpointed_iteration.txt"
    if mode != "auto" or not os.path.exists(tracker):
        return None
    return tracker.absolute().parent / f"global_step_{tracker.read_text().strip()}"
