# SPDX-License-Identifier: Apache-2.0
"""Bypass mode: what the actor gets is what the settings say."""

from __future__ import annotations

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.utils.config import omega_conf_to_dataclass

from verl_ext.integration import checks
from verl_ext.integration.settings.options import OptionError
from verl_ext.recipes import recipe_root, verl_config_dir

CORRECTION = "algorithm.rollout_correction"


def actor(recipe: str, *overrides: str) -> Any:
    """The dataclass that verl's worker makes of the actor's node, after the launch."""
    search = f"hydra.searchpath=[file://{recipe_root()}]"
    more = ["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.name=vllm"]
    more.append("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
    with initialize_config_dir(version_base=None, config_dir=str(verl_config_dir())):
        config = compose("ppo_trainer", overrides=[search, f"+recipe={recipe}", *more, *overrides])
    for _ in range(2):  # by the launcher and by the trainer
        checks.complete(config)
    checks.check(config)
    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def test_the_actor_gets_the_correction_and_the_loss_that_reads_it() -> None:
    """Without the copy its policy_loss.rollout_correction says loss_type=ppo_clip, rollout_is=sequence."""
    loss = actor("[dvp,grpo]", f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce").policy_loss
    assert loss.loss_mode == "bypass_mode" and isinstance(loss.rollout_correction, RolloutCorrectionConfig)
    given = loss.rollout_correction
    assert (given.loss_type, given.rollout_is, given.rollout_is_threshold) == ("reinforce", "token", 2.0)
    assert given.bypass_mode is True and given.rollout_rs is None


def test_without_bypass_mode_nothing_is_changed() -> None:
    loss = actor("[dvp,grpo]", f"{CORRECTION}.loss_type=reinforce").policy_loss
    assert loss.loss_mode == "vanilla" and loss.rollout_correction == RolloutCorrectionConfig()


def test_another_loss_stays_and_settings_that_it_would_not_read_are_refused() -> None:
    assert actor("[grpo,kpo]", f"{CORRECTION}.bypass_mode=true").policy_loss.loss_mode == "kpo"
    with pytest.raises(OptionError, match=r"loss_type=reinforce would be ignored: .*loss_mode=kpo is another loss"):
        actor("[grpo,kpo]", f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=reinforce")
