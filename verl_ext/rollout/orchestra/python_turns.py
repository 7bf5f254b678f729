# SPDX-License-Identifier: Apache-2.0
"""``python``: one agent that thinks, has Python run for it, reads what was printed, and answers.

Tool-integrated reasoning as in SimpleTIR (arXiv 2509.02479): a turn ends with its first whole block of Python, which
runs in the sandbox as a program of its own; its output is the next message. A turn without a block ends the
trajectory: with a ``\\boxed{`` it is the answer, which the run's reward function judges, else it is void, and earns no
more than 0 and than its judgement.
"""

from __future__ import annotations

import textwrap

from verl_ext.methods.options import AtLeastOne, Positive
from verl_ext.methods.rejection import ANSWER, CODE_BLOCK, is_void_turn
from verl_ext.rollout.orchestra.core import BoundAgent, Outcome, Task
from verl_ext.rollout.orchestra.registry import agent, orchestra
from verl_ext.sandbox import SandboxError, shared

FENCE = "```"


def end_of_block(text: str) -> int | None:
    """Where the first whole block of Python ends; None without one."""
    opening = CODE_BLOCK.search(text)
    at = text.find(FENCE, opening.end()) if opening else -1
    return at + len(FENCE) if at >= 0 else None


@agent(ends=end_of_block)
def solver(text: str) -> str | None:
    """Solve the problem step by step. Where it helps, write a program between ```python and ```: it is run, and you are
    shown what it prints. Each program stands for itself. Give the final answer as \\boxed{answer}."""
    return None if is_void_turn(text) else text


@orchestra("python")
async def python(
    task: Task,
    solver: BoundAgent,
    *,
    max_turns: AtLeastOne = 5,
    timeout_s: Positive = 10.0,
    max_output: AtLeastOne = 2000,
) -> Outcome:
    """Think, run, read, answer. The run's reward function judges the last turn; without an answer it earns 0 at most.

    Numbers of a trajectory: ``programs`` (run), ``programs_failed`` (ended without output, by an exception or a limit),
    ``answered`` and ``void``.

    Options:
        max_turns: turns at most; a program in the last one is not run.
        timeout_s: seconds of processor time for a program.
        max_output: characters of an output that are shown, its first.
    """
    messages, programs, failed = list(task.messages), 0, 0
    for turn in range(1, max_turns + 1):
        reply = await solver(messages)
        has_code = end_of_block(reply.text) is not None
        if not has_code or turn == max_turns:
            break
        code = textwrap.dedent(CODE_BLOCK.split(reply.text, maxsplit=1)[1].removesuffix(FENCE)).strip()
        programs += 1
        try:
            printed = str(await shared().call("verl_ext.rewards.caged:program", code, "", timeout_s=timeout_s))
        except SandboxError as error:
            if error.reason == "refused":
                raise
            failed += 1
            printed = f"{error.reason}: {error.text}"
        shown = printed[:max_output] or "Nothing was printed."
        messages += [
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": f"```output\n{shown.rstrip()}\n```"},
        ]
    answered = not has_code and ANSWER in reply.text
    info = {"programs": programs, "programs_failed": failed, "answered": answered, "void": not reply.valid}
    # Where a wrong answer earns less than 0, so does none.
    reward = None if answered else min(0.0, await task.score(reply.text))
    return Outcome(reward=reward, answer=reply.text, info=info)
