# SPDX-License-Identifier: Apache-2.0
"""Modifiers of the advantage: ``algorithm.modifiers: {empg: true}``, after whatever estimator or mixture computed it.

The only one so far is EMPG (`verl_ext.methods.empg`), with its options at ``algorithm.empg.*``. Its entropy is that of
the old policy, which verl's pass for the old log-probabilities stores. Rejected turns are without tokens by then: they
are neither in the batch's extremes and means nor a next step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from verl_ext.integration.columns import ActiveBatch
from verl_ext.integration.compat.data_plane import fetch
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.options import OptionError, bypass, coerce, dataclass_of, read, select
from verl_ext.methods.empg import empg

KEY = "algorithm.modifiers"


class Modifiers(Part):
    """See the module's text."""

    @classmethod
    def wanted(cls, config: Any) -> bool:
        switches = select(config.algorithm, "modifiers") or {}
        for name in switches:
            if name != "empg":
                raise OptionError(f"{KEY}.{name}: there is no such modifier. Known: empg.")
        return bool(coerce(switches.get("empg", False), bool, f"{KEY}.empg"))

    @classmethod
    def check(cls, config: Any) -> list[str]:
        if not cls.wanted(config):
            return []
        options(config)
        model_options.require_engines(config, "empg", "the entropy")
        if bypass(config):
            raise OptionError(
                "empg needs the entropy of the old policy, which comes with the old log-probabilities, but "
                "algorithm.rollout_correction.bypass_mode=true skips that pass. Set it to false."
            )
        return []

    def after_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        before, mask = data.batch["advantages"], data.batch["response_mask"]
        entropy = active.turns.unpack(fetch(self.batch, ["entropy"])["entropy"].to_padded_tensor(0.0))
        after = empg(
            before,
            entropy,
            mask,
            index=data.non_tensor_batch["uid"],
            traj_uid=active.column("traj_uid"),
            turn_index=active.column("turn_index"),
            valid_row=active.column("valid_row"),
            **options(self.config),
        )
        data.batch["advantages"] = after
        token = mask.bool()
        some = token.any(-1)
        if bool(some.any()):
            steps = torch.where(token, entropy.double(), 0.0).sum(-1)[some] / token.sum(-1)[some]
            self.metrics |= {
                "empg/step_entropy/mean": float(steps.mean()),
                "empg/step_entropy/min": float(steps.min()),
                "empg/step_entropy/max": float(steps.max()),
                "empg/advantage_rms/before": float(before[token].double().square().mean().sqrt()),
                "empg/advantage_rms/after": float(after[token].double().square().mean().sqrt()),
            }


def options(config: Any) -> dict[str, float]:
    """``algorithm.empg.*``. Raises OptionError: an unknown key, or a value out of range."""
    return dataclasses.asdict(read(config.algorithm, "empg", dataclass_of(empg)))
