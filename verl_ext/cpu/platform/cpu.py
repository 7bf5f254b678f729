# SPDX-License-Identifier: Apache-2.0
"""The ``cpu`` platform for verl's platform registry.

verl asks its platform for the device name, the collective backend, memory figures and random state. On a machine
without an accelerator the answers are those of the host: device ``cpu``, backend gloo, memory of this process.

verl keeps counting the Ray resource ``GPU`` when it sizes its worker pools (``single_controller/ray/base.py`` in
verl 0.9.1 knows only ``GPU`` and ``NPU``), so this platform keeps that name too and `+recipe=cpu` declares as many
logical GPUs to Ray as there are training processes. Nothing is scheduled on a real GPU.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase

NAME = "cpu"


def _peak_rss() -> int:
    """Peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB


class _Stream:
    """Stands where a CUDA stream stands: work on the CPU is done when the call returns."""

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event(_Stream):
    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


def _make_device_module() -> ModuleType:
    """The namespace that verl uses as ``torch.<device>``: what ``torch.cpu`` lacks, with the host's own figures."""
    module = ModuleType("verl_ext.platform.cpu_device", "torch.<device> namespace of the host CPU.")

    def rss(*_: Any) -> int:
        return psutil.Process().memory_info().rss

    def mem_get_info(*_: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def nothing(*_: Any, **__: Any) -> None: ...

    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: torch.device("cpu"),
        "set_device": nothing,
        "synchronize": nothing,
        "empty_cache": nothing,
        "ipc_collect": nothing,
        "reset_peak_memory_stats": nothing,
        "set_per_process_memory_fraction": nothing,
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: torch.device("cpu"),
        "memory_allocated": rss,
        "memory_reserved": rss,
        "max_memory_allocated": lambda *_: _peak_rss(),
        "max_memory_reserved": lambda *_: _peak_rss(),
        "mem_get_info": mem_get_info,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "Stream": lambda *_, **__: _Stream(),
        "Event": lambda *_, **__: _Event(),
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "stream": lambda *_: nullcontext(),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


_DEVICE_MODULE = _make_device_module()


class PlatformCPU(PlatformBase):
    """The host CPU as a verl platform.

    It is never picked by verl's automatic detection: a GPU-less process of a GPU cluster (a head node, say) must go
    on seeing what it sees without this package. It is chosen by name, through ``VERL_PLATFORM=cpu``, which
    `+recipe=cpu` sets in every process of the run.
    """

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == NAME

    def current_device(self) -> Any:
        # verl passes this to `tensor.to(...)`, where an index would mean an accelerator.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None: ...

    def synchronize(self, device_index: Any = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def is_current() -> bool:
    """Whether verl runs on the host CPU in this process."""
    from verl.utils.device import get_device_name

    return get_device_name() == "cpu"


def is_registered() -> bool:
    """Whether the platform that verl knows by this name is the one here: another plugin may have one of its own."""
    from verl.plugin.platform import platform_manager

    return platform_manager.PlatformRegistry.get(NAME) is PlatformCPU


def register() -> None:
    """Make the platform known to verl by name, unless somebody else's has it. Idempotent."""
    from verl.plugin.platform import platform_manager

    if platform_manager.PlatformRegistry.get(NAME) is None:
        platform_manager.PlatformRegistry.register(platform=NAME)(PlatformCPU)
    if is_registered() and os.environ.get("VERL_PLATFORM", "").strip().lower() == NAME:
        from verl_ext.cpu.platform import vllm_cpu

        vllm_cpu.present_as_vllm()


def activate() -> None:
    """Make this process, and those that it starts, run verl on the CPU.

    verl decides on its platform at the first question and keeps the answer, so a process that already decided
    (the launcher, which imports `main_ppo` before Hydra reads the recipes) is told here.

    Raises:
        OptionError: another package's platform has the name.
    """
    from verl.plugin.platform import platform_manager

    from verl_ext.integration.compat import verl_api
    from verl_ext.integration.settings.options import OptionError

    verl_api.OVERRIDES[verl_api.CPU] = (("verl_ext.cpu.platform.engine:CpuFsdpMixin", verl_api.FSDP),)
    os.environ["VERL_PLATFORM"] = NAME
    register()
    if not is_registered():
        raise OptionError(
            f"the platform {NAME!r} is registered by {platform_manager.PlatformRegistry.get(NAME).__module__}, and "
            "+recipe=cpu brings one of that name. Do not load the other one (VERL_USE_EXTERNAL_PLUGINS, "
            "VERL_USE_EXTERNAL_MODULES), or leave the recipe out."
        )
    if not isinstance(platform_manager._current_platform, PlatformCPU):
        platform_manager._current_platform = None
        platform_manager.get_platform()
