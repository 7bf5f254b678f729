# SPDX-License-Identifier: Apache-2.0
"""Any Gymnasium environment with discrete actions, told in text: ToyText's games, MiniGrid and BabyAI, your own.

What the model reads comes from ``describe``: ``ansi`` (the environment's text rendering, the highlighted place in
brackets), a function of your own ``module:function(env, observation) -> str``, or, for Gymnasium's ToyText, MiniGrid
and BabyAI (``minigrid:BabyAI-GoToLocal-v0``), a description made here; these have names for their actions too, a task
and a rule for success.

FrozenLake takes three more arguments: with ``map_size`` the map is generated from the seed (``map_p``: probability
that a tile is frozen), and ``view`` says how much of it is seen: ``full``, ``local`` (the four neighbours) or
``position`` (the coordinates alone, so that what was met before must be remembered).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import re2

from verl_ext.rollout.environments.protocol import EnvironmentUnavailable, Observation
from verl_ext.rollout.environments.shipped import minigrid_text

VIEWS = ("full", "local", "position")
_HIGHLIGHT = re2.compile(r"(?s)\x1b\[[0-9;]*m(.*?)\x1b\[0m")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LAST_ACTION = re.compile(r"^[ \t]+\(\w+\)[ \t]*\n|\n[ \t]+\(\w+\)[ \t]*\Z", re.MULTILINE)


def plain_text(rendering: str) -> str:
    """A text rendering without terminal codes: what they highlight is put in brackets.

    ToyText's line that names the last action is left out: equal states must read the same for HGPO and GiGPO.
    """
    text = _ESCAPE.sub("", _HIGHLIGHT.sub(r"[\1]", rendering)).rstrip()
    return _LAST_ACTION.sub("", text).strip("\n")


def frozen_lake(env: Any, observation: Any, view: str = "full") -> str:
    """A FrozenLake state: the map with P for the player, or less of it."""
    rows = [b"".join(row).decode() for row in env.unwrapped.desc]
    row, column = divmod(int(observation), len(rows[0]))
    if view == "position":
        return f"row {row}, column {column}"
    if view == "local":
        around = {"left": (row, column - 1), "down": (row + 1, column), "right": (row, column + 1)}
        around["up"] = (row - 1, column)
        seen = {
            name: rows[r][c] if 0 <= r < len(rows) and 0 <= c < len(rows[0]) else "edge"
            for name, (r, c) in around.items()
        }
        return f"on {rows[row][column]}; " + ", ".join(f"{name}: {tile}" for name, tile in seen.items())
    return "\n".join(
        " ".join("P" if (r, c) == (row, column) else tile for c, tile in enumerate(line)) for r, line in enumerate(rows)
    )


def cliff_walking(env: Any, observation: Any) -> str:
    """A CliffWalking state."""
    row, column = divmod(int(observation), 12)
    return f"row {row} of 0 to 3, column {column} of 0 to 11"


_STOPS = ("red (row 0, column 0)", "green (row 0, column 4)", "yellow (row 4, column 0)", "blue (row 4, column 3)")


def taxi(env: Any, observation: Any) -> str:
    """A Taxi state."""
    row, column, passenger, destination = env.unwrapped.decode(int(observation))
    where = "in the taxi" if passenger == 4 else f"at {_STOPS[passenger]}"
    return f"taxi at row {row}, column {column}; passenger {where}; destination {_STOPS[destination]}"


def blackjack(env: Any, observation: Any) -> str:
    """A Blackjack state."""
    total, dealer, ace = observation
    return f"your sum {int(total)}{' with a usable ace' if ace else ''}, dealer shows {int(dealer)}"


@dataclass(frozen=True)
class Preset:
    """What is known of a game of ToyText.

    Attributes:
        actions: names in the order of Gymnasium's numbers.
        task: what to do, for the prompt.
        describe: text of an observation.
        success_reward: an episode that ends with a reward of at least this has reached its goal.
        noop_reward: of a step that an invalid action spends: what every step costs.
    """

    actions: tuple[str, ...]
    task: str
    describe: Callable[[Any, Any], str]
    success_reward: float
    noop_reward: float = 0.0


PRESETS = {
    "FrozenLake": Preset(
        ("left", "down", "right", "up"),
        "Walk from the start S to the goal G over frozen tiles F without falling into a hole H. P is where you are.",
        frozen_lake,
        1.0,
    ),
    "CliffWalking": Preset(
        ("up", "right", "down", "left"),
        "Walk from row 3, column 0 to row 3, column 11. The tiles between them in row 3 are a cliff: who falls pays "
        "100 and starts again. Every step costs 1.",
        cliff_walking,
        -1.0,
        noop_reward=-1.0,
    ),
    "Taxi": Preset(
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "Fetch the passenger with the taxi and bring him to his destination. Every step costs 1.",
        taxi,
        20.0,
        noop_reward=-1.0,
    ),
    "Blackjack": Preset(
        ("stick", "hit"),
        "Get a sum closer to 21 than the dealer's, and not over it.",
        blackjack,
        1.0,
    ),
    **dict.fromkeys(
        ("MiniGrid", "BabyAI"),
        Preset(minigrid_text.ACTIONS, minigrid_text.TASK, minigrid_text.describe, 1e-9),  # paid at the goal alone
    ),
}
"""Games by the part of their id before the version, or before the first hyphen."""


def _function(path: str) -> Callable[[Any, Any], str]:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise EnvironmentUnavailable(
            f"environment 'gymnasium': describe={path!r} is neither 'ansi' nor an import path module:function: {error}"
        ) from error


class GymnasiumEnvironment:
    """See the module's text.

    Args:
        id: Gymnasium's id, such as ``FrozenLake-v1`` or ``my_package:MyEnv-v0``.
        actions: names of the actions in the order of their numbers; needed beyond ToyText.
        describe: ``ansi``, an import path, or None for ToyText's descriptions (``ansi`` elsewhere).
        task: what the prompt says to do; None: ToyText's.
        success_reward: an episode that ends (not by a time limit) with a last reward of at least this is a success.
        noop_reward: of a step that an invalid action spends; None: ToyText's (-1 in CliffWalking and Taxi), else 0.
        map_size: for FrozenLake: side of a map generated from the seed; None: Gymnasium's own maps.
        map_p: for FrozenLake: probability that a generated tile is frozen.
        view: for FrozenLake: ``full``, ``local`` or ``position``.
        **make: further arguments of ``gymnasium.make``, such as ``is_slippery``.

    Raises:
        EnvironmentUnavailable: no such environment, or the actions cannot be named.
    """

    requires = {"gymnasium": "pip install 'gymnasium>=1.0'"}
    invalid_action = "noop"
    reuse = True

    def __init__(
        self,
        id: str,
        actions: Sequence[str] | None = None,
        describe: str | None = None,
        task: str | None = None,
        success_reward: float | None = None,
        noop_reward: float | None = None,
        map_size: int | None = None,
        map_p: float = 0.8,
        view: str = "full",
        **make: Any,
    ) -> None:
        preset = PRESETS.get(id.rpartition(":")[2].partition("-")[0])
        if view not in VIEWS:
            raise EnvironmentUnavailable(f"environment 'gymnasium': view={view!r}; use one of {VIEWS}")
        if (map_size is not None or view != "full") and (preset is None or preset.describe is not frozen_lake):
            raise EnvironmentUnavailable(f"environment 'gymnasium': map_size and view are for FrozenLake, not {id}")
        self.id, self.make, self.map_size, self.map_p = id, dict(make), map_size, map_p
        self.task = task if task is not None else preset.task if preset else ""
        self.success_reward = success_reward if success_reward is not None or not preset else preset.success_reward
        self.noop_reward = noop_reward if noop_reward is not None else preset.noop_reward if preset else 0.0
        self.describe: Callable[[Any, Any], str] | None = None
        if describe not in (None, "ansi"):
            self.describe = _function(str(describe))
        elif describe is None and preset:
            self.describe = preset.describe
            if preset.describe is frozen_lake:
                self.describe = lambda env, observation: frozen_lake(env, observation, view)
        if self.describe is None:
            self.make.setdefault("render_mode", "ansi")
        self.env: Any = None
        if map_size is None:
            self.env = self._make()
            self._check_actions(actions or (preset.actions if preset else None))
        else:
            assert preset is not None
            self.actions = tuple(actions or preset.actions)

    @staticmethod
    def preload(id: str = "", **kwargs: Any) -> None:
        """Import Gymnasium, its ToyText and the module that the id names once for all processes."""
        for module in ("gymnasium.envs.toy_text", id.rpartition(":")[0]):
            if module:
                importlib.import_module(module)

    def _make(self, **more: Any) -> Any:
        import gymnasium

        try:
            return gymnasium.make(self.id, **{**self.make, **more})
        except (gymnasium.error.Error, TypeError) as error:
            raise EnvironmentUnavailable(
                f"environment 'gymnasium': gymnasium.make({self.id!r}, {self.make}) failed: {error}"
            ) from error

    def _check_actions(self, actions: Sequence[str] | None) -> None:
        count = getattr(self.env.action_space, "n", None)
        if count is None:
            raise EnvironmentUnavailable(
                f"environment 'gymnasium': {self.id} has the action space {self.env.action_space}; only discrete "
                "actions can be named in text"
            )
        if actions is None or len(actions) != int(count):
            raise EnvironmentUnavailable(
                f"environment 'gymnasium': {self.id} has {count} actions; name them in order, "
                "verl_ext.environment.kwargs.actions=[...]"
            )
        self.actions = tuple(actions)

    def _observe(self, observation: Any) -> Observation:
        if self.describe is not None:
            text = self.describe(self.env, observation)
        else:
            text = plain_text(str(self.env.render()))
        return Observation(text, self.actions, self.task, noop_reward=self.noop_reward)

    def reset(self, seed: int) -> Observation:
        """Begin the episode of a seed; FrozenLake with ``map_size`` also gets its map from it."""
        if self.map_size is not None:
            from gymnasium.envs.toy_text.frozen_lake import generate_random_map

            if self.env is not None:
                self.env.close()
            self.env = self._make(desc=generate_random_map(size=self.map_size, p=self.map_p, seed=seed))
        observation, _ = self.env.reset(seed=seed)
        return self._observe(observation)

    def identify(self, seed: int) -> list[str] | None:
        """The map, where there is one: its first view need not show it."""
        tiles = getattr(self.env.unwrapped, "desc", None)
        return None if tiles is None else [self.id, *(b"".join(row).decode() for row in tiles)]

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Act by the action's name."""
        if action not in self.actions:
            raise ValueError(f"{self.id} has no action {action!r}; its actions are {', '.join(self.actions)}")
        observation, reward, terminated, truncated, info = self.env.step(self.actions.index(action))
        known: dict[str, Any] = {"truncated": bool(truncated)}
        if self.success_reward is not None:
            known["success"] = bool(terminated and reward >= self.success_reward)
        for name in ("success", "is_success"):
            if isinstance(info, Mapping) and name in info:
                known["success"] = bool(info[name])
        return self._observe(observation), float(reward), bool(terminated or truncated), known

    def close(self) -> None:
        """Close Gymnasium's environment."""
        if self.env is not None:
            self.env.close()
