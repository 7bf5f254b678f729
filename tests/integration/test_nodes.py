# SPDX-License-Identifier: Apache-2.0
"""When the nodes of a run are watched. That a node which dies is named: `tests/e2e/test_cluster.py`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_ext.integration.parts.recovery import nodes


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_of_one_node_watches_the_others_of_its_cluster(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of further models, of a reward model or of a teacher may be elsewhere, whatever trainer.nnodes is."""
    config = OmegaConf.create({"trainer": {"nnodes": 1}, "actor_rollout_ref": {"rollout": {"nnodes": 0}}})
    assert nodes.Nodes.wanted(config)
    asked: list[Any] = []
    monkeypatch.setattr("ray.nodes", lambda: [{}] * count)
    monkeypatch.setattr(nodes, "lost", lambda: asked.append(None) or "")
    before = set(threading.enumerate())
    with nodes.Nodes(config).around_fit():
        names = {thread.name for thread in set(threading.enumerate()) - before}
    assert (len(asked), names) == ((1, {"verl_ext nodes"}) if count == 2 else (0, set()))
