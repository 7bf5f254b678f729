# SPDX-License-Identifier: Apache-2.0
"""`verl-ext reproduce run` at laptop scale: killed after a step, given again, and given once more."""

from __future__ import annotations

import csv
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import copies
import pytest
from harness import Run, eventually, processes

from verl_ext.cpu.platform import fork_worker

pytestmark = pytest.mark.e2e


def test_a_killed_table_goes_on_where_it_was_and_ends_with_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fork_worker.FROM, copies.imports())
    monkeypatch.chdir(tmp_path)  # by which processes are found
    out = tmp_path / "runs (1), a copy"  # what Hydra's grammar wants quoted
    run = out / "otb.samples" / "laptop" / "otb_n4" / "seed_0"
    command = [sys.executable, "-m", "verl_ext.cli", "reproduce", "run", "otb", "--scale", "laptop"]
    command += ["--cell", "otb_n4", "--seeds", "0", "--steps", "4", "--out", str(out)]
    command += ["trainer.save_freq=1", "trainer.test_freq=4", "trainer.val_before_train=false"]

    first = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        logged = eventually(lambda: first.poll() is not None or 2 in Run(run, 0, 0.0).metrics, 600)
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
        said = first.communicate()[0]
    assert logged and first.returncode == -signal.SIGKILL, said[-4000:]
    assert "Laptop scale: a test of the claim's direction, not the paper's number." in said
    assert eventually(lambda: not trainers(run), 120), processes(run, tmp_path)
    record = json.loads((run / "cell.json").read_text())
    assert record["state"] == "started" and record["steps"] == 4
    before = Run(run, 0, 0.0).metrics
    assert 2 in before and 4 not in before

    said = reproduce(command)
    # A step may have been logged between the look at the file and the signal.
    assert "was at step 2, goes on" in said or "was at step 3, goes on" in said, said
    assert "step 4/4" in said and "complete in" not in said
    after = Run(run, 0, 0.0).metrics
    # Step 3 is missing if the signal came between its checkpoint and its metrics.
    assert sorted(after) in ([1, 2, 3, 4], [1, 2, 4])
    for step in (1, 2):
        assert after[step]["actor/grad_norm"] == before[step]["actor/grad_norm"], "an earlier step was made again"
    assert not (run / "metrics.1.jsonl").exists(), "the second start began from the first step"
    record = json.loads((run / "cell.json").read_text())
    assert record["state"] == "complete" and {"verl", "verl_ext", "torch"} <= set(record["versions"])
    for name in (
        "metrics.jsonl",
        "log.txt",
        "command.txt",
        "summary.json",
        "validation/4.jsonl",
        "validation/4.tasks.json",
    ):
        assert (run / name).stat().st_size > 0, name

    assert "NaN" not in (run / "summary.json").read_text()  # it is no JSON; before training nothing was validated

    base = out / "otb.samples" / "laptop"
    text = (base / "table.md").read_text()
    assert text.strip() in said and "Laptop scale" in text
    row = next(line for line in text.splitlines() if line.startswith("| OTB, n 4 |"))
    assert (base / "table.png").read_bytes().startswith(b"\x89PNG")
    assert any("otb_n4" in row for row in csv.reader((base / "table.csv").open()))
    reward = statistics.fmean(after[step]["trajectory/reward/mean"] for step in after)
    assert f"| {reward:.3f} |" in row, "the training reward, mean of the steps"

    said = reproduce(command)
    assert "[1/1] otb/samples (laptop scale), otb_n4, seed 0: complete in" in said and "main_ppo" not in said
    assert row in said


def trainers(run: Path) -> list[str]:
    """The processes of a run but Ray's own two agents, which notice later that they are alone."""
    return [line for line in processes(run, Path.cwd()) if "dashboard" not in line and "runtime_env" not in line]


def reproduce(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
