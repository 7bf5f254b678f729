# SPDX-License-Identifier: Apache-2.0
"""Cells as jobs of a real Ray cluster of this machine, with its dashboard."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from otb_runs import CELL, LAPTOP, begin, finish, log
from ports import free_port

from verl_ext.cli import main
from verl_ext.lab.reproduce.ray_jobs import RayJobs, SubmitError, Task, follow

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of the dashboard of a cluster that lives as long as the tests of this file.

    It has a folder and ports of its own: no other Ray of this machine sees it.
    """
    port, dashboard, agent, client = (free_port() for _ in range(4))
    folder = Path(tempfile.mkdtemp(prefix="ray_"))  # sockets lie in it, whose paths must be short
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}"]
    command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    command += [f"--ray-client-server-port={client}", f"--temp-dir={folder}", "--num-cpus=4", "--disable-usage-stats"]
    variables = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_prestart_worker_first_driver": "0"}
    variables.pop("RAY_ADDRESS", None)
    log = folder / "start.txt"
    with log.open("wb") as file:
        child = subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{dashboard}"
        until = time.monotonic() + 300
        while not answers(url):
            assert child.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.3)
        yield url
    finally:
        child.send_signal(signal.SIGTERM)  # `ray start --block` stops what it started
        try:
            child.wait(timeout=300)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        shutil.rmtree(folder, ignore_errors=True)


def answers(url: str) -> bool:
    try:
        list(RayJobs(url).start([Task("ready", "true", {})]))
        return True
    except SubmitError:
        return False


def python(code: str) -> str:
    return shlex.join([sys.executable, "-S", "-c", code])


def test_jobs_run_one_after_the_other_and_a_failed_one_is_submitted_again(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ray_jobs = RayJobs(address)
    note = tmp_path / "note"
    append = "import os; open({!r}, 'a').write({!r} + os.environ['WORD'] + ' ')"
    tasks = [
        Task("first", python(append.format(str(note), "a")), {"WORD": "x"}),
        Task("second", python("import sys; print('no such engine'); sys.exit(3)"), {}),
        Task("third", python(append.format(str(note), "c")), {"WORD": "y"}),
    ]
    assert follow(ray_jobs, tasks, interval=0.2) == {
        "first": "SUCCEEDED",
        "second": "FAILED",
        "third": "SUCCEEDED",
    }
    assert note.read_text() == "ax cy "
    said = capsys.readouterr().out
    assert "first: submitted" in said and "second: FAILED" in said and "    no such engine" in said
    assert said.index("first: SUCCEEDED") < said.index("second: submitted") < said.index("third: submitted")
    again = [Task("second", python("pass"), {})]
    assert follow(ray_jobs, again, interval=0.2) == {"second.2": "SUCCEEDED"}
    assert list(ray_jobs.attempts("second")) == [1, 2]


def test_a_running_job_is_not_submitted_twice(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ray_jobs = RayJobs(address)
    ray_jobs.pause_s = 0.01
    with pytest.raises(SubmitError, match="no longer answers for nothing .*; the job may go on"):
        ray_jobs.state("nothing")
    go = tmp_path / "go"
    waits = python(f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.1)")
    progress = iter(["step 1/2", "step 2/2"])
    task = Task("long", waits, {}, lambda: next(progress, "step 2/2"))
    assert set(follow(ray_jobs, [task], wait=False)) == {"long"}
    with pytest.raises(SubmitError, match="(?s)is running long with another command: .*ray job stop long"):
        follow(ray_jobs, [Task("long", python("pass"), {})])
    until = time.monotonic() + 300
    while ray_jobs.state("long") != "RUNNING":
        assert time.monotonic() < until
        time.sleep(0.2)
    capsys.readouterr()
    assert follow(ray_jobs, [task], wait=False) == {"long": "RUNNING"}
    go.touch()
    assert follow(ray_jobs, [task], interval=0.2) in ({"long": "SUCCEEDED"}, {"long.2": "SUCCEEDED"})
    said = capsys.readouterr().out
    assert "long: is running already" in said and "long: RUNNING, step" in said


def test_a_table_is_submitted_waited_for_and_collected(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job is the command itself; its run has all its steps, so that the trainer need not be started."""
    for name in LAPTOP.runnable:
        if name != CELL.name:
            finish(tmp_path, LAPTOP.cells[name])
    folder = begin(tmp_path)
    log(folder, 0, 1, 2)
    words = ["run", "otb", "--scale", "laptop", "--seeds", "0", "--steps", "2", "--out", str(tmp_path)]
    code = main(["reproduce", *words, "--submit", address])
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    job = "verl_ext.otb.samples.laptop.otb_n4.seed_0"
    assert f"{job}: submitted" in said.out and f"{job}: SUCCEEDED" in said.out
    assert "group_mean_n4, seed 0: complete in" in said.out and f"share {tmp_path}" in said.out
    assert '"state": "complete"' in (folder / "cell.json").read_text()
    assert (tmp_path / "otb.samples" / "laptop" / "table.md").exists()
    assert "[1/1] otb/samples (laptop scale), otb_n4, seed 0" in "\n".join(RayJobs(address).tail(job))
