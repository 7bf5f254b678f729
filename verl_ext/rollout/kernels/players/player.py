# SPDX-License-Identifier: Apache-2.0
"""The player: the process that runs a candidate. It holds inputs, room for outputs, and no verdict, time or seed.

`play` runs in the cage of :mod:`verl_ext.sandbox`. Inputs and outputs are in memory that it shares with the judge; on
its wire it reads one byte for each batch and writes one when it is done. Nothing else that it says is read.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from verl_ext.rollout.kernels import tasks

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
GO, READY, DONE = b"g", b"r", b"d"
FILE = "candidate.py"
"""What tracebacks call a program in Python."""

# Once in the process that players are forked from: torch asks what the processor can do, which it cannot in the cage.
torch.set_num_threads(1)
tasks.run(list(tasks.STAGES), torch.ones(4, 64), torch.ones(64), torch.ones(64))


def size(batch: int, rows: int, columns: int) -> int:
    """Bytes of the shared memory: x and y [batch, rows, columns], a and b [columns], float32."""
    return 4 * (2 * batch * rows * columns + 2 * columns)


def views(memory: int, batch: int, rows: int, columns: int) -> list[torch.Tensor]:
    """x, y, a and b in the memory of that descriptor."""
    mapped = mmap.mmap(memory, size(batch, rows, columns))
    return split(torch.from_numpy(np.frombuffer(mapped, dtype=np.float32)), batch, rows, columns)


def split(flat: torch.Tensor, batch: int, rows: int, columns: int) -> list[torch.Tensor]:
    """x, y, a and b in that float32 memory."""
    x, y, a, b = flat.split([batch * rows * columns] * 2 + [columns] * 2)
    return [x.view(batch, rows, columns), y.view(batch, rows, columns), a, b]


def play(wire: int, memory: int, *given: Any) -> None:
    """Play until the wire is closed.

    Args:
        wire, memory: descriptors.
        given: the descriptor of the compiled kernels if there are any, then the shape [batch, rows, columns], the plan
            of a `languages.Program`, the names of the kernels, and those whose results are lost (ablation).
    """
    *libraries, shape, plan, names, lost = given
    library = ctypes.CDLL(f"/proc/self/fd/{libraries[0]}") if libraries else None
    serve(wire, views(memory, *shape), lambda: program(plan, library, names, lost))


def serve(
    wire: int, given: Sequence[torch.Tensor], make: Callable[[], Run], finish: Callable[[], None] = lambda: None
) -> None:
    """Make what is done with one input, say that it is there, and do it with each batch until the wire is closed.

    Args:
        wire: its descriptor.
        given: x, y, a and b.
        make: makes it.
        finish: waits until a batch is done.
    """
    torch.set_grad_enabled(False)
    torch.set_flush_denormal(True)  # as every kernel that is compiled with -ffast-math does
    x, y, a, b = given
    run = make()
    os.write(wire, READY)
    while os.read(wire, 1):
        for one in range(len(x)):
            run(x[one], a, b, y[one])
        finish()
        os.write(wire, DONE)


def program(plan: dict[str, Any], library: ctypes.CDLL | None, names: Sequence[str], lost: Sequence[str]) -> Run:
    """What is done with one input: ``run(x, a, b, y)`` writes y."""
    if "module" in plan:
        return importlib.import_module(plan["module"]).program(plan, library, names, lost)
    kernels = {name: launcher(library, name, name in lost) for name in names}
    if "entry" in plan:
        entry = kernels[plan["entry"]]
        return lambda x, a, b, y: entry(x, a, b, y, *x.shape)
    if "parts" in plan:
        steps = [(kernels.get(f"k{number}"), stages) for number, (_, stages) in enumerate(plan["parts"])]

        def parts(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> None:
            for number, (kernel, stages) in enumerate(steps):
                if kernel is None:
                    x = tasks.run(stages, x, a, b)
                else:
                    out = y if number == len(steps) - 1 else torch.empty_like(x)
                    kernel(x, a, b, out, *x.shape)
                    x = out
            if x is not y:
                y.copy_(x)

        return parts
    return model(space(plan["code"], kernels=SimpleNamespace(**kernels))["ModelNew"]())


def space(code: str, **names: Any) -> dict[str, Any]:
    """What a program in Python defines, which has torch and these names."""
    made: dict[str, Any] = {"torch": torch, "__name__": "candidate", **names}
    exec(compile(code, FILE, "exec", dont_inherit=True), made)
    return made


def model(made: Any) -> Run:
    """What the class `ModelNew` of a program does with one input."""

    def forward(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> None:
        out = made.forward(x, a, b)
        if out.shape != y.shape:
            raise ValueError(f"the output has shape {list(out.shape)}, not {list(y.shape)}")
        y.copy_(out)

    return forward


def launcher(library: ctypes.CDLL | None, name: str, lost: bool) -> Callable[..., None]:
    """``kernels.<name>(...)``: contiguous float32 tensors as pointers, whole numbers as long, others as float."""
    function = getattr(library, name)
    function.restype = None

    def launch(*arguments: Any) -> None:
        given: list[Any] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                if argument.dtype != torch.float32 or not argument.is_contiguous():
                    raise TypeError(f"kernels.{name} takes contiguous float32 tensors")
                given.append(ctypes.c_void_p(argument.data_ptr()))
            else:
                given.append(ctypes.c_long(argument) if isinstance(argument, int) else ctypes.c_float(argument))
        function(*given)

    return losing(launch) if lost else launch


def losing(launch: Callable[..., Any]) -> Callable[..., None]:
    """A launch whose results are lost: what it has changed becomes noise.

    Of the usual size: finite, so that no factor 0 shows it.
    """

    def lost(*arguments: Any, **named: Any) -> None:
        tensors = [given for given in (*arguments, *named.values()) if isinstance(given, torch.Tensor)]
        before = [tensor.clone() for tensor in tensors]
        launch(*arguments, **named)
        for tensor, old in zip(tensors, before, strict=True):
            if not torch.equal(tensor, old):
                tensor.normal_() if tensor.is_floating_point() else tensor.random_(2)

    return lost
