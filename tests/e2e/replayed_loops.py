# SPDX-License-Identifier: Apache-2.0
"""Agent loops whose rollouts are kept in the folder ``ROLLOUTS`` and played again from there, a sequence a call."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from guesses import worth
from openai import AsyncOpenAI
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop

from verl_ext.rollout.gateway.loop import GatewayLoop
from verl_ext.rollout.multi_turn import MultiTurnVerifierLoop
from verl_ext.rollout.orchestra import BoundAgent, Task, agent, orchestra
from verl_ext.rollout.orchestra.loop import OrchestraLoop
from verl_ext.rollout.reasoning_gym_task import WRONG, Verdict
from verl_ext.rollout.shared.one_output import rewards, runs
from verl_ext.rollout.step_wise import StepWiseLoop


class Replayed:
    """Mixin over an agent loop: a trajectory that has been played is read."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        index, session = int(kwargs["extra_info"]["index"]), int(kwargs["session_id"])
        file = Path(os.environ["ROLLOUTS"]) / f"{index}_{session}.pickle"
        if not file.exists():
            played = await super().run(sampling_params, **kwargs)  # type: ignore[misc]
            if isinstance(played, AgentLoopOutput):
                played.reward_score = worth(self.tokenizer.decode(played.response_ids))  # type: ignore[attr-defined]
            file.write_bytes(pickle.dumps(played))
            return played
        played = pickle.loads(file.read_bytes())
        return played if isinstance(played, list) else by_call(played)


def by_call(output: AgentLoopOutput) -> list[AgentLoopOutput]:
    """The conversation of one output as a model call each."""
    spans = runs(output.response_mask)
    earned = rewards(output.extra_fields, len(spans), float(output.reward_score or 0.0))
    return [
        output.model_copy(
            update={
                "prompt_ids": output.prompt_ids + output.response_ids[:start],
                "response_ids": output.response_ids[start:end],
                "response_mask": [1] * (end - start),
                "response_logprobs": output.response_logprobs and output.response_logprobs[start:end],
                "extra_fields": {**output.extra_fields, "turn_reward": reward},
            }
        )
        for (start, end), reward in zip(spans, earned, strict=True)
    ]


class Questions(Replayed, MultiTurnVerifierLoop):
    """The demo's loop, with a verifier whose scores an untrained model can tell apart."""

    async def judge(self, task: Any, text: str) -> Verdict:
        return Verdict(0.9 * worth(text), False, text, WRONG)


class Teamed(Replayed, OrchestraLoop):
    pass


class Clients(Replayed, GatewayLoop):
    pass


class Games(Replayed, StepWiseLoop):
    pass


class Tools(Replayed, ToolAgentLoop):
    pass


@agent(role="Write.")
def writer(text: str) -> str | None:
    return text or None


@agent(role="Judge.")
def critic(text: str) -> str | None:
    return text or None


@orchestra("drafts")
async def drafts(task: Task, writer: BoundAgent, critic: BoundAgent) -> float:
    """Writer and critic see their own conversation each, which goes on."""
    written, read, best = list(task.messages), list[dict[str, str]](), 0.0
    for _ in range(2):
        draft = await writer(written)
        draft.reward = worth(draft.text)
        best = max(best, draft.reward)
        read += [{"role": "user", "content": draft.text}]
        remark = await critic(read)
        remark.reward = worth(remark.text + "!")
        read += [{"role": "assistant", "content": remark.text}]
        written += [{"role": "assistant", "content": draft.text}, {"role": "user", "content": remark.text}]
    return best


async def ask(task: dict[str, Any], *, base_url: str, api_key: str, model: str) -> dict[str, Any]:
    """An agent behind the gateway: three questions of one conversation."""
    messages, earned = list(task["messages"]), []
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    for _ in range(3):
        answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=12)
        text = answer.choices[0].message.content or ""
        earned.append(worth(text))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    return {"rewards": earned}
