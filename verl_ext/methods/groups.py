# SPDX-License-Identifier: Apache-2.0
"""Group keys by value and the float64 statistics of the groups.

A *column* holds one entry a row. `value_ids` maps its entries to int64 ids so that equal values share an id,
`joint_ids` combines columns into one key, and `Segments` computes counts, sums, means, deviations and standard
deviations of the rows that share an id. All of it is vectorised over rows; only hashing Python objects takes one
dictionary pass.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np
import torch

#: One entry a row: a numpy array, a torch tensor, or a list of Python objects.
Column: TypeAlias = "np.ndarray | torch.Tensor | Sequence[Any]"

#: A group whose values differ by no more than this fraction of their magnitude counts as constant.
ZERO_VARIANCE_RTOL = 1e-6
#: Sum of squares from which on deviations of values are not squared without care.
LARGEST_NORM = 1e300


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as a numpy array on the CPU; bfloat16, which numpy does not know, becomes float32."""
    tensor = tensor.detach().to("cpu")
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def sum_of_squares(values: np.ndarray) -> float:
    """Sum of the squares of a [B] array; infinite where they overflow. No BLAS, which starts threads for a long one."""
    return float(np.einsum("i,i->", values, values))


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
        return compact_ids(column.astype(np.int64, copy=False)) if column.dtype != np.uint64 else _unique(column)
    entries = column.tolist() if isinstance(column, np.ndarray) and column.ndim == 1 else list(column)
    number: dict[Any, int] = defaultdict(itertools.count().__next__)
    try:
        ids = np.fromiter(map(number.__getitem__, entries), dtype=np.int64, count=len(entries))
        if own_keys(number):
            return ids
    except TypeError:  # an entry is not hashable
        pass
    seen: dict[Any, int] = {}
    ids = np.fromiter(
        (seen.setdefault(v if type(v) is str else value_key(v), len(seen)) for v in entries),
        dtype=np.int64,
        count=len(entries),
    )
    if None in seen:
        raise ValueError(f"entry {int(np.argmax(ids == seen[None]))} is None")
    return ids


def own_keys(different: Iterable[Any]) -> bool:
    """Whether the different entries of a column, as the keys of a dictionary, are all str and int: their own keys.

    An entry of another type that equals one of these has an equal key too.
    """
    return set(map(type, different)) <= {str, int}


def _unique(codes: np.ndarray) -> np.ndarray:
    return np.unique(codes, return_inverse=True)[1].reshape(-1).astype(np.int64, copy=False)


def compact_ids(codes: np.ndarray) -> np.ndarray:
    """Relabel int64 codes to contiguous ids 0..K-1 that keep the order of the codes."""
    if codes.size == 0:
        return codes.astype(np.int64)
    low, high = int(np.minimum.reduce(codes)), int(np.maximum.reduce(codes))
    if low == high:
        return np.zeros(codes.size, dtype=np.int64)
    return _relabelled(codes - low if low else codes.astype(np.int64), high - low + 1)


def _relabelled(codes: np.ndarray, number: int) -> np.ndarray:
    """`compact_ids` of codes in 0..number-1."""
    if number > 8 * codes.size + 1024:
        return _unique(codes)
    used = np.bincount(codes, minlength=number)  # a counting pass instead of a sort
    if np.count_nonzero(used) == number:
        return codes  # as they should be
    return (np.cumsum(used > 0) - 1)[codes]


def joint_ids(*ids: np.ndarray) -> np.ndarray:
    """Combine id columns of length B into one contiguous id column: rows share it when they agree in every column."""
    if len(ids) == 1 or ids[0].size == 0:
        return compact_ids(ids[0])
    numbered = [(column, int(np.maximum.reduce(column)) + 1) for column in ids]
    varying = [pair for pair in numbered if pair[1] > 1] or numbered[:1]  # a column of one value splits nothing
    joint, number = varying[0]
    if len(varying) == 1:
        return _relabelled(joint, number)
    for other, of_other in varying[1:]:
        joint = _relabelled(joint * of_other + other, number * of_other)
        number = min(number * of_other, joint.size)
    return joint


