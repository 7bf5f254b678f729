# SPDX-License-Identifier: Apache-2.0
"""Rewards of generated kernels (Dr. Kernel, arXiv 2602.05885): reward, profiling reward, PRS, void turns, STTS.

    s = speedup (0 if there is none), at most `upper`, 0 if below `lower`           C = 1 if the kernel is correct
    kernel_reward          released   w_c C + w_s s + w_p PR C           penalised: the penalty, in both variants
                           paper      C + C min(speedup, 3) + C PR
    profiling_reward PR    device time of the generated kernels / device time of all kernels
    prs_keep_probability   clip((PR - threshold) / factor, 0, 1) of a correct kernel, 1 of a wrong one; `prs` draws

`released` is what hkust-nlp/KernelGYM@3a84417 computes, `paper` what the text says. A speedup or a coverage that is
None or NaN was not measured, and counts as 0. Every function gives a float64 array.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from verl_ext.methods.groups import Column
from verl_ext.methods.options import Count, Discount, NotNegative, OptionError, checked
from verl_ext.methods.rejection import ROUNDING, Rejection
from verl_ext.methods.returns import regressed_turns
from verl_ext.methods.rows import TRAJECTORY, Rows

PAPER_SPEEDUP_UPPER = 3.0  # in Eq. 8
#: Coverages are raised to this before their geometric mean (released).
COVERAGE_FLOOR = 1e-8


@checked
def kernel_reward(
    correct: Column,
    speedup: Column,
    coverage: Column,
    *,
    penalised: Column,
    variant: Literal["released", "paper"] = "released",
    correct_weight: float = 0.5,
    speedup_weight: float = 0.5,
    coverage_weight: float = 0.5,
    speedup_upper: NotNegative = 3.0,
    speedup_lower: NotNegative = 0.0,
    penalty: float = 0.0,
) -> np.ndarray:
    """Reward of each kernel, [B] float64.

    The released formula does not multiply the speedup by C: whoever measures gives a wrong kernel speedup 0. The
    paper's formula has no weights or bounds to set; it is twice the released one at the defaults.

    Args:
        correct: [B] bool, all outputs were right.
        speedup: [B] time of the reference over time of the kernel; None or NaN: not measured.
        coverage: [B] profiling reward, in [0, 1]; None or NaN: no profile.
        penalised: [B] bool, decoys and evaluations that did not complete; their other columns are not looked at.
        variant: "released" or "paper".
        correct_weight, speedup_weight, coverage_weight: weights of the released formula.
        speedup_upper: a larger speedup counts as this one, an infinite one too. Released formula.
        speedup_lower: a smaller speedup counts as 0 (after the upper bound). Released formula.
        penalty: reward of the penalised.

    Raises:
        ValueError: an option, a length or a value that cannot be used; names it, with the row.

    Source: Eq. 8; `reward_client.py`.
    """
    if speedup_lower > speedup_upper:
        raise ValueError(
            f"speedup_lower={speedup_lower} is above speedup_upper={speedup_upper}: no speedup would count"
        )
    out = Rows(len(correct), penalised=penalised).bools("penalised")
    rows = Rows(len(out), valid_row=~out, correct=correct, speedup=speedup, coverage=coverage)
    C, s, PR = rows.bools("correct").astype(np.float64), rows.measured("speedup"), rows.measured("coverage")
    rows.refuse("coverage", "a share of the time, in [0, 1]", PR, (PR < 0) | (PR > 1 + ROUNDING))
    if variant == "paper":
        reward = C * (1.0 + np.clip(s, 0.0, PAPER_SPEEDUP_UPPER) + PR)
    else:
        s = np.minimum(s, speedup_upper)
        s[s < speedup_lower * (1 - ROUNDING)] = 0.0
        reward = correct_weight * C + speedup_weight * s + coverage_weight * PR * C
    values = np.full(len(out), penalty)
    values[rows.kept] = reward
    return values


@checked
def profiling_reward(
    generated: Sequence[Any], entries: Sequence[Any], *, variant: Literal["paper", "released"] = "paper"
) -> np.ndarray:
    """Share of the device time that was spent in generated kernels; 0 for an empty profile.

    "paper" counts device kernels alone, and a name is generated if it equals one of `generated`. "released" is kept to
    reproduce its numbers: it divides by device and CPU time of all rows, operators included, which counts the time of a
    kernel again in every operator around it, and takes a name that contains another one, or is contained, whatever
    the case: a kernel called "n" matches nearly everything.

    Args:
        generated: names of the generated kernels. What follows " grid=", as launches are recorded, is not the name.
        entries: rows of the profile, mappings with `name`, `cuda_time_us` and `cpu_time_us` (microseconds, at least 0),
            and `device_kernel` (bool: ran on the device, and is no operator around one). "paper" reads no
            `cpu_time_us`, "released" no `device_kernel`. Several profiles: a list of names and one of rows for each.
        variant: "paper" or "released".

    Returns:
        float64 array without dimensions, or [profiles].

    Raises:
        ValueError: a row lacks a field or has a time that is negative or not finite.

    Source: `profiling.py`.
    """
    if any(not isinstance(one, str | Mapping) for one in (*generated, *entries)):
        if len(generated) != len(entries):
            raise ValueError(
                f"{len(generated)} lists of generated names for {len(entries)} profiles; give one for each"
            )
        pairs = zip(generated, entries, strict=True)
        return np.array([_profile(names, rows, variant) for names, rows in pairs], dtype=np.float64)
    return np.array(_profile(generated, entries, variant), dtype=np.float64)


def _profile(generated: Sequence[str], entries: Sequence[Mapping[str, Any]], variant: str) -> float:
    """The share of one profile."""
    names = {name.partition(" grid=")[0] for name in generated}
    if "" in names:
        raise ValueError("the name of a generated kernel is empty; in the released rule it would match every name")
    paper = variant == "paper"
    lower = [name.lower() for name in names]
    mine = total = 0.0
    for row, entry in enumerate(entries):
        missing = [field for field in ("name", "device_kernel" if paper else "cpu_time_us") if field not in entry]
        if missing:
            raise ValueError(f"row {row} of the profile has no {missing[0]}: {dict(entry)}")
        if paper and not entry["device_kernel"]:
            continue
        device, name = _time(entry, row, "cuda_time_us"), entry["name"]
        total += device if paper else device + _time(entry, row, "cpu_time_us")
        if (name in names) if paper else any(one in name.lower() or name.lower() in one for one in lower):
            mine += device
    return mine / total if total > 0 else 0.0


def _time(entry: Mapping[str, Any], row: int, field: str) -> float:
    """A time of a row of the profile, in microseconds."""
    time = float(entry.get(field, np.nan))
    if not 0 <= time < np.inf:
        raise ValueError(f"row {row} of the profile ({entry['name']}) has {field} {time}; give a time of at least 0 us")
    return time


@checked
def prs_keep_probability(
    coverage: Column,
    correct: Column,
    speedup: Column | None = None,
    *,
    index: Column | None = None,
    traj_uid: Column | None = None,
    turn_index: Column | None = None,
    nonempty: Column | None = None,
    level: Literal["turn", "geometric"] = "turn",
    threshold: Discount = 0.3,
    factor: NotNegative | None = 0.1,
    speedup_threshold: float | None = None,
) -> np.ndarray:
    """Probability with which profiling-based rejection sampling keeps each turn, [B] float64.

    Wrong kernels are always kept; Eq. 9 as written would drop them all, as their coverage is 0. The coverage is taken
    as it is, not rounded.

    Args:
        coverage: [B] profiling reward of the turn; None or NaN: 0.
        correct: [B] bool.
        speedup: [B]; read for speedup_threshold alone. None or NaN: not measured.
        index: [B] prompt uid; trajectories of two prompts are never one.
        traj_uid: [B] trajectory; level "geometric" needs it.
        turn_index: [B] its place in the trajectory, only named in errors: a mean does not depend on the order.
        nonempty: [B] bool, the turn has model tokens; None: all have. Turns without are in no mean.
        level: "turn": the turn's own coverage. "geometric": the geometric mean over the trajectory's non-empty turns,
            of which each is at least 1e-8; 1 if there are none.
        threshold: coverage up to which a correct kernel is dropped, in [0, 1].
        factor: width above it over which the probability rises to 1; 0 or None: kept if the coverage reaches threshold.
        speedup_threshold: a turn with at least this speedup is kept in any case; None or negative: off.

    Raises:
        ValueError: an option, a length or a value that cannot be used; names it, with row and turn.

    Source: Eq. 9; `coverage_helper.py`.
    """
    rows = Rows(
        len(coverage),
        coverage=coverage,
        correct=correct,
        speedup=speedup,
        index=index,
        traj_uid=traj_uid,
        turn_index=turn_index,
        nonempty=nonempty,
    )
    share, right = rows.measured("coverage"), rows.bools("correct")
    rows.refuse("coverage", "a share of the time, at least 0", share, share < 0)
    if level == "geometric":
        trajectory = rows.keys(TRAJECTORY) if "index" in rows else rows.ids("traj_uid")
        counted = rows.bools("nonempty") if "nonempty" in rows else np.ones(len(share), dtype=bool)
        logs = np.where(counted, np.log(np.maximum(share, COVERAGE_FLOOR)), 0.0)
        mean = np.bincount(trajectory, logs) / np.maximum(np.bincount(trajectory, counted), 1.0)
        share = np.exp(mean)[trajectory]
    if factor:
        probability = np.clip((share - threshold) / factor, 0.0, 1.0)
    else:
        probability = (share >= threshold * (1 - ROUNDING)).astype(np.float64)
    kept = ~right
    if speedup_threshold is not None and speedup_threshold >= 0:
        kept |= rows.measured("speedup") >= speedup_threshold * (1 - ROUNDING)
    return np.where(kept, 1.0, probability)


@checked
def prs(
    response_mask: torch.Tensor,
    *,
    coverage: Column,
    correct: Column,
    draw: Column,
    speedup: Column | None = None,
    index: Column | None = None,
    traj_uid: Column | None = None,
    turn_index: Column | None = None,
    level: Literal["turn", "geometric"] = "turn",
    threshold: Discount = 0.3,
    factor: NotNegative | None = 0.1,
    speedup_threshold: float | None = None,
    seed: Count = 0,
) -> Rejection:
    """Profiling-based rejection sampling: each turn is kept with `prs_keep_probability`, which is the statistic.

    Args:
        response_mask: [B, T] of 0 and 1; turns without model tokens are in no mean.
        coverage, correct, speedup, index, traj_uid, turn_index, level, threshold, factor, speedup_threshold: as there.
        draw: [B] name of each turn's random number, see `draws`.
        seed: of the random numbers.
    """
    some = response_mask.bool().any(-1)
    probability = prs_keep_probability(
        coverage,
        correct,
        speedup,
        index=index,
        traj_uid=traj_uid,
        turn_index=turn_index,
        nonempty=some.cpu().numpy(),
        level=level,
        threshold=threshold,
        factor=factor,
        speedup_threshold=speedup_threshold,
    )
    kept = torch.from_numpy(draws(draw, seed) < probability).to(some.device) | ~some
    mask = response_mask * kept[:, None].to(response_mask.dtype)
    return Rejection(mask, kept, torch.from_numpy(probability).to(some.device))


def draws(names: Column, seed: int) -> np.ndarray:
    """Uniform random numbers in [0, 1) by name, [B] float64: the same for any order or part of the turns."""
    texts = [f"{seed}/{name}".encode() for name in names]
    found = [int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11 for text in texts]
    return np.array(found, dtype=np.float64) / 2.0**53


@checked
def void_turns(turn_rewards: Column, *, failed: bool) -> np.ndarray:
    """The `valid_row` that masking void turns leaves: 1 where a turn stays, 0 where it is void, [turns] float64.

    A turn is void if its reward is at most 0 after an earlier one above 0: rewards 1.2, 0, 1.5 give 1, 0, 1.

    Args:
        turn_rewards: [turns] rewards of one trajectory, in order of time.
        failed: the trajectory ended by an error or a timeout, which makes all its turns void.

    Source: `vllm_async_engine.py`, option mask_void_turn (not in the paper; biased, see `returns.regressed_turns`).
    """
    rewards = Rows(len(turn_rewards), turn_rewards=turn_rewards).floats("turn_rewards")
    void = regressed_turns(rewards, np.zeros(len(rewards), dtype=np.int64), np.arange(len(rewards)))
    return np.where(void | failed, 0.0, 1.0)


@checked
def stts_select(
    turn_rewards: Column, keep: int, *, select: Literal["paper", "released_best", "last"] = "paper"
) -> np.ndarray:
    """The turns that sequential test-time scaling keeps in the context, in order of time, [at most `keep`] float64.

    Args:
        turn_rewards: [turns] rewards of one trajectory so far, in order of time.
        keep: how many, at least 1; 4 published.
        select: "paper": those with the highest rewards, of equal ones the earlier. "released_best": the consecutive
            ones with the largest sum, of equal sums the first. "last": the most recent.

    Returns:
        numbers of turns, from 0, as float64 (an index needs `.astype(int)`).

    Source: `vllm_async_engine_multi_iter.py`.
    """
    rewards = Rows(len(turn_rewards), turn_rewards=turn_rewards).floats("turn_rewards")
    if keep < 1:
        raise OptionError(f"keep={keep} must be at least 1")
    count = min(int(keep), len(rewards))
    if select == "paper":
        chosen = np.sort(np.argsort(-rewards, kind="stable")[:count])
    else:
        first = len(rewards) - count
        if select == "released_best" and count:
            sums = np.lib.stride_tricks.sliding_window_view(rewards, count).sum(-1)
            first = int(np.argmax(sums >= sums.max() - ROUNDING * max(1.0, abs(sums.max()))))
        chosen = np.arange(first, first + count)
    return chosen.astype(np.float64)
