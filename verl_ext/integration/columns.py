# SPDX-License-Identifier: Apache-2.0
"""Turn fields on verl's V1 trainer: where each column comes from, and how it reaches an estimator.

A row is a turn, one model call. verl stores sequences of one or several (`verl_ext.integration.turns`) under the key
``{uid}_{session}_{index}`` and hands a registered estimator four arguments. `row_fields` reads the rest: ``traj_uid``
and ``turn_index`` from the key, the others from the agent loop's ``extra_fields``. `active` holds them while verl calls
the estimator, which fills in what it was not given.
"""

from __future__ import annotations

import numbers
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl_ext.integration.turns import Turns

FROM_KEY = ("traj_uid", "turn_index")
FROM_EXTRA_FIELDS = ("agent_id", "anchor_obs", "turn_reward", "is_action_valid", "valid_row")
TOKEN_COLUMNS = ("old_log_probs", "rollout_log_probs", "sum_pi_squared", "rollout_is_weights", "entropy")
NAMES = FROM_KEY + FROM_EXTRA_FIELDS + TOKEN_COLUMNS


VALID = "verl_ext_valid"
"""Tag of a sequence, False where the agent loop says ``valid_row: false``; padding carries verl's ``is_padding``."""
EMPTY = "verl_ext_empty"
"""Tag of a sequence, True where it has no token of a model, as of a call to which the engine gave none."""


class RowFieldMissing(ValueError):
    """An estimator needs a column that the batch does not carry."""


class BatchError(ValueError):
    """A batch cannot be trained on. The message names the prompt, the trajectory and the turn."""


def is_real(tag: Mapping[str, Any]) -> bool:
    """Whether a sequence is a model's and not one that verl made to fill a mini-batch."""
    return not tag.get("is_padding", False)


def is_trained(tag: Mapping[str, Any]) -> bool:
    """Whether a sequence is trained on: neither padding nor taken out by its agent loop."""
    return is_real(tag) and bool(tag.get(VALID, True))


def has_token(tag: Mapping[str, Any]) -> bool:
    """Whether a sequence is trained on and has a token for it."""
    return is_trained(tag) and not tag.get(EMPTY, False)


def split_key(key: str) -> tuple[str, str, int]:
    """Split verl's storage key into (uid, traj_uid, turn_index).

    Args:
        key: ``{uid}_{session}_{index}``; the uid may itself contain underscores.

    Raises:
        ValueError: the key does not have verl's form.
    """
    parts = key.rsplit("_", 2)
    if len(parts) != 3 or not parts[2].isdigit():
        raise ValueError(f"storage key {key!r} does not read {{uid}}_{{session}}_{{index}}")
    uid, session, index = parts
    return uid, f"{uid}_{session}", int(index)


def _objects(values: Sequence[Any]) -> np.ndarray:
    """A one-dimensional object array, also for values that are sequences themselves."""
    return np.fromiter(values, dtype=object, count=len(values))


