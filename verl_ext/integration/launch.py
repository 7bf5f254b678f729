# SPDX-License-Identifier: Apache-2.0
"""The Hydra callback that every recipe brings: the last word before verl starts Ray.

It runs in the launcher after composition. A mistake in the configuration ends the run here, within a second, with one
line; on the CPU platform the settings that depend on others are filled in; and the processes that Ray will start are
told to load the plugin and to fail if they cannot.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections.abc import Mapping
from typing import Any

from hydra.core.utils import run_job
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf, open_dict

from verl_ext.integration.settings import primary
from verl_ext.integration.settings.options import OptionError, read
from verl_ext.sandbox import SETTINGS_VARIABLE, Sandbox, SandboxOptions, check


class LaunchCallback(Callback):
    """``hydra.callbacks.verl_ext`` of our recipes.

    A mistake raises SystemExit with one line that names it. Hydra turns any other exception of a callback into a
    warning and starts the run.
    """

    _prepared = False
    _environment: Mapping[str, str] = {}

    def on_run_start(self, config: Any, **kwargs: Any) -> None:
        """Check `config` and complete it in place. Raises SystemExit: names what is wrong."""
        _prepare_or_exit(config, config.get("hydra"))
        self._prepared = True

    def on_job_start(self, config: Any, **kwargs: Any) -> None:
        """The same for each job of a multirun (``-m``), which has no start of its own. Raises SystemExit: names what is
        wrong."""
        if not self._prepared:
            self._environment = dict(os.environ)
            _prepare_or_exit(_config_of_the_job(), config.hydra)

    def on_job_end(self, config: Any, job_return: Any = None, **kwargs: Any) -> None:
        """Say so if the run ended because the node of its trainer died, since then no process of it can.

        Nothing of a job of a multirun reaches the next one, which would go on in this one's Ray and environment.
        """
        import ray

        error = getattr(job_return, "_return_value", None)
        died = isinstance(error, ray.exceptions.RayActorError) and not isinstance(error, ray.exceptions.RayTaskError)
        if died and ray.is_initialized():
            from verl_ext.integration.parts.recovery import nodes

            print("verl_ext: the process of the trainer cannot be reached", flush=True)
            print(f"verl_ext: {nodes.lost_after() or 'the process of the trainer has died'}", flush=True)
        if not self._prepared:
            ray.shutdown()
            os.environ.clear()
            os.environ.update(self._environment)


def _prepare_or_exit(config: Any, hydra: Any) -> None:
    try:
        primary.keep_users(config, hydra)
        prepare(config)
    except Exception as error:
        raise SystemExit(f"verl_ext: {error}") from error


def _config_of_the_job() -> Any:
    """Hydra's copy of the configuration for the job that it is about to start, which no callback is told: a local
    variable of the caller (hydra-core 1.3, core/utils.py `run_job`)."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not run_job.__code__:
        frame = frame.f_back
    if frame is None or "task_cfg" not in frame.f_locals:
        raise SystemExit(
            "verl_ext: this version of Hydra does not show the configuration of a job of a multirun (-m), so it cannot "
            "be checked. Install hydra-core>=1.3.2,<1.4, or start the runs one by one without -m."
        )
    return frame.f_locals["task_cfg"]


