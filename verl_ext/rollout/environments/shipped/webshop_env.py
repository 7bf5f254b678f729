# SPDX-License-Identifier: Apache-2.0
"""WebShop (arXiv 2207.01206): a shop as a text game.

Needs a checkout of WebShop on ``PYTHONPATH`` (it is no package of an index) with its products and its search index
made by its own setup script. The seed picks the customer's wish: number ``seed`` modulo the number of goals. WebShop
loads all products, so a process that has done so is used for one trajectory after the other; bound their number with
``verl_ext.environment.processes``.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

from verl_ext.rollout.environments.protocol import EnvironmentUnavailable, Observation

MODES = ("text", "text_rich", "html")
REWARDS = ("success", "score")
#: The admissible action that stands for any search.
SEARCH = "search[<your query>]"


class WebShopEnvironment:
    """WebShop's text environment.

    Args:
        observation_mode: WebShop's: ``text`` (fields joined by ``[SEP]``), ``text_rich`` or ``html``.
        num_products: products to load; None: all.
        human_goals: goals written by people instead of generated ones.
        reward: ``success``: 1 if the bought item fits in every respect, else 0 (times
            ``verl_ext.environment.reward_scale``; published with 10). ``score``: WebShop's score in [0, 1].
        first_goal: number of the goal of seed 0. (Published: goals below 500 are for tests, the others for training.)
        goals: how many goals from there on are used; None: all.

    Raises:
        EnvironmentUnavailable: WebShop cannot load its data, or an argument is not known.
    """

    requires = {
        "web_agent_site": "put a checkout of WebShop (github.com/princeton-nlp/WebShop) on PYTHONPATH and run its "
        "setup.sh, which fetches the products and builds the search index"
    }
    invalid_action = "pass"
    reuse = True

    def __init__(
        self,
        observation_mode: str = "text",
        num_products: int | None = None,
        human_goals: bool = False,
        reward: str = "success",
        first_goal: int = 0,
        goals: int | None = None,
    ) -> None:
        if observation_mode not in MODES:
            raise EnvironmentUnavailable(
                f"environment 'webshop': observation_mode={observation_mode!r}; use one of {', '.join(MODES)}"
            )
        if reward not in REWARDS:
            raise EnvironmentUnavailable(f"environment 'webshop': reward={reward!r}; use one of {', '.join(REWARDS)}")
        self.reward = reward
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                from web_agent_site.envs import WebAgentTextEnv

                self.env = WebAgentTextEnv(
                    observation_mode=observation_mode, num_products=num_products, human_goals=human_goals
                )
        except (ImportError, OSError) as error:
            raise EnvironmentUnavailable(
                f"environment 'webshop': WebShop cannot be loaded ({type(error).__name__}: {error}). "
                f"{self.requires['web_agent_site'].capitalize()}."
            ) from error
        available = len(self.env.server.goals) - first_goal
        if available < 1:
            raise EnvironmentUnavailable(
                f"environment 'webshop': first_goal={first_goal}, but there are {len(self.env.server.goals)} goals"
            )
        self.first_goal, self.goals = first_goal, min(available, available if goals is None else goals)

    def _actions(self) -> tuple[str, ...]:
        available = self.env.get_available_actions()
        clicks = [f"click[{name}]" for name in available["clickables"] if name != "search"]
        return tuple([SEARCH, *clicks] if available["has_search_bar"] else clicks)

    def reset(self, seed: int) -> Observation:
        """Begin the session of a seed's goal."""
        goal = self.first_goal + seed % self.goals
        # A session that was played before would keep its old goal's state.
        self.env.server.user_sessions.pop(str(goal), None)
        text, _ = self.env.reset(session=goal)
        task = str(self.env.instruction_text).removeprefix("Instruction:").strip()
        return Observation(str(text), self._actions(), task)

    def identify(self, seed: int) -> list[Any] | None:
        """The goal's product, wish and options."""
        goal = self.env.server.goals[self.first_goal + seed % self.goals]
        if not isinstance(goal, Mapping):
            return None
        return [str(goal.get(key)) for key in ("asin", "instruction_text", "goal_options", "price_upper")]

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """``search[words]`` or ``click[name]``; WebShop shows the same page again for anything else."""
        text, score, done, _ = self.env.step(action)
        score, won = float(score), bool(done) and float(score) >= 1.0
        reward = float(won) if self.reward == "success" else score
        actions = () if done else self._actions()
        return Observation(str(text), actions), reward, bool(done), {"won": won, "score": score}

    def close(self) -> None:
        """Close WebShop's environment."""
        self.env.close()
