# SPDX-License-Identifier: Apache-2.0
"""A method from a package of the user's own trains, with nothing but its entry point and its recipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Lab
from standing_ray import StandingRay

from verl_ext.lab.new_recipe import new_recipe


@pytest.mark.e2e
def test_a_package_written_by_new_recipe_trains_two_steps(
    copied_lab: Lab, standing_ray: StandingRay, tmp_path: Path
) -> None:
    folder = new_recipe("centred", tmp_path)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(folder)], check=True)
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    overrides = ["algorithm.centred.scale=3.0", standing_ray.copied_workers()]
    # Not a copy of the other runs' launcher, which would have loaded the methods before.
    environment = standing_ray.environment(
        {"PYTHONPATH": path, "VERL_FILE_LOGGER_PATH": str(copied_lab.root / "centred" / "metrics.jsonl")}
    )
    run = copied_lab.run("centred", "[centred,cpu]", overrides, environment=environment).check()
    assert set(run.metrics) == {1, 2} and run.metrics[1]["centred/group_size/mean"] == 4
    rows = run.rows(1)
    for prompt in {row["index"] for row in rows}:
        group = [row for row in rows if row["index"] == prompt]
        mean = sum(row["score"] for row in group) / len(group)
        for row in group:
            assert row["advantage"] == pytest.approx(3.0 * (row["score"] - mean), abs=1e-5)
