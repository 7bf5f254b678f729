# SPDX-License-Identifier: Apache-2.0
"""What estimators make of the same turns: scale, agreement, who is moved, and how noisy the gradient would be.

The gradient is seen through the logits (arXiv 2506.12912; verl's variance proxy): token t of a turn moves its logits by
A_t (onehot(y_t) - pi_t), whose squared length is A_t^2 w_t with the energy w = 1 - 2 pi(y) + sum pi^2. The tokens'
gradients count as orthogonal, so that a sum of them has the squared length sum A^2 w; without sum_pi_squared w is 1.
Estimators differ in scale, which a learning rate makes up for, so all are compared at the scale of a reference, the
leave-one-out mean L (TRLOO, which is RLOO on single-turn data, and unbiased):

    scale = signal(A) / signal(L)                      signal: `verl_ext.lab.whatif.scale`, about sum w A (G - mu)
    noise = (sum A^2 w / scale^2) / (sum L^2 w)        1: as the reference; less: the baseline takes more off

All sums are over the turns that have others to be compared with. A method that weighs prompts by something else than
their rewards (GRPO's standard deviation) has another aim, and its noise contains the difference.

The same for smaller groups, of `group` trajectories drawn without replacement from those of a prompt, many times: c is
a token's A where its trajectory is drawn and 0 where it is not, E and Var are over the draws, and mu is the mean return
of the trajectories that were not drawn, of which A knows nothing.

    variance = sum w Var(c) at equal scale, divided by the reference's
    company  = sum w Var(A | drawn) / sum w E(A^2 | drawn)     what of A is the luck of who else was drawn
    cosine   = of E(c) with L of all trajectories               1: small groups point where the whole one does

The draws' own noise is taken out of Var and of |E(c)|^2, as they are estimated from few of them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas
import torch

from verl_ext.integration.columns import BatchError, split_key
from verl_ext.integration.metrics import effective_sample_size, zero_share
from verl_ext.lab.whatif.records import Record, RecordError, advantages, known
from verl_ext.lab.whatif.scale import Alike, alike, replaced, signal
from verl_ext.methods.groups import value_ids

TOKENS_AT_ONCE = 2**22
SAME = 1e-5  # of the largest advantage: what sums in another order may change


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
    refused: dict[str, str]  # name: why it cannot run on these turns
    advantages: dict[str, list[torch.Tensor]]  # name: [B, T] float64 of each record
    leave_one_out: list[torch.Tensor]  # those of the reference
    rows: list[Alike]  # of each record
    swaps: list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # of each record, `verl_ext.lab.whatif.scale.replaced`
    alphas: dict[str, list[np.ndarray]]  # name, "" for the reference: alpha in those batches, of each record


def compare(records: Sequence[Record], names: Sequence[str] = (), *, draws: int = 256, group: int = 0) -> Comparison:
    """Call estimators on recorded batches and compare their advantages.

    Args:
        records: one or more.
        names: of registered estimators; none: all.
        draws: of smaller groups; 0: none.
        group: trajectories in a drawn group; 0: half of those of the prompt that has the most.

    Returns:
        `Comparison`; of each estimator ``std`` and ``max_abs`` of A over model tokens, ``effective_turns`` (Kish, of
        the turns' sums of A^2), ``zero_turn_share`` (turns whose A is 0), ``agents`` and ``turns`` (shares of the sum
        of |A|), ``scale`` and ``noise``, and of smaller groups ``resampled`` with ``variance``, ``company`` and
        ``cosine``. None stands for what cannot be said, as without any signal or without groups to draw from.

    Raises:
        RecordError: a name is not registered, or no `group` can be drawn.
        BatchError: nothing can be compared, as no leave-one-out mean can be formed.
    """
    found: dict[str, list[torch.Tensor]] = {}
    refused: dict[str, str] = {}
    wanted = known(names, [record.algorithm for record in records])
    group = _checked(group, records) if draws else 0
    for name in wanted:
        try:
            found[name] = [advantages(record, name) for record in records]
        except BatchError as error:
            refused[name] = str(error)
    reference, loo = _leave_one_out(records)
    energies = all({"sum_pi_squared", "old_log_probs"} <= record.tokens.keys() for record in records)
    batches = _Batches.of(records, loo, energies, reference == "trloo")
    swaps = [replaced(*_trajectories(record)) for record in records]

    def alphas_of(name: str, published: bool, alone: bool) -> list[np.ndarray]:
        each = zip(batches.each, swaps, strict=True)
        return [_alpha(batch, name, *swap, published=published, alone=alone) for batch, swap in each]

    alphas = {"": alphas_of(reference, True, False)}
    unit, moment = batches.signal(loo, swaps, alphas[""]), batches.power(loo)
    labels = {"agents": _labels(records, "agent_id"), "turns": _labels(records, "turn_index")}
    statistics: dict[str, dict[str, Any]] = {}
    alone: dict[str, bool] = {}
    for name, each in found.items():
        a, size = batches.flat(each), _of_rows([one.abs() for one in each])
        alone[name] = any(_batch_wide(*one, name) for one in zip(records, each, strict=True))
        alphas[name] = alphas_of(name, False, alone[name])
        scale = batches.signal(each, swaps, alphas[name]) / unit if unit > 0 else None
        statistics[name] = {
            "std": float(a.std()) if len(a) else 0.0,
            "max_abs": float(np.abs(a).max(initial=0.0)),
            "effective_turns": effective_sample_size(_of_rows([one**2 for one in each])),
            "zero_turn_share": zero_share(_cat([one.abs().amax(1) for one in each])),
            **{what: _shares(size, one) for what, one in labels.items()},
            "scale": scale,
            "noise": at_scale(batches.power(each), scale or 0.0, moment),
            "resampled": None,
        }

    drawn = _draw(batches.each, alone, reference, draws, group) if group else {}
    for name, resampled in _resampled(drawn, [batch.energy for batch in batches.each], loo, draws).items():
        statistics[name]["resampled"] = resampled
    correlation = _correlation({name: batches.flat(each) for name, each in found.items()})
    rows = [batch.rows for batch in batches.each]
    group = group if drawn else 0
    return Comparison(
        records, reference, group, energies, statistics, correlation, refused, found, loo, rows, swaps, alphas
    )


def at_scale(energy: float, scale: float, reference: float) -> float | None:
    """A second moment or variance at the scale of the reference, against the reference's; None without a signal."""
    return energy / scale**2 / reference if scale > 1e-9 and reference > 0 else None


