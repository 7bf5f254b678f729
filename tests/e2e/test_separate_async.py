# SPDX-License-Identifier: Apache-2.0
"""`separate_async` without an accelerator: rollout servers of their own, whose weights come over gloo."""

from __future__ import annotations

import pytest
from harness import Lab
from test_main_job import finite

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
