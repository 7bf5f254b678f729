# SPDX-License-Identifier: Apache-2.0
"""Advantages of the trajectories of `turn_cases`, stored a sequence a call and merged."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import turn_cases as cases
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from verl_ext.integration import columns, turns
from verl_ext.integration.columns import ActiveBatch
from verl_ext.integration.parts.advantage.methods import complete, estimate

VERLS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gpg")
MIX = {"trloo": 0.5, "otb": 0.25, "grpo": 0.25}


def numbers_for(fields: list[dict[str, Any]], name: str, plus: float = 0.0) -> torch.Tensor:
    """A float a token that follows from the token, its place in the whole context, and the name."""
    rows = []
    for one in fields:
        ids, begin = one["responses"].double(), len(one["prompts"])
        rows.append(plus + torch.sin(ids + 0.1 * (begin + torch.arange(len(ids))) + len(name)).float() * 0.3)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def data_of(merged: bool, kl: bool = False) -> tuple[Any, ActiveBatch]:
    """verl's DataProto of the batch, and the row fields of its turns."""
    keys, tags, fields = cases.batch(merged)
    layout = cases.layout(keys, tags, fields)
    mask, scores = cases.padded(fields, "response_mask"), cases.padded(fields, "rm_scores")
    rewards = scores - 0.1 * numbers_for(fields, "kl") * mask if kl else scores
    batch = {"response_mask": mask, "rm_scores": scores, "token_level_scores": scores, "token_level_rewards": rewards}
    batch |= {"old_log_probs": numbers_for(fields, "old", -2.0), "values": numbers_for(fields, "values")}
    batch["rollout_log_probs"] = cases.padded(fields, "rollout_log_probs")
    batch["sum_pi_squared"] = numbers_for(fields, "squares", 0.5)
    uid = np.array([key.rsplit("_", 2)[0] for key in keys], dtype=object)
    data = DataProto(batch=TensorDict(batch, batch_size=len(keys)), non_tensor_batch={"uid": uid})
    found, missing = columns.row_fields(layout.keys, layout.tags, layout.said)
    active = ActiveBatch(columns=found, missing=missing, extra_fields=layout.said, turns=layout.turns)
    active.keys, active.stored = layout.keys, keys
    return data, active


def estimated(name: str, merged: bool, kl: bool = False) -> tuple[Any, ActiveBatch, Any]:
    """The batch with its advantages, the row fields of its turns, and the turns with theirs."""
    data, active = data_of(merged, kl)
    rows, keys = turns.unpacked(data, active.turns), list(active.keys)
    complete(active, rows)
    algorithm = OmegaConf.create({"gamma": 0.9, "lam": 0.95, "mix": MIX, "adv_estimator": name})
    settings = {"gamma": 0.9, "lam": 0.95, "num_repeat": 4, "norm_adv_by_std_in_grpo": True, "config": algorithm}
    rows = estimate(compute_advantage_for_multi_trajectories, rows, keys, name, active, **settings)
    return turns.packed(rows, data, active.turns), active, rows
