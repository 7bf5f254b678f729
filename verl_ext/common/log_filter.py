# SPDX-License-Identifier: Apache-2.0
"""Less of the same in the log of a run."""

from __future__ import annotations

import logging


class Once(logging.Filter):
    """Lets each message of a logger through once in a process.

    Args:
        begins: only messages that begin so, which count as one whatever follows; it is said as a warning.
    """

    def __init__(self, begins: str = "") -> None:
        super().__init__()
        self.begins = begins
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if self.begins:
            if not message.startswith(self.begins):
                return True
            message, record.levelno, record.levelname = self.begins, logging.WARNING, "WARNING"
        new = message not in self._said
        self._said.add(message)
        return new
