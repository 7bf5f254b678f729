# SPDX-License-Identifier: Apache-2.0
"""Teams of agents: who they are, and an orchestration in ordinary async Python over ``await agent(messages)``.

::

    from verl_ext.rollout.orchestra import agent, orchestra

    @agent
    def guesser(text):
        "Guess a whole number. Answer with digits only."
        return int(text)

    @agent
    def checker(text):
        "Is the guess right? Answer yes or no."
        return {"yes": True, "no": False}.get(text.strip().lower())

    @orchestra("guess_and_check")
    async def guess_and_check(task, guesser, checker, *, rounds: int = 2):
        for _ in range(rounds):
            guess = await guesser(task.messages)
            verdict = await checker(f"{task.question} The guess is {guess.text}.")
            if verdict.value:
                break
        return guess.text          # judged by the run's reward function

A run takes it by configuration alone: ``rollout.agent.default_agent_loop=verl_ext_orchestra``,
``+verl_ext.orchestra.name=guess_and_check`` and ``+verl_ext.orchestra.modules=[my_package.team]``. Each call is a row
with its ``agent_id``. See `verl_ext.rollout.orchestra.settings.OrchestraSettings` for all keys.
"""

from verl_ext.rollout.orchestra.agents import POLICY, REASONS, Agent, Example, OrchestraFailure, Reply
from verl_ext.rollout.orchestra.branches import together
from verl_ext.rollout.orchestra.core import BoundAgent, Outcome, Task
from verl_ext.rollout.orchestra.registry import agent, orchestra

__all__ = [
    "POLICY",
    "REASONS",
    "Agent",
    "BoundAgent",
    "Example",
    "OrchestraFailure",
    "Outcome",
    "Reply",
    "Task",
    "agent",
    "orchestra",
    "together",
]
