# SPDX-License-Identifier: Apache-2.0
"""``verl-ext plan-models``: what several models ask of a GPU, from the models' configs alone.

Nothing is loaded or started: parameters are counted on torch's meta device. Figures are bytes a GPU with FSDP's even
shards, before activations, the engine's own overhead and fragmentation.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from verl_ext.common.overrides import Failure, check_overrides
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.options import OptionError, has_critic, select

BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2, "auto": 2}
GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """What one model needs on each GPU of its pool.

    Attributes:
        name: of the model; its reference is in it.
        pool: name of the pool, ``run`` or ``pool_<name>``.
        gpus: of the pool.
        parameters, trainable: of the whole model.
        weights, gradients, optimiser: bytes a GPU of training, with the reference and the critic (counted as the
            language model of its path).
        engine: bytes a GPU of the engine's weights.
        kv_per_1000: bytes of the key-value cache for 1000 tokens, on the GPUs of one replica together.
        offload: whether training state leaves the GPU when it is another model's turn.
        rollout_gpus: beside those of the pool, that only the model's rollout servers use (``separate_async``); None
            where its servers are in the pool alone.
    """

    name: str
    pool: str
    gpus: int
    parameters: int
    trainable: int
    weights: float
    gradients: float
    optimiser: float
    engine: float
    kv_per_1000: float
    offload: bool
    rollout_gpus: int | None = None

    @property
    def training(self) -> float:
        """Bytes a GPU while the model is trained."""
        return self.weights + self.gradients + self.optimiser


def plan(config: Any) -> list[Plan]:
    """The plans of all models of a composed config, ``policy`` first. Raises OptionError: see `model_options.of` and
    `model_options.complete`; OSError: a model's config is not there."""
    model_options.complete(config)
    further = model_options.of(config)
    policy = model_options.Model(model_options.POLICY, 0, updates_per_batch=None)
    return [_plan(model, model.config(config)) for model in (policy, *further)]


def _plan(model: model_options.Model, config: Any) -> Plan:
    from verl.trainer.ppo.utils import need_reference_policy

    node, gpus = config.actor_rollout_ref, int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes)
    total, trainable, kv = sizes(str(node.model.path), int(node.model.get("lora_rank", 0) or 0), node.model)
    engines = [node.actor.get("fsdp_config") or {}]
    width = BYTES.get(str(select(engines[0], "model_dtype", "fp32")), 4)
    weights, grown = total * width, trainable * width
    if need_reference_policy(config) and trainable in (0, total):  # with adapters the base is the reference
        weights += total * width
    if has_critic(config):
        value, engines = config.critic.model, [*engines, config.critic.get("fsdp") or {}]
        count, learnt, _ = sizes(str(value.path), int(value.get("lora_rank", 0) or 0), value)
        width = BYTES.get(str(select(engines[1], "model_dtype", "fp32")), 4)
        weights, grown = weights + count * width, grown + learnt * width
    if not model.trained:  # an engine alone
        weights = grown = trainable = 0
    wide = BYTES.get(str(node.rollout.dtype), 2)
    apart = model_options.separate(config) and model.trained
    return Plan(
        name=model.name,
        pool="run" if model.pool is None else f"pool_{model.name}",
        gpus=gpus,
        parameters=total,
        trainable=trainable,
        weights=weights / gpus,
        gradients=grown / gpus,
        optimiser=2 * grown / gpus,
        engine=total * wide / int(node.rollout.tensor_model_parallel_size),
        kv_per_1000=1000 * kv * wide,
        offload=all(bool(select(one, key, False)) for one in engines for key in ("param_offload", "optimizer_offload")),
        rollout_gpus=int(node.rollout.nnodes) * int(node.rollout.n_gpus_per_node) if apart else None,
    )


def sizes(path: str, lora_rank: int, node: Any) -> tuple[int, int, int]:
    """Parameters, trainable parameters and key-value numbers a token of a model, from its config alone.

    Args:
        path: folder or name of the model.
        lora_rank: 0 without adapters.
        node: verl's node of the model, for ``target_modules`` and ``trust_remote_code``.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    trust = bool(select(node, "trust_remote_code", False))
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    total = sum(one.numel() for one in made.parameters())
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv = 2 * text.num_hidden_layers * heads * width
    if not lora_rank:
        return total, total, kv
    from peft import LoraConfig, get_peft_model

    modules = select(node, "target_modules", "all-linear")
    adapters = get_peft_model(made, LoraConfig(r=lora_rank, target_modules=modules, task_type="CAUSAL_LM"))
    return total, sum(one.numel() for one in adapters.parameters() if one.requires_grad), kv


def text(plans: list[Plan]) -> str:
    """The plans as a table, and what is on a GPU of each pool when."""
    head = f"{'model':<12} {'pool':<14} {'parameters':>12} {'trainable':>12} " + " ".join(
        f"{name:>10}" for name in ("weights", "gradients", "optimiser", "engine", "KV/1k tok")
    )
    lines = ["GiB a GPU, before activations and overhead", head]
    for one in plans:
        numbers = (one.weights, one.gradients, one.optimiser, one.engine, one.kv_per_1000)
        lines.append(
            f"{one.name:<12} {one.pool:<14} {one.parameters:>12,} {one.trainable:>12,} "
            + " ".join(f"{number / GIB:>10.4f}" for number in numbers)
        )
    for pool in dict.fromkeys(one.pool for one in plans):
        own = [one for one in plans if one.pool == pool]
        kept = sum(one.training for one in own if not one.offload)
        turn = max((one.training for one in own if one.offload), default=0.0)
        lent = any(one.rollout_gpus is not None for one in own)
        when = "agents play here too (validation, hybrid_rollout)" if lent else "agents play"
        lines += [
            f"pool {pool}: {own[0].gpus} GPU(s), {sum(one.training > 0 for one in own)} training process(es) a GPU and "
            f"{len(own)} engine(s)",
            f"  while {when}: engines {sum(one.engine for one in own) / GIB:.4f}, key-value caches beside them, "
            f"and training state that is not offloaded {kept / GIB:.4f}",
            f"  while a model is updated: {(kept + turn) / GIB:.4f}"
            + ("" if all(one.offload for one in own) else " (param_offload and optimizer_offload take turns)"),
        ]
    for one in plans:
        if one.rollout_gpus is not None:
            lines.append(
                f"rollout servers of {one.name}: {one.rollout_gpus} GPU(s) that only they use, engine "
                f"{one.engine / GIB:.4f} on each, key-value cache beside it"
            )
    gpus = sum({one.pool: one.gpus for one in plans}.values()) + sum(one.rollout_gpus or 0 for one in plans)
    lines.append(f"in all: {gpus} GPU(s)")
    return "\n".join(lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="the run's own, +recipe=[...] included")


def run(args: Any) -> int:
    """Print the plan. Raises UsageError: a word is no override; Failure: the run cannot be composed, or a model's
    config is not there."""
    from omegaconf import OmegaConf

    from verl_ext.recipes import RecipeError, compose

    overrides = [*args.overrides, *args.extras]
    check_overrides(overrides, "plan-models")
    try:
        config = OmegaConf.create(compose([], overrides))
        print(text(plan(config)))
    except (RecipeError, OptionError, OSError) as error:
        raise Failure(str(error)) from error
    return 0
