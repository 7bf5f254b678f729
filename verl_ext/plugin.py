# SPDX-License-Identifier: Apache-2.0
"""The `verl.plugins` entry point: what happens when verl is imported with verl_ext installed.

verl loads this module at the end of `import verl`, in the launcher and in every Ray worker. It is

* **light**: it imports nothing of verl that verl has not imported already, and no module of ours that computes;
* **lazy**: each registration waits for the module of verl that owns the registry (a post-import hook), so a process
  that never imports the trainer never pays for it;
* **loud**: verl swallows an exception of a plugin at DEBUG level. Here a failure is written to stderr in one line
  that says what failed and what to do, is remembered, and makes every recipe of ours refuse to start.
  In the processes of a run that uses a recipe (``VERL_EXT_STRICT=1``, set by the launch callback) it is raised;
* **inert**: registering a name changes nothing in a run that does not use the name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

STRICT = "VERL_EXT_STRICT"

_failures: dict[str, str] = {}
_done: list[str] = []


class PluginError(RuntimeError):
    """verl_ext is only partly loaded."""


def _guard(what: str, function: Callable[[], Any]) -> None:
    """Run one registration; on failure say so once on stderr, remember it, and raise only in a run of ours."""
    try:
        function()
    except Exception as error:
        _failures[what] = f"{type(error).__name__}: {error}"
        print(
            f"verl_ext: {what} failed ({_failures[what]}). Recipes of verl_ext are refused in this process; reinstall "
            "with `pip install --force-reinstall --no-deps verl-ext` next to verl>=0.9.1,<0.10, or hide the plugin "
            "with VERL_USE_EXTERNAL_PLUGINS=none.",
            file=sys.stderr,
            flush=True,
        )
        if os.environ.get(STRICT) == "1":
            raise
        if any(_recipes_in(argument) for argument in sys.argv[1:]):
            # Without our search path Hydra would take `+recipe=trloo` for a new key and train without the recipe.
            raise SystemExit(f"verl_ext: the run asks for a recipe, which is refused: {what} failed.") from error
    else:
        _done.append(what)


def require() -> None:
    """Raise unless every part of the plugin that was due so far is in place.

    Raises:
        PluginError: names the parts that failed and why.
    """
    if _failures:
        parts = "; ".join(f"{what}: {why}" for what, why in _failures.items())
        raise PluginError(f"verl_ext is only partly loaded, so no recipe of it can run. {parts}")
    if not _done:
        raise PluginError(
            "the verl_ext plugin is not loaded in this process: it is hidden by VERL_USE_EXTERNAL_PLUGINS="
            f"{os.environ.get('VERL_USE_EXTERNAL_PLUGINS')!r}. Unset it, or name verl_ext in it."
        )


def status() -> dict[str, Any]:
    """What is registered and what failed in this process, for `verl-ext list` and bug reports."""
    return {"registered": list(_done), "failed": dict(_failures)}


def _check_version() -> None:
    import verl
    from packaging.version import Version

    if not Version("0.9.1") <= Version(verl.__version__) < Version("0.10"):
        raise ImportError(f"verl {verl.__version__} is installed; verl_ext supports verl>=0.9.1,<0.10")


def _register_platform() -> None:
    """The ``cpu`` platform, known by name; used only where VERL_PLATFORM=cpu."""
    from verl_ext.platform import cpu

    cpu.register()
    # verl settles on its platform while `main_ppo` is imported, before Hydra has read any recipe.
    if any(cpu.NAME in _recipes_in(argument) for argument in sys.argv[1:]):
        os.environ.setdefault("VERL_PLATFORM", cpu.NAME)


def _recipes_in(argument: str) -> list[str]:
    """Recipes that a command line argument names: ``+recipe=cpu`` and ``+recipe=[trloo,cpu]`` do, others don't."""
    key, _, value = argument.partition("=")
    if key.lstrip("+") != "recipe":
        return []
    return [name.strip(" '\"") for name in value.strip("[]").split(",") if name.strip(" '\"")]


def _register_search_path(hydra: Any) -> None:
    """Let Hydra find `recipe/<name>.yaml` of this package."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    from verl_ext.recipes import is_table, search_path_uri, table_message

    for name in [name for argument in sys.argv[1:] for name in _recipes_in(argument)]:
        if "/" in name and is_table(name):
            # Hydra would merge the table into the configuration and train without any recipe.
            raise SystemExit(f"verl_ext: {table_message(name)}")

    class RecipeSearchPath(SearchPathPlugin):
        """Appends the folder that holds the recipes, after verl's own."""

        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            search_path.append(provider="verl_ext", path=search_path_uri())

    Plugins.instance().register(RecipeSearchPath)


def _register_estimators(module: Any) -> None:
    from verl_ext.integration import estimators, losses

    estimators.register()
    losses.register()


def _extend_trainers(module: Any) -> None:
    from verl_ext.integration import trainer

    trainer.extend_registry()


def _float32_sum_pi_squared(module: Any) -> None:
    """In a run of ours the engine's sum of squared probabilities is computed in float32."""
    if os.environ.get(STRICT) == "1":
        from verl_ext.integration import wraps
        from verl_ext.methods.vocabulary import sum_pi_squared

        wraps.replace(wraps.SUM_PI_SQUARED, lambda original: sum_pi_squared)


def _one_pass_engines(module: Any) -> None:
    """In a run of ours the FSDP engines can compute all that they read from the logits in one pass."""
    if os.environ.get(STRICT) == "1":
        from verl_ext.integration import engine

        engine.extend_registry()


def _training_engines(module: Any) -> None:
    _float32_sum_pi_squared(module)
    _one_pass_engines(module)


def _register_agent_loops(module: Any) -> None:
    for name, target in AGENT_LOOPS.items():
        module._agent_loop_registry.setdefault(name, {"_target_": target})


AGENT_LOOPS = {
    "verl_ext_multi_turn": "verl_ext.rollout.multi_turn.MultiTurnVerifierLoop",
    "verl_ext_orchestra": "verl_ext.rollout.orchestra.loop.OrchestraLoop",
    "verl_ext_step_wise": "verl_ext.rollout.step_wise.StepWiseLoop",
}
"""Agent loops by the name that the data column ``agent_name`` or ``rollout.agent.default_agent_loop`` uses."""

_HOOKS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "verl.trainer.ppo.core_algos": ("registering the estimators and losses", _register_estimators),
    "verl.trainer.ppo.v1": ("extending verl's V1 trainers", _extend_trainers),
    "verl.workers.engine.fsdp": ("preparing the training engines", _training_engines),
    # Again when the workers are imported, for engines that others have registered meanwhile.
    "verl.workers.engine_workers": ("preparing the training engines", _one_pass_engines),
    "verl.experimental.agent_loop.agent_loop": ("registering the agent loops", _register_agent_loops),
    "hydra": ("making the recipes known to Hydra", _register_search_path),
}


def _register_hooks() -> None:
    import wrapt

    from verl_ext.platform import hooks

    for module, (what, function) in {**_HOOKS, **hooks.HOOKS}.items():
        wrapt.register_post_import_hook(_hook(what, function), module)


def _hook(what: str, function: Callable[[Any], None]) -> Callable[[Any], None]:
    def run(module: Any) -> None:
        _guard(what, lambda: function(module))

    return run


_guard("checking the version of verl", _check_version)
_guard("registering the cpu platform", _register_platform)
if not _failures:
    _guard("preparing the registrations", _register_hooks)
