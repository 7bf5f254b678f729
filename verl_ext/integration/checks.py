# SPDX-License-Identifier: Apache-2.0
"""What can be said about a run before it costs anything, and about a batch before it is trained on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl_ext.integration import agent_gradients, dvp, updates
from verl_ext.integration.columns import split_key
from verl_ext.integration.mix import component_names
from verl_ext.integration.options import OptionError, discount, read, select

logger = logging.getLogger(__name__)


class BatchError(ValueError):
    """A batch cannot be trained on. The message names the prompt, the trajectory and the turn."""


def check(config: Any) -> list[str]:
    """Check a composed configuration of verl that uses verl_ext.

    Args:
        config: the whole config (DictConfig) as `main_ppo` gets it.

    Returns:
        Warnings, also logged: what will happen that the user may not want.

    Raises:
        OptionError: an unknown key, a value out of range, or two settings that do not go together.
    """
    from verl_ext.integration.estimators import ESTIMATORS

    algorithm = config.algorithm
    discount(algorithm)
    names = component_names(algorithm)
    for name, estimator in ESTIMATORS.items():
        # Also for a method that is not in use: a node of ours in the config is meant to be right.
        if name in names or select(algorithm, name) is not None:
            read(algorithm, name, estimator.options)
    used = [name for name in names if name in ESTIMATORS]
    if used and not config.trainer.get("use_v1", True):
        raise OptionError(
            f"{', '.join(used)} need verl's V1 trainer, which carries the row fields; trainer.use_v1 is false. "
            "Set trainer.use_v1=true (verl's default)."
        )
    check_losses(config)
    if select(select(config, "verl_ext"), "environment") is not None:
        from verl_ext.rollout.environments.options import check_environment

        check_environment(config)
    if select(select(config, "verl_ext"), "orchestra") is not None:
        from verl_ext.rollout.orchestra.settings import check as check_orchestra

        check_orchestra(config)
    if select(select(config, "verl_ext"), "threads") is not None:
        from verl_ext.rollout.threads import read_threads

        read_threads(config)
    warnings = [*_alone(config, used), *_gamma(config, used), *_loss_only(config), *updates.check(config)]
    warnings += dvp.check(config)
    agent_gradients.check(config)
    for name in used:
        ESTIMATORS[name].check(config)
    if VERL_OTB & set(names):
        check_otb(config)
    for warning in warnings:
        logger.warning(warning)
    return warnings


def _alone(config: Any, names: list[str]) -> list[str]:
    """A group baseline needs company."""
    if not names or int(config.actor_rollout_ref.rollout.n) > 1:
        return []
    what = "leave-one-out baseline" if "trloo" in names else "group baseline"
    return [
        f"actor_rollout_ref.rollout.n=1: no {what} can be formed between samples of a prompt, so {', '.join(names)} "
        "mostly give the raw return (REINFORCE without a baseline) or nothing. Set actor_rollout_ref.rollout.n to 2 "
        "or more."
    ]


DISCOUNTED = ("trloo", "hgpo", "gigpo")


def _gamma(config: Any, names: list[str]) -> list[str]:
    """One key for all: recipes that publish different discounts share the last one's."""
    shared = [name for name in names if name in DISCOUNTED]
    if len(shared) < 2 or "trloo" not in shared:
        return []
    return [
        f"{' and '.join(shared)} share algorithm.gamma={config.algorithm.gamma}, though they were published with "
        "different ones (trloo 1.0; hgpo, gigpo 0.95). The recipe named last, or algorithm.gamma=..., decides."
    ]


def _loss_only(config: Any) -> list[str]:
    """A loss recipe leaves the estimator to the user, and verl's default needs a critic."""
    losses = [name for name, wanted in (select(config.get("verl_ext"), "losses") or {}).items() if wanted]
    if not losses or component_names(config.algorithm) != ["gae"]:
        return []
    return [
        f"the recipe {losses[0]} sets only the policy loss; the advantage estimator is verl's default, gae, with a "
        f"critic. Name an estimator beside it, for example +recipe=[grpo,{losses[0]}]."
    ]


