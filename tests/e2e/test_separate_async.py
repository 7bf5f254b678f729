# SPDX-License-Identifier: Apache-2.0
"""`separate_async` without an accelerator: rollout servers of their own, whose weights come over gloo."""

from __future__ import annotations

import os

import pytest
import torch
from harness import Lab, eventually, other_tokenizer, processes
from test_main_job import finite
from test_models_runs import HERE, weights

pytestmark = pytest.mark.e2e

SEPARATE = [
    "trainer.v1.trainer_mode=separate_async",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.v1.separate_async.parameter_sync_step=1",
]


def test_trainer_and_rollout_servers_apart(standing_lab: Lab) -> None:
    run = standing_lab.run("separate_async", overrides=SEPARATE).check()
    assert sorted(run.metrics) == [1, 2]
    for step, metrics in run.metrics.items():
        assert finite(metrics) and metrics["actor/grad_norm"] > 0
        # rows say which weights they come from: at most what the trainer has done since
        assert 0 <= metrics["training/off_policy/trajectory_staleness/max"] < step
    # the first batch comes from the weights that were sent before training: the trainer's own
    assert run.metrics[1]["training/rollout_probs_diff_max"] < 1e-4


def test_each_model_has_rollout_servers_of_its_own(standing_lab: Lab) -> None:
    lab = standing_lab
    other = other_tokenizer(lab.root / "separate_other")
    run = lab.run(
        "separate_models",
        recipe="[dr_mas,cpu]",
        overrides=[
            *SEPARATE[:-2],
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "trainer.v1.separate_async.parameter_sync_step=2",  # two mini-batches between synchronisations
            "trainer.v1.separate_async.num_warmup_batches=0",  # each batch is of the weights that were sent last
            "actor_rollout_ref.actor.optim.lr=1e-2",
            "verl_ext.updates_per_batch=1",
            "data.max_prompt_length=128",
            "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra",
            "+verl_ext.orchestra.name=four",
            "+verl_ext.orchestra.modules=[seeded_team]",
            f"+verl_ext.models.other.model.path={other}",
            "+verl_ext.orchestra.agents.critic.model=other",
            "+verl_ext.models.other.model.lora_rank=4",  # an adapter, merged into what its servers are sent
            "+verl_ext.models.other.model.lora.merge=true",
            f"+verl_ext.models.still={{trained: false, model: {{path: {other}}}, pool: {{n_gpus_per_node: 1}}}}",
            "+verl_ext.orchestra.agents.judge.model=still",
            "trainer.save_freq=1",
            "trainer.test_freq=1",  # for which the training GPUs are lent to rollouts, and given back
            "data.val_max_samples=2",
        ],
        environment={"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"},
    ).check()
    assert sorted(run.metrics) == [1, 2]
    for step, metrics in run.metrics.items():
        assert finite(metrics) and metrics["training/off_policy/trajectory_staleness/max"] == 0
        rows = [(row["agent_id"], row["model"]) for row in run.rows(step)]
        assert len(rows) == 48 and set(rows) == {("writer", "policy"), ("critic", "other"), ("judge", "still")}
        for name in ("policy", "other"):  # both mini-batches; in the second step both have moved
            assert metrics[f"actor/{name}/grad_norm"] > 0
            assert metrics[f"training/{name}/rollout_probs_diff_max"] < 1e-4
        assert metrics["model/still/sequences"] == 16 and any(key.startswith("val-") for key in metrics)
    for name in ("policy", "other"):
        one, two = (weights(run, name, step=step) for step in (1, 2))
        trained = [key for key in one if name == "policy" or ".lora_" in key]
        assert trained and all(not torch.equal(one[key], two[key]) for key in trained)
    assert eventually(lambda: not processes(run.folder)), processes(run.folder)
