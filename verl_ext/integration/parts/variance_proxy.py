# SPDX-License-Identifier: Apache-2.0
"""verl's variance-proxy metrics, which V1 has no columns for, in a run whose engine delivers ``sum_pi_squared``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_ext.integration.columns import ActiveBatch
from verl_ext.integration.parts.base import Part
from verl_ext.integration.parts.columns import engine_columns


class VarianceProxy(Part):
    """Keeps the real rows from the advantage to the update, whose gradient norm the metrics need."""

    _rows: Any = None

    @classmethod
    def wanted(cls, config: Any) -> bool:
        return "sum_pi_squared" in engine_columns(config)

    def after_advantage(self, data: Any, keys: Sequence[str], active: ActiveBatch) -> None:
        self._rows = data.select_idxs(np.asarray(active.columns["valid_row"], dtype=bool))

    def after_update(self, metrics: dict[str, Any]) -> None:
        from verl.trainer.ppo.metric_utils import compute_variance_proxy_metrics

        self.metrics.update(compute_variance_proxy_metrics(self._rows, metrics.get("actor/grad_norm")))
        self._rows = None
