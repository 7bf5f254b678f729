# SPDX-License-Identifier: Apache-2.0
"""Teams of agents: who they are, and an orchestration in ordinary async Python over ``await agent(messages)``.

``docs/teams.md`` has a complete one. A run takes it by configuration alone, see
`verl_ext.rollout.orchestra.settings.OrchestraSettings`. Each call is a turn with its ``agent_id``.
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
