# SPDX-License-Identifier: Apache-2.0
"""Environments by name: TextArena's games, the list, an episode in the terminal, questions of reasoning-gym."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from verl_ext import cli
from verl_ext.rollout.environments import EnvironmentUnavailable
from verl_ext.rollout.environments.protocol import reset_result, step_result
from verl_ext.rollout.environments.shipped.gymnasium_env import GymnasiumEnvironment
from verl_ext.rollout.environments.shipped.textarena_env import TextArenaEnvironment
from verl_ext.rollout.reasoning_gym_task import ReasoningGymTask

GAMES = {
    "2048-v0": "[up]",
    "Bandit-v0": "red",
    "Blackjack-v0": "hit",
    "Countdown-v0": "[0 1 +]",
    "Crosswords-v0": "[0 0 c]",
    "FifteenPuzzle-v0": "up",
    "FrozenLake-v0": "right",
    "LightsOut-v0": "1 1",
    "Mastermind-v0": "1 2 3 4",
    "Minesweeper-v0": "(1, 1)",
    "PegJump-v0": "4 1",
    "Secretary-v0": "continue",
    "Set-v0": "1 2 3",
    "Sokoban-v0": "up",
    "Sudoku-v0": "1 1 1",
    "ThreeCardMonte-v0": "0",
    "TowerOfHanoi-v0": "A C",
}


@pytest.mark.seconds
@pytest.mark.parametrize("game", GAMES)
def test_games_of_textarena(game: str) -> None:
    def episode() -> list[Any]:
        played = TextArenaEnvironment(game)
        seen = [reset_result(played.reset(5))]
        assert seen[0].task and seen[0].text
        for _ in range(200):
            step = step_result(played.step(GAMES[game]))
            seen.append((step.observation, step.reward, step.done))
            if step.done:
                return seen
        return seen

    first = episode()
    assert first == episode(), "the same seed gives the same episode"
    assert all(reward == 0 for _, reward, done in first[1:] if not done)


def test_a_game_can_be_won_and_its_own_words_are_not_echoed() -> None:
    played = TextArenaEnvironment("GuessTheNumber-v0")
    assert "between 1 and 20" in played.reset(3).task
    low, high = 1, 20
    while True:
        guess = (low + high) // 2
        seen, reward, done, info = played.step(f"I say [{guess}]")
        assert "I say" not in seen.text
        if done:
            break
        low, high = (guess + 1, high) if "higher" in seen.text else (low, guess - 1)
    assert reward == 1.0 and info["success"] is True


@pytest.mark.parametrize("game", ["Countdown-v0", "Cryptarithm-v0", "Slitherlink-v0", "ThreeCardMonte-v0"])
def test_a_second_invalid_move_ends_a_game_that_tells_reward_and_reason_the_wrong_way_round(game: str) -> None:
    played = TextArenaEnvironment(game)
    played.reset(1)
    first, again = step_result(played.step("x")), step_result(played.step("x"))
    assert "Reason: Bad action" in first.observation.text or "Reason: Invalid action" in first.observation.text
    assert not first.done and again.done and 0.0 <= again.reward < 1.0 and again.info["success"] is False
    assert again.observation.text.startswith(("Invalid Move: Bad action", "Invalid Move: Invalid action"))


@pytest.mark.parametrize(("game", "message"), {"NoSuchGame-v0": "not found", "GuessWho-v0": "API key"}.items())
def test_a_game_that_is_not_here_ends_the_run_by_name(game: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(EnvironmentUnavailable, match=message):
        TextArenaEnvironment(game)
    with pytest.raises(EnvironmentUnavailable, match="not for one player"):
        TextArenaEnvironment("TicTacToe-v0").reset(0)


def test_the_list_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["environments"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["textarena"].split()[1] == "yes" and lines["alfworld"].split()[1] == "no"
    assert "alfworld-download" in lines["alfworld"]


def test_an_episode_in_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lake = json.dumps({"id": "FrozenLake-v1", "map_size": 4, "is_slippery": False, "map_p": 1.0})
    moves = ["fly", "<think>down it is</think><action>down</action>", *["down"] * 2, *["right"] * 3]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(moves) + "\n"))
    assert cli.main(["play", "gymnasium", "--kwargs", lake]) == 0
    out = capsys.readouterr().out
    assert "action 'fly' (not valid)  reward 0" in out and "action 'down'  reward 0" in out
    assert "Admissible actions: left, down, right, up" in out
    assert "the episode is over: 7 steps, reward 1, success True" in out
    monkeypatch.setattr("sys.stdin", io.StringIO("left\n"))
    assert cli.main(["play", "gymnasium", "--kwargs", lake]) == 0
    assert "(left)" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("fly\nup\n"))
    assert cli.main(["play", "gymnasium", "--kwargs", '{"id": "CliffWalking-v1"}', "--max-steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "action 'fly' (not valid)  reward -1" in out and "the episode is over: 2 steps, reward -2" in out
    assert cli.main(["play", "nowhere"]) == 1
    assert cli.main(["play", "gymnasium", "--kwargs", "[1]"]) == 2
    assert "give a JSON object" in capsys.readouterr().err


DATASETS = (
    "basic_arithmetic binary_matrix caesar_cipher chain_sum count_bits countdown decimal_arithmetic gcd lcm "
    "isomorphic_strings letter_counting letter_jumble n_queens number_sorting palindrome_generation "
    "polynomial_multiplication puzzle24 simple_equations spell_backward string_insertion word_sorting"
).split()


@pytest.mark.seconds
def test_questions_of_reasoning_gym(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each question's own answer is right, by the verifier in the sandbox."""
    prepare = ["prepare", "reasoning_gym", "--rows", "2", "1", "--out", str(tmp_path)]
    for name in DATASETS:
        assert cli.main([*prepare, "--dataset", name]) == 0
        row = pq.read_table(tmp_path / "train.parquet").to_pylist()[0]
        verdict = ReasoningGymTask.from_extra_info(row["extra_info"]).judge(row["reward_model"]["ground_truth"])
        assert verdict.solved, f"{name}: {verdict}"
    capsys.readouterr()
    for arguments, message in {
        ("--dataset", "no_such"): "not registered",
        ("--dataset", "composite"): "at least one dataset",
        ("--dataset", "countdown", "--config", '{"x": 1}'): "unexpected keyword argument 'x'",
        (): "needs --dataset NAME",
    }.items():
        assert cli.main([*prepare, *arguments]) == 2
        assert message in capsys.readouterr().err


