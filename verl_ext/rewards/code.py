# SPDX-License-Identifier: Apache-2.0
"""Programs: do they give what the tests expect, each test run in the sandbox and compared outside of it.

A program is told its input and nothing else, so there is no verdict for it to write and no expected output to find.
The tests are verl's for ``apps``, ``taco``, ``codecontests`` and ``codeforces``: a JSON object ``{"inputs": [...],
"outputs": [...]}``, texts for standard input and output, or with ``fn_name`` the arguments of that function (JSON, one
a line) and its value.

As a tool of an agent::

    @function_tool("python")
    async def python(code: str) -> str:
        return await shared().call("verl_ext.rewards.caged:program", code, "", timeout_s=5.0)
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from decimal import Decimal, InvalidOperation
from typing import Any

from verl_ext.common.thinking import said
from verl_ext.rewards.arguments import refuse_unknown
from verl_ext.rewards.judge import Judgement, given
from verl_ext.sandbox import shared

_PROGRAM = "verl_ext.rewards.caged:program"
_WHOLE = re.compile(r"[+-]?[0-9]+")
LARGE = 10**5
"""From here on a tolerance would take one whole number for another."""

FIRST = 10
"""So many tests are run first, the others if these pass. Those that are not run count as failed, so that a program
which fails one test less never gets less (verl scores a wrong program by these alone)."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    timeout_s: float = 10.0,
    read_thinking: bool = False,
    **kwargs: Any,
) -> dict[str, float]:
    """Run a program on its tests.

    Args:
        data_source: of the row; not used.
        solution_str: the answer; its last ```` ```python ```` block, or the whole of it.
        ground_truth: the tests, an object or its JSON.
        extra_info: of the row; not used.
        timeout_s: seconds of processor time for a test.
        read_thinking: what the model thinks (``<think>...</think>``) is read too; otherwise only what comes after it.
        **kwargs: what verl adds in runs with a reward model.

    Returns:
        ``score``: the share of all tests that pass, ``acc``: 1.0 if all do; ``judge_<reason>``: how many ended without
        output, by :data:`verl_ext.rewards.judge.REASONS`; ``sandbox_calls`` and ``sandbox_seconds``.

    Raises:
        TypeError: unknown option.
        ValueError: the ground truth holds no tests, or one whose input is too long for the sandbox.
        JudgeError, CageError: programs cannot be run here.
    """
    refuse_unknown(kwargs, ("timeout_s", "read_thinking"))
    tests, function = _tests(ground_truth)
    source = (solution_str if read_thinking else said(solution_str)).split("```python")[-1].split("```")[0]
    source = textwrap.dedent(source.removeprefix("\ufeff"))
    runs: list[Judgement] = []
    passed = 0
    for some in (tests[:FIRST], tests[FIRST:]):
        if passed < len(runs):
            break
        calls = [shared().submit(_PROGRAM, source, case, function, timeout_s=timeout_s) for case, _ in some]
        for call, (case, expected) in zip(calls, some, strict=True):
            run = given("the program", [call])
            if run.reason == "input":
                _check_length(case, function, timeout_s)
            if run.reason == "output" and (size := len(json.dumps(expected)) >> 10) >= shared().limits.output_kb:
                raise ValueError(f"a test expects {size} KiB of output; raise verl_ext.sandbox.output_kb above it")
            passed += not run.reason and _same(run.value, expected, function)
            runs.append(run)
    counts = [run.counts() for run in runs]
    numbers = {name: sum(count[name] for count in counts) for name in counts[0]}
    return {"score": passed / len(tests), "acc": float(passed == len(tests)), **numbers}


def _check_length(case: Any, function: str | None, timeout_s: float) -> None:
    """Raises ValueError: a test's input is too long for the sandbox, with any program."""
    run = given("an empty program", [shared().submit(_PROGRAM, "", case, function, timeout_s=timeout_s)])
    if run.reason == "input":
        raise ValueError(f"the input of a test is too long by itself: {run.text}")


def _tests(ground_truth: Any) -> tuple[list[tuple[Any, Any]], str | None]:
    """Pairs of input and expected output, and the name of the function that takes the input."""
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        function = truth.get("fn_name")
        inputs, outputs = list(truth["inputs"]), list(truth["outputs"])
        if function:
            inputs = [_lines(one) if isinstance(one, str) else list(one) for one in inputs]
            outputs = [_value(one) if isinstance(one, str) else one for one in outputs]
        else:
            inputs, outputs = (
                ["\n".join(map(str, one)) if isinstance(one, list | tuple) else str(one) for one in some]
                for some in (inputs, outputs)
            )
        if not inputs or len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            'the ground truth of a program is {"inputs": [...], "outputs": [...]} with as many of each; '
            f"this one is not ({type(error).__name__}: {error}): {ground_truth!r:.200}"
        ) from error
    return list(zip(inputs, outputs, strict=True)), function


def _lines(text: str) -> list[Any]:
    """The values of a text with JSON in each line."""
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _value(text: str) -> Any:
    """The value of a text with JSON; another text is itself (beside arguments that are no JSON)."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _same(found: Any, expected: Any, function: str | None) -> bool:
    """Whether an output is the expected one: for texts word by word, numbers among them by value."""
    if function:
        # Datasets also have a value as a list of one.
        return found == expected or [found] == expected
    words, wanted = str(found).split(), str(expected).split()
    return len(words) == len(wanted) and all(map(_same_word, words, wanted))


def _same_word(word: str, wanted: str) -> bool:
    """Whether a number has the value of another one, within verl's tolerance (1e-5).

    Exactly where both are written as whole numbers, and where a large one is wanted, however the word is written: a
    tolerance would take 1000000500.0 for 1000000007, and infinity for 10^400.
    """
    if word == wanted:
        return True
    try:
        found, expected = Decimal(word), Decimal(wanted)  # without int's limit of digits
    except InvalidOperation:
        return False
    if not (found.is_finite() and expected.is_finite()):
        return False
    if _WHOLE.fullmatch(wanted) and (_WHOLE.fullmatch(word) or expected.copy_abs() >= LARGE):
        return found == expected
    return math.isfinite(float(wanted)) and math.isclose(float(word), float(wanted), rel_tol=1e-5, abs_tol=1e-8)
