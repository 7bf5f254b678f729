# SPDX-License-Identifier: Apache-2.0
"""The policy loss: a run has one, and it is the one that the settings name. Settings alone, no hooks.

``algorithm.rollout_correction.bypass_mode=true`` trains as it says: verl's V1 trainer takes the sampler's
log-probabilities for the old ones then, but hands the actor neither the correction's settings nor the loss that reads
them, so that the configured loss would run whatever ``loss_type``, ``rollout_is`` and ``rollout_rs`` say. verl's older
trainer copies both at run time; here it happens at launch.
"""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import OmegaConf, open_dict

from verl_ext.integration.compat.wraps import UnsupportedVerl
from verl_ext.integration.losses import OPTIONS
from verl_ext.integration.mix import component_names
from verl_ext.integration.names import MARKS
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings.options import OptionError, bypass, select

NODE = "algorithm.rollout_correction"
LOSS = "actor_rollout_ref.actor.policy_loss"
TYPE = "verl.trainer.config.algorithm.RolloutCorrectionConfig"
BYPASS_READS = ("vanilla", "bypass_mode")
"""Losses for which bypass mode stands; another loss keeps its own formula, with the sampler's log-probabilities."""


class Losses(Part):
    """See the module's text."""

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return str(config.actor_rollout_ref.actor.policy_loss.loss_mode) in MARKS

    def after_update(self, metrics: dict[str, Any]) -> None:
        """Raises UnsupportedVerl: the workers have trained with another loss than the one named."""
        mode = str(self.config.actor_rollout_ref.actor.policy_loss.loss_mode)
        if "actor/pg_loss" in metrics and MARKS[mode] not in metrics:
            raise UnsupportedVerl(
                f"the update reports no {MARKS[mode]}, so another loss was in force than verl_ext's {mode!r}. A module "
                "that only the workers load (model.external_lib, VERL_USE_EXTERNAL_MODULES) has replaced it: rename "
                "its loss."
            )

    @classmethod
    def complete(cls, config: Any) -> None:
        node = select(config.algorithm, "rollout_correction")
        loss = config.actor_rollout_ref.actor.policy_loss
        if bypass(config) and loss.loss_mode in BYPASS_READS:
            with open_dict(config):
                loss.loss_mode = "bypass_mode"
                loss.rollout_correction = {"_target_": TYPE, **OmegaConf.to_container(node, resolve=True)}

    @classmethod
    def check(cls, config: Any) -> list[str]:
        _check_bypass(config)
        _check_verls(config)
        asked = [str(name) for name, wanted in (select(config.get("verl_ext"), "losses") or {}).items() if wanted]
        if len(asked) > 1:
            raise OptionError(
                f"the recipes {' and '.join(asked)} each set the policy loss; one update has one loss. Keep one of "
                "them."
            )
        mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
        if asked and mode != asked[0]:
            raise OptionError(
                f"the recipe {asked[0]} sets the policy loss, but actor_rollout_ref.actor.policy_loss.loss_mode={mode} "
                f"replaces it. Leave out the recipe {asked[0]} or that override."
            )
        _check_options(config)
        warnings = _check_divergence(config) if mode == "divergence_augmented" else []
        if not asked or component_names(config.algorithm) != ["gae"]:
            return warnings
        return [
            *warnings,
            f"the recipe {asked[0]} sets only the policy loss; the advantage estimator is verl's default, gae, with a "
            f"critic. Name an estimator beside it, for example +recipe=[grpo,{asked[0]}].",
        ]


def _check_verls(config: Any) -> None:
    """Refuse names that verl looks up after the first rollout alone, by looking them up."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn, kl_penalty

    actor, token = config.actor_rollout_ref.actor, torch.zeros(1, 1)
    looked: dict[str, Any] = {}
    if actor.get("use_kl_loss"):
        looked["actor_rollout_ref.actor.kl_loss_type"] = lambda name: kl_penalty(token, token, name)
    if config.algorithm.get("use_kl_in_reward"):
        looked["algorithm.kl_penalty"] = lambda name: kl_penalty(token, token, name)
    # A library that the workers alone import may have more losses.
    if actor.policy_loss.loss_mode not in OPTIONS and not select(config.actor_rollout_ref.model, "external_lib"):
        looked[f"{LOSS}.loss_mode"] = get_policy_loss_fn
    for key, look in looked.items():
        try:
            look(str(OmegaConf.select(config, key)))
        except (ValueError, NotImplementedError) as error:
            raise OptionError(
                f"{key}={OmegaConf.select(config, key)} is not known to verl, which would say so after the first "
                f"rollout. {error}".rstrip()
            ) from error


def _check_options(config: Any) -> None:
    """Refuse the options of a loss of ours that its class refuses, before a worker does."""
    node = config.actor_rollout_ref.actor.policy_loss
    if node.loss_mode not in OPTIONS:
        return
    from hydra.errors import InstantiationException
    from verl.utils.config import omega_conf_to_dataclass

    wanted = f"verl_ext.integration.config.{OPTIONS[node.loss_mode]}"
    if node.get("_target_") != wanted:
        raise OptionError(
            f"{LOSS}.loss_mode={node.loss_mode} needs {LOSS}._target_={wanted}, which carries its options. Use "
            f"+recipe={node.loss_mode}."
        )
    try:
        omega_conf_to_dataclass(node)
    except InstantiationException as error:
        raise OptionError(str(error.__cause__ or error)) from error


def _check_divergence(config: Any) -> list[str]:
    """Where every batch has one update from log-probabilities of the same policy, there is no divergence to charge."""
    actor = config.actor_rollout_ref.actor
    updates = select(config.get("verl_ext"), "updates_per_batch")
    once = actor.ppo_mini_batch_size >= config.data.train_batch_size if updates is None else updates == 1
    if not once or actor.ppo_epochs > 1 or bypass(config):
        return []
    return [
        "divergence_augmented has no effect with one update a batch: the policy has not moved from the old one yet. "
        "Lower actor_rollout_ref.actor.ppo_mini_batch_size, or set verl_ext.updates_per_batch or ppo_epochs above 1."
    ]


def _check_bypass(config: Any) -> None:
    """Refuse settings of bypass mode that the loss in force would not read."""
    node = select(config.algorithm, "rollout_correction")
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if not bypass(config) or mode in BYPASS_READS:
        return
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
