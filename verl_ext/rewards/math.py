# SPDX-License-Identifier: Apache-2.0
"""Mathematics: is the answer equal to the reference, as judged by ``math-verify`` in the sandbox.

An answer such as ``9^{9^{9}}`` keeps sympy busy in one C call that nothing but the end of its process interrupts, and
verl calls reward functions from many threads at once: each judgement has a process of its own.
"""

from __future__ import annotations

import re
from typing import Any

from verl_ext.common.thinking import said
from verl_ext.rewards.arguments import references, refuse_unknown
from verl_ext.rewards.judge import Judgement, judge
from verl_ext.sandbox import Sandbox

_VERIFIER = "verl_ext.rewards.caged:math"
_WARM = ("verl_ext.rewards.caged:load_math",)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    timeout_s: float = 5.0,
    max_chars: int = 20_000,
    read_thinking: bool = False,
    **kwargs: Any,
) -> dict[str, float]:
    """Judge a solution of a mathematical problem.

    Args:
        data_source: of the row; not used.
        solution_str: the solution. Its last ``\\boxed{}`` is the answer, or it has none if that never closes; without
            a box math-verify finds the answer (LaTeX, numbers).
        ground_truth: the reference expression, or a list of accepted ones.
        extra_info: of the row; not used.
        timeout_s: seconds of processor time for one judgement; one that takes longer counts as wrong.
        max_chars: of a longer solution only so many last characters are read.
        read_thinking: what the model thinks (``<think>...</think>``) is read too; otherwise only what comes after it.
        **kwargs: what verl adds in runs with a reward model.

    Returns:
        ``score`` and ``acc`` (1.0 or 0.0), ``parsed`` (an answer was found), and ``judge_<reason>`` for each of
        :data:`verl_ext.rewards.judge.REASONS`: 1.0 where the answer is wrong because it kept its judgement from an end.

    Raises:
        TypeError: unknown option.
        ValueError: no reference, or an option out of range.
        JudgeError: math-verify is not installed, or fails on the reference itself.
        CageError: this machine has not what the cage needs.
    """
    refuse_unknown(kwargs, ("timeout_s", "max_chars", "read_thinking"))
    if timeout_s <= 0 or max_chars < 1:
        raise ValueError(f"reward_kwargs: timeout_s={timeout_s} and max_chars={max_chars} must be greater than 0")
    accepted = references(ground_truth)
    text = (solution_str if read_thinking else said(solution_str))[-max_chars:]
    if not text.strip() or _plainly_equal(text, accepted):
        given = Judgement({"right": bool(text.strip()), "parsed": bool(text.strip())})
    else:
        own = [f"\\boxed{{{accepted[0]}}}", accepted]
        given = judge(_VERIFIER, [text, accepted], own, timeout_s=timeout_s, warm=_WARM)
    verdict = given.value or {"right": False, "parsed": False}
    right = float(verdict["right"])
    return {"score": right, "acc": right, "parsed": float(verdict["parsed"]), **given.counts()}


def check(sandbox: Sandbox) -> None:
    """See at launch that math-verify judges as it should.

    Raises:
        JudgeError: it is not installed, or takes an answer of `verl_ext.rewards.notation.KNOWN` for what it is not.
    """
    judge(_VERIFIER, [r"\boxed{2}", ["2"]], [r"\boxed{2}", ["2"]], timeout_s=60.0, warm=_WARM, sandbox=sandbox)


_ONE_BOX = re.compile(r"\\boxed\{([^{}]*)\}")


def _plainly_equal(text: str, accepted: list[str]) -> bool:
    """Whether the only boxed answer, or the whole text, is a reference letter by letter: no need to ask anyone."""
    boxes = _ONE_BOX.findall(text) if text.count("\\boxed") == 1 else []
    plain = boxes[0] if boxes else text
    return plain.strip() in {one.strip() for one in accepted}
