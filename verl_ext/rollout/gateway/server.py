# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of a process: one for all trajectories that it plays, each with a key of its own.

It lives in the event loop of the agent loops, which therefore no agent's code may hold up (`agent`). Who has no living
key is told nothing, before the body of the request is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from verl_ext.rollout.gateway.agent import MAX_BYTES
from verl_ext.rollout.gateway.protocol import Answer, Asked, Refused, parse
from verl_ext.rollout.gateway.settings import GatewaySettings
from verl_ext.rollout.orchestra.agents import ENGINE_TIMEOUT, MAX_CALLS, OVERLONG, OrchestraFailure

logger = logging.getLogger(__name__)

ANSWERED = "verl_ext.answered"
"""Where a request's scope holds its session and attempt, once it is answered."""
RETRY = "x-stainless-retry-count"
"""By which OpenAI's clients say how often they have tried before."""
NO_KEY = "this key belongs to no trajectory that is being played"


class Trajectory(Protocol):
    """What the server needs of the trajectory behind a key."""

    settings: GatewaySettings
    runs: list[dict[str, Any]]

    async def answer(self, asked: Any) -> Answer:
        """Answer a request; raises Refused or OrchestraFailure, or what the engine raised."""

    def lose(self, name: str) -> None:
        """The answer with this id has reached nobody."""


@dataclass
class Attempt:
    """A request with a call: what it asks tells it from others; `name` is its answer's id once there is one."""

    request: Request
    asked: Asked
    name: str = ""
    lost: bool = False
    repeated: bool = False


class Session:
    """One trajectory at the server: its limits, and why it ended before its agent did.

    Attributes:
        key: with which its agent calls.
        over: done with the failure that ends the trajectory, whatever the agent does.
        failed: the last call that failed, if the agent has made no other since.
        refused: requests that were answered with an error.
        retries: requests that repeat one whose answer was lost, or that a client's library says are such.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self.key = f"sk-{secrets.token_urlsafe(24)}"
        self.over: asyncio.Future[OrchestraFailure] = asyncio.get_running_loop().create_future()
        self.failed: OrchestraFailure | None = None
        self.refused = self.retries = 0
        self.attempts: list[Attempt] = []
        self._calls = 0
        self._bytes = 0

    def end(self, reason: str, detail: str) -> None:
        """End the trajectory with this failure."""
        if not self.over.done():
            self.over.set_result(OrchestraFailure(reason, detail))

    def begin(self) -> None:
        """Count a request. Raises Refused: it is one too many."""
        most = self.trajectory.settings.max_calls
        self._calls += 1
        if self._calls > most:
            self.end(MAX_CALLS, f"more than verl_ext.gateway.max_calls={most} requests")
            raise Refused(NO_KEY, 401, "trajectory_ended")

    @property
    def lost(self) -> int:
        """Calls whose answer has reached nobody."""
        return sum(attempt.lost for attempt in self.attempts)

    def lose(self, attempt: Attempt) -> None:
        """Its client has gone, or went before it had read the answer."""
        attempt.lost = True
        if attempt.name:
            self.trajectory.lose(attempt.name)

    async def settle(self) -> None:
        """See who has gone while the engine is at work, and hear of connections that have ended by now."""
        for _ in range(3):
            await asyncio.sleep(0)
        for attempt in self.attempts:
            if not attempt.name and not attempt.lost and await attempt.request.is_disconnected():
                self.lose(attempt)

    async def attempt(self, request: Request, asked: Asked) -> Attempt:
        """Note a request for a call, and whether it repeats another one."""
        await self.settle()
        alike = (one for one in self.attempts if one.lost and not one.repeated and one.asked == asked)
        before = next(alike, None)
        if before is not None:
            before.repeated = True
        self.retries += before is not None or request.headers.get(RETRY, "0") != "0"
        made = Attempt(request, asked)
        self.attempts.append(made)
        return made

    async def body(self, request: Request) -> bytes:
        """The body of a request, within its time and size. Raises Refused: it came too slowly, or is too much."""
        settings = self.trajectory.settings
        try:
            return await asyncio.wait_for(self._body(request, settings.max_bytes), settings.body_timeout_s)
        except ClientDisconnect:
            raise Refused("the client has gone") from None
        except asyncio.TimeoutError:
            raise Refused(f"no body within {settings.body_timeout_s} s", 408, "slow_body") from None

    async def _body(self, request: Request, most: int) -> bytes:
        chunks = []
        said = request.headers.get("content-length", "")
        self._within(int(said) if said.isascii() and said.isdigit() else 0, most)
        async for chunk in request.stream():
            self._bytes += len(chunk)
            self._within(0, most)
            chunks.append(chunk)
        return b"".join(chunks)

    def _within(self, more: int, most: int) -> None:
        if self._bytes + more > most:
            self.end(MAX_BYTES, f"requests of more than verl_ext.gateway.max_bytes={most} bytes")
            raise Refused(f"more than {most} bytes", 413, MAX_BYTES)


class _Connection(H11Protocol):
    """A connection of a client, which tells an answer that was not read: the kernel then resets the connection, or it
    ends before the answer is written. One that has been read whole ends without an error, or is used again.
    """

    def connection_lost(self, exc: Exception | None) -> None:
        session, attempt = (self.scope or {}).get(ANSWERED) or (None, None)
        if session is not None and (exc is not None or not self.cycle.response_complete):
            session.lose(attempt)
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """A server beside other work: the signals of the process are not its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Gateway:
    """The server of an event loop, listening on the address `host`. See the module's text."""

    def __init__(self, host: str) -> None:
        self.sessions: dict[str, Session] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With the protocol named, asyncio turns off Nagle's delay, which would be 40 ms an answer.
        self.socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind((host, 0))
        self.socket.listen(2048)
        near = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        self.base_url = f"http://{near}:{self.socket.getsockname()[1]}/v1"
        for name in ("NO_PROXY", "no_proxy"):  # clients here would look for this machine behind the network's proxy
            os.environ[name] = ",".join(dict.fromkeys([*filter(None, os.environ.get(name, "").split(",")), near]))
        config = uvicorn.Config(
            _app(self), log_level="warning", access_log=False, lifespan="off", loop="none", http=_Connection
        )
        self.server = _Server(config)
        self.task = asyncio.ensure_future(self.server.serve(sockets=[self.socket]))

    @contextlib.contextmanager
    def session(self, trajectory: Trajectory) -> Iterator[Session]:
        """A key that lives as long as the block."""
        session = Session(trajectory)
        self.sessions[session.key] = session
        try:
            yield session
        finally:
            del self.sessions[session.key]

    def of(self, request: Request) -> Session:
        """Whose request it is. Raises Refused: nobody's."""
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        session = self.sessions.get(key.strip()) if kind.lower() == "bearer" else None
        if session is None or session.over.done():
            raise Refused(NO_KEY, 401, "invalid_api_key")
        return session

    async def close(self) -> None:
        """End the server."""
        self.server.should_exit = self.server.force_exit = True
        await asyncio.wait({self.task}, timeout=10)


