# SPDX-License-Identifier: Apache-2.0
"""A run on several Ray nodes: it trains on all of them, says which one died, and goes on from its checkpoint."""

from __future__ import annotations

import pytest
import ray
from harness import Lab, steps_logged
from ray_nodes import Nodes

from verl_ext.integration.parts import nodes as parts

pytestmark = pytest.mark.e2e


def test_a_node_that_dies_is_named_and_the_same_command_goes_on(lab: Lab) -> None:
    folder = lab.root / "cluster"
    settings = ["trainer.total_training_steps=1000", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2"]
    with Nodes("first", "second") as nodes:

        def lose_one(folder: object) -> bool:
            if steps_logged(lab.root / "cluster") < 2:
                return False
            nodes.kill("second")
            return True

        overrides = [*nodes.overrides(folder), *settings]
        run = lab.run("cluster", overrides=overrides, kill_when=lose_one, kill_with=0, timeout=500)
        assert run.code != 0
        assert "the Ray node second (" in run.log, run.log[-6000:]
        early = run.metrics
        assert early[1]["actor/grad_norm"] > 0 and early[1]["training/rollout_probs_diff_max"] < 1e-5

        nodes.add("third")
        last = max(early) + 1
        overrides = [*nodes.overrides(folder), *settings[1:], f"trainer.total_training_steps={last}"]
        run = lab.run("cluster", overrides=overrides, timeout=500).check()
        assert sorted(run.metrics) == list(range(1, last + 1))
        assert "Resuming from" in run.log or "setting global step to" in run.log


def test_whatever_the_run_ends_with_the_node_that_died_is_named() -> None:
    """The error of a process that missed the node comes seconds before Ray knows that it is dead."""

    @ray.remote(num_gpus=1)
    class Worker:
        def __init__(self) -> None:
            """On either node, since each has one GPU."""

    with Nodes("first", "second") as nodes, ray.init(address=nodes.cluster.address, log_to_driver=False):
        workers = [Worker.remote() for _ in nodes.by_name]
        ray.get([worker.__ray_ready__.remote() for worker in workers])
        with pytest.raises(parts.NodeLost, match=r"the Ray node second \(.* has died") as caught:
            with parts.Nodes(None).around_fit():
                nodes.kill("second")
                raise RuntimeError("9 of 16 rollouts were lost")
        assert str(caught.value.__cause__) == "9 of 16 rollouts were lost"
        assert parts.lost_after() == parts.lost() == str(caught.value)
