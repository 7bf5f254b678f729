# SPDX-License-Identifier: Apache-2.0
"""A server of OpenEnv, in a Python of its own: `pip install openenv-core uvicorn`, then `python guess.py`.

Train on it with `verl_ext.environment.name=openenv` and its kwargs `base_url` and `action_key: guess`.
"""

import os
import random

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    guess: int


class Told(Observation):
    text: str


class GuessTheNumber(Environment):
    """A number from 1 to 20, in eight guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True  # each session is an object of its own

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number, self.played = random.Random(seed).randint(1, 20), State(episode_id=episode_id)
        return Told(text="Guess my number, from 1 to 20.")

    def step(self, action, timeout_s=None, **kwargs):
        self.played.step_count += 1
        if action.guess == self.number:
            return Told(text="That is it.", reward=1.0, done=True)
        text = "It is larger." if action.guess < self.number else "It is smaller."
        return Told(text=text, reward=0.0, done=self.played.step_count >= 8)

    @property
    def state(self):
        return self.played


if __name__ == "__main__":
    app = create_fastapi_app(GuessTheNumber, Guess, Told, max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ.get("PORT", "8000")), log_level="warning")
