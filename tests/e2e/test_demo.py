# SPDX-License-Identifier: Apache-2.0
"""`verl-ext demo` as a person would run it: what it writes, and that the same command goes on where it stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import copies
import pytest
from harness import Run
from standing_ray import StandingRay

from verl_ext.lab.whatif.records import advantages, read

pytestmark = pytest.mark.e2e


def demo(out: Path, *words: str, ray: StandingRay | None = None) -> str:
    """As a user runs it, or with the Ray and the imports of one that stands: what it writes and says is the same."""
    words = ("demo", "--out", str(out), *words)
    command, environment = [sys.executable, "-m", "verl_ext.cli", *words], dict(os.environ)
    if ray is not None:
        trainer = copies.script(out.with_name("python"), ray.interpreter())
        start = f"import sys; sys.executable = {str(trainer)!r}; from verl_ext import cli; sys.exit(cli.main())"
        command = [str(trainer), "-c", start, *words, ray.copied_workers()]
        environment |= ray.environment({"VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl")})
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_demo_writes_its_folder_and_resumes(standing_ray: StandingRay, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    small = ["actor_rollout_ref.rollout.n=2", "trainer.save_freq=1", "data.val_max_samples=16"]
    said = demo(out, "--steps", "2", *small)
    assert "python -m verl.trainer.main_ppo '+recipe=[trloo,cpu]'" in said
    assert "step 2/2" in said and said.splitlines()[-1].startswith("reward a trajectory: ")
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "reward.png", "log.txt", "command.txt"):
        assert (out / name).stat().st_size > 0, name
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "rollouts" / "1.jsonl").exists() and (out / "rows" / "2.jsonl").exists()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["recipes"] == ["trloo"] and 0 <= summary["val_before"] <= 1
    assert summary["rollout_vs_trainer_prob_diff_max"] < 1e-4
    first = Run(out, 0, 0.0).metrics
    # The records of the last batches: what its estimator makes of it now is what it made of it in training.
    assert "what other estimators would have done with the last batches" in said and "\ngrpo " in said
    record = read(out / "records" / "2.pt")
    mask = record.tokens["response_mask"]
    again = (advantages(record, "trloo").sum(1) / mask.sum(1)).tolist()
    rows = [json.loads(line) for line in (out / "rows" / "2.jsonl").read_bytes().splitlines()]
    assert dict(zip(record.keys, again, strict=True)) == pytest.approx({row["key"]: row["advantage"] for row in rows})
    assert {"sum_pi_squared", "entropy", "rollout_log_probs"} <= set(record.tokens)

    demo(out, "--steps", "3", *small, ray=standing_ray)
    metrics = Run(out, 0, 0.0).metrics
    assert sorted(metrics) == [0, 1, 2, 3]
    assert metrics[1]["actor/grad_norm"] == first[1]["actor/grad_norm"]
    rows = [json.loads(line) for line in (out / "rows" / "3.jsonl").read_bytes().splitlines()]
    assert {row["turn_index"] for row in rows} == {0, 1, 2} and {row["agent_id"] for row in rows} == {"solver"}
    trajectories: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        trajectories.setdefault(row["traj_uid"], []).append(row)
    # Ragged: a right answer ends the trajectory, and only its turn is rewarded.
    for turns in trajectories.values():
        rewards = [turn["turn_reward"] for turn in turns]
        assert all(reward == 0 for reward in rewards[:-1]) and (rewards[-1] == 1 or len(rewards) == 3)


def test_a_team_takes_the_task_of_its_kind(standing_ray: StandingRay, tmp_path: Path) -> None:
    """Dr. MAS without a word on the task: the one of two agents."""
    out = tmp_path / "demo"
    # With 4 samples the revisers of each prompt earn the same once in some hundred runs, and have no gradient.
    words = ["--recipe", "dr_mas", "--steps", "2", "trainer.save_freq=-1", "actor_rollout_ref.rollout.n=8"]
    said = demo(out, *words, ray=standing_ray)
    assert "python -m verl.trainer.main_ppo '+recipe=[dr_mas,cpu]'" in said and "reviser: score of its turns" in said
    summary = json.loads((out / "summary.json").read_text())
    agents = summary["agents"]
    assert summary["task"] == "second_try" and list(agents) == ["solver", "reviser"]
    assert 0 < summary["reward_random"] < summary["val_before"] < 1
    # The reviser earns a tenth, and is there only when the solver has failed.
    assert agents["reviser"]["score_after"] <= 0.1 < agents["solver"]["score_after"]
    rows = [json.loads(line) for line in (out / "rows" / "1.jsonl").read_bytes().splitlines()]
    by_agent = {name: [row for row in rows if row["agent_id"] == name] for name in agents}
    assert len(by_agent["solver"]) == 64 and 0 < len(by_agent["reviser"]) < 64
    assert {round(row["score"], 6) for row in by_agent["reviser"]} <= {0.0, 0.1}
    assert {row["score"] for row in by_agent["solver"]} >= {0.0, 1.0}
    metrics = Run(out, 0, 0.0).metrics
    shares = [metrics[1][f"agent/{name}/gradient_energy_share"] for name in agents]
    assert sum(shares) == pytest.approx(1.0) and min(shares) > 0
    for step in (1, 2):
        norms = [metrics[step][f"agent/{name}/grad_norm/mean"] for name in agents]
        peaks = [metrics[step][f"agent/{name}/grad_norm/max"] for name in agents]
        whole = metrics[step]["actor/grad_norm"]
        assert whole <= sum(norms) * (1 + 1e-6) and (step > 1 or min(norms) > 0)
        # There are two updates, so the largest norm is at most twice the mean.
        assert all(norm <= peak <= 2 * norm * (1 + 1e-6) for norm, peak in zip(norms, peaks, strict=True))
        assert not any("agent_gradient" in name for name in metrics[step])
    assert metrics[1]["rollout/failed_trajectories"] == 0
    for name in ("reward.png", "rollouts/1.jsonl"):
        assert (out / name).stat().st_size > 0
