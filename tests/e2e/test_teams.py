# SPDX-License-Identifier: Apache-2.0
"""Teams train through verl's real trainer: a shipped one, and one that a user writes in a package of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from harness import Lab, readme_code
from test_main_job import finite

pytestmark = pytest.mark.e2e


def overrides(lab: Lab, **keys: Any) -> list[str]:
    return [
        "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra",
        "trainer.total_training_steps=2",
        "data.max_prompt_length=256",
        *(f"+verl_ext.orchestra.{key}={value}" for key, value in keys.items()),
    ]


def test_a_team_of_ones_own_trains_by_configuration_alone(standing_lab: Lab) -> None:
    code = readme_code("# my_team/team.py")  # in the user's own file
    assert len(code.splitlines()) < 40
    package = standing_lab.root / "elsewhere" / "my_team"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "team.py").write_text(code)
    run = standing_lab.run(
        "own_team",
        recipe="[dr_mas,cpu]",
        overrides=overrides(
            standing_lab,
            name="write_and_criticise",
            modules="[my_team.team]",
            **{"options.rounds": 3, "agents.critic.max_tokens": 4},
        ),
        environment={"PYTHONPATH": f"{package.parent}:{os.environ.get('PYTHONPATH', '')}"},
    ).check()
    metrics = run.metrics
    assert sorted(metrics) == [1, 2]
    for step, values in metrics.items():
        assert finite(values)
        rows = run.rows(step)
        assert {row["agent_id"] for row in rows} == {"writer", "critic"}
        assert values["rollout/rows"] == len(rows) and values["rollout/trajectories"] == 16
        assert values["actor/grad_norm"] > 0
        assert values["agent/writer/rows"] == values["agent/critic/rows"]  # they take turns
        by_trajectory: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_trajectory.setdefault(row["traj_uid"], []).append(row)
        for own in by_trajectory.values():
            assert [row["turn_index"] for row in own] == list(range(len(own)))
            assert [row["agent_id"] for row in own] == ["writer", "critic"] * (len(own) // 2)
            assert all(row["response_tokens"] <= 4 for row in own if row["agent_id"] == "critic")
            outcome = own[0]["score"]
            assert all(row["score"] == pytest.approx(outcome) for row in own)
            drafts = [row["turn_reward"] for row in own if row["agent_id"] == "writer"]
            assert outcome == pytest.approx(max(drafts)) and own[-1]["turn_reward"] == pytest.approx(outcome)
    assert any(row["advantage"] != 0 for row in run.rows(1))


def test_solver_and_verifier_train_through_faults(standing_lab: Lab, tmp_path: Path) -> None:
    """The shipped team on an untrained model, with a reward function that fails now and then."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    if sum(map(ord, solution_str)) % 5 == 0:\n"
        "        raise ZeroDivisionError('now and then')\n"
        "    return sum(c.isdigit() for c in solution_str) / 10\n"
    )
    # The tokenizer of this model takes letters for tokens, so the role prompts are shorter here.
    roles = {"agents.solver.role": "'Solve it.'", "agents.verifier.role": "'Check it.'", "options.max_loops": 2}
    run = standing_lab.run(
        "solver_verifier",
        recipe="[dr_mas,cpu]",
        overrides=[
            *overrides(standing_lab, name="solver_verifier", on_failure="exclude", **roles),
            "actor_rollout_ref.rollout.val_kwargs.n=1",
            "trainer.total_training_steps=3",
            "trainer.val_before_train=true",
            f"reward.custom_reward_function.path={reward}",
            "data.val_max_samples=4",
        ],
    ).check()
    metrics = run.metrics
    assert {1, 2, 3} <= set(metrics)
    validation = metrics[0]
    assert validation["val-aux/toy/calls_solver/mean@1"] == 2.0  # an untrained verifier never approves
    assert validation["val-aux/toy/calls_verifier/mean@1"] == 1.0
    assert validation["val-aux/toy/invalid_verifier/mean@1"] == 1.0
    for step in (1, 2, 3):
        assert finite(metrics[step])
        rows = run.rows(step)
        turns = {0: "solver", 1: "verifier", 2: "solver"}
        assert all(row["agent_id"] == turns[row["turn_index"]] for row in rows)
        assert metrics[step]["rollout/trajectories"] == 16 and metrics[step]["rollout/rows"] == 48
        failed = metrics[step]["rollout/failed_trajectories"]
        assert failed == metrics[step].get("rollout/failures/reward_error", 0.0)
        assert len(rows) == 48 - 3 * failed  # trajectories that failed are out of the batch, the others intact
        assert metrics[step]["trajectory/calls_verifier"] == 1.0
        assert metrics[step]["rollout/valid_action_share"] == 0.0
    assert sum(metrics[step]["rollout/failed_trajectories"] for step in (1, 2, 3)) > 0
