# SPDX-License-Identifier: Apache-2.0
"""Methods, mixtures of them and variants of the recipe `cpu` train through verl's real trainer, with two agents."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from harness import Lab
from test_main_job import HERE, finite

pytestmark = pytest.mark.e2e

LOOPS = "- {name: team, _target_: scripted_loops.Team}\n"

# recipe -> metrics that must be there, with the values that must lie in the given range
METHODS = {
    "gigpo,maxrl": {
        "gigpo/group_size/mean": (1, 12),
        "maxrl/group_size/mean": (2, 12),
        "mix/gigpo/rms": (1e-6, math.inf),
        "mix/maxrl/rms": (1e-6, math.inf),
    },
    "grpo,divergence_augmented": {"actor/divergence/abs_mean": (1e-12, math.inf)},
    "grpo,hybrid_imitation": {
        "actor/imitation/kl": (1e-9, 10),
        "actor/imitation/student_mass": (0.01, 0.99),
        "actor/imitation/teacher_mass": (0.01, 0.99),
    },
    "trloo,mrs": {
        "rejection/mrs/kept_share": (1, 1),
        "rejection/mrs/statistic/p50": (0.9999, 1.0001),
        "rejection/trm/kept_share": (1, 1),
        "rejection/trm/statistic_max/p95": (0, 1e-6),
        "rejection/skipped_updates/count": (0, 0),
    },
    "dr_mas,otb": {
        "dr_mas/group_size/mean": (2, 8),
        "agent/writer/gradient_energy_share": (0, 1),
        "otb/effective_samples": (1, 12),
        "otb/baseline/mean": (0, 100),
        "variance_proxy/proxy2_total_power": (0, math.inf),
        "actor/logit_update/mean": (1e-6, math.inf),
        "actor/logit_update/max": (1e-6, math.inf),
        "mix/dr_mas/rms": (1e-6, math.inf),
        "mix/otb/rms": (1e-6, math.inf),
        "mix/tir_optimal_token_baseline/rms": (0, math.inf),
    },
    "hgpo,mrs,trm,ln_trm,ser,simpletir,variance_filter,empg,kpo": {
        **{f"rejection/{rule}/kept_share": (1, 1) for rule in ("mrs", "trm", "ln_trm", "ser", "simpletir")},
        "rejection/variance_filter/kept_share": (0.2, 0.8),
        "rejection/kept_share": (0.2, 0.8),
        "rejection/mrs/statistic/p95": (0.9999, 1.0001),
        "rejection/trm/statistic_max/p95": (0, 1e-6),
        "rejection/log_ppl_gap/mean": (-1e-4, 1e-4),
        "rejection/skipped_updates/count": (0, 4),
        "empg/step_entropy/max": (4, math.log(260)),
        "agent/writer/grad_norm/mean": (0, math.inf),
        "agent/critic/grad_norm/mean": (0, math.inf),
        "actor/kpo/log_ratio_std": (0, math.inf),
    },
    "hgpo,rloo,empg,kpo": {
        "mix/hgpo/weight": (0.5, 0.5),
        "mix/hgpo/rms": (1e-6, math.inf),
        "hgpo/level_1/usable_share": (0.01, 1),
        "hgpo/level_2/usable_share": (0, 1),
        "actor/kpo/time_constant_tokens": (999, 1001),
        "actor/pg_clipfrac": (0, 1),
        "empg/advantage_rms/after": (1e-6, math.inf),
        "actor/kpo/filtered_log_ratio_std": (0, math.inf),
    },
}

# recipe -> what else its run shows: another mode of the trainer, a reference, an adapter
VARIANTS = {
    "dr_mas,otb": ["trainer.v1.trainer_mode=colocate_async"],
    "gigpo,maxrl": ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.1"],
    "trloo,mrs": ["actor_rollout_ref.model.lora_rank=4"],
    "grpo,divergence_augmented": ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=true"],
}


@pytest.mark.parametrize("recipe", METHODS)
def test_method_trains(standing_lab: Lab, recipe: str) -> None:
    path = standing_lab.root / "team.yaml"
    path.write_text(LOOPS)
    overrides = [
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={path}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=team",
        # Two updates a batch, so that the ratio moves.
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        *VARIANTS.get(recipe, []),
    ]
    if recipe == "dr_mas,otb":
        # verl's own, beside ours: it gets its input here, and with these turns it is the same estimator.
        overrides.append("+algorithm.mix.tir_optimal_token_baseline=1.0")
    if recipe == "trloo,mrs":
        overrides += ["+algorithm.rejection.trm=true", "+algorithm.trm.divergence=top_k"]
    if "variance_filter" in recipe:
        # Half of the prompts; and nothing is void, since random text has neither code nor answer.
        overrides += ["algorithm.variance_filter.quantile=0.5", "algorithm.simpletir.answer=''"]
        overrides.append("algorithm.trm.divergence=exact")  # sampler and trainer have the same weights in float32
        overrides.append("verl_ext.agent_gradients=true")
    environment = {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    run = standing_lab.run(
        f"method_{recipe.replace(',', '_')[:40]}",
        recipe=f"[{recipe},cpu]",
        overrides=overrides,
        environment=environment,
    ).check()
    metrics = run.metrics
    assert sorted(metrics) == [1, 2]
    for step in metrics.values():
        assert finite(step)
        assert step["actor/grad_norm"] > 0
        assert step["rollout/turns"] == 40 and step["rollout/trajectories"] == 16
        for name, (low, high) in METHODS[recipe].items():
            assert low <= step[name] <= high, (name, step[name])
        if recipe in VARIANTS and recipe != "dr_mas,otb":  # whose rollouts may be one update older than the trainer
            assert step["training/rollout_probs_diff_max"] < 1e-4
    if recipe == "gigpo,maxrl":
        assert metrics[2]["actor/kl_loss"] > 0
    if recipe == "dr_mas,otb":
        ours, verls = (metrics[1][f"mix/{name}/rms"] for name in ("otb", "tir_optimal_token_baseline"))
        assert ours == pytest.approx(verls, rel=1e-4)
        assert metrics[1]["mix/correlation/otb-tir_optimal_token_baseline"] == pytest.approx(1.0, abs=1e-6)
    if "variance_filter" in recipe:
        for step in metrics.values():  # an agent without a kept row in an update has no part of its gradient
            parts = sum(step[f"agent/{agent}/grad_norm/max"] for agent in ("writer", "critic"))
            assert 0 < step["actor/grad_norm"] <= parts * (1 + 1e-5)
    rows = run.rows(1)
    if "empg" in recipe and "mrs" not in recipe:  # it takes the mean off, whatever the mixture's was
        assert sum(row["advantage"] for row in rows) == pytest.approx(0, abs=1e-4)
    assert {row["agent_id"] for row in rows} == {"writer", "critic"}
    assert any(row["advantage"] != 0 for row in rows)


def test_long_responses_lower_the_learning_rate_and_rejected_ones_are_not_trained_on(standing_lab: Lab) -> None:
    """Responses of known length and mismatch: two steps, the second three times as long."""
    path = standing_lab.root / "surging.yaml"
    path.write_text("- {name: surging, _target_: scripted_loops.Surging}\n")
    overrides = [
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={path}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=surging",
        "data.max_response_length=24",
        "verl_ext.updates_per_batch=2",
        "algorithm.trm.max=null",
        "algorithm.trm.avg=0.06",  # a sampler that is 0.5 nats too sure has k3 = 0.11
        "trainer.length_lr.warmup_steps=0",
        "trainer.length_lr.baseline_steps=1",
        "trainer.length_lr.trigger_ratio=2.5",
        "trainer.length_lr.period_factor=1",
    ]
    environment = {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    run = standing_lab.run(
        "method_surging", recipe="[otb,trm,length_lr,cpu]", overrides=overrides, environment=environment
    ).check()
    first, second = run.metrics[1], run.metrics[2]
    assert finite(first) and finite(second)
    assert (first["length_lr/factor"], second["length_lr/factor"]) == (1.0, 0.5)
    assert (first["length_lr/surge_step"], second["length_lr/surge_step"]) == (-1.0, 1.0)
    assert first["length_lr/baseline_length"] == second["length_lr/baseline_length"] == 5.5
    assert [step["actor/lr"] for step in (first, second)] == pytest.approx([1e-3, 5e-4])  # what the update used
    assert first["rejection/trm/kept_share"] == 0.75 and first["rejection/trm/kept_share_length_q4"] == 0.0
    assert first["rejection/kept_tokens_share"] == pytest.approx(15 / 22)
    assert first["rejection/skipped_updates/count"] == 0.0 and first["updates/per_batch"] == 2
    assert [row["kept"] for row in run.rows(1)] == [not row["traj_uid"].endswith("_3") for row in run.rows(1)]


def test_stock_otb_asserts_where_ours_runs(tmp_path: Path) -> None:
    """Why `otb` is here: verl's own estimator never gets its input on the default trainer."""
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    data = DataProto.from_dict(
        tensors={name: torch.ones(2, 3) for name in ("token_level_rewards", "response_mask", "old_log_probs")}
    )
    with pytest.raises(AssertionError, match="sum_pi_squared"):
        compute_advantage_for_multi_trajectories(data, ["u_0_0", "u_1_0"], "optimal_token_baseline", config={})
