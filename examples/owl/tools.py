# SPDX-License-Identifier: Apache-2.0
"""The tools of the workers, served to camel's Python while a command runs: `python tools.py CORPUS COMMAND...`

`POST $OWL_TOOLS/search`, `/calculator` and `/python` take text and give text. What a model wrote runs in the sandbox.
"""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from verl_ext.rollout.passages import as_text
from verl_ext.rollout.retrieval import Bm25Options, Bm25Retriever
from verl_ext.sandbox import SandboxError, shared

LONGEST = 1 << 16


def python(code):
    try:
        return str(shared().run("verl_ext.rewards.caged:program", code, "", timeout_s=5))
    except SandboxError as error:
        return f"Error: {error}"


def serve(corpus):
    """A server on a free port of loopback, in a thread."""
    retriever = Bm25Retriever(Bm25Options(corpus))
    lock = threading.Lock()

    def search(query):
        with lock:
            return as_text(retriever.find([query], 3)[0].passages) or "Nothing found."

    tools = {"/search": search, "/calculator": lambda expression: python(f"print({expression})"), "/python": python}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["Content-Length"])
            known = self.path in tools and length <= LONGEST
            self.send_response(200 if known else 404)
            self.end_headers()
            if known:
                self.wfile.write(tools[self.path](self.rfile.read(length).decode()).encode()[:LONGEST])

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


if __name__ == "__main__":
    os.environ["OWL_TOOLS"] = serve(sys.argv[1])
    sys.exit(subprocess.run(sys.argv[2:]).returncode)
