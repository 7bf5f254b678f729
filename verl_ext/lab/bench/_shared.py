# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: options, calls in turn, processes of their own, and the way they speak."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Options of ``verl-ext bench <name>``, ``--json`` among them; `text` is the module's, shown `whole` or a line."""

    def __init__(self, name: str, text: str | None, whole: bool = False) -> None:
        form = argparse.RawDescriptionHelpFormatter if whole else argparse.HelpFormatter
        about = (text or "") if whole else (text or "").partition("\n")[0]
        super().__init__(prog=f"verl-ext bench {name}", description=about, formatter_class=form)
        self.add_argument("--json", action="store_true", help="print one JSON object as the last line")
        self._numbers: list[str] = []

    def number(self, name: str, default: int, text: str) -> None:
        """An option that is a whole number of at least 1."""
        self.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: %(default)s)")
        self._numbers.append(name)

    def parsed(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """The options; ends the program where one of them is wrong."""
        args = self.parse_args(argv)
        for name in self._numbers:
            if getattr(args, name) < 1:
                self.error(f"--{name} {getattr(args, name)} must be at least 1")
        return args


def child(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """What a module of this folder prints, run in a process of its own. Raises RuntimeError: it failed."""
    command = [sys.executable, "-m", f"verl_ext.lab.bench.{module}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return done.stdout


def alternate(
    clock: Callable[[Callable[[], Any]], T], functions: Sequence[Callable[[], Any]], repeats: int
) -> list[list[T]]:
    """What `clock` says of each function, called in alternating order after a warm-up."""
    for function in functions:
        function()
    times: list[list[T]] = [[] for _ in functions]
    for repeat in range(repeats):
        order = range(len(functions))
        for which in order if repeat % 2 == 0 else reversed(order):
            times[which].append(clock(functions[which]))
    return times


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of neighbouring calls."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


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
