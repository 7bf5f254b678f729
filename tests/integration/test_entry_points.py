# SPDX-License-Identifier: Apache-2.0
"""verl's other entry points build trainers without our hooks: a run of ours is refused, with what it would lose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import copies
import pytest
from hydra import compose
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from verl_ext import plugin
from verl_ext.integration import trainer
from verl_ext.integration.settings.options import OptionError

pytestmark = pytest.mark.usefixtures("verl_configuration")

OURS = ["+recipe=[mrs,length_lr]", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]


@pytest.mark.slow
def test_one_step_off_policy_is_refused_before_ray(tmp_path: Path) -> None:
    """It ended with 0, without the rejection, the schedule and the rows that were asked for."""
    given = ["hydra.searchpath=[pkg://verl.trainer.config]", f"hydra.run.dir={tmp_path}", *OURS]
    more = ["algorithm.rollout_correction.bypass_mode=false", f"verl_ext.rows_dir={tmp_path}/rows"]
    command = ["-m", "verl.experimental.one_step_off_policy.main_ppo", *given, *more]
    done = copies.python(*command, timeout=300, cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "ray init" not in done.stdout, last
    assert last.startswith("verl_ext: verl.experimental.one_step_off_policy.main_ppo.OneStepTaskRunner trains with")
    for part in ("RejectionRules", "LengthLearningRate", "Rows"):
        assert part in last
    assert "Start verl.trainer.main_ppo" in last


def test_each_task_runner_of_verls_but_that_of_v1_is_refused() -> None:
    from verl.experimental.fully_async_policy.fully_async_main import FullyAsyncTaskRunner
    from verl.trainer.main_ppo import TaskRunnerV1
    from verl.trainer.main_ppo_v0 import TaskRunner

    ours, theirs = (compose("ppo_trainer", overrides=given) for given in (OURS, []))
    for runner in (FullyAsyncTaskRunner, TaskRunner):
        with pytest.raises(OptionError, match="TaskRunner trains with .* leave out .*LengthLearningRate"):
            trainer.check_task_runner(ours, runner)
        trainer.check_task_runner(theirs, runner)
    trainer.check_task_runner(ours, TaskRunnerV1)


def test_an_older_trainer_of_anybody_is_refused_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public recipes bring task runners of their own, and verl's subclasses do not call the `__init__`."""

    class Theirs(RayPPOTrainer):
        def __init__(self, config: Any) -> None:
            self.made = True

    monkeypatch.setattr(RayPPOTrainer, "__new__", RayPPOTrainer.__new__)  # is put back
    monkeypatch.setenv("VERL_EXT_STRICT", "1")
    plugin._check_older_trainers(None)
    with pytest.raises(OptionError, match=r"Theirs trains with .* would leave out .*RejectionRules"):
        Theirs(config=compose("ppo_trainer", overrides=OURS))
    assert Theirs(compose("ppo_trainer")).made
