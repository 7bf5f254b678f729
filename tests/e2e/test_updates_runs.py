# SPDX-License-Identifier: Apache-2.0
"""Advantages and `verl_ext.updates_per_batch` through verl's real trainer, on one rank and on two; and transcripts."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Lab, Run, make_data

from verl_ext import cli
from verl_ext.transcripts.read import Choice, read

pytestmark = pytest.mark.e2e

HERE = Path(__file__).resolve().parent
LOOPS = "- {name: recorded, _target_: scripted_loops.Recorded}\n"


def test_the_same_updates_on_one_rank_and_on_two_and_readable_rollouts(
    standing_lab: Lab, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rollouts of one to three turns that follow from the prompt: the batch of both runs is the same."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "loops.yaml").write_text(LOOPS)
    data = make_data(folder, rows=4)
    own = replace(standing_lab, data=data)
    settings = [
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder / 'loops.yaml'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=recorded",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
        "actor_rollout_ref.actor.optim.clip_grad=1000000.0",
        "verl_ext.updates_per_batch=1",
        "algorithm.gamma=0.9",
        "verl_ext.agent_gradients=true",
    ]
    environment = {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    one = own.run(
        "updates_one",
        overrides=[*settings, f"verl_ext.rollouts_dir={standing_lab.root / 'updates_one' / 'rollouts'}"],
        environment=environment,
    ).check()
    two = own.run("updates_two", overrides=[*settings, "trainer.n_gpus_per_node=2"], environment=environment).check()
    for step in (1, 2):
        first, second = one.metrics[step], two.metrics[step]
        assert first["rollout/trajectories"] == second["rollout/trajectories"] == 16
        assert first["rollout/rows"] == second["rollout/rows"] > 16
        assert first["updates/per_batch"] == second["updates/per_batch"] == 1
        assert first["updates/mini_batch_rows"] == first["rollout/rows"] and first["updates/padding_rows"] == 0
        assert second["updates/padding_rows"] == second["rollout/rows"] % 2
        rel = 1e-4 if step == 1 else 1e-2  # Adam divides by gradients that are nearly zero
        assert second["actor/grad_norm"] == pytest.approx(first["actor/grad_norm"], rel=rel)
        assert second["actor/pg_loss"] == pytest.approx(first["actor/pg_loss"], rel=rel, abs=1e-5)
        for found in (first, second):  # one agent has written all rows
            assert found["agent/solver/grad_norm/mean"] == pytest.approx(found["actor/grad_norm"], rel=1e-5)
            assert found["agent/solver/grad_norm/max"] == found["agent/solver/grad_norm/mean"]

    by_definition(one, two)

    rows = {row["key"]: row for row in one.rows(1)}
    records = read(one.folder, Choice(steps=(1, 1)))
    assert len(records) == 16 and sum(len(record["turns"]) for record in records) == len(rows)
    for record in records:
        assert record["agents"] == ["solver"] and record["outcome"] == (
            "success" if record["reward"] > 0 else "failure"
        )
        for turn in record["turns"]:
            row = rows[f"{record['trajectory']}_{turn['turn']}"]
            assert turn["advantage"] == pytest.approx(row["advantage"], abs=1e-6)
            assert turn["reward"] == row["turn_reward"] and turn["observation"] == row["anchor_obs"]
            assert turn["response_tokens"] == row["response_tokens"] and len(turn["response"]) > 0
    longest = max(records, key=lambda record: len(record["turns"]))
    assert cli.main(["rollouts", str(one.folder), "--step", "1", "--trajectory", longest["trajectory"]]) == 0
    shown = capsys.readouterr().out
    assert f"trajectory {longest['trajectory']}" in shown and "--- turn 2, solver, reward" in shown


def by_definition(one: Run, two: Run) -> None:
    """Two ranks have the advantages of one, which are TRLOO's, worked out here row by row."""
    advantages, others = ({row["anchor_obs"]: row["advantage"] for row in run.rows(1)} for run in (one, two))
    assert advantages == others and len(advantages) > 16
    returns: dict[str, float] = {}
    groups = defaultdict(list)
    for row in sorted(one.rows(1), key=lambda row: -row["turn_index"]):
        prompt, session, turn = row["anchor_obs"].split("/")
        later = returns.get(f"{prompt}/{session}/{int(turn) + 1}", 0.0)
        returns[row["anchor_obs"]] = row["turn_reward"] + 0.9 * later
        groups[prompt, turn].append(row["anchor_obs"])
    for group in groups.values():
        for name in group:
            rest = [returns[other] for other in group if other != name]
            expected = returns[name] - (sum(rest) / len(rest) if rest else 0.0)
            assert advantages[name] == pytest.approx(expected, abs=1e-6)
    metrics = one.metrics[1]
    assert metrics["trloo/turn_0/rows"] == 16 and metrics["trajectory/turns/max"] == 3
    reward = sum(row["turn_reward"] for row in one.rows(1)) / 16
    assert metrics["trajectory/reward/mean"] == pytest.approx(reward, abs=1e-9)
    # verl saw only the last output's reward, 1.0, copied to every row.
    assert metrics["critic/score/mean"] == 1.0
