# SPDX-License-Identifier: Apache-2.0
"""A team whose calls say which weights they come from."""

from __future__ import annotations

import json
import os
from typing import Any

import seeded_team
from replayed_loops import worth
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from verl_ext.rollout.orchestra import BoundAgent, Task, orchestra
from verl_ext.rollout.orchestra.loop import OrchestraLoop


@orchestra("judged_drafts", [seeded_team.writer, seeded_team.critic, seeded_team.judge])
async def judged_drafts(task: Task, writer: BoundAgent, critic: BoundAgent, judge: BoundAgent) -> float:
    """The writer's conversation goes on; the judge has the last word, which counts for nothing."""
    written = list(task.messages)
    said = ""
    for _ in range(2):
        draft = await writer(written)
        remark = await critic(draft.text)
        said += draft.text + remark.text
        written += [{"role": "assistant", "content": draft.text}, {"role": "user", "content": "Again."}]
    await judge(task.messages)
    return worth(said)


class Observed(OrchestraLoop):
    """One line an output goes to the file named by ``RECORD``: model, and the first and the last weights of it."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> list[AgentLoopOutput]:
        rows = await super().run(sampling_params, priority, **kwargs)
        with open(os.environ["RECORD"], "a", encoding="utf-8") as file:
            for row in rows:
                keys = ("model", "min_global_steps", "max_global_steps")
                file.write(json.dumps({key: row.extra_fields.get(key) for key in keys}) + "\n")
        return rows
