# SPDX-License-Identifier: Apache-2.0
"""The demo's team: who is called, what each try is worth, and what is written for it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from test_prepare import SHORT

from verl_ext.lab.demo import team as module
from verl_ext.lab.demo.prepare import prepare_demo, prepare_team
from verl_ext.rollout.orchestra.core import Agent, Completion, Result, Task, Team
from verl_ext.rollout.orchestra.settings import OrchestraSettings, line_up
from verl_ext.rollout.reasoning_gym_task import ReasoningGymTask

ENTRY = {"question": "State the final answer: 3 + 4 =", "answer": "7", "metadata": {}}
CONFIG = json.dumps({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 1, "seed": 0})


class Script:
    """An engine that says given lines in turn and keeps what it was asked."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.asked: list[tuple[str, list[dict[str, Any]]]] = []

    async def complete(self, agent: Agent, messages: list[dict[str, Any]]) -> Completion:
        self.asked.append((agent.name, messages))
        text = self.lines.pop(0)
        return Completion(response_ids=list(text.encode()) or [0], text=text)

    async def use_tools(self, agent: Agent, completion: Completion, messages: Any) -> list[dict[str, Any]]:
        return []

    async def score(self, task: Task, answer: str) -> tuple[float, dict[str, float]]:
        raise AssertionError("the team judges by itself")


def play(*lines: str, **options: Any) -> tuple[Result, Script, Team]:
    settings = OrchestraSettings(name="second_try", modules=("verl_ext.lab.demo.team",), options=options)
    lineup = line_up(settings)
    engine = Script(*lines)
    team = Team(engine)
    task = Task(
        messages=[{"role": "user", "content": ENTRY["question"]}],
        extra_info={"dataset": "chain_sum", "config_json": CONFIG, "entry_json": json.dumps(ENTRY)},
    )
    result = asyncio.run(team.play(lineup.orchestra.play, task, lineup.agents, lineup.options))
    return result, engine, team


@pytest.mark.parametrize(
    ("lines", "agents", "reward"),
    [
        (["7"], ["solver"], 1.0),
        (["9", "7"], ["solver", "reviser"], 0.1),
        (["9", "8"], ["solver", "reviser"], 0.0),
        (["", "7"], ["solver", "reviser"], 0.1),
    ],
)
def test_a_second_try_is_worth_a_tenth(lines: list[str], agents: list[str], reward: float) -> None:
    result, engine, team = play(*lines)
    assert [name for name, _ in engine.asked] == agents == [call.agent.name for call in team.calls]
    assert result.outcome == pytest.approx(reward)
    assert result.info["solved_first"] + result.info["solved_late"] == (reward > 0)


def test_the_reviser_sees_the_answer_and_what_was_wrong_with_it() -> None:
    _, engine, team = play("9", "x")
    assert engine.asked[0][1] == [{"role": "user", "content": ENTRY["question"]}]
    assert engine.asked[1][1] == [
        {"role": "user", "content": ENTRY["question"]},
        {"role": "assistant", "content": "9"},
        {"role": "user", "content": "Too high."},
    ]
    assert [call.reply.valid for call in team.calls] == [True, False]
    assert all(not call.agent.role for call in team.calls)


def test_the_worth_of_a_late_answer_is_an_option() -> None:
    assert play("9", "7", late_reward=0.5)[0].outcome == 0.5


def test_files_are_the_demos_questions_for_another_loop(tmp_path: Path) -> None:
    team = prepare_team(cache_dir=tmp_path, seed=3, recipe=SHORT, progress=lambda line: None)
    demo = prepare_demo(cache_dir=tmp_path, seed=3, recipe=SHORT, progress=lambda line: None)
    assert demo.cached and team.agent_loop == "verl_ext_orchestra" and team.task == module.NAME
    assert team.measured == demo.measured and team.prompt_length == demo.prompt_length
    train, val, theirs = (pq.read_table(file).to_pylist() for file in (team.train_file, team.val_file, demo.train_file))
    assert len(val) == SHORT.val_size and len(train) + len(val) == len(theirs)
    for split, rows in (("train", train), ("val", val)):
        for row in rows:
            assert row["agent_name"] == "verl_ext_orchestra" and row["extra_info"]["split"] == split
    assert [row["prompt"] for row in [*train, *val]] == [row["prompt"] for row in theirs]
    judged = ReasoningGymTask.from_extra_info(val[0]["extra_info"])
    assert judged.judge(val[0]["reward_model"]["ground_truth"]).solved
    again = prepare_team(cache_dir=tmp_path, seed=3, recipe=SHORT, progress=lambda line: None)
    assert again.cached and again.agent_loop == team.agent_loop
    for file in ("model.safetensors", "tokenizer.json"):
        assert Path(team.model_path, file).read_bytes() == Path(demo.model_path, file).read_bytes()
