# SPDX-License-Identifier: Apache-2.0
"""Group keys by value (`value_ids`, `joint_ids`) and the float64 statistics of the groups (`Segments`)."""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np
import torch

#: One entry a row: a numpy array, a torch tensor, or a list of Python objects.
Column: TypeAlias = np.ndarray | torch.Tensor | Sequence[Any]

#: A group whose values differ by no more than this fraction of their magnitude counts as constant.
ZERO_VARIANCE_RTOL = 1e-6
#: float64 holds every whole number up to here.
LARGEST_EXACT = 2**53


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as a numpy array on the CPU; bfloat16, which numpy does not know, becomes float32."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().cpu().numpy()


def value_key(value: Any) -> Any:
    """A hashable key, equal for equal values and different for different ones; TypeError where there is only identity.

    Mappings compare by their items whatever the order, lists and tuples alike element by element, arrays and tensors by
    shape and values whatever the numeric dtype, enum members by class and name, everything else by its own `==`.
    """
    if value is None or isinstance(value, (str, bytes, int)):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return ("nan",) if math.isnan(value) else value
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
    if type(value).__eq__ is object.__eq__ or type(value).__hash__ is None:
        kind = type(value).__name__
        raise TypeError(f"a {kind} cannot be compared by value; give a str, number, list, tuple, dict or ndarray")
    return value


def _array_key(array: np.ndarray) -> Any:
    """Key of an array: its shape and values, of numbers a digest, since an observation may be an image."""
    exact = array.dtype.kind in "biu" and bool(((array <= LARGEST_EXACT) & (array >= -LARGEST_EXACT)).all())
    if not exact and array.dtype.kind != "f":
        return ("array", array.shape, tuple(value_key(v) for v in array.ravel().tolist()))
    numbers = np.asarray(array.astype(np.float64) + 0.0)  # no negative zero
    numbers[np.isnan(numbers)] = np.nan  # one NaN pattern
    return ("array", array.shape, hashlib.blake2b(numbers.tobytes(), digest_size=16).digest())


def value_ids(column: Column) -> np.ndarray:
    """Ids 0..K-1 of the entries (arrays, if the column has more dimensions), [B] int64: equal entries share an id.

    TypeError for an entry that can only be compared by identity, ValueError for None.
    """
    if isinstance(column, torch.Tensor):
        column = to_numpy(column)
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "biu":
        return np.unique(column, return_inverse=True)[1].reshape(-1)
    number: dict[Any, int] = {}
    ids = [number.setdefault(value_key(entry), len(number)) for entry in column]
    if None in number:
        raise ValueError(f"entry {ids.index(number[None])} is None")
    return np.array(ids, dtype=np.int64)


def joint_ids(*ids: np.ndarray) -> np.ndarray:
    """One id column 0..K-1 of several, each [B] of numbers from 0: rows share an id when they agree in all of them."""
    joint = np.zeros_like(ids[0])
    for other in ids:
        joint = value_ids(joint * (other.max(initial=0) + 1) + other)
    return joint


class Segments:
    """Statistics, in float64, of the rows that share an id: `ids`, [B] int64 contiguous from 0 to K-1.

    `count`, [K], and `rows`, [B], are the number of rows of each group and of the row's own group.
    """

    def __init__(self, ids: np.ndarray):
        self.ids = ids
        self.count = np.bincount(ids)
        self.rows = self.count[ids]

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum of each group, [K]."""
        return np.bincount(self.ids, weights=values, minlength=self.count.size)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Mean of each group, [K]."""
        return self.sum(values) / np.maximum(self.count, 1)

    def largest(self, values: np.ndarray) -> np.ndarray:
        """Largest value of each group, [K]."""
        largest = np.full(self.count.size, -np.inf)
        np.maximum.at(largest, self.ids, values)
        return largest

    def constant(self, values: np.ndarray) -> np.ndarray:
        """Whether a group has zero variance, [K] bool: max - min <= 1e-6 * max(1, max|x|)."""
        high, low = self.largest(values), -self.largest(-values)
        return high - low <= ZERO_VARIANCE_RTOL * np.maximum(1.0, np.maximum(high, -low))

    def deviation(self, values: np.ndarray) -> np.ndarray:
        """`x - mean` of the row's group, [B]; exactly 0 in a group of zero variance: divided by a small epsilon, its
        rounding residue would become a large advantage."""
        return np.where(self.constant(values)[self.ids], 0.0, values - self.mean(values)[self.ids])

    def std(self, deviation: np.ndarray, ddof: int) -> np.ndarray:
        """Standard deviation of the row's group, [B], from `deviation`; 0 in a group of no more than ddof rows."""
        unit = self.largest(np.abs(deviation))
        unit[unit == 0] = 1.0
        squares = (deviation / unit[self.ids]) ** 2  # of numbers up to 1: those of 1e160 are beyond float64
        return (unit * np.sqrt(self.sum(squares) / np.maximum(self.count - ddof, 1)))[self.ids]

    def leave_one_out(self, values: np.ndarray) -> np.ndarray:
        """`x - mean of the others`, [B], as N/(N-1) (x - mean); x itself in a group of one."""
        return self.rows / np.maximum(self.rows - 1, 1) * self.centre(values)

    def centre(self, values: np.ndarray) -> np.ndarray:
        """`x - mean`, [B]; x itself in a group of one."""
        return np.where(self.rows == 1, values, self.deviation(values))

    def standardise(self, values: np.ndarray, *, ddof: int, epsilon: float) -> np.ndarray:
        """`(x - mean) / (std + epsilon)`, [B]; `x / (1 + epsilon)` in a group of one (mean 0 and std 1)."""
        deviation = self.deviation(values)
        scale = np.where(self.rows == 1, 1.0, self.std(deviation, ddof)) + epsilon
        scale[scale == 0] = 1.0  # no epsilon and no variance: the deviation is 0
        return np.where(self.rows == 1, values, deviation) / scale
