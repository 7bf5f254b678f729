# SPDX-License-Identifier: Apache-2.0
"""Dynamic vocabulary pruning in runs of the real trainer: both sides prune alike, and what differs is kept out."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from harness import Lab, other_tokenizer
from test_main_job import finite
from test_models_runs import HERE, weights
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.e2e

# An untrained model is nearly uniform: this keeps a few of its 259 tokens.
RHO = 0.9
# A token so near to the edge of the set is in it or not by the rounding of float32. One step in eight has such a token.
EDGE = 2e-6


def mismatch(step: dict[str, Any], name: str) -> float:
    return float(step[f"{name}/max"])


@torch.no_grad()
def prunes(made: Any, record: dict[str, Any], name: str) -> tuple[int, int, int]:
    """Compare the rows of the model `name` with `made`, a model with its weights, pruned by transformers alone.

    Returns: the number of tokens, the largest token id, and for how many tokens rounding decides what is in the set.
    """
    tokens, compared, largest, open_ = record["tokens"], 0, 0, 0
    for row in (row for row, model in enumerate(record["columns"]["model"]) if model == name):
        prompt, answer = (record[which][row].long() for which in ("prompts", "responses"))
        logits = made(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        above = logits - logits.amax(-1, keepdim=True) - math.log(RHO)
        pruned = logits.masked_fill(above < 0, -math.inf).log_softmax(-1)
        assert (above.gather(-1, answer[:, None]) > -1e-5).all()
        clear = above.abs().amin(-1) > EDGE
        expected = pruned.gather(-1, answer[:, None])[clear, 0].float()
        sampled, trained = (
            tokens[which][row, : len(answer)][clear] for which in ("rollout_log_probs", "old_log_probs")
        )
        for one, other in ((sampled, expected), (trained, expected), (sampled, trained)):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
        compared, largest = compared + len(answer), max(largest, int(answer.max()))
        open_ += int((~clear).sum())
    return compared, largest, open_


def test_sampler_and_trainer_prune_alike_by_the_set_of_each_model(standing_lab: Lab) -> None:
    lab = standing_lab
    paths = {"policy": lab.model, "other": other_tokenizer(lab.root / "dvp_other")}
    run = lab.run(
        "dvp",
        recipe="[dvp,grpo,mrs,cpu]",
        overrides=[
            f"dvp.rho={RHO}",
            "data.max_prompt_length=128",
            "verl_ext.updates_per_batch=1",
            "actor_rollout_ref.actor.optim.lr=3e-4",  # with 1e-3 a set of the second step has one token or two
            f"verl_ext.record_dir={lab.root / 'dvp' / 'records'}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra",
            "+verl_ext.orchestra.name=four",
            "+verl_ext.orchestra.modules=[seeded_team]",
            f"+verl_ext.models.other.model.path={paths['other']}",
            "+verl_ext.orchestra.agents.critic.model=other",
            "trainer.test_freq=2",
            "trainer.save_freq=1",
        ],
        environment={"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"},
    ).check()
    assert sorted(run.metrics) == [1, 2]
    for number, step in run.metrics.items():
        assert finite(step)
        assert 1 <= step["dvp/set_size/mean"] < 60 and step["dvp/kept_mass/mean"] < 0.5
        # a trainer that does not prune would differ by the mass that the sampler left out
        assert mismatch(step, "mismatch_unpruned") > 0.5
        # float32 on both sides: the same set to the token, the same log-probabilities
        whole, by_rounding = 0, 0
        record = torch.load(lab.root / "dvp" / "records" / f"{number}.pt")
        for name, path in paths.items():
            assert 0 <= step[f"actor/{name}/dvp/out_of_set_fraction"] < 0.5
            assert step[f"actor/{name}/entropy"] < math.log(60) < math.log(259)
            assert step[f"actor/{name}/grad_norm"] > 0
            made = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
            if number == 2:
                made.load_state_dict(weights(run, name, step=1))
            compared, largest, open_ = prunes(made, record, name)
            assert compared > 8 and (largest >= 259) == (name == "other")  # of its own vocabulary
            assert open_ or step[f"training/{name}/rollout_probs_diff_max"] <= 1e-5
            whole, by_rounding = whole + compared, by_rounding + open_
        rows = len(record["keys"])
        assert round(step["dvp/out_of_set_fraction"] * whole) <= by_rounding
        # and rules of rejection compare the two as pruned
        assert step["rejection/mrs/kept_share"] >= 1 - by_rounding / rows
        if not by_rounding:
            assert step["dvp/out_of_set_fraction"] == 0
            assert mismatch(step, "mismatch") <= 1e-5
            assert step["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-5)
            assert step["rejection/mrs/kept_share"] == 1
            assert step["rejection/mrs/statistic/p95"] == pytest.approx(1, abs=1e-5)
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
            # Two updates a step, of 1,024 tokens, of which half a percent is outside; of 128 all are often in the set.
            "data.train_batch_size=16",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
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
    share = [sum(step[f"dvp/out_of_set_quarter_{k}"] for k in (1, 2, 3, 4)) for step in run.metrics.values()]
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
