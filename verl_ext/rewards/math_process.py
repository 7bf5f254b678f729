# SPDX-License-Identifier: Apache-2.0
"""The process that runs math-verify: ``python -m verl_ext.rewards.math_process``, one JSON line in, one out.

An answer such as ``9^{9^{9}}`` keeps sympy busy in one C call that no signal interrupts, so the judgement lives in a
process that its parent can kill. It ends by itself when its input closes.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys

MEMORY_LIMIT = 4 << 30
"""Bytes of address space: a number of too many digits ends in a MemoryError, not in the machine's memory."""


def main() -> None:
    """Serve until the input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes our input
    logging.disable(logging.CRITICAL)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    from math_verify import parse, verify

    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    except (ValueError, OSError):
        pass  # a lower limit is in force, or the system has none
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, object]
        try:
            found = parse(request["answer"], parsing_timeout=None)
            golds = [_boxed(gold) for gold in request["accepted"]]
            right = bool(found) and any(
                verify(parse(gold, parsing_timeout=None), found, timeout_seconds=None) for gold in golds
            )
            answer = {"right": right, "parsed": bool(found)}
        except Exception as error:
            answer = {"right": False, "parsed": False, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


def _boxed(text: str) -> str:
    """A bare expression as math-verify reads it best."""
    return text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}"


if __name__ == "__main__":
    main()
