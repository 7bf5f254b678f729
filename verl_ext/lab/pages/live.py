# SPDX-License-Identifier: Apache-2.0
"""A page that follows what it shows: made anew for each look at it, and served to this machine alone."""

from __future__ import annotations

import argparse
import contextlib
import html
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from verl_ext.common.overrides import Failure, count
from verl_ext.lab.pages import html_page

NAMES = ("localhost", "127.0.0.1")
"""By which a page may be asked for: a foreign site that calls this machine by its own name gets nothing."""


def argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--watch``."""
    parser.add_argument(
        "--watch",
        type=_port,
        nargs="?",
        const=0,
        default=None,
        metavar="PORT",
        help="serve the page to this machine and follow what runs under way write (default: any free port)",
    )


def _port(text: str) -> int:
    if count(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port, from 0 (any free one) to 65535")
    return int(text)


def server(make: Callable[[], str], port: int = 0) -> ThreadingHTTPServer:
    """A server of one page on the loopback interface; `serve_forever` of it serves.

    Args:
        make: the page; called by one thread at a time. What it raises is shown as text: a run may have no metrics yet.
        port: 0 is any free one.
    """
    making = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # a tab that was closed while its page was made
                super().handle()

        def do_GET(self) -> None:
            if self.path != html_page.PATH or self.headers.get("Host", "").partition(":")[0] not in NAMES:
                self.send_error(404)
                return
            again = None
            try:
                with making:
                    text = make()
            except Exception as error:
                again = str(html_page.EVERY_S)
                text = (
                    f"<!doctype html><meta charset=utf-8><pre>{html.escape(f'{type(error).__name__}: {error}')}</pre>"
                )
            content = text.encode("utf-8", "backslashreplace")
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            if again:
                self.send_header("Refresh", again)
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a look every few seconds is no news."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def watch(make: Callable[[], str], port: int) -> int:
    """Serve the page until Ctrl-C; the command's exit code. Raises Failure: the port cannot be had."""
    try:
        serving = server(make, port)
    except OSError as error:
        raise Failure(f"--watch {port}: {error.strerror}; give another port, or none for any free one") from error
    with serving:
        where, every = f"http://127.0.0.1:{serving.server_port}{html_page.PATH}", html_page.EVERY_S
        print(f"{where} follows what is written, every {every} s; Ctrl-C ends it", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
