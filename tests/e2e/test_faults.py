# SPDX-License-Identifier: Apache-2.0
"""A run of verl's trainer in which half of the trajectories go wrong, at random, in 24 ways.

`CHAOS_STEPS=30 pytest tests/e2e/test_faults.py` makes the runs longer.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import chaos
import pandas
import pytest
from harness import Lab, Run, eventually, shared_memory
from test_main_job import finite, nothing_left

STEPS = int(os.environ.get("CHAOS_STEPS", "3"))
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600 + 360 * STEPS)]
SHARE = "0.5"
SAMPLES = 8


def disturbed(lab: Lab, name: str, share: str) -> Run:
    folder = lab.root / "chaos"
    folder.mkdir(exist_ok=True)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"task {i}"}],
            "agent_name": "chaos_world" if i % 2 else "chaos_team",
            "data_source": "toy",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i, "env_seed": i},
        }
        for i in range(32)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "data.parquet")
    (folder / "judge.py").write_text(chaos.JUDGE)
    loops = folder / "loops.yaml"
    loops.write_text(
        "- {name: chaos_world, _target_: chaos.ChaosWorld}\n- {name: chaos_team, _target_: chaos.ChaosTeam}\n"
    )
    here = Path(__file__).parent
    return lab.run(
        name,
        recipe="[trloo,cpu]",
        overrides=[
            f"data.train_files={folder / 'data.parquet'}",
            f"data.val_files={folder / 'data.parquet'}",
            "data.train_batch_size=8",
            "data.max_prompt_length=384",
            "data.max_response_length=96",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
            f"reward.custom_reward_function.path={folder / 'judge.py'}",
            f"trainer.total_training_steps={STEPS}",
            "trainer.total_epochs=1000",
            "++verl_ext.max_missing_share=0.9",
            "+verl_ext.environment={name: 'chaos:World', template: compact, action_tag: null, step_timeout_s: 10.0}",
            "+verl_ext.orchestra={name: chaos, modules: [chaos], call_timeout_s: 10.0, retriever: "
            "{kind: http, url: 'http://127.0.0.1:9/retrieve', retries: 0}}",
        ],
        environment={"PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}", "CHAOS_SHARE": share},
        timeout=1200 + 160 * STEPS,
    ).check()


def trajectories(run: Run, step: int) -> dict[tuple[int, int], list[Any]]:
    """What each trajectory's rows say, by prompt and sample."""
    found: dict[tuple[int, int], list[Any]] = {}
    for row in run.rows(step):
        if "/" not in row["anchor_obs"]:
            continue  # not a call of ours: a placeholder
        key = int(row["anchor_obs"].partition("/")[0]), int(row["traj_uid"].rpartition("_")[2])
        names = ("turn_index", "agent_id", "turn_reward", "score", "response_tokens", "anchor_obs", "is_action_valid")
        found.setdefault(key, []).append([row[name] for name in names])
    return found


def test_a_run_in_which_everything_breaks_now_and_then(
    copied_lab: Lab, standing_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, before = disturbed(standing_lab, "calm", "0"), shared_memory()
    wild = disturbed(copied_lab, "wild", SHARE)
    monkeypatch.setenv("CHAOS_SHARE", SHARE)
    seen: set[tuple[int, str]] = set()
    for step in range(1, STEPS + 1):
        assert finite(wild.metrics[step]) and wild.metrics[step]["actor/grad_norm"] > 0
        whole, left = trajectories(calm, step), trajectories(wild, step)
        assert len(whole) == 8 * SAMPLES and calm.metrics[step]["rollout/missing_trajectories"] == 0
        kinds = {key: chaos.fault(*key, step) for key in whole}
        fates = Counter({chaos.MISSING: 0})
        for (index, session), kind in kinds.items():
            rows = left.get((index, session))
            if not kind:
                assert rows == whole[index, session], (index, session, step)
                continue
            seen.add((index % 2, kind))
            fate = (chaos.WORLD if index % 2 else chaos.TEAM)[kind]
            fates[fate] += 1
            if fate == chaos.MISSING:
                assert rows is None, (kind, rows)
            elif fate != chaos.FINE and kind != "empty":  # who breaks something has earned nothing
                assert all(row[2] == row[3] == 0.0 for row in rows or []), (kind, rows)
        assert wild.metrics[step]["rollout/missing_trajectories"] == fates.pop(chaos.MISSING)
        fates.pop(chaos.FINE, None)
        prefix = "rollout/failures/"
        told = {name[len(prefix) :]: n for name, n in wild.metrics[step].items() if name.startswith(prefix)}
        assert told == dict(fates), step
        towers = list(kinds.values()).count("tower")  # wrong by name, each after one call of the sandbox
        assert wild.metrics[step].get("sandbox/calls", 0) == towers
        assert wild.metrics[step].get("trajectory/judge_timeout", 0) == bool(towers)
    assert seen == {(1, kind) for kind in chaos.WORLD} | {(0, kind) for kind in chaos.TEAM}
    assert any(step["trajectory/control_tokens_split"] > 0 for step in wild.metrics.values())
    assert nothing_left(wild)
    assert eventually(lambda: shared_memory() <= before), shared_memory() - before
