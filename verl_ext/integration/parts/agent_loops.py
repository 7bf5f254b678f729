# SPDX-License-Identifier: Apache-2.0
"""The agent loops' own nodes (environment, gateway, kernels and so on); how often the trainer looks for rollouts."""

from __future__ import annotations

from typing import Any

from verl_ext.integration.options import select
from verl_ext.integration.parts.base import Part


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
        if select(select(config, "verl_ext"), "gateway") is not None:
            from verl_ext.rollout.gateway.settings import check as check_gateway

            check_gateway(config)
        if select(select(config.actor_rollout_ref.rollout, "custom"), "multi_turn") is not None:
            from verl_ext.rollout import mcp_tools
            from verl_ext.rollout.multi_turn import OPTIONS_KEY, MultiTurnOptions

            read = MultiTurnOptions.from_rollout_config(config.actor_rollout_ref.rollout)
            mcp_tools.check(read.mcp, f"{OPTIONS_KEY}.mcp")
        if select(select(config, "verl_ext"), "kernels") is not None:
            from verl_ext.kernels.options import check_kernels

            check_kernels(config)
        if select(select(config, "verl_ext"), "threads") is not None:
            from verl_ext.rollout.threads import read_threads

            read_threads(config)
        return []

    def replay_buffer(self, buffer: Any) -> Any:
        poll = select(self.config.get("verl_ext"), "poll_interval_s")
        if poll is not None:
            buffer.poll_interval = float(poll)
        return buffer