def row_fields(
    keys: Sequence[str], tags: Sequence[Mapping[str, Any]], extra_fields: Sequence[Any] | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Turn fields of a batch, in the order of `keys`.

    Args:
        keys: storage keys, one a turn.
        tags: verl's tags of their sequences; ``is_padding`` marks those that verl made to fill a mini-batch.
        extra_fields: the agent loop's dict of every turn, or None when no turn carries any.

    Returns:
        ``(columns, missing)``: arrays of length B (object, int64, float64 or bool) by field name, and for every
        field that is not there for all real turns the reason, naming a turn that lacks it. ``valid_row`` is always
        there: False for padding and where the agent loop says so. ``is_action_valid`` defaults to True.
    """
    size = len(keys)
    split = [split_key(key) for key in keys]
    padding = np.array([not is_real(tag) for tag in tags], dtype=bool)
    columns: dict[str, Any] = {"traj_uid": _objects([traj for _, traj, _ in split])}
    rows = [{} if row is None else row for row in (extra_fields or [{}] * size)]
    columns["turn_index"] = np.array([turn(key, row) for key, row in zip(keys, rows, strict=True)], dtype=np.int64)
    missing: dict[str, str] = {}
    for name in FROM_EXTRA_FIELDS:
        lacking = [i for i in range(size) if row_lacks(rows[i], name) and not padding[i]]
        if lacking:
            if name in ("is_action_valid", "valid_row"):
                continue
            missing[name] = (
                f"{len(lacking)} of {size - int(padding.sum())} turns lack it, the first is {keys[lacking[0]]}"
            )
        else:
            columns[name] = _objects([rows[i].get(name) for i in range(size)])
    if not all(row_lacks(row, "agent_reward") for row in rows):
        columns["agent_reward"] = _objects([row.get("agent_reward") for row in rows])
    for name in ("is_action_valid", "valid_row"):
        columns[name] = np.array([truth(row, name, key) for key, row in zip(keys, rows, strict=True)], dtype=bool)
    columns["valid_row"] &= ~padding
    if "agent_reward" in columns:
        _same_for_a_prompt(columns["agent_reward"], columns["valid_row"], keys)
    if "turn_reward" in columns:
        columns["turn_reward"] = np.array(
            [0.0 if padding[i] else float(value) for i, value in enumerate(columns["turn_reward"])], dtype=np.float64
        )
    return columns, missing


def _same_for_a_prompt(rewards: np.ndarray, valid_row: np.ndarray, keys: Sequence[str]) -> None:
    """Raises BatchError: of the samples of one prompt some have an ``agent_reward``, and others none."""
    prompts: dict[str, str] = {}  # with such rewards, and a turn
    lacking: dict[str, str] = {}
    for key, reward, valid in zip(keys, rewards, valid_row, strict=True):
        if valid:
            (lacking if reward is None else prompts).setdefault(split_key(key)[0], key)
    for prompt in prompts.keys() & lacking.keys():
        raise BatchError(
            f"turn {lacking[prompt]} has no agent_reward, but turn {prompts[prompt]} of the same prompt has one. Where "
            "agents have a reward each, every turn needs its agent's, also those of a trajectory that failed."
        )


def row_lacks(row: Mapping[str, Any], name: str) -> bool:
    """Whether the agent loop left the field out (or None) for this turn."""
    return row.get(name) is None


def turn(key: str, row: Mapping[str, Any]) -> int:
    """The turn's index: ``turn_index`` of the agent loop, as for calls made side by side, or its place in the key.
    Raises BatchError: what the agent loop gave is no whole number."""
    value = split_key(key)[2] if row_lacks(row, "turn_index") else row["turn_index"]
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    raise BatchError(f"turn_index of turn {key} is {value!r}; an agent loop gives a whole number, or none at all.")


def truth(row: Mapping[str, Any], name: str, key: str) -> bool:
    """A field that is true or false, True where the agent loop left it out. Raises BatchError: it is text, NaN or a
    number other than 0 and 1; ``bool("False")`` would be True."""
    value = True if row_lacks(row, name) else row[name]
    if isinstance(value, bool | int | float | np.bool_ | np.number) and value in (0, 1):
        return bool(value)
    raise BatchError(f"{name} of turn {key} is {value!r}; an agent loop gives true or false.")


def own_trajectories(columns: Mapping[str, Any]) -> np.ndarray:
    """[B] object, the trajectory along which a turn's return runs: ``traj_uid``, `of_agents`."""
    return of_agents(columns["traj_uid"], columns)


def of_agents(uids: np.ndarray, columns: Mapping[str, Any]) -> np.ndarray:
    """`uids` [B] of trajectories or prompts, or where agents have rewards each (``agent_reward``), of the turns of its
    agent in it. Raises BatchError: turns have such a reward and no ``agent_id``."""
    if "agent_reward" not in columns:
        return uids
    if "agent_id" not in columns:
        raise BatchError("turns have an agent_reward, but not all have an agent_id; an agent loop gives both.")
    rows = zip(uids, columns["agent_id"], columns["agent_reward"], strict=True)
    return _objects([uid if reward is None else f"{uid}.{agent}" for uid, agent, reward in rows])


def own_rewards(scores: np.ndarray, columns: Mapping[str, Any]) -> np.ndarray:
    """[B] float64, `scores` [B] of the turns' trajectories, or where agents have rewards each (``agent_reward``), those
    of their agents."""
    own = columns.get("agent_reward", [None] * len(scores))
    return np.array([score if one is None else one for score, one in zip(scores, own, strict=True)], dtype=np.float64)


def one_row_each(traj_uid: np.ndarray, valid_row: np.ndarray, of: np.ndarray) -> bool:
    """Whether the turns `of` [B] bool are the only ones of their trajectories, as in single-turn data."""
    rows = Counter(traj_uid[valid_row].tolist())
    return all(rows[one] == 1 for one in traj_uid[of].tolist())


@dataclass
class ActiveBatch:
    """What a registered estimator may ask for while verl computes the advantages of a batch; a row is a turn.

    Attributes:
        columns: turn fields and token columns by name.
        missing: for a field that is not there, why.
        extra_fields: [B] what the agent loop said of each turn, {} for padding.
        component: computes another registered estimator on this batch exactly as verl would; set by the trainer.
        metrics: an estimator's own metrics go here, under verl's ``name/part`` scheme.
        earned: ``valid_row``, ``score`` and, where it is known, ``turn_reward`` without KL in the reward, and before
            `train_agents` takes turns out.
        turns: where they lie in the sequences that verl has stored.
        keys: [B] storage keys of the turns, as if verl had stored each; its last number is the output of the loop.
        tags: [B] verl's tags of their sequences.
        stored, said: storage keys and ``extra_fields`` of the sequences.
        along: whether gae runs along the trajectory, over the turns.
    """

    columns: dict[str, Any]
    missing: dict[str, str] = field(default_factory=dict)
    extra_fields: Sequence[Mapping[str, Any]] = ()
    component: Callable[[str], tuple[torch.Tensor, torch.Tensor]] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    earned: dict[str, Any] = field(default_factory=dict)
    turns: Turns = field(default_factory=Turns)
    keys: Sequence[str] = ()
    tags: Sequence[Mapping[str, Any]] = ()
    stored: Sequence[str] = ()
    said: Sequence[Mapping[str, Any]] = ()
    along: bool = False

    def column(self, name: str) -> Any:
        """A column by name, or None. One that is not in `NAMES` is what the agent loops said of each turn.

        A turn that is no sample may lack it; where another does, `missing` says so.
        """
        if name not in self.columns and name not in NAMES and self.extra_fields:
            sample = self.columns["valid_row"]
            lacking = [row for row, said in enumerate(self.extra_fields) if row_lacks(said, name) and sample[row]]
            if lacking:
                others = sorted({key for said in self.extra_fields for key in said})
                self.missing[name] = f"{len(lacking)} of {sum(sample)} turns lack it; they have {', '.join(others)}"
            else:
                self.columns[name] = _objects([said.get(name) for said in self.extra_fields])
        return self.columns.get(name)

    def select(self, rows: torch.Tensor) -> ActiveBatch:
        """The batch of the `rows` [R] int64 alone; metrics are shared."""
        places = rows.tolist()
        return ActiveBatch(
            columns={n: c[rows if isinstance(c, torch.Tensor) else rows.numpy()] for n, c in self.columns.items()},
            missing=self.missing,
            extra_fields=[self.extra_fields[row] for row in places] if self.extra_fields else (),
            metrics=self.metrics,
        )


_current: ContextVar[ActiveBatch | None] = ContextVar("verl_ext_active_batch", default=None)


@contextmanager
def active(batch: ActiveBatch) -> Iterator[ActiveBatch]:
    """Make `batch` the one that estimators read inside the block."""
    token = _current.set(batch)
    try:
        yield batch
    finally:
        _current.reset(token)


def current() -> ActiveBatch | None:
    """The batch of the running advantage computation, or None when an estimator is called by hand."""
    return _current.get()


def batch_of(estimator: str) -> ActiveBatch | None:
    """The batch that `estimator` is called for: `current`, or None when it is called by hand.

    Raises:
        RowFieldMissing: it is called in a training process, but not by our trainer, so that it has no turn fields and
            would have to guess: TRLOO, for one, would take every turn for a trajectory of one turn.
    """
    batch = current()
    if os.environ.get("VERL_EXT_STRICT") == "1" and (batch is None or (batch.component is None and estimator == "mix")):
        raise RowFieldMissing(
            f"the estimator {estimator!r} was called in a training process without the turn fields of the batch. They "
            "come from verl_ext's part of verl's V1 trainer: set trainer.use_v1=true, and have a trainer class of "
            "your own registered (verl's @register_trainer) before the run starts."
        )
    return batch


HOW_TO_PROVIDE = {
    "turn_reward": "put the reward of each turn in AgentLoopOutput.extra_fields['turn_reward'] (verl overwrites "
    "reward_score of all but the last output)",
    "agent_id": "put the agent's name in AgentLoopOutput.extra_fields['agent_id']",
    "anchor_obs": "put the raw observation in AgentLoopOutput.extra_fields['anchor_obs']",
    "prompt_index": "put the prompt's place in the data (extra_info.index) in AgentLoopOutput.extra_fields["
    "'prompt_index'], as the loop verl_ext_kernels does",
    "sum_pi_squared": "use the recipe `otb` (its trainer asks the engine for it), without bypass mode and without "
    "fused kernels",
}


def demand(name: str, method: str) -> RowFieldMissing:
    """The error for a column that `method` needs and the batch does not have."""
    batch = current()
    why = f" ({batch.missing[name]})" if batch is not None and name in batch.missing else ""
    how = HOW_TO_PROVIDE.get(name, f"pass {name}=... or put it in AgentLoopOutput.extra_fields[{name!r}]")
    return RowFieldMissing(f"{method} needs the turn field {name!r}, which this batch does not carry{why}: {how}.")
