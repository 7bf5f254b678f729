# SPDX-License-Identifier: Apache-2.0
"""Environments for the tests: a small world, and worlds that break in every way."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from verl_ext.rollout.environments import Observation


class Corridor:
    """Walk forward to the end; where the walk begins follows from the seed."""

    def __init__(self, length: int = 3, walls: int = 0) -> None:
        self.length, self.walls, self.place = length, walls, 0

    def observe(self) -> Observation:
        return Observation(
            f"place {self.place}" + " and a wall" * self.walls, actions=("forward", "back"), task="Reach the end."
        )

    def reset(self, seed: int) -> Observation:
        self.place = seed % 2
        return self.observe()

    def step(self, action: str) -> Any:
        self.place += 1 if action == "forward" else -1
        return self.observe(), float(self.place == self.length), self.place == self.length, {"pid": os.getpid()}


class Reused(Corridor):
    """A corridor whose process serves one trajectory after the other."""

    reuse = True
    invalid_action = "noop"


class Gymnastic(Corridor):
    """Returns what Gymnasium's environments return."""

    def reset(self, seed: int) -> Any:
        return super().reset(seed), {}

    def step(self, action: str) -> Any:
        observation, reward, done, info = super().step(action)
        return observation.text, reward, done, self.place < 0, info


class Broken(Corridor):
    """Breaks as `how` says, in `when` ("make", "reset" or "step") of the seeds that are a multiple of `every`."""

    def __init__(self, how: str = "raise", when: str = "step", every: int = 1, length: int = 3) -> None:
        super().__init__(length)
        self.how, self.when, self.every, self.bad = how, when, every, False
        if when == "make":
            self.misbehave()

    def misbehave(self) -> Any:
        if self.how == "raise":
            raise ZeroDivisionError("the world is gone")
        if self.how == "hang":
            time.sleep(3600)
        if self.how == "die":
            os._exit(3)
        odd = {
            "nan": ("x", float("nan"), False, {}),
            "text": ({"x": 1}, 0.0, False, {}),
            "reward": ("x", "a lot", False, {}),
            "done": ("x", 0.0, "no", {}),
            "info": ("x", 0.0, False, {"f": os.getpid}),
            "short": ("x", 0.0),
            "none": None,
            "actions": (Observation("x", actions=("a", 3)), 0.0, False, {}),  # type: ignore[arg-type]
            "anchor": (Observation("x", anchor=object()), 0.0, False, {}),
            "huge": ("x" * (17 << 20), 0.0, False, {}),
        }
        return odd[self.how]

    def reset(self, seed: int) -> Any:
        self.bad = seed % self.every == 0
        return self.misbehave() if self.bad and self.when == "reset" else super().reset(seed)

    def step(self, action: str) -> Any:
        if self.bad and self.when == "step" and self.place >= 1:
            return self.misbehave()
        return super().step(action)


class Stubborn(Corridor):
    """Will not be closed."""

    def close(self) -> None:
        time.sleep(3600)


class Async:
    """A corridor with coroutines."""

    def __init__(self, how: str = "") -> None:
        self.corridor, self.how = Corridor(), how

    async def reset(self, seed: int) -> Observation:
        return self.corridor.reset(seed)

    async def step(self, action: str) -> Any:
        if self.how == "hang":
            await asyncio.sleep(3600)
        if self.how == "raise":
            raise ZeroDivisionError("the world is gone")
        if self.how == "nan":
            return "x", float("nan"), False, {}
        await asyncio.sleep(0)
        return self.corridor.step(action)


class Half:
    """No environment: it cannot be reset."""

    def step(self, action: str) -> None:
        return None


class Unpreparable(Corridor):
    """Its shared part cannot be loaded."""

    @classmethod
    def preload(cls, **kwargs: Any) -> None:
        raise FileNotFoundError("no games here")


class Needy(Corridor):
    """Needs a package that nobody has."""

    requires = {"no_such_package_anywhere": "pip install it"}