def _cat(each: Sequence[torch.Tensor]) -> np.ndarray:
    return torch.cat(list(each)).double().numpy()


@dataclasses.dataclass(frozen=True)
class _Batch:
    """A record, the energies w [B, T] of its tokens, and which of its turns are alike."""

    record: Record
    energy: torch.Tensor
    rows: Alike

    def power(self) -> np.ndarray:
        """W, [B]."""
        return self.energy.sum(1).numpy()

    def inner(self, a: torch.Tensor, at: Any = slice(None)) -> np.ndarray:
        """sum_t w A of turns, [R]."""
        return (self.energy[at] * a).sum(1).numpy()


def _of_rows(tokens: Sequence[torch.Tensor]) -> np.ndarray:
    """Sums over the tokens of each turn of all records."""
    return _cat([one.sum(1) for one in tokens])


@dataclasses.dataclass(frozen=True)
class _Batches:
    """All records, and the sums over them of tokens' values: a tensor [B, T] of each."""

    each: list[_Batch]
    masks: list[torch.Tensor]  # model tokens

    @classmethod
    def of(cls, records: Sequence[Record], loo: Sequence[torch.Tensor], energies: bool, by_turn: bool) -> _Batches:
        """Turns are alike by the leave-one-out advantages `loo`; without `energies` each token has the energy 1."""
        masks = [record.tokens["response_mask"].bool() for record in records]
        batches = []
        for record, one, mask in zip(records, loo, masks, strict=True):
            rows = alike(record, (one.sum(1) / mask.sum(1).clamp(min=1)).numpy(), by_turn)
            batches.append(_Batch(record, _energy(record) if energies else mask.double(), rows))
        return cls(batches, masks)

    def power(self, tokens: Sequence[torch.Tensor]) -> float:
        """sum w A^2 over the turns that have others."""
        compared = _cat([torch.from_numpy(batch.rows.size > 1) for batch in self.each])
        return float(_of_rows([b.energy * one**2 for b, one in zip(self.each, tokens, strict=True)]) @ compared)

    def flat(self, tokens: Sequence[torch.Tensor]) -> np.ndarray:
        """The values of all model tokens."""
        return _cat([one[mask] for one, mask in zip(tokens, self.masks, strict=True)])

    def signal(self, tokens: Sequence[torch.Tensor], swaps: Sequence[Any], alphas: Sequence[np.ndarray]) -> float:
        """sum of `verl_ext.lab.whatif.scale.signal`."""
        each = zip(self.each, tokens, swaps, alphas, strict=True)
        return sum(signal(b.rows, b.power(), b.inner(a), at, copy, new) for b, a, (at, copy, _), new in each)


