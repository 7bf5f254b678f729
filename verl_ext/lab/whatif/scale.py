# SPDX-License-Identifier: Apache-2.0
"""How much of the return is in an advantage: the scale of an estimator, which a learning rate makes up for.

Of the gradient E[A grad log pi] the part along the true one is E[A (G - mu)] of a sample, with G its return and mu the
mean return of its like. It is the same for every baseline that the sample itself has no part in, ideal or noisy. To
measure A against the leave-one-out mean L instead would take the noise of L for its scale, and nothing could be quieter
than L. Samples that are alike are the turns of a prompt with one index (the groups of L); with sums over them

    inside = sum W (alpha - mean alpha) (G - mean G)        alpha = sum_t w A / W,   W = sum_t w,   means weighted by W
    signal = inside (1 + follows nu / (1 - nu))        nu = sum W^2 / (sum W)^2, 1/n for equal weights

The second factor is what the means of alpha and of G have in common. It cannot be read off the advantages: a baseline
of the group holds their mean at 0 (follows = 0), one from elsewhere lets it go with the mean return (follows = 1).
`follows`, of each group, is measured, by putting a copy of another trajectory in the place of one and calling the
estimator again.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from verl_ext.integration.columns import split_key
from verl_ext.lab.whatif.records import Record
from verl_ext.methods.groups import joint_ids, value_ids

PLACES = 8
"""Trajectories of a prompt that a copy takes the place of, at most; each is a further batch for every estimator."""


@dataclasses.dataclass(frozen=True)
class Alike:
    """The turns of a record that are compared with each other, and their returns."""

    group: np.ndarray  # [B] int64, contiguous from 0
    size: np.ndarray  # [B], turns of the turn's group
    G: np.ndarray  # [B], the return less the mean of its group; 0 in a group of one

    def mean(self, values: np.ndarray, power: np.ndarray) -> np.ndarray:
        """The group's mean of `values` [B] with the weights `power` [B], [B]; 0 where all of them are 0."""
        total, weight = (np.bincount(self.group, weights=one) for one in (values * power, power))
        return (total / np.where(weight > 0, weight, 1.0))[self.group]


def alike(record: Record, loo: np.ndarray, turns: bool) -> Alike:
    """The groups in which the leave-one-out advantages `loo` [B] were formed: of a prompt and, with `turns`, a turn."""
    split = [split_key(key) for key in record.keys]
    prompt = value_ids([uid for uid, _, _ in split])
    turn = value_ids(record.columns.get("turn_index", np.array([k for _, _, k in split])))
    group = joint_ids(prompt, turn) if turns else prompt
    size = np.bincount(group)[group]
    return Alike(group, size, loo * (size - 1) / size)


def replaced(
    trajectory: np.ndarray, prompt: np.ndarray, places: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Batches in which one trajectory of each prompt has given way to a copy of the next one.

    Args:
        trajectory: [B] of each turn.
        prompt: [M] of each trajectory.
        places: [M] number of each trajectory within its prompt.

    Returns:
        positions of turns [R], the batch of each, and whether it is the copy.
    """
    sizes = np.bincount(prompt)[prompt]
    rows, batches, again = [], [], []
    for place in range(min(PLACES, int(sizes.max()))):
        gone = (places == place) & (sizes > 1)
        copied = (places == (place + 1) % sizes) & (sizes > place) & (sizes > 1)
        for chosen, copy in ((~gone, False), (copied, True)):
            found = chosen[trajectory].nonzero()[0]
            rows.append(found)
            batches.append(np.full(len(found), place))
            again.append(np.full(len(found), copy))
    return np.concatenate(rows), np.concatenate(batches), np.concatenate(again)


def signal(
    rows: Alike, power: np.ndarray, inner: np.ndarray, at: np.ndarray, batch: np.ndarray, alpha: np.ndarray
) -> float:
    """`signal` of a record.

    Args:
        rows: of the record.
        power: W [B].
        inner: sum_t w A [B].
        at, batch: [R] of `replaced`.
        alpha: in those batches, [R].
    """
    group = rows.group
    weight, squares = np.bincount(group, weights=power), np.bincount(group, weights=power**2)
    deviation = rows.G - rows.mean(rows.G, power)
    inside = np.bincount(group, weights=inner * deviation)
    does, would = _changes(rows, power, inner, at, batch, alpha)
    # Of a group that no copy has changed, as few of its trajectories came so far, what the others say.
    whole = float(weight @ would)
    others = float(weight @ does) / whole if whole > 0 else 0.0
    known = np.abs(would) > 1e-9 * np.abs(would).max(initial=0.0)
    follows = np.where(known, does / np.where(known, would, 1.0), others).clip(0.0, 1.0)
    return float((inside * (1 + follows * squares / np.maximum(weight**2 - squares, 1e-9 * weight**2 + 1e-300))).sum())


def _changes(
    rows: Alike, power: np.ndarray, inner: np.ndarray, at: np.ndarray, batch: np.ndarray, alpha: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of each group, summed over the batches that leave it as large as it was: the change of the mean return times that
    of the mean of alpha, and times what that would be if no other turn's advantage changed.
    """
    width, groups = int(batch.max(initial=0)) + 1, int(rows.group.max()) + 1
    key = rows.group[at] * width + batch

    def of(values: np.ndarray) -> np.ndarray:
        return np.bincount(key, weights=values, minlength=groups * width).reshape(groups, width)

    weight, powers = of(power[at]), np.bincount(rows.group, weights=power)[:, None]
    size = np.bincount(rows.group)[:, None]
    same = (of(np.ones(len(at))) == size) & (size > 1) & (weight > 0) & (powers > 0)

    def change(new: np.ndarray, old: np.ndarray) -> np.ndarray:
        whole = np.bincount(rows.group, weights=old)[:, None] / np.where(powers > 0, powers, 1.0)
        return np.where(same, of(new) / np.where(same, weight, 1.0) - whole, 0.0)

    returns = change((power * rows.G)[at], power * rows.G)
    does, would = change(alpha * power[at], inner), change(inner[at], inner)
    return (returns * does).sum(1), (returns * would).sum(1)
