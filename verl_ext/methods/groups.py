# SPDX-License-Identifier: Apache-2.0
"""Group keys by value and the float64 statistics of the groups.

A *column* holds one entry a row. `value_ids` maps its entries to int64 ids so that equal values share an id,
`joint_ids` combines columns into one key, and `Segments` computes counts, sums, means, deviations and standard
deviations of the rows that share an id. All of it is vectorised over rows; only hashing Python objects takes one
dictionary pass.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np
import torch

#: One entry a row: a numpy array, a torch tensor, or a list of Python objects.
Column: TypeAlias = "np.ndarray | torch.Tensor | Sequence[Any]"

#: A group whose values differ by no more than this fraction of their magnitude counts as constant.
ZERO_VARIANCE_RTOL = 1e-6


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as a numpy array on the CPU; bfloat16, which numpy does not know, becomes float32."""
    tensor = tensor.detach().to("cpu")
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def value_key(value: Any) -> Any:
    """Return a hashable key that is equal for equal values and different for different ones.

    Mappings compare by their items whatever the order, lists and tuples element by element (a list equals the tuple
    with the same elements), arrays and tensors by shape and values (whatever the numeric dtype), enum members by class
    and name, everything else by its own `==`.

    Raises:
        TypeError: for an object that can only be compared by identity.
    """
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return ("nan",) if math.isnan(value) else value
    if isinstance(value, (str, bytes, int, complex)):
        return value
    if isinstance(value, torch.Tensor):
        value = to_numpy(value)
    if isinstance(value, np.ndarray):
        return _array_key(value)
    if isinstance(value, Mapping):
        return ("mapping", frozenset((value_key(k), value_key(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return ("sequence", tuple(value_key(v) for v in value))
    if isinstance(value, Set):
        return ("set", frozenset(value_key(v) for v in value))
    if isinstance(value, enum.Enum):
        return ("enum", type(value).__qualname__, value.name)
    if kind.__eq__ is object.__eq__ or kind.__hash__ is None:
        raise TypeError(
            f"an object of type {kind.__name__} cannot be compared by value; "
            "give a str, a number, a list, a tuple, a dict or an ndarray"
        )
    return value


def _array_key(array: np.ndarray) -> Any:
    """Key of an array: its shape and a 128-bit digest of its values in one canonical dtype."""
    if array.dtype.kind not in "biuf":
        return ("sequence-array", array.shape, tuple(value_key(v) for v in array.ravel().tolist()))
    if array.dtype.kind == "f":
        array = array.astype(np.float64)
        with np.errstate(invalid="ignore"):
            integral = bool(np.all((array == np.floor(array)) & (np.abs(array) < 2.0**53)))
        if integral:
            array = array.astype(np.int64)
        else:
            array = np.where(np.isnan(array), np.nan, array + 0.0)  # one NaN pattern, no negative zero
    elif array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        return ("sequence-array", array.shape, tuple(array.ravel().tolist()))
    else:
        array = array.astype(np.int64)
    digest = hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).digest()
    return ("array", array.shape, array.dtype.kind, digest)


def value_ids(column: Column) -> np.ndarray:
    """Map a column of B entries to int64 ids in 0..K-1; two rows share an id exactly when their entries are equal.

    Args:
        column: B entries of any kind that `value_key` can compare. A numeric array with more than one dimension is read
            as one array entry a row.

    Returns:
        ids: [B] int64, contiguous.

    Raises:
        TypeError: an entry can only be compared by identity.
        ValueError: an entry is None; the message gives its position.
    """
    if isinstance(column, torch.Tensor):
        column = to_numpy(column)
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "biu":
        return compact_ids(column.astype(np.int64)) if column.dtype != np.uint64 else _unique(column)
    entries = column.tolist() if isinstance(column, np.ndarray) and column.ndim == 1 else list(column)
    if set(map(type, entries)) <= {str, int}:  # their own keys: no call a row
        number = {key: i for i, key in enumerate(dict.fromkeys(entries))}
        return np.fromiter(map(number.__getitem__, entries), dtype=np.int64, count=len(entries))
    seen: dict[Any, int] = {}
    ids = np.fromiter(
        (seen.setdefault(v if type(v) is str else value_key(v), len(seen)) for v in entries),
        dtype=np.int64,
        count=len(entries),
    )
    if None in seen:
        raise ValueError(f"entry {int(np.argmax(ids == seen[None]))} is None")
    return ids


def _unique(codes: np.ndarray) -> np.ndarray:
    return np.unique(codes, return_inverse=True)[1].reshape(-1).astype(np.int64, copy=False)


def compact_ids(codes: np.ndarray) -> np.ndarray:
    """Relabel int64 codes to contiguous ids 0..K-1 that keep the order of the codes."""
    if codes.size == 0:
        return codes.astype(np.int64)
    low, high = int(codes.min()), int(codes.max())
    if high - low > 8 * codes.size + 1024:
        return _unique(codes)
    used = np.zeros(high - low + 1, dtype=np.int64)  # a counting pass instead of a sort
    used[codes - low] = 1
    return (np.cumsum(used) - 1)[codes - low]


def joint_ids(*ids: np.ndarray) -> np.ndarray:
    """Combine id columns of length B into one contiguous id column: rows share it when they agree in every column."""
    joint = ids[0]
    for other in ids[1:]:
        if joint.size:
            joint = compact_ids(joint * (int(other.max()) + 1) + other)
    return compact_ids(joint)


class Segments:
    """Statistics, in float64, of the rows that share an id.

    Args:
        ids: [B] int64, contiguous ids 0..K-1 (see `value_ids`, `joint_ids`).

    Attributes:
        count: [K] number of rows of each group.
        rows: [B] number of rows in the row's own group.
    """

    def __init__(self, ids: np.ndarray):
        self.ids = ids
        self.number = int(ids.max()) + 1 if ids.size else 0
        self.count = np.bincount(ids, minlength=self.number)
        self.rows = self.count[ids]

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum of each group, [K]."""
        return np.bincount(self.ids, weights=values, minlength=self.number)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Mean of each group, [K]."""
        return self.sum(values) / np.maximum(self.count, 1)

    def constant(self, values: np.ndarray) -> np.ndarray:
        """Whether a group has zero variance, [K] bool: max - min <= 1e-6 * max(1, max|x|)."""
        high = np.full(self.number, -np.inf)
        low = np.full(self.number, np.inf)
        np.maximum.at(high, self.ids, values)
        np.minimum.at(low, self.ids, values)
        return high - low <= ZERO_VARIANCE_RTOL * np.maximum(1.0, np.maximum(np.abs(high), np.abs(low)))

    def deviation(self, values: np.ndarray) -> np.ndarray:
        """`x - mean` of the row's group, [B]; exactly 0 in a group of zero variance.

        Dividing the rounding residue of identical rewards by a small epsilon would turn it into a large advantage, so a
        group that is constant up to rounding has no deviation at all.
        """
        centred = values - self.mean(values)[self.ids]
        return np.where(self.constant(values)[self.ids], 0.0, centred)

    def std(self, deviation: np.ndarray, ddof: int) -> np.ndarray:
        """Standard deviation of the row's group, [B], from `deviation`; 0 in a group of no more than ddof rows."""
        variance = self.sum(deviation * deviation) / np.maximum(self.count - ddof, 1)
        return np.sqrt(variance)[self.ids]

    def leave_one_out(self, values: np.ndarray) -> np.ndarray:
        """`x - mean of the others`, [B], as N/(N-1) (x - mean); x itself in a group of one."""
        scale = self.rows / np.maximum(self.rows - 1, 1)
        return np.where(self.rows > 1, scale * self.deviation(values), values)

    def centre(self, values: np.ndarray) -> np.ndarray:
        """`x - mean`, [B]; x itself in a group of one."""
        return np.where(self.rows > 1, self.deviation(values), values)

    def standardise(self, values: np.ndarray, *, ddof: int, epsilon: float) -> np.ndarray:
        """`(x - mean) / (std + epsilon)`, [B]; `x / (1 + epsilon)` in a group of one (mean 0 and std 1)."""
        deviation = self.deviation(values)
        scaled = deviation / (self.std(deviation, ddof) + epsilon)
        return np.where(self.rows > 1, scaled, values / (1.0 + epsilon))
