# SPDX-License-Identifier: Apache-2.0
"""``planner_worker``: a planner splits the task, workers do the parts at the same time, an aggregator joins them.

After the workforce pattern of OWL (camel-ai): planner, workers, and a last agent that writes the answer. Workers see
the task and their own part only. All of a trajectory's workers are one agent, so their turns are compared with each
other (``agent_id`` ``worker``).
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Literal

from verl_ext.methods.options import AtLeastOne
from verl_ext.rollout.orchestra.agents import OrchestraFailure, Reply
from verl_ext.rollout.orchestra.branches import together
from verl_ext.rollout.orchestra.core import BoundAgent, Outcome, Task
from verl_ext.rollout.orchestra.registry import agent, orchestra
from verl_ext.rollout.shared.tags import tagged


@agent
def planner(text: str) -> list[str] | None:
    """You plan the work of a team. Split the task into parts that can be done independently of each other, and write
    each as <subtask>what is to be done</subtask>. If it can't be split, write one subtask with all of it."""
    parts = [part.strip() for part in tagged(text, "subtask")]
    return [part for part in parts if part] or None


@agent
def worker(text: str) -> str | None:
    """You do one part of a task for a team. Do that part only, and end with its result."""
    return text if text.strip() else None


@agent
def aggregator(text: str) -> str | None:
    """You finish a task for a team: read the task and the results of its parts, and write the complete answer."""
    return text if text.strip() else None


@orchestra("planner_worker")
async def planner_worker(
    task: Task,
    planner: BoundAgent,
    worker: BoundAgent,
    aggregator: BoundAgent,
    *,
    max_workers: AtLeastOne = 4,
    aggregate: bool = True,
    unparsable_plan: Literal["whole", "end"] = "whole",
) -> Outcome:
    """Plan, work, aggregate. The run's reward function judges the answer.

    Options:
        max_workers: parts that are done; what a plan has beyond them is left out.
        aggregate: whether the aggregator writes the answer. False: the answer is the workers' results in the plan's
            order, one a paragraph, and the aggregator is not called.
        unparsable_plan: a plan without parts means that one worker does the whole task (``whole``), or that the
            trajectory is over (``end``): the plan is judged as the answer, and earns 0 at most.
    """
    plan = await planner(task.messages)
    if plan.valid:
        parts = plan.value[:max_workers]
    elif unparsable_plan == "whole":
        parts = [task.question]
    else:
        # Where a wrong answer earns less than 0, so does no plan.
        return Outcome(reward=min(0.0, await task.score(plan.text)), info={"parts": 0})

    async def work(part: str) -> Reply | OrchestraFailure:
        try:
            return await worker(f"Task: {task.question}\n\nYour part: {part}")
        except OrchestraFailure as failure:  # the others' work is not lost with one worker's
            task.count(failure)
            return failure

    jobs: list[Awaitable[Any]] = [work(part) for part in parts]
    done = await together(*jobs)
    results = [reply.text if isinstance(reply, Reply) else f"(no result: {reply.reason})" for reply in done]
    info = {"parts": len(parts), "parts_failed": sum(not isinstance(reply, Reply) for reply in done)}
    if not aggregate:
        return Outcome(answer="\n\n".join(results), info=info)
    pairs = zip(parts, results, strict=True)
    listing = "\n\n".join(f"Part {i}: {part}\nResult: {result}" for i, (part, result) in enumerate(pairs, start=1))
    answer = await aggregator(f"Task: {task.question}\n\n{listing}")
    return Outcome(answer=answer.text, info=info)