def check_losses(config: Any) -> None:
    """A policy has one loss: refuse two loss recipes, or a recipe whose loss is not the one in force.

    Raises:
        OptionError: names both losses.
    """
    asked = [str(name) for name, wanted in (select(config.get("verl_ext"), "losses") or {}).items() if wanted]
    if len(asked) > 1:
        raise OptionError(
            f"the recipes {' and '.join(asked)} each set the policy loss; one update has one loss. Keep one of them."
        )
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if asked and mode != asked[0]:
        raise OptionError(
            f"the recipe {asked[0]} sets the policy loss, but actor_rollout_ref.actor.policy_loss.loss_mode={mode} "
            f"replaces it. Leave out the recipe {asked[0]} or that override."
        )


def check_rollouts_freq(config: Any) -> None:
    """``verl_ext.rollouts_freq`` counts steps.

    Raises:
        OptionError: it is not a whole number of at least 1.
    """
    value = select(config.get("verl_ext"), "rollouts_freq", 1)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(
            f"verl_ext.rollouts_freq is {value!r}; give the training steps from one set of transcripts to the next, a "
            "whole number of at least 1."
        )


VERL_OTB = {"optimal_token_baseline", "tir_optimal_token_baseline"}
"""verl's own estimators that read sum_pi_squared."""


def check_otb(config: Any) -> None:
    """OTB needs the sum of squared probabilities from a pass over the old policy's logits."""
    correction = config.algorithm.get("rollout_correction") or {}
    if correction.get("bypass_mode", False):
        raise OptionError(
            "otb needs sum_pi_squared, which comes with the old log-probabilities, but "
            "algorithm.rollout_correction.bypass_mode=true skips that pass. Set it to false."
        )
    if config.actor_rollout_ref.model.get("use_fused_kernels", False):
        raise OptionError(
            "otb needs the logits, which fused kernels never form. Set actor_rollout_ref.model.use_fused_kernels=false."
        )
    strategy = config.actor_rollout_ref.actor.strategy
    if strategy not in ("fsdp", "fsdp2", "megatron"):
        raise OptionError(
            f"otb needs sum_pi_squared from the training engine; verl's {strategy!r} engine does not compute it. "
            "Set actor_rollout_ref.actor.strategy to fsdp, fsdp2 or megatron."
        )


def check_rewards(columns: Mapping[str, Any], token_level_rewards: torch.Tensor, keys: Sequence[str]) -> None:
    """Refuse a NaN or infinite reward.

    Args:
        columns: row fields by name; ``turn_reward`` [B] float64 if present, ``valid_row`` [B] bool.
        token_level_rewards: [B, T] float.
        keys: storage keys of the rows.

    Raises:
        BatchError: names uid, trajectory and turn of the first bad row.
    """
    bad = ~torch.isfinite(token_level_rewards).all(-1)
    if "turn_reward" in columns:
        bad |= ~torch.isfinite(torch.as_tensor(columns["turn_reward"]))
    bad &= torch.as_tensor(columns["valid_row"])
    if not bool(bad.any()):
        return
    row = int(bad.nonzero()[0, 0])
    uid, traj, turn = split_key(keys[row])
    reward = columns["turn_reward"][row] if "turn_reward" in columns else token_level_rewards[row].sum().item()
    raise BatchError(
        f"reward {reward} in row {keys[row]}: prompt uid {uid}, trajectory {traj}, turn {turn} "
        f"({int(bad.sum())} such rows in the batch). A reward must be finite: mend the reward function or agent loop."
    )


def check_advantages(advantages: torch.Tensor, keys: Sequence[str], estimator: str) -> None:
    """Refuse a NaN or infinite advantage before it reaches the weights.

    Raises:
        BatchError: names the estimator and the first bad row.
    """
    bad = ~torch.isfinite(advantages).all(-1)
    if bool(bad.any()):
        uid, traj, turn = split_key(keys[int(bad.nonzero()[0, 0])])
        raise BatchError(
            f"estimator {estimator!r} gave an advantage that is not finite in {int(bad.sum())} rows, the first is "
            f"prompt uid {uid}, trajectory {traj}, turn {turn}."
        )
