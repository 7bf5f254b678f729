# SPDX-License-Identifier: Apache-2.0
"""Environments through verl's real trainer: HGPO's groups on what was played, and environments that break."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Lab, eventually, processes, readme_code
from test_main_job import HERE, finite

from verl_ext.rollout.environments.data import build_rows, write_parquet

pytestmark = pytest.mark.e2e


def overrides(data: Path, prompts: int, world: str, **environment: Any) -> list[str]:
    return [
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"data.train_batch_size={prompts}",
        "reward.custom_reward_function.path=null",  # the environment judges
        "data.max_prompt_length=320",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        f"+verl_ext.environment.name=game_worlds:{world}",
        "+verl_ext.environment.action_tag=null",
        "+verl_ext.environment.check_admissible=false",
        "+verl_ext.environment.template=compact",
        "trainer.val_before_train=true",
        *[f"+verl_ext.environment.{name}={value}" for name, value in environment.items()],
    ]


def prompts(lab: Lab, count: int) -> Path:
    path = lab.root / f"worlds_{count}.parquet"
    rows = build_rows("gymnasium", range(count), {})
    for row in rows:  # the run names the environment
        row["extra_info"] = {"index": row["extra_info"]["index"], "env_seed": row["extra_info"]["env_seed"]}
    write_parquet(rows, path)
    return path


ENVIRONMENT = {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}


def brute_force_hgpo(rows: list[dict[str, Any]], k_max: int, gamma: float, penalty: float) -> list[float]:
    """HGPO's advantage of every row, straight from its definition (arXiv 2602.22817, released weights)."""
    stories: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i in sorted(range(len(rows)), key=lambda i: rows[i]["turn_index"]):
        stories[rows[i]["index"], rows[i]["traj_uid"]].append(i)
    target, keys = [0.0] * len(rows), [[] for _ in rows]  # type: ignore[var-annotated]
    for (prompt, _), story in stories.items():
        for place, i in enumerate(story):
            target[i] = sum(
                gamma ** (later - place) * rows[j]["turn_reward"] for later, j in enumerate(story) if later >= place
            )
            target[i] -= 0.0 if rows[i]["is_action_valid"] else penalty
            for level in range(1, min(k_max + 1, place + 1) + 1):
                seen = tuple(rows[j]["anchor_obs"] for j in story[place - level + 1 : place + 1])
                keys[i].append((prompt, level, seen))
    members = defaultdict(list)
    for i, own in enumerate(keys):
        for key in own:
            members[key].append(i)
    advantages = []
    for i, own in enumerate(keys):
        items = []
        for key in own:
            group = np.array([target[j] for j in members[key]])
            item = target[i] - group.mean()
            if len(group) > 1 and abs(item) > 1e-6 * max(1.0, abs(group.mean())):
                items.append((key[1] + 1, item / (group.std() + 1e-6)))
        total = sum(weight for weight, _ in items)
        advantages.append(sum(weight * item for weight, item in items) / (total + 1e-6) if items else 0.0)
    return advantages


@pytest.mark.quick
def test_hgpo_on_frozen_lake(standing_lab: Lab) -> None:
    data = prompts(standing_lab, 4)
    run = standing_lab.run(
        "step_wise_hgpo",
        recipe="[hgpo,cpu]",
        overrides=[
            *overrides(data, 4, "AnyWordLake", max_steps=5),
            "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_step_wise",
            "actor_rollout_ref.rollout.n=16",  # with 4, no walk of a step arrives once in 20, and no row is better
            "algorithm.hgpo.history_length=1",
        ],
        environment=ENVIRONMENT,
    ).check()
    metrics = run.metrics
    for step in (1, 2):
        assert finite(metrics[step]) and metrics[step]["actor/grad_norm"] > 0
        assert metrics[step]["rollout/trajectories"] == 64
        assert metrics[step]["rollout/failed_trajectories"] == 0
        assert metrics[step]["hgpo/level_1/usable_share"] > 0.2
        rows = run.rows(step)
        assert len(rows) == metrics[step]["rollout/turns"]
        assert metrics[step]["trajectory/steps"] == pytest.approx(len(rows) / 64)
        wanted = brute_force_hgpo(rows, k_max=1, gamma=0.95, penalty=0.1)
        assert [row["advantage"] for row in rows] == pytest.approx(wanted, abs=1e-5)
        assert any(wanted)
        starts = {(row["index"], row["anchor_obs"]) for row in rows if row["turn_index"] == 0}
        assert len(starts) == 4  # one beginning a prompt, whatever the number of its rollouts
        assert len({text for _, text in starts}) > 1
    assert any("success" in name and name.startswith("val-aux") for name in metrics[0])
    assert eventually(lambda: not processes(run.folder))


def test_environments_that_break_do_not_break_the_run(standing_lab: Lab) -> None:
    data = prompts(standing_lab, 8)
    run = standing_lab.run(
        "step_wise_faults",
        recipe="[gigpo,cpu]",
        overrides=[
            *overrides(data, 8, "Faulty", step_timeout_s=10.0, max_steps=10, history_length=1),
            "actor_rollout_ref.rollout.n=2",
            "++verl_ext.max_missing_share=0.2",
        ],
        environment=ENVIRONMENT,
    ).check()
    for step in (1, 2):
        metrics = run.metrics[step]
        # In seed 0 no action has broken it: its reset does.
        assert finite(metrics) and metrics["rollout/trajectories"] == 14
        assert metrics["rollout/missing_trajectories"] == 2
        reasons = {name.rpartition("/")[2]: n for name, n in metrics.items() if name.startswith("rollout/failures/")}
        assert reasons == {
            "environment_error": 2,
            "environment_timeout": 2,
            "environment_died": 2,
            "environment_garbage": 4,
        }
        assert metrics["rollout/failed_trajectories"] == 10
        lengths: dict[str, int] = defaultdict(int)
        for row in run.rows(step):
            lengths[row["traj_uid"]] += 1
        # Both rollouts of the sound seeds have all their steps, those of five seeds end in their second.
        assert sorted(lengths.values()) == [2] * 10 + [4] * 4
    assert eventually(lambda: not processes(run.folder))


def test_an_environment_of_ones_own(standing_lab: Lab, tmp_path: Path) -> None:
    """What docs/environments.md teaches: a class in a module of one's own, named in the configuration."""
    code = readme_code("# vault.py")
    assert len(code.splitlines()) < 40
    (tmp_path / "vault.py").write_text(code)
    data = tmp_path / "vault.parquet"
    command = ["--environment", "vault:Vault", "--seeds", "8", "--out", str(data)]
    subprocess.run([sys.executable, "-m", "verl_ext.rollout.environments.data", *command], check=True, timeout=600)
    run = standing_lab.run(
        "step_wise_own",
        recipe="[gigpo,cpu]",
        overrides=[
            f"data.train_files={data}",
            f"data.val_files={data}",
            "data.max_prompt_length=320",
            "actor_rollout_ref.rollout.n=8",  # with 4, all guesses of a step earn the same once in 1,000
            "+verl_ext.environment.max_steps=4",
            "+verl_ext.environment.action_tag=null",
            "+verl_ext.environment.template=compact",
        ],
        environment={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    ).check()
    for step in (1, 2):
        assert finite(run.metrics[step]) and run.metrics[step]["rollout/failed_trajectories"] == 0
        rows = run.rows(step)
        assert {row["anchor_obs"] for row in rows} <= {"The safe is shut.", "Colder.", "Warmer."}
        assert any(row["advantage"] for row in rows)
