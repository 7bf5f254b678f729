# SPDX-License-Identifier: Apache-2.0
"""The policy loss: a run has one, and it is the one that the settings name."""

from __future__ import annotations

from typing import Any

from verl_ext.integration.mix import component_names
from verl_ext.integration.options import OptionError, select
from verl_ext.integration.parts.base import Part


class Losses(Part):
    """Checks alone."""

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return False

    @classmethod
    def check(cls, config: Any) -> list[str]:
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
        if not asked or component_names(config.algorithm) != ["gae"]:
            return []
        return [
            f"the recipe {asked[0]} sets only the policy loss; the advantage estimator is verl's default, gae, with a "
            f"critic. Name an estimator beside it, for example +recipe=[grpo,{asked[0]}]."
        ]
