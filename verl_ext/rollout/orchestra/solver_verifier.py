# SPDX-License-Identifier: Apache-2.0
"""``solver_verifier``: one agent solves, another checks, until it approves or the loops are used up.

The shape of Dr. MAS's math team (arXiv 2602.08847): with ``max_loops=2`` there are at most three calls, since the last
solution is handed in without a check. The released code takes a verdict that can't be parsed for approval; here that is
the option ``unparsable_verdict``, and the default is to go on.
"""

from __future__ import annotations

from typing import Any, Literal

from verl_ext.methods.options import AtLeastOne
from verl_ext.rollout.orchestra.core import BoundAgent, Outcome, Task
from verl_ext.rollout.orchestra.registry import agent, orchestra
from verl_ext.rollout.shared.tags import tagged


@agent
def solver(text: str) -> str | None:
    r"""You solve mathematical problems in a team with a verifier. Reason step by step, then write the final answer in
    \boxed{}. If the verifier has objected to an earlier solution, weigh the objection and solve the problem again."""
    return text if "\\boxed{" in text else None


@agent
def verifier(text: str) -> bool | None:
    """You check a solver's solution of a mathematical problem. Recompute what matters, name the first error you find,
    and end with your verdict: <verdict>approve</verdict> if the answer is right, <verdict>reject</verdict> if not."""
    verdicts = [verdict.strip().lower() for verdict in tagged(text, "verdict", any_case=True)]
    given = [verdict for verdict in verdicts if verdict in ("approve", "reject")]
    return given[-1] == "approve" if given else None


@orchestra("solver_verifier")
async def solver_verifier(
    task: Task,
    solver: BoundAgent,
    verifier: BoundAgent,
    *,
    max_loops: AtLeastOne = 2,
    unparsable_verdict: Literal["reject", "approve"] = "reject",
) -> Outcome:
    """Solve, verify, solve again. The answer is the last solution; the run's reward function judges it.

    Options:
        max_loops: solutions at most.
        unparsable_verdict: what a verdict that can't be read counts as (Dr. MAS, released: approve).
    """
    history: list[dict[str, Any]] = []
    approved = False
    for loop in range(max_loops):
        solution = await solver([*task.messages, *history])
        if loop == max_loops - 1:
            break
        verdict = await verifier(
            f"Problem:\n{task.question}\n\nSolution:\n{solution.text}\n\nIs the final answer right?"
        )
        approved = verdict.value if verdict.valid else unparsable_verdict == "approve"
        if approved:
            break
        history += [
            {"role": "assistant", "content": solution.text},
            {"role": "user", "content": f"The verifier objects:\n{verdict.text}\n\nSolve the problem again."},
        ]
    return Outcome(answer=solution.text, info={"solutions": loop + 1, "approved": float(approved)})
