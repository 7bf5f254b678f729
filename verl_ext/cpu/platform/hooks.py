# SPDX-License-Identifier: Apache-2.0
"""What the CPU platform registers, each when verl imports the module that owns the registry.

The training parts act only where ``VERL_PLATFORM=cpu``; the embedded rollout engine is known by name everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

EMBEDDED = "embedded"


def _on_cpu() -> bool:
    from verl_ext.cpu.platform import cpu

    return os.environ.get("VERL_PLATFORM", "").strip().lower() == cpu.NAME and cpu.is_registered()


def _engines(module: Any) -> None:
    if _on_cpu():
        from verl_ext.cpu.platform import engine

        engine.register()


def _process_group(module: Any) -> None:
    if _on_cpu():
        from verl_ext.cpu.platform import engine

        engine.wrap_process_group()


def _load_replica() -> Any:
    from verl_ext.cpu.engine.replica import EmbeddedReplica

    return EmbeddedReplica


def _replica(module: Any) -> None:
    module.RolloutReplicaRegistry.register(EMBEDDED, _load_replica)


def _weight_sync(module: Any) -> None:
    module._ROLLOUT_REGISTRY.setdefault((EMBEDDED, "async"), "verl_ext.cpu.engine.replica.EmbeddedRollout")
    if _on_cpu():
        module._ROLLOUT_REGISTRY[("vllm", "async")] = "verl_ext.cpu.platform.vllm_cpu_sync.WatchedServerAdapter"


def _sglang(module: Any) -> None:
    if _on_cpu():
        from verl_ext.cpu.platform import sglang_cpu_process

        sglang_cpu_process.prepare()


def _sglang_server(module: Any) -> None:
    if _on_cpu():
        from verl_ext.cpu.platform import sglang_cpu_process

        sglang_cpu_process.fork_processes(module)


def _weight_transfer(module: Any) -> None:
    if _on_cpu():
        from verl_ext.cpu.platform.gloo_transfer import GlooCheckpointEngine

        module.CheckpointEngineRegistry.register("gloo")(GlooCheckpointEngine)


HOOKS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "verl.checkpoint_engine.base": ("registering the weight transfer over gloo", _weight_transfer),
    "verl.utils.distributed": ("preparing the CPU process group", _process_group),
    "verl.workers.engine.fsdp.transformer_impl": ("registering the CPU engines", _engines),
    # Its submodules import SGLang.
    "verl.workers.rollout.sglang_rollout": ("preparing the import of SGLang", _sglang),
    "verl.workers.rollout.sglang_rollout.async_sglang_server": ("preparing SGLang's processes", _sglang_server),
    "verl.workers.rollout.replica": ("registering the embedded rollout engine", _replica),
    "verl.workers.rollout.base": ("registering the weight sync of the rollout engines", _weight_sync),
}
"""{module of verl: (what is done, for an error message; the function, called with the imported module)}"""
