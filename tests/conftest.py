# SPDX-License-Identifier: Apache-2.0
"""Order of the tests: quick ones first, then those that build or start processes, vLLM, runs of the real trainer."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

LATE = ("slow", "vllm", "e2e", "quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        return max((place for place, name in enumerate(LATE, start=1) if item.get_closest_marker(name)), default=0)

    items.sort(key=rank)  # stable: the order of files is kept within a rank


class _Scheduler(LoadFileScheduling):
    """A file stays with one worker, for the sake of its fixtures; runs of the trainer go to whoever is free."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith("tests/e2e/") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduler:
    return _Scheduler(config, log)
