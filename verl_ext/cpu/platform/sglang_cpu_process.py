# SPDX-License-Identifier: Apache-2.0
"""What a process needs before it imports SGLang where there is no accelerator.

SGLang imports compiled kernels, and torchvision, by name at the top of its files and calls none of them for a language
model with `attention_backend: torch_native`. Here stand placeholders that say so when they are called.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from verl_ext.integration.compat import wraps

ABSENT = ("sgl_kernel", "torchvision")
"""Packages that are replaced by placeholders where they are not installed."""

# Declared here, not in `wraps`, since their modules can be imported only where SGLang is.
REDUCTION = wraps.Target(
    module="sglang.srt.utils.patch_torch",
    name="_reduce_tensor_modified",
    parameters=(),
    written_for="sglang 0.5.12, srt/utils/patch_torch.py line 72",
    reason="it takes the device's index out of how a tensor travels; a tensor on the CPU has none",
)
PROCESSES = wraps.Target(
    module="verl.workers.rollout.sglang_rollout.async_sglang_server",
    name="_set_envs_and_config",
    parameters=("server_args",),
    written_for="verl 0.9.1, workers/rollout/sglang_rollout/async_sglang_server.py line 421 `launch_server`",
    reason="it has SGLang's processes start anew, each with all imports; without CUDA they can be forks",
)


class Missing(RuntimeError):
    """Something was called that needs a package which is not there."""


class _Placeholder:
    """Stands for a function or class of a package that is not installed, and for what one may find in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Missing(
            f"SGLang has called {self._name}, which is not installed: what it serves here needs an accelerator's "
            "kernels. Use another model or setting, or rollout.name=embedded."
        )


class _PlaceholderModule(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(f"{self.__name__}.{name}")


class _Finder(importlib.machinery.PathFinder):
    """Answers for `ABSENT` after all others have not."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, cls, is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _PlaceholderModule(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None: ...


def prepare() -> None:
    """Let SGLang be imported in this process, and have it share tensors and start processes as a CPU can. Idempotent.

    Raises:
        UnsupportedVerl: SGLang or verl's side of it has changed.
    """
    if _Finder in sys.meta_path:
        return
    from transformers.utils import is_torchvision_available

    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # transformers keeps its answer, and must not take the placeholder for the package; where that is missing it refuses
    # its class for images, with which SGLang registers others, though the class is there.
    if not is_torchvision_available():
        images = importlib.import_module("transformers.models.auto.image_processing_auto")
        sys.modules["transformers"].AutoImageProcessor = images.AutoImageProcessor  # type: ignore[attr-defined]
    sys.meta_path.append(_Finder)
    import torch.multiprocessing

    # Descriptors of files can be had only by processes that share the key of multiprocessing.
    torch.multiprocessing.set_sharing_strategy("file_system")
    wraps.replace(REDUCTION, lambda original: _reduce)


def _reduce(*args: Any, **kwargs: Any) -> Any:
    """How torch itself hands a tensor to another process: in shared memory."""
    from torch.multiprocessing import reductions

    return reductions._reduce_tensor_original(*args, **kwargs)


def fork_processes(module: Any) -> None:
    """SGLang's scheduler and detokenizer are forks of the server's process, which has done the imports."""

    def make(original: Any) -> Any:
        def set_envs_and_config(server_args: Any) -> None:
            import gc
            import multiprocessing

            original(server_args)
            multiprocessing.set_start_method("fork", force=True)
            # References to Ray's objects that a collection in a fork would find must not be returned by it.
            os.register_at_fork(after_in_child=gc.freeze)

        return set_envs_and_config

    wraps.replace(PROCESSES, make)
