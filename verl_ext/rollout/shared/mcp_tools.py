# SPDX-License-Identifier: Apache-2.0
"""Tools of MCP servers, by name: ``mcp: {<server>: {command: [...]} | {url: ...}}`` of an agent loop's settings.

Each process that plays has one connection to each server, in a thread with an event loop of its own, which all of its
trajectories share. A server that has ended is started, or connected to, again at the next call. A server has the
rights of the run, as every tool of yours; what a model says reaches it as the JSON of the arguments alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema

from verl_ext.integration.settings import options
from verl_ext.integration.settings.options import OptionError

START_S = 120.0
"""Seconds that a server may take to start and to list its tools."""


@dataclass(frozen=True)
class ServerSettings:
    """``mcp.<server>``: one of `command` and `url`.

    Attributes:
        command: started by each process that plays, outside of the sandbox; spoken to on stdin and stdout.
        env: its environment, beside PATH, HOME and the like.
        url: of a server that runs already (streamable HTTP).
    """

    command: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    url: str | None = None

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("command: give either command or url")


class Server:
    """A connection. Its methods may be called from any thread.

    Args:
        name: for the thread.
        settings: of it.
        where: its key, for messages.

    Attributes:
        tools: verl's tool for each of its own, by name.

    Raises:
        OptionError: the package `mcp` is not installed, or the server does not answer.
    """

    def __init__(self, name: str, settings: ServerSettings, where: str) -> None:
        try:
            import mcp
        except ImportError as error:
            raise OptionError(f"{where} needs the package mcp: pip install 'verl-ext[mcp]'.") from error
        command, *args = settings.command or ("",)
        process = mcp.StdioServerParameters(command=command, args=args, env=settings.env)
        self._where: Any = settings.url or process
        self._connection: tuple[asyncio.Task[None], Any] | None = None
        self._turn = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"verl_ext mcp {name}", daemon=True).start()
        try:
            listed = self._soon(asyncio.wait_for(self._list(), START_S)).result()
            self.tools = {tool.name: self._tool(tool) for tool in listed}
        except Exception as error:
            self.close()
            reason = f"{type(error).__name__}: {error}" if str(error) else f"no answer in {START_S:.0f} s"
            raise OptionError(f"{where}: {settings.url or list(settings.command)}: {reason}") from error

    def _soon(self, coroutine: Any) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _live(self, ready: asyncio.Future[Any]) -> None:
        """The life of a connection, which must begin and end in one task."""
        import mcp

        try:
            async with mcp.Client(self._where) as client:
                ready.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    async def _client(self) -> Any:
        async with self._turn:
            if self._connection is None:
                ready: asyncio.Future[Any] = self._loop.create_future()
                task = self._loop.create_task(self._live(ready))
                try:
                    self._connection = task, await ready
                except BaseException:  # its time is up as well
                    task.cancel()
                    await asyncio.wait([task])  # which ends what it has started
                    raise
            return self._connection[1]

    async def _end(self) -> None:
        async with self._turn:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection[0].cancel()
            await asyncio.wait([connection[0]])

    async def _list(self) -> list[Any]:
        client, found, cursor = await self._client(), [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if not cursor:
                return found

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        import mcp_types

        client = await self._client()
        try:
            result = await client.call_tool(name, arguments)
        except Exception as error:
            if getattr(error, "code", mcp_types.CONNECTION_CLOSED) == mcp_types.CONNECTION_CLOSED:
                if self._connection is not None and self._connection[1] is client:
                    await self._end()
            raise
        text = "\n".join(getattr(block, "text", f"[{block.type}]") for block in result.content)
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content)
        if result.is_error:
            raise RuntimeError(text)
        return text

    def _tool(self, tool: Any) -> FunctionTool:
        """As verl has tools. Of a parameter its chat templates know the type, the description and the values."""

        async def call(**arguments: Any) -> str:
            return await asyncio.wrap_future(self._soon(self._call(tool.name, arguments)))

        given = tool.input_schema
        parameters = {
            "type": "object",
            "properties": {name: _parameter(one) for name, one in given.get("properties", {}).items()},
            "required": given.get("required", []),
        }
        function = {"name": tool.name, "description": tool.description or tool.name, "parameters": parameters}
        schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
        return FunctionTool(tool.name, call, schema, is_async=True)

    def close(self) -> None:
        """End the connection, and the server if it was started here."""
        self._soon(self._end()).result(timeout=START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)


def _parameter(given: Mapping[str, Any]) -> dict[str, Any]:
    """What verl's schema of a parameter has room for: of alternatives their types, of an unknown type a string."""
    kinds = [one["type"] for one in given.get("anyOf", ()) if isinstance(one.get("type"), str)]
    kept = {name: given[name] for name in ("description", "enum") if name in given}
    return {"type": given.get("type") or kinds or "string", **kept}


def read(given: Mapping[str, Any], where: str) -> dict[str, ServerSettings]:
    """The settings of each server, which stand at `where`.

    Raises OptionError: an unknown key, a wrong type, or neither or both of command and url.
    """
    return {name: options.read(given, name, ServerSettings, where=f"{where}.{name}") for name in given}


def connect(given: Mapping[str, Any], where: str) -> dict[str, Server]:
    """Connect to each of the servers.

    Raises OptionError: as for `read` and `Server`, or two servers have a tool of one name.
    """
    servers: dict[str, Server] = {}
    owner: dict[str, str] = {}
    try:
        for name, settings in read(given, where).items():
            servers[name] = Server(name, settings, f"{where}.{name}")
            for tool in servers[name].tools:
                if tool in owner:
                    raise OptionError(f"{where}: {owner[tool]} and {name} both have a tool {tool!r}; leave one out.")
                owner[tool] = name
    except OptionError:
        for server in servers.values():
            server.close()
        raise
    return servers


@functools.cache
def _shared(given: str, where: str) -> dict[str, FunctionTool]:
    return {name: tool for server in connect(json.loads(given), where).values() for name, tool in server.tools.items()}


def tools(given: Mapping[str, Any], where: str) -> dict[str, FunctionTool]:
    """The tools of the servers by name; this process connects at its first call. Errors as of `connect`."""
    return _shared(json.dumps(given, sort_keys=True), where) if given else {}


def check(given: Mapping[str, Any], where: str) -> None:
    """Connect, list, and leave again: before a run. Errors as of `connect`."""
    for server in connect(given, where).values():
        server.close()
