# SPDX-License-Identifier: Apache-2.0
"""ALFWorld (arXiv 2010.03768): household tasks as text games.

Needs the package ``alfworld`` and its game files, which its own command ``alfworld-download`` fetches. The seed picks
the game: number ``seed`` modulo the number of games, in the order of their paths.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ext.rollout.environments.protocol import EnvironmentUnavailable, Observation

SPLITS = {
    "train": "json_2.1.1/train",
    "eval_in_distribution": "json_2.1.1/valid_seen",
    "eval_out_of_distribution": "json_2.1.1/valid_unseen",
}
"""ALFWorld's names of its splits and their folders in its data."""

TASK_TYPES = (1, 2, 3, 4, 5, 6)
_TASK = re.compile(r"Your task is to:\s*(.+)")


def data_folder(data: str | None) -> Path:
    """The folder of ALFWorld's data: the argument, else ``$ALFWORLD_DATA``, else ``~/.cache/alfworld``."""
    return Path(data or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser().absolute()


def configuration(folder: Path, task_types: tuple[int, ...], max_steps: int) -> dict[str, Any]:
    """The part of ALFWorld's configuration file that its text environment reads."""
    return {
        "dataset": {
            "data_path": str(folder / SPLITS["train"]),
            "eval_id_data_path": str(folder / SPLITS["eval_in_distribution"]),
            "eval_ood_data_path": str(folder / SPLITS["eval_out_of_distribution"]),
            "num_train_games": -1,
            "num_eval_games": -1,
        },
        "env": {
            "type": "AlfredTWEnv",
            "task_types": list(task_types),
            "goal_desc_human_anns_prob": 0,
            "domain_randomization": False,
            "expert_type": "handcoded",
        },
        # `dqn` is ALFWorld's word for: no expert beside the game.
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": max_steps}},
    }


@functools.lru_cache(maxsize=4)
def games(data: str | None, split: str, task_types: tuple[int, ...], max_steps: int) -> Any:
    """ALFWorld's environment object with its list of games, read once in a process (some seconds).

    Raises EnvironmentUnavailable: the data is missing or holds no such game.
    """
    folder = data_folder(data)
    if not (folder / SPLITS[split]).is_dir():
        raise EnvironmentUnavailable(
            f"environment 'alfworld': no games of {split!r} in {folder / SPLITS[split]}. Run `alfworld-download`, or "
            "set ALFWORLD_DATA (or verl_ext.environment.kwargs.data) to the folder that it filled."
        )
    from alfworld.agents.environment import get_environment

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        made = get_environment("AlfredTWEnv")(configuration(folder, task_types, max_steps), train_eval=split)
    if not made.game_files:
        raise EnvironmentUnavailable(
            f"environment 'alfworld': {folder / SPLITS[split]} holds no solvable game of the task types {task_types}"
        )
    made.game_files = sorted(made.game_files)
    return made


class AlfworldEnvironment:
    """ALFWorld's text games.

    Args:
        split: ``train``, ``eval_in_distribution`` or ``eval_out_of_distribution``.
        task_types: ALFWorld's numbers of kinds of task, 1 to 6.
        data: folder of the games; None: ``$ALFWORLD_DATA``.
        max_steps: steps after which ALFWorld itself ends a game; the loop's own limit is
            ``verl_ext.environment.max_steps``.

    The reward is 1 at the step that solves the task, else 0 (``verl_ext.environment.reward_scale=10`` as published).

    Raises:
        EnvironmentUnavailable: the data is missing, or an argument is not known.
    """

    requires = {"alfworld": "pip install alfworld, then run `alfworld-download`"}
    invalid_action = "pass"

    def __init__(
        self,
        split: str = "train",
        task_types: tuple[int, ...] | list[int] = TASK_TYPES,
        data: str | None = None,
        max_steps: int = 1000,
    ) -> None:
        if split not in SPLITS:
            raise EnvironmentUnavailable(f"environment 'alfworld': split={split!r}; use one of {', '.join(SPLITS)}")
        if not task_types or not set(task_types) <= set(TASK_TYPES):
            raise EnvironmentUnavailable(f"environment 'alfworld': task_types={task_types!r}; use numbers from 1 to 6")
        self.arguments = data, split, tuple(task_types), int(max_steps)
        self.env: Any = None
        self.won = False

    @classmethod
    def preload(cls, **kwargs: Any) -> None:
        """Read the list of games once for all processes."""
        games(*cls(**kwargs).arguments)

    def reset(self, seed: int) -> Observation:
        """Begin the game of a seed."""
        made = games(*self.arguments)
        every = made.game_files
        self.close()
        try:
            # ALFWorld shuffles by its own generator; with one game in the list there is nothing to shuffle.
            made.game_files = [every[seed % len(every)]]
            self.env = made.init_env(batch_size=1)
        finally:
            made.game_files = every
        texts, infos = self.env.reset()
        self.won = False
        text = str(texts[0]).strip()
        task = _TASK.search(text)
        return Observation(text, self._actions(infos), f"Your task is to: {task.group(1).strip()}" if task else "")

    def identify(self, seed: int) -> list[str]:
        """The game's place below its split's folder, and its checksum."""
        every = games(*self.arguments).game_files
        file = Path(every[seed % len(every)])
        folder = data_folder(self.arguments[0]) / SPLITS[self.arguments[1]]
        place = file.relative_to(folder) if file.is_relative_to(folder) else Path(file.name)
        return [place.as_posix(), hashlib.sha256(file.read_bytes()).hexdigest()]

    @staticmethod
    def _actions(infos: Mapping[str, Any]) -> tuple[str, ...]:
        # `help` lists all commands; nothing is learned from it.
        return tuple(command for command in infos["admissible_commands"][0] if command != "help")

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Give a command; ALFWorld answers "Nothing happens." to one that it does not know."""
        texts, _, dones, infos = self.env.step([action])
        won = bool(infos["won"][0])
        reward = float(won and not self.won)
        self.won = won
        return Observation(str(texts[0]).strip(), self._actions(infos)), reward, bool(dones[0]), {"won": won}

    def close(self) -> None:
        """End the game."""
        if self.env is not None:
            self.env.close()
            self.env = None
