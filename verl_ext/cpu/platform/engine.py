# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP engines, registered for the device ``cpu``.

The engines are verl's own; what differs is three arguments that only an accelerator accepts: pinned memory for
forward-only models, flash attention for the critic, and FSDP1's start-up broadcast (use ``strategy=fsdp2``, as
`+recipe=cpu` does); and weights that `separate_async` keeps for later mini-batches are copies.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from verl_ext.integration.compat import verl_api, wraps


def _load_value_model(original: Any) -> Any:
    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            pretrained_model_name_or_path=local_path,
            torch_dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    return load


def _unpinned(original: Any) -> Any:
    def policy(pin_memory: bool = True) -> Any:
        return original(pin_memory=False)

    return policy


def _copied(original: Any) -> Any:
    def save(model: Any) -> Any:
        shards, spec = original(model)
        return {name: (shard.clone(), own) for name, (shard, own) in shards.items()}, spec

    return save


def training_threads() -> int:
    """Threads for one training process: its share of the cores, since rollouts and training take turns.

    ``VERL_EXT_TRAINING_THREADS`` sets another number.

    Raises:
        ValueError: the variable is not a whole number of at least 1.
    """
    given = os.environ.get("VERL_EXT_TRAINING_THREADS")
    if given:
        if not given.isdigit() or int(given) < 1:
            raise ValueError(f"VERL_EXT_TRAINING_THREADS is {given!r}; give a whole number of at least 1.")
        return int(given)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    return max(1, len(os.sched_getaffinity(0)) // processes)


class CpuFsdpMixin:
    """What an FSDP engine of verl needs to run on the host CPU."""

    engine_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        torch.set_num_threads(training_threads())
        super().__init__(*args, **kwargs)

    def _build_module(self) -> Any:
        with wraps.replaced(wraps.VALUE_HEAD, _load_value_model):
            return super()._build_module()  # type: ignore[misc]

    def _build_fsdp_module(self, module: Any) -> Any:
        if self.engine_config.strategy != "fsdp2":
            raise ValueError(
                f"strategy={self.engine_config.strategy!r} does not run on the CPU: FSDP1 broadcasts its parameters "
                "through an accelerator at start-up. Use actor_rollout_ref.actor.strategy=fsdp2 (and "
                "critic.strategy=fsdp2), as `+recipe=cpu` does."
            )
        with wraps.replaced(wraps.OFFLOAD_POLICY, _unpinned):
            return super()._build_fsdp_module(module)  # type: ignore[misc]


def register() -> None:
    """Register the CPU engines for actor, reference and critic, and have kept weights copied. Idempotent."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    for model_type, base in (("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)):
        for backend in ("fsdp", "fsdp2"):
            if "cpu" in EngineRegistry._engines.get(model_type, {}).get(backend, {}):
                continue
            verl_api.check_overrides(CpuFsdpMixin, base)
            engine = type(f"Cpu{base.__name__}", (CpuFsdpMixin, base), {"__doc__": f"{base.__name__} on the CPU."})
            EngineRegistry.register(model_type=model_type, backend=backend, device="cpu")(engine)
    wraps.replace(wraps.KEPT_WEIGHTS, _copied)


def wrap_process_group() -> None:
    """Give verl's process group a backend that torch accepts on the CPU. Does nothing on other platforms."""

    def make(original: Any) -> Any:
        def initialize_global_process_group_ray(timeout_second: Any = None, backend: str | None = None) -> Any:
            from verl_ext.cpu.platform.cpu import is_current

            if backend is None and is_current():
                backend = "cpu:gloo"
            return original(timeout_second=timeout_second, backend=backend)

        return initialize_global_process_group_ray

    wraps.replace(wraps.PROCESS_GROUP, make)
