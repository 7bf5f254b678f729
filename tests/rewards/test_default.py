# SPDX-License-Identifier: Apache-2.0
"""verl's rewards by data source: the same scores, and nothing of an answer runs in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas
import pytest
from hydra import compose
from omegaconf import OmegaConf
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.reward_score import default_compute_score

from verl_ext.integration.settings.options import OptionError
from verl_ext.rewards.default import COMPARED, compute_score
from verl_ext.rewards.judge import JudgeError
from verl_ext.rollout.default_rewards import Rewards

PRIME = "numina_olympiads"


@pytest.mark.parametrize("source", [*COMPARED, "aime2024"])
def test_what_compares_texts_is_verls_own(source: str) -> None:
    for answer in (r"so \boxed{42}", "#### 42", "Answer: 42", "none"):
        assert compute_score(source, answer, "42") == default_compute_score(source, answer, "42")


@pytest.mark.seconds
def test_what_evaluates_gives_the_same_score_in_the_sandbox() -> None:
    answers = [(r"\boxed{42}", "42"), (r"\boxed{(x+1)^2}", "x^2+2*x+1"), (r"\boxed{\frac{2}{4}}", "0.7"), ("no", "4")]
    for answer, truth in answers:
        found = compute_score(PRIME, answer, truth, timeout_s=60.0)
        assert isinstance(found, dict) and found["sandbox_calls"] == 1.0 and found["sandbox_seconds"] > 0
        assert found["score"] == found["acc"] == default_compute_score(PRIME, answer, truth), answer


def test_what_is_too_long_is_wrong_and_a_row_that_is_is_named() -> None:
    found = compute_score(PRIME, " " * (5 << 20), "4", timeout_s=60.0)
    assert isinstance(found, dict) and found["score"] == 0.0 and found["judge_input"] == 1.0
    with pytest.raises(JudgeError, match=r"on the reference answer too: input: .* verl_ext\.sandbox\.input_kb=4096"):
        compute_score(PRIME, r"\boxed{4}", "4" * (5 << 20), timeout_s=60.0)


def test_nothing_of_an_answer_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """verl's grader hands what it finds to `eval` if there is a pi in it, and to sympy's parser else."""
    file = tmp_path_factory.mktemp("made") / "made"
    assert "_" not in str(file)  # which the grader takes for the base of a number
    touch = f"open('{file}','w')"
    answers = [rf"\boxed{{[{touch},3\pi]}}", rf"\boxed{{{touch}}}"]
    for answer in answers:
        found = compute_score(PRIME, answer, "3", timeout_s=60.0)
        assert isinstance(found, dict) and found["score"] == 0.0
        assert not file.exists(), answer
    default_compute_score(PRIME, answers[0], "3")
    assert file.exists()  # what the loop above would look like if nothing held the answers


def test_programs_are_judged_by_their_output() -> None:
    tests = json.dumps({"inputs": ["2\n"], "outputs": ["4\n"]})
    found = compute_score("taco", "print(int(input()) ** 2)", tests)
    assert isinstance(found, dict) and found["score"] == found["acc"] == 1.0


def test_a_source_that_verl_does_not_know_is_named() -> None:
    with pytest.raises(JudgeError, match="Reward function is not implemented for data_source='mine'"):
        compute_score("mine", "x", "y", timeout_s=60.0)


def config(**keys: Any) -> Any:
    return OmegaConf.create({"reward": {"custom_reward_function": {"path": None, "name": "compute_score"}, **keys}})


def test_a_run_without_a_reward_function_gets_it() -> None:
    run = config()
    Rewards.complete(run)
    Rewards.complete(run)
    assert get_custom_reward_fn(run)("openai/gsm8k", "#### 3", "3") == 1.0


@pytest.mark.parametrize(
    "keys",
    [
        {"custom_reward_function": {"path": "mine.py", "name": "mine"}},
        {"sandbox_fusion": {"url": "http://127.0.0.1:1"}},
        {"reward_model": {"enable": True}},
    ],
)
def test_a_run_that_judges_in_another_way_is_left_alone(keys: dict[str, Any]) -> None:
    run = config(**keys)
    before = OmegaConf.to_container(run)
    Rewards.complete(run)
    assert OmegaConf.to_container(run) == before


def run_of(loop: str, *overrides: str) -> Any:
    asked = ["+recipe=trloo", "actor_rollout_ref.rollout.n=4", "data.train_files=[]", "data.val_files=[]"]
    return compose("ppo_trainer", [*asked, f"actor_rollout_ref.rollout.agent.default_agent_loop={loop}", *overrides])


MANAGER = "reward.reward_manager.name=dapo"
FUNCTION = "reward.custom_reward_function.path=mine.py"
ALL = ("verl_ext_multi_turn", "verl_ext_step_wise", "verl_ext_kernels", "verl_ext_orchestra", "verl_ext_gateway")


@pytest.mark.usefixtures("verl_configuration")
@pytest.mark.parametrize(
    ("loops", "override", "message"),
    [
        (
            ALL,
            MANAGER,
            r"reward\.reward_manager\.name=dapo has no effect on the rows of the agent loop verl_ext_\w+: each",
        ),
        (ALL, "reward.reward_model.enable=true", r"reward_model\.enable=true .*which would be overwritten"),
        (
            ALL,
            "reward.sandbox_fusion.url=http://127.0.0.1:1",
            r"sandbox_fusion\.url=.*judged in the sandbox of verl_ext",
        ),
        (ALL, "+reward.reward_kwargs.overlong_buffer_cfg.enable=true", r"reward_kwargs=\{overlong_buffer_cfg\} has no"),
        (("single_turn_agent",), "data.reward_fn_key=source", r"Call the column data_source in the data"),
        (ALL[:3], FUNCTION, r"custom_reward_function\.path=mine\.py has no effect .*a verifier of their own"),
        (
            ("single_turn_agent",),
            "custom_reward_function.path=mine.py",
            r"by no trainer of V1\. Say reward\.custom_rew",
        ),
        (("single_turn_agent",), "reward_model.reward_manager=dapo", r"Say reward\.reward_manager\.name"),
    ],
)
def test_reward_settings_that_nobody_would_read_are_refused(
    loops: tuple[str, ...], override: str, message: str
) -> None:
    for loop in loops:
        with pytest.raises(OptionError, match=message):
            Rewards.check(run_of(loop, override))


@pytest.mark.usefixtures("verl_configuration")
def test_reward_settings_that_are_read_pass(tmp_path: Path) -> None:
    for loop in ALL:
        run = run_of(loop)
        Rewards.complete(run)
        assert Rewards.check(run) == []
    for loop in (*ALL[3:], "single_turn_agent"):
        assert Rewards.check(run_of(loop, FUNCTION)) == []
    assert Rewards.check(run_of("single_turn_agent", MANAGER, "reward.reward_model.enable=true")) == []
    pandas.DataFrame({"agent_name": ["verl_ext_multi_turn"]}).to_parquet(tmp_path / "some.parquet")
    mixed = (f"data.train_files={tmp_path}/some.parquet", "reward.reward_model.enable_resource_pool=true")
    (told,) = Rewards.check(run_of("single_turn_agent", MANAGER, *mixed))
    assert "counts for the rows of other agent loops alone" in told
    (told,) = Rewards.check(run_of("single_turn_agent", "reward.reward_model.enable=true", *mixed))
    assert "no reward model is asked" in told
    with pytest.raises(OptionError, match="which would be overwritten"):
        Rewards.check(run_of("single_turn_agent", "reward.reward_model.enable=true", mixed[0]))
