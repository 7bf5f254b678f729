# SPDX-License-Identifier: Apache-2.0
"""Runs on three Ray nodes: two models on two of them at the same time; ranks on two and their rollouts on the third,
one of which dies: the run says which, and goes on."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from harness import Lab, eventually, steps_logged
from ray._private.state import state
from ray_nodes import Nodes
from standing_ray import StandingRay
from test_main_job import merged, scripted
from test_models_runs import train
from test_separate_async import SEPARATE

from verl_ext.cpu.platform import fork_worker
from verl_ext.integration.parts.recovery import nodes as parts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(5400)]

VARIABLES = "+ray_kwargs.ray_init.runtime_env.env_vars"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes("first", "second", "third") as nodes:
        yield nodes


def places(nodes: Nodes) -> dict[str, set[str]]:
    """The nodes of the living actors, by the name of their class."""
    found: dict[str, set[str]] = defaultdict(set)
    with ray.init(address=nodes.cluster.address, log_to_driver=False):
        for actor in state.actor_table(None).values():
            if actor["State"] == "ALIVE":
                found[actor["ActorClassName"].rpartition(".")[2]].add(actor["Address"]["NodeID"])
    return found


def imports(standing_ray: StandingRay) -> str:
    """Each node of each run would do the same imports; of the Ray that stands nothing else is used."""
    return f"{VARIABLES}.{fork_worker.FROM}={standing_ray.found['imports']}"


def test_the_updates_of_two_models_in_pools_on_two_nodes_overlap_in_time(
    lab: Lab, nodes: Nodes, standing_ray: StandingRay
) -> None:
    train(
        lab,
        "two_pools",
        *nodes.overrides(lab.root / "two_pools"),
        imports(standing_ray),
        f"{VARIABLES}.PYTHONPATH={Path(__file__).parent}",
        "trainer.nnodes=1",
        "trainer.total_training_steps=3",
        "data.train_batch_size=4",
        "verl_ext.agent_gradients=false",
        "+verl_ext.models.twin.pool.n_gpus_per_node=1",
        "+verl_ext.orchestra.agents.critic.model=twin",
        recipe="[dr_mas,length_lr,cpu]",
    )

    def updates() -> list[dict[str, Any]]:
        return [event for event in ray.timeline() if event["name"].endswith("update_actor")]

    with ray.init(address=nodes.cluster.address, log_to_driver=False):
        eventually(lambda: len(updates()) >= 6, 30)  # Ray's processes tell of their tasks once a second
        events, actors = updates(), state.actor_table(None)
    spans = defaultdict(list)
    for event in events:
        node = actors[event["args"]["task_id"][16:]]["Address"]["NodeID"]
        spans[node].append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    begun = min(begin for found in spans.values() for begin, _ in found)
    for node, found in spans.items():
        print(f"node {node[:8]}:", *(f"{one - begun:.3f} to {two - begun:.3f} s" for one, two in sorted(found)))
    first, second = spans.values()
    assert len(first) == len(second) == 3
    assert any(one[0] < two[1] and two[0] < one[1] for one, two in zip(sorted(first), sorted(second), strict=True))


def test_servers_and_ranks_on_different_nodes_and_the_same_command_goes_on_when_one_died(
    lab: Lab, nodes: Nodes, standing_ray: StandingRay
) -> None:
    folder, at = lab.root / "cluster", {}
    loop, environment = scripted(lab, "recording")  # of two turns, which are merged
    settings = [*nodes.overrides(folder), *SEPARATE, imports(standing_ray), "trainer.nnodes=2", "trainer.save_freq=1"]
    settings += [*loop, f"{VARIABLES}.PYTHONPATH={Path(__file__).parent}"]

    def lose_one(folder: Path) -> bool:
        if steps_logged(folder) < 2:
            return False
        at.update(places(nodes))
        nodes.kill("third")
        return True

    endless = [*settings, "trainer.total_training_steps=1000", "trainer.max_actor_ckpt_to_keep=2"]
    run = lab.run("cluster", overrides=endless, environment=environment, kill_when=lose_one, kill_with=0, timeout=2400)
    assert run.code != 0
    assert "the Ray node third (" in run.log, run.log[-6000:]
    ranks = at["WorkerDict"]
    assert len(ranks) == 2 and at["EmbeddedServer"] - ranks, dict(at)
    early = run.metrics
    assert early[1]["actor/grad_norm"] > 0 and early[1]["training/rollout_probs_diff_max"] < 1e-5

    # verl saves a step before it logs it, and notices in between that a node is gone.
    saved = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert sorted(early) == list(range(1, max(early) + 1)) and saved - max(early) in (0, 1)

    nodes.add("fourth")
    last = saved + 1
    more = [*settings, f"trainer.total_training_steps={last}"]
    run = lab.run("cluster", overrides=more, environment=environment, timeout=2400).check()
    assert sorted(run.metrics) == [*early, last] and all(merged(found, 16) for found in run.metrics.values())
    assert f"setting global step to {saved}" in run.log.lower()


def test_a_trainer_that_waits_in_ray_hears_that_a_node_has_died(nodes: Nodes) -> None:
    """A rank may wait ten minutes for the store that was on the node, and the trainer for the rank."""

    @ray.remote(num_gpus=1)
    class Worker:
        def node(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

        def wait(self) -> None:
            time.sleep(600)

    with ray.init(address=nodes.cluster.address, log_to_driver=False):
        workers = [Worker.remote() for _ in nodes.by_name]
        names = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
        at = [names[node] for node in ray.get([worker.node.remote() for worker in workers])]
        waits, dies = workers[at.index("second")].wait.remote(), max(nodes.by_name.keys() - {"first", "second"})
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a script has it for what it starts with &
        with pytest.raises(parts.NodeLost, match=rf"the Ray node {dies} \(.* has died"):
            with parts.Nodes(None).around_fit():
                nodes.kill(dies)
                ray.get(waits)
        assert signal.signal(signal.SIGINT, before) == signal.SIG_IGN
        assert ray.wait([waits], timeout=0)[1] == [waits]


def test_whatever_the_run_ends_with_the_node_that_died_is_named(nodes: Nodes) -> None:
    """The error of a process that missed the node comes seconds before Ray knows that it is dead."""

    @ray.remote(num_gpus=1)
    class Worker:
        def __init__(self) -> None:
            """On each node, since each has one GPU."""

    with ray.init(address=nodes.cluster.address, log_to_driver=False):
        workers = [Worker.remote() for _ in nodes.by_name]
        ray.get([worker.__ray_ready__.remote() for worker in workers])
        with pytest.raises(parts.NodeLost, match=r"the Ray node second \(.* has died") as caught:
            with parts.Nodes(None).around_fit():
                nodes.kill("second")
                raise RuntimeError("9 of 16 rollouts were lost")
        assert str(caught.value.__cause__) == "9 of 16 rollouts were lost"
        assert parts.lost_after() == parts.lost() == str(caught.value)
