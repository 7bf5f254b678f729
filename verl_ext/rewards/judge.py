# SPDX-License-Identifier: Apache-2.0
"""Ask a verifier in the sandbox, and tell an answer that breaks it from a verifier that is broken.

An answer that keeps its judgement from an end (time, memory, a crash, an endless value, an exception) is wrong: its
score is 0 and the reason is counted. What is not its doing is nobody's verdict: it is tried once more, and then raised
by name. Whether an exception or a crash is the answer's doing is seen by judging the reference answer in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.sandbox import Sandbox, SandboxError, shared

logger = logging.getLogger(__name__)

REASONS = ("timeout", "memory", "crashed", "output", "error")
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
    """

    value: Any
    reason: str = ""
    text: str = ""

    def counts(self) -> dict[str, float]:
        """A number for each reason, ``judge_<reason>``: 1.0 for that of this judgement, else 0.0."""
        return {f"judge_{reason}": float(reason == self.reason) for reason in REASONS}


def _questions(
    verifier: str, arguments: Sequence[Any], reference: Sequence[Any]
) -> Generator[Sequence[Any], Judgement, Judgement]:
    """What to ask the verifier, one question after the other; its value is the judgement."""
    given = yield arguments
    if given.reason in ("crashed", "memory"):  # the machine may have been short of memory
        given = yield arguments
    if given.reason and given.reason != "timeout":
        proof = yield reference
        if proof.reason:
            raise JudgeError(f"{verifier} fails on the reference answer too: {proof.reason}: {proof.text}")
    if given.reason:
        logger.debug("no verdict of %s (%s): %s", verifier, given.reason, given.text)
    return given


def _no_verdict(verifier: str, error: SandboxError) -> Judgement:
    if error.reason == "refused":
        raise JudgeError(f"{verifier} cannot be run in the sandbox: {error.text}") from error
    return Judgement(None, error.reason, error.text)


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
        sandbox: another one than this process's shared one.

    Raises:
        JudgeError: the verifier fails on the reference answer too, or cannot be run.
        CageError: this machine cannot give the cage that is asked for.
    """
    room, questions = sandbox or shared(), _questions(verifier, arguments, reference)
    question = next(questions)
    while True:
        try:
            given = Judgement(room.run(verifier, *question, timeout_s=timeout_s, warm=warm))
        except SandboxError as error:
            given = _no_verdict(verifier, error)
        try:
            question = questions.send(given)
        except StopIteration as end:
            return end.value


async def judge_async(
    verifier: str,
    arguments: Sequence[Any],
    reference: Sequence[Any],
    *,
    timeout_s: float,
    warm: Sequence[Any] = (),
    sandbox: Sandbox | None = None,
) -> Judgement:
    """:func:`judge` that leaves the event loop to others."""
    room, questions = sandbox or shared(), _questions(verifier, arguments, reference)
    question = next(questions)
    while True:
        try:
            given = Judgement(await room.call(verifier, *question, timeout_s=timeout_s, warm=warm))
        except SandboxError as error:
            given = _no_verdict(verifier, error)
        try:
            question = questions.send(given)
        except StopIteration as end:
            return end.value
