# SPDX-License-Identifier: Apache-2.0
"""The agent loops' own nodes (environment, gateway, kernels and so on); how often the trainer looks for rollouts."""

from __future__ import annotations

from typing import Any

from verl_ext.integration.compat import verl_api
from verl_ext.integration.parts.advantage.train_agents import train_agents
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings.options import OptionError, near, option, select
from verl_ext.methods.options import Positive

WAITING = (
    "In trainer.v1.trainer_mode=colocate_async a model call that is under way waits while the trainer trains, "
    "validates and saves, and that counts: call_timeout_s and time_limit_s of verl_ext.orchestra (agent_timeout_s of "
    "verl_ext.gateway) must be longer than that takes, or all that is under way fails, with reward 0."
)


class AgentLoops(Part):
    """``verl_ext.{environment,orchestra,gateway,kernels,threads}``, ``rollout.custom.multi_turn``, and
    ``verl_ext.poll_interval_s``.
    """

    @classmethod
    def complete(cls, config: Any) -> None:
        if select(select(config, "verl_ext"), "gateway") is not None:
            from verl_ext.rollout.gateway.settings import complete

            complete(config)

    @classmethod
    def check(cls, config: Any) -> list[str]:
        if select(select(config, "verl_ext"), "environment") is not None:
            from verl_ext.rollout.environments.options import check_environment

            check_environment(config)
        if select(select(config, "verl_ext"), "orchestra") is not None:
            from verl_ext.rollout.orchestra.settings import check as check_orchestra

            check_orchestra(config)
            check_train_agents(config)
        if select(select(config, "verl_ext"), "gateway") is not None:
            from verl_ext.rollout.gateway.settings import check as check_gateway

            check_gateway(config)
        if select(select(config.actor_rollout_ref.rollout, "custom"), "multi_turn") is not None:
            from verl_ext.rollout.multi_turn import OPTIONS_KEY, MultiTurnOptions
            from verl_ext.rollout.shared import mcp_tools

            read = MultiTurnOptions.from_rollout_config(config.actor_rollout_ref.rollout)
            mcp_tools.check(read.mcp, f"{OPTIONS_KEY}.mcp")
        if select(select(config, "verl_ext"), "kernels") is not None:
            from verl_ext.rollout.kernels.options import check_kernels

            check_kernels(config)
        if select(select(config, "verl_ext"), "threads") is not None:
            from verl_ext.rollout.shared.threads import read_threads

            read_threads(config)
        if verl_api.agent_loops(config):
            from verl_ext.rollout.shared import text_only

            text_only.check(config)
        poll_interval_s(config)
        return [WAITING] if waits(config) else []

    def replay_buffer(self, buffer: Any) -> Any:
        poll = poll_interval_s(self.config)
        if poll is not None:
            buffer.poll_interval = poll
        return buffer


def poll_interval_s(config: Any) -> float | None:
    """``verl_ext.poll_interval_s``, seconds; None for verl's own."""
    return option(config, "poll_interval_s", Positive | None)


def waits(config: Any) -> bool:
    """Whether calls of agents wait, with a time limit, while the trainer has the GPUs."""
    mode = select(select(config.get("trainer"), "v1"), "trainer_mode")
    return mode == "colocate_async" and any(select(config.get("verl_ext"), one) for one in ("orchestra", "gateway"))


def check_train_agents(config: Any) -> None:
    """Raises OptionError: ``verl_ext.train_agents`` names an agent that the orchestra does not have."""
    from verl_ext.rollout.orchestra import registry, settings

    names = train_agents(config)
    if not names or not select(config.verl_ext.orchestra, "name"):
        return
    team = settings.read(config)
    known = [agent.name for agent in registry.find(str(team.name), team.modules).agents]
    for name in names:
        if name not in known:
            raise OptionError(
                f"verl_ext.train_agents names {name!r}; the orchestra {team.name} has no such agent."
                f"{near(name, known)} It has: {', '.join(known)}. Where the rows' column `orchestra` names "
                "other teams, set verl_ext.orchestra.name=null."
            )
