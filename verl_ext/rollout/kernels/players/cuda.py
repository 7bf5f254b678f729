# SPDX-License-Identifier: Apache-2.0
"""All that the back end `triton` asks of a GPU, for the judge's side and the player's.

`tests/kernels/on_gpu.py` runs it on one. The other tests put a processor in its place and run the rest of the back end
as it is, with Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch

from verl_ext.rollout.kernels.players import player

_HANDLE_BYTES = 64
_BLOCK = 2 << 20
"""What the driver shares by a handle is whole blocks: nothing else may be in them."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


def _driver(name: str, *given: Any) -> None:
    """A call of CUDA's driver interface."""
    result = getattr(ctypes.CDLL("libcuda.so.1"), name)(*given)
    if result:
        raise OSError(f"{name} of CUDA's driver failed with {result}")


class Cuda:
    """The GPU that this process sees first."""

    def lacks(self) -> str:
        """What this machine has not, with the remedy; empty if that is nothing."""
        if not torch.cuda.is_available():
            return (
                f"there is no CUDA device here (torch {torch.__version__}). Install a torch with CUDA and run where "
                "nvidia-smi lists a GPU, or take the back end triton_interpret"
            )
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed here. Run: pip install triton"
        return ""

    def environment(self) -> dict[str, str]:
        """What a player's process needs to know to see the same GPU."""
        return {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if name in os.environ}

    def share(self, memory: int, shape: Sequence[int]) -> tuple[list[torch.Tensor], str]:
        """x, y, a and b in the GPU's memory, and the handle by which another process opens it."""
        torch.zeros(1, device="cuda")  # makes the context
        pointer, handle = ctypes.c_uint64(), _Handle()
        _driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(-(-player.size(*shape) // _BLOCK) * _BLOCK))
        _driver("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return self._views(pointer.value, shape), bytes(handle).hex()

    def open(self, memory: int, handle: str, shape: Sequence[int]) -> list[torch.Tensor]:
        """The same in the player's process."""
        torch.zeros(1, device="cuda")
        pointer, shared = ctypes.c_uint64(), _Handle.from_buffer_copy(bytes.fromhex(handle))
        _driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), shared, ctypes.c_uint(1))
        return self._views(pointer.value, shape)

    def free(self, views: Sequence[torch.Tensor]) -> None:
        """Give back what `share` took."""
        torch.cuda.synchronize()
        _driver("cuMemFree_v2", ctypes.c_uint64(views[0].data_ptr()))

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the GPU's memory."""
        return tensor.to("cuda", copy=True)

    def synchronise(self) -> None:
        """Wait for all that this process has given to the GPU."""
        torch.cuda.synchronize()

    def flush(self) -> None:
        """Fill the second cache with something else."""
        self._spare.zero_()

    def limit(self, memory_mb: int) -> None:
        """Have torch refuse more memory than this."""
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (memory_mb << 20) / total))

    @functools.cached_property
    def _spare(self) -> torch.Tensor:
        size = 2 * torch.cuda.get_device_properties(0).L2_cache_size
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    @staticmethod
    def _views(pointer: int, shape: Sequence[int]) -> list[torch.Tensor]:
        class Memory:
            __cuda_array_interface__ = {
                "shape": (player.size(*shape) // 4,),
                "typestr": "<f4",
                "data": (pointer, False),
                "version": 3,
            }

        return player.split(torch.as_tensor(Memory(), device="cuda"), *shape)
