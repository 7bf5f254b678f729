# SPDX-License-Identifier: Apache-2.0
"""verl's file logger deletes its file; after a resume ours must not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from verl.utils.tracking import FileLogger

from verl_ext.integration.parts.outputs.metrics_file import keep_earlier_metrics


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    return path


def log(steps: range, resumed_step: int = 0) -> None:
    logger = keep_earlier_metrics(FileLogger, resumed_step)("project", "experiment")
    for step in steps:
        logger.log({"value": step}, step=step)
    logger.finish()


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_bytes().splitlines()]


def test_stock_logger_loses_the_earlier_steps(path: Path) -> None:
    """The reason for the wrap; if verl mends it, this test says so and the wrap can go."""
    for first in (0, 3):
        logger = FileLogger("project", "experiment")
        logger.log({"value": 1}, step=first)
        logger.finish()
    assert steps_of(path) == [3]


def test_resume_keeps_steps_up_to_the_checkpoint(path: Path) -> None:
    log(range(0, 6))
    with path.open("ab") as file:
        file.write(b'{"step": 6, "da')  # cut short by a kill
    log(range(5, 8), resumed_step=4)
    assert steps_of(path) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert not path.with_name("metrics.jsonl.keep").exists()


def test_kill_while_restoring_loses_nothing(path: Path) -> None:
    log(range(0, 4))
    path.rename(path.with_name("metrics.jsonl.keep"))  # the state between truncation and restoration
    path.write_bytes(b"")
    log(range(4, 5), resumed_step=3)
    assert steps_of(path) == [0, 1, 2, 3, 4]


def test_fresh_run_moves_an_old_file_aside(path: Path) -> None:
    for _ in range(3):
        log(range(0, 2))
    assert steps_of(path) == [0, 1]
    assert steps_of(path.with_name("metrics.1.jsonl")) == [0, 1]
    assert steps_of(path.with_name("metrics.2.jsonl")) == [0, 1]
