# SPDX-License-Identifier: Apache-2.0
"""The list of runs of the trainer names each test once, with what it is the only one to show."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "e2e"


def test_each_run_says_what_only_it_shows() -> None:
    rows = re.findall(r"^\| `(test_\w+\.py::test_\w+)` \| (.+) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    tests = [
        f"{path.name}::{name}"
        for path in sorted(FOLDER.glob("test_*.py"))
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    ]
    assert sorted(name for name, _ in rows) == sorted(tests)
    assert len({shows for _, shows in rows}) == len(rows)
