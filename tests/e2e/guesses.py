# SPDX-License-Identifier: Apache-2.0
"""A game for untrained models, in a file that its process imports quickly."""

from __future__ import annotations

from typing import Any

from verl_ext.rollout.environments import Observation


def worth(text: str) -> float:
    """Hardly ever the same for two answers."""
    return sum(map(ord, text)) % 89 / 89


class Guesses:
    """A game in which every word earns something."""

    def reset(self, seed: int) -> Observation:
        return Observation(f"room {seed}", task="Speak.")

    def step(self, action: str) -> Any:
        return Observation(f"You said {action[:4]}."), worth(action), False, {}
