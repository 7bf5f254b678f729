# SPDX-License-Identifier: Apache-2.0
"""Dynamic vocabulary pruning in runs of the real trainer: both sides prune alike, and what differs is kept out."""

from __future__ import annotations

import math
from typing import Any

import pytest
from harness import Lab
from test_main_job import finite

pytestmark = pytest.mark.e2e

# An untrained model is nearly uniform: this keeps a few of its 259 tokens.
RHO = 0.9


def mismatch(step: dict[str, Any], name: str) -> float:
    return float(step[f"{name}/max"])


def test_sampler_and_trainer_prune_alike(standing_lab: Lab) -> None:
    run = standing_lab.run(
        "dvp", recipe="[dvp,grpo,mrs,cpu]", overrides=[f"dvp.rho={RHO}", "trainer.test_freq=2", "trainer.save_freq=-1"]
    ).check()
    assert sorted(run.metrics) == [1, 2]
    for step in run.metrics.values():
        assert finite(step)
        assert 1 <= step["dvp/set_size/mean"] < 60 and step["dvp/kept_mass/mean"] < 0.5
        # float32 on both sides: the same set to the token, the same log-probabilities
        assert step["dvp/out_of_set_fraction"] == 0
        assert mismatch(step, "mismatch") <= 1e-5
        assert step["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-5)
        # a trainer that does not prune would differ by the mass that the sampler left out
        assert mismatch(step, "mismatch_unpruned") > 0.5
        assert 0 <= step["actor/dvp/out_of_set_fraction"] < 0.5
        assert step["actor/entropy"] < math.log(60) < math.log(259)
        # and rules of rejection compare the two as pruned
        assert step["rejection/mrs/kept_share"] == 1
        assert step["rejection/mrs/statistic/p95"] == pytest.approx(1, abs=1e-5)
    assert run.metrics[1]["actor/grad_norm"] > 0
    assert any(name.startswith("val-core/") for name in run.metrics[2])


def test_a_sampler_that_differs_with_a_reference_otb_and_kpo(standing_lab: Lab) -> None:
    """The sampler computes in bfloat16, so that some of its tokens are outside the trainer's set."""
    run = standing_lab.run(
        "dvp_otb_kpo",
        recipe="[dvp,otb,kpo,ser,cpu]",
        overrides=[
            "algorithm.ser.threshold=0.02",
            f"dvp.rho={RHO}",
            "actor_rollout_ref.rollout.dtype=bfloat16",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            # Small, since the second update of a step is in its mean of the divergence from the reference.
            "actor_rollout_ref.actor.optim.lr=1e-5",
            "actor_rollout_ref.rollout.temperature=0.7",
            "actor_rollout_ref.model.use_remove_padding=true",
        ],
    ).check()
    outside = [step["dvp/out_of_set_fraction"] for step in run.metrics.values()]
    assert 0 < max(outside) < 0.3
    for step in run.metrics.values():
        assert finite(step)
        assert step["otb/effective_samples"] >= 1
        # the estimate is not negative, but for the rounding of equal policies in float32 at the first step
        assert step["actor/kl_loss"] >= -1e-6
        # in the set: no logarithm of a vanishing probability, but one token more or less in a set of few shifts all
        assert mismatch(step, "mismatch") < 2
        assert 0 < step["rejection/kept_share"] <= 1 and step["rejection/ser/statistic/p5"] > 0
    # pruned on its own set, the reference is the policy at first
    assert run.metrics[1]["actor/kl_loss"] < 0.05
    assert run.metrics[2]["actor/kl_loss"] > 0
    share = [sum(step[f"dvp/out_of_set_fraction/quarter_{k}"] for k in (1, 2, 3, 4)) for step in run.metrics.values()]
    assert max(share) > 0


def test_bypass_mode_prunes_in_the_update(standing_lab: Lab) -> None:
    run = standing_lab.run(
        "dvp_bypass",
        recipe="[dvp,grpo,cpu]",
        overrides=[
            f"dvp.rho={RHO}",
            "algorithm.rollout_correction.bypass_mode=true",
            # several updates of a batch, in which tokens leave the set
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.actor.optim.lr=1e-4",
            "trainer.v1.trainer_mode=colocate_async",
        ],
    ).check()
    for step in run.metrics.values():
        assert finite(step)
        assert "dvp/set_size/mean" not in step  # there is no old-log-prob pass
    assert run.metrics[1]["actor/grad_norm"] > 0
    # So few tokens make a set here that the updates of a batch soon leave most of its samples outside.
    assert 0 < max(step["actor/dvp/out_of_set_fraction"] for step in run.metrics.values()) < 1
