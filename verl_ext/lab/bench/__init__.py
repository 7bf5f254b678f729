# SPDX-License-Identifier: Apache-2.0
"""Benchmarks behind ``verl-ext bench <name>``: one module each.

A benchmark module has a one-line docstring summary and ``main(argv) -> int``, which takes the arguments after the
name, prints a table, and with ``--json`` makes the last line it prints one JSON object. The module is imported only
when its benchmark is asked for.
"""

from __future__ import annotations

import ast
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def available() -> list[str]:
    """Names of the benchmarks, found without importing any."""
    return sorted(path.stem for path in _FOLDER.glob("*.py") if not path.stem.startswith("_"))


def summary(module: str) -> str:
    """The first line of a benchmark module's docstring, read without importing it."""
    doc = ast.get_docstring(ast.parse((_FOLDER / f"{module}.py").read_text(encoding="utf-8")))
    return (doc or "").split("\n", 1)[0]
