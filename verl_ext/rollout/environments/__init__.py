# SPDX-License-Identifier: Apache-2.0
"""Environments that a model acts in, one action a model call.

An environment is a class with ``reset(seed)`` and ``step(action)``, close to Gymnasium's, and is chosen by
``verl_ext.environment.name=my_package.corridor:Corridor``; ``docs/environments.md`` has a complete one. See
:mod:`verl_ext.rollout.environments.protocol` for the whole contract, :mod:`verl_ext.rollout.environments.runner` for
how environments are run, and :mod:`verl_ext.rollout.step_wise` for the agent loop that plays them.

Shipped by name: ``gymnasium``, ``textworld``, ``textarena``, ``openenv``, ``alfworld``, ``webshop`` (:data:`BUILT_IN`).
"""

from verl_ext.rollout.environments.protocol import (
    EnvironmentFault,
    EnvironmentUnavailable,
    Observation,
)
from verl_ext.rollout.environments.registry import BUILT_IN, load

__all__ = ["BUILT_IN", "EnvironmentFault", "EnvironmentUnavailable", "Observation", "load"]
