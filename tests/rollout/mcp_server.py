# SPDX-License-Identifier: Apache-2.0
"""An MCP server with a tool, for the tests: ``python mcp_server.py [PORT]``; without a port on stdin and stdout."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums", log_level="ERROR")


@server.tool()
async def add(a: int, b: int | None = None) -> int:
    """Add two numbers."""
    if a == 7:
        raise ValueError("not seven")
    if a == 11:
        await asyncio.sleep(600)
    if a == 13:
        os._exit(3)
    return a + (b or 0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
