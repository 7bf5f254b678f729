# SPDX-License-Identifier: Apache-2.0
"""What a model is told of its kernel: a fixed form, short, with nothing in it of the machine that judged."""

from __future__ import annotations

import re

from verl_ext.rollout.kernels.judge import Verdict
from verl_ext.rollout.kernels.languages import module
from verl_ext.rollout.kernels.tasks import COLUMNS, ROWS, Task

ERROR_CHARS = 600
ROWS_SHOWN = 5

_HOW = {
    "fuse": "Write parts in order, with ; between them: t and stages (done in torch), or k, three letters (r or c: "
    "rows or columns outermost, v or s: vector or scalar code, e or f: exact or fast exponential) and stages (done in "
    "one kernel). Example: t gelu;krve mul add",
    "c": "Write in one fenced block of C: void kernel(const float *x, const float *a, const float *b, float *y, long "
    "rows, long columns). No includes, strings or attributes; expf and sqrtf are declared.",
    "python": "Write in one fenced block of Python a class ModelNew with forward(self, x, a, b), and C functions in a "
    "string SOURCE at the top; kernels.name(...) calls one, tensors as pointers and whole numbers as long.",
    "triton": "Write in one fenced block of Python a class ModelNew with forward(self, x, a, b), which launches "
    "functions of yours with the decorator @triton.jit. Leave the tensors where they are; it returns one like x.",
}


_PROBLEM = {
    "python": "Write in one fenced block of Python a class ModelNew with the same constructor and forward as Model, "
    "and C functions in a string SOURCE at the top; kernels.name(...) calls one, contiguous float32 tensors as "
    "pointers, whole numbers as long, others as float. No includes, strings or attributes in C; "
    "expf and sqrtf are declared.",
    "triton": "Write in one fenced block of Python a class ModelNew with the same constructor and forward as Model, "
    "which launches functions of yours with the decorator @triton.jit. Leave the tensors where they are.",
}
_WEIGHTS = "Both are made after the same seed: weights that are drawn in the same order are the same."


def prompt(task: Task, language: str) -> str:
    """The first message to a model that is told everything. The task `fuse` gives small models the chain alone.

    Raises:
        ValueError: the language is not for such a task.
    """
    if task.code:
        if language not in _PROBLEM:
            raise ValueError(f"{task.name} is for the languages {' and '.join(_PROBLEM)}, not {language}")
        return f"Make this module faster.\n```python\n{task.code.strip()}\n```\n{_PROBLEM[language]} {_WEIGHTS}"
    return (
        f"Make this faster. x is [{ROWS}, {COLUMNS}] float32, a and b are [{COLUMNS}]; the stages are done one after "
        f"the other, each on all of x: {task.text}\n{_HOW[language] if language in _HOW else module(language).HOW}"
    )


def scrub(text: str) -> str:
    """Text without paths and addresses of this machine."""
    text = re.sub(r"(?<![\w.])/[^\s:'\"(),]+/", "", text)
    return re.sub(r"0x[0-9a-fA-F]{6,}", "0x...", text)


def note(verdict: Verdict) -> str:
    """In a line, for whoever reads transcripts: the times with their interval and their places, or what was wrong."""
    if not verdict.speedup:
        return scrub(verdict.error)[:ERROR_CHARS]
    interval = f"95 % interval {verdict.low:.2f} to {verdict.high:.2f}, {verdict.pairs} pairs"
    places = ", ".join(f"{share:.0%} {place}" for place, share in list(verdict.profile.items())[:ROWS_SHOWN])
    return f"{interval} ({verdict.candidate_us:.0f} us against {verdict.reference_us:.0f} us); {places}"


def feedback(verdict: Verdict, language: str) -> str:
    """What the model reads before its next turn. For `fuse` one line of a few words, which a tiny model can read."""
    if language == "fuse":
        if not verdict.correct:
            return verdict.status
        kind = "decoy" if verdict.decoy else "right"
        return f"{kind} x{verdict.speedup:.1f} cov {verdict.coverage:.1f}"
    lines = [f"Status: {verdict.status}"]
    if verdict.error:
        lines.append(scrub(verdict.error)[:ERROR_CHARS])
    if verdict.speedup:
        times = f"{verdict.candidate_us:.0f} us, the reference {verdict.reference_us:.0f} us"
        lines.append(f"Speedup: {verdict.speedup:.2f} ({times})")
        lines.append(f"Time in your kernels: {verdict.coverage:.0%}")
        lines += [f"  {share:.0%} {place}" for place, share in list(verdict.profile.items())[:ROWS_SHOWN]]
    if verdict.decoy:
        lines.append("No kernel of yours changes the result: this counts as no answer.")
    return "\n".join(lines)
