# SPDX-License-Identifier: Apache-2.0
"""A key-value cache for continuous batching with transformers models.

All rows end at the same column, whatever their length: row ``r`` holds its tokens in columns ``[first_col[r], end)``
and columns before that are masked. A decode step then writes one column for all rows at once, a row that finishes is
replaced by the last one, and a prefill writes its rows so that they end where the others end. Buffers are allocated
ahead, at most ``max_slots`` rows times columns of them at any time. They are laid out anew, larger or smaller, when
rows or columns run out, which happens a geometrically growing number of steps apart, and freed when the last row
leaves; no other step copies the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

__all__ = ["SlotCache", "kv_bytes_per_token", "kv_widths"]

_COLUMN_SLACK = 64


def kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token of one row occupies, from a transformers model config."""
    text = config.get_text_config(decoder=True)
    return int(text.num_hidden_layers * sum(kv_widths(text)) * dtype.itemsize)


def kv_widths(text: Any) -> tuple[int, int]:
    """Numbers in the keys, and in the values, of one token in one layer."""
    heads = getattr(text, "num_attention_heads", 1)
    if getattr(text, "kv_lora_rank", None):  # latent attention, which transformers unfolds before it caches
        return heads * (text.qk_nope_head_dim + text.qk_rope_head_dim), heads * text.v_head_dim
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    width = kv_heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    return width, width


