# SPDX-License-Identifier: Apache-2.0
"""Typed configuration nodes that replace verl's through ``_target_`` (verl's dataclasses refuse unknown keys)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl.workers.config import PolicyLossConfig

MASK_MODES = ("zero_observation", "skip")


@dataclass
class KPOPolicyLossConfig(PolicyLossConfig):
    """``actor_rollout_ref.actor.policy_loss`` with the options of the ``kpo`` loss (arXiv 2602.10609).

    Attributes:
        kalman_q: process noise Q, in squared log-ratio units; Q/R must lie in [1e-8, 1]. Published: 1e-6.
        kalman_r: observation noise R, in the same units. Published: 1.0.
        is_clip: clip the filtered ratio to [1 - clip_ratio_low, 1 + clip_ratio_high] of the actor.
        max_log_ratio: the filtered log ratio is cut here before the exponential; no gradient beyond.
        mask_mode: at columns that are not the model's, ``zero_observation`` (released: the filter advances on a
            ratio of 1) or ``skip`` (the filter waits).

    Raises:
        ValueError: a value is out of range; the message names the key.
    """

    kalman_q: float = 1e-6
    kalman_r: float = 1.0
    is_clip: bool = True
    max_log_ratio: float = 10.0
    mask_mode: str = "zero_observation"

    def __post_init__(self) -> None:
        where = "actor_rollout_ref.actor.policy_loss"
        for name in ("kalman_q", "kalman_r", "max_log_ratio"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{where}.{name} is {value!r}; give a number greater than 0.")
        if not 1e-8 <= self.kalman_q / self.kalman_r <= 1:
            raise ValueError(
                f"{where}.kalman_q/kalman_r is {self.kalman_q / self.kalman_r:g}; the filter is defined for ratios "
                "from 1e-8 to 1."
            )
        if not isinstance(self.is_clip, bool):
            raise ValueError(f"{where}.is_clip is {self.is_clip!r}; give true or false.")
        if self.mask_mode not in MASK_MODES:
            raise ValueError(f"{where}.mask_mode is {self.mask_mode!r}; choose one of {', '.join(MASK_MODES)}.")