def prepare(config: Any) -> None:
    """What `LaunchCallback` does, for callers without Hydra's command line.

    Args:
        config: composed config of verl's `ppo_trainer`, changed in place.

    Raises:
        PluginError: part of the plugin is missing in this process.
        OptionError: see `verl_ext.integration.checks.check`.
        UnsupportedVerl: the installed verl lacks what the run needs.
    """
    import verl_ext
    from verl_ext.integration import checks, estimators, names
    from verl_ext.integration.compat import registrations, verl_api
    from verl_ext.integration.mix import component_names
    from verl_ext.integration.settings import merging

    node = config.get("verl_ext") or {}
    if node.get("platform") in registrations.PLATFORMS:
        registrations.PLATFORMS[node["platform"]](config)
    import verl.trainer.ppo.core_algos  # noqa: F401  (the plugin's hook on it runs)

    registrations.require()
    estimators.load_others()
    checks.complete(config)
    checks.check(config)
    asked = sorted(names.asked(config))
    names.register(asked)
    verl_api.require(config)
    registrations.require(verl_api.hooked(config))
    os.environ[SETTINGS_VARIABLE] = _sandbox(config)
    for name, value in (node.get("env") or {}).items():
        if value is not None:
            os.environ.setdefault(str(name), str(value))  # what the shell says wins
    os.environ["VERL_EXT_STRICT"] = "1"
    os.environ["VERL_USE_EXTERNAL_MODULES"] = _modules()
    os.environ[names.VARIABLE] = ",".join(asked)
    told = ["VERL_EXT_STRICT", "VERL_USE_EXTERNAL_MODULES", names.VARIABLE, SETTINGS_VARIABLE, *(node.get("env") or {})]
    if node.get("platform") == "cpu":
        told.append("VERL_PLATFORM")
    print(f"verl_ext {verl_ext.__version__}: estimators {', '.join(component_names(config.algorithm))}", flush=True)
    print(merging.statement(config), flush=True)
    _to_ray(config, {name: os.environ[name] for name in map(str, told) if name in os.environ})


def _sandbox(config: Any) -> str:
    """``verl_ext.sandbox`` as JSON. Where the run is known to use the sandbox, its layers are checked and logged."""
    options = read(config.get("verl_ext"), "sandbox", SandboxOptions, where="verl_ext.sandbox")
    judge = str(OmegaConf.select(config, "reward.custom_reward_function.path"))
    users = [
        judge.endswith(("rewards.math", "rewards.code")),
        OmegaConf.select(config, "actor_rollout_ref.rollout.agent.default_agent_loop") == "verl_ext_multi_turn",
        OmegaConf.select(config, "verl_ext.orchestra.name") == "python",
        options.cage != SandboxOptions.cage,
    ]
    if any(users):
        print(f"verl_ext sandbox: {options.cage}: {', '.join(check(options.cage))}", flush=True)
    if judge.endswith("verl_ext.rewards.math"):
        from verl_ext.rewards import math

        with Sandbox(options, options.cage) as sandbox:
            math.check(sandbox)
    return json.dumps(dataclasses.asdict(options))


def _modules() -> str:
    """Have the plugin imported by name too: where its entry point is hidden or missing on a node, verl then says so."""
    present = [name for name in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name]
    return ",".join(dict.fromkeys([*present, "verl_ext.plugin"]))


def _to_ray(config: Any, environment: Mapping[str, str]) -> None:
    """Add the variables to the runtime environment of the Ray job; what the user has set there wins.

    Those that the job was submitted with (``ray job submit --runtime-env-json``) are left out: its processes have them,
    and Ray merges no two values of one variable, equal ones included. Raises OptionError: one of ours is another there.
    """
    submitted = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}").get("runtime_env") or {}
    job = submitted.get("env_vars") or {}
    for name, value in environment.items():
        if name.startswith("VERL_EXT_") and job.get(name, value) != value:
            raise OptionError(
                f"the Ray job was submitted with {name}={job[name]}; this run sets {value}. Leave it out there."
            )
    environment = {name: value for name, value in environment.items() if name not in job}
    with open_dict(config):
        init = OmegaConf.select(config, "ray_kwargs.ray_init")
        if init is None:
            OmegaConf.update(config, "ray_kwargs.ray_init", {}, force_add=True)
        key = "ray_kwargs.ray_init.runtime_env"
        given = OmegaConf.select(config, f"{key}.env_vars")
        given = OmegaConf.to_container(given, resolve=True) if given is not None else {}
        OmegaConf.update(config, key, {"env_vars": {**environment, **given}}, merge=True, force_add=True)
