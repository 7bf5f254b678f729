# SPDX-License-Identifier: Apache-2.0
"""The reward function of a run that names none: verl's by data source, with what evaluates in the sandbox."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from verl_ext.integration.compat import registrations, verl_api
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings.options import OptionError

PATH = "reward.custom_reward_function.path"
MODEL = "reward.reward_model.enable"
OURS = "pkg://verl_ext.rewards.default"
OLD = (
    *("custom_reward_function.path", "reward_model.reward_manager", "reward_model.enable", "reward_model.model.path"),
    *("reward_model.reward_kwargs", "sandbox_fusion.url"),
)
"""Spellings of verl's that its V1 trainer does not read (0.9.1: only `migrate_legacy_reward_impl` does)."""
JUDGE = ("verl_ext_orchestra", "verl_ext_gateway")
"""Our loops that have ``reward.custom_reward_function`` judge an answer; the others have a verifier of their own."""


class Rewards(Part):
    """Sets ``reward.custom_reward_function.path`` to `verl_ext.rewards.default` where verl would judge by itself, and
    refuses settings that would be left out.
    """

    @classmethod
    def complete(cls, config: Any) -> None:
        if any(OmegaConf.select(config, key) for key in (PATH, "reward.sandbox_fusion.url", MODEL)):
            return
        with open_dict(config):
            OmegaConf.update(config, PATH, OURS, force_add=True)
            OmegaConf.update(config, "reward.custom_reward_function.name", "compute_score", force_add=True)

    @classmethod
    def check(cls, config: Any) -> list[str]:
        for key in OLD:
            if (value := OmegaConf.select(config, key)) is not None:
                raise OptionError(f"{key}={value} is read by no trainer of V1. {_new(key)}")
        if (key := OmegaConf.select(config, "data.reward_fn_key")) not in (None, "data_source"):
            raise OptionError(
                f"data.reward_fn_key={key} is read by no trainer of V1. Call the column data_source in the data."
            )
        named = verl_api.loops_named(config)
        files = OmegaConf.select(config, "data.train_files")
        read = not isinstance(files, str) or Path(files).expanduser().is_file()
        if named is None:
            named = {str(OmegaConf.select(config, "actor_rollout_ref.rollout.agent.default_agent_loop"))}
        ours = sorted(named & set(registrations.AGENT_LOOPS))
        warnings = []
        for key, value, why in _left_out(config, ours):
            loops = f"the agent loop{'s' * (len(ours) > 1)} {' and '.join(ours)}"
            said = f"{key}={value} has no effect on the rows of {loops}: {why}"
            # Rows of the data may name another loop; where they are not read, such as before they are made, it is said.
            if (named == set(ours) and (key != PATH or read)) or "overwritten" in why:
                raise OptionError(f"{said}. Leave it out, or have one of verl's own agent loops play these rows.")
            warnings.append(f"{said}; it counts for the rows of other agent loops alone.")
        return warnings


def _left_out(config: Any, ours: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """Settings that some of these agent loops don't read, with values and why."""
    if not ours:
        return
    own = "each of their trajectories comes with its reward"
    manager = {key: OmegaConf.select(config, f"reward.reward_manager.{key}") for key in ("name", "source")}
    for key, usual in (("name", "naive"), ("source", "register")):
        if manager[key] not in (None, usual):
            yield f"reward.reward_manager.{key}", manager[key], f"{own}, and no reward manager sees them"
    if OmegaConf.select(config, "reward.reward_kwargs"):
        keys = ", ".join(OmegaConf.select(config, "reward.reward_kwargs"))
        yield "reward.reward_kwargs", f"{{{keys}}}", f"{own}, and no reward manager sees them"
    if OmegaConf.select(config, MODEL):
        apart = OmegaConf.select(config, "reward.reward_model.enable_resource_pool")
        yield MODEL, "true", f"{own}, " + ("and no reward model is asked" if apart else "which would be overwritten")
    if (url := OmegaConf.select(config, "reward.sandbox_fusion.url")) is not None:
        yield "reward.sandbox_fusion.url", url, "programs are judged in the sandbox of verl_ext"
    path = OmegaConf.select(config, PATH)
    if path not in (None, OURS) and not set(ours) & set(JUDGE):
        yield PATH, path, "they have a verifier of their own"


def _new(key: str) -> str:
    """What to say in the place of an old spelling."""
    new = {
        "reward_model.reward_manager": "reward.reward_manager.name",
        "reward_model.model.path": "reward.reward_model.model_path",
        "reward_model.reward_kwargs": "reward.reward_kwargs",
    }
    return f"Say {new.get(key, f'reward.{key}')}."
