# SPDX-License-Identifier: Apache-2.0
"""A panel through verl's real trainer: the same tasks in each step by one agent worker, two and eight."""

from __future__ import annotations

import json

import pytest
from game_worlds import AnyWordLake
from harness import Lab
from test_step_wise_runs import ENVIRONMENT, overrides

from verl_ext.rollout.environments.data import build_rows, write_parquet
from verl_ext.rollout.environments.panel import fingerprints

pytestmark = pytest.mark.e2e

LAKE = "game_worlds:AnyWordLake"


def test_one_two_and_eight_agent_workers_play_the_same_panel(standing_lab: Lab) -> None:
    """The same tasks in validation, and in each step. Within a batch verl orders prompts by names that it draws."""
    tasks = fingerprints(LAKE, {}, range(40))
    seeds = list({task: seed for seed, task in tasks.items()}.values())[:8]
    rows = build_rows(LAKE, seeds)
    for row in rows:
        row["extra_info"]["task"] = tasks[row["extra_info"]["env_seed"]]
    data = standing_lab.root / "panel.parquet"
    write_parquet(rows, data)
    validated, trained = {}, {}
    for workers in (1, 2, 8):
        folder = standing_lab.root / f"panel_{workers}"
        given = [one for one in overrides(data, 4, "", max_steps=1) if "environment.name" not in one]
        run = standing_lab.run(
            folder.name,
            recipe="[gigpo,cpu]",
            overrides=[
                *given,
                "actor_rollout_ref.rollout.n=2",
                "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_step_wise",
                f"actor_rollout_ref.rollout.agent.num_workers={workers}",
                f"trainer.validation_data_dir={folder / 'validation'}",
            ],
            environment=ENVIRONMENT,
        ).check()
        lines = (folder / "validation" / "0.jsonl").read_bytes().splitlines()
        validated[workers] = sorted(json.loads(line)["input"] for line in lines)
        trained[workers] = [sorted(row["anchor_obs"] for row in run.rows(step)) for step in (1, 2)]
    lake = AnyWordLake()
    maps = [lake.reset(seed).text for seed in seeds]
    assert len(set(maps)) == 8
    assert all(sum(seen in shown for shown in validated[1]) == 1 for seen in maps)
    first, second = trained[1]
    assert sorted(first + second) == sorted(maps * 2) and not set(first) & set(second)
    assert trained[1] == trained[2] == trained[8]
    assert validated[1] == validated[2] == validated[8]
