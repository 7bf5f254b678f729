# SPDX-License-Identifier: Apache-2.0
"""The player of the back end `triton`: programs in Triton, compiled for the GPU and run there."""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "0")  # before Triton is imported, and in this process alone

import torch

from verl_ext.rollout.kernels.players import player, triton_player
from verl_ext.rollout.kernels.players.cuda import Cuda


def play(wire: int, memory: int, shape: list[int], plan: dict[str, Any], names: list[str], lost: list[str]) -> None:
    """As `player.play`, of the reference or of a program in Triton; `names` is empty."""
    serve(Cuda(), wire, memory, shape, plan, lost)


def serve(device: Cuda, wire: int, memory: int, shape: list[int], plan: dict[str, Any], lost: list[str]) -> None:
    """The same on such a device.

    Raises:
        MemoryError: the device has no more for it.
    """
    os.environ.update(plan["environment"])
    tempfile.tempdir = os.environ["TMPDIR"]

    def make() -> player.Run:
        if "parts" in plan:
            return player.program(plan, None, [], [])
        return triton_player.program(plan["code"], lost, plan.get("left_out", ()))

    try:
        given = device.open(memory, plan["handle"], shape)
        device.limit(plan["memory_mb"])
        player.serve(wire, given, make, device.synchronise)
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from None
