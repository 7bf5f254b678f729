# SPDX-License-Identifier: Apache-2.0
"""A run that names nothing of ours is bit for bit the same with the plugin and without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import Lab

from verl_ext.cpu.platform import fork_worker
from verl_ext.recipes import recipe_root

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent


def leaves(node: Any, prefix: str = "") -> Iterator[str]:
    """Hydra overrides that set every leaf of a YAML node."""
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{name}.")
        else:
            yield f"++{name}={str(value).lower() if isinstance(value, bool) else value}".replace("'", "")


def test_grpo_is_the_same_with_and_without_the_plugin(copied_lab: Lab) -> None:
    loops = copied_lab.root / "seeded.yaml"
    loops.write_text("- {name: seeded, _target_: scripted_loops.Seeded}\n")
    recipe = yaml.safe_load((recipe_root() / "recipe" / "cpu.yaml").read_text())
    environment = {name: str(value) for name, value in recipe["verl_ext"]["env"].items()}
    environment.update(VERL_PLATFORM="cpu", PYTHONPATH=f"{HERE}:{os.environ.get('PYTHONPATH', '')}")
    overrides = [
        *leaves({key: value for key, value in recipe.items() if key not in ("defaults", "verl_ext")}),
        "algorithm.adv_estimator=grpo",
        "+ray_kwargs.ray_init.num_gpus=1",
        "ray_kwargs.ray_init.num_cpus=20",
        "+ray_kwargs.ray_init.include_dashboard=false",
        # Both save themselves most of their imports in the way that the recipe `cpu` does.
        f"++ray_kwargs.ray_init.runtime_env.py_executable='{fork_worker.py_executable()}'",
        "trainer.save_freq=2",
        # Float sums depend on the order of their terms, and verl's row order on which rollout ends first. So: one
        # prompt a step, its rows sorted, a seed for each sample, and one request at a time in the engine.
        "++actor_rollout_ref.rollout.engine_kwargs.embedded.max_batch_size=1",
        "data.train_batch_size=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        f"trainer.v1.sampler.custom_sampler.path={HERE / 'sorted_buffer.py'}",
        "trainer.v1.sampler.custom_sampler.name=SortedReplayBuffer",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=seeded",
    ]
    without = copied_lab.run(
        "inert_without",
        recipe="",
        overrides=overrides,
        environment={
            **environment,
            "VERL_USE_EXTERNAL_PLUGINS": "none",
            "VERL_USE_EXTERNAL_MODULES": "cpu_platform_only",
        },
    ).check()
    with_plugin = copied_lab.run("inert_with", recipe="", overrides=overrides, environment=environment).check()

    machine = ("timing", "perf/", "actor/perf", "throughput")
    for step in (1, 2):
        one, two = (
            {k: v for k, v in run.metrics[step].items() if not k.startswith(machine)} for run in (without, with_plugin)
        )
        assert one == two
        assert len(one) > 40 and one["actor/grad_norm"] > 0
    states = [
        torch.load(run.folder / "checkpoints/global_step_2/actor/model_world_size_1_rank_0.pt", weights_only=False)
        for run in (without, with_plugin)
    ]
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        local = [getattr(state[name], "_local_tensor", state[name]) for state in states]
        assert torch.equal(*local), name
