# SPDX-License-Identifier: Apache-2.0
"""verl's rewards by data source, with those that run or evaluate what a model wrote in the sandbox.

A run with a recipe of ours that names no reward function gets this one in place of verl's
``default_compute_score``. Programs are judged by `verl_ext.rewards.code`, by all of their tests; verl's own functions
for the rest: outside the sandbox those known to compare texts, inside it all others, also ones that a later verl adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_ext.rewards import code
from verl_ext.rewards.arguments import refuse_unknown
from verl_ext.rewards.judge import judge

PROGRAMS = ("codecontests", "apps", "codeforces", "taco")
COMPARED = (
    *("openai/gsm8k", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
    *("math_dapo", "math", "math_dapo_reasoning"),
)
"""Data sources whose functions in verl 0.9.1 (utils/reward_score/__init__.py) compare texts; and these beginnings:"""
COMPARED_BEGINNINGS = ("aime", "searchR1_")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    timeout_s: float = 10.0,
    read_thinking: bool = False,
    **kwargs: Any,
) -> float | Mapping[str, Any]:
    """The reward of an answer as verl gives it, but for programs.

    Args:
        data_source: of the row.
        solution_str: the answer.
        ground_truth: of the row.
        extra_info: of the row.
        timeout_s: seconds of processor time for what is judged in the sandbox; an answer that takes longer is wrong.
        read_thinking: of programs, what the model thinks is read too. verl's functions read it always.
        **kwargs: what verl adds in runs with a reward model.

    Returns:
        What verl returns, or `verl_ext.rewards.code` does; from the sandbox ``score``, ``acc``, and the numbers of
        :meth:`verl_ext.rewards.judge.Judgement.counts`.

    Raises:
        TypeError: unknown option.
        JudgeError: verl's function fails on the ground truth too, or knows no such data source.
        CageError: this machine has not what the cage needs.
    """
    refuse_unknown(kwargs, ("timeout_s", "read_thinking"))
    source = str(data_source)
    if source in PROGRAMS:
        return code.compute_score(source, solution_str, ground_truth, timeout_s=timeout_s, read_thinking=read_thinking)
    if source in COMPARED or source.startswith(COMPARED_BEGINNINGS):
        from verl.utils.reward_score import default_compute_score

        return default_compute_score(data_source, solution_str, ground_truth, extra_info)
    truth = str(ground_truth)
    given = judge(
        "verl_ext.rewards.caged:verls",
        [source, solution_str, truth],
        [source, f"\\boxed{{{truth}}}", truth],
        timeout_s=timeout_s,
        warm=("verl_ext.rewards.caged:load_verls",),
    )
    score = float(given.value or 0.0)
    return {"score": score, "acc": score, **given.counts()}
