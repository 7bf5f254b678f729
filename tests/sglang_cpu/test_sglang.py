# SPDX-License-Identifier: Apache-2.0
"""verl's own SGLang server on the CPU, driven by verl's real trainer in the environment that has SGLang."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Lab, Run, eventually, make_data, other_tokenizer, processes, steps_logged
from served import finite, records, sharpen, start, trained_as_sampled, true_log_probs, worst_difference

pytestmark = pytest.mark.sglang

HERE = Path(__file__).resolve().parent
E2E = HERE.parent / "e2e"

RHO = 0.05
# An agent whose answers come in pieces, and who asks for a seed, which verl hands to no SGLang.
CLIENT = """
import openai


def solve(task, *, base_url, api_key, model):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = list(task["messages"])
    ask = lambda **more: client.chat.completions.create(model=model, messages=messages, max_tokens=4, **more)
    pieces = [piece for piece in ask(stream=True) if piece.choices]
    said = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    ask()
    try:
        ask(seed=1)
        refused = False
    except openai.APIStatusError as error:
        refused = "seed can't be had from sglang" in str(error)
    return {"reward": 0.0, "info": {"pieces": len(pieces), "refused": float(refused)}}
"""


def test_multi_turn_training_pruned(sglang_lab: Lab) -> None:
    """Three steps with validation: the sampler follows the weights, to float32 rounding, and nothing stays behind.

    `dvp.rho` reaches SGLang as min_p: no token from outside the set; its log-probabilities, of the full softmax, are
    trained as those of the set. Validation is played by an agent at the gateway.
    """
    (sglang_lab.root / "client.py").write_text(CLIENT)
    run = start(
        "sglang",
        sglang_lab,
        "multi_turn",
        "[dvp,trloo,cpu]",
        [
            f"dvp.rho={RHO}",
            "trainer.total_training_steps=3",
            "trainer.save_freq=1",
            f"verl_ext.record_dir={sglang_lab.root / 'multi_turn' / 'records'}",
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
            "trainer.val_before_train=true",
            "trainer.test_freq=3",
            f"data.val_files={make_data(sglang_lab.root, 8, 'verl_ext_gateway')}",
            f"+verl_ext.gateway.agent={sglang_lab.root / 'client.py'}:solve",
            "data.max_prompt_length=320",
            "actor_rollout_ref.rollout.calculate_log_probs=true",
            "actor_rollout_ref.actor.optim.lr=3e-4",  # as with vLLM
        ],
    ).check()
    metrics = run.metrics
    assert sorted(metrics) == [0, 1, 2, 3]
    for number in (0, 3):
        assert metrics[number]["val-aux/toy/refused/mean@1"] == 1
        assert metrics[number]["val-aux/toy/pieces/mean@1"] > 1
    folders = {0: sglang_lab.model}
    for step in (1, 2):
        folders[step] = run.folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
    for number in (1, 2, 3):
        step = metrics[number]
        assert finite(step)
        assert step["rollout/turns"] == 32 and step["rollout/sequences"] == step["rollout/trajectories"] == 16  # merged
        assert step["actor/grad_norm"] > 0
        assert step["mismatch_unpruned/max"] <= 1e-5  # SGLang's are of the full softmax,
        assert step["training/rollout_probs_diff_max"] > 0.1  # as verl's metric has them, before they are renormalised
        record = torch.load(sglang_lab.root / "multi_turn" / "records" / f"{number}.pt")
        if trained_as_sampled(folders[number - 1], record, RHO):
            assert step["mismatch/max"] <= 1e-5
        assert step["dvp/out_of_set_fraction"] <= 0.01

    # What the engine sampled with the weights of a step, and reported of the full softmax, against those weights.
    for step, folder in folders.items():
        found = records(sglang_lab, "multi_turn", step)
        assert {record["turn"] for record in found} == {0, 1}
        assert worst_difference(folder, found[-6:]) <= 2e-5
    stale = worst_difference(sglang_lab.model, records(sglang_lab, "multi_turn", 2)[-6:])
    assert stale > 0.01, f"the update changed log-probabilities by {stale} only: this test would not see a missing sync"
    assert eventually(lambda: not processes(run.folder)), processes(run.folder)

    found = records(sglang_lab, "multi_turn", 0)[-32:]  # of the first step
    ratios = torch.cat([true_log_probs(sglang_lab.model, record)[1] for record in found])
    assert float(ratios.min()) >= math.log(RHO) - 1e-5
    # Without min_p this model would have left the set: the test bites.
    kept = torch.exp(
        torch.cat([true_log_probs(sglang_lab.model, r)[0] - true_log_probs(sglang_lab.model, r, RHO)[0] for r in found])
    )
    assert float(kept.mean()) < 0.95


def test_a_team_on_three_models_killed_and_resumed(sglang_lab: Lab) -> None:
    """Two models that are trained, one of them an adapter whose merged weights are sent, and one that is served alone,
    each with a server of its own, in `colocate_async`."""
    other, still = (other_tokenizer(sglang_lab.root / name) for name in ("other", "still"))
    sharpen(other)
    loops = sglang_lab.root / "team.yaml"
    loops.write_text("- {name: observed, _target_: sglang_loops.Observed}\n")
    record = sglang_lab.root / "team.jsonl"

    def play(steps: int, **more: Any) -> Run:
        return sglang_lab.run(
            "team",
            "[dr_mas,cpu]",
            [
                "actor_rollout_ref.rollout.name=sglang",
                "trainer.v1.trainer_mode=colocate_async",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
                "actor_rollout_ref.rollout.agent.default_agent_loop=observed",
                "+verl_ext.orchestra.name=judged_drafts",
                "+verl_ext.orchestra.modules=[sglang_loops]",
                f"+verl_ext.models.other.model={{path: {other}, lora_rank: 4, lora: {{merge: true}}}}",
                f"+verl_ext.models.still={{trained: false, model: {{path: {still}}}}}",
                "+verl_ext.orchestra.agents={critic: {model: other}, judge: {model: still, max_tokens: 4}}",
                "data.train_batch_size=2",
                "data.max_prompt_length=256",
                "data.max_response_length=48",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                "actor_rollout_ref.actor.optim.lr=3e-4",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "verl_ext.updates_per_batch=1",
                "trainer.save_freq=1",
                f"trainer.total_training_steps={steps}",
            ],
            environment={
                "PYTHONPATH": os.pathsep.join(map(str, [HERE, E2E, os.environ.get("PYTHONPATH", "")])),
                "RECORD": str(record),
            },
            **more,
        )

    killed = play(100, kill_when=lambda folder: steps_logged(folder) >= 2)
    assert killed.code == -signal.SIGKILL, killed.log[-6000:]
    agents = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
    assert eventually(lambda: set(processes(killed.folder)) <= agents), processes(killed.folder)
    saved = int((killed.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    run = play(saved + 2).check()
    assert f"setting global step to {saved}" in run.log
    assert sorted(run.metrics) == list(range(1, saved + 3))
    for step, metrics in run.metrics.items():
        assert finite(metrics) and metrics["rollout/turns"] == 40
        # verl rounds merged weights to bfloat16 on their way (transformer_impl.py line 1082).
        for name, bound in (("policy", 1e-5), ("other", 1e-2)):
            assert metrics[f"actor/{name}/grad_norm"] > 0
            if step in (1, saved + 1):  # of the weights that each start begins with
                assert metrics[f"training/{name}/rollout_probs_diff_max"] <= bound
        assert metrics["model/still/sequences"] == 8 and not any(key.startswith("actor/still/") for key in metrics)
    said = {(row["agent_id"], row["model"]) for row in run.rows(saved + 2)}
    assert said == {("writer", "policy"), ("critic", "other"), ("judge", "still")}
    calls = [json.loads(line) for line in record.read_text().splitlines()]
    for model in ("policy", "other", "still"):  # each server is told which weights it has
        assert {call["max_global_steps"] for call in calls if call["model"] == model} >= {0, saved}
    assert eventually(lambda: not processes(run.folder)), processes(run.folder)
