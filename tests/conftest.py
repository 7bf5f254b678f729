# SPDX-License-Identifier: Apache-2.0
"""Order of the tests: quick ones first, then those that build or start processes, vLLM, runs of the real trainer."""

from __future__ import annotations

import pytest

LATE = ("slow", "vllm", "e2e")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        return next((place for place, name in enumerate(LATE, start=1) if item.get_closest_marker(name)), 0)

    items.sort(key=rank)  # stable: the order of files is kept within a rank
