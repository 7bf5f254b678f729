# SPDX-License-Identifier: Apache-2.0
"""Games of TextArena for two players through verl's agent loop interface: the games real, the answers scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from loops import Scripted, columns_of, config_of, make_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from verl_ext.rollout.environments import EnvironmentUnavailable, data, runner
from verl_ext.rollout.environments.protocol import reset_result, step_result
from verl_ext.rollout.environments.shipped.textarena_env import TextArenaGame
from verl_ext.rollout.orchestra import loop as loop_module
from verl_ext.rollout.orchestra import textarena_game

pytestmark = pytest.mark.usefixtures("fresh_fates")

GAMES = {
    "ConnectFour-v0": "col 3",
    "GameOfPureStrategy-v0": "5",
    "IteratedPrisonersDilemma-v0": "Cooperate",
    "IteratedRockPaperScissors-v0": "rock",
    "KuhnPoker-v0": "Check",
    "Nim-v0": "0 1",
    "PigDice-v0": "roll",
    "SimpleTak-v0": "4",
    "TicTacToe-v0": "4",
    "TruthAndDeception-v0": "Fact 1",
}


@pytest.fixture(scope="module", autouse=True)
def _no_host_is_left() -> Iterator[None]:
    yield
    runner.end_all()


@pytest.fixture
def play(tokenizer: Any) -> Callable[..., tuple[list[AgentLoopOutput], Scripted]]:
    """Plays one game, the loop made as verl makes it; answers are those of each player, in turn."""

    def run_one(
        answers: tuple[list[str], list[str]], keys: dict[str, Any] | None = None, **row: Any
    ) -> tuple[list[AgentLoopOutput], Scripted]:
        left = [list(texts) for texts in answers]

        def answer(prompt: str) -> str:
            return left["You are Player 1" in prompt].pop(0)

        config = config_of(
            {"prompt_length": 4096, "response_length": 64},
            None,
            {"orchestra": {"name": "textarena_game", "time_limit_s": 1800, **(keys or {})}},
        )
        engine = Scripted(tokenizer, answer)

        async def run() -> list[AgentLoopOutput]:
            made = make_loop(loop_module.AGENT_NAME, config, engine, tokenizer)
            return await made.run({"temperature": 1.0}, **columns_of({"extra_info": {"index": 3, **row}}))

        return asyncio.run(run()), engine

    return run_one


def fields(rows: list[AgentLoopOutput], name: str) -> list[Any]:
    return [row.extra_fields.get(name) for row in rows]


def info(rows: list[AgentLoopOutput]) -> dict[str, float]:
    return rows[-1].extra_fields["reward_extra_info"]


def acts(*moves: Any) -> list[str]:
    return [f"<action>{move}</action>" for move in moves]


@pytest.mark.seconds
@pytest.mark.parametrize("game", GAMES)
def test_games_for_two(game: str) -> None:
    def episode() -> list[Any]:
        played = TextArenaGame(game)
        seen = reset_result(played.reset(5))
        assert seen.task and seen.anchor in (0, 1)
        steps = []
        while not steps or not steps[-1].done:
            steps.append(step_result(played.step(GAMES[game])))
            assert len(steps) < 200
        assert len(steps[-1].info["rewards"]) == 2
        return steps

    assert episode() == episode(), "the same seed gives the same episode"


@pytest.mark.seconds
def test_a_game_that_is_won(play: Any) -> None:
    rows, server = play((acts(0, 1, 2), acts(3, 4)))
    assert fields(rows, "agent_id") == ["player_0", "player_1"] * 2 + ["player_0"]
    assert fields(rows, "agent_reward") == [1.0, -1.0, 1.0, -1.0, 1.0]
    assert fields(rows, "turn_reward") == [0.0, 0.0, 0.0, -1.0, 1.0]
    assert [row.reward_score for row in rows] == [0.0] * 5
    assert fields(rows, "is_action_valid") == [True] * 5
    told = info(rows)
    assert (told["reward_player_0"], told["reward_player_1"], told["turns"]) == (1.0, -1.0, 5.0)
    assert (told["draw"], told["unfinished"], told["refused"]) == (0.0, 0.0, 0.0)
    last = server.prompts[-1]
    assert "You are Player 0 in Tic Tac Toe" in last and "You are Player 1 in" not in last
    assert "<|im_start|>assistant\n<action>0</action>" in last and "Player 1: [3]" in last


def test_a_draw(play: Any) -> None:
    rows, _ = play((acts(0, 1, 5, 6, 8), acts(4, 2, 3, 7)))
    assert fields(rows, "agent_reward") == [0.0] * 9
    assert info(rows)["draw"] == 1.0 and info(rows)["turns"] == 9.0


def test_refused_moves_and_answers_without_one(play: Any) -> None:
    """One more try, then the game is lost; the row says that it was no valid action."""
    rows, server = play((acts(0, 1, 2), ["I take three", *acts(3), *acts(0, 4)]))
    assert fields(rows, "agent_id") == [
        "player_0",
        "player_1",
        "player_1",
        "player_0",
        "player_1",
        "player_1",
        "player_0",
    ]
    assert fields(rows, "is_action_valid") == [True, False, True, True, False, True, True]
    assert info(rows)["refused"] == 2.0 and "attempted an invalid move" in server.prompts[2]
    rows, _ = play((acts(0), acts(0, 0)))
    assert fields(rows, "agent_reward") == [1.0, -1.0, -1.0]
    assert fields(rows, "is_action_valid") == [True, False, False] and info(rows)["turns"] == 3.0


@pytest.mark.parametrize(("keys", "counted"), [({"options": {"max_turns": 3}}, 0.0), ({"max_calls": 3}, 1.0)])
def test_a_game_that_does_not_end_is_lost_by_both(play: Any, keys: dict[str, Any], counted: float) -> None:
    rows, _ = play((acts(0, 1), acts(3)), keys)
    assert fields(rows, "agent_reward") == [-1.0] * 3 and [row.reward_score for row in rows] == [-1.0] * 3
    assert info(rows)["unfinished"] == 1.0 and info(rows)["failure_max_calls"] == counted
    assert fields(rows, "failure") == [""] * 3


@pytest.mark.seconds
def test_a_game_that_breaks(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textarena_game, "GAME", "broken_games:Breaks")
    rows, _ = play((acts(0), acts(8)))
    assert fields(rows, "agent_reward") == [0.0, -1.0] and fields(rows, "failure") == ["", ""]
    assert info(rows)["failure_environment_error"] == 1.0
    monkeypatch.setattr(textarena_game, "GAME", "broken_games:Broken")
    rows, _ = play(([], []))
    assert fields(rows, "failure") == ["environment_error"] and fields(rows, "valid_row") == [False]


@pytest.mark.parametrize(("failed_reward", "earned"), [(0.0, -1.0), (-2.0, -2.0)])
def test_who_keeps_a_game_waiting_has_lost_it(play: Any, failed_reward: float, earned: float) -> None:
    """A trajectory that fails is no better than a game that is lost, for neither player."""
    late = ([*acts(0), (60.0, "late")], acts(3))
    rows, _ = play(late, {"call_timeout_s": 1.0, "failed_reward": failed_reward})
    assert fields(rows, "failure") == ["", "call_timeout"] and fields(rows, "valid_row") == [True, True]
    assert fields(rows, "agent_reward") == fields(rows, "turn_reward") == [earned, earned]
    assert [row.reward_score for row in rows] == [earned] * 2


@pytest.mark.seconds
def test_the_row_names_the_game_and_what_is_none_ends_the_run(play: Any, tmp_path: Path) -> None:
    out = tmp_path / "nim.parquet"
    kwargs = json.dumps({"game": "Nim-v0"})
    made = ["--environment", "textarena", "--kwargs", kwargs, "--seeds", "2", "--orchestra", "textarena_game"]
    data.main([*made, "--out", str(out)])
    row = pq.read_table(out).to_pylist()[1]
    assert (row["agent_name"], row["orchestra"]) == ("verl_ext_orchestra", "textarena_game")
    rows, server = play((["no"] * 2, []), **row["extra_info"])
    assert "Nim" in server.prompts[0] and fields(rows, "agent_reward") == [-1.0] * 2
    for game, message in {"NoSuchGame-v0": "not found", "Sudoku-v0": "not for two players"}.items():
        with pytest.raises(EnvironmentUnavailable, match=message):
            play(([], []), {"options": {"game": game}})
