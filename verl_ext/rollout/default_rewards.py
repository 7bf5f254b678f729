# SPDX-License-Identifier: Apache-2.0
"""The reward function of a run that names none: verl's by data source, with what evaluates in the sandbox."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf, open_dict

from verl_ext.integration.parts.base import Part

PATH = "reward.custom_reward_function.path"
OTHERS = ("custom_reward_function.path", "reward.sandbox_fusion.url", "sandbox_fusion.url")
OTHERS_ENABLED = ("reward.reward_model.enable", "reward_model.enable")
"""Keys of a run that is judged in another way, with verl's older spellings."""


class Rewards(Part):
    """Sets ``reward.custom_reward_function.path`` to `verl_ext.rewards.default` where verl would judge by itself."""

    @classmethod
    def complete(cls, config: Any) -> None:
        if OmegaConf.select(config, PATH) is not None or any(OmegaConf.select(config, key) for key in OTHERS):
            return
        if any(OmegaConf.select(config, key) for key in OTHERS_ENABLED):
            return
        with open_dict(config):
            OmegaConf.update(config, PATH, "pkg://verl_ext.rewards.default", force_add=True)
            OmegaConf.update(config, "reward.custom_reward_function.name", "compute_score", force_add=True)
