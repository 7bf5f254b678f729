# SPDX-License-Identifier: Apache-2.0
"""Loops that ask of SGLang what verl hands through, whose answers say which weights they come from, and that end its
engine."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import uuid
from typing import Any

import psutil
import seeded_team
from guesses import worth
from recording_loop import Recording
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from verl_ext.rollout.orchestra import BoundAgent, Task, orchestra
from verl_ext.rollout.orchestra.loop import OrchestraLoop

ENDS = list(range(100, 259))
ONE, OTHER = 200, 201
SHORT, LONG = 4, 300


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
    """The writer's last answer is long, but for the first two tasks. One line a call goes to the file ``RECORD``."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> list[AgentLoopOutput]:
        self._drafts, self._long = 0, int(kwargs["extra_info"]["index"]) > 1
        return await super().run({**sampling_params, "ignore_eos": True}, priority, **kwargs)

    async def complete(self, agent: Any, messages: list[dict[str, Any]]) -> Any:
        self._drafts += agent.name == "writer"
        limit = LONG if self._long and agent.name == "writer" and self._drafts == 2 else SHORT
        said = await super().complete(dataclasses.replace(agent, max_tokens=limit), messages)
        call = said.row
        record = {"model": agent.model, "limit": limit, "prompt": call.prompt_ids, "answer": call.response_ids}
        record |= {"log_probs": call.response_logprobs}
        record |= {name: call.engine_fields.get(name) for name in ("min_global_steps", "max_global_steps")}
        with open(os.environ["RECORD"], "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return said


def engine(server: Any) -> list[int]:
    """SGLang's own processes, which are children of the server's."""
    return [child.pid for child in psutil.Process().children()]


class LastWords(Recording):
    """Its answers are short. In the fourth batch of a run the engine dies. Its processes are named in the file
    ``RECORD`` with the suffix ``engine``."""

    played = 0

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        LastWords.played += 1
        number = LastWords.played
        if number in (1, 56):
            _, server = await self.server_manager._acquire_server("any")
            processes = await server.__ray_call__.remote(engine)
            with open(f"{os.environ['RECORD']}.engine", "a", encoding="utf-8") as file:
                file.writelines(f"{pid}\n" for pid in processes)
            if number == 56:
                for pid in processes:
                    os.kill(pid, signal.SIGKILL)
        return await super().run({**sampling_params, "max_tokens": 8}, **kwargs)


class Asks(AgentLoopBase):
    """Asks one thing after the other, and reports what was done as asked."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        ids = self.continuous_token_builder.build_initial_tokens(list(kwargs["raw_prompt"]))

        async def ask(limit: int, **more: Any) -> Any:
            asked = {**sampling_params, "temperature": 1.0, "logprobs": True, "max_tokens": limit, **more}
            return await self.server_manager.generate(
                request_id=uuid.uuid4().hex, prompt_ids=ids, sampling_params=asked
            )

        async def lead(**more: Any) -> tuple[list[int], float]:
            """Two tokens out of two, and how far the first one's logit is above the other's when it was said once."""
            answer = await ask(2, temperature=0.0, logit_bias={str(ONE): 100.0, str(OTHER): 100.0}, **more)
            first, second = answer.token_ids
            odds = answer.log_probs[1] - math.log(-math.expm1(answer.log_probs[1]) or 1e-12)
            return [first, second], odds if first == second else -odds

        stopped = await ask(32, stop_token_ids=ENDS)
        patient = await ask(32, stop_token_ids=ENDS, min_new_tokens=12)
        deaf = await ask(32, stop_token_ids=ENDS, ignore_eos=True)
        plain, free = await lead()
        _, present = await lead(presence_penalty=1.5)
        _, often = await lead(frequency_penalty=0.75)
        done = {
            "stop_ids": stopped.token_ids[-1] in ENDS and not set(stopped.token_ids[:-1]) & set(ENDS),
            "at_least": 12 <= len(patient.token_ids) - 1 and not set(patient.token_ids[:12]) & set(ENDS),
            "ignored": len(deaf.token_ids) == 32 and bool(set(deaf.token_ids[:31]) & set(ENDS)),
            "restricted": set(plain) <= {ONE, OTHER},
            "presence": abs(free - present - 1.5) < 0.01,
            "frequency": abs(free - often - 0.75) < 0.01,
        }
        print("asked of SGLang:", done, free, present, often, [len(one.token_ids) for one in (stopped, patient, deaf)])
        return AgentLoopOutput(
            prompt_ids=list(ids),
            response_ids=list(plain),
            response_mask=[1] * len(plain),
            reward_score=float(all(done.values())),
            num_turns=2,
            metrics=AgentLoopMetrics(),
            extra_fields={
                **deaf.extra_fields,
                "reward_extra_info": {name: float(value) for name, value in done.items()},
            },
        )
