# SPDX-License-Identifier: Apache-2.0
"""`examples/gpu/run.py` without a GPU: every stage's code, with models of two layers and the embedded engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

RUN = Path(__file__).resolve().parents[2] / "examples" / "gpu" / "run.py"


VARIANTS = {"verl", "grpo", "trloo", "otb_verl", "otb", "dvp", "trloo_kpo", "trm_exact"}


def stages(out: Path, *words: str, code: int = 0) -> dict[str, Any]:
    command = [sys.executable, str(RUN), "--out", str(out), "--tiny", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400)
    assert done.returncode == code, done.stdout + done.stderr
    return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


def test_a_run_that_learns_and_the_pass_over_the_logits(tmp_path: Path) -> None:
    said = stages(tmp_path, "--device", "cpu", "--limit", "400", "--only", "a", "h")
    ended = said.pop("run")["stages"]
    assert sorted(said) == sorted(ended) == ["a", "h"]
    assert {entry["ended"] for entry in ended.values()} == {"code 0"}
    result = {name: stage["result"] for name, stage in said.items()}
    assert result["a"]["steps"] == 2 and result["a"]["sampler and trainer, largest difference in probability"] < 1e-4
    assert set(result["h"]["with the head"]) == {"head and pass", "verl torch", "verl triton"}


def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    result = stages(tmp_path, "--device", "cpu", "--limit", "600", "--only", "d")["d"]["result"]
    assert result["steps before"][-1] == 2 and result["and after"][-1] == 3 and result["ended"] == "well", result
    assert result["and after"][0] > 1, result


def test_merged_turns_and_two_models(tmp_path: Path) -> None:
    said = stages(tmp_path, "--device", "cpu", "--limit", "600", "--only", "c", "e")
    apart, merged = said["c"]["result"]["a sequence a call"], said["c"]["result"]["merged"]
    assert apart["step_s"] > 0 and merged["step_s"] > 0 and merged["tokens"] < apart["tokens"], said["c"]["result"]
    team = said["e"]["result"]
    assert team["steps"] == 2 and team["ended"] == "well" and team["grad_norm"] > 0, team


def test_a_step_of_the_trainer_beside_its_passes(tmp_path: Path) -> None:
    result = stages(tmp_path, "--device", "cpu", "--limit", "600", "--only", "b")["b"]["result"]
    assert all(result["of the steps after the first"][name] > 0 for name in ("gen_s", "old_log_prob_s", "update_s"))
    assert set(result["passes"]) == VARIANTS, result
    assert all(one["old_log_prob_s"] > 0 for one in result["passes"].values()), result
    assert result["one_pass"]["over verl"] > 0


def test_a_stage_that_hangs_loses_itself_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is stopped with what it has started, and what it has said stays."""
    monkeypatch.syspath_prepend(str(RUN.parent))
    import trainer

    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text("#!/bin/sh\nkill -STOP $PPID\nsleep 600\n")
    make.chmod(0o755)
    path = f"{make.parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    said = stages(tmp_path / "out", "--device", "cpu", "--limit", "40", "--only", "f", "g", code=1)
    ended = said["run"]["stages"]
    assert ended["f"]["ended"] == "killed after 40 s" and ended["g"]["ended"] == "code 0", ended
    assert said["f"]["machine"]["torch"] and said["g"]["result"] == "there is no other engine"
    assert not trainer.marked(f"PATH={path}")


def test_the_runs_on_a_gpu_are_valid(tmp_path: Path) -> None:
    """Of every stage that trains, with SGLang and with the engine that follows where it does not start."""
    runs = {"a": "demo", "b": "steps", "c": "row_a_call", "d": "killed", "e": "team"}
    said = stages(tmp_path, "--check", "--only", *runs)
    for stage, name in runs.items():
        assert said[stage][f"{name}_sglang"] == said[stage][f"{name}_embedded"] == "valid", stage
