# SPDX-License-Identifier: Apache-2.0
"""Less of the same in the log of a run."""

from __future__ import annotations

import logging


class Once(logging.Filter):
    """Lets each message of a logger through once in a process."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in self._said
        self._said.add(message)
        return new
