# SPDX-License-Identifier: Apache-2.0
"""What estimators make of the same rows: scale, agreement, who is moved, and how noisy the gradient would be.

The gradient is seen through the logits (arXiv 2506.12912; verl's variance proxy): token t of a row moves its logits by
A_t (onehot(y_t) - pi_t), whose squared length is A_t^2 w_t with the energy w = 1 - 2 pi(y) + sum pi^2. The tokens'
gradients count as orthogonal, so that a sum of them has the squared length sum A^2 w; without sum_pi_squared w is 1.
Estimators differ in scale, which a learning rate makes up for, so all are compared at the scale of a reference, the
leave-one-out mean L (TRLOO, which is RLOO on single-turn data, and unbiased):

    scale = sum_i a_i l_i / sum_i l_i^2                    a, l: row means of A and L
    noise = (sum A^2 w / scale^2) / (sum L^2 w)            1: as the reference; less: the baseline takes more off

A method that weighs prompts by something else than their rewards (GRPO's standard deviation) has another aim, and its
noise contains the difference.

The same for smaller groups, of `group` trajectories drawn without replacement from those of a prompt, many times: c is
a token's A where its trajectory is drawn and 0 where it is not, E and Var are over the draws.

    variance = sum w Var(c) at the scale of E(c), divided by the reference's
    company  = sum w Var(A | drawn) / sum w E(A^2 | drawn)     what of A is the luck of who else was drawn
    cosine   = of E(c) with L of all trajectories               1: small groups point where the whole one does
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas
import torch

from verl_ext.integration.columns import BatchError, split_key
from verl_ext.integration.metrics import effective_sample_size
from verl_ext.methods.groups import value_ids
from verl_ext.whatif.records import Record, advantages, known


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    records: Sequence[Record]
    reference: str  # name of the estimator that the others are measured against
    group: int  # trajectories in a drawn group, 0 where none was drawn
    energies: bool  # whether the records hold sum_pi_squared
    estimators: dict[str, dict[str, Any]]  # name: statistics (`compare` has them)
    # of the advantages over all model tokens, None where one is constant
    correlation: dict[str, dict[str, float | None]]
    refused: dict[str, str]  # name: why it cannot run on these rows
    advantages: dict[str, list[torch.Tensor]]  # name: [B, T] float64 of each record
    leave_one_out: list[torch.Tensor]  # those of the reference


def compare(records: Sequence[Record], names: Sequence[str] = (), *, draws: int = 32, group: int = 0) -> Comparison:
    """Call estimators on recorded batches and compare their advantages.

    Args:
        records: one or more.
        names: of registered estimators; none: all.
        draws: of smaller groups; 0: none.
        group: trajectories in a drawn group; 0: half of those of the prompt that has the most.

    Returns:
        `Comparison`; of each estimator ``std`` and ``max_abs`` of A over model tokens, ``effective_rows`` (Kish, of the
        rows' sums of A^2), ``zero_row_share`` (rows whose A is 0), ``agents`` and ``turns`` (shares of the sum of |A|),
        ``scale`` and ``noise``, and of smaller groups ``resampled`` with ``variance``, ``company`` and ``cosine``. None
        stands for what cannot be said, as without any signal or without groups to draw from.

    Raises:
        RecordError: a name is not registered.
        BatchError: nothing can be compared, as no leave-one-out mean can be formed.
    """
    found: dict[str, list[torch.Tensor]] = {}
    refused: dict[str, str] = {}
    for name in known(names, records[0].algorithm):
        try:
            found[name] = [advantages(record, name) for record in records]
        except BatchError as error:
            refused[name] = str(error)
    reference, loo = _leave_one_out(records)
    masks = [record.tokens["response_mask"].bool() for record in records]
    energies = all({"sum_pi_squared", "old_log_probs"} <= record.tokens.keys() for record in records)

    def flat(each: Sequence[torch.Tensor]) -> np.ndarray:
        return torch.cat([one[mask] for one, mask in zip(each, masks, strict=True)]).numpy()

    starts = np.cumsum([0, *(len(record.keys) for record in records)])
    row = flat(
        [torch.arange(len(m))[:, None].expand(m.shape) + s for m, s in zip(masks, starts.tolist(), strict=False)]
    )
    rows = int(starts[-1])
    length = np.maximum(np.bincount(row, minlength=rows), 1)
    w = flat([_energy(record) for record in records]) if energies else np.ones(len(row))
    base = flat(loo)
    base_rows = np.bincount(row, weights=base, minlength=rows) / length

    def scale_of(a: np.ndarray) -> float:
        """`scale` of advantages of all tokens; 0 where there is no signal."""
        signal = float(base_rows @ base_rows)
        return float(np.bincount(row, weights=a, minlength=rows) / length @ base_rows) / signal if signal else 0.0

    def at_scale(energy: float, scale: float, reference: float) -> float | None:
        return energy / scale**2 / reference if scale > 1e-9 and reference > 0 else None

    labels = {"agents": _labels(records, "agent_id"), "turns": _labels(records, "turn_index")}
    statistics: dict[str, dict[str, Any]] = {}
    for name, each in found.items():
        a = flat(each)
        squares, size = (np.bincount(row, weights=one, minlength=rows) for one in (a**2, np.abs(a)))
        scale = scale_of(a)
        statistics[name] = {
            "std": float(a.std()) if len(a) else 0.0,
            "max_abs": float(np.abs(a).max(initial=0.0)),
            "effective_rows": effective_sample_size(squares),
            "zero_row_share": float((squares == 0).mean()),
            **{what: _shares(size, one) for what, one in labels.items()},
            "scale": scale,
            "noise": at_scale(float(w @ a**2), scale, float(w @ base**2)),
            "resampled": None,
        }

    group = group or max(int(_trajectories(record)[2].max()) for record in records) // 2
    drawn = _draw(records, found, reference, draws, group) if draws and group > 1 else {}
    if drawn:

        def moments(name: str) -> tuple[float, float, float, np.ndarray]:
            """sum w Var(c) and its scale, company, E(c)."""
            times, total, squares = (flat([sums[k] for sums in drawn[name]]) for k in range(3))
            given = total / np.maximum(times, 1)
            spread = float(w @ (squares / draws - (total / draws) ** 2))
            power = float(w @ squares)
            return spread, scale_of(given), 1 - float(w @ (total * given)) / power if power else 0.0, total / draws

        spread, scale, _, _ = moments("")
        unit = spread / scale**2 if scale else 0.0
        whole = np.where(flat([sums[0] for sums in drawn[""]]) > 0, base, 0.0)
        for name in found.keys() & drawn.keys():
            own, own_scale, company, mean = moments(name)
            norms = float(w @ mean**2) * float(w @ whole**2)
            statistics[name]["resampled"] = {
                "variance": at_scale(own, own_scale, unit),
                "company": company,
                "cosine": float(w @ (mean * whole)) / norms**0.5 if norms else None,
            }
    correlation = _correlation({name: flat(each) for name, each in found.items()})
    group = group if drawn else 0
    return Comparison(records, reference, group, energies, statistics, correlation, refused, found, loo)


def _leave_one_out(records: Sequence[Record]) -> tuple[str, list[torch.Tensor]]:
    """The reference, under its published options: TRLOO, or RLOO over rows where turns have no rewards."""
    reasons = []
    for name in ("trloo", "rloo"):
        try:
            return name, [advantages(record, name, _published(record)) for record in records]
        except BatchError as error:
            reasons.append(f"{name}: {error}")
    raise BatchError(f"no leave-one-out mean can be formed ({'; '.join(reasons)})")


def _published(record: Record) -> Any:
    algorithm = copy.deepcopy(record.algorithm)
    algorithm.pop("trloo", None)
    return algorithm


def _energy(record: Record) -> torch.Tensor:
    """w, [B, T] float64."""
    old, squares = record.tokens["old_log_probs"].double(), record.tokens["sum_pi_squared"].double()
    return (1 - 2 * old.exp() + squares).clamp(min=0)


def _labels(records: Sequence[Record], field: str) -> list[str]:
    """A row field of all rows as text; none where a record lacks it."""
    there = all(field in record.columns for record in records)
    return [str(value) for record in records for value in record.columns[field]] if there else []


def _shares(size: np.ndarray, labels: Sequence[str]) -> dict[str, float]:
    """The share of each label in the sum of `size` [B]; 0 for all where that is 0."""
    if not labels:
        return {}
    parts = pandas.Series(size).groupby(list(labels)).sum() / (size.sum() or 1.0)
    return {name: float(parts[name]) for name in sorted(parts.index, key=_by_number)}


def _by_number(name: str) -> tuple[bool, int, str]:
    return (False, int(name), "") if name.isdecimal() else (True, 0, name)


def _correlation(tokens: dict[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    """Pearson's, of each pair; None where one does not vary."""
    alive = {}
    for name, a in tokens.items():
        centred = a - a.mean() if len(a) else a
        norm = float(np.linalg.norm(centred))
        if norm > 1e-9 * float(np.linalg.norm(a)) > 0:
            alive[name] = centred / norm
    return {a: {b: float(alive[a] @ alive[b]) if {a, b} <= alive.keys() else None for b in tokens} for a in tokens}


def _trajectories(record: Record) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Trajectory of each row [B], prompt of each trajectory [M], trajectories of each prompt [P]."""
    split = [split_key(key) for key in record.keys]
    trajectory = value_ids([traj for _, traj, _ in split])
    _, first = np.unique(trajectory, return_index=True)
    prompt = value_ids([uid for uid, _, _ in split])[first]
    return trajectory, prompt, np.bincount(prompt)


def _draw(
    records: Sequence[Record], names: Collection[str], reference: str, draws: int, group: int
) -> dict[str, list[torch.Tensor]]:
    """Draw smaller groups of the prompts with more than `group` trajectories and call the estimators on them, all on
    the same draws. Of each estimator that can run on them, and of the reference as "", for each record [3, B, T]
    float64: how often a row was drawn, and sum and sum of squares of its advantages. Nothing where no prompt has
    enough.
    """
    generator = np.random.default_rng(0)
    chosen = [_chosen(record, draws, group, generator) for record in records]
    if not any(one.any() for one in chosen):
        return {}
    out = {}
    for name in ("", *names):
        try:
            out[name] = [
                _sums(record, one, name or reference, not name) for record, one in zip(records, chosen, strict=True)
            ]
        except BatchError:
            if not name:
                raise
    return out


def _chosen(record: Record, draws: int, group: int, generator: np.random.Generator) -> np.ndarray:
    """Rows of the drawn trajectories, [draws, B] bool: `group` of each prompt that has more."""
    trajectory, prompt, sizes = _trajectories(record)
    order = np.lexsort((generator.random((draws, len(prompt))), np.broadcast_to(prompt, (draws, len(prompt)))))
    place = np.arange(len(prompt)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = np.zeros((draws, len(prompt)), dtype=bool)
    np.put_along_axis(chosen, order, np.broadcast_to(place < group, chosen.shape), axis=1)
    return (chosen & (sizes > group)[prompt])[:, trajectory]


def _sums(record: Record, chosen: np.ndarray, name: str, published: bool) -> torch.Tensor:
    """Of one record and estimator what `_draw` returns, some four million tokens at a time."""
    mask = record.tokens["response_mask"]
    sums = torch.zeros(3, *mask.shape, dtype=torch.float64)
    step = max(1, 2**22 // mask.numel())
    for start in range(0, len(chosen), step):
        copies, rows = chosen[start : start + step].nonzero()
        if len(rows):
            a = advantages(record.drawn(rows, copies), name, _published(record) if published else None)
            where = torch.from_numpy(rows)
            for k, one in enumerate((torch.ones_like(a), a, a.square())):
                sums[k].index_add_(0, where, one)
    return sums
