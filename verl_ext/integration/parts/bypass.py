# SPDX-License-Identifier: Apache-2.0
"""``algorithm.rollout_correction.bypass_mode=true`` trains as it says.

verl's V1 trainer takes the sampler's log-probabilities for the old ones in bypass mode, but hands the actor neither the
correction's settings nor the loss that reads them: whatever ``loss_type``, ``rollout_is`` and ``rollout_rs`` say, the
configured loss runs. verl's older trainer copies both at run time; here it happens at launch.
"""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf, open_dict

from verl_ext.integration.options import OptionError, select
from verl_ext.integration.parts.base import Part

NODE = "algorithm.rollout_correction"
LOSS = "actor_rollout_ref.actor.policy_loss"
TYPE = "verl.trainer.config.algorithm.RolloutCorrectionConfig"
TAKES = ("vanilla", "bypass_mode")
"""Losses for which bypass mode stands; another loss keeps its own formula, with the sampler's log-probabilities."""


class Bypass(Part):
    """Settings alone."""

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return False

    @classmethod
    def complete(cls, config: Any) -> None:
        node = select(config.algorithm, "rollout_correction")
        loss = config.actor_rollout_ref.actor.policy_loss
        if select(node, "bypass_mode", False) and loss.loss_mode in TAKES:
            with open_dict(config):
                loss.loss_mode = "bypass_mode"
                loss.rollout_correction = {"_target_": TYPE, **OmegaConf.to_container(node, resolve=True)}

    @classmethod
    def check(cls, config: Any) -> list[str]:
        node = select(config.algorithm, "rollout_correction")
        mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
        if not select(node, "bypass_mode", False) or mode in TAKES:
            return []
        unread = [
            f"{NODE}.{name}={value}"
            for name, neutral in (("loss_type", "ppo_clip"), ("rollout_is", None), ("rollout_rs", None))
            if (value := select(node, name)) != neutral
        ]
        if unread:
            raise OptionError(
                f"{', '.join(unread)} would be ignored: in bypass mode the loss reads them, and {LOSS}.loss_mode={mode}"
                f" is another loss. Set {LOSS}.loss_mode=bypass_mode, {NODE}.bypass_mode=false, or leave them out."
            )
        return []
