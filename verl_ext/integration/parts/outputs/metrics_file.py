# SPDX-License-Identifier: Apache-2.0
"""Metrics survive a resume: verl's file logger, without the loss of the steps before it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_ext.integration.compat import wraps
from verl_ext.integration.parts.base import Part


class MetricsFile(Part):
    """verl's ``file`` logger keeps the metrics of the steps before a resume."""

    @contextmanager
    def around_fit(self) -> Iterator[None]:
        make = functools.partial(keep_earlier_metrics, resumed_step=self.trainer.global_steps)
        to_file = "file" in self.config.trainer.logger
        with wraps.must_be_called(wraps.FILE_LOGGER, to_file), wraps.replaced(wraps.FILE_LOGGER, make):
            yield


def earlier_lines(path: Path, resumed_step: int) -> list[bytes]:
    """Whole JSON lines of `path` for steps up to `resumed_step`; a line cut short by a kill is dropped."""
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if step <= resumed_step:
            lines.append(line + b"\n")
    return lines


def keep_earlier_metrics(original: type, resumed_step: int) -> type:
    """A subclass of verl's FileLogger that keeps what the steps before a resume have written.

    A run that starts from step 0 over an existing file moves that file aside (``name.1.jsonl``, ``name.2.jsonl``, ...)
    instead of deleting it.
    """

    class FileLogger(original):
        """verl's file logger, appending after a resume."""

        def __init__(self, project_name: str, experiment_name: str) -> None:
            path = Path(_filepath(project_name, experiment_name))
            backup = path.with_name(path.name + ".keep")
            # A kill between the two writes below leaves the backup as the only whole copy.
            source = backup if backup.exists() else path
            kept: list[bytes] = []
            if source.exists():
                if resumed_step > 0:
                    kept = earlier_lines(source, resumed_step)
                    temporary = path.with_name(path.name + ".tmp")
                    temporary.write_bytes(b"".join(kept))
                    os.replace(temporary, backup)
                elif source.stat().st_size:
                    os.replace(source, _free_name(path))
            super().__init__(project_name, experiment_name)
            self.fp.write(b"".join(kept))
            backup.unlink(missing_ok=True)

    return FileLogger


def _filepath(project_name: str, experiment_name: str) -> str:
    """Where verl 0.9.1's file logger writes (utils/tracking.py:534-539)."""
    given: Any = os.getenv("VERL_FILE_LOGGER_PATH")
    if given is not None:
        return given
    root = os.path.expanduser(os.getenv("VERL_FILE_LOGGER_ROOT", "."))
    return os.path.join(root, project_name, f"{experiment_name}.jsonl")


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate
