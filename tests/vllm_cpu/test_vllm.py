# SPDX-License-Identifier: Apache-2.0
"""verl's own vLLM server on the CPU, driven by verl's real trainer in the environment that has vLLM."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest
import torch
from harness import Lab, eventually, make_data, other_tokenizer, processes
from served import agree, finite, load, records, sharpen, start, trained_as_sampled, true_log_probs, worst_difference

pytestmark = pytest.mark.vllm

HERE = Path(__file__).resolve().parent
VLLM = "actor_rollout_ref.rollout.name=vllm"
RHO = 0.05
BLOCK = 32


def test_multi_turn_training_pruned(standing_lab: Lab) -> None:
    """Three steps with validation: the sampler follows the weights, to float32 rounding, and nothing stays behind.

    `dvp.rho` reaches vLLM as min_p: no token from outside the set, and the log-probabilities that are trained.
    Validation is played by an agent at the gateway, whose calls go on from a prefix that vLLM has in its cache.
    """
    run = start(
        "vllm",
        standing_lab,
        "multi_turn",
        "[dvp,trloo,cpu]",
        [
            f"dvp.rho={RHO}",
            "trainer.total_training_steps=3",
            "trainer.save_freq=1",
            f"verl_ext.record_dir={standing_lab.root / 'multi_turn' / 'records'}",
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
            "trainer.val_before_train=true",
            "trainer.test_freq=3",
            f"data.val_files={make_data(standing_lab.root, 8, 'verl_ext_gateway')}",
            f"+verl_ext.gateway.agent={standing_lab.root / 'talk.py'}:solve",
            "data.max_prompt_length=320",
            f"+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size={BLOCK}",
            "actor_rollout_ref.rollout.calculate_log_probs=true",
            # Large steps, so that weights that were not sent would show, and not so large that after two of them one
            # token is left in each set and nothing to learn, as it happened with 1e-3.
            "actor_rollout_ref.actor.optim.lr=3e-4",
        ],
    ).check()
    metrics = run.metrics
    assert sorted(metrics) == [0, 1, 2, 3]
    for number in (0, 3):
        first, missed, asked, cached = (
            metrics[number][f"val-aux/toy/{name}/mean@1"] for name in ("first_asked", "first_cached", "asked", "cached")
        )
        assert missed == 0 and 2 * (first // BLOCK - 1) * BLOCK <= cached < asked
        print(f"vLLM's prefix cache had {cached:.0f} of {asked:.0f} tokens of the later calls: {cached / asked:.3f}")
    folders = {0: standing_lab.model}
    for step in (1, 2):
        folders[step] = run.folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
    for number in (1, 2, 3):
        step = metrics[number]
        assert finite(step)
        assert step["rollout/turns"] == 32 and step["rollout/trajectories"] == step["rollout/sequences"] == 16
        assert step["rollout/tokens"] < step["rollout/tokens_by_call"]
        assert step["actor/grad_norm"] > 0
        assert step["mismatch_unpruned/max"] > 0.01
        record = torch.load(standing_lab.root / "multi_turn" / "records" / f"{number}.pt")
        if trained_as_sampled(folders[number - 1], record, RHO):
            agree(step)
            assert step["mismatch/max"] <= 1e-5
        assert step["dvp/out_of_set_fraction"] <= 0.01
    assert {row["turn_index"] for row in run.rows(3)} == {0, 1}

    # What the engine sampled with the weights of a step, against those weights as they were saved.
    for step, folder in folders.items():
        found = records(standing_lab, "multi_turn", step)
        assert {record["turn"] for record in found} == {0, 1}
        assert worst_difference(folder, found[-6:], RHO) <= 1e-5
    stale = worst_difference(standing_lab.model, records(standing_lab, "multi_turn", 2)[-6:])
    assert stale > 0.01, f"the update changed log-probabilities by {stale} only: this test would not see a missing sync"
    assert eventually(lambda: not processes(run.folder)), processes(run.folder)

    found = records(standing_lab, "multi_turn", 0)[-32:]  # of the first step; before them those of validation
    ratios = torch.cat([true_log_probs(standing_lab.model, record)[1] for record in found])
    assert float(ratios.min()) >= math.log(RHO) - 1e-5
    assert worst_difference(standing_lab.model, found, RHO) <= 1e-5
    # Without min_p this model would have left the set: the test bites.
    kept = torch.exp(
        torch.cat(
            [true_log_probs(standing_lab.model, r)[0] - true_log_probs(standing_lab.model, r, RHO)[0] for r in found]
        )
    )
    assert float(kept.mean()) < 0.95


def test_each_model_has_servers_and_weights_of_its_own(standing_lab: Lab) -> None:
    """In one pool two models that are trained, with different vocabularies, and one that is served alone; in a pool of
    its own another that is trained."""
    other, still, far = paths = [other_tokenizer(standing_lab.root / name) for name in ("other", "still", "far")]
    sharpen(other)
    sharpen(far)
    models = {"critic": "other", "judge": "still", "guest": "far"}
    run = standing_lab.run(
        "models",
        "[dr_mas,cpu]",
        [
            VLLM,
            "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra",
            "+verl_ext.orchestra.name=four",
            "+verl_ext.orchestra.modules=[seeded_team]",
            "+verl_ext.orchestra.options.spare_speaks=true",
            *(f"+verl_ext.models.{path.name}.model.path={path}" for path in paths),
            "+verl_ext.models.still.trained=false",
            "+verl_ext.models.far.pool.n_gpus_per_node=1",
            *(f"+verl_ext.orchestra.agents.{agent}.model={model}" for agent, model in models.items()),
            "data.train_batch_size=2",
            "data.max_prompt_length=128",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.calculate_log_probs=true",
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
            "verl_ext.updates_per_batch=1",
            "trainer.save_freq=1",
        ],
        environment={"PYTHONPATH": f"{HERE.parent / 'e2e'}:{os.environ.get('PYTHONPATH', '')}"},
    ).check()
    for step in (1, 2):
        metrics = run.metrics[step]
        assert finite(metrics)
        assert [metrics[f"model/{name}/sequences"] for name in ("policy", "other", "still", "far")] == [16, 8, 8, 8]
        for name in ("policy", "other", "far"):
            assert metrics[f"training/{name}/rollout_probs_diff_max"] <= 1e-5
            assert metrics[f"actor/{name}/grad_norm"] > 0
        assert not any(key.startswith("actor/still/") for key in metrics)
        tokens_a_second = metrics["perf/total_num_tokens"] / metrics["perf/time_per_step"]
        assert tokens_a_second / metrics["perf/throughput"] == pytest.approx(2)  # GPUs: each pool has one
    said = {(row["agent_id"], row["model"]) for row in run.rows(2)}
    assert said == {("writer", "policy"), ("spare", "policy"), *models.items()}
    # What the first step changed would show in the second, had it not been sent.
    ids = torch.arange(3, 60)[None]
    for name, before in (("policy", standing_lab.model), ("other", other), ("far", far)):
        after = run.folder / "checkpoints" / "global_step_1" / "actor" / name / "huggingface"
        with torch.no_grad():
            one, two = (load(folder)(ids).logits.softmax(-1) for folder in (before, after))
        assert float((one - two).abs().max()) > 1e-3
    assert eventually(lambda: not processes(run.folder)), processes(run.folder)


def test_head_size_is_refused(standing_lab: Lab, tmp_path: Path) -> None:
    """A model that vLLM's CPU kernels do not serve is refused before Ray starts."""
    from transformers import AutoTokenizer, LlamaConfig

    config = LlamaConfig.from_pretrained(standing_lab.model)
    config.num_attention_heads = config.num_key_value_heads = 4
    config.head_dim = 16
    config.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(standing_lab.model).save_pretrained(tmp_path)
    run = standing_lab.run("head_size", "[trloo,cpu]", [VLLM, f"actor_rollout_ref.model.path={tmp_path}"])
    assert run.code != 0
    assert "attention heads of size 16" in run.log and "embedded" in run.log
    assert "Ray instance" not in run.log and "Ray cluster" not in run.log  # neither started nor connected to
    assert sys.executable != standing_lab.python


