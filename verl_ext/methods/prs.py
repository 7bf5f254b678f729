# SPDX-License-Identifier: Apache-2.0
"""Profiling-based rejection sampling of generated kernels (PRS; Dr. Kernel, arXiv 2602.05885).

    prs_keep_probability   clip((PR - threshold) / factor, 0, 1) of a correct kernel, 1 of a wrong one; `prs` draws

PR is the coverage of a row, `verl_ext.rewards.kernel_reward.profiling_reward`; None or NaN was not measured, and counts
as 0.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np
import torch

from verl_ext.methods.groups import Column
from verl_ext.methods.options import Count, Discount, NotNegative, checked
from verl_ext.methods.rejection import ROUNDING, Rejection
from verl_ext.methods.rows import TRAJECTORY, Rows

#: Coverages are raised to this before their geometric mean (released).
COVERAGE_FLOOR = 1e-8


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
    """Probability with which profiling-based rejection sampling keeps each row, [B] float64.

    Wrong kernels are always kept; Eq. 9 as written would drop them all, as their coverage is 0. The coverage is taken
    as it is, not rounded.

    Args:
        coverage: [B] profiling reward of the row; None or NaN: 0.
        correct: [B] bool.
        speedup: [B]; read for speedup_threshold alone. None or NaN: not measured.
        index: [B] prompt uid; trajectories of two prompts are never one.
        traj_uid: [B] trajectory; level "geometric" needs it.
        turn_index: [B] turn of the row, only named in errors: a mean does not depend on the order.
        nonempty: [B] bool, the row has model tokens; None: all have. Rows without are in no mean.
        level: "turn": the row's own coverage. "geometric": the geometric mean over the trajectory's non-empty rows,
            of which each is at least 1e-8; 1 if there are none.
        threshold: coverage up to which a correct kernel is dropped, in [0, 1].
        factor: width above it over which the probability rises to 1; 0 or None: kept if the coverage reaches threshold.
        speedup_threshold: a row with at least this speedup is kept in any case; None or negative: off.

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
    """Profiling-based rejection sampling: each row is kept with `prs_keep_probability`, which is the statistic.

    Args:
        response_mask: [B, T] of 0 and 1; rows without model tokens are in no mean.
        coverage, correct, speedup, index, traj_uid, turn_index, level, threshold, factor, speedup_threshold: as there.
        draw: [B] name of each row's random number, see `draws`.
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
    """Uniform random numbers in [0, 1) by name, [B] float64: the same for any order or part of the rows."""
    texts = [f"{seed}/{name}".encode() for name in names]
    found = [int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11 for text in texts]
    return np.array(found, dtype=np.float64) / 2.0**53
