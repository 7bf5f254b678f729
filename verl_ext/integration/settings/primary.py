# SPDX-License-Identifier: Apache-2.0
"""A recipe beside a config file of the user's own: what the file says stands.

Hydra puts ``+recipe=...`` at the end of the defaults list, so that what a recipe says, its defaults above all, would
replace what the primary config says. `keep_users` composes the run again, with the recipes in front of the user's
files, as ``defaults: [ppo_trainer, recipe: [...], _self_]`` does. What a recipe is not itself without is refused.
"""

from __future__ import annotations

import re
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from verl_ext.integration.settings.options import OptionError
from verl_ext.recipes import GROUP, leaves_of, recipes_in

OWNED = re.compile(
    r"algorithm\.(adv_estimator|(rejection|modifiers)\..*)|trainer\.(device|length_lr\.enable)|.*\.strategy"
    r"|actor_rollout_ref\.(actor\.policy_loss\.(_target_|loss_mode)|rollout\.agent\.default_agent_loop)"
    r"|verl_ext\.(platform|losses\..*)"
)
"""Keys that make a recipe what it is."""

_VERLS = re.compile(r"\bverl[./](trainer|experimental)\b|^pkg://hydra|^structured:")


def keep_users(config: Any, hydra: Any) -> None:
    """Give a run with ``+recipe=...`` the values of the user's config files, in place, and say which.

    Args:
        config: composed config of the run.
        hydra: Hydra's own node of it.

    Raises:
        OptionError: a file and a recipe set one of `OWNED` to different values.
    """
    said = OmegaConf.to_container(hydra.overrides, resolve=False) if hydra else {}  # a word may hold ${...}
    words = [*said.get("hydra", []), *said.get("task", [])]
    recipes = [word for word in words if word.startswith("+") and recipes_in(word)]
    if not recipes:
        return
    loader = _RecipesFirst(GlobalHydra.instance().config_loader().get_search_path())
    name = hydra.job.config_name
    users = loader.load_configuration(name, words, RunMode.RUN)
    with open_dict(users):
        del users["hydra"]
    composed, wanted = (dict(leaves_of(OmegaConf.to_container(one, resolve=False))) for one in (config, users))
    differ = {key: (wanted[key], composed.get(key)) for key in wanted if wanted[key] != composed.get(key)}
    owned = [f"{key} ({ours} / {recipe})" for key, (ours, recipe) in differ.items() if OWNED.fullmatch(key)]
    if owned:
        raise OptionError(
            f"the config {name} and {' '.join(recipes)} both set {', '.join(owned)}, without which the recipe is not "
            "itself. Leave the recipe out, or the key out of the file; the command line wins over both."
        )
    if differ:
        kept = ", ".join(f"{key}={ours} (recipe: {recipe})" for key, (ours, recipe) in differ.items())
        print(f"verl_ext: the config {name} stands before {' '.join(recipes)}: {kept}", flush=True)
        with open_dict(config):
            config.merge_with(users)


class _RecipesFirst(ConfigLoaderImpl):
    """Hydra's composition with the recipes of the command line in front of the user's own files."""

    def _compose_config_from_defaults_list(self, defaults: list[Any], repo: Any) -> Any:
        end = len(defaults)
        while end and defaults[end - 1].config_path.startswith(f"{GROUP}/"):
            end -= 1
        start = end
        while start and not _VERLS.search(repo.load_config(defaults[start - 1].config_path).path):
            start -= 1
        reordered = [*defaults[:start], *defaults[end:], *defaults[start:end]]
        return super()._compose_config_from_defaults_list(reordered, repo)
