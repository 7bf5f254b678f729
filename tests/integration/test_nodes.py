# SPDX-License-Identifier: Apache-2.0
"""When the nodes of a run are watched. That a node which dies is named: `tests/e2e/test_cluster.py`."""

from __future__ import annotations

import threading
from types import SimpleNamespace
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
    monkeypatch.setattr(nodes, "lost", lambda look=False: asked.append(look) or "")
    before = set(threading.enumerate())
    with nodes.Nodes(config).around_fit():
        names = {thread.name for thread in set(threading.enumerate()) - before}
    assert (asked, names) == (([True], {"verl_ext nodes"}) if count == 2 else ([], set()))


def test_the_actors_of_a_cluster_are_read_once_for_a_node_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them were read every two seconds, by every run on the cluster."""
    read: list[None] = []
    alive = {name: True for name in ("ours", "of_others")}
    actors = {
        "a": {"JobID": "mine", "Address": {"NodeID": "ours"}},
        "b": {"JobID": "2", "Address": {"NodeID": "other"}},
    }

    def table(_: Any) -> dict[str, Any]:
        read.append(None)
        return actors

    one = {"NodeName": "node", "NodeManagerAddress": "10.0.0.1"}
    monkeypatch.setattr("ray.nodes", lambda: [{"NodeID": name, "Alive": on, **one} for name, on in alive.items()])
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "mine"))
    monkeypatch.setattr("ray._private.state.state.actor_table", table)
    monkeypatch.setattr(nodes, "_others", set())
    assert [nodes.lost() for _ in range(3)] == [""] * 3 and not read
    alive["of_others"] = False
    assert [nodes.lost() for _ in range(3)] == [""] * 3 and len(read) == 1
    alive["ours"] = False
    assert "node (10.0.0.1) has died" in nodes.lost() and len(read) == 2
