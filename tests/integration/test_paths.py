# SPDX-License-Identifier: Apache-2.0
"""Paths in the settings are meant from where the run is started, on a Ray that was started elsewhere too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose
from omegaconf import OmegaConf

from verl_ext.integration import checks
from verl_ext.integration.settings import paths

pytestmark = pytest.mark.usefixtures("verl_configuration")

RELATIVE = {
    "verl_ext.rows_dir": "rows",
    "verl_ext.rollouts_dir": "a/../rollouts",
    "verl_ext.record_dir": "'~/records'",
    "+verl_ext.environment.template": "mine.txt",
    "+verl_ext.kernels.cache_dir": "verdicts",
    "+verl_ext.orchestra.agents.solver.role_file": "solver.txt",
    "+verl_ext.orchestra.agents.verifier.examples": "examples.yaml",
    "+verl_ext.orchestra.retriever.corpus": "corpus.jsonl",
    "+verl_ext.orchestra.retriever.cache_dir": "index",
}


def test_relative_paths_are_absolute_after_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a standing cluster they were looked up where `ray start` ran, and the rows written there."""
    monkeypatch.chdir(tmp_path)
    given = [f"{key}={value}" for key, value in RELATIVE.items()]
    config = compose("ppo_trainer", overrides=["+recipe=trloo", "actor_rollout_ref.rollout.n=4", *given])
    checks.complete(config)
    for key, value in RELATIVE.items():
        expected = Path.home() / "records" if "~" in value else tmp_path / value
        assert OmegaConf.select(config, key.lstrip("+")) == str(expected), key


def test_what_is_no_path_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    others = {"environment": {"template": "alfworld"}, "orchestra": {"agents": {"a": {"examples": [{"user": "x"}]}}}}
    config = OmegaConf.create(
        {"verl_ext": {**others, "gateway": {"agent": "pkg.module:play", "readable": ["in", "/"]}}}
    )
    paths.complete(config)
    assert config.verl_ext == {**others, "gateway": {"agent": "pkg.module:play", "readable": [f"{tmp_path}/in", "/"]}}
    config.verl_ext.gateway.agent = "mine.py:play"
    paths.complete(config)
    assert config.verl_ext.gateway.agent == f"{tmp_path}/mine.py:play"


def test_the_list_has_every_key_whose_name_says_path() -> None:
    page = (Path(__file__).parents[2] / "docs" / "keys.md").read_text(encoding="utf-8")
    keys = {key.replace("<name>", "*") for key in re.findall(r"^\| `verl_ext\.([\w.<>*]+)`", page, re.MULTILINE)}
    assert {key for key in keys if re.search(r"(_dir|_file|_path|corpus|template|readable)$", key)} <= set(paths.KEYS)
    assert set(paths.KEYS) <= keys
