# SPDX-License-Identifier: Apache-2.0
"""`--watch`: the page of a run that goes on, served to this machine alone."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_ext.lab.pages import live


@pytest.fixture
def pages() -> list[object]:
    return ["<p>first", "<p>\ud800 second", ValueError("no <metrics> yet")]


@pytest.fixture
def port(pages: list[object]) -> Iterator[int]:
    def make() -> str:
        page = pages.pop(0)
        if isinstance(page, Exception):
            raise page
        return str(page)

    with live.server(make) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving.server_port
        serving.shutdown()
        thread.join()


def get(port: int, path: str = "/live", **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.headers)


def test_each_look_is_a_new_page(port: int, pages: list[object]) -> None:
    status, text, headers = get(port)
    assert (status, text) == (200, "<p>first") and "Refresh" not in headers
    assert get(port)[1] == "<p>\\ud800 second"
    status, text, headers = get(port)
    assert "ValueError: no &lt;metrics&gt; yet" in text and int(headers["Refresh"]) > 0 and not pages


def test_other_names_and_paths_get_nothing(port: int, pages: list[object]) -> None:
    assert get(port, "/etc/passwd")[0] == get(port, Host=f"evil.example:{port}")[0] == 404
    assert get(port, Host=f"localhost:{port}")[0] == 200 and len(pages) == 2
    assert get(port, Host="127.0.0.1")[0] == 200  # without a port, as from behind a forwarded port 80


def test_a_tab_that_is_closed_meanwhile_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    asked, closed = threading.Event(), threading.Event()

    def make() -> str:
        asked.set()
        assert closed.wait(60)
        return "x" * 10_000_000

    with live.server(make) as serving:
        serving.daemon_threads = False  # closing waits for the answer
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        tab = socket.create_connection(("127.0.0.1", serving.server_port))
        tab.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        tab.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert asked.wait(60)
        tab.close()
        closed.set()
        serving.shutdown()
        thread.join()
    assert capsys.readouterr().err == ""


def test_report_follows_a_run_until_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "verl_ext.cli", "report", str(tmp_path), "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=_hear_interrupts) as child:
        try:
            assert child.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:(\d+)/live", child.stdout.readline())
            assert found is not None
            assert "LogError" in get(int(found[1]))[1]
            metrics = tmp_path / "run" / "metrics.jsonl"
            metrics.parent.mkdir()
            for step in (1, 2):
                with metrics.open("a") as file:
                    file.write(json.dumps({"step": step, "data": {"critic/score/mean": step / 8}}) + "\n")
                text = get(int(found[1]))[1]
                assert "critic/score/mean" in text and ("0.25" in text) is (step == 2)
            os.kill(child.pid, signal.SIGINT)
            assert child.wait(120) == 0
        finally:
            child.kill()


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