def test_a_teacher_on_vllm_and_the_end_of_a_run_whose_engine_dies_in_a_weight_sync(standing_lab: Lab) -> None:
    """verl's teacher is that of hybrid_imitation: with the policy's first weights there is no divergence in the first
    update, and one in the second.

    After the third the policy's engine dies. The sender would wait for its answer for ever: here the run ends and says
    why. Until then it samples unpruned.
    """
    teacher = "distillation.teacher_models.teacher_model"
    run = start(
        "vllm",
        standing_lab,
        "teacher",
        "[grpo,hybrid_imitation,cpu]",
        [
            # verl asks its teacher for the last row of a trajectory alone.
            "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent",
            "actor_rollout_ref.rollout.calculate_log_probs=true",
            "actor_rollout_ref.actor.use_kl_loss=false",
            "actor_rollout_ref.actor.policy_loss.teacher_topk=8",
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=dying_worker.DiesInTheFourthSync",
            "trainer.total_training_steps=1000",
            "distillation.enabled=true",
            "distillation.nnodes=1",
            "distillation.n_gpus_per_node=1",
            f"{teacher}.model_path={standing_lab.model}",
            f"{teacher}.inference.tensor_model_parallel_size=1",
            f"{teacher}.inference.engine_kwargs=${{actor_rollout_ref.rollout.engine_kwargs}}",
        ],
        paths=[HERE],
    )
    assert run.code != 0
    assert sorted(run.metrics) == [1, 2], run.log[-6000:]
    assert "WeightSyncError" in run.log and "the rollout engine" in run.log, run.log[-6000:]
    assert eventually(lambda: not processes(run.folder)), processes(run.folder)
    first, second = run.metrics[1], run.metrics[2]
    for step in (first, second):
        assert finite(step)
        agree(step)  # of the whole distribution, here
    assert abs(first["actor/imitation/kl"]) < 1e-6 < second["actor/imitation/kl"]  # 0 rounds to 3e-9 of either sign
    assert 0.05 < first["actor/imitation/teacher_mass"] < 0.95
    assert first["actor/imitation/student_mass"] == pytest.approx(first["actor/imitation/teacher_mass"], abs=1e-5)
    assert first["actor/grad_norm"] > 0