def test_minigrid_is_a_map_and_words() -> None:
    played = GymnasiumEnvironment("minigrid:MiniGrid-DoorKey-5x5-v0")
    first = reset_result(played.reset(1))
    assert "you are ^" in first.task and first.actions[:3] == ("left", "right", "forward")
    assert first.text == (
        "Mission: use the key to open the door and then get to the goal\n"
        "???????\n???????\n???????\n???????\n??###??\n??#K#??\n??D^#??\n"
        "yellow key: 1 ahead\nlocked yellow door: 0 ahead, 1 left\nYou carry nothing."
    )
    assert "You carry a yellow key." in step_result(played.step("pickup")).observation.text
    opened = [step_result(played.step(action)).observation.text for action in ("left", "toggle")]
    assert "locked yellow door: 1 ahead" in opened[0] and "open yellow door: 1 ahead" in opened[1]


@pytest.mark.parametrize(
    ("id", "actions", "done"),
    [
        ("minigrid:MiniGrid-Empty-5x5-v0", ["forward", "forward", "right", "forward", "forward"], True),
        ("minigrid:BabyAI-GoToRedBall-v0", ["left"], False),
    ],
)
def test_a_walk_in_minigrid(id: str, actions: list[str], done: bool) -> None:
    played = GymnasiumEnvironment(id)
    assert reset_result(played.reset(3)) == reset_result(played.reset(3))
    steps = [step_result(played.step(action)) for action in actions]
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [done]
    assert (steps[-1].reward > 0.9 and steps[-1].info["success"]) is done
