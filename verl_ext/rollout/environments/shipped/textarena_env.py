# SPDX-License-Identifier: Apache-2.0
"""TextArena's games (arXiv 2504.11442), one action a model call.

The model sees the rules as its task and, at each step, what it has been told since its last action. The reward comes
at the end; a game for one player counts as won from 1 on. Those for two are played by the team ``textarena_game``
(`verl_ext.rollout.orchestra.textarena_game`). Games that want word lists of NLTK need them on the machine
(``python -m nltk.downloader words averaged_perceptron_tagger_eng``), games with a jury need its service.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from verl_ext.rollout.environments.protocol import EnvironmentUnavailable, Observation


def in_order(set_invalid_move: Callable[..., Any]) -> Callable[..., Any]:
    """A game's method with its reason before its reward.

    Countdown, Cryptarithm, Slitherlink and ThreeCardMonte of TextArena 0.7.4 give them the other way round, so that the
    reward of the second invalid move was a text.
    """

    def call(*given: Any, **named: Any) -> Any:
        if len(given) == 2 and isinstance(given[1], str) and not isinstance(given[0], str):
            given = given[::-1]
        return set_invalid_move(*given, **named)

    return call


class TextArenaEnvironment:
    """A game of TextArena for one player.

    Args:
        game: its name, such as ``GuessTheNumber-v0``.
        options: keyword arguments of the game's own class.
    """

    requires = {"textarena": "pip install 'verl-ext[textarena]'"}
    invalid_action = "pass"
    players = 1

    def __init__(self, game: str = "GuessTheNumber-v0", options: dict[str, Any] | None = None) -> None:
        arena: Any = importlib.import_module("textarena")
        self.game, self.kinds = game, arena.ObservationType
        try:
            self.env = arena.make(f"{game}-raw", **(options or {}))
        except (ValueError, TypeError, ImportError, LookupError, OSError, SyntaxError) as error:
            # No such game or option; a package, word list or service that the game wants; newer Python in its source.
            why = " ".join(line.strip(" *\n") for line in str(error).splitlines()).strip()
            raise EnvironmentUnavailable(f"TextArena's game {game!r} can't be made here: {why:.300}") from error

    @staticmethod
    def preload(**kwargs: Any) -> None:
        """Import TextArena once for all processes."""
        importlib.import_module("textarena")

    def _new(self) -> tuple[int, str, str]:
        """Who is to act, his rules, and what he has been told since his last action."""
        player, messages = self.env.get_observation()
        told: dict[bool, list[str]] = {True: [], False: []}
        for sender, text, kind in messages:
            if sender == player:  # it is what he has said himself
                continue
            other = isinstance(sender, int) and sender >= 0  # else the game, which swaps sender and text in places
            told[kind == self.kinds.PROMPT].append(f"Player {sender}: {text}" if other else str(text))
        return player, "\n".join(told[True]).strip(), "\n".join(told[False]).strip()

    def reset(self, seed: int) -> Observation:
        try:
            self.env.reset(num_players=self.players, seed=seed)
        except (AssertionError, LookupError, OSError) as error:
            raise EnvironmentUnavailable(
                f"TextArena's game {self.game!r} is not for {'one player' if self.players == 1 else 'two players'}, or "
                f"lacks a file: {error}. verl_ext.orchestra.name=textarena_game plays games for two, and "
                "verl_ext.environment.name=textarena those for one."
            ) from error
        self.env.state.set_invalid_move = in_order(self.env.state.set_invalid_move)
        return self._observation()

    def _observation(self) -> Observation:
        _, rules, said = self._new()
        return Observation(said or "Begin.", task=rules)

    def _act(self, action: str) -> bool:
        """Hand an action to the game; whether it is over."""
        return bool(self.env.step(action if "[" in action else f"[{action}]")[0])

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        done = self._act(action)
        said = self._new()[2]
        if not done:
            return Observation(said), 0.0, False, {}
        rewards, info = self.env.close()
        reward = float(rewards[0])
        return Observation(str(info[0].get("reason") or said)), reward, True, {"success": reward >= 1}


class TextArenaGame(TextArenaEnvironment):
    """A game of TextArena for two players, for the team ``textarena_game``.

    An observation is what the player sees who is to act, `anchor` his number, `task` his rules before his first action.
    ``info["invalid"]`` says that the action was no valid move, and at the end ``info["rewards"]`` what each has earned.
    """

    players = 2

    def _observation(self) -> Observation:
        player, rules, said = self._new()
        return Observation(said, task=rules, anchor=player)

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        player = self.env.state.current_player_id
        done = self._act(action)
        info: dict[str, Any] = {"invalid": bool(getattr(self.env.state, "error_count", 0))}
        if not done:
            return self._observation(), 0.0, False, info
        rewards, told = self.env.close()
        info = {"invalid": bool(told[player].get("invalid_move")), "rewards": [float(rewards[one]) for one in (0, 1)]}
        return Observation(str(told[0].get("reason") or "The game is over."), anchor=player), 0.0, True, info
