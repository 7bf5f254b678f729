# SPDX-License-Identifier: Apache-2.0
"""One model and one data set for all end-to-end runs of the session; one Ray for those that do not test its start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import copies
import pytest
from harness import REWARD, Lab, make_data, make_model
from standing_ray import StandingRay, every_process


@pytest.fixture(scope="session")
def standing_ray() -> Iterator[StandingRay]:
    ray = StandingRay(every_process())
    yield ray
    ray.end()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Every run starts as a user's command does, with a Ray of its own."""
    root = tmp_path_factory.mktemp("e2e")
    model = make_model(root / "model")
    data = make_data(root)
    reward = root / "reward.py"
    reward.write_text(REWARD)
    return Lab(model=model, data=data, reward=reward, root=root)


@pytest.fixture(scope="session")
def copied_lab(lab: Lab) -> Lab:
    """For tests of how a run ends: each has a Ray of its own, and copies the imports of what others wrote.

    With VERL_EXT_STANDING_RAY=0 each has its own imports.
    """
    if os.environ.get("VERL_EXT_STANDING_RAY") == "0":
        return lab
    return replace(lab, copied=("imports", copies.imports()))


@pytest.fixture(scope="session")
def standing_lab(lab: Lab, request: pytest.FixtureRequest) -> Lab:
    """For tests of what happens between start and end: their runs share a Ray and imports.

    With VERL_EXT_STANDING_RAY=0 each has a Ray of its own.
    """
    if os.environ.get("VERL_EXT_STANDING_RAY") == "0":
        return lab
    return replace(lab, standing=request.getfixturevalue("standing_ray"))
