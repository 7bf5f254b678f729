# SPDX-License-Identifier: Apache-2.0
"""The `verl.plugins` entry point: what happens when verl is imported with verl_ext installed.

verl loads this module at the end of `import verl`, in the launcher and in every Ray worker. It is

* **light**: it imports nothing of verl that verl has not imported already, and no module of ours that computes;
* **lazy**: each registration waits for the module of verl that owns the registry (a post-import hook), so a process
  that never imports the trainer never pays for it;
* **loud**: verl swallows an exception of a plugin at DEBUG level. Here a failure is written to stderr in one line
  that says what failed and what to do, is remembered, and makes every recipe of ours refuse to start.
  In the processes of a run that uses a recipe (``VERL_EXT_STRICT=1``, set by the launch callback) it is raised;
* **inert**: names that others may have too (of estimators, losses) are registered in runs of ours only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from verl_ext.integration.compat import registrations
from verl_ext.integration.compat.wraps import STRICT
from verl_ext.recipes import recipes_in


def _guard(what: str, function: Callable[[], Any]) -> None:
    """Run one registration; on failure say so once on stderr, remember it, and raise only in a run of ours."""
    try:
        function()
    except Exception as error:
        registrations.failures[what] = f"{type(error).__name__}: {error}"
        print(
            f"verl_ext: {what} failed ({registrations.failures[what]}). Recipes of verl_ext are refused in this "
            "process; reinstall with `pip install --force-reinstall --no-deps verl-ext` next to verl>=0.9.1,<0.10, "
            "or hide the plugin with VERL_USE_EXTERNAL_PLUGINS=none.",
            file=sys.stderr,
            flush=True,
        )
        if os.environ.get(STRICT) == "1":
            raise
    else:
        registrations.done.append(what)


def _register_platform() -> None:
    """The ``cpu`` platform, known by name; used only where VERL_PLATFORM=cpu."""
    from verl_ext.cpu.platform import cpu

    cpu.register()
    # verl settles on its platform while `main_ppo` is imported, before Hydra has read any recipe.
    if any(cpu.NAME in recipes_in(argument) for argument in sys.argv[1:]):
        os.environ.setdefault("VERL_PLATFORM", cpu.NAME)


def _register_search_path(hydra: Any) -> None:
    """Hydra has found it by itself, unless another package's ``hydra_plugins/__init__.py`` hides ours."""
    from hydra.core.plugins import Plugins

    from verl_ext.search_path import RecipeSearchPath

    Plugins.instance().register(RecipeSearchPath)


def _register_estimators(module: Any) -> None:
    """In a run of ours; others may have names like ours, and find none of them taken."""
    if os.environ.get(STRICT) == "1":
        from verl_ext.integration import names

        names.register(names.in_environment())


def _extend_trainers(module: Any) -> None:
    from verl_ext.integration import trainer
    from verl_ext.integration.compat import wraps

    trainer.extend_registry()

    def make(original: Any) -> Any:
        def get_trainer_cls(name: str) -> Any:
            if os.environ.get(STRICT) == "1":
                registrations.require(TRAINER_HOOKS)
                trainer.extend_registry()  # again, for classes that others have registered meanwhile
            return original(name)

        return get_trainer_cls

    for target in wraps.GET_TRAINER:
        wraps.replace(target, make)


def _check_task_runners(module: Any) -> None:
    """The launcher learns after this import whether the run is ours."""
    from verl_ext.integration.compat import wraps

    def make(original: Any) -> Any:
        def run_ppo(config: Any, task_runner_class: Any) -> Any:
            if os.environ.get(STRICT) == "1":
                from verl_ext.integration import trainer

                try:
                    trainer.check_task_runner(config, task_runner_class)
                except trainer.OptionError as error:
                    raise SystemExit(f"verl_ext: {error}") from error
            return original(config, task_runner_class)

        return run_ppo

    wraps.replace(wraps.RUN_PPO, make)


def _check_older_trainers(module: Any) -> None:
    """In a run of ours, for task runners of somebody else."""
    if os.environ.get(STRICT) == "1":
        from verl_ext.integration.compat import wraps

        def make(original: Any) -> Any:
            def __new__(cls: type, config: Any = None, *args: Any, **kwargs: Any) -> Any:
                if config is not None:  # Ray makes its actors without arguments; the launcher has seen verl's runners
                    from verl_ext.integration import trainer

                    trainer.refuse_older(config, cls)
                return original(cls)

            return __new__

        wraps.replace(wraps.OLDER_TRAINER, make)


