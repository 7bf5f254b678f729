# SPDX-License-Identifier: Apache-2.0
"""The same rollouts of every kind of loop in verl's real trainer, merged and a sequence a call: the same gradients."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness import Lab, Run, make_model
from test_models_runs import flat, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_ext.lab.demo.data import build_rows, dataset_config, generate
from verl_ext.rollout.environments.data import write_parquet

pytestmark = pytest.mark.e2e

HERE = Path(__file__).resolve().parent
LOOPS = {"questions": "Questions", "team": "Teamed", "clients": "Clients", "games": "Games", "tools": "Tools"}
PROMPTS, SAMPLES = 2, 4


def speaks_letters(folder: Path) -> Path:
    """An untrained model whose tokens mostly are letters and digits: its words, read and tokenised, are its tokens."""
    make_model(folder)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    letters = [token for token in range(len(tokenizer)) if tokenizer.decode([token]).isalnum()]
    model.lm_head.weight.data[letters] *= 30
    model.config.max_position_embeddings = 2048
    model.save_pretrained(folder)
    return folder


def prompts(path: Path) -> Path:
    """Prompts of one kind of loop after the other: a step of the training each."""
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    described = dataset_config(config, 0, 64)
    asked = build_rows(generate("chain_sum", config, PROMPTS, seed=0, held_out=None), "chain_sum", described, split="t")
    rows = []
    for name in LOOPS:
        for row in asked:
            index = len(rows)
            info = {**row["extra_info"], "index": index, "env_seed": index}
            rows.append({**row, "agent_name": name, "extra_info": info, "data_source": name})
    write_parquet(rows, path)
    return path


def test_each_kind_of_loop_has_the_same_gradient_merged_and_not(standing_lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    entries = [f"- {{name: {name}, _target_: replayed_loops.{one}}}\n" for name, one in LOOPS.items()]
    (tmp_path / "loops.yaml").write_text("".join(entries))
    model, data = speaks_letters(tmp_path / "model"), prompts(tmp_path / "data.parquet")

    def run(name: str, *more: str) -> Run:
        return standing_lab.run(
            name,
            recipe="[trloo,gateway,step_wise,cpu]",
            overrides=[
                f"data.train_files={data}",
                f"data.val_files={data}",
                "reward.custom_reward_function.path=null",  # every loop judges
                "data.shuffle=false",
                f"data.train_batch_size={PROMPTS}",
                "data.max_prompt_length=768",
                "data.max_response_length=128",
                f"actor_rollout_ref.model.path={model}",
                f"actor_rollout_ref.rollout.n={SAMPLES}",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}",
                f"actor_rollout_ref.rollout.multi_turn.function_tool_path={HERE / 'always_calls.py'}",
                "actor_rollout_ref.rollout.multi_turn.format=letters_call",
                "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
                "+actor_rollout_ref.rollout.custom.multi_turn.turn_reward=score",
                "+verl_ext.orchestra.name=drafts",
                "+verl_ext.orchestra.modules=[replayed_loops]",
                "+verl_ext.orchestra.agents={writer: {max_tokens: 12}, critic: {max_tokens: 12, model: twin}}",
                f"+verl_ext.models.twin.model.path={model}",
                "+verl_ext.models.twin.model.lora_rank=4",
                "verl_ext.gateway.agent=replayed_loops:ask",
                "verl_ext.environment.name=guesses:Guesses",
                "verl_ext.environment.max_steps=3",
                "verl_ext.environment.history=continue",
                "verl_ext.environment.action_tag=null",
                "verl_ext.environment.template=compact",
                "verl_ext.updates_per_batch=1",
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                "actor_rollout_ref.actor.optim.optimizer=SGD",
                "actor_rollout_ref.actor.optim.lr=1e-3",
                "actor_rollout_ref.actor.optim.weight_decay=0",
                "actor_rollout_ref.actor.optim.clip_grad=1e9",
                f"trainer.total_training_steps={len(LOOPS)}",
                f"trainer.save_freq={len(LOOPS)}",
                *more,
            ],
            environment={
                "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
                "ROLLOUTS": str(tmp_path / "rollouts"),
            },
        ).check()

    merged = run("loops_merged")
    apart = run("loops_apart", "verl_ext.merge_turns=false")
    for step, name in enumerate(LOOPS, start=1):
        one, two = merged.metrics[step], apart.metrics[step]
        assert one["rollout/turns"] == two["rollout/turns"] == two["rollout/sequences"]
        assert one["rollout/sequences"] < one["rollout/turns"] and not one.get("rollout/failed_trajectories")
        assert one["rollout/tokens"] < one["rollout/tokens_by_call"] == two["rollout/tokens"], name
        credited = [
            sorted(
                (row.get("agent_id", ""), row["turn_index"], row["turn_reward"], row["advantage"])
                for row in each.rows(step)
            )
            for each in (merged, apart)
        ]
        for found, expected in zip(*credited, strict=True):
            assert found == (*expected[:2], *(pytest.approx(number, abs=1e-6) for number in expected[2:])), name
        for agent in ("policy", "twin") if name == "team" else ("policy",):
            norm = one[f"actor/{agent}/grad_norm"]
            assert norm > 0 and two[f"actor/{agent}/grad_norm"] == pytest.approx(norm, rel=1e-5), name
    # The gradients themselves: plain descent has added them up, to the rounding of the weights.
    last = len(LOOPS)
    start = flat(AutoModelForCausalLM.from_pretrained(model).state_dict())
    one, two = (flat(weights(each, "policy", step=last)) - start for each in (merged, apart))
    assert float((one - two).norm()) < 1e-3 * float(one.norm())
    adapters = [
        {key: value for key, value in weights(each, "twin", step=last).items() if ".lora_" in key}
        for each in (merged, apart)
    ]
    assert any(bool(value.any()) for key, value in adapters[0].items() if "lora_B" in key)
    one, two = map(flat, adapters)
    assert float((one - two).norm()) < 1e-3 * float(one.norm())
