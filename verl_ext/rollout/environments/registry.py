# SPDX-License-Identifier: Apache-2.0
"""From the name in a configuration to an environment class."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import pkgutil

from verl_ext.rollout.environments.protocol import INVALID_ACTION, EnvironmentUnavailable

BUILT_IN = {
    "gymnasium": "verl_ext.rollout.environments.shipped.gymnasium_env:GymnasiumEnvironment",
    "textworld": "verl_ext.rollout.environments.shipped.textworld_env:TextWorldEnvironment",
    "textarena": "verl_ext.rollout.environments.shipped.textarena_env:TextArenaEnvironment",
    "openenv": "verl_ext.rollout.environments.shipped.openenv_env:OpenEnvEnvironment",
    "alfworld": "verl_ext.rollout.environments.shipped.alfworld_env:AlfworldEnvironment",
    "webshop": "verl_ext.rollout.environments.shipped.webshop_env:WebShopEnvironment",
}
"""Import paths of the shipped environments by name."""


def target(name: str) -> str:
    """The import path ``module:Class`` of a name, which is a key of :data:`BUILT_IN` or such a path itself.

    Raises EnvironmentUnavailable: neither; the message names the nearest.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if colon and module and attribute:
        return name
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise EnvironmentUnavailable(
        f"environment {name!r} is not known.{hint} Give one of {', '.join(BUILT_IN)}, or an import path of your own "
        "such as my_package.my_module:MyEnvironment."
    )


def load(name: str) -> type:
    """Import an environment class by name and look at it.

    Raises EnvironmentUnavailable: it cannot be imported, lacks ``reset`` or ``step``, or a package is missing.
    """
    path = target(name)
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise EnvironmentUnavailable(
            f"environment {name!r} cannot be imported: {error}. It is looked for on PYTHONPATH and among the installed "
            "packages."
        ) from error
    if not inspect.isclass(found):
        raise EnvironmentUnavailable(f"environment {name!r} is {found!r}; expected a class")
    for method in ("reset", "step"):
        if not callable(getattr(found, method, None)):
            raise EnvironmentUnavailable(f"environment {name!r} has no method {method!r}")
    rule = getattr(found, "invalid_action", "pass")
    if rule not in INVALID_ACTION:
        raise EnvironmentUnavailable(f"environment {name!r} says invalid_action={rule!r}; use one of {INVALID_ACTION}")
    if is_async(found) != inspect.iscoroutinefunction(found.reset):  # type: ignore[attr-defined]
        raise EnvironmentUnavailable(f"environment {name!r}: reset and step must both be coroutines, or neither")
    for package, remedy in getattr(found, "requires", {}).items():
        if importlib.util.find_spec(package) is None:
            raise EnvironmentUnavailable(f"environment {name!r} needs the package {package!r}: {remedy}")
    return found


def is_async(environment: type) -> bool:
    """Whether its methods are coroutines."""
    return inspect.iscoroutinefunction(environment.step)  # type: ignore[attr-defined]
