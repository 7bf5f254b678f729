# SPDX-License-Identifier: Apache-2.0
"""verl's replay buffer with the rows of a prompt in order of their sample instead of their arrival."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class SortedReplayBuffer(ReplayBuffer):
    def _materialize_batch(self, *args: Any, **kwargs: Any) -> Any:
        batch = super()._materialize_batch(*args, **kwargs)
        batch.reorder(sorted(range(len(batch.keys)), key=lambda i: batch.keys[i].rsplit("_", 2)[1:]))
        return batch
