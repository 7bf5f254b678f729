# SPDX-License-Identifier: Apache-2.0
"""``textarena_game``: a game of TextArena for two players, each of them an agent with a reward of his own.

The game runs in a process of its own, as every environment. The player whose turn it is gets its rules and what he has
been told, his own moves between, and answers with a move; in the end each player's turns get what the game gives him
(TextArena: 1 to the winner, -1 to the loser, 0 to both in a draw).

- An answer without ``<action>...</action>`` is no valid action; the game gets its last characters and judges them.
- A move that the game refuses is no valid action either. The player may try once more; then he has lost.
- A game that is not over after ``max_turns`` answers, or the run's ``max_calls``, or whose talk no longer fits into a
  prompt, is lost by both: nobody gains by stalling.
- A move that breaks the game (and a new game of that seed begins) has lost, and the other player gets 0. A game that
  breaks by itself is a failure of the trajectory, by the names of `verl_ext.rollout.environments.protocol.FAULTS`, and
  lost by both.
"""

from __future__ import annotations

from typing import Any

from verl_ext.methods.options import AtLeastOne, Positive
from verl_ext.rollout.environments.action import Action, parse_action
from verl_ext.rollout.environments.options import EnvironmentOptions, of_row
from verl_ext.rollout.environments.protocol import EnvironmentFault
from verl_ext.rollout.environments.runner import open_session
from verl_ext.rollout.environments.sessions import Session
from verl_ext.rollout.orchestra.agents import MAX_CALLS, OVERLONG, OrchestraFailure
from verl_ext.rollout.orchestra.core import BoundAgent, Outcome, Task
from verl_ext.rollout.orchestra.registry import agent, orchestra

GAME = "verl_ext.rollout.environments.shipped.textarena_env:TextArenaGame"
OPTIONS = EnvironmentOptions()
LOSS = -1.0
ROLE = "You play a game against another player. Answer with your move in <action> and </action>, as the rules spell it."


def move(text: str) -> Action | None:
    """The move of an answer; None if it can't be read."""
    read = parse_action(text, None, OPTIONS)
    return read if read.valid else None


player_0 = agent("player_0", role=ROLE)(move)
player_1 = agent("player_1", role=ROLE)(move)


@orchestra("textarena_game", lowest_reward=LOSS)
async def textarena_game(
    task: Task,
    player_0: BoundAgent,
    player_1: BoundAgent,
    *,
    game: str = "TicTacToe-v0",
    max_turns: AtLeastOne = 50,
    step_timeout_s: Positive = OPTIONS.step_timeout_s,
) -> Outcome:
    """Two players, turn by turn, to the end of the game; a reward for each.

    Numbers of a trajectory: ``reward_<player>``, ``turns``, ``refused`` (moves), ``draw`` and ``unfinished``.

    Options:
        game: its name; a row's ``extra_info.environment_kwargs`` (``{"game": ..., "options": {...}}``) wins.
        max_turns: answers of both players together.
        step_timeout_s: seconds that the game may take for a move.
    """
    row = {"extra_info": {**task.extra_info, "environment": GAME}}
    _, arguments, seed = of_row(EnvironmentOptions(kwargs={"game": game}), row)
    players = player_0, player_1
    system = [message for message in task.messages if message["role"] == "system"]
    talks: tuple[list[dict[str, Any]], ...] = [*system], [*system]
    turns = refused = 0
    rewards: list[float] | None = None

    def opened() -> Session:
        times = {"reset_timeout_s": OPTIONS.reset_timeout_s, "step_timeout_s": step_timeout_s}
        return open_session(GAME, arguments, processes=OPTIONS.processes, **times)

    session = opened()
    try:
        seen = await session.reset(seed)
        while rewards is None and turns < max_turns:
            mover = int(seen.anchor)
            talk = talks[mover]
            told = "\n\n".join(part for part in (seen.task, seen.text) if part)
            talk.append({"role": "user", "content": told or "It is your turn."})
            try:
                reply = await players[mover](talk)
            except OrchestraFailure as failure:
                if failure.reason not in (MAX_CALLS, OVERLONG):
                    raise
                task.count(failure)
                break
            turns += 1
            action = parse_action(reply.text, None, OPTIONS).text
            talk.append({"role": "assistant", "content": f"<action>{action}</action>"})
            try:
                step = await session.step(action)
            except EnvironmentFault as fault:
                await session.close()
                session = opened()
                await session.reset(seed)  # if this fails too, the move has not done it
                task.count(fault.reason)
                rewards = [LOSS if number == mover else 0.0 for number in range(len(players))]
                break
            seen, rewards = step.observation, step.info.get("rewards")
            if step.info["invalid"]:
                refused += 1
                reply.valid = False
    except EnvironmentFault as fault:
        raise OrchestraFailure(fault.reason, fault.detail) from fault
    finally:
        await session.close()
    earned = [LOSS, LOSS] if rewards is None else rewards
    info = {"turns": turns, "refused": refused, "draw": earned == [0.0, 0.0], "unfinished": rewards is None}
    return Outcome(rewards={one.name: reward for one, reward in zip(players, earned, strict=True)}, info=info)
