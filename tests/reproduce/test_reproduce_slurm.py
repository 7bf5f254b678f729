# SPDX-License-Identifier: Apache-2.0
"""Cells as jobs of submitit, on this machine: what a job does is the same for Slurm, which is not here."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from otb_runs import CELL, LAPTOP, begin, finish, log, run_of

from verl_ext.cli import main
from verl_ext.lab.reproduce.cluster import SUCCEEDED, SubmitError, Task, follow
from verl_ext.lab.reproduce.slurm_jobs import SlurmJobs

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
    with run_of(tmp_path).locked():  # as another process that is at it
        assert main(words) == 1
    said = capsys.readouterr()
    assert f"{job}: FAILED" in said.out and f"not complete: {job}" in said.err
    assert main(words) == 0
    said = capsys.readouterr()
    assert f"{job}: SUCCEEDED" in said.out and "group_mean_n4, seed 0: complete in" in said.out
    assert '"state": "complete"' in (folder / "cell.json").read_text()
    assert (tmp_path / "otb.samples" / "laptop" / "table.md").exists()


def test_a_job_of_submitit_is_not_submitted_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go = tmp_path / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.1)"

    def progress() -> str:
        go.touch()  # it has been seen while it runs
        return "step 1"

    tasks = [Task("long", shlex.join([sys.executable, "-c", waits]), {}, progress=progress)]
    first, second = (SlurmJobs(tmp_path, "cluster=local", 1) for _ in range(2))
    assert set(follow(first, tasks, wait=False)) == {"long"}
    assert follow(second, tasks, interval=0.1) == {"long": SUCCEEDED}
    number = first.jobs["long"].job_id
    said = capsys.readouterr().out
    assert second.jobs["long"].job_id == number and f"long: is job {number}, its output is " in said
    assert "long: RUNNING, step 1" in said
    assert follow(SlurmJobs(tmp_path, "cluster=local", 1), tasks, interval=0.1) == {"long": SUCCEEDED}
    assert f"long: is job {number}" not in capsys.readouterr().out


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
            SlurmJobs(tmp_path, settings, 1)
    assert main(["reproduce", "run", "otb", "--scale", "laptop", "--submit", "http://127.0.0.1:1", "--slurm", ""]) == 2
    assert "exclude each other" in capsys.readouterr().err
