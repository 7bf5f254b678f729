# SPDX-License-Identifier: Apache-2.0
"""The loops of docs/rows.md and verl's tool_agent, in one run: turns are credited one by one."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Lab, make_data, readme_code

pytestmark = pytest.mark.e2e

HERE = Path(__file__).resolve().parent
LOOPS = ("ask_again", "ask_again_in_one")
ALWAYS_ADDS = """
import always_calls
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser


@ToolParser.register("always_adds")
class AlwaysAdds(always_calls.AlwaysCalls):
    async def extract_tool_calls(self, responses_ids, tools=None):
        return "", [FunctionCall(name="add", arguments='{"a": 3, "b": 4}')]
"""
CLASSES = {"ask_again": "AskAgain", "ask_again_in_one": "AskAgainInOne"}


def test_own_loops_and_tool_agent_with_trloo(standing_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("own_loops")
    for name in LOOPS:
        (folder / f"{name}.py").write_text(readme_code(f"# {name}.py"))
    lines = [f"- {{name: {name}, _target_: {name}.{CLASSES[name]}}}\n" for name in LOOPS]
    (folder / "loops.yaml").write_text("".join(lines))
    (folder / "sums.py").write_text((HERE.parent / "rollout" / "mcp_server.py").read_text())
    server = f'["{sys.executable}", "{folder / "sums.py"}"]'
    tools = readme_code("# mcp_functions.py").replace('["python", "sums.py"]', server)
    (folder / "tools.py").write_text(tools + ALWAYS_ADDS)
    data = [make_data(folder, rows=4, agent_loop=name) for name in (*LOOPS, "tool_agent")]
    run = (
        replace(standing_lab, data=data[0])
        .run(
            "own_loops",
            recipe="[trloo,cpu]",
            overrides=[
                f"data.train_files=[{','.join(map(str, data))}]",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder / 'loops.yaml'}",
                f"actor_rollout_ref.rollout.multi_turn.function_tool_path={folder / 'tools.py'}",
                "actor_rollout_ref.rollout.multi_turn.format=always_adds",
                "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
                "data.train_batch_size=12",
                "data.max_response_length=96",
                "data.max_prompt_length=256",
                "actor_rollout_ref.actor.ppo_mini_batch_size=12",
                "actor_rollout_ref.rollout.n=2",
                "trainer.total_training_steps=1",
            ],
            environment={
                "PYTHONPATH": f"{folder}:{HERE}:{os.environ.get('PYTHONPATH', '')}",
            },
        )
        .check()
    )
    assert "verl_ext.merge_turns=auto: turns that continue each other are one sequence" in run.log
    assert "executing tool" not in run.log  # as verl's loop begins a tool's error
    metrics, rows = run.metrics[1], run.rows(1)
    assert metrics["rollout/trajectories"] == metrics["rollout/sequences"] == 24
    assert metrics["rollout/turns"] == len(rows) > 48
    assert metrics["rollout/tokens"] < metrics["rollout/tokens_by_call"] and metrics["actor/grad_norm"] > 0
    assert metrics["updates/padding_sequences"] == 0
    turns = defaultdict(list)
    for row in rows:
        turns[row["traj_uid"]].append(row)
    for own in turns.values():
        assert [row["turn_index"] for row in own] == list(range(len(own)))
        assert len({row["score"] for row in own}) == 1  # the trajectory's outcome, in each of its turns
        assert sum(row["turn_reward"] for row in own) == pytest.approx(own[-1]["score"], abs=1e-6)
    # By definition: the return to go less that of the same turn of the prompt's other sample.
    ahead = {
        row["key"]: sum(one["turn_reward"] for one in own[at:]) for own in turns.values() for at, row in enumerate(own)
    }
    for row in rows:
        same = [x for x in rows if (x["index"], x["turn_index"]) == (row["index"], row["turn_index"])]
        others = [ahead[one["key"]] for one in same if one is not row]
        expected = ahead[row["key"]] - (sum(others) / len(others) if others else 0.0)
        assert row["advantage"] == pytest.approx(expected, abs=1e-5)
