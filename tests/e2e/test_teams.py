# SPDX-License-Identifier: Apache-2.0
"""Teams train through verl's real trainer: a shipped one, and one that a user writes in a package of their own."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from harness import Lab, readme_code, small_llama
from test_main_job import finite

from verl_ext.rollout.environments import data

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
        assert values["rollout/turns"] == len(rows) and values["rollout/trajectories"] == 16
        assert values["actor/grad_norm"] > 0
        assert values["agent/writer/turns"] == values["agent/critic/turns"]  # they take turns
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
    """The shipped team on an untrained model, with a reward function that fails now and then; DAPO's filter asks every
    trajectory for its `acc`, those that failed too."""
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
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.metric=acc",
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
        assert metrics[step]["rollout/trajectories"] == 16 and metrics[step]["rollout/turns"] == 48
        failed = metrics[step]["rollout/failed_trajectories"]
        assert failed == metrics[step].get("rollout/failures/reward_error", 0.0)
        assert len(rows) == 48 - 3 * failed  # trajectories that failed are out of the batch, the others intact
        assert metrics[step]["trajectory/calls_verifier"] == 1.0
        assert metrics[step]["rollout/valid_action_share"] == 0.0
    assert sum(metrics[step]["rollout/failed_trajectories"] for step in (1, 2, 3)) > 0


MOVES = [f"<action>{' ' * n}{move}</action>" for n in range(25) for move in ("check", "bet", "call", "fold")]


def player(lab: Lab, folder: Path) -> Path:
    """An untrained model that mostly says moves of KuhnPoker, since so many of its tokens are one.

    The words of the rules are tokens too: letter by letter a prompt has four times as many.
    """
    import textarena
    from transformers import AutoTokenizer

    game = textarena.make("KuhnPoker-v0")
    game.reset(num_players=2, seed=0)
    _, rules = game.get_observation()
    tokenizer = AutoTokenizer.from_pretrained(lab.model)
    tokenizer.add_tokens(sorted({word for word in re.findall(r" ?\w+", rules) if len(word) > 2}))
    tokenizer.add_tokens(MOVES)
    tokenizer.save_pretrained(folder)
    model = small_llama(tokenizer)
    model.config.max_position_embeddings = 2048
    model.lm_head.weight.data[-len(MOVES) :] *= 10
    model.save_pretrained(folder)
    return folder


def test_a_game_of_two_players_trains_each_by_what_he_earned(standing_lab: Lab, tmp_path: Path) -> None:
    """What docs/teams.md teaches: KuhnPoker, one model plays both, and has won and lost with the same weights."""
    poker = tmp_path / "poker.parquet"
    made = ["--environment", "textarena", "--kwargs", '{"game": "KuhnPoker-v0"}', "--seeds", "0:8"]
    data.main([*made, "--orchestra", "textarena_game", "--out", str(poker)])
    run = standing_lab.run(
        "two_players",
        recipe="[dr_mas,cpu]",
        overrides=[
            f"data.train_files={poker}",
            f"data.val_files={poker}",
            f"actor_rollout_ref.model.path={player(standing_lab, tmp_path / 'player')}",
            "data.max_prompt_length=1600",
            "actor_rollout_ref.rollout.n=6",  # some prompt has games that end differently, but for one step in 10,000
            "algorithm.dr_mas.invalid_action_penalty_coef=0",
            "+verl_ext.orchestra.name=textarena_game",
            "+verl_ext.orchestra.agents.player_0.max_tokens=2",
            "+verl_ext.orchestra.agents.player_1.max_tokens=2",
        ],
    ).check()
    for step in (1, 2):
        values = run.metrics[step]
        assert finite(values) and values["rollout/failed_trajectories"] == 0 and values["rollout/trajectories"] == 24
        assert values["actor/grad_norm"] > 0
        earned: dict[Any, float] = defaultdict(float)
        advantages: dict[Any, list[float]] = defaultdict(list)
        for row in run.rows(step):
            earned[row["index"], row["traj_uid"], row["agent_id"]] += row["turn_reward"]
            advantages[row["index"], row["agent_id"], row["traj_uid"]].append(row["advantage"])
        won = {(index, name): [] for index, _, name in earned}  # type: ignore[var-annotated]
        for (index, uid, name), reward in earned.items():
            assert reward in (-1.0, 0.0, 1.0)
            won[index, name].append((reward, advantages[index, name, uid]))
            other = earned.get((index, uid, f"player_{name == 'player_0':d}"))
            assert other is None or other == -reward
        assert {name for _, name in won} == {"player_0", "player_1"}
        assert values["trajectory/reward_player_0"] == -values["trajectory/reward_player_1"]
        differ = 0
        for own in won.values():  # those who have won learn what they did, those who have lost the contrary
            rewards = sorted(reward for reward, _ in own)
            for reward, seen in own:
                if rewards[0] < rewards[-1] and reward in (rewards[0], rewards[-1]):
                    assert all((advantage > 0) == (reward == rewards[-1]) for advantage in seen)
                    differ += 1
        assert differ
