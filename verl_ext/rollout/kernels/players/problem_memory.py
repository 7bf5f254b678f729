# SPDX-License-Identifier: Apache-2.0
"""The memory that a problem's players share with the judge, which imports this and nothing that players import.

A layout is what `problem_player.describe` says of a problem, with ``batch`` and the ``seed`` of its weights.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import torch

DRAW = b"i"
"""Asks the problem's player for inputs."""
ALIGN = 64


def size(layout: dict[str, Any]) -> int:
    """Bytes of the shared memory: two seeds, the inputs and the output, each [batch, ...] and aligned."""
    return ALIGN + sum(_bytes(layout, form) for form in [*filter(None, layout["given"]), layout["out"]])


def _bytes(layout: dict[str, Any], form: list[Any]) -> int:
    used = layout["batch"] * math.prod(form[1]) * getattr(torch, form[0]).itemsize
    return max(-(-used // ALIGN), 1) * ALIGN


def views(memory: int, layout: dict[str, Any]) -> list[torch.Tensor]:
    """Seeds [2] (of the inputs, which a candidate does not get, and of what forward draws), inputs, output."""
    mapped = torch.from_numpy(np.frombuffer(mmap.mmap(memory, size(layout)), dtype=np.uint8))
    found, at = [mapped[:16].view(torch.int64)], ALIGN
    for form in [*filter(None, layout["given"]), layout["out"]]:
        shape, dtype = [layout["batch"], *form[1]], getattr(torch, form[0])
        found.append(mapped[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
        at += _bytes(layout, form)
    return found