_gateways: weakref.WeakKeyDictionary[Any, dict[str, Gateway]] = weakref.WeakKeyDictionary()


def gateway(host: str) -> Gateway:
    """The gateway of the running event loop, started when it is first asked for."""
    here = _gateways.setdefault(asyncio.get_running_loop(), {})
    if host not in here or here[host].task.done():
        here[host] = Gateway(host)
        logger.info("the gateway for agents listens on %s", here[host].base_url)
    return here[host]


def _app(gateway: Gateway) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def chat(request: Request) -> Response:
        return await _answered(gateway, request, chat=True)

    async def completions(request: Request) -> Response:
        return await _answered(gateway, request, chat=False)

    async def models(request: Request) -> Response:
        try:
            settings = gateway.of(request).trajectory.settings
        except Refused as refused:
            return _refusal(refused)
        names = dict.fromkeys([settings.agent_id, *settings.agents])
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "verl_ext"} for name in names]
        return JSONResponse({"object": "list", "data": data})

    def route(path: str, answer: Callable[[Request], Awaitable[Response]], method: str) -> None:
        app.add_api_route(path, answer, methods=[method], response_model=None)

    route("/v1/chat/completions", chat, "POST")
    route("/v1/completions", completions, "POST")
    route("/v1/models", models, "GET")
    return app


def _refusal(refused: Refused) -> Response:
    # The rest of a body that nobody reads is not waited for, and what was refused once will be again.
    headers = {"connection": "close", "x-should-retry": "false"}
    return JSONResponse(refused.body(), refused.status, headers=headers)


async def _answered(gateway: Gateway, request: Request, chat: bool) -> Response:
    session = None
    try:
        session = gateway.of(request)
        attempt, answer = await _answer(session, request, chat)
    except Refused as refused:
        if session is not None:
            session.refused += 1
        return _refusal(refused)
    session.failed = None
    if attempt.lost or await request.is_disconnected():
        session.lose(attempt)
    request.scope[ANSWERED] = session, attempt
    if answer.asked.stream:
        # In one piece: of one in chunks OpenAI's client leaves the end, after the last event, unread.
        return Response("".join(answer.events()), media_type="text/event-stream")
    return JSONResponse(answer.whole())


async def _answer(session: Session, request: Request, chat: bool) -> tuple[Attempt, Answer]:
    session.begin()
    body = await session.body(request)
    asked = parse(body, request.headers.get("x-agent-id"), chat, session.trajectory.runs)
    attempt = await session.attempt(request, asked)
    try:
        answer = await session.trajectory.answer(asked)
        attempt.name = answer.id
        return attempt, answer
    except Refused:
        raise
    except OrchestraFailure as failure:
        session.failed = failure
        if failure.reason == OVERLONG:
            raise Refused(str(failure), 400, "context_length_exceeded") from None
        raise Refused(str(failure), 504 if failure.reason == ENGINE_TIMEOUT else 400, failure.reason) from None
    except asyncio.CancelledError:
        # The trajectory has ended while the engine was at work; only the server's own end cancels this task.
        if getattr(asyncio.current_task(), "cancelling", lambda: False)():
            raise
        raise Refused(NO_KEY, 401, "trajectory_ended") from None
    except Exception as error:
        session.end("engine", f"{type(error).__name__}: {error}")
        raise Refused("the rollout engine failed", 500, "engine") from error
    finally:
        if not (attempt.name or attempt.lost):
            session.attempts.remove(attempt)
