# SPDX-License-Identifier: Apache-2.0
"""Typed configuration nodes that replace verl's through ``_target_`` (verl's dataclasses refuse unknown keys)."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Annotated, Literal

from verl.workers.config import PolicyLossConfig

from verl_ext.integration import names
from verl_ext.integration.settings.options import OptionError, coerce
from verl_ext.methods.options import NotNegative, Positive

WHERE = "actor_rollout_ref.actor.policy_loss"


def _at_least_two(value: int) -> str | None:
    return None if value >= 2 else "give a whole number of at least 2, or null"


@dataclass
class _Checked(PolicyLossConfig):
    """Options that a subclass declares fit their annotations, and the loss is ours, also in the worker that makes this;
    or an OptionError, a ValueError, names the key."""

    def __post_init__(self) -> None:
        names.require_loss(self.loss_mode)
        hints = typing.get_type_hints(type(self), include_extras=True)
        for name in vars(type(self))["__annotations__"]:
            coerce(getattr(self, name), hints[name], f"{WHERE}.{name}")


@dataclass
class KPOPolicyLossConfig(_Checked):
    """``actor_rollout_ref.actor.policy_loss`` with the options of the ``kpo`` loss (arXiv 2602.10609).

    Attributes:
        kalman_q: process noise Q, in squared log-ratio units; Q/R must lie in [1e-8, 1]. Published: 1e-6.
        kalman_r: observation noise R, in the same units. Published: 1.0.
        is_clip: clip the filtered ratio to [1 - clip_ratio_low, 1 + clip_ratio_high] of the actor.
        max_log_ratio: the filtered log ratio is cut here before the exponential; no gradient beyond.
        mask_mode: at columns that are not the model's, ``zero_observation`` (released: the filter advances on a
            ratio of 1) or ``skip`` (the filter waits).
        reset: in a sequence of several turns the filter starts anew with each ``turn``, or once a ``sequence``.
    """

    kalman_q: Positive = 1e-6
    kalman_r: Positive = 1.0
    is_clip: bool = True
    max_log_ratio: Positive = 10.0
    mask_mode: Literal["zero_observation", "skip"] = "zero_observation"
    reset: Literal["turn", "sequence"] = "turn"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1e-8 <= self.kalman_q / self.kalman_r <= 1:
            raise OptionError(
                f"{WHERE}.kalman_q/kalman_r is {self.kalman_q / self.kalman_r:g}; the filter is defined for ratios "
                "from 1e-8 to 1."
            )


@dataclass
class DivergenceAugmentedPolicyLossConfig(_Checked):
    """``actor_rollout_ref.actor.policy_loss`` with the options of ``divergence_augmented`` (arXiv 2501.15034).

    Attributes:
        dapo_beta: weight of the divergence, at least 0. Published (Atari): 0.5 or 1.
        dapo_c: cut of the trace: 0 looks one token ahead, 1 to the end of the response.
        dapo_rho_bar: cut of the ratio in front of a token's log ratio. Published: 1.
    """

    dapo_beta: NotNegative = 0.5
    dapo_c: NotNegative = 1.0
    dapo_rho_bar: NotNegative = 1.0


@dataclass
class HybridImitationPolicyLossConfig(_Checked):
    """``actor_rollout_ref.actor.policy_loss`` with the options of ``hybrid_imitation`` (arXiv 2512.23097).

    Attributes:
        imitation_lambda: weight of the reward against the divergence from the teacher, at least 0.
        future_kl: charge a token for the divergence of the tokens after it.
        teacher_topk: compare the teacher's most probable tokens, renormalised; None: the whole vocabulary.
        kl_direction: ``reverse``, KL(policy || teacher), or ``forward``.
    """

    imitation_lambda: NotNegative = 1.0
    future_kl: bool = True
    teacher_topk: Annotated[int, _at_least_two] | None = 64
    kl_direction: Literal["reverse", "forward"] = "reverse"
