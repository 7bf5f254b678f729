# SPDX-License-Identifier: Apache-2.0
"""The agent loops' own nodes (environment, gateway, kernels and so on); how often the trainer looks for rollouts."""

from __future__ import annotations

from typing import Any

from verl_ext.integration.compat import registrations, verl_api
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
            from verl_ext.rollout.shared import text_only, trial

            text_only.check(config)
            trial.check(config)
        poll_interval_s(config)
        default = str(select(config.actor_rollout_ref.rollout.get("agent"), "default_agent_loop"))
        named = verl_api.loops_named(config) or {default}
        for name in sorted(named - set(registrations.AGENT_LOOPS)):
            if name.startswith("verl_ext_"):
                raise OptionError(f"there is no agent loop {name!r}.{near(name, registrations.AGENT_LOOPS)}")
        ours = named & set(registrations.AGENT_LOOPS)
        check_replay(config, ours)
        return [*[WAITING] * waits(config), *check_room(config, ours)]

    def replay_buffer(self, buffer: Any) -> Any:
        poll = poll_interval_s(self.config)
        if poll is not None:
            buffer.poll_interval = poll
        return buffer


def check_replay(config: Any, loops: set[str]) -> None:
    """Raises OptionError: the engine is to say which experts it took, and `loops` of ours do not hand that on."""
    key = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    if loops and config.actor_rollout_ref.rollout.get("enable_rollout_routing_replay"):
        raise OptionError(
            f"{key}=true: the agent loop {min(loops)} of verl_ext does not hand on the routed experts, so that nothing "
            f"would be replayed. Set {key}=false (and router_replay.mode to R2 or disabled), or play with verl's loops."
        )


def check_room(config: Any, loops: set[str]) -> list[str]:
    """Warnings where a second turn has no room after a long answer. Raises OptionError: nor after shorter ones."""
    rollout = config.actor_rollout_ref.rollout
    turns: dict[str, int] = {}
    if "verl_ext_multi_turn" in loops:
        from verl_ext.rollout.multi_turn import MultiTurnOptions

        turns["verl_ext_multi_turn"] = MultiTurnOptions.from_rollout_config(rollout).max_turns
    if "verl_ext_kernels" in loops:
        from verl_ext.rollout.kernels.options import read_options

        turns["verl_ext_kernels"] = read_options(config).max_turns
    several = [loop for loop, most in turns.items() if most > 1]
    if not several or (prompt := int(rollout.prompt_length)) > (answer := int(rollout.response_length)):
        return []
    message = (
        f"data.max_prompt_length={prompt} with data.max_response_length={answer}: a later prompt of the agent loop "
        f"{several[0]} holds the answers before it, and after one of {prompt} tokens or more there is none. Raise "
        "data.max_prompt_length to what all turns but the last take together, or set max_turns=1."
    )
    if prompt < answer:
        raise OptionError(message)
    return [message]


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
