# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch: input checks, row fields, row scores and broadcasting to tokens.

One row is one model call. `Rows` holds the columns of the valid rows (rows with `valid_row` False are no samples: they
enter no statistic and get advantage 0) and turns a column into floats, booleans, integers or group ids, with an error
that names the field, the row and the remedy when the column cannot be used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl_ext.methods.groups import Column, joint_ids, own_keys, sum_of_squares, to_numpy, value_ids

#: Elements of a block of rows that is worked on at once: several passes over it stay in a cache of a few MB.
BLOCK_ELEMENTS = 1 << 20
#: The same where a block is copied to float64.
DOUBLE_ELEMENTS = 1 << 18
#: Whole numbers by their bytes.
BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
#: Bytes of a huge page of most systems, and those of a tensor from which on huge pages are asked for.
HUGE_PAGE = 1 << 21
HUGE_BYTES = 2 * HUGE_PAGE
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class RowFieldError(ValueError):
    """A row field that a method needs is missing, has the wrong length, or holds a value that cannot be used."""


def check_tokens(token_level_rewards: torch.Tensor, response_mask: torch.Tensor) -> tuple[int, int]:
    """Check that both are [B, T] tensors and return (B, T)."""
    if token_level_rewards.ndim != 2:
        raise ValueError(f"token_level_rewards must be [B, T], got shape {tuple(token_level_rewards.shape)}")
    if response_mask.shape != token_level_rewards.shape:
        raise ValueError(
            f"response_mask has shape {tuple(response_mask.shape)}, "
            f"token_level_rewards has shape {tuple(token_level_rewards.shape)}; they must be equal"
        )
    return int(token_level_rewards.shape[0]), int(token_level_rewards.shape[1])


