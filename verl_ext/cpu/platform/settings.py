# SPDX-License-Identifier: Apache-2.0
"""Settings of a CPU run that follow from other settings, filled in before Ray starts."""

from __future__ import annotations

import os
from typing import Any

from omegaconf import OmegaConf, open_dict

from verl_ext.integration.settings import model_options


def complete(config: Any) -> None:
    """Fill in what `recipe/cpu.yaml` cannot say in YAML, in place.

    verl sizes its pools by the Ray resource ``GPU``; on the CPU one logical GPU is declared for each training
    process, and CPUs enough for the actors that verl starts beside them. A Ray cluster that is already running keeps
    what it was started with: it must offer the same logical resources.
    """
    from verl_ext.cpu.platform import fork_worker, sglang_cpu, vllm_cpu

    vllm_cpu.complete(config)
    sglang_cpu.complete(config)
    rollout = config.actor_rollout_ref.rollout
    separate, further = model_options.separate(config), model_options.of(config)
    with open_dict(config):
        if separate and rollout.name in ("embedded", "sglang") and rollout.checkpoint_engine.backend == "naive":
            # verl's default, which separate_async refuses; its other transfers need an accelerator
            rollout.checkpoint_engine.backend = "gloo"
        init = OmegaConf.select(config, "ray_kwargs.ray_init") or {}
        if (init.get("address") or os.environ.get("RAY_ADDRESS") or "local") != "local":
            return
        processes = int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes)
        processes += sum(m.pool["n_gpus_per_node"] * m.pool["nnodes"] for m in further if m.pool)
        reward = config.reward.reward_model
        if reward.get("enable_resource_pool"):
            processes += int(reward.n_gpus_per_node) * int(reward.nnodes)
        teacher = config.get("distillation") or {}
        if teacher.get("enabled"):
            processes += int(teacher["n_gpus_per_node"]) * int(teacher["nnodes"])
        if separate:
            models = [config, *(model_options.overlaid(config, model) for model in further if model.trained)]
            rollouts = [one.actor_rollout_ref.rollout for one in models]
            processes += sum(int(one.n_gpus_per_node) * int(one.nnodes) for one in rollouts)
        # Logical figures: verl asks for 3 CPUs a training process and about one for each of its other actors.
        _default(config, "ray_kwargs.ray_init.num_gpus", processes)
        _default(config, "ray_kwargs.ray_init.num_cpus", 16 + 4 * processes)
        _default(config, "ray_kwargs.ray_init.include_dashboard", False)
        # Otherwise Ray would join whatever cluster somebody has started on this machine.
        _default(config, "ray_kwargs.ray_init.address", "local")

    if (config.get("verl_ext") or {}).get("fork_server"):
        fork_worker.set_up_workers()
        _default(config, "ray_kwargs.ray_init.runtime_env.py_executable", fork_worker.py_executable())


def _default(config: Any, key: str, value: Any) -> None:
    if OmegaConf.select(config, key) is None:
        OmegaConf.update(config, key, value, force_add=True)
