# SPDX-License-Identifier: Apache-2.0
"""A team of five for the tests of several models, of which two are seldom asked; its sampling is known beforehand."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from verl_ext.rollout.orchestra import Task, agent, orchestra
from verl_ext.rollout.orchestra.loop import OrchestraLoop


@agent(role="Write.")
def writer(text: str) -> str | None:
    """The first to speak."""
    return text or None


@agent(role="Say more.")
def critic(text: str) -> str | None:
    """Reads the writer."""
    return text or None


@agent(role="Judge.")
def judge(text: str) -> str | None:
    """Has the last word, which counts for nothing."""
    return text or None


@agent(role="Wait.")
def spare(text: str) -> str | None:
    """Is never asked, unless an option says so."""
    return text or None


@agent(role="Guess.")
def guest(text: str) -> str | None:
    """Is heard by nobody, and speaks where `spare` does."""
    return text or None


@orchestra("four")
async def four(
    task: Task, writer: Any, critic: Any, judge: Any, spare: Any, guest: Any, *, spare_speaks: bool = False
) -> float:
    """A trajectory of three calls; what writer and critic say makes the outcome, hardly ever the same twice."""
    first = await writer(task.messages)
    second = await critic(f"{task.question} {first.text}")
    last = await judge(f"{task.question} {second.text}")
    if spare_speaks:
        await guest(task.messages)
        await spare(last.text or "nothing")
    return sum(map(ord, first.text + second.text)) % 97 / 97


class SeededTeam(OrchestraLoop):
    """An orchestra whose sampling seeds follow from prompt, sample, step and agent, whatever the model and the time."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> list[AgentLoopOutput]:
        self._place = (int(kwargs["extra_info"]["index"]), int(kwargs["session_id"]), int(kwargs["global_steps"]))
        rows = await super().run(sampling_params, priority, **kwargs)
        for row in rows:
            row.extra_fields["void"] = self._place[1] == 0  # for the rule simpletir, whatever the last agent says
        return rows

    async def complete(self, agent: Any, messages: list[dict[str, Any]]) -> Any:
        seed = 0
        for number in (*self._place, sum(map(ord, agent.name))):
            seed = 1009 * seed + number
        self._sampling["seed"] = seed
        return await super().complete(agent, messages)
