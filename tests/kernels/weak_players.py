# SPDX-License-Identifier: Apache-2.0
"""Players as other harnesses have them: one tells its own time, one compares its own outputs. For the twins alone."""

from __future__ import annotations

import os
import struct
import time
from typing import Any

import torch

from verl_ext.rollout.kernels import tasks
from verl_ext.rollout.kernels.players import player


def _set_up(memory: int, given: tuple[Any, ...]) -> tuple[list[torch.Tensor], player.Run, list[str]]:
    import ctypes

    *libraries, shape, plan, names, lost = given
    torch.set_grad_enabled(False)
    torch.set_flush_denormal(True)
    library = ctypes.CDLL(f"/proc/self/fd/{libraries[0]}")
    return player.views(memory, *shape), player.program(plan, library, names, lost), plan["stages"]


def clocked(wire: int, memory: int, *given: Any) -> None:
    """Says with its byte how long it took by its own clock."""
    (x, y, a, b), run, _ = _set_up(memory, given)
    os.write(wire, player.READY)
    while os.read(wire, 1):
        began = time.perf_counter()
        for one in range(len(x)):
            run(x[one], a, b, y[one])
        os.write(wire, player.DONE + struct.pack("d", time.perf_counter() - began))


def compares(wire: int, memory: int, *given: Any) -> None:
    """Computes what is right in the process of the candidate, and says whether the outputs are."""
    (x, y, a, b), run, stages = _set_up(memory, given)
    os.write(wire, player.READY)
    while os.read(wire, 1):
        expected = [tasks.run(stages, x[one].clone(), a.clone(), b.clone()) for one in range(len(x))]
        right = torch.stack(expected)
        for one in range(len(x)):
            run(x[one], a, b, y[one])
        os.write(wire, b"1" if torch.allclose(y, right, atol=1e-3) else b"0")
