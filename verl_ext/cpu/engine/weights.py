# SPDX-License-Identifier: Apache-2.0
"""Weights of the embedded engine's model: naming, piecewise loading, completeness, LoRA adapters, wire format.

Tensors travel as :class:`Piece` descriptions plus one flat byte buffer a bucket. A tensor larger than a bucket is cut,
so a bucket never exceeds its size; :class:`WeightStore` counts what arrived and refuses an incomplete set.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

__all__ = ["BucketWriter", "Piece", "WeightStore", "clean_name", "resolve_dtype"]

_DTYPES = {
    **dict.fromkeys(("float32", "fp32", "float"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
}
#: Wrapper names that training engines leave in parameter names.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "base_model.model.")
#: One expert's weight, as verl's `unfuse_moe_params` names it; transformers packs those of a layer into two tensors.
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_ALIGN = 16


def resolve_dtype(name: str | torch.dtype) -> torch.dtype:
    """``rollout.dtype`` as a torch dtype (``auto`` is float32 on CPU).

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        return torch.float32
    if name not in _DTYPES:
        raise ValueError(f"rollout.dtype={name!r} is not one of {sorted(_DTYPES)}")
    return _DTYPES[name]


def clean_name(name: str) -> str:
    """Parameter name without the wrappers of FSDP, activation checkpointing, torch.compile and peft."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    if name.startswith("module."):
        name = name[len("module.") :]
    return name.replace(".base_layer.", ".")


class Piece(NamedTuple):
    """A run of elements of one tensor inside a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    first: int
    """index of the first element in the flattened tensor"""
    length: int
    """number of elements"""
    offset: int
    """byte offset in the bucket"""


