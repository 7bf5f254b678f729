# SPDX-License-Identifier: Apache-2.0
"""TextArena's games for one player (arXiv 2504.11442), one action a model call.

The model sees the rules as its task and, at each step, what the game has said since its last action. The reward comes
at the end; a game counts as won from 1 on. Games that want word lists of NLTK need them on the machine
(``python -m nltk.downloader words averaged_perceptron_tagger_eng``), games with a jury need its service.
"""

from __future__ import annotations

import importlib
from typing import Any

from verl_ext.rollout.environments.protocol import EnvironmentUnavailable, Observation


class TextArenaEnvironment:
    """A game of TextArena.

    Args:
        game: its name, such as ``GuessTheNumber-v0``.
        options: keyword arguments of the game's own class.
    """

    requires = {"textarena": "pip install 'verl-ext[textarena]'"}
    invalid_action = "pass"

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

    def _new(self) -> tuple[str, str]:
        """The rules, and what the game has said since the last action."""
        _, messages = self.env.get_observation()
        told: dict[bool, list[str]] = {True: [], False: []}
        for sender, text, kind in messages:
            if sender == -1 or not isinstance(sender, int):  # the game, which swaps the two in places; else the player
                told[kind == self.kinds.PROMPT].append(str(text))
        return "\n".join(told[True]).strip(), "\n".join(told[False]).strip()

    def reset(self, seed: int) -> Observation:
        try:
            self.env.reset(num_players=1, seed=seed)
        except AssertionError as error:
            raise EnvironmentUnavailable(f"TextArena's game {self.game!r} is not for one player: {error}") from error
        rules, said = self._new()
        return Observation(said or "Begin.", task=rules)

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        done, _ = self.env.step(action if "[" in action else f"[{action}]")
        said = self._new()[1]
        if not done:
            return Observation(said), 0.0, False, {}
        rewards, info = self.env.close()
        reward = float(rewards[0])
        return Observation(str(info[0].get("reason") or said)), reward, True, {"success": reward >= 1}
