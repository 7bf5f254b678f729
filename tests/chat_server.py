# SPDX-License-Identifier: Apache-2.0
"""A server of OpenAI's chat completions on the loopback, for the tests of models that somebody else serves."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any


class Served:
    """A server of chat completions: what it was asked, and what it answers, in turn, the last for good."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
                self.asked.append({"path": handler.path, **body})
                self.keys.append(handler.headers["authorization"])
                status, said = answers[min(len(self.asked), len(answers)) - 1]
                if isinstance(said, str):
                    choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
                    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
                    said = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
                    said["usage"] = usage
                sent = json.dumps(said).encode()
                handler.send_response(status)
                handler.send_header("content-type", "application/json")
                handler.send_header("content-length", str(len(sent)))
                handler.end_headers()
                handler.wfile.write(sent)

            def log_message(handler, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def models(self, **further: Any) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        return {"strong": {"endpoint": {"url": url, "model": "big", **further}}}

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