class BucketWriter:
    """Packs tensors into buckets of at most ``bucket_bytes`` and hands out each full one.

    Args:
        bucket_bytes: size of a bucket.
        dtype: floating-point tensors are cast to it; ``None`` keeps them.
    """

    def __init__(self, bucket_bytes: int, dtype: torch.dtype | None = None) -> None:
        self._size = max(_ALIGN, bucket_bytes // _ALIGN * _ALIGN)
        self._dtype = dtype
        self._buffer = np.empty(self._size, dtype=np.uint8)
        self._used = 0
        self._pieces: list[Piece] = []

    def add(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[list[Piece], np.ndarray]]:
        """Append a tensor; yields ``(pieces, bytes)`` for each bucket that filled up.

        The yielded array is a view that the next call overwrites: copy or send it first.
        """
        tensor = tensor.detach()
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        flat = tensor.cpu().contiguous().reshape(-1)
        item = flat.element_size()
        raw = flat.view(torch.uint8).numpy()
        dtype = str(tensor.dtype).removeprefix("torch.")
        first = 0
        while first < flat.numel():
            room = (self._size - self._used) // item
            # Do not cut a tensor that fits into a bucket of its own.
            if room < flat.numel() - first and self._pieces and (room == 0 or raw.size <= self._size):
                yield self.flush()
                continue
            count = min(room, flat.numel() - first)
            nbytes = count * item
            self._buffer[self._used : self._used + nbytes] = raw[first * item : first * item + nbytes]
            self._pieces.append(Piece(name, tuple(tensor.shape), dtype, first, count, self._used))
            self._used += -(-nbytes // _ALIGN) * _ALIGN
            first += count
            if self._used >= self._size and first < flat.numel():
                yield self.flush()

    def flush(self) -> tuple[list[Piece], np.ndarray]:
        """What is packed so far, possibly nothing."""
        pieces, view = self._pieces, self._buffer[: min(self._used, self._size)]
        self._pieces, self._used = [], 0
        return pieces, view


def _unpack(piece: Piece, data: np.ndarray) -> torch.Tensor:
    dtype = getattr(torch, piece.dtype)
    nbytes = piece.length * torch.empty(0, dtype=dtype).element_size()
    # a copy: the bytes may be a read-only view of shared memory, and the copy is aligned
    return torch.from_numpy(np.array(data[piece.offset : piece.offset + nbytes])).view(dtype)


class WeightStore:
    """Named access to a transformers model's parameters and persistent buffers.

    A synchronisation is :meth:`begin`, any number of :meth:`load_bucket`, :meth:`finish`. Between them the model holds
    a mixture; after a failure :attr:`ready` stays false until a complete synchronisation.

    Args:
        model: the plain (not peft-wrapped) causal language model.

    Attributes:
        ready: whether a complete set of base weights is loaded.
        lora: the current adapter's config as given, or ``None``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.ready = False
        self.lora: dict[str, Any] | None = None
        self._peft: Any = None
        self._kind = ""
        # Tied weights appear under each of their names and share one storage.
        self._tensors: dict[str, torch.Tensor] = {
            clean_name(name): tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()
        }
        prefix = getattr(model, "base_model_prefix", "")
        self._prefix = f"{prefix}." if prefix else ""
        self._targets: dict[str, tuple[str, torch.Tensor] | None] = {}
        self._received: dict[int, int] = {}
        self._adapter: dict[str, tuple[torch.Tensor, int]] = {}
        self._unknown: list[str] = []

    # ---- one synchronisation ---------------------------------------------------------------------------------------
    def begin(self, kind: str, peft_config: Mapping[str, Any] | None = None) -> None:
        """Start receiving.

        Args:
            kind: ``"base"`` (all weights of the model) or ``"adapter"`` (LoRA weights on top of them).
            peft_config: the adapter's config as a dictionary, for ``"adapter"``.

        Raises:
            ValueError: an unknown kind, or an adapter without config.
            RuntimeError: an adapter before base weights.
        """
        if kind not in ("base", "adapter"):
            raise ValueError(f"kind={kind!r} is neither 'base' nor 'adapter'")
        if kind == "adapter":
            if not peft_config:
                raise ValueError("an adapter synchronisation needs peft_config")
            if not self.ready:
                raise RuntimeError(
                    "LoRA weights arrived before base weights: the embedded rollout engine has nothing to put them on; "
                    "set actor_rollout_ref.rollout.load_format to dummy (base sent first) or auto (read from disk)"
                )
            self._attach_adapter(dict(peft_config))
        else:
            self.ready = False
        self._kind = kind
        self._received = {}
        self._adapter = {}
        self._unknown = []

    def load_bucket(self, pieces: Iterable[Piece], data: np.ndarray) -> None:
        """Copy a bucket into the model.

        Args:
            pieces: what the bucket holds.
            data: its bytes, uint8.

        Raises:
            ValueError: a shape differs from the model's.
        """
        for piece in pieces:
            if self._kind == "adapter":
                self._collect_adapter(piece, _unpack(piece, data))
                continue
            found = self._resolve(piece.name)
            if found is None:
                if not piece.name.endswith("rotary_emb.inv_freq") and piece.name not in self._unknown:
                    self._unknown.append(piece.name)
                continue
            name, target = found
            if tuple(target.shape) != tuple(piece.shape):
                raise ValueError(
                    f"weight {piece.name!r} has shape {tuple(piece.shape)}, the rollout model's {name!r} has "
                    f"{tuple(target.shape)}: actor and rollout models differ"
                )
            value = _unpack(piece, data)
            with torch.no_grad():
                if piece.length == target.numel():
                    target.copy_(value.view(target.shape))
                else:
                    target.view(-1)[piece.first : piece.first + piece.length] = value.to(target.dtype)
            whole = id(self._tensors[name])
            self._received[whole] = self._received.get(whole, 0) + piece.length

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors of this process (for example a checkpoint's) into the model."""
        writer = BucketWriter(16 << 20)
        for name, tensor in named:
            for pieces, data in writer.add(name, tensor):
                self.load_bucket(pieces, data)
        self.load_bucket(*writer.flush())

    def finish(self) -> None:
        """End a synchronisation and check it.

        Raises:
            ValueError: names that the model does not have, or weights that did not arrive, each listed.
        """
        if self._kind == "adapter":
            self._finish_adapter()
            return
        storage_done = {
            tensor.untyped_storage().data_ptr()
            for tensor in self._tensors.values()
            if self._received.get(id(tensor), 0) >= tensor.numel()
        }
        missing = [
            name
            for name, tensor in self._tensors.items()
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in storage_done
        ]
        self._complain("weights", missing, self._unknown)
        self.ready = True

    @staticmethod
    def _complain(what: str, missing: list[str], unknown: list[str]) -> None:
        if not missing and not unknown:
            return

        def show(names: list[str]) -> str:
            return ", ".join(sorted(names)[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")

        parts = []
        if unknown:
            parts.append(f"names that the rollout model does not have: {show(unknown)}")
        if missing:
            parts.append(f"{what} that did not arrive: {show(missing)}")
        raise ValueError("weight synchronisation refused: " + "; ".join(parts))

    def _resolve(self, name: str) -> tuple[str, torch.Tensor] | None:
        """The model's own name of an incoming one and what is meant of that tensor (all, or an expert's part), or
        ``None``."""
        if name not in self._targets:
            own, expert = self._own_name(name), _EXPERT.fullmatch(name)
            found = None if own is None else (own, self._tensors[own])
            self._targets[name] = self._part(*expert.groups()) if found is None and expert is not None else found
        return self._targets[name]

    def _part(self, experts: str, number: str, kind: str) -> tuple[str, torch.Tensor] | None:
        own = self._own_name(f"{experts}.{'down' if kind == 'down' else 'gate_up'}_proj")
        if own is None or int(number) >= len(self._tensors[own]):
            return None
        part = self._tensors[own][int(number)]
        return own, part if kind == "down" else part.chunk(2)[kind == "up"]

    def _own_name(self, name: str) -> str | None:
        clean = clean_name(name)
        candidates = [clean, self._prefix + clean]
        if self._prefix and clean.startswith(self._prefix):
            candidates.append(clean[len(self._prefix) :])
        return next((c for c in candidates if c in self._tensors), None)

    # ---- LoRA ------------------------------------------------------------------------------------------------------
    def _attach_adapter(self, peft_config: dict[str, Any]) -> None:
        if self._peft is not None:
            if peft_config == self.lora:
                return
            self._peft.unload()
            self._peft = None
        from peft import PeftConfig, get_peft_model

        config = PeftConfig.from_peft_type(**peft_config)
        config.inference_mode = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # autocast_adapter_dtype would keep float32 adapters on a bfloat16 model, unlike the trainer's
            self._peft = get_peft_model(self.model, config, autocast_adapter_dtype=False)
        self._peft.eval().requires_grad_(False)
        self.lora = peft_config

    def _collect_adapter(self, piece: Piece, value: torch.Tensor) -> None:
        if piece.name not in self._adapter:
            self._adapter[piece.name] = (torch.empty(piece.shape, dtype=value.dtype), 0)
        tensor, count = self._adapter[piece.name]
        tensor.view(-1)[piece.first : piece.first + piece.length] = value
        self._adapter[piece.name] = (tensor, count + piece.length)

    def _finish_adapter(self) -> None:
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        def strip(name: str) -> str:
            for wrapper in _WRAPPERS[:-1]:
                name = name.replace(wrapper, "")
            return name.replace(".default.weight", ".weight")

        state = {strip(name): tensor for name, (tensor, count) in self._adapter.items() if count == tensor.numel()}
        expected = get_peft_model_state_dict(self._peft)
        missing = [name for name in expected if name not in state]
        self._complain("adapter weights", missing, [name for name in state if name not in expected])
        for name, tensor in state.items():
            if tensor.shape != expected[name].shape:
                raise ValueError(
                    f"adapter weight {name!r} has shape {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}"
                )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            set_peft_model_state_dict(self._peft, state)
        self._adapter = {}
