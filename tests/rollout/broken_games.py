# SPDX-License-Identifier: Apache-2.0
"""Games that break. Their process imports this file, which is why it imports little."""

from __future__ import annotations

from typing import Any

from verl_ext.rollout.environments.protocol import EnvironmentFault
from verl_ext.rollout.environments.shipped.textarena_env import TextArenaGame


class Breaks(TextArenaGame):
    """One that the move 8 breaks."""

    def step(self, action: str) -> Any:
        if action == "8":
            raise MemoryError("too large a move")
        return super().step(action)


class Broken(TextArenaGame):
    """One that cannot begin."""

    def reset(self, seed: int) -> Any:
        raise EnvironmentFault("environment_error", "no board")
