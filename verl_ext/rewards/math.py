# SPDX-License-Identifier: Apache-2.0
"""Mathematics: is the answer equal to the reference, as judged by ``math-verify``.

math-verify guards itself by signals, which work in the main thread only, while verl calls reward functions from
threads; and a signal does not interrupt sympy inside one large power. The judgement therefore runs in a process of its
own, one for each process that judges, started at the first judgement (about a second), killed when a judgement takes
too long and started again for the next.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from verl_ext.rewards.arguments import references, refuse_unknown

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0
"""Seconds in which the judging process must have imported math-verify."""


class JudgeTimeout(Exception):
    """The judgement took too long."""


class Judge:
    """A math-verify process, used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._buffer = b""

    def __call__(self, answer: str, accepted: list[str], timeout_s: float) -> dict[str, Any]:
        """Compare an answer with the accepted ones.

        Args:
            answer: a text; math-verify finds the answer in it (``\\boxed{}`` first).
            accepted: reference expressions, of which one must be met.
            timeout_s: seconds for the judgement, the start of the process not counted.

        Returns:
            ``right`` and ``parsed`` (bool), and ``error`` (str) if math-verify raised.

        Raises:
            JudgeTimeout: no judgement in time; the process is killed.
            RuntimeError: the process can't be started; the message holds what it said.
        """
        request = json.dumps({"answer": answer, "accepted": accepted}).encode() + b"\n"
        with self._lock:
            process = self._running()
            try:
                assert process.stdin is not None
                process.stdin.write(request)
                process.stdin.flush()
                return self._line(process, timeout_s)
            except JudgeTimeout:
                self.close()
                raise
            except (OSError, EOFError) as error:
                # It died of the answer, for want of memory for example: that is no verdict on other answers.
                self.close()
                return {"right": False, "parsed": False, "error": f"the judging process ended: {error}"}

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # a fork of the owner: its process is not ours to talk to
            self._process, self._owner = None, os.getpid()
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._said = tempfile.TemporaryFile()
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "verl_ext.rewards.math_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            self._line(process, START_LIMIT_S)
        except (JudgeTimeout, EOFError) as error:
            process.kill()
            self.close()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace")
            raise RuntimeError(
                "the reward function needs math-verify: pip install 'verl-ext[math]'. Its process did not start: "
                f"{type(error).__name__} {said[-1000:]}"
            ) from error
        return process

    def _line(self, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
        assert process.stdout is not None
        until = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([process.stdout], [], [], max(until - time.monotonic(), 0.0))
            if not ready:
                raise JudgeTimeout(f"no judgement within {timeout_s} s")
            block = os.read(process.stdout.fileno(), 1 << 16)
            if not block:
                raise EOFError(f"exit code {process.wait(timeout=10)}")
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """End the process. A later judgement starts another."""
        process, self._process, self._buffer = self._process, None, b""
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:  # input that the process did not take
                        pass


_judge = Judge()
atexit.register(_judge.close)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    timeout_s: float = 5.0,
    max_chars: int = 20_000,
    **kwargs: Any,
) -> dict[str, float]:
    """Judge a solution of a mathematical problem.

    Args:
        data_source: of the row; not used.
        solution_str: the solution; math-verify finds the answer in it (``\\boxed{}``, then LaTeX and numbers).
        ground_truth: the reference expression, or a list of accepted ones.
        extra_info: of the row; not used.
        timeout_s: seconds for one judgement; one that takes longer counts as wrong.
        max_chars: of a longer solution only so many last characters are read.
        **kwargs: what verl adds in runs with a reward model.

    Returns:
        ``score`` and ``acc`` (1.0 or 0.0), ``parsed`` (an answer was found), ``judge_timeout``.

    Raises:
        TypeError: unknown option.
        ValueError: no reference, or an option out of range.
        RuntimeError: math-verify is not installed.
    """
    refuse_unknown(kwargs, ("timeout_s", "max_chars"))
    if timeout_s <= 0 or max_chars < 1:
        raise ValueError(f"reward_kwargs: timeout_s={timeout_s} and max_chars={max_chars} must be greater than 0")
    accepted = references(ground_truth)
    text = solution_str[-max_chars:]
    if not text.strip():
        return {"score": 0.0, "acc": 0.0, "parsed": 0.0, "judge_timeout": 0.0}
    if _plainly_equal(text, accepted):
        return {"score": 1.0, "acc": 1.0, "parsed": 1.0, "judge_timeout": 0.0}
    try:
        verdict = _judge(text, accepted, timeout_s)
    except JudgeTimeout:
        logger.warning("no judgement within %s s on an answer that ends in %r", timeout_s, text[-80:])
        return {"score": 0.0, "acc": 0.0, "parsed": 0.0, "judge_timeout": 1.0}
    if "error" in verdict:
        logger.warning("math-verify failed on an answer that ends in %r: %s", text[-80:], verdict["error"])
    right = float(verdict["right"])
    return {"score": right, "acc": right, "parsed": float(verdict["parsed"]), "judge_timeout": 0.0}


_ONE_BOX = re.compile(r"\\boxed\{([^{}]*)\}")


def _plainly_equal(text: str, accepted: list[str]) -> bool:
    """Whether the only boxed answer, or the whole text, is a reference letter by letter: no need to ask anyone."""
    boxes = _ONE_BOX.findall(text) if text.count("\\boxed") == 1 else []
    plain = boxes[0] if boxes else text
    return plain.strip() in {one.strip() for one in accepted}