def _one_pass_engines(module: Any) -> None:
    """In a run of ours the FSDP engines can compute all that they read from the logits in one pass."""
    if os.environ.get(STRICT) == "1":
        from verl_ext.integration.engines import engine

        engine.extend_registry()


def _training_engines(module: Any) -> None:
    """In a run of ours the engine's sum of squared probabilities is computed in float32, too."""
    if os.environ.get(STRICT) == "1":
        from verl_ext.integration.compat import wraps
        from verl_ext.methods.logits.vocabulary import sum_pi_squared

        wraps.replace(wraps.SUM_PI_SQUARED, lambda original: sum_pi_squared)
    _one_pass_engines(module)


def _register_agent_loops(module: Any) -> None:
    for name, target in registrations.AGENT_LOOPS.items():
        module._agent_loop_registry.setdefault(name, {"_target_": target})
    if os.environ.get(STRICT) == "1":
        from verl_ext.integration.compat import wraps
        from verl_ext.rollout.shared import worker

        wraps.replace(wraps.RUN_AGENT_LOOP, worker.noting)
        wraps.replace(wraps.COMPUTE_SCORE, worker.merging_turns)


def _contain_reward_functions(module: Any) -> None:
    if os.environ.get(STRICT) == "1":
        from verl_ext.integration.compat import wraps
        from verl_ext.rollout.shared.contain import contained_reward_function

        wraps.replace(wraps.REWARD_FUNCTION, contained_reward_function)


def _insert_rollout_parts() -> None:
    from verl_ext.integration import parts
    from verl_ext.integration.parts.recovery.nodes import Nodes
    from verl_ext.rollout.agent_loops import AgentLoops
    from verl_ext.rollout.default_rewards import Rewards

    parts.insert(AgentLoops, after=Nodes)
    parts.insert(Rewards, after=AgentLoops)


_HOOKS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "verl.trainer.ppo.core_algos": ("registering the estimators and losses", _register_estimators),
    "verl.trainer.main_ppo": ("checking the task runner", _check_task_runners),
    "verl.trainer.ppo.ray_trainer": ("checking the trainer", _check_older_trainers),
    "verl.trainer.ppo.v1": ("extending verl's V1 trainers", _extend_trainers),
    "verl.workers.engine.fsdp": ("preparing the training engines", _training_engines),
    # Again when the workers are imported, for engines that others have registered meanwhile.
    "verl.workers.engine_workers": ("preparing the training engines", _one_pass_engines),
    "verl.experimental.agent_loop.agent_loop": ("registering the agent loops", _register_agent_loops),
    "verl.trainer.ppo.reward": ("containing reward functions", _contain_reward_functions),
    "hydra": ("making the recipes known to Hydra", _register_search_path),
}

TRAINER_HOOKS = ("verl.trainer.ppo.core_algos", "verl.trainer.ppo.v1", "verl.experimental.agent_loop.agent_loop")
"""Whose hooks have run in a trainer's process by the time the trainer is made."""


def _register_hooks() -> None:
    import wrapt

    from verl_ext.cpu.platform import hooks

    registrations.HOOKS.update({**_HOOKS, **hooks.HOOKS})
    for module, (what, function) in registrations.HOOKS.items():
        wrapt.register_post_import_hook(_hook(module, what, function), module)


def _hook(name: str, what: str, function: Callable[[Any], None]) -> Callable[[Any], None]:
    def run(module: Any) -> None:
        registrations.fired.add(name)
        _guard(what, lambda: function(module))

    return run


def _prepare_cpu(config: Any) -> None:
    from verl_ext.cpu.platform import cpu, settings

    cpu.activate()
    settings.complete(config)


registrations.PARTS.append(_insert_rollout_parts)
registrations.PLATFORMS["cpu"] = _prepare_cpu
registrations.AGENT_LOOPS.update(
    verl_ext_gateway="verl_ext.rollout.gateway.loop.GatewayLoop",
    verl_ext_kernels="verl_ext.rollout.kernels.loop.KernelLoop",
    verl_ext_multi_turn="verl_ext.rollout.multi_turn.MultiTurnVerifierLoop",
    verl_ext_orchestra="verl_ext.rollout.orchestra.loop.OrchestraLoop",
    verl_ext_step_wise="verl_ext.rollout.step_wise.StepWiseLoop",
)
_guard("registering the cpu platform", _register_platform)
if not registrations.failures:
    _guard("preparing the registrations", _register_hooks)
