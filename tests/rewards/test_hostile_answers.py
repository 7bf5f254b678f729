# SPDX-License-Identifier: Apache-2.0
"""Answers that are programs, to the datasets of reasoning-gym whose verifiers evaluate what they are given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext.rewards.caged import load_dataset, only_compares
from verl_ext.rollout.reasoning_gym_task import ReasoningGymTask
from verl_ext.sandbox import shared

EVALUATE = (
    *("countdown", "string_insertion", "binary_matrix", "n_queens", "spiral_matrix"),
    *("polynomial_multiplication", "simple_integration", "puzzle24"),
)
PLAIN = """
import json, sys
import reasoning_gym
name, answer = sys.argv[1:]
dataset = reasoning_gym.create_dataset(name, seed=3, size=1)
dataset.score_answer(answer, dataset[0])
"""


def hostile(file: Path) -> list[str]:
    """Programs that make the file, or the verdict."""
    touch = f"__import__('pathlib').Path({str(file)!r}).touch()"
    system = f"__import__('os').system('touch {file}')"
    score = "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'catch_warnings'][0]()"
    return [touch, system, f"[{touch}]", f"{score}._module.__builtins__['exec'](\"open({str(file)!r}, 'w')\")"]


@pytest.mark.seconds
@pytest.mark.parametrize("name", EVALUATE)
def test_nothing_of_the_answer_runs_and_it_is_wrong(name: str, tmp_path: Path) -> None:
    config = json.dumps({"seed": 3, "size": 1})
    entry = load_dataset(name, config)[0]
    task = ReasoningGymTask(name, config, entry)
    if name != "puzzle24":  # whose reference is no answer that its verifier takes
        assert task.judge(str(entry["answer"])).solved
    file = tmp_path / "made"
    for answer in hostile(file):
        verdict = task.judge(answer)
        assert not verdict.solved and not file.exists(), (answer, verdict)


DATASETS = """
import sys
caged = sys.modules["verl_ext.rewards.caged"]
print(caged.load_dataset.cache_info().currsize)
"""


@pytest.mark.seconds
def test_a_program_finds_no_dataset_of_a_verifier() -> None:
    """They are kept, with their seed and so with all answers, in the process that judgements are forked from."""
    config = json.dumps({"seed": 3, "size": 1})
    assert not ReasoningGymTask("countdown", config, load_dataset("countdown", config)[0]).judge("1").solved
    assert shared().run("verl_ext.rewards.caged:program", DATASETS, "", timeout_s=60.0) == "0\n"


@pytest.mark.seconds
def test_outside_of_the_sandbox_they_run(tmp_path: Path) -> None:
    """What the test above would look like if nothing held the answers."""
    file = tmp_path / "made"
    answer = hostile(file)[0]
    subprocess.run([sys.executable, "-c", PLAIN, "polynomial_multiplication", answer], capture_output=True, check=False)
    assert file.exists()


def test_only_verifiers_that_compare_do_without_the_sandbox() -> None:
    config = json.dumps({"seed": 3, "size": 1})
    assert [only_compares(name, config) for name in ("chain_sum", "products", "spell_backward")] == [True, True, False]
    assert not any(only_compares(name, config) for name in EVALUATE)
