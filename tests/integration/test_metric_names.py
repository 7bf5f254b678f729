# SPDX-License-Identifier: Apache-2.0
"""No metric of a run is a beginning of another: MLflow's file store can't have both. Runs check theirs in `harness`."""

from __future__ import annotations

import numpy as np
import torch
from metric_names import collisions

from verl_ext.integration import dvp, metrics, mix
from verl_ext.integration.parts.advantage.rollouts import rollout_metrics
from verl_ext.integration.parts.update.rejection_metrics import rule_metrics
from verl_ext.methods.rejection import Rejection

MASK = torch.ones(4, 3)
ADVANTAGE = torch.tensor([[1.0, 1, 1], [-1, -1, -1], [2, 2, 2], [-2, -2, -2]])
LOG = torch.full((4, 3), -0.5)
SQUARES = torch.full((4, 3), 0.5)


def test_no_metric_is_a_beginning_of_another() -> None:
    """`trajectory/turns`, as the multi-turn loop says it, was one of `trajectory/turns/mean`."""
    fields = {
        "traj_uid": np.array(["a_0", "a_1", "b_0", "b_1"], dtype=object),
        "valid_row": np.ones(4, dtype=bool),
        "turn_index": np.zeros(4, dtype=np.int64),
        "score": np.ones(4),
        "turn_reward": np.ones(4),
        "agent_id": np.array(["one", "two"] * 2, dtype=object),
        "is_action_valid": np.ones(4, dtype=bool),
    }
    group = np.array([0, 0, 1, 1])
    said = {"acc": 1.0, "turns": 2.0, "reward": 1.0, "sandbox_calls": 3.0}
    extra = [{"reward_extra_info": said, "failure": "error"}] * 4
    kept = Rejection(response_mask=MASK, kept=torch.tensor([True, False, True, True]), statistic=torch.ones(4))
    tokens = {"old_log_probs": LOG, "rollout_log_probs": LOG}
    found = [
        metrics.trajectory_metrics(fields),
        metrics.group_metrics("one", group),
        metrics.turn_metrics("one", group, np.ones(4), np.ones(4)),
        metrics.level_metrics("one", [group, group], 4),
        metrics.learning_signal(fields, ADVANTAGE, MASK),
        metrics.logit_update(ADVANTAGE, LOG, SQUARES, MASK),
        metrics.baseline_metrics("one", ADVANTAGE, ADVANTAGE, MASK, np.ones(4), group),
        dvp.set_metrics(MASK, MASK, MASK, MASK),
        dvp.mismatch_metrics(LOG, LOG, MASK),
        mix._shares([("one", 0.5, ADVANTAGE, ADVANTAGE), ("two", 0.5, ADVANTAGE, ADVANTAGE)], ADVANTAGE, MASK),
        rule_metrics("rejection/one", kept, MASK, ADVANTAGE, tokens),
        rollout_metrics(fields, [{}] * 4, extra),
    ]
    names = [name for one in found for name in one]
    assert len(names) == len(set(names)) > 60 and not collisions(names)
    assert "trajectory/turns/reported" in names
