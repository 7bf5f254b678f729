# SPDX-License-Identifier: Apache-2.0
"""Typed configuration nodes that replace verl's through ``_target_`` (verl's dataclasses refuse unknown keys)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from verl.workers.config import PolicyLossConfig

from verl_ext.methods.hybrid_imitation import DIRECTIONS

WHERE = "actor_rollout_ref.actor.policy_loss"
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
        for name in ("kalman_q", "kalman_r", "max_log_ratio"):
            if not _is_number(getattr(self, name)) or getattr(self, name) <= 0:
                raise ValueError(f"{WHERE}.{name} is {getattr(self, name)!r}; give a number greater than 0.")
        if not 1e-8 <= self.kalman_q / self.kalman_r <= 1:
            raise ValueError(
                f"{WHERE}.kalman_q/kalman_r is {self.kalman_q / self.kalman_r:g}; the filter is defined for ratios "
                "from 1e-8 to 1."
            )
        if not isinstance(self.is_clip, bool):
            raise ValueError(f"{WHERE}.is_clip is {self.is_clip!r}; give true or false.")
        if self.mask_mode not in MASK_MODES:
            raise ValueError(f"{WHERE}.mask_mode is {self.mask_mode!r}; choose one of {', '.join(MASK_MODES)}.")


@dataclass
class DivergenceAugmentedPolicyLossConfig(PolicyLossConfig):
    """``actor_rollout_ref.actor.policy_loss`` with the options of ``divergence_augmented`` (arXiv 2501.15034).

    Attributes:
        dapo_beta: weight of the divergence, at least 0. Published (Atari): 0.5 or 1.
        dapo_c: cut of the trace: 0 looks one token ahead, 1 to the end of the response.
        dapo_rho_bar: cut of the ratio in front of a token's log ratio. Published: 1.

    Raises:
        ValueError: a value is out of range; the message names the key.
    """

    dapo_beta: float = 0.5
    dapo_c: float = 1.0
    dapo_rho_bar: float = 1.0

    def __post_init__(self) -> None:
        for name in ("dapo_beta", "dapo_c", "dapo_rho_bar"):
            _check_not_negative(self, name)


@dataclass
class HybridImitationPolicyLossConfig(PolicyLossConfig):
    """``actor_rollout_ref.actor.policy_loss`` with the options of ``hybrid_imitation`` (arXiv 2512.23097).

    Attributes:
        imitation_lambda: weight of the reward against the divergence from the teacher, at least 0.
        future_kl: charge a token for the divergence of the tokens after it.
        teacher_topk: compare the teacher's most probable tokens, renormalised; None: the whole vocabulary.
        kl_direction: ``reverse``, KL(policy || teacher), or ``forward``.

    Raises:
        ValueError: a value is out of range; the message names the key.
    """

    imitation_lambda: float = 1.0
    future_kl: bool = True
    teacher_topk: int | None = 64
    kl_direction: str = "reverse"

    def __post_init__(self) -> None:
        _check_not_negative(self, "imitation_lambda")
        if not isinstance(self.future_kl, bool):
            raise ValueError(f"{WHERE}.future_kl is {self.future_kl!r}; give true or false.")
        top_k = self.teacher_topk
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 2):
            raise ValueError(f"{WHERE}.teacher_topk is {top_k!r}; give a whole number of at least 2, or null.")
        if self.kl_direction not in DIRECTIONS:
            raise ValueError(f"{WHERE}.kl_direction is {self.kl_direction!r}; choose one of {', '.join(DIRECTIONS)}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_not_negative(options: Any, name: str) -> None:
    value = getattr(options, name)
    if not _is_number(value) or value < 0:
        raise ValueError(f"{WHERE}.{name} is {value!r}; give a number of at least 0.")
