# SPDX-License-Identifier: Apache-2.0
"""verl's own SGLang server on the CPU, driven by verl's real trainer in the environment that has SGLang."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pandas
import psutil
import pytest
import torch
from harness import Lab, Run, eventually, make_data, other_tokenizer, processes, steps_logged
from served import agree, finite, records, sharpen, start, trained_as_sampled, true_log_probs, worst_difference
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

pytestmark = pytest.mark.sglang

HERE = Path(__file__).resolve().parent
E2E = HERE.parent / "e2e"

RHO = 0.05
# An agent whose answers come in pieces, who has a tool, and who asks for a seed, which verl hands to no SGLang.
CLIENT = """
import openai


def solve(task, *, base_url, api_key, model):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = list(task["messages"])
    ask = lambda **more: client.chat.completions.create(model=model, messages=messages, max_tokens=4, **more)
    pieces = [piece for piece in ask(stream=True) if piece.choices]
    said = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    function = {"name": "lookup", "parameters": {"type": "object", "properties": {"what": {"type": "string"}}}}
    called = ask(tools=[{"type": "function", "function": function}]).choices[0].message.tool_calls
    try:
        ask(seed=1)
        refused = False
    except openai.APIStatusError as error:
        refused = "seed can't be had from sglang" in str(error)
    tool = float(bool(called) and called[0].function.name == "lookup")
    return {"reward": 0.0, "info": {"pieces": len(pieces), "tool": tool, "refused": float(refused)}}
"""
# A reward function that asks the reward model, and writes down what it said.
JUDGED = """
import json, os
import aiohttp


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, reward_router_address, **kwargs):
    async with aiohttp.ClientSession() as session:
        asked = {"model": "judge", "input": solution_str or " "}
        async with session.post(f"http://{reward_router_address}/v1/embeddings", json=asked) as reply:
            score = (await reply.json())["data"][-1]["embedding"][-1]
    with open(os.environ["RECORD"] + ".judged", "a", encoding="utf-8") as file:
        file.write(json.dumps([asked["input"], score]) + "\\n")
    return score
