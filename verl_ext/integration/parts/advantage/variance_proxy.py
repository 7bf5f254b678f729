# SPDX-License-Identifier: Apache-2.0
"""What ``sum_pi_squared`` tells of the update, in a run whose engine delivers it: no pass over the logits of its own.

verl's variance-proxy metrics, which V1 has no columns for, and ``actor/logit_update/{mean,max}``: how far a step of
size 1 along a token's policy gradient moves its logits, |A| sqrt(1 - 2 pi(y) + sum pi^2) (arXiv 2506.12912).
``verl_ext.logit_update: true`` asks for them where no estimator needs the column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_ext.integration.columns import ActiveBatch
from verl_ext.integration.metrics import logit_update
from verl_ext.integration.parts.advantage.columns import engine_columns
from verl_ext.integration.parts.base import Part


class VarianceProxy(Part):
    """Keeps the real turns from the advantage to the update, whose gradient norm verl's metrics need."""

    _rows: Any = None

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return "sum_pi_squared" in engine_columns(config)

    def after_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        self._rows = data.select_idxs(np.asarray(active.columns["valid_row"], dtype=bool))
        names = ("advantages", "old_log_probs", "sum_pi_squared", "response_mask")
        self.metrics.update(logit_update(*(self._rows.batch[name] for name in names)))

    def after_update(self, metrics: dict[str, Any]) -> None:
        from verl.trainer.ppo.metric_utils import compute_variance_proxy_metrics

        self.metrics.update(compute_variance_proxy_metrics(self._rows, metrics.get("actor/grad_norm")))
        self._rows = None
