# SPDX-License-Identifier: Apache-2.0
"""Cells as jobs of submitit, on this machine: what a job does is the same for Slurm, which is not here."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from otb_runs import CELL, LAPTOP, begin, finish, log

from verl_ext.cli import main
from verl_ext.reproduce import runs, slurm
from verl_ext.reproduce.submit import SubmitError, Task

pytestmark = pytest.mark.seconds


def test_a_table_as_jobs_of_submitit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On this machine, where the jobs are what they are for Slurm: the command of a cell and seed."""
    for name in LAPTOP.runnable:
        if name != CELL.name:
            finish(tmp_path, LAPTOP.cells[name])
    words = ["reproduce", "run", "otb", "--scale", "laptop", "--seeds", "0", "--steps", "2", "--out", str(tmp_path)]
    words += ["--no-check", "--slurm", "cluster=local,timeout_min=5"]
    folder = begin(tmp_path)
    log(folder, 0, 1, 2)
    job = "verl_ext.otb.samples.laptop.otb_n4.seed_0"
    with runs.locked(folder):  # as another process that is at it
        assert main(words) == 1
    said = capsys.readouterr()
    assert f"{job}: FAILED" in said.out and f"not complete: {job}" in said.err
    assert main(words) == 0
    said = capsys.readouterr()
    assert f"{job}: COMPLETED" in said.out and "group_mean_n4, seed 0: complete in" in said.out
    assert '"state": "complete"' in (folder / "cell.json").read_text()
    assert (tmp_path / "otb.samples" / "laptop" / "table.md").exists()


def test_a_job_of_submitit_is_not_submitted_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    executor = slurm.executor_of(tmp_path, "cluster=local", 1)
    go = tmp_path / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.1)"

    def progress() -> str:
        go.touch()  # it has been seen while it runs
        return "step 1"

    tasks = [Task("long", shlex.join([sys.executable, "-c", waits]), {}, progress=progress)]
    first = slurm.submitted(executor, tmp_path, tasks)["long"]
    second = slurm.submitted(executor, tmp_path, tasks)
    assert second["long"].job_id == first.job_id and f"long: is job {first.job_id} already" in capsys.readouterr().out
    assert slurm.watch({"long": first}, tasks, 0.1) == []
    assert "long: RUNNING, step 1" in capsys.readouterr().out
    assert slurm.submitted(executor, tmp_path, tasks)["long"].job_id != first.job_id


def test_settings_that_slurm_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    for settings, said in (
        ("gpu", "--slurm: 'gpu' is no KEY=VALUE; give such as slurm_partition=gpu"),
        ("cluster=local,gpu=8", "--slurm cluster=local,gpu=8: Parameter 'gpu'"),
        ("slurm_partition=gpu", 'Could not detect "srun"'),
    ):
        with pytest.raises(SubmitError, match=said):
            slurm.executor_of(tmp_path, settings, 1)
    assert main(["reproduce", "run", "otb", "--scale", "laptop", "--submit", "http://127.0.0.1:1", "--slurm", ""]) == 2
    assert "exclude each other" in capsys.readouterr().err