"""


def test_multi_turn_training_pruned_until_the_engine_dies(standing_lab: Lab) -> None:
    """Three steps: the sampler follows the weights, to float32 rounding. Then SGLang's own processes are killed: the
    run ends, and the same command goes on.

    `dvp.rho` reaches SGLang as min_p: no token from outside the set; its log-probabilities, of the full softmax, are
    trained as those of the set. Validation is played by row: an agent at the gateway, a game, a kernel, verl's tools.
    """
    lab = standing_lab
    (lab.root / "client.py").write_text(CLIENT)
    loops = lab.root / "pruned.yaml"
    loops.write_text("- {name: recording, _target_: sglang_loops.LastWords}\n")
    played = ("verl_ext_gateway", "verl_ext_step_wise", "verl_ext_kernels", "tool_agent")
    data = [make_data(lab.root, 2, name) for name in played]
    rows = pandas.concat([pandas.read_parquet(path).assign(data_source=path.stem) for path in data], ignore_index=True)
    kernels = rows["agent_name"] == "verl_ext_kernels"
    rows.loc[kernels, "extra_info"] = [{"index": index, "task": "fuse-0"} for index in range(sum(kernels))]
    rows.to_parquet(lab.root / "asked.parquet")

    def play(*more: str) -> Run:
        return start(
            "sglang",
            lab,
            "pruned",
            "[dvp,trloo,step_wise,cpu]",
            [
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
                f"dvp.rho={RHO}",
                "trainer.total_training_steps=4",
                "trainer.save_freq=1",
                "trainer.test_freq=3",
                f"verl_ext.record_dir={lab.root / 'pruned' / 'records'}",
                "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
                f"data.val_files={lab.root / 'asked.parquet'}",
                f"+verl_ext.gateway.agent={lab.root / 'client.py'}:solve",
                f"actor_rollout_ref.rollout.multi_turn.function_tool_path={E2E / 'always_calls.py'}",
                "actor_rollout_ref.rollout.multi_turn.format=always_calls",
                "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
                "verl_ext.environment.name=guesses:Guesses",
                "verl_ext.environment.max_steps=3",
                "verl_ext.environment.history=continue",
                "verl_ext.environment.action_tag=null",
                "verl_ext.environment.template=compact",
                "data.max_prompt_length=320",
                "data.max_response_length=64",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.actor.optim.lr=3e-4",  # as with vLLM
                *more,
            ],
            paths=[HERE],
        )

    run = play("trainer.val_before_train=true")
    assert run.code != 0
    metrics = run.metrics
    assert sorted(metrics) == [0, 1, 2, 3], run.log[-6000:]
    assert "ActorDiedError" in run.log and "SGLangHttpServer" in run.log
    for number in (0, 3):
        for name in ("tool", "refused"):
            assert metrics[number][f"val-aux/verl_ext_gateway/{name}/mean@1"] == 1
        assert metrics[number]["val-aux/verl_ext_gateway/pieces/mean@1"] > 1
    assert metrics[0]["val-aux/verl_ext_kernels/turns/mean@1"] == 3  # none is right: the model is untrained
    assert metrics[0]["val-core/verl_ext_step_wise/reward/mean@1"] > 0
    assert metrics[0]["val-core/tool_agent/acc/mean@1"] > 0 and metrics[0]["val-aux/num_turns/max"] == 6
    folders = {0: lab.model}
    for step in (1, 2):
        folders[step] = run.folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
    for number in (1, 2, 3):
        step = metrics[number]
        assert finite(step)
        assert step["rollout/turns"] == 32 and step["rollout/sequences"] == step["rollout/trajectories"] == 16  # merged
        assert step["actor/grad_norm"] > 0
        assert step["mismatch_unpruned/max"] <= 1e-5  # SGLang's are of the full softmax,
        assert step["training/rollout_probs_diff_max"] > 0.1  # as verl's metric has them, before they are renormalised
        record = torch.load(lab.root / "pruned" / "records" / f"{number}.pt")
        if trained_as_sampled(folders[number - 1], record, RHO):
            assert step["mismatch/max"] <= 1e-5
        assert step["dvp/out_of_set_fraction"] <= 0.01

    # What the engine sampled with the weights of a step, and reported of the full softmax, against those weights.
    for step, folder in folders.items():
        found = records(lab, "pruned", step)
        assert {record["turn"] for record in found} == {0, 1}
        assert worst_difference(folder, found[-6:]) <= 2e-5
    stale = worst_difference(lab.model, records(lab, "pruned", 2)[-6:])
    assert stale > 0.01, f"the update changed log-probabilities by {stale} only: this test would not see a missing sync"

    found = records(lab, "pruned", 0)[-32:]  # of the first step
    ratios = torch.cat([true_log_probs(lab.model, record)[1] for record in found])
    assert float(ratios.min()) >= math.log(RHO) - 1e-5
    # Without min_p this model would have left the set: the test bites.
    kept = torch.exp(torch.cat([true_log_probs(lab.model, r)[0] - true_log_probs(lab.model, r, RHO)[0] for r in found]))
    assert float(kept.mean()) < 0.95

    run = play().check()
    assert sorted(run.metrics) == [0, 1, 2, 3, 4] and finite(run.metrics[4])
    assert "setting global step to 3" in run.log
    pids = list(map(int, (lab.root / "pruned.jsonl.engine").read_text().split()))
    assert len(pids) > 4 and eventually(lambda: not any(map(psutil.pid_exists, pids)))


def test_a_team_on_three_models_killed_and_resumed(standing_lab: Lab) -> None:
    """Two models that are trained, one of them an adapter whose merged weights are sent, and one that is served alone,
    each with a server of its own, in `colocate_async`: an answer that is stopped for an update goes on with the new
    weights, token for token. The launcher is killed, and the same command goes on. Validation is played by a loop that
    asks for what verl hands through to SGLang."""
    lab = standing_lab
    other, still = (other_tokenizer(lab.root / name) for name in ("other", "still"))
    sharpen(other)
    loops = lab.root / "team.yaml"
    entries = {"observed": "sglang_loops.Observed", "asks": "sglang_loops.Asks"}
    loops.write_text("".join(f"- {{name: {name}, _target_: {target}}}\n" for name, target in entries.items()))
    record = lab.root / "team.jsonl"

    def play(steps: int, **more: Any) -> Run:
        return lab.run(
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
                "+verl_ext.orchestra.agents={critic: {model: other}, judge: {model: still}}",
                f"data.val_files={make_data(lab.root, 1, 'asks')}",
                "trainer.val_before_train=true",
                "actor_rollout_ref.rollout.skip_tokenizer_init=false",  # or min_new_tokens ends SGLang's scheduler
                "data.shuffle=false",
                "data.train_batch_size=2",
                "data.max_prompt_length=128",
                "data.max_response_length=320",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                "actor_rollout_ref.actor.optim.lr=3e-4",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
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

    killed = play(100, kill_when=lambda folder: steps_logged(folder) >= 3)  # one is of the validation
    assert killed.code == -signal.SIGKILL, killed.log[-6000:]
    assert eventually(lambda: not processes(killed.folder)), processes(killed.folder)
    saved = int((killed.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    run = play(saved + 1).check()
    assert f"setting global step to {saved}" in run.log
    assert sorted(run.metrics) == list(range(saved + 2))
    for step, metrics in run.metrics.items():
        if step in (0, saved):  # a resume validates first, too
            assert metrics["val-core/toy/reward/mean@1"] == 1, metrics  # all was done as asked
        if step == 0:
            continue
        assert finite(metrics) and metrics["rollout/turns"] == 40
        # verl rounds merged weights to bfloat16 on their way (transformer_impl.py line 1082).
        for name, bound in (("policy", 1e-5), ("other", 1e-2)):
            assert metrics[f"actor/{name}/grad_norm"] > 0
            if step == 1:
                assert metrics[f"training/{name}/rollout_probs_diff_max"] <= bound
        assert metrics["model/still/sequences"] == 8 and not any(key.startswith("actor/still/") for key in metrics)
    said = {(row["agent_id"], row["model"]) for row in run.rows(saved + 1)}
    assert said == {("writer", "policy"), ("critic", "other"), ("judge", "still")}
    calls = [json.loads(line) for line in record.read_text().split("\n") if line]
    for model in ("policy", "other", "still"):  # each server is told which weights it has
        assert {call["max_global_steps"] for call in calls if call["model"] == model} >= {0, 1}

    policy = [call for call in calls if call["model"] == "policy"]
    crossing = [call for call in policy if (call["min_global_steps"], call["max_global_steps"]) == (0, 1)]
    assert crossing and {len(call["answer"]) for call in crossing} == {300}
    after = run.folder / "checkpoints" / "global_step_1" / "actor" / "policy" / "huggingface"
    for call in crossing[:4]:
        old, new = (
            (true_log_probs(folder, call)[0] - torch.tensor(call["log_probs"])).abs() <= 3e-5
            for folder in (lab.model, after)
        )
        turn = int((~old).int().argmax())  # the first token that is not of the weights before
        assert turn > 0 and new[turn:].all() and not new[:turn].all()


def make_judge(folder: Path, model: Path) -> Path:
    """A reward model of the size of `model`, with its tokenizer."""
    torch.manual_seed(5)
    config = LlamaConfig.from_pretrained(model, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def test_servers_and_a_reward_model_apart_from_the_trainer(standing_lab: Lab) -> None:
    """In `separate_async`; the reward is what a reward model on a server of its own says, as transformers has it."""
    lab = standing_lab
    (lab.root / "judged.py").write_text(JUDGED)
    judge = make_judge(lab.root / "judge", lab.model)
    run = start(
        "sglang",
        lab,
        "apart",
        "[trloo,cpu]",
        [
            "trainer.v1.trainer_mode=separate_async",
            "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
            "trainer.v1.separate_async.parameter_sync_step=1",
            "actor_rollout_ref.rollout.calculate_log_probs=true",
            # The recording loop has rewards of its own.
            "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent",
            f"reward.custom_reward_function.path={lab.root / 'judged.py'}",
            f"reward.reward_model.model_path={judge}",
            "reward.reward_model.enable=true",
            "reward.reward_model.enable_resource_pool=true",
            "reward.reward_model.nnodes=1",
            "reward.reward_model.n_gpus_per_node=1",
            "reward.reward_model.rollout.name=sglang",
            "reward.reward_model.rollout.tensor_model_parallel_size=1",
            "reward.reward_model.rollout.dtype=float32",
        ],
    ).check()
    assert sorted(run.metrics) == [1, 2]
    agree(run.metrics[1])
    for step, metrics in run.metrics.items():
        assert finite(metrics) and metrics["actor/grad_norm"] > 0
        assert 0 <= metrics["training/off_policy/trajectory_staleness/max"] < step

    tokenizer = AutoTokenizer.from_pretrained(judge)
    reference = LlamaForSequenceClassification.from_pretrained(judge, dtype=torch.float64).eval()
    judged = dict(map(json.loads, (lab.root / "apart.jsonl.judged").read_bytes().splitlines()))
    for text, score in judged.items():
        with torch.no_grad():
            assert score == pytest.approx(
                float(reference(tokenizer(text, return_tensors="pt").input_ids).logits), abs=1e-5
            )
    for step in (1, 2):
        paid = {row["score"] for row in run.rows(step)}
        assert len(paid) > 4 and all(min(abs(one - score) for score in judged.values()) < 1e-6 for one in paid)
