# SPDX-License-Identifier: Apache-2.0
"""One line a turn: who spoke, in which turn, for what reward and advantage (``verl_ext.rows_dir``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_ext.common.transcripts import write_lines
from verl_ext.integration.columns import ActiveBatch
from verl_ext.integration.metrics import row_advantages
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.options import select

OF_KERNELS = ("correct", "speedup", "coverage", "decoy", "kernel_status")
"""Turn fields of the loop ``verl_ext_kernels``, written where the turns have them."""


TYPED: Mapping[str, type] = {"agent_id": str, "model": str, "turn_reward": float, "is_action_valid": bool}
"""Turn fields that are written where the turns have them, and what they are in the file."""


class Rows(Part):
    """``verl_ext.rows_dir``: who, which turn, for what reward and advantage."""

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return bool(select(config.get("verl_ext"), "rows_dir"))

    def after_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        folder = select(self.config.get("verl_ext"), "rows_dir")
        first = self.trainer.local_trigger_step == 0
        if model_options.of(self.config):
            active.column("model")
        for name in OF_KERNELS:
            active.column(name)
        write_lines(folder, self.trainer.global_steps, row_records(active.columns, data, keys), start=first)


def row_records(columns: Mapping[str, Any], data: Any, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Records of the real turns of a batch, in order of prompt, trajectory and turn.

    Args:
        columns: turn fields by name, each of length B.
        data: verl's DataProto with ``advantages``, ``returns``, ``response_mask`` and ``token_level_rewards`` [B, T].
        keys: storage keys of the turns.

    Returns:
        Dicts with ``key, index, traj_uid, turn_index, agent_id, turn_reward, score, response_tokens, advantage``;
        ``advantage`` is the mean over the turn's model tokens (the turn's scalar, for a method that has one).
    """
    tokens = data.batch["response_mask"].sum(-1)
    mean_advantage = row_advantages(data.batch["advantages"], data.batch["response_mask"])
    scores = data.batch["token_level_rewards"].double().sum(-1)
    uid = data.non_tensor_batch["uid"]
    records = []
    for i in np.flatnonzero(columns["valid_row"]):
        record = {
            "key": keys[i],
            "index": str(uid[i]),
            "traj_uid": str(columns["traj_uid"][i]),
            "turn_index": int(columns["turn_index"][i]),
            "score": float(scores[i]),
            "response_tokens": int(tokens[i]),
            "advantage": float(mean_advantage[i]),
        }
        if "row_mask" in columns:  # of rejection rules; response_tokens are those that are trained on
            record["kept"] = bool(columns["row_mask"][i])
        record.update({name: kind(columns[name][i]) for name, kind in TYPED.items() if name in columns})
        record.update({name: columns[name][i] for name in ("anchor_obs", *OF_KERNELS) if name in columns})
        records.append(record)
    return sorted(records, key=lambda record: (record["index"], record["traj_uid"], record["turn_index"]))
