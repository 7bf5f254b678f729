# SPDX-License-Identifier: Apache-2.0
"""verl's own SGLang rollout on the host CPU: what ``rollout.name=sglang`` needs where ``verl_ext.platform`` is ``cpu``.

The server, the replica and the transfer of weights are verl's and SGLang's. This module fills in the engine arguments
and environment variables without which it does not start on a CPU, and refuses what it cannot serve before anything
starts; `sglang_cpu_process` has what its processes need. Nothing here acts on another platform, nor imports SGLang.

Written for sglang 0.5.12, the version that verl 0.9.1 asks for.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf, open_dict
from packaging.version import Version

from verl_ext.cpu.platform import fork_worker, servers
from verl_ext.integration.settings import model_options

SUPPORTED = "sglang>=0.5.12,<0.5.13"
INSTALL = "`make venv-sglang` makes an environment with it; requirements/sglang-cpu.txt has the versions"

ENVIRONMENT: Mapping[str, str] = {
    # Asked by SGLang before it looks for an accelerator.
    "SGLANG_USE_CPU_ENGINE": "1",
    # Three of the run's processes import SGLang; with `verl_ext.fork_server` one does.
    fork_worker.MODULES: f"{fork_worker.IMPORTS},verl.workers.rollout.sglang_rollout.async_sglang_server",
}
"""Environment of every process of the run, unless the shell or ``verl_ext.env`` says otherwise."""

FIXED: Mapping[str, Any] = {
    "device": "cpu",
    # The other ones are kernels of an accelerator or of AMX, compiled.
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    # There is no accelerator memory to give back, and nothing to record.
    "enable_memory_saver": False,
    "disable_cuda_graph": True,
}
"""Engine arguments (``rollout.engine_kwargs.sglang``) that leave no choice on the CPU."""

ENGINE: Mapping[str, Any] = {
    **FIXED,
    # Structured output, which no agent loop asks for; the libraries for it are not needed then.
    "grammar_backend": "none",
    # Overlaps the CPU's work with the accelerator's.
    "disable_overlap_schedule": True,
    # A scheduler without a request would take a whole processor from the trainer.
    "sleep_on_idle": True,
}
"""Engine arguments, unless the configuration says otherwise."""


UNREAD = ("gemma2", "gemma3_text")
"""Types of models at whose start SGLang's scheduler ends (tried with transformers 5.10)."""


class SglangCpuError(servers.ServerError):
    """SGLang cannot serve this run on the CPU. The message says what to set or install."""


def installed_version() -> Version:
    """Version of SGLang. Raises SglangCpuError: there is none, or not one that was tried on a CPU under verl 0.9."""
    try:
        version = Version(importlib.metadata.version("sglang"))
    except importlib.metadata.PackageNotFoundError as error:
        raise SglangCpuError(
            f"actor_rollout_ref.rollout.name=sglang needs {SUPPORTED}: {INSTALL}. Or leave out the override: "
            "`+recipe=cpu` brings an engine of its own (rollout.name=embedded)."
        ) from error
    if not Version("0.5.12") <= Version(version.base_version) < Version("0.5.13"):
        raise SglangCpuError(f"sglang {version} is installed; verl 0.9 runs on the CPU with {SUPPORTED}: {INSTALL}.")
    return version


def complete(config: Any) -> None:
    """Fill in what a run with ``rollout.name=sglang`` on the CPU needs, in place; does nothing for other engines.

    Raises:
        SglangCpuError: SGLang is missing or of another version, or cannot serve the model or a setting.
        ServerError: torchvision is there and cannot be imported.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "sglang":
        return
    installed_version()
    servers.check_torchvision("sglang")
    check_settings(config)
    arguments = dict(ENGINE)
    found = servers.models(config, check_model)
    if found:
        arguments["max_total_tokens"] = max(
            servers.kv_cache_bytes(*one) // servers.token_bytes(*one[:2]) for one in found
        )
    servers.fill_in(config, "sglang", arguments, ENVIRONMENT)
    for served in servers.rollouts(config, "sglang"):
        with open_dict(served):
            # Sleeping would release memory of an accelerator.
            served.free_cache_engine = False


def check_settings(config: Any) -> None:
    """Refuse settings that SGLang cannot serve on the CPU. Raises SglangCpuError: names the key, value and remedy."""
    rollout = config.actor_rollout_ref.rollout
    given = OmegaConf.select(rollout, "engine_kwargs.sglang") or {}
    for key, value in FIXED.items():
        if given.get(key) not in (None, value):
            raise _refused(f"engine_kwargs.sglang.{key}", given[key], f"on the CPU it is {value}; leave the key out")
    for key in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        if int(rollout.get(key) or 1) > 1:
            raise _refused(
                key,
                rollout[key],
                "a server on the CPU is one process. Set 1; trainer.n_gpus_per_node sets how many servers there are",
            )
    if rollout.get("quantization"):
        raise _refused("quantization", rollout.quantization, "its kernels are an accelerator's. Leave the key out")
    for key in ("mtp.enable_rollout", "disaggregation.enabled", "enable_rollout_routing_replay"):
        if OmegaConf.select(rollout, key) and (key != "mtp.enable_rollout" or rollout.mtp.get("enable")):
            raise _refused(key, True, "it needs an accelerator. Set false")
    _check_adapter(config, "actor_rollout_ref")
    for further in model_options.of(config):
        if further.trained:
            _check_adapter(model_options.overlaid(config, further), f"{model_options.KEY}.{further.name}")


def _check_adapter(config: Any, where: str) -> None:
    model = config.actor_rollout_ref.model
    if int(model.get("lora_rank") or 0) > 0 and not (model.get("lora") or {}).get("merge"):
        raise SglangCpuError(
            f"{where}.model.lora_rank={model.lora_rank}: verl hands an adapter to SGLang as memory of an accelerator. "
            f"Set {where}.model.lora.merge=true, which sends the merged weights, or rollout.name=embedded."
        )


def _refused(key: str, value: Any, why: str) -> SglangCpuError:
    return SglangCpuError(f"actor_rollout_ref.rollout.{key}={value}: {why}, or use rollout.name=embedded.")


def check_model(model: Any, config: Any) -> None:
    """Refuse a model that SGLang cannot read, or whose tokenizer has more tokens than it.

    Args:
        model: Hugging Face config of the model.

    Raises:
        SglangCpuError: names what it has that cannot be served.
    """
    text, path = model.get_text_config(), config.actor_rollout_ref.model.path
    if text.model_type in UNREAD:
        raise SglangCpuError(
            f"the model {path} is a {text.model_type}, whose configuration SGLang 0.5.12 does not read as the "
            "installed transformers has it. Use another model, or rollout.name=embedded."
        )
    count = servers.tokens(config)
    if count is not None and text.vocab_size < count:
        raise SglangCpuError(
            f"the tokenizer of {path} has {count} tokens, but the model's vocabulary only {text.vocab_size}: SGLang "
            "would fail on the others. Resize the model's embeddings or use its own tokenizer."
        )