class SlotCache(Cache):
    """Right-aligned batch of key-value rows.

    Args:
        device: where masks live (buffers follow the model's keys).
        mask_dtype: dtype of the additive attention mask, the model's.
        max_rows: number of rows at most.
        max_slots: bound on rows times columns allocated. The caller keeps within it: rows in use times the columns that
            the longest of them can reach. While the layout changes, one layer's keys or values are held twice.

    Attributes:
        rows: rows in use.
        consistent: false after a change of the layout failed half way; only :meth:`release` helps then.
        start, end: columns in use are ``[start, end)``.
    """

    def __init__(self, device: torch.device, mask_dtype: torch.dtype, max_rows: int, max_slots: int) -> None:
        super().__init__(layers=[])
        self._device = device
        self._mask_dtype = mask_dtype
        self._max_rows = max_rows
        self._max_slots = max_slots
        self.release()

    # ---- what transformers' models ask of a cache ------------------------------------------------------------------
    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return bool(self._keys)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values; returns those that its queries see.

        Args:
            key_states, value_states: ``(rows, heads, 1, head_dim)`` in a decode step, whose rows see all their columns;
                ``(prompts, heads, width, head_dim)`` in a prefill, whose prompts see themselves.
        """
        if layer_idx == len(self._keys):
            for buffers, states in ((self._keys, key_states), (self._values, value_states)):
                # Zeros, not empty memory: a masked column meets an attention weight of zero, and 0 * NaN is NaN.
                buffers.append(states.new_zeros(self._rows, states.shape[1], self._columns, states.shape[3]))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._source is not None:
            new = slice(self.rows, self.rows + len(self._source))
            columns = slice(self.end - key_states.shape[2], self.end)
            keys[new, :, columns] = key_states.index_select(0, self._source)
            values[new, :, columns] = value_states.index_select(0, self._source)
            return key_states, value_states
        keys[: self.rows, :, self.end : self.end + 1] = key_states
        values[: self.rows, :, self.end : self.end + 1] = value_states
        live = slice(self.start, self.end + 1)
        return keys[: self.rows, :, live], values[: self.rows, :, live]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._source is not None else self.end - self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    # ---- what the engine asks --------------------------------------------------------------------------------------
    def release(self) -> None:
        """Forget all rows and free the buffers."""
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._mask = torch.empty(0)
        self._source: torch.Tensor | None = None
        self._rows = 0
        self._columns = 0
        self.consistent = True
        self.rows = 0
        self.start = 0
        self.end = 0
        self.first_col: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes held by the key and value buffers."""
        return sum(t.numel() * t.element_size() for t in self._keys + self._values)

    @property
    def padded(self) -> bool:
        """Whether some row is shorter than the widest one."""
        return max(self.first_col) > self.start

    def mask(self) -> torch.Tensor:
        """Additive mask ``(rows, 1, 1, columns + 1)`` for the coming decode step (the new column included)."""
        return self._mask[: self.rows, :, :, self.start : self.end + 1]

    def prepare_step(self) -> None:
        """Make room for one more column."""
        if self.end == self._columns:
            width = self.end - self.start
            self._lay_out(self.rows, width + 1, end=width)

    def advance(self) -> None:
        """Count the column that the decode step wrote."""
        self.end += 1

    def begin_prefill(self, source: list[int], width: int) -> None:
        """Make room for new rows, which the next forward writes; :meth:`end_prefill` counts them in.

        Args:
            source: for each new row, its row in the forward (several rows may share a prompt).
            width: columns of the forward, its prompts left-padded.
        """
        rows = self.rows + len(source)
        if rows > self._rows or width > self.end:
            end = max(self.end - self.start, width)
            self._lay_out(rows, end, end)
        self._source = torch.tensor(source, device=self._device)

    def end_prefill(self, lengths: list[int]) -> None:
        """Count the rows of the prefill in.

        Args:
            lengths: for each new row, its prompt length in tokens.
        """
        self._source = None
        for length in lengths:
            first = self.end - length
            self.first_col.append(first)
            self._mask[self.rows] = 0
            self._mask[self.rows, :, :, :first] = torch.finfo(self._mask_dtype).min
            self.rows += 1
        self.start = min(self.first_col)

    def cut(self, rows: int) -> None:
        """Drop all but the first ``rows`` rows, and what a prefill that failed has written beyond them."""
        self._source = None
        for buffer in (*self._keys, *self._values):
            buffer[rows:] = 0
        del self.first_col[rows:]
        self.rows = rows
        self._settle()

    def remove(self, row: int, wipe: bool = False) -> None:
        """Drop ``row``; the last row takes its place.

        Args:
            row: its number.
            wipe: it holds values that are not finite, which masking alone would not hide from the slot's next row.
        """
        last = self.rows - 1
        if wipe:
            for buffer in (*self._keys, *self._values):
                buffer[row] = 0
        if row != last:
            live = slice(self.start, self.end)
            for buffer in (*self._keys, *self._values):
                buffer[row, :, live] = buffer[last, :, live]
            self._mask[row] = self._mask[last]
            self.first_col[row] = self.first_col[last]
        self.first_col.pop()
        self.rows = last
        self._settle()

    def _settle(self) -> None:
        if self.rows:
            self.start = min(self.first_col)
        else:
            self.release()

    def _lay_out(self, rows: int, columns: int, end: int) -> None:
        """Move the live columns into buffers with room for ``rows`` and ``columns`` and some to spare.

        Args:
            rows, columns: what is needed at least; their product is within the bound.
            end: column at which the rows end in the new buffers.

        Raises:
            RuntimeError: the caller needs more than the bound.
        """
        if rows * columns > self._max_slots:
            raise RuntimeError(f"{rows} rows of {columns} columns exceed the bound of {self._max_slots} slots")
        spare_rows = 2 * rows if self._rows else rows
        wide = min(columns + max(_COLUMN_SLACK, columns // 2), self._max_slots // rows)
        high = max(rows, min(spare_rows, self._max_rows, self._max_slots // wide))
        width = self.end - self.start
        live, target = slice(self.start, self.end), slice(end - width, end)
        self.consistent = False
        for buffers in (self._keys, self._values):
            for i, old in enumerate(buffers):  # one by one: at most one is held twice
                fresh = old.new_zeros(high, old.shape[1], wide, old.shape[3])
                fresh[: self.rows, :, target] = old[: self.rows, :, live]
                buffers[i] = fresh
        shift = end - self.end
        self.first_col = [first + shift for first in self.first_col]
        self._mask = torch.zeros(high, 1, 1, wide, dtype=self._mask_dtype, device=self._device)
        for row, first in enumerate(self.first_col):
            self._mask[row, :, :, :first] = torch.finfo(self._mask_dtype).min
        self._rows, self._columns = high, wide
        self.start, self.end = end - width, end
        self.consistent = True