def check_token_field(name: str, field: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Check that a token field has the shape of response_mask and return it."""
    if field is None:
        raise RowFieldError(f"{name} is required, a tensor of shape {tuple(response_mask.shape)}")
    if field.shape != response_mask.shape:
        raise ValueError(
            f"{name} has shape {tuple(field.shape)}, response_mask has shape {tuple(response_mask.shape)}; "
            "they must be equal"
        )
    return field


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}")


def check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raise ValueError unless low <= value <= high."""
    if not low <= value <= high:
        bound = f"at least {low}" if high == float("inf") else f"in [{low}, {high}]"
        raise ValueError(f"{name}={value!r} must be {bound}")


def row_scores(token_level_rewards: torch.Tensor) -> np.ndarray:
    """Row score S_i: the sum of a row's token rewards over the whole row, [B] float64.

    The mask plays no part: a rejected row has an all-zero mask and keeps its score. Where no row has more than one
    reward (the usual case) the sum in any precision is that reward. Other blocks of rows are summed in float64, so no
    float64 copy of the whole tensor is made.
    """
    rewards = token_level_rewards.detach() if token_level_rewards.requires_grad else token_level_rewards
    batch, length = rewards.shape
    if batch == 0 or length == 0:
        return np.zeros(batch)
    if not rewards.is_cpu:
        return rewards.sum(dim=-1, dtype=torch.float64).cpu().numpy()
    step = max(1, BLOCK_ELEMENTS // length)
    if batch <= step:
        return _block_scores(rewards)
    return np.concatenate([_block_scores(block) for block in rewards.split(step)])


def _block_scores(rewards: torch.Tensor) -> np.ndarray:
    """Row sums of a [R, T] tensor on the CPU, [R] float64."""
    if rewards.dtype == torch.bfloat16:  # which numpy does not know
        rewards = rewards.float()
    sums = rewards.sum(-1).numpy()
    if not has_entries(rewards, np.count_nonzero(sums)):  # or else there is one entry in each row with a sum
        parts = rewards.split(max(1, DOUBLE_ELEMENTS // rewards.shape[1]))
        sums = torch.cat([part.to(torch.float64).sum(-1) for part in parts]).numpy()
    return sums.astype(np.float64)


def has_entries(values: torch.Tensor, number: int) -> bool:
    """Whether no more than `number` entries differ from 0, where it is known that so many do."""
    if values.is_cpu and values.dtype != torch.bfloat16:
        entries = values.numpy()
        # Whole numbers are counted several times faster than floats; -0.0 counts as one.
        if np.count_nonzero(entries.view(BITS[entries.itemsize])) == number:
            return True
    return int(torch.count_nonzero(values)) == number


def one_row_each(ids: np.ndarray) -> bool:
    """Whether every row has an id of its own, given contiguous ids, as the trajectories of single-turn data have."""
    return ids.size == 0 or int(np.maximum.reduce(ids)) + 1 == ids.size


def empty_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Uninitialised float32 tensor in the shape of the mask and on its device, for an output.

    A large one on a CPU comes from numpy's allocator, which asks Linux for huge pages, and starts where one does:
    touching fresh memory in pages of 4 kB takes as long as the arithmetic.
    """
    size = 4 * mask.numel()
    if not mask.is_cpu or size < HUGE_BYTES:
        return torch.empty_like(mask, dtype=torch.float32, memory_format=torch.contiguous_format)
    memory = np.empty(size + HUGE_PAGE, dtype=np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    return torch.from_numpy(memory[start : start + size].view(np.float32).reshape(mask.shape))


def copy_mask(target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`target.copy_(mask)` for a float32 target and a mask of whole numbers below 2^31; returns the target.

    On a CPU int64 to float32 by way of int32, in the target's own memory, takes about half the time.
    """
    if mask.is_cpu and mask.dtype == torch.int64 and target.dtype == torch.float32:
        mask = target.view(torch.int32).copy_(mask)
    return target.copy_(mask)


def broadcast_rows(row_values: np.ndarray, response_mask: torch.Tensor) -> torch.Tensor:
    """Token tensor `row_values[i] * response_mask[i, t]`, [B, T] float32, on the mask's device.

    Args:
        row_values: [B] float64.
        response_mask: [B, T] of 0 and 1, any dtype.

    Raises:
        ValueError: a value does not fit into float32.
    """
    if not sum_of_squares(row_values) <= LARGEST_FLOAT32:  # or else each of them is smaller
        fits = np.abs(row_values) <= LARGEST_FLOAT32
        if not fits.all():
            row = int(np.argmin(fits))
            value = row_values[row]
            raise ValueError(f"the advantage {value!r} of row {row} does not fit into float32; scale the rewards")
    mask = response_mask.detach() if response_mask.requires_grad else response_mask
    column = torch.from_numpy(row_values.astype(np.float32)[:, None])
    if not mask.is_cpu or mask.dtype != torch.int64:
        return empty_tokens(mask).copy_(mask).mul_(column.to(mask.device))
    # The bits of -1 are all set: -mask selects all bits of the float or none, a pass less than with a float mask.
    bits = column.view(torch.int32)
    batch, length = mask.shape
    step = max(1, BLOCK_ELEMENTS // max(length, 1))
    if batch <= step and 4 * batch * length < HUGE_BYTES:
        chosen = mask.to(torch.int32, memory_format=torch.contiguous_format)
        return chosen.neg_().bitwise_and_(bits).view(torch.float32)
    tokens = empty_tokens(mask)
    for block, of_mask, value in zip(tokens.split(step), mask.split(step), bits.split(step), strict=True):
        block.view(torch.int32).copy_(of_mask).neg_().bitwise_and_(value)
    return tokens


class Rows:
    """The columns of a batch, restricted to its valid rows.

    Args:
        batch: number of rows B.
        valid_row: [B] bool or None (all True). Rows with False are no samples.
        row_fields: further columns by name, for `group_by`.
        **fields: the named columns; None means that the column was not given.

    Attributes:
        batch: B.

    Raises:
        RowFieldError: a column has the wrong length or `valid_row` is not boolean.
    """

    def __init__(
        self,
        batch: int,
        *,
        valid_row: Column | None = None,
        row_fields: Mapping[str, Column] | None = None,
        **fields: Column | None,
    ):
        self.batch = batch
        self._whole = True
        self._columns: dict[str, Any] = {}
        self._ids: dict[str, np.ndarray] = {}
        for columns in (row_fields or {}, fields):
            for name, column in columns.items():
                if column is not None:
                    self._columns[name] = self._check(name, column)
        if valid_row is not None:
            self._columns["valid_row"] = self._check("valid_row", valid_row)
            kept = np.flatnonzero(self.bools("valid_row"))
            if len(kept) < batch:
                self._whole, self.kept = False, kept
                self._columns = {name: self._take(column) for name, column in self._columns.items()}

    @functools.cached_property
    def kept(self) -> np.ndarray:
        """[V] positions of the valid rows."""
        return np.arange(self.batch)

    def _check(self, name: str, column: Any) -> Any:
        if not isinstance(column, np.ndarray):
            column = to_numpy(column) if isinstance(column, torch.Tensor) else list(column)
        entries = len(column)
        if entries != self.batch:
            raise RowFieldError(f"row field '{name}' has {entries} entries for a batch of {self.batch} rows")
        return column

    def _take(self, column: Any) -> Any:
        return column[self.kept] if isinstance(column, np.ndarray) else [column[i] for i in self.kept]

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def column(self, name: str) -> Any:
        """The column of the valid rows, or RowFieldError when it was not given."""
        if name not in self._columns:
            raise RowFieldError(
                f"row field '{name}' is required and missing; pass {name}=<one entry a row>, or have the agent loop "
                f"return it in AgentLoopOutput.extra_fields['{name}']. Present: {', '.join(sorted(self._columns))}"
            )
        return self._columns[name]

    def _numbers(self, name: str, dtype: type, kinds: str, what: str) -> np.ndarray:
        column = self.column(name)
        array = column if isinstance(column, np.ndarray) else np.array(column, dtype=object)
        if array.dtype == object:
            for i, value in enumerate(array.reshape(-1) if array.ndim <= 1 else array):
                if not isinstance(value, (bool, int, float, np.generic)) and getattr(value, "ndim", None) != 0:
                    raise RowFieldError(f"row field '{name}' must be {what}, got {value!r} in {self.where(i)}")
            array = np.array([value.item() if hasattr(value, "item") else value for value in array])
        if array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]
        if array.size == 0:
            return np.zeros(len(self.kept) if array.ndim == 1 else 0, dtype=dtype)
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise RowFieldError(f"row field '{name}' must be {what}, got dtype {array.dtype}, shape {array.shape}")
        return array.astype(dtype)

    def floats(self, name: str) -> np.ndarray:
        """A column of finite numbers, [V] float64; ValueError names the first row that holds NaN or infinity."""
        return self.check_finite(name, self._numbers(name, np.float64, "biuf", "a number a row"))

    def bools(self, name: str) -> np.ndarray:
        """A column of booleans (or 0 and 1), [V] bool."""
        column = self.column(name)
        if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype == np.bool_:
            return column
        values = self._numbers(name, np.float64, "biuf", "True or False a row")
        wrong = (values != 0) & (values != 1)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise RowFieldError(f"row field '{name}' must be True or False, got {values[row]} in {self.where(row)}")
        return values.astype(bool)

    def ints(self, name: str) -> np.ndarray:
        """A column of whole numbers, [V] int64."""
        column = self.column(name)
        if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype == np.int64:
            return column
        values = self._numbers(name, np.float64, "biuf", "a whole number a row")
        if (values != np.round(values)).any():
            row = int(np.argmax(values != np.round(values)))
            raise RowFieldError(f"row field '{name}' must be a whole number, got {values[row]} in {self.where(row)}")
        return values.astype(np.int64)

    def scores(self, token_level_rewards: torch.Tensor) -> np.ndarray:
        """Row scores S_i of the valid rows, [V] float64; ValueError names the first row that holds NaN or infinity."""
        scores = row_scores(token_level_rewards)
        return self.check_finite("token_level_rewards", scores if self._whole else scores[self.kept])

    def check_finite(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return `values` ([V], one a valid row), or raise ValueError that names the first row that is not finite."""
        if not math.isfinite(np.add.reduce(values)):  # too large, or one is not finite
            finite = np.isfinite(values)
            if finite.all():
                return values
            row = int(np.argmin(finite))
            raise ValueError(f"{name} is {values[row]} in {self.where(row)}; rewards must be finite numbers")
        return values

    def ids(self, name: str) -> np.ndarray:
        """Group ids by value of a column, [V] int64; RowFieldError names the field when an entry cannot be compared."""
        if name not in self._ids:
            try:
                self._ids[name] = value_ids(self.column(name))
            except RowFieldError:
                raise
            except (TypeError, ValueError) as error:
                raise RowFieldError(f"row field '{name}' cannot serve as a group key: {error}") from error
        return self._ids[name]

    def keys(self, group_by: Sequence[str]) -> np.ndarray:
        """Joint group ids of the row fields in `group_by`, [V] int64.

        Raises:
            ValueError: `group_by` is a string or does not contain `index`: samples of two prompts must never mix.
            RowFieldError: a field of it is missing.
        """
        if isinstance(group_by, str) or "index" not in group_by:
            raise ValueError(f"group_by={group_by!r} must be a list of row fields that contains 'index'")
        ids = [self.ids(name) for name in group_by]
        return ids[0] if len(ids) == 1 else joint_ids(*ids)

    def trajectories(self) -> np.ndarray:
        """Trajectory ids, [V] int64, keyed by (index, traj_uid): padding rows may carry another prompt's traj_uid."""
        if self._all_different("traj_uid"):
            return np.arange(len(self.kept))
        trajectory = self.ids("traj_uid")
        return trajectory if one_row_each(trajectory) else joint_ids(self.ids("index"), trajectory)

    def _all_different(self, name: str) -> bool:
        """Whether the column holds a different str or number in every row; False where that takes long to tell."""
        column = self.column(name)
        entries = column.tolist() if isinstance(column, np.ndarray) and column.ndim == 1 else column
        try:
            different = set(entries)
        except TypeError:  # not hashable
            return False
        return len(different) == len(entries) and own_keys(different)

    def turns(self) -> tuple[np.ndarray, np.ndarray]:
        """Trajectory ids and turn indices, each [V] int64.

        Single-turn data, with neither `traj_uid` nor `turn_index`, is read as one trajectory of one turn a row.

        Raises:
            RowFieldError: only one of the two is there, or a trajectory has two valid rows with the same turn_index.
        """
        if "traj_uid" not in self and "turn_index" not in self:
            self._columns["traj_uid"] = np.arange(len(self.kept))
            self._columns["turn_index"] = np.zeros(len(self.kept), dtype=np.int64)
            return np.arange(len(self.kept)), self.ints("turn_index")
        trajectory, turn = self.trajectories(), self.ints("turn_index")
        if one_row_each(trajectory):
            return trajectory, turn  # nothing can repeat
        order = np.lexsort((turn, trajectory))
        again = (np.diff(trajectory[order]) == 0) & (np.diff(turn[order]) == 0)
        if again.any():
            raise RowFieldError(
                f"row field 'turn_index' repeats in {self.where(int(order[1:][again][0]))}; number the rows of a "
                "trajectory chronologically, all agents counted, and mark copies with valid_row False"
            )
        return trajectory, turn

    def where(self, row: int) -> str:
        """Words for the row at position `row` of the valid rows: its batch position, uid, trajectory and turn."""
        words = [f"row {int(self.kept[row])}"]
        labels = {"index": "uid", "traj_uid": "trajectory", "turn_index": "turn", "agent_id": "agent"}
        words += [f"{label} {self._columns[name][row]}" for name, label in labels.items() if name in self]
        return f"{words[0]} ({', '.join(words[1:])})" if len(words) > 1 else words[0]

    def spread(self, values: np.ndarray) -> np.ndarray:
        """The values of the valid rows in a batch of zeros, [B] float64; `values` itself when all rows are valid."""
        if self._whole:
            return values
        batch = np.zeros(self.batch, dtype=np.float64)
        batch[self.kept] = values
        return batch


def invalid_actions(rows: Rows, penalty: float) -> np.ndarray | float:
    """The penalty of each valid row, [V] float64: `penalty` where `is_action_valid` is False, else 0.

    Without the column no action counts as invalid: one 0 for all rows.
    """
    check_range("invalid_action_penalty_coef", penalty, 0.0)
    if penalty == 0 or "is_action_valid" not in rows:
        return 0.0
    return penalty * (~rows.bools("is_action_valid")).astype(np.float64)


class Advantage(tuple[torch.Tensor, torch.Tensor]):
    """What a method returns: the pair (advantages, returns) that verl expects, with the rows and groups behind it.

    Args:
        advantages, returns: [B, T] float32; they unpack and index as a pair.
        rows: the `Rows` that the method read; `rows.kept` are the [V] positions of the samples.
        groups: [V] int64 group ids of the samples, in which they were compared.
        details: what the method's own metrics read beside these, by name; [V] arrays as a rule.
    """

    rows: Rows
    groups: np.ndarray
    details: Mapping[str, Any]

    def __new__(
        cls, advantages: torch.Tensor, returns: torch.Tensor, rows: Rows, groups: np.ndarray, **details: Any
    ) -> Advantage:
        result = super().__new__(cls, (advantages, returns))
        result.rows, result.groups, result.details = rows, groups, details
        return result

    @property
    def advantages(self) -> torch.Tensor:
        """[B, T] float32."""
        return self[0]

    @property
    def returns(self) -> torch.Tensor:
        """[B, T] float32."""
        return self[1]
