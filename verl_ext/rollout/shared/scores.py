# SPDX-License-Identifier: Apache-2.0
"""Which numbers can be rewards.

verl stores the reward of a turn in float32 and raises on a larger number, after the agent loop has ended: the rollout
is missing then, however bad it was. So each loop looks at a reward where it takes it, and fails by name.
"""

from __future__ import annotations

FLOAT32_MAX = (2 - 2**-23) * 2.0**127


def storable(reward: float) -> bool:
    """Whether a number is finite, in float32 too."""
    return abs(reward) <= FLOAT32_MAX
