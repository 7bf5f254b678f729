# SPDX-License-Identifier: Apache-2.0
"""The main job through verl's own trainer: it trains, resumes, and fails clearly."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import Lab, Run, eventually, make_data, processes, shared_memory, steps_logged

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent
LOOPS = """
- {name: nan_reward, _target_: scripted_loops.NanReward}
- {name: one_raises, _target_: scripted_loops.OneRaises}
- {name: recording, _target_: recording_loop.Recording}
"""


def scripted(lab: Lab, name: str) -> tuple[list[str], dict[str, str]]:
    """Overrides and environment that select a loop of `scripted_loops`."""
    path = lab.root / "loops.yaml"
    path.write_text(LOOPS)
    agent = "actor_rollout_ref.rollout.agent"
    return (
        [f"{agent}.agent_loop_config_path={path}", f"{agent}.default_agent_loop={name}"],
        {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"},
    )


def merged(metrics: dict[str, Any], trajectories: int) -> bool:
    """Whether each trajectory of two turns is one sequence."""
    counts = [metrics[f"rollout/{name}"] for name in ("trajectories", "sequences", "turns")]
    return counts == [trajectories, trajectories, 2 * trajectories] and metrics["updates/padding_sequences"] == 0


def nothing_left(run: Run) -> bool:
    """No process of the run lives on (files in shared memory: see `shared_memory`)."""
    assert eventually(lambda: not processes(run.folder)), processes(run.folder)
    return True


def finite(metrics: dict[str, Any]) -> bool:
    return all(math.isfinite(value) for value in metrics.values() if isinstance(value, int | float))


def test_a_killed_run_resumes_nothing_is_lost_and_ctrl_c_leaves_nothing_behind(lab: Lab) -> None:
    """Of trajectories with two turns, merged."""
    overrides, environment = scripted(lab, "recording")
    overrides += ["trainer.save_freq=1", "trainer.val_before_train=true", "trainer.test_freq=5"]
    overrides += ["trainer.total_training_steps=1000"]
    before = shared_memory()
    killed = lab.run(
        "resume", overrides=overrides, environment=environment, kill_when=lambda folder: steps_logged(folder) >= 4
    )
    assert killed.code == -signal.SIGKILL
    # Ray's two agents take a minute to give up on a node that was killed; nothing that computes or writes may live.
    agents = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
    assert eventually(lambda: set(processes(killed.folder)) <= agents), processes(killed.folder)
    saved = int((killed.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    early = killed.metrics
    assert saved >= 2 and "actor/grad_norm" in early[2]
    # verl saves a step before it logs it, and may be killed in between.
    assert sorted(early) == list(range(max(early) + 1)) and saved - max(early) in (0, 1)

    last = 5 * (saved // 5 + 1)  # it validates there
    run = lab.run(
        "resume",
        overrides=overrides,
        environment=environment,
        kill_when=lambda folder: steps_logged(folder) >= last + 2,  # one is of the validation that it begins with
        kill_with=signal.SIGINT,
    )
    assert run.code not in (0, -signal.SIGKILL)
    metrics = run.metrics
    # A resume validates first, and logs that at the step it found.
    assert sorted(metrics) == list(range(max(metrics) + 1)) and max(metrics) >= last
    for step in range(1, saved):
        assert metrics[step]["actor/grad_norm"] == early[step]["actor/grad_norm"]
    assert f"setting global step to {saved}" in run.log
    assert all(finite(step) for step in metrics.values())
    for step in [*early, *range(saved + 1, last + 1)][1:]:
        assert metrics[step]["training/rollout_probs_diff_max"] < 1e-5
        assert metrics[step]["trloo/group_size/mean"] == 4 and merged(metrics[step], 16)
    assert metrics[1]["actor/grad_norm"] > 0
    assert any(key.startswith("val-core/") for key in metrics[last])
    assert nothing_left(run)
    assert eventually(lambda: shared_memory() <= before), shared_memory() - before


def test_nan_reward_is_named(copied_lab: Lab) -> None:
    loop, environment = scripted(copied_lab, "nan_reward")
    before = shared_memory()
    run = copied_lab.run("nan", overrides=loop, environment=environment)
    assert run.code != 0
    (line,) = {line.split("BatchError: ")[1] for line in run.log.splitlines() if "BatchError: " in line}
    assert "reward nan" in line and "prompt uid" in line and "_2, turn 1" in line
    assert nothing_left(run)
    assert eventually(lambda: shared_memory() <= before), shared_memory() - before


def test_lost_rollouts_end_the_run_with_the_first_traceback(standing_lab: Lab) -> None:
    loop, environment = scripted(standing_lab, "one_raises")
    run = standing_lab.run("raises", overrides=loop, environment=environment)
    assert run.code != 0 and 1 not in run.metrics
    (line,) = {line.split("MissingRollouts: ")[1] for line in run.log.splitlines() if "MissingRollouts: " in line}
    assert line.startswith("4 of 16 rollouts were lost, because their agent loop raised; verl_ext.max_missing_share=")
    assert "RuntimeError: the environment is gone" in run.log.split("MissingRollouts: ")[-1]


def test_rollouts_that_may_be_lost_are_counted_and_count_as_failures_in_validation(standing_lab: Lab) -> None:
    """One of four rollouts of every prompt dies; in validation verl would take the mean over the other three."""
    loop, environment = scripted(standing_lab, "one_raises")
    more = ["verl_ext.max_missing_share=0.3", "trainer.val_before_train=true"]
    more += ["actor_rollout_ref.rollout.val_kwargs.n=4", "actor_rollout_ref.rollout.val_kwargs.do_sample=true"]
    run = standing_lab.run("raises_seldom", overrides=[*loop, *more], environment=environment).check()
    metrics = run.metrics[2]
    assert metrics["rollout/missing_trajectories"] == 4 and metrics["rollout/trajectories"] == 12
    assert metrics["trloo/turn_0/count"] == 12 and "the environment is gone" in run.log
    validation = run.metrics[0]
    assert validation["val-aux/missing_rollouts"] == 32
    assert validation["val-core/toy/reward/mean@4"] == 0.75  # every rollout that ends has reward 1


def test_critic_trains_on_answers_judged_in_the_sandbox(standing_lab: Lab) -> None:
    """GAE, and a schedule for both learning rates; no reward function is named, and verl's parses the answer."""
    data = make_data(standing_lab.root, source="numina_olympiads")
    overrides = [
        "algorithm.adv_estimator=gae",
        f"critic.model.path={standing_lab.model}",
        "critic.ppo_mini_batch_size=4",
        f"data.train_files={data}",
        f"data.val_files={data}",
        "reward.custom_reward_function.path=null",
        "critic.optim.lr=1e-4",
        "trainer.length_lr.warmup_steps=2",
    ]
    run = standing_lab.run("gae", recipe="[length_lr,cpu]", overrides=overrides).check()
    for metrics, factor in ((run.metrics[1], 0.5), (run.metrics[2], 1.0)):
        assert [metrics[f"{role}/lr"] for role in ("actor", "critic")] == pytest.approx([1e-3 * factor, 1e-4 * factor])
        assert finite(metrics) and metrics["critic/grad_norm"] > 0 and metrics["critic/vf_loss"] > 0
        assert metrics["sandbox/calls"] == 16 and 0 < metrics["sandbox/seconds"]
        assert 0 < metrics["sandbox/share_of_step"] and not any("failure" in name for name in metrics)
