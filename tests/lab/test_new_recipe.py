# SPDX-License-Identifier: Apache-2.0
"""`verl-ext new-recipe`: what it writes is a package that works beside ours as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import copies
import pytest

from verl_ext import cli


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package `halved`, written by the command and installed by pip into a folder of its own."""
    root = tmp_path_factory.mktemp("new_recipe")
    assert cli.main(["new-recipe", "halved", "--out", str(root)]) == 0
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    run(*pip, "--target", str(root / "site"), str(root / "halved"))
    return root


@pytest.mark.slow
def test_its_own_test_passes_and_its_recipe_is_found(installed: Path, tmp_path: Path) -> None:
    site = str(installed / "site")
    python = str(copies.script(tmp_path / "python"))
    out = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(installed / "halved/tests"), PYTHONPATH=site)
    assert "2 passed" in out
    shown = run(python, "-m", "verl_ext.cli", "show", "halved", PYTHONPATH=site)
    assert "algorithm.halved.scale: (none) -> 1.0" in shown and "algorithm.adv_estimator: gae -> mix" in shown
    assert "halved" in run(python, "-m", "verl_ext.cli", "list", PYTHONPATH=site)


@pytest.mark.slow
def test_a_method_that_cannot_be_loaded_is_refused_by_name_and_harms_no_other(installed: Path, tmp_path: Path) -> None:
    entry = tmp_path / "torn-1.dist-info"
    entry.mkdir()
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: torn\nVersion: 1\n")
    (entry / "entry_points.txt").write_text("[verl_ext.methods]\ntorn = torn.method:f\ntrloo = halved.method:nothing\n")
    code = (
        "from verl.trainer.ppo.core_algos import get_adv_estimator_fn as get\n"
        "from verl_ext.integration.mix import weights\n"
        "from verl_ext.integration.names import register\n"
        "register()\n"
        "assert get('halved') and get('trloo').__name__ == 'trloo'\n"
        "try: weights({'mix': {'torn': 1.0}})\n"
        "except ValueError as error: print(error)\n"
    )
    python, paths = str(copies.script(tmp_path / "python")), [str(installed / "site"), str(tmp_path)]
    out = run(python, "-c", code, PYTHONPATH=os.pathsep.join(paths))
    assert "algorithm.mix.torn: the entry point torn = torn.method:f" in out and "ModuleNotFoundError" in out
    assert "there is an estimator 'trloo' already" in out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("My-Method", "is no name for a method"),
        ("trloo", "a recipe already"),
        ("json", "module that is installed"),
        ("gamma", "a key of the algorithm node already, algorithm.gamma"),
        ("rejection_normalise", "a key of the algorithm node already"),
        ("gae", "an estimator already"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new-recipe", name, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())
