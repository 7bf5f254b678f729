# SPDX-License-Identifier: Apache-2.0
"""Environments that a model acts in, one action a model call.

An environment is a class with ``reset(seed)`` and ``step(action)``, close to Gymnasium's::

    from verl_ext.rollout.environments import Observation

    class Corridor:
        def __init__(self, length: int = 4) -> None:
            self.length = length

        def reset(self, seed: int) -> Observation:
            self.place = 0
            return Observation("You stand at the door.", actions=("forward", "back"), task="Reach the end.")

        def step(self, action: str) -> tuple[Observation, float, bool, dict]:
            self.place += 1 if action == "forward" else -1
            done = self.place == self.length
            return Observation(f"Step {self.place}.", actions=("forward", "back")), float(done), done, {}

and is chosen by ``verl_ext.environment.name=my_package.corridor:Corridor``. The methods may be coroutines. See
:mod:`verl_ext.rollout.environments.protocol` for the whole contract, :mod:`verl_ext.rollout.environments.runner` for
how environments are run, and :mod:`verl_ext.rollout.step_wise` for the agent loop that plays them.

Shipped by name: ``gymnasium``, ``textworld``, ``textarena``, ``alfworld``, ``webshop`` (:data:`BUILT_IN`).
"""

from verl_ext.rollout.environments.protocol import (
    EnvironmentFault,
    EnvironmentUnavailable,
    Observation,
)
from verl_ext.rollout.environments.registry import BUILT_IN, load

__all__ = ["BUILT_IN", "EnvironmentFault", "EnvironmentUnavailable", "Observation", "load"]
