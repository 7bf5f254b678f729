# SPDX-License-Identifier: Apache-2.0
"""A Ray node that dies ends the run and is named.

verl waits for rollouts without asking whether anybody still makes them: if the node of an agent loop or of a rollout
server dies, the run stands still for ever; if that of a training process dies, it ends with the name of an actor.
"""

from __future__ import annotations

import _thread
import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from verl_ext.integration.parts.base import Part

logger = logging.getLogger(__name__)

EVERY_S = 2.0
NOTICE_S = 75.0
"""How long Ray may take to say that a node is dead (five health checks of 10 s and 3 s between them, by default)."""


class NodeLost(RuntimeError):
    """A Ray node of the run has died. The message has its name and what to do."""


_others: set[str] = set()
"""Dead nodes that had no actor of this job, and get none any more."""


def lost(look: bool = False) -> str:
    """Which of the nodes that hold or held actors of this job are dead, and what to do; empty if none is.

    The table of all actors, of which a shared cluster has many, is read once for each node that died, and on `look`.
    """
    import ray
    from ray._private.state import state

    dead = {node["NodeID"]: node for node in ray.nodes() if not node["Alive"] and node["NodeID"] not in _others}
    if not dead and not look:
        return ""
    job = ray.get_runtime_context().get_job_id()
    used = {actor["Address"]["NodeID"] for actor in state.actor_table(None).values() if actor["JobID"] == job}
    names = [f"{dead[node]['NodeName']} ({dead[node]['NodeManagerAddress']})" for node in sorted(used & dead.keys())]
    _others.update(dead.keys() - used)
    if not names:
        return ""
    return (
        f"the Ray node {', '.join(names)} has died, and with it processes of this run. Start the same command again "
        "when the cluster has its nodes: it goes on from the last checkpoint."
    )


def patience() -> float:
    """Seconds for Ray to notice; none if the run has one node, since nothing of it would outlive that."""
    import ray

    return NOTICE_S if len(ray.nodes()) > 1 else 0.0


def lost_after() -> str:
    """`lost`, with the time that Ray needs to notice: for a process that failed and does not know why."""
    until = time.monotonic() + patience()
    while not (message := lost()) and time.monotonic() < until:
        time.sleep(EVERY_S)
    return message


class Nodes(Part):
    """Looks at the nodes that hold actors of this run while it trains; with one node there is nothing to look at."""

    @contextmanager
    def around_fit(self) -> Iterator[None]:
        """Raises NodeLost when Ray says that a node of the run is dead, whatever the run is waiting for or died of.

        What misses the node first may be anything: an actor "temporarily unavailable", too many lost rollouts, a
        closed connection. So every error waits until Ray must know. And a process that lives may wait for minutes for
        one that does not (verl's store asks three times for 200 s), and the trainer for it, in `ray.get`: there nothing
        comes through but what Ctrl-C sends, which a run in the background of a script ignores unless it is told.
        """
        if not patience():
            yield
            return
        found, stop = [""], threading.Event()

        def watch() -> None:
            while not stop.wait(EVERY_S):
                try:
                    found[0] = lost()
                except Exception:  # Ray's own server may be hard to reach just now
                    logger.warning("Ray does not say which nodes live; it is asked again", exc_info=True)
                if found[0]:
                    logger.error("%s", found[0])
                    _thread.interrupt_main()
                    return

        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("verl trains in a thread of its own, which cannot be told that a node has died")
        lost(look=True)  # an API of Ray that has changed fails here, not in the thread
        before = signal.getsignal(signal.SIGINT)
        if not callable(before):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=watch, name="verl_ext nodes", daemon=True).start()
        try:
            try:
                yield
            except Exception as error:
                logger.error("%r; for %d s it is watched whether a node of the run has died", error, patience())
                until = time.monotonic() + patience()
                while time.monotonic() < until:
                    time.sleep(0.1)  # here the interrupt comes out, if so
                raise
        except KeyboardInterrupt as raised:
            if not found[0]:  # somebody's Ctrl-C
                raise
            raise NodeLost(found[0]) from raised.__context__
        finally:
            stop.set()
            if not callable(before):
                signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
