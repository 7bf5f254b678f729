# SPDX-License-Identifier: Apache-2.0
"""``verl-ext sandbox``: what this machine gives, attempts to get out of each cage, and what a call costs."""

from __future__ import annotations

import argparse
import sys
import time

from verl_ext.lab.sandbox import escapes
from verl_ext.sandbox import program
from verl_ext.sandbox.cage import LEVELS, CageError, Limits
from verl_ext.sandbox.pool import Sandbox, SandboxError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--cage", choices=LEVELS, action="append", help="only this one; may be given several times (default: all)"
    )
    parser.add_argument("--calls", type=int, default=200, help="calls of the measurement (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="no attempts to get out")


def run(args: argparse.Namespace) -> int:
    """Print the report. 0: nothing got out of any cage but ``rlimits``; 1: something did, or a cage is missing."""
    held = True
    for cage in args.cage or ("required", "auto", "rlimits"):
        try:
            held &= _report(cage, args) or cage == "rlimits"
        except (CageError, SandboxError) as error:
            print(f"\n{cage}: {error}", file=sys.stderr)
            held = False
    try:
        program.check()
        print("\nprograms (an agent with a terminal): seccomp, Landlock")
    except CageError as error:
        print(f"\nprograms (an agent with a terminal): {error}")
    return 0 if held else 1


def _report(cage: str, args: argparse.Namespace) -> bool:
    out: dict[str, str] = {}
    with escapes.Room() as room, Sandbox(Limits(memory_mb=escapes.MEMORY_MB), cage) as sandbox:
        print(f"\n{cage}: {', '.join(sandbox.layers)}")
        if not args.quick:
            out = {name: escapes.escaped(sandbox, name, room) for name in escapes.ATTEMPTS}
            out = {name: how for name, how in out.items() if how}
            print(f"  {len(escapes.ATTEMPTS) - len(out)} of {len(escapes.ATTEMPTS)} attempts to get out failed")
        for name, how in out.items():
            print(f"    out: {name} ({escapes.ATTEMPTS[name].kind}): {how}")
    with Sandbox(cage=cage) as sandbox:
        for what, target, given, warm in _WORK:
            try:
                sandbox.run(target, *given, timeout_s=60.0, warm=warm)
            except SandboxError as error:
                print(f"  {what}: {error}")
                continue
            start = time.monotonic()
            for call in [sandbox.submit(target, *given, timeout_s=60.0, warm=warm) for _ in range(args.calls)]:
                call.result()
            print(f"  {what}: {args.calls / (time.monotonic() - start):.0f} calls a second")
    return not out


_CAGED = "verl_ext.rewards.caged"
_COUNTDOWN = {"question": "", "answer": "", "metadata": {"numbers": [2, 3, 7], "target": 13}}
_DATASET = ("countdown", '{"seed": 0, "size": 1}')
# Names only: this package imports nothing of those that use it.
_WORK = (
    ("a call that does nothing", "verl_ext.lab.sandbox.escapes:honest", (1,), ()),
    ("math-verify", f"{_CAGED}:math", (r"\boxed{\frac{2}{4}}", ["1/2"]), (f"{_CAGED}:load_math",)),
    (
        "reasoning-gym",
        f"{_CAGED}:reasoning_gym",
        (*_DATASET, "2*3 + 7", _COUNTDOWN),
        (f"{_CAGED}:load_dataset", *_DATASET),
    ),
)
