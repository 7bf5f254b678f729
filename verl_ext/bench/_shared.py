# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: calls in turn, and the way they speak."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any


def alternate(
    clock: Callable[[Callable[[], Any]], float], functions: Sequence[Callable[[], Any]], repeats: int
) -> list[list[float]]:
    """Times of each function, called in alternating order after a warm-up."""
    for function in functions:
        function()
    times: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats):
        order = range(len(functions))
        for which in order if repeat % 2 == 0 else reversed(order):
            times[which].append(clock(functions[which]))
    return times


def at_least_one(parser: argparse.ArgumentParser, args: argparse.Namespace, *names: str) -> None:
    """End the program where one of these options is below 1."""
    for name in names:
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")


def progress(text: str) -> None:
    """A line on stderr, so that stdout stays for results."""
    print(f"... {text}", file=sys.stderr, flush=True)


def rounded(value: Any) -> Any:
    """The value with its floats to four places, and those below 1 to four digits; dictionaries too."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if abs(value) < 1 else round(value, 4)
