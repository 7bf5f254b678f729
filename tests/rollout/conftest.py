# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that play agent loops with a scripted engine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loops import QUESTION
from ports import free_port


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from verl_ext.lab.demo.model import train_tokenizer

    return train_tokenizer([QUESTION] * 64)


@pytest.fixture
def fresh_fates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_ext.rollout.orchestra.loop._fates", {})


@pytest.fixture(params=["command", "url"])
def sums(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """A real MCP server: started by the process that plays, or one that runs already."""
    file = str(Path(__file__).with_name("mcp_server.py"))
    if request.param == "command":
        yield {"sums": {"command": [sys.executable, file]}}
        return
    port = free_port()
    with subprocess.Popen([sys.executable, file, str(port)]) as server:
        try:
            until = time.monotonic() + 300
            while time.monotonic() < until:
                with socket.socket() as there:
                    if not there.connect_ex(("127.0.0.1", port)):
                        break
                time.sleep(0.1)
            yield {"sums": {"url": f"http://127.0.0.1:{port}/mcp"}}
        finally:
            server.kill()
