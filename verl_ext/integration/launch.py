# SPDX-License-Identifier: Apache-2.0
"""The Hydra callback that every recipe brings: the last word before verl starts Ray.

It runs in the launcher after composition. A mistake in the configuration ends the run here, within a second, with one
line; on the CPU platform the settings that depend on others are filled in; and the processes that Ray will start are
told to load the plugin and to fail if they cannot.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import OmegaConf, open_dict


class LaunchCallback(Callback):
    """``hydra.callbacks.verl_ext`` of our recipes."""

    def on_run_start(self, config: Any, **kwargs: Any) -> None:
        """Check `config` and complete it in place.

        Raises:
            SystemExit: with one line that names what is wrong. Hydra turns any other exception of a callback into a
                warning and starts the run.
        """
        try:
            prepare(config)
        except Exception as error:
            raise SystemExit(f"verl_ext: {error}") from error


def prepare(config: Any) -> None:
    """What `LaunchCallback` does, for callers without Hydra's command line.

    Args:
        config: composed config of verl's `ppo_trainer`, changed in place.

    Raises:
        PluginError: part of the plugin is missing in this process.
        OptionError: see `verl_ext.integration.checks.check`.
    """
    import verl_ext
    from verl_ext import plugin
    from verl_ext.integration import checks
    from verl_ext.integration.mix import component_names

    node = config.get("verl_ext") or {}
    if node.get("platform") == "cpu":
        from verl_ext.platform import cpu, settings

        cpu.activate()
        settings.complete(config)
    import verl.trainer.ppo.core_algos  # noqa: F401  (the estimators are registered when this is imported)

    plugin.require()
    checks.check(config)
    for name, value in (node.get("env") or {}).items():
        if value is not None:
            os.environ.setdefault(str(name), str(value))  # what the shell says wins
    os.environ["VERL_EXT_STRICT"] = "1"
    os.environ["VERL_USE_EXTERNAL_MODULES"] = _modules()
    names = ["VERL_EXT_STRICT", "VERL_USE_EXTERNAL_MODULES", *(node.get("env") or {})]
    if node.get("platform") == "cpu":
        names.append("VERL_PLATFORM")
    print(f"verl_ext {verl_ext.__version__}: estimators {', '.join(component_names(config.algorithm))}", flush=True)
    _to_ray(config, {name: os.environ[name] for name in map(str, names) if name in os.environ})


def _modules() -> str:
    """Have the plugin imported by name too: where its entry point is hidden or missing on a node, verl then says so."""
    present = [name for name in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name]
    return ",".join(dict.fromkeys([*present, "verl_ext.plugin"]))


def _to_ray(config: Any, environment: Mapping[str, str]) -> None:
    """Add the variables to the runtime environment of the Ray job; what the user has set there wins."""
    with open_dict(config):
        init = OmegaConf.select(config, "ray_kwargs.ray_init")
        if init is None:
            OmegaConf.update(config, "ray_kwargs.ray_init", {}, force_add=True)
        given = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars")
        given = OmegaConf.to_container(given, resolve=True) if given is not None else {}
        OmegaConf.update(
            config,
            "ray_kwargs.ray_init.runtime_env",
            {"env_vars": {**environment, **given}},
            merge=True,
            force_add=True,
        )