class Segments:
    """Statistics, in float64, of the rows that share an id.

    Args:
        ids: [B] int64, contiguous ids 0..K-1 (see `value_ids`, `joint_ids`).

    Attributes:
        number: K.
        count: [K] number of rows of each group.
    """

    def __init__(self, ids: np.ndarray):
        self.ids = ids
        self.count = np.bincount(ids)
        self.number = self.count.size

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """[B] number of rows in the row's own group."""
        return self.count[self.ids]

    @functools.cached_property
    def single(self) -> np.ndarray | None:
        """[B] whether the row is a group of one; None when no row is."""
        ones = self.count == 1
        return ones[self.ids] if np.count_nonzero(ones) else None

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum of each group, [K]."""
        return np.bincount(self.ids, weights=values, minlength=self.number)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Mean of each group, [K]."""
        return self.sum(values) / np.maximum(self.count, 1)

    def constant(self, values: np.ndarray) -> np.ndarray:
        """Whether a group has zero variance, [K] bool: max - min <= 1e-6 * max(1, max|x|)."""
        high, low = np.empty((2, self.number))
        high.fill(-np.inf)
        low.fill(np.inf)
        np.maximum.at(high, self.ids, values)
        np.minimum.at(low, self.ids, values)
        spread = high - low
        magnitude = np.maximum(high, np.negative(low, out=low), out=high)  # max|x| is max(max x, -min x)
        return spread <= ZERO_VARIANCE_RTOL * np.maximum(magnitude, 1.0, out=magnitude)

    def deviation(self, values: np.ndarray) -> np.ndarray:
        """`x - mean` of the row's group, [B]; exactly 0 in a group of zero variance.

        Dividing the rounding residue of identical rewards by a small epsilon would turn it into a large advantage, so a
        group that is constant up to rounding has no deviation at all.
        """
        return self._centred(values)[0]

    def _centred(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`deviation`, [B], and its sum of squares of each group, [K]."""
        centred = values - self.mean(values)[self.ids]
        norm = sum_of_squares(values)
        if not norm < LARGEST_NORM:  # the squares of huge values overflow
            constant = self.constant(values)
            centred[constant[self.ids]] = 0.0
            with np.errstate(over="ignore"):
                return centred, self.sum(centred * centred)
        square = self.sum(centred * centred)
        # The spread of n <= B values is at most sqrt(2 square) and at least sqrt(4 square / n), and no value is larger
        # than the root of the norm. Groups are rarely near the threshold; only then are they compared value by value.
        number = np.count_nonzero(square < 0.3 * ZERO_VARIANCE_RTOL**2 * max(1.0, norm) * values.size)
        if number:
            constant = square < 0.4 * ZERO_VARIANCE_RTOL**2
            if np.count_nonzero(constant) != number:
                constant = self.constant(values)
            centred[constant[self.ids]] = 0.0
            square[constant] = 0.0
        return centred, square

    def std(self, deviation: np.ndarray, ddof: int) -> np.ndarray:
        """Standard deviation of the row's group, [B], from `deviation`; 0 in a group of no more than ddof rows."""
        return self._root(self.sum(deviation * deviation), ddof)[self.ids]

    def _root(self, square: np.ndarray, ddof: int) -> np.ndarray:
        """Standard deviation of each group, [K], from the sums of squared deviations."""
        return np.sqrt(square / np.maximum(self.count - ddof, 1))

    def leave_one_out(self, values: np.ndarray) -> np.ndarray:
        """`x - mean of the others`, [B], as N/(N-1) (x - mean); x itself in a group of one."""
        result = self.deviation(values)
        result *= (self.count / np.maximum(self.count - 1, 1))[self.ids]
        return result if self.single is None else np.where(self.single, values, result)

    def centre(self, values: np.ndarray) -> np.ndarray:
        """`x - mean`, [B]; x itself in a group of one."""
        result = self.deviation(values)
        return result if self.single is None else np.where(self.single, values, result)

    def standardise(self, values: np.ndarray, *, ddof: int, epsilon: float) -> np.ndarray:
        """`(x - mean) / (std + epsilon)`, [B]; `x / (1 + epsilon)` in a group of one (mean 0 and std 1)."""
        result, square = self._centred(values)
        scale = self._root(square, ddof)
        scale += epsilon
        if epsilon == 0:
            scale[scale == 0] = 1.0  # zero variance: the deviation is 0
        result /= scale[self.ids]
        return result if self.single is None else np.where(self.single, values / (1.0 + epsilon), result)
