# SPDX-License-Identifier: Apache-2.0
"""Advantages, `verl_ext.updates_per_batch` and the sampler's divergence in verl's real trainer, on one rank and on two;
and transcripts."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Lab, Run, make_data
from scripted_loops import distributions, recorded
from transformers import AutoModelForCausalLM

from verl_ext import cli
from verl_ext.lab.transcripts.read import Choice, read
from verl_ext.methods.rejection import exact_token_kl, top_k_token_kl

pytestmark = pytest.mark.e2e

HERE = Path(__file__).resolve().parent
LOOPS = "- {name: recorded, _target_: scripted_loops.Distributed}\n"
KEPT = "rejection/trm/kept_share"
BOUND = 0.48  # of the largest divergence of a row: some rows are within it for a lower bound of it alone


def test_the_same_updates_on_one_rank_and_on_two_and_readable_rollouts(
    standing_lab: Lab, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rollouts of one to three turns that follow from the prompt: the batch of all runs is the same."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "loops.yaml").write_text(LOOPS)
    data = make_data(folder, rows=4)
    own = replace(standing_lab, data=data)
    settings = [
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder / 'loops.yaml'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=recorded",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
        "actor_rollout_ref.actor.optim.clip_grad=1000000.0",
        "verl_ext.updates_per_batch=1",
        "algorithm.gamma=0.9",
        "verl_ext.agent_gradients=true",
        f"algorithm.trm={{divergence: exact, max: {BOUND}, avg: 10.0, top_k: 40}}",
    ]
    environment = {"PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    recipe = "[trloo,trm,cpu]"
    one = own.run(
        "updates_one",
        recipe=recipe,
        overrides=[*settings, f"verl_ext.rollouts_dir={standing_lab.root / 'updates_one' / 'rollouts'}"],
        environment=environment,
    ).check()
    # Its turns are merged, those of the second run are not.
    more = [*settings, "trainer.n_gpus_per_node=2", "verl_ext.merge_turns=false"]
    two = own.run("updates_two", recipe=recipe, overrides=more, environment=environment).check()
    lower = [*settings, "algorithm.trm.divergence=top_k", "trainer.total_training_steps=1", "trainer.n_gpus_per_node=2"]
    few = own.run("updates_top_k", recipe=recipe, overrides=lower, environment=environment).check()
    for step in (1, 2):
        first, second = one.metrics[step], two.metrics[step]
        assert first["rollout/trajectories"] == second["rollout/trajectories"] == 16
        assert first["rollout/turns"] == second["rollout/turns"] > 16
        assert first["updates/per_batch"] == second["updates/per_batch"] == 1
        assert first["updates/mini_batch_sequences"] == first["rollout/sequences"] == 16
        assert first["updates/padding_sequences"] == 0 and second["rollout/sequences"] == second["rollout/turns"]
        assert first["rollout/tokens"] < first["rollout/tokens_by_call"] == second["rollout/tokens"]
        assert second["updates/padding_sequences"] == second["rollout/turns"] % 2
        rel = 1e-4 if step == 1 else 1e-2  # Adam divides by gradients that are nearly zero
        assert second["actor/grad_norm"] == pytest.approx(first["actor/grad_norm"], rel=rel)
        assert second["actor/pg_loss"] == pytest.approx(first["actor/pg_loss"], rel=rel, abs=1e-5)
        for found in (first, second):  # one agent has written all rows
            assert found["agent/solver/grad_norm/mean"] == pytest.approx(found["actor/grad_norm"], rel=1e-5)
            assert found["agent/solver/grad_norm/max"] == found["agent/solver/grad_norm/mean"]

        assert second[KEPT] == first[KEPT] < 1
        told = [key for key in first if key.startswith("rejection/trm/statistic_")]
        assert len(told) == 10
        for key in told:
            assert second[key] == pytest.approx(first[key], rel=rel)

    by_definition(one, two)
    divergences_by_hand(standing_lab.model, one, few)

    rows = {row["key"]: row for row in one.rows(1)}
    records = read(one.folder, Choice(steps=(1, 1)))
    assert len(records) == 16 and sum(len(record["turns"]) for record in records) == len(rows)
    for record in records:
        assert record["agents"] == ["solver"] and record["outcome"] == (
            "success" if record["reward"] > 0 else "failure"
        )
        for turn in record["turns"]:
            row = rows[f"{record['trajectory']}_{turn['turn']}"]
            assert turn["advantage"] == pytest.approx(row["advantage"], abs=1e-6)
            assert turn["reward"] == row["turn_reward"] and turn["observation"] == row["anchor_obs"]
            # What is rejected has no tokens in the loss, and can be read all the same.
            assert turn["response_tokens"] > 0 and len(turn["response"]) > 0
            assert row["response_tokens"] == (turn["response_tokens"] if row["kept"] else 0)
    longest = max(records, key=lambda record: len(record["turns"]))
    assert cli.main(["rollouts", str(one.folder), "--step", "1", "--trajectory", longest["trajectory"]]) == 0
    shown = capsys.readouterr().out
    assert f"trajectory {longest['trajectory']}" in shown and "--- turn 2, solver, reward" in shown


def by_definition(one: Run, two: Run) -> None:
    """Two ranks have the advantages of one, which are TRLOO's, worked out here row by row."""
    advantages, others = ({row["anchor_obs"]: row["advantage"] for row in run.rows(1)} for run in (one, two))
    assert advantages == others and len(advantages) > 16
    kept = {row["anchor_obs"]: row["kept"] for row in one.rows(1)}
    returns: dict[str, float] = {}
    groups = defaultdict(list)
    for row in sorted(one.rows(1), key=lambda row: -row["turn_index"]):
        prompt, session, turn = row["anchor_obs"].split("/")
        later = returns.get(f"{prompt}/{session}/{int(turn) + 1}", 0.0)
        returns[row["anchor_obs"]] = row["turn_reward"] + 0.9 * later
        groups[prompt, turn].append(row["anchor_obs"])
    for group in groups.values():
        for name in group:
            rest = [returns[other] for other in group if other != name]
            expected = returns[name] - (sum(rest) / len(rest) if rest else 0.0)
            assert advantages[name] == pytest.approx(expected if kept[name] else 0.0, abs=1e-6)
    metrics = one.metrics[1]
    assert metrics["trloo/turn_0/count"] == 16 and metrics["trajectory/turns/max"] == 3
    reward = sum(row["turn_reward"] for row in one.rows(1)) / 16
    assert metrics["trajectory/reward/mean"] == pytest.approx(reward, abs=1e-9)
    # verl saw only the last output's reward, 1.0, copied to every row.
    assert metrics["critic/score/mean"] == 1.0


