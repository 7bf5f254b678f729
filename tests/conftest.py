# SPDX-License-Identifier: Apache-2.0
"""Order of the tests: quick ones first, then those that build or start processes, then runs of the real trainer."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        if item.get_closest_marker("e2e"):
            return 2
        return 1 if item.get_closest_marker("slow") else 0

    items.sort(key=rank)  # stable: the order of files is kept within a rank
