# SPDX-License-Identifier: Apache-2.0
"""The players of a problem in KernelBench's form: the problem's own, and a candidate's, which never holds its code.

All of it runs in the cage of :mod:`verl_ext.sandbox`, each in a process of its own. What the two have in common is the
memory that they share with the judge, the arguments of their constructors as text, and the seed of their weights.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib
import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported, which torch does in the pass on meta

import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl_ext.rollout.kernels.players import player
from verl_ext.rollout.kernels.players.problem_memory import DRAW, views


class _Live(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive, and remembers the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self.known:
                self.known.add(key)
                self.now += tensor.untyped_storage().nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(tensor.untyped_storage(), self._gone, key, tensor.untyped_storage().nbytes())
        return out

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def describe(code: str) -> dict[str, Any]:
    """What a problem takes and gives, by a pass on the meta device, where tensors have no numbers.

    Returns:
        bytes: of weights, inputs, outputs and what lies between at its largest.
        given: dtype and shape of each input; None where it is a constant.
        constants: text of a list, of the inputs that are no tensors, None in the place of tensors.
        init: text of a list, the constructor's arguments.
        out: dtype and shape of the output.
    """
    live = _Live()
    with torch.device("meta"), torch.no_grad(), live:
        space = player.space(code)
        init, given = space["get_init_inputs"](), space["get_inputs"]()
        out = space["Model"](*init)(*given)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"forward returns a {type(out).__name__}, not a tensor")
    constants = [None if isinstance(one, torch.Tensor) else one for one in given]
    for name, value in (("get_init_inputs", list(init)), ("get_inputs", constants)):
        with contextlib.suppress(ValueError, SyntaxError):
            if ast.literal_eval(repr(value)) == value:
                continue
        raise TypeError(f"{name} gives what is neither a tensor nor plain: {value!r}")
    return {
        "bytes": live.peak,
        "given": [_form(one) if isinstance(one, torch.Tensor) else None for one in given],
        "constants": repr(constants),
        "init": repr(list(init)),
        "out": _form(out),
    }


def _form(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def seed(number: int) -> None:
    """Of all that draws."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % (1 << 32))


def serve(wire: int, memory: int, layout: dict[str, Any], make: Callable[[], dict[str, Any]], name: str) -> None:
    """As `player.serve`: the class `name` of the program that `make` runs, with weights by the seed of the layout."""
    torch.set_grad_enabled(False)
    torch.set_flush_denormal(True)
    seeds, *given, y = views(memory, layout)
    space, constants = make(), ast.literal_eval(layout["constants"])
    seed(layout["seed"])
    model = space[name](*ast.literal_eval(layout["init"]))
    os.write(wire, player.READY)
    while said := os.read(wire, 1):
        for one in range(layout["batch"]):
            if said == DRAW:
                seed(int(seeds[0]) + one)
                drawn = [made for made in space["get_inputs"]() if isinstance(made, torch.Tensor)]
                for room, made in zip(given, drawn, strict=True):
                    room[one].copy_(made)
                continue
            tensors = iter(given)
            inputs = [constant if form is None else next(tensors)[one]
                      for form, constant in zip(layout["given"], constants, strict=True)]  # fmt: skip
            seed(int(seeds[1]) + one)
            out = model.forward(*inputs)
            if out.shape != y.shape[1:] or out.dtype != y.dtype:
                raise ValueError(f"the output is {_form(out)}, not {layout['out']}")
            y[one].copy_(out)
        os.write(wire, player.DONE)


def reference(
    wire: int, memory: int, layout: dict[str, Any], plan: dict[str, Any], names: list[str], lost: list[str]
) -> None:
    """Play the problem itself, and draw inputs when asked for them."""
    serve(wire, memory, layout, lambda: player.space(plan["problem"]), "Model")


def play(wire: int, memory: int, *given: Any) -> None:
    """Play a candidate in Python; arguments as for `player.play`, with the layout in the place of the shape."""
    *libraries, layout, plan, names, lost = given
    library = ctypes.CDLL(f"/proc/self/fd/{libraries[0]}") if libraries else None
    kernels = SimpleNamespace(**{name: player.launcher(library, name, name in lost) for name in names})
    serve(wire, memory, layout, lambda: player.space(plan["code"], kernels=kernels), "ModelNew")


def _warm() -> None:
    """Once in the process that players are forked from: what a problem imports, and what torch loads at first use."""
    for name in ("collections.abc", "einops", "itertools", "math", "typing"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    nn, x = torch.nn, torch.rand(2, 4, 8)
    with torch.no_grad():
        for layer in (nn.Linear(8, 4), nn.Conv1d(4, 4, 3), nn.ConvTranspose1d(4, 4, 3), nn.LSTM(8, 4), nn.GRU(8, 4),
                      nn.BatchNorm1d(4), nn.LayerNorm(8), nn.TransformerEncoderLayer(8, 2)):  # fmt: skip
            layer(x)
        for layer in (nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3), nn.Conv3d(2, 2, 3), nn.ConvTranspose3d(2, 2, 3)):
            layer(torch.rand(1, layer.in_channels, *[8] * (len(layer.kernel_size))))
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    describe("import torch\nclass Model(torch.nn.Linear): pass\n"
             "def get_inputs(): return [torch.rand(2, 3)]\ndef get_init_inputs(): return [3, 4]")  # fmt: skip


_warm()
