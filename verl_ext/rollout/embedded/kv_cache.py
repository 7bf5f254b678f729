# SPDX-License-Identifier: Apache-2.0
"""A key-value cache for continuous batching with transformers models.

All rows end at the same column, whatever their length: row ``r`` holds its tokens in columns ``[first_col[r], end)``
and columns before that are masked. A decode step then writes one column for all rows at once, a row that finishes is
replaced by the last one, and a new row is copied in so that it ends where the others end. Buffers are allocated ahead
and grow geometrically, so no step concatenates or copies the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

__all__ = ["SlotCache"]

_COLUMN_SLACK = 64


class SlotCache(Cache):
    """Right-aligned batch of key-value rows.

    Args:
        device: where masks live (buffers follow the model's keys).
        mask_dtype: dtype of the additive attention mask, the model's.
        max_rows: number of rows at most.
        max_tokens: rows times columns that the geometric growth must not pass on its own account.

    Attributes:
        rows: rows in use.
        consistent: false after an insertion failed half way; only :meth:`release` helps then.
        start, end: columns in use are ``[start, end)``.
    """

    def __init__(self, device: torch.device, mask_dtype: torch.dtype, max_rows: int, max_tokens: int) -> None:
        super().__init__(layers=[])
        self._device = device
        self._mask_dtype = mask_dtype
        self._max_rows = max_rows
        self._max_tokens = max_tokens
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
        """Write one decode column of a layer and return all its columns: ``(rows, heads, columns, head_dim)``."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        rows, end = self.rows, self.end
        keys[:rows, :, end : end + 1] = key_states
        values[:rows, :, end : end + 1] = value_states
        return keys[:rows, :, self.start : end + 1], values[:rows, :, self.start : end + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.end - self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.end - self.start + query_length, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    # ---- what the engine asks --------------------------------------------------------------------------------------
    def release(self) -> None:
        """Forget all rows and free the buffers."""
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._mask = torch.empty(0)
        self._row_capacity = 0
        self._col_capacity = 0
        self.consistent = True
        self.reset()

    def reset(self) -> None:
        """Forget all rows, keep the buffers."""
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
        if self.end + 1 > self._col_capacity:
            width = self.end - self.start
            self._relayout(self._row_capacity, self._columns_for(width, self._row_capacity), width)

    def advance(self) -> None:
        """Count the column that the decode step wrote."""
        self.end += 1

    def insert(self, prefill: Cache, source: list[int], lengths: list[int]) -> None:
        """Append rows computed by a left-padded prefill.

        Args:
            prefill: cache of the prefill forward, layers of shape ``(prompts, heads, width, head_dim)``.
            source: for each new row, its row in ``prefill`` (several rows may share a prompt).
            lengths: for each new row, its prompt length in tokens.
        """
        width = prefill.layers[0].keys.shape[2]
        count = len(source)
        rows = self.rows + count
        if not self._keys:
            for layer in prefill.layers:
                self._keys.append(layer.keys.new_empty(0))
                self._values.append(layer.values.new_empty(0))
        self.consistent = False
        if not self.rows and rows <= self._row_capacity and width < self._col_capacity:
            self.start, self.end = 0, width
        elif rows > self._row_capacity or width > self.end:
            needed = max(self.end - self.start, width)
            row_capacity = self._row_capacity
            if rows > row_capacity:
                affordable = self._max_tokens // (needed + _COLUMN_SLACK)
                row_capacity = max(rows, min(self._max_rows, 2 * row_capacity, affordable))
            self._relayout(row_capacity, self._columns_for(needed, row_capacity), needed, prefill)
        index = torch.tensor(source, device=self._device)
        new = slice(self.rows, rows)
        columns = slice(self.end - width, self.end)
        for layer, keys, values in zip(prefill.layers, self._keys, self._values, strict=True):
            keys[new, :, columns] = layer.keys.index_select(0, index)
            values[new, :, columns] = layer.values.index_select(0, index)
        self._mask[new] = 0
        for row, length in zip(range(self.rows, rows), lengths, strict=True):
            first = self.end - length
            self.first_col.append(first)
            self._mask[row, :, :, :first] = torch.finfo(self._mask_dtype).min
        self.rows = rows
        self.start = min(self.first_col)
        self.consistent = True

    def remove(self, row: int) -> None:
        """Drop ``row``; the last row takes its place."""
        last = self.rows - 1
        if row != last:
            live = slice(self.start, self.end)
            for buffer in (*self._keys, *self._values):
                buffer[row, :, live] = buffer[last, :, live]
            self._mask[row] = self._mask[last]
            self.first_col[row] = self.first_col[last]
        self.first_col.pop()
        self.rows = last
        if last == 0:
            self.reset()
        else:
            self.start = min(self.first_col)

    def _columns_for(self, width: int, row_capacity: int) -> int:
        """Columns to allocate for ``width`` live ones: room to grow, within the token bound if that leaves any."""
        slack = min(max(_COLUMN_SLACK, width // 2), self._max_tokens // row_capacity - width)
        return width + max(slack, _COLUMN_SLACK // 4)

    def _relayout(self, row_capacity: int, col_capacity: int, end: int, like: Cache | None = None) -> None:
        """Move the live columns into buffers of the given size so that they end at column ``end``."""
        width, rows = self.end - self.start, self.rows
        live = slice(self.start, self.end)
        target = slice(end - width, end)
        # layer by layer: at most one layer is held twice
        for buffers, name in ((self._keys, "keys"), (self._values, "values")):
            for i, old in enumerate(buffers):
                shape = old.shape if like is None else getattr(like.layers[i], name).shape
                # Zeros, not empty memory: a masked column meets an attention weight of zero, and 0 * NaN is NaN.
                fresh = old.new_zeros(row_capacity, shape[1], col_capacity, shape[3])
                if rows:
                    fresh[:rows, :, target] = old[:rows, :, live]
                buffers[i] = fresh
        mask = torch.zeros(row_capacity, 1, 1, col_capacity, dtype=self._mask_dtype, device=self._device)
        shift = end - self.end
        self.first_col = [first + shift for first in self.first_col]
        for row, first in enumerate(self.first_col):
            mask[row, :, :, :first] = torch.finfo(self._mask_dtype).min
        self._mask = mask
        self._row_capacity, self._col_capacity = row_capacity, col_capacity
        self.start, self.end = end - width, end