def _alpha(
    batch: _Batch, name: str, at: np.ndarray, copies: np.ndarray, again: np.ndarray, *, published: bool, alone: bool
) -> np.ndarray:
    """Mean advantages of the turns of `replaced`, weighted by w, [R]; 0 where it cannot run there."""
    try:
        parts = _calls(batch.record, at, copies, name, published, alone, again)
        inner = np.concatenate([batch.inner(a, at[part]) for part, a in parts] or [np.zeros(0)])
    except BatchError:
        return np.zeros(len(at))
    power = batch.power()[at]
    return inner / np.where(power > 0, power, 1.0)


def _calls(
    record: Record,
    rows: np.ndarray,
    batches: np.ndarray,
    name: str,
    published: bool,
    alone: bool,
    again: np.ndarray | None = None,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The advantages of an estimator on several batches of turns, `rows` and `batches` [R] sorted by the latter: slices
    of them and [., T] float64. A call has some four million tokens, or one batch where `alone`.
    """
    algorithm = _published(record) if published else None
    many = 1 if alone else max(1, TOKENS_AT_ONCE // record.tokens["response_mask"].numel())
    ends = np.searchsorted(batches, np.arange(0, int(batches.max(initial=-1)) + 1 + many, many))
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        if end > start:
            part = slice(start, end)
            drawn = record.drawn(rows[part], batches[part], None if again is None else again[part])
            yield part, advantages(drawn, name, algorithm)


def _batch_wide(record: Record, found: torch.Tensor, name: str) -> bool:
    """Whether the advantages `found` of a record's turns change when other prompts are in the batch."""
    trajectory, prompt, places = _trajectories(record)
    half = (places < np.maximum(np.bincount(prompt)[prompt] // 2, 1))[trajectory].nonzero()[0]
    at = np.concatenate([np.arange(len(trajectory)), half])
    try:
        both = advantages(record.drawn(at, np.repeat([0, 1], [len(trajectory), len(half)])), name)
    except BatchError:
        return True
    return float((both[: len(found)] - found).abs().max()) > SAME * float(found.abs().max())


def _checked(group: int, records: Sequence[Record]) -> int:
    """The size of the groups that are drawn, 0 where there is none to draw. Raises RecordError: it is not possible."""
    most = max(int(np.bincount(_trajectories(record)[1]).max()) for record in records)
    if group and not 2 <= group < most:
        if most < 3:
            raise RecordError(f"--group {group}: no prompt has the three trajectories that a smaller group needs")
        raise RecordError(
            f"--group {group}: give 2 to {most - 1}; the prompt with the most has {most} trajectories, and a group of "
            "one has nothing to be compared with"
        )
    return group or (most // 2 if most > 3 else 2 if most == 3 else 0)


def _leave_one_out(records: Sequence[Record]) -> tuple[str, list[torch.Tensor]]:
    """The reference, under its published options: TRLOO, or RLOO over turns where turns have no rewards."""
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
    """A turn field of all turns as text; none where a record lacks it."""
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
    """Trajectory of each turn [B], prompt of each trajectory [M], its number within the prompt [M]."""
    split = [split_key(key) for key in record.keys]
    trajectory = value_ids([traj for _, traj, _ in split])
    _, first = np.unique(trajectory, return_index=True)
    prompt = value_ids([uid for uid, _, _ in split])[first]
    order, sizes = np.argsort(prompt, kind="stable"), np.bincount(prompt)
    places = np.empty(len(prompt), dtype=np.int64)
    places[order] = np.arange(len(prompt)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return trajectory, prompt, places


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Of the draws from one record: how often a turn was drawn, and sum and sum of squares of its advantages."""

    sums: torch.Tensor  # [3, B, T] float64
    signal: float  # sum w A (G - mu) over the draws


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """Of the draws from all records."""

    records: list[_Sums]

    def moments(self, energy: Sequence[torch.Tensor], draws: int) -> tuple[float, float, float, list[torch.Tensor]]:
        """sum w Var(c), sum w A (G - mu), company, and E(c) of each record."""
        spread, luck, whole, mean = 0.0, 0.0, 0.0, []
        for w, one in zip(energy, self.records, strict=True):
            times, total, squares = one.sums
            spread += float((w * (squares - total**2 / draws)).sum()) / max(draws - 1, 1)
            known = times > 1
            rest = (squares - total**2 / times.clamp(min=1)) * times / (times - 1).clamp(min=1)
            luck += float((w * rest)[known].sum())
            whole += float((w * squares)[known].sum())
            mean.append(total / draws)
        return spread, sum(one.signal for one in self.records), max(luck, 0.0) / whole if whole > 0 else 0.0, mean


def _draw(
    batches: Sequence[_Batch], names: dict[str, bool], reference: str, draws: int, group: int
) -> dict[str, _Drawn]:
    """Draw smaller groups of the prompts with more than `group` trajectories and call the estimators on them, all on
    the same draws; `names` says which take one draw a call. Those that can run on them, and the reference as "".
    """
    generator = np.random.default_rng(0)
    chosen = [_chosen(batch.record, draws, group, generator) for batch in batches]
    if not any(one.any() for one in chosen):
        return {}
    out = {}
    for name in ("", *names):
        try:
            out[name] = _Drawn(
                [
                    _sums(batch, one, name or reference, not name, names.get(name, False))
                    for batch, one in zip(batches, chosen, strict=True)
                ]
            )
        except BatchError:
            if not name:
                raise
    return out


def _resampled(
    drawn: dict[str, _Drawn], energy: Sequence[torch.Tensor], loo: Sequence[torch.Tensor], draws: int
) -> dict[str, dict[str, Any]]:
    """Of each drawn estimator ``variance``, ``company`` and ``cosine``, as `compare` says."""
    if not drawn:
        return {}
    spread, unit, _, _ = drawn[""].moments(energy, draws)
    whole = [torch.where(one.sums[0] > 0, base, 0.0) for one, base in zip(drawn[""].records, loo, strict=True)]
    length = sum(float((w * one**2).sum()) for w, one in zip(energy, whole, strict=True))
    out = {}
    for name in drawn.keys() - {""}:
        own_spread, own, company, mean = drawn[name].moments(energy, draws)
        inner, norm = (
            sum(float((w * one * other).sum()) for w, one, other in zip(energy, mean, others, strict=True))
            for others in (whole, mean)
        )
        norms = (norm - own_spread / draws) * length
        out[name] = {
            "variance": at_scale(own_spread, own / unit if unit > 0 else 0.0, spread),
            "company": company,
            "cosine": float(np.clip(inner / norms**0.5, -1.0, 1.0)) if norms > 1e-9 * norm * length else None,
        }
    return out


def _chosen(record: Record, draws: int, group: int, generator: np.random.Generator) -> np.ndarray:
    """Turns of the drawn trajectories, [draws, B] bool: `group` of each prompt that has more."""
    trajectory, prompt, _ = _trajectories(record)
    sizes = np.bincount(prompt)
    order = np.lexsort((generator.random((draws, len(prompt))), np.broadcast_to(prompt, (draws, len(prompt)))))
    place = np.arange(len(prompt)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = np.zeros((draws, len(prompt)), dtype=bool)
    np.put_along_axis(chosen, order, np.broadcast_to(place < group, chosen.shape), axis=1)
    return (chosen & (sizes > group)[prompt])[:, trajectory]


def _sums(batch: _Batch, chosen: np.ndarray, name: str, published: bool, alone: bool) -> _Sums:
    """What `_draw` returns of one record and estimator."""
    record, alike_rows = batch.record, batch.rows
    sums = torch.zeros(3, *record.tokens["response_mask"].shape, dtype=torch.float64)
    draws, at = chosen.nonzero()
    mu, left = _left_out(batch, chosen)
    found = 0.0
    for part, a in _calls(record, at, draws, name, published, alone):
        where = torch.from_numpy(at[part])
        for k, one in enumerate((torch.ones_like(a), a, a.square())):
            sums[k].index_add_(0, where, one)
        inner, key = batch.inner(a, at[part]), (draws[part], alike_rows.group[at[part]])
        found += float(np.where(left[key], inner * (alike_rows.G[at[part]] - mu[key]), 0.0).sum())
    return _Sums(sums, found)


def _left_out(batch: _Batch, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each draw and group of turns that are alike the mean return of those not drawn, and whether there are any."""
    draws, rows = (~chosen).nonzero()
    groups = int(batch.rows.group.max()) + 1
    key, power = draws * groups + batch.rows.group[rows], batch.power()
    weight, total = (
        np.bincount(key, weights=one[rows], minlength=len(chosen) * groups).reshape(len(chosen), groups)
        for one in (power, power * batch.rows.G)
    )
    return total / np.where(weight > 0, weight, 1.0), weight > 0
