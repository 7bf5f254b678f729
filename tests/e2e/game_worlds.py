# SPDX-License-Identifier: Apache-2.0
"""Environments for the end-to-end tests, in which the words of an untrained model are actions."""

from __future__ import annotations

import os
import time
from typing import Any

from verl_ext.rollout.environments import Observation
from verl_ext.rollout.environments.shipped.gymnasium_env import GymnasiumEnvironment


class AnyWordLake(GymnasiumEnvironment):
    """FrozenLake on a map of the seed; the first letter of any text says where to go."""

    invalid_action = "pass"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(id="FrozenLake-v1", map_size=3, is_slippery=False, **kwargs)

    def step(self, action: str) -> Any:
        letter = ord(action[0]) if action else 0
        return super().step(self.actions[1 + letter % 2 if letter % 8 else 3])


class Faulty(AnyWordLake):
    """The lake of a seed breaks in its second step as the seed says; seeds from 6 on are sound."""

    def reset(self, seed: int) -> Observation:
        self.seed, self.steps = seed, 0
        if seed == 0:
            raise FileNotFoundError("no lake today")
        return super().reset(seed)

    def step(self, action: str) -> Any:
        self.steps += 1
        if self.steps == 2:
            if self.seed == 1:
                raise ZeroDivisionError("the ice is gone")
            if self.seed == 2:
                time.sleep(3600)
            if self.seed == 3:
                os._exit(3)
            if self.seed == 4:
                return "a lake", float("nan"), False, {}
            if self.seed == 5:
                return {"lake": 1}, 0.0, False, {}
        observation, reward, _, info = super().step(action)
        return observation, reward, self.steps == 4, info
