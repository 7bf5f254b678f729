# SPDX-License-Identifier: Apache-2.0
"""Ask a verifier in the sandbox, and tell an answer that breaks it from a verifier that is broken.

An answer that keeps its judgement from an end (time, memory, a crash, an endless value, an exception, its length) is
wrong: its score is 0 and the reason is counted. What is not its doing is nobody's verdict: it is tried once more, and
then raised by name. Whether an exception or a crash is its doing is seen by judging the reference answer in its place.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.sandbox import Call, Sandbox, SandboxError, shared

logger = logging.getLogger(__name__)

REASONS = ("timeout", "memory", "crashed", "output", "error", "input")
"""Why an answer can be wrong without a verdict."""


class JudgeError(RuntimeError):
    """The verifier is broken, whatever the answer; the message names it."""


@dataclass(frozen=True)
class Judgement:
    """Of one answer.

    Attributes:
        value: what the verifier returned; None without a verdict, which counts as wrong.
        reason: why there is none, one of `REASONS`; empty with a verdict.
        text: more, for a person.
        calls: of the sandbox that it took.
        seconds: on the clock, that their processes have lived.
    """

    value: Any
    reason: str = ""
    text: str = ""
    calls: int = 0
    seconds: float = 0.0

    def counts(self) -> dict[str, float]:
        """A number for each reason, ``judge_<reason>``: 1.0 for that of this judgement, else 0.0; and the cost."""
        reasons = {f"judge_{reason}": float(reason == self.reason) for reason in REASONS}
        return {**reasons, "sandbox_calls": float(self.calls), "sandbox_seconds": self.seconds}


def given(verifier: str, calls: Sequence[Call]) -> Judgement:
    """What the last of these calls says; waits for it.

    Raises:
        JudgeError: the sandbox could not run it.
    """
    error = calls[-1].exception()
    cost = len(calls), sum(call.seconds for call in calls)
    if error is None:
        return Judgement(calls[-1].result(), "", "", *cost)
    if not isinstance(error, SandboxError) or error.reason == "refused":
        raise JudgeError(f"{verifier} cannot be run in the sandbox: {error}") from error
    return Judgement(None, error.reason, error.text, *cost)


def _calls(
    verifier: str, arguments: Sequence[Any], reference: Sequence[Any], sandbox: Sandbox | None, **how: Any
) -> Generator[Call, None, Judgement]:
    """Each call of the verifier in turn, to be resumed when it has ended; the value is the judgement."""
    room, calls = sandbox or shared("verdicts"), []

    def ask(question: Sequence[Any]) -> Call:
        calls.append(room.submit(verifier, *question, **how))
        return calls[-1]

    yield ask(arguments)
    found = given(verifier, calls)
    if found.reason in ("crashed", "memory"):  # the machine may have been short of memory
        yield ask(arguments)
        found = given(verifier, calls)
    if found.reason and found.reason != "timeout":
        yield ask(reference)
        proof = given(verifier, calls)
        if proof.reason:
            raise JudgeError(f"{verifier} fails on the reference answer too: {proof.reason}: {proof.text}")
        found = Judgement(None, found.reason, found.text, proof.calls, proof.seconds)
    if found.reason:
        logger.debug("no verdict of %s (%s): %s", verifier, found.reason, found.text)
    return found


def judge(
    verifier: str,
    arguments: Sequence[Any],
    reference: Sequence[Any],
    *,
    timeout_s: float,
    warm: Sequence[Any] = (),
    sandbox: Sandbox | None = None,
) -> Judgement:
    """Have an answer judged; blocks this thread.

    Args:
        verifier: ``module:function``, called in the sandbox.
        arguments: its arguments with the answer of the model.
        reference: its arguments with the reference answer in the answer's place.
        timeout_s: seconds of processor time, see :meth:`verl_ext.sandbox.Sandbox.call`.
        warm: see there.
        sandbox: another one than this process's shared one for verdicts.

    Raises:
        JudgeError: the verifier fails on the reference answer too, or cannot be run.
        CageError: this machine cannot give the cage that is asked for.
    """
    calls = _calls(verifier, arguments, reference, sandbox, timeout_s=timeout_s, warm=warm)
    while True:
        try:
            concurrent.futures.wait([next(calls)])
        except StopIteration as end:
            return end.value


async def judge_async(
    verifier: str, arguments: Sequence[Any], reference: Sequence[Any], *, sandbox: Sandbox | None = None, **how: Any
) -> Judgement:
    """:func:`judge` that leaves the event loop to others. Cancelling it ends the call."""
    calls = _calls(verifier, arguments, reference, sandbox, **how)
    while True:
        try:
            call = next(calls)
        except StopIteration as end:
            return end.value
        with contextlib.suppress(SandboxError):
            await asyncio.wrap_future(call)
