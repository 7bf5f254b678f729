# SPDX-License-Identifier: Apache-2.0
"""Houses whose rooms look alike, and a policy of the last three observations: every episode, with its probability.

An episode is two houses of three steps each.

    red sign | blue sign    by chance; whatever one does leads in
    corridor                looks the same in both: in a red house door 0 is right, in a blue one door 1
    fork                    after the right door; looks the same: red: way 1 is right and pays, blue: way 0
    yard                    after the wrong door; nothing to be had

The right action hangs on what was seen one step before in the corridor, and two steps before at the fork. A table of
logits, two for each sequence of at most three observations, sees that much: K = 2 past observations and the present.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

RED, BLUE, CORRIDOR, FORK, YARD = range(5)
HISTORY = 2
STEPS = 6
#: What the right way pays in a red and in a blue house.
PAYS = {"equal": (1.0, 1.0), "unequal": (4.0, 1.0)}
#: Logit of the right action in corridor and fork; every other logit is 0.
POLICIES = {"untrained": 0.0, "half-trained": 1.0}


class Episodes(NamedTuple):
    """All 256 episodes; the first dimension is the episode, the second the step."""

    probability: np.ndarray  # [E]
    observation: np.ndarray  # [E, S]
    reward: np.ndarray  # [E, S]
    score: np.ndarray  # [E, S, P] gradient of the log-probability of the action with respect to all logits

    def gradient(self) -> np.ndarray:
        """The true gradient of the expected return, [P]."""
        return np.einsum("e,e,esp->p", self.probability, self.reward.sum(1), self.score)


def right(observation: int, sign: int) -> int:
    """The right action in corridor or fork."""
    return int((observation == CORRIDOR) == (sign == BLUE))


def episodes(pay: str, policy: str) -> Episodes:
    """Every episode of a problem, under a policy."""
    pays = dict(zip((RED, BLUE), PAYS[pay], strict=True))
    played = []
    contexts: dict[tuple[int, ...], float] = {}  # each with its logit of action 1 less that of action 0
    for signs in itertools.product((RED, BLUE), repeat=2):
        for actions in itertools.product((0, 1), repeat=STEPS):
            seen: list[int] = []
            rewards, keys = [0.0] * STEPS, []
            for step, action in enumerate(actions):
                sign = signs[step // 3]
                through = step % 3 == 2 and actions[step - 1] == right(CORRIDOR, sign)
                seen.append((sign, CORRIDOR, FORK if through else YARD)[step % 3])
                keys.append(tuple(seen[-1 - HISTORY :]))
                matters = seen[-1] in (CORRIDOR, FORK)
                contexts[keys[-1]] = POLICIES[policy] * (2 * right(seen[-1], sign) - 1) if matters else 0.0
                if seen[-1] == FORK and action == right(FORK, sign):
                    rewards[step] = pays[sign]
            played.append((actions, seen, rewards, keys))
    place = {key: 2 * number for number, key in enumerate(sorted(contexts))}
    chance, score = np.full(len(played), 0.25), np.zeros((len(played), STEPS, 2 * len(place)))
    for number, (actions, _, _, keys) in enumerate(played):
        for step, (action, key) in enumerate(zip(actions, keys, strict=True)):
            one = 1.0 / (1.0 + np.exp(-contexts[key]))
            pi = np.array([1.0 - one, one])
            chance[number] *= pi[action]
            score[number, step, place[key] : place[key] + 2] = np.eye(2)[action] - pi
    observation, reward = (np.array([one[k] for one in played]) for k in (1, 2))
    return Episodes(chance, observation, reward, score)
