# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch, one a turn: checks of tensors, columns (`Rows`), and the result (`Advantage`)."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl_ext.methods.groups import LARGEST_EXACT, Column, joint_ids, to_numpy, value_ids
from verl_ext.methods.returns import chronology

TRAJECTORY = ("index", "traj_uid")
"""The key of a trajectory: turns of another prompt may carry its traj_uid."""
#: Fields that say where a turn is, in error messages.
LABELS = {"index": "uid", "traj_uid": "trajectory", "turn_index": "turn", "agent_id": "agent"}


class RowFieldError(ValueError):
    """A turn field that a method needs is missing, has the wrong length, or holds a value that cannot be used."""


class MissingFieldError(RowFieldError):
    """A turn field that a method needs was not given; `field` is its name."""

    def __init__(self, field: str, present: Sequence[str] = ()):
        self.field = field
        super().__init__(
            f"turn field '{field}' is required and missing; pass {field}=<one entry a turn>, or have the agent loop "
            f"return it in AgentLoopOutput.extra_fields['{field}']. Present: {', '.join(sorted(present))}"
        )


def check_tokens(token_level_rewards: torch.Tensor, response_mask: torch.Tensor) -> int:
    """B, or ValueError unless both are [B, T] tensors."""
    if token_level_rewards.ndim != 2:
        raise ValueError(f"token_level_rewards must be [B, T], got shape {tuple(token_level_rewards.shape)}")
    return len(check_token_field("token_level_rewards", token_level_rewards, response_mask))


