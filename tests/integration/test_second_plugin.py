# SPDX-License-Identifier: Apache-2.0
"""Another plugin of verl beside ours, loaded before and after it: each keeps what it has registered."""

from __future__ import annotations

import json
import os
from pathlib import Path

import copies
import pytest

THEIRS = '''
"""Registers a trainer, an estimator, a loss and an agent loop, and an estimator under a name that we have too."""
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer


@register_trainer("agentcore_sync")
class AgentCoreTrainer(PPOTrainerSync):
    def on_step_end(self):
        return super().on_step_end()


@register_adv_est("gigpo")
@register_adv_est("agentcore")
def their_estimator(token_level_rewards, response_mask, **kwargs):
    return token_level_rewards * response_mask, token_level_rewards


@register_policy_loss("agentcore")
def their_loss(*args, **kwargs): ...


@register("agentcore_agent")
class AgentCoreLoop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs): ...
'''

RUN = """
import json, sys
import verl
import theirs
from hydra import compose, initialize_config_module
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry as loops
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
from verl_ext.integration import launch, names

with initialize_config_module("verl.trainer.config", version_base=None):
    given = [
        "+recipe=[trloo,length_lr]", "+algorithm.mix.agentcore=0.5", "trainer.v1.trainer_mode=agentcore_sync",
        "actor_rollout_ref.actor.policy_loss.loss_mode=agentcore", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.agent.default_agent_loop=agentcore_agent", "actor_rollout_ref.rollout.name=vllm",
    ]
    config = compose("ppo_trainer", overrides=given)
launch.prepare(config)
cls = get_trainer_cls("agentcore_sync")
estimators = core_algos.ADV_ESTIMATOR_REGISTRY
print("found", json.dumps({
    "trainer": [one.__name__ for one in cls.__mro__ if one.__name__ in ("VerlExtTrainer", "AgentCoreTrainer")],
    "theirs": [
        estimators["agentcore"] is theirs.their_estimator, estimators["gigpo"] is theirs.their_estimator,
        core_algos.get_policy_loss_fn("agentcore") is theirs.their_loss, loops["agentcore_agent"]["_target_"],
    ],
    "ours": [names.is_ours("mix"), names.is_ours("gigpo"), "verl_ext_multi_turn" in loops],
    "modules": config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES,
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("modules", ["theirs", "verl_ext.plugin,theirs"], ids=["before", "after"])
def test_a_plugin_beside_ours_keeps_what_it_has(modules: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(THEIRS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL_EXT_")}
    environment.update(PYTHONPATH=str(tmp_path), VERL_USE_EXTERNAL_MODULES=modules)
    done = copies.python("-c", RUN, env=environment, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    found = json.loads(line.removeprefix("found "))
    assert found["trainer"] == ["AgentCoreTrainer", "VerlExtTrainer", "AgentCoreTrainer"]  # ours in front, by its name
    assert found["theirs"] == [True, True, True, "theirs.AgentCoreLoop"]
    assert found["ours"] == [True, False, True]
    assert set(found["modules"].split(",")) == {"theirs", "verl_ext.plugin"}
