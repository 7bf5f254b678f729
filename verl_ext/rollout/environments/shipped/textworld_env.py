# SPDX-License-Identifier: Apache-2.0
"""TextWorld (arXiv 1806.11532): text games made on this machine by TextWorld's generator, one a seed.

A game is compiled once and kept in ``$VERL_EXT_HOME/textworld`` (default ``~/.cache/verl_ext/textworld``), under a
name made from its settings, so that all rollouts of a seed, and later runs, play the same file.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from verl_ext.common.cache import home
from verl_ext.rollout.environments.protocol import Observation

#: Part of the name of a game's file; another number for games that are made in another way.
_MADE_BY = 1
_STATUS_LINE = re.compile(r"\n>[^\n]*\Z")
_PICTURE_LINE = re.compile(r"^[ \t]*[$|_\\/>][$|_\\/> \t]*$", re.MULTILINE)


def games_folder() -> Path:
    """Where compiled games are kept."""
    return home() / "textworld"


def readable(feedback: str) -> str:
    """The game's words without the title picture, the input prompt and the line that counts moves.

    Equal situations must read the same for HGPO and GiGPO, so the count of moves may not be in the text.
    """
    text = _STATUS_LINE.sub("", feedback.rstrip())
    text = _PICTURE_LINE.sub("", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


class TextWorldEnvironment:
    """A generated game a seed.

    Args:
        rooms: rooms of the house.
        objects: objects in it.
        quest_length: actions that the shortest solution needs.
        theme: TextWorld's grammar theme, ``house`` or ``basic``.
        intermediate_reward: True: the score counts as it is earned; False: 1 for winning, else 0.
    """

    requires = {"textworld": "pip install 'textworld>=1.6' (it compiles a part of itself: a C compiler is needed)"}
    invalid_action = "pass"

    def __init__(
        self,
        rooms: int = 2,
        objects: int = 4,
        quest_length: int = 2,
        theme: str = "house",
        intermediate_reward: bool = False,
    ) -> None:
        self.settings = {"rooms": rooms, "objects": objects, "quest_length": quest_length, "theme": theme}
        self.intermediate_reward = intermediate_reward
        self.games = games_folder().absolute()
        self.game: Any = None
        self.score = 0.0

    @staticmethod
    def preload(**kwargs: Any) -> None:
        """Import TextWorld once for all processes."""
        importlib.import_module("textworld")

    def game_file(self, seed: int) -> Path:
        """The compiled game of a seed; made if it is not there. Several processes may ask at once."""
        import textworld

        described = json.dumps({**self.settings, "seed": seed, "made_by": _MADE_BY, "with": textworld.__version__})
        name = hashlib.sha256(described.encode()).hexdigest()[:16]
        folder = self.games / name
        if folder.is_dir():
            return folder / "game.z8"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.parent / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the others of a group wait for the first
            if folder.is_dir():
                return folder / "game.z8"
            options = textworld.GameOptions()
            options.seeds = seed
            options.nb_rooms, options.nb_objects = self.settings["rooms"], self.settings["objects"]
            options.quest_length = self.settings["quest_length"]
            options.grammar.theme = self.settings["theme"]
            work = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder.parent))
            try:
                options.path = str(work / "game.z8")
                textworld.make(options)
                work.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        return folder / "game.z8"

    def identify(self, seed: int) -> str:
        """The checksum of the game as TextWorld describes it: rooms, objects, quests and grammar."""
        return hashlib.sha256(self.game_file(seed).with_suffix(".json").read_bytes()).hexdigest()

    def reset(self, seed: int) -> Observation:
        """Begin the game of a seed; its objective is the task."""
        import textworld

        self.close()
        wanted = textworld.EnvInfos(admissible_commands=True, won=True, objective=True, score=True)
        self.game = textworld.start(str(self.game_file(seed)), wanted)
        state = self.game.reset()
        self.score = 0.0
        task = re.sub(r"\s+", " ", state.objective or "").strip()
        text = readable(state.feedback)
        # The opening repeats the objective before it describes the room.
        opening = readable(state.objective or "")
        if opening and text.startswith(opening):
            text = text[len(opening) :].strip()
        return Observation(text, tuple(state.admissible_commands), task)

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Type a command. A command that the game does not know changes nothing, and the game says so."""
        state, score, done = self.game.step(action)
        if self.intermediate_reward:
            reward, self.score = float(score) - self.score, float(score)
        else:
            reward = float(bool(state.won))
        observation = Observation(readable(state.feedback), tuple(state.admissible_commands or ()))
        return observation, reward, bool(done), {"won": bool(state.won)}

    def close(self) -> None:
        """End the game."""
        if self.game is not None:
            self.game.close()
            self.game = None