def check_token_field(name: str, tokens: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """The token field, or an error unless it is there and has the shape of response_mask."""
    shape = tuple(response_mask.shape)
    if tokens is None:
        raise RowFieldError(f"{name} is required, a tensor of shape {shape}")
    if tuple(tokens.shape) != shape:
        raise ValueError(f"response_mask has shape {shape}, {name} has shape {tuple(tokens.shape)}; they must be equal")
    return tokens


def on_model_tokens(name: str, tokens: torch.Tensor, mask: torch.Tensor, where: Callable[..., str]) -> torch.Tensor:
    """The field, [..., T], with 0 where the mask is False; ValueError names a model token that is not finite.

    `where` has words for a row, from its position in each dimension but the last.
    """
    tokens = torch.where(mask, tokens, 0.0)
    if not torch.isfinite(tokens.detach().sum(dtype=torch.float64)):
        for *row, column in (~torch.isfinite(tokens)).nonzero().tolist():
            place = f"a model token (column {column}) of {where(*row)}"
            raise ValueError(f"{name} holds NaN or infinity on {place}: {tokens[(*row, column)].item():g}")
    return tokens


class Rows:
    """The columns of a batch, restricted to its valid turns, as floats, booleans, whole numbers or group ids.

    Args:
        batch: number of turns B, an attribute as well.
        valid_row: [B] bool or None (all True). Turns with False are no samples; those left are at `kept`, [V].
        row_fields: further columns by name, for `group_by`.
        **fields: the named columns; None means that the column was not given.

    RowFieldError, here and from every method, names the field, the turn and the remedy where a column can't be used.
    """

    def __init__(
        self,
        batch: int,
        *,
        valid_row: Column | None = None,
        row_fields: Mapping[str, Column] | None = None,
        **fields: Column | None,
    ):
        self.batch, self.kept = batch, np.arange(batch)
        given = {**(row_fields or {}), **fields, "valid_row": valid_row}
        self._columns = {name: self._array(name, column) for name, column in given.items() if column is not None}
        if valid_row is not None:
            self.keep(self.bools("valid_row"))

    def _array(self, name: str, column: Column) -> np.ndarray:
        """The column as an array, of objects unless it was an array or a tensor."""
        if len(column) != self.batch:
            raise RowFieldError(f"turn field '{name}' has {len(column)} entries for a batch of {self.batch} rows")
        if isinstance(column, torch.Tensor):
            return to_numpy(column)
        return column if isinstance(column, np.ndarray) else np.fromiter(column, dtype=object, count=self.batch)

    def keep(self, chosen: np.ndarray) -> None:
        """Drop the turns for which `chosen`, [V] bool, is False, as if their `valid_row` were."""
        self.kept = self.kept[chosen]
        self._columns = {name: column[chosen] for name, column in self._columns.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def column(self, name: str) -> np.ndarray:
        """The column of the valid turns, or MissingFieldError when it was not given."""
        if name not in self._columns:
            raise MissingFieldError(name, list(self._columns))
        return self._columns[name]

    def _numbers(self, name: str, what: str = "a number a turn", unmeasured: bool = False) -> np.ndarray:
        """A column of numbers, [V], in the dtype that holds them; None is NaN if some may be `unmeasured`."""
        array = self.column(name)
        if array.dtype == object:
            values = [value.item() if getattr(value, "ndim", None) == 0 else value for value in array]
            values = [np.nan if unmeasured and value is None else value for value in values]
            self.refuse(name, what, values, np.array([not isinstance(value, numbers.Real) for value in values]))
            array = np.array(values) if values else np.zeros(0)
        if array.ndim == 2 and array.shape[1] == 1:
            array = array[:, 0]
        if array.ndim != 1 or array.dtype.kind not in "biuf":
            raise RowFieldError(f"turn field '{name}' must be {what}, got dtype {array.dtype}, shape {array.shape}")
        return array

    def refuse(self, name: str, what: str, values: Sequence[Any] | np.ndarray, wrong: np.ndarray) -> None:
        """RowFieldError that says `what` must be in each turn and names the first valid turn that is `wrong`."""
        if wrong.any():
            row = int(np.argmax(wrong))
            value = values[row].item() if isinstance(values, np.ndarray) else values[row]
            name = f"turn field '{name}'" if name in self else name
            raise RowFieldError(f"{name} must be {what}, got {value!r} in {self.where(row)}")

    def _finite(self, name: str, values: np.ndarray) -> np.ndarray:
        self.refuse(name, "a finite number", values, ~np.isfinite(values))
        return values

    def floats(self, name: str) -> np.ndarray:
        """A column of finite numbers, [V] float64."""
        return self._finite(name, self._numbers(name).astype(np.float64))

    def measured(self, name: str) -> np.ndarray:
        """A column of numbers of which some were not measured (None or NaN: they are 0), [V] float64."""
        values = self._numbers(name, "a number a turn, or None", unmeasured=True).astype(np.float64)
        return np.where(np.isnan(values), 0.0, values)

    def bools(self, name: str) -> np.ndarray:
        """A column of booleans (or the numbers 0 and 1), [V] bool."""
        array = self._numbers(name, "True or False a turn")
        self.refuse(name, "True or False", array, (array != 0) & (array != 1))
        return array.astype(bool)

    def ints(self, name: str) -> np.ndarray:
        """A column of whole numbers, [V] int64."""
        array = self._numbers(name, "a whole number a turn")
        if array.dtype.kind == "f":
            self.refuse(name, "a whole number", array, array != np.round(array))
            self.refuse(name, "an integer, as a float is not exact beyond 2^53", array, np.abs(array) > LARGEST_EXACT)
        return array.astype(np.int64)

    def scores(self, token_level_rewards: torch.Tensor) -> np.ndarray:
        """Turn scores S_i, [V] float64: sums over the whole turn, since a rejected one keeps its score."""
        return self._finite("token_level_rewards", to_numpy(token_level_rewards).sum(-1, dtype=np.float64)[self.kept])

    def penalty(self, coefficient: float) -> np.ndarray:
        """`coefficient` where `is_action_valid` is False, else 0, [V] float64; without the column no action counts."""
        if "is_action_valid" not in self:
            return np.zeros(len(self.kept))
        return np.where(self.bools("is_action_valid"), 0.0, coefficient)

    def ids(self, name: str) -> np.ndarray:
        """Group ids by value of a column, [V] int64; RowFieldError names the field when an entry cannot be compared."""
        column = self.column(name)
        try:
            return value_ids(column)
        except (TypeError, ValueError) as error:
            raise RowFieldError(f"turn field '{name}' cannot serve as a group key: {error}") from error

    def keys(self, group_by: Sequence[str]) -> np.ndarray:
        """Joint group ids of the turn fields in `group_by`, [V] int64; MissingFieldError where one is not there."""
        return joint_ids(*[self.ids(name) for name in group_by])

    def turns(self) -> tuple[np.ndarray, np.ndarray]:
        """Trajectory ids and turn indices, each [V] int64, no two turns of a trajectory the same.

        Single-turn data, with neither `traj_uid` nor `turn_index`, is read as one trajectory of one turn a row.
        """
        if "traj_uid" not in self and "turn_index" not in self:
            self._columns["traj_uid"] = np.arange(len(self.kept))
            self._columns["turn_index"] = np.zeros(len(self.kept), dtype=np.int64)
        trajectory, turn = self.keys(TRAJECTORY), self.ints("turn_index")
        order, place = chronology(trajectory, turn)
        again = np.zeros(len(turn), dtype=bool)
        again[order[1:]] = (place[1:] > 0) & (np.diff(turn[order]) == 0)
        what = "another number in each turn of a trajectory, in time's order over all agents (copies: valid_row False)"
        self.refuse("turn_index", what, turn, again)
        return trajectory, turn

    def where(self, row: int) -> str:
        """Words for the row at position `row` of the valid ones: its batch position, uid, trajectory and turn."""
        words = [f"{label} {self._columns[name][row]}" for name, label in LABELS.items() if name in self]
        return f"row {int(self.kept[row])}" + (f" ({', '.join(words)})" if words else "")


@dataclass(frozen=True, eq=False)
class Advantage:
    """What a method returns; unpacks and indexes as the pair (advantages, returns) that verl expects.

    Attributes:
        advantages, returns: [B, T] float32.
        rows: the `Rows` that the method compared; `rows.kept` are the [V] positions of the samples.
        groups: [V] int64 group ids of the samples.
        details: what else the method's metrics read, by name.
    """

    advantages: torch.Tensor
    returns: torch.Tensor
    rows: Rows
    groups: np.ndarray
    details: Mapping[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter((self.advantages, self.returns))

    def __getitem__(self, which: int) -> torch.Tensor:
        return (self.advantages, self.returns)[which]

    @classmethod
    def of_rows(
        cls, values: np.ndarray, response_mask: torch.Tensor, rows: Rows, groups: np.ndarray, **details: Any
    ) -> Advantage:
        """One value a sample, [V] float64, on all model tokens of its turn; returns are the same tensor."""
        beyond = ~(np.abs(values) <= np.finfo(np.float32).max)
        rows.refuse("the advantage", "within float32 (scale the rewards)", values, beyond)
        batch = torch.zeros(rows.batch, 1)
        batch[torch.from_numpy(rows.kept), 0] = torch.from_numpy(values.astype(np.float32))
        tokens = (batch.to(response_mask.device) * response_mask.detach()).to(torch.float32)
        return cls(tokens, tokens, rows, groups, details)
