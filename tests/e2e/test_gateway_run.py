# SPDX-License-Identifier: Apache-2.0
"""A user's agent, which knows nothing of verl, trains through the gateway in verl's real trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import Lab
from test_main_job import finite
from test_models_runs import other_tokenizer

pytestmark = pytest.mark.e2e

AGENT = """
import openai


async def solve(task, *, base_url, api_key, model):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)

    async def ask(agent, text, **more):
        messages = [{"role": "user", "content": text}]
        answer = await client.chat.completions.create(model=agent, messages=messages, **more)
        return answer.choices[0].message.content or ""

    question = task["messages"][-1]["content"]
    assert task["data_source"] == "toy" and model == "agent"
    draft = await ask("planner", question)
    await ask("worker", draft[:20], max_tokens=3)
    final = await ask("planner", question + " again")
    if task["extra_info"]["index"] % 8 == 7:
        raise ValueError("no plan")
    return {"answer": final, "rewards": [sum(map(ord, draft)) % 89 / 89, 0.5, 0.0]}
"""


def test_an_agent_of_ones_own_trains_over_http(standing_lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    other = other_tokenizer(tmp_path / "other")
    run = standing_lab.run(
        "gateway",
        recipe="[trloo,gateway,cpu]",
        overrides=[
            f"verl_ext.gateway.agent={tmp_path / 'agent.py'}:solve",
            "data.shuffle=false",
            "verl_ext.train_agents=[planner]",
            f"+verl_ext.models.helper={{trained: false, model: {{path: {other}}}}}",
            "+verl_ext.gateway.agents={planner: {}, worker: {model: helper}}",
            f"verl_ext.rollouts_dir={tmp_path / 'rollouts'}",
        ],
    ).check()
    metrics = run.metrics
    assert sorted(metrics) == [1, 2]
    for step, values in metrics.items():
        assert finite(values)
        rows = run.rows(step)
        assert values["rollout/trajectories"] == 16 and values["rollout/turns"] == 48 and len(rows) == 32
        assert values["rollout/turns_of_other_agents"] == 16 and values["actor/policy/grad_norm"] > 0
        assert values["model/policy/sequences"] == 32 and values["model/helper/sequences"] == 16
        by_trajectory: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_trajectory.setdefault(row["traj_uid"], []).append(row)
        for own in by_trajectory.values():
            assert [row["agent_id"] for row in own] == ["planner"] * 2
            assert [row["turn_index"] for row in own] == [0, 2]
            if own[1]["score"]:  # what the worker earned came after the planner's first call
                assert 0.5 <= own[0]["turn_reward"] < 1.5
    # The prompts 0 to 7 are drawn in order; the agent fails at the last of them.
    assert metrics[1]["rollout/failed_trajectories"] == 0
    assert metrics[2]["rollout/failures/agent_error"] == metrics[2]["rollout/failed_trajectories"] == 4
    failed = [row for row in run.rows(2) if row["score"] == 0 and row["turn_reward"] == 0]
    assert len(failed) >= 8
    written = [json.loads(line) for path in sorted((tmp_path / "rollouts").rglob("*.jsonl")) for line in path.open()]
    turns = [turn for trajectory in written for turn in trajectory["turns"]]
    assert {(turn["agent"], turn["counted"]) for turn in turns} == {("planner", True), ("worker", False)}
    assert {(turn["agent"], turn["more"]["model"]) for turn in turns} == {("planner", "policy"), ("worker", "helper")}
    # Each in the words of its own tokenizer; what the worker's has for digits is not in the policy's.
    assert all(turn["prompt"].startswith("<|im_start|>user\n") and turn["prompt"].endswith("\n") for turn in turns)