def divergences_by_hand(model: Path, one: Run, few: Run) -> None:
    """At the first step the trainer is the model of the folder, and the largest divergence of every row is known."""
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    exact, lower = {}, {}
    for row in one.rows(1):
        prompt, session, turn = map(int, row["anchor_obs"].split("/"))
        ids = [3 + prompt, 7, 11]
        for earlier in range(turn):
            ids += recorded(prompt, session, earlier)
        start, ids = len(ids), ids + recorded(prompt, session, turn)
        with torch.no_grad():
            logits = trainer(torch.tensor([ids])).logits[:, start - 1 : -1]
        sampler = distributions(prompt, session, turn)[None]
        top = sampler.topk(40)
        exact[row["anchor_obs"]] = float(exact_token_kl(sampler, logits).max())
        lower[row["anchor_obs"]] = float(
            top_k_token_kl(top.values, logits.log_softmax(-1).gather(-1, top.indices)).max()
        )
    for run, values in ((one, exact), (few, lower)):
        metrics = run.metrics[1]
        assert {row["anchor_obs"]: row["kept"] for row in run.rows(1)} == {k: v <= BOUND for k, v in values.items()}
        assert metrics[KEPT] == pytest.approx(np.mean([value <= BOUND for value in values.values()]))
        for percent in (5, 50, 95):
            expected = np.percentile(list(values.values()), percent)
            assert metrics[f"rejection/trm/statistic_max/p{percent}"] == pytest.approx(expected, rel=1e-3)
    assert all(lower[name] <= value for name, value in exact.items())
    assert 0.5 < one.metrics[1][KEPT] < few.metrics[1][KEPT]
