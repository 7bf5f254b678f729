# SPDX-License-Identifier: Apache-2.0
"""What is registered with the collection, and what of that has failed. `verl_ext.plugin` fills it, so that nothing here
imports what is above it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

PARTS: list[Callable[[], None]] = []
"""Each calls `verl_ext.integration.parts.insert` for the parts of one wing or package; called when the parts are first
needed, in the process that needs them."""

PLATFORMS: dict[str, Callable[[Any], None]] = {}
"""By ``verl_ext.platform``: prepares the launcher's process and completes the config, before verl's trainer is
imported."""

AGENT_LOOPS: dict[str, str] = {}
"""Classes of our agent loops, by the name that the data column ``agent_name`` or ``rollout.agent.default_agent_loop``
uses."""

HOOKS: dict[str, tuple[str, Callable[[Any], None]]] = {}
"""By module of verl: what is done once it is imported, in words and as a function of the module."""

failures: dict[str, str] = {}
"""What has failed, and why."""
done: list[str] = []
fired: set[str] = set()
"""Modules of verl whose hook has run."""


class PluginError(RuntimeError):
    """verl_ext is only partly loaded."""


def require(modules: Iterable[str] = ()) -> None:
    """Raise unless every part of the plugin that was due so far is in place.

    Args:
        modules: modules of verl that have been imported, so that their hooks must have run by now.

    Raises:
        PluginError: names the parts that failed and why, or the hooks that have not run.
    """
    if failures:
        parts = "; ".join(f"{what}: {why}" for what, why in failures.items())
        raise PluginError(f"verl_ext is only partly loaded, so no recipe of it can run. {parts}")
    if not done:
        raise PluginError(
            "the verl_ext plugin is not loaded in this process: it is hidden by VERL_USE_EXTERNAL_PLUGINS="
            f"{os.environ.get('VERL_USE_EXTERNAL_PLUGINS')!r}. Unset it, or name verl_ext in it."
        )
    waiting = [f"{HOOKS[name][0]} (when {name} is imported)" for name in modules if name not in fired]
    if waiting:
        raise PluginError(
            "verl_ext is only partly loaded, so no recipe of it can run. Not done in this process: "
            f"{'; '.join(waiting)}."
        )
