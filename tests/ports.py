# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that a test starts: free now, and nobody's when the server binds it seconds later."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

FIRST, LAST = 20_000, 65_535  # below are those of known services, and of Ray's workers


def candidates() -> Iterator[int]:
    """Ports in a random order, each once a process; processes with tests have different ones.

    An outgoing connection takes its port from the kernel's ephemeral range, and so does who binds port 0.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    outside = [port for port in range(FIRST, LAST + 1) if not low <= port <= high] or list(range(FIRST, LAST + 1))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    own = [port for port in outside if port % 16 == worker]
    random.SystemRandom().shuffle(own)  # tests set the seed of the other one
    yield from own


_left = candidates()


def free_port() -> int:
    """A port that no one listens on, on no address of this machine."""
    for port in _left:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")
