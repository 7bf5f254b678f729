# SPDX-License-Identifier: Apache-2.0
"""Runs a user's agent beside the event loop: a function in a thread of its own, or a command in a process group.

Neither can hold up the worker: a function that blocks, also an ``async`` one, blocks its thread alone. A thread cannot
be killed, so a function that outlives its trajectory is left behind, with a key that is dead
(`verl_ext.rollout.shared.threads`); a command is killed with all that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import numbers
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from verl_ext.rollout.gateway.settings import GatewaySettings
from verl_ext.rollout.orchestra.agents import OrchestraFailure
from verl_ext.rollout.orchestra.core import Outcome, Task, Team
from verl_ext.sandbox.program import ProgramCage

AGENT_ERROR = "agent_error"  # the agent raised, ended with an exit code, or gave no result that can be used
AGENT_TIMEOUT = "agent_timeout"  # no end within agent_timeout_s
MAX_BYTES = "max_bytes"  # it sent, or a command wrote, more than max_bytes

LAST = 1 << 20
"""Bytes of a command's output that are kept, from its end."""
LEFT_BEHIND_S = 1.0
"""Seconds that a command's outputs may stay open after its end: something that it started holds them."""
RESULT = ("reward", "answer", "rewards", "info")


@dataclass(frozen=True)
class Door:
    """Where an agent calls, and how it is known: what its function is given."""

    base_url: str
    api_key: str
    model: str


def plain_task(task: Task) -> dict[str, Any]:
    """The task as an agent gets it."""
    return {
        "messages": [dict(message) for message in task.messages],
        "ground_truth": task.ground_truth,
        "data_source": task.data_source,
        "extra_info": dict(task.extra_info),
    }


class Playing:
    """One call of an agent's function in a thread, which can be told to stop if it is ``async``."""

    def __init__(self, function: Callable[..., Any], task: Mapping[str, Any], door: Door) -> None:
        self.function, self.task, self.door = function, task, door
        self._work: asyncio.Task[Any] | None = None
        self._stopped = False

    def run(self) -> Any:
        """Called in the thread."""
        door = self.door
        result = self.function(self.task, base_url=door.base_url, api_key=door.api_key, model=door.model)
        return asyncio.run(self._wait(result)) if inspect.isawaitable(result) else result

    async def _wait(self, result: Any) -> Any:
        self._work = asyncio.ensure_future(result)
        if self._stopped:
            self._work.cancel()
        return await self._work

    def stop(self) -> None:
        """From another thread: cancel it where it awaits."""
        self._stopped = True
        work = self._work
        if work is not None:
            with contextlib.suppress(RuntimeError):  # its event loop has ended
                work.get_loop().call_soon_threadsafe(work.cancel)


class Said(asyncio.SubprocessProtocol):
    """The ends of what a command writes to its outputs.

    Not asyncio's own streams: a process whose stream has stopped reading is never seen to end, and one that leaves a
    child with its output open isn't either (Python 3.11).

    Attributes:
        ended: the process has.
        enough: it has ended or written too much.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.ends, self.seen = {1: b"", 2: b""}, {1: 0, 2: 0}
        self.too_much = False
        self.ended, self.enough = asyncio.Event(), asyncio.Event()
        self._closed = asyncio.Event()
        self.output = Output(self)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.seen[fd] += len(data)
        self.ends[fd] = (self.ends[fd] + data)[-LAST:]
        if self.seen[fd] > self.max_bytes:
            self.too_much = True
            self.enough.set()

    def process_exited(self) -> None:
        self.ended.set()
        self.enough.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()

    async def closed(self) -> None:
        """Until it has ended and nobody can write to its outputs any more."""
        await self._closed.wait()
        await self.output.closed.wait()

    def text(self, fd: int) -> str:
        return self.ends[fd].decode("utf-8", "replace")


class Output(asyncio.Protocol):
    """The standard output of a command, where its result comes from: a socket, and no pipe as asyncio would make.

    What the command starts could open a pipe once more, in /proc under the command's number, and write a result of its
    own. The kernel opens no socket there.
    """

    def __init__(self, said: Said) -> None:
        self.said, self.closed = said, asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.said.pipe_data_received(1, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


async def run_command(chosen: GatewaySettings, task: Mapping[str, Any], door: Door) -> Any:
    """The result of ``verl_ext.gateway.command``: the last line of its standard output, as JSON. It is killed when this
    is cancelled.

    Raises OrchestraFailure: it can't be started, failed, wrote too much, or its last line is no JSON.
    """
    command = chosen.command or ()
    named = {"OPENAI_BASE_URL": door.base_url, "OPENAI_API_KEY": door.api_key, "OPENAI_MODEL": door.model}
    place: contextlib.AbstractContextManager[tuple[Sequence[str], Mapping[str, str]]]
    place = contextlib.nullcontext((command, os.environ))
    if chosen.cage == "required":
        place = ProgramCage(urlsplit(door.base_url).port or 80, chosen.readable, chosen.memory_mb).command(command)
    with place as (line, environment):
        try:
            code, said = await _to_its_end(line, {**environment, **named}, task, chosen.max_bytes)
        except OSError as error:
            raise OrchestraFailure(AGENT_ERROR, f"{command[0]} can't be started: {error}") from error
    if said.too_much:
        raise OrchestraFailure(MAX_BYTES, f"the command wrote more than verl_ext.gateway.max_bytes={chosen.max_bytes}")
    if code != 0:
        raise OrchestraFailure(AGENT_ERROR, f"{command[0]} ended with code {code}: {said.text(2)[-2000:].strip()}")
    lines = [line for line in said.text(1).splitlines() if line.strip()]
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError, RecursionError) as error:
        last = lines[-1][:200] if lines else "nothing"
        raise OrchestraFailure(
            AGENT_ERROR, f"the last line that {command[0]} wrote must be its result as JSON; it is {last}"
        ) from error


async def _to_its_end(
    line: Sequence[str], environment: Mapping[str, str], task: Mapping[str, Any], max_bytes: int
) -> tuple[int | None, Said]:
    """The exit code of a program that is given the task, and what it has said; its process group is gone then."""
    said, loop = Said(max_bytes), asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    output, _ = await loop.connect_read_pipe(lambda: said.output, ours)
    with contextlib.closing(output):
        with theirs:
            process, _ = await loop.subprocess_exec(
                lambda: said, *line, stdout=theirs.fileno(), env=environment, start_new_session=True
            )
        try:
            stdin: Any = process.get_pipe_transport(0)
            stdin.write(json.dumps(task, default=_plain).encode() + b"\n")  # it need not read its task
            stdin.close()
            await said.enough.wait()
            if not said.too_much:
                with contextlib.suppress(TimeoutError):  # something that it has left behind holds its outputs open
                    await asyncio.wait_for(said.closed(), LEFT_BEHIND_S)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.get_pid(), signal.SIGKILL)  # also what it has left behind
            process.close()
            await said.ended.wait()
    return process.get_returncode(), said


def _plain(value: Any) -> Any:
    """What JSON does not know: arrays of the data become lists, other things text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def outcome_of(result: Any, team: Team, call_ids: Mapping[str, Any]) -> Any:
    """What an agent returned, as an orchestration would return it; rewards of calls are given to the calls.

    Args:
        result: a reward (number), an answer for the run's reward function (text), or a mapping with ``reward``,
            ``answer``, ``rewards`` (a list in the order of the calls, or by the ids of the completions) and ``info``.
        team: the trajectory.
        call_ids: calls by the id of their completion.

    Raises:
        OrchestraFailure: it is none of these.
    """
    if isinstance(result, numbers.Real | str):
        return result
    if not isinstance(result, Mapping) or set(result) - set(RESULT) or not set(result) & set(RESULT[:3]):
        raise OrchestraFailure(
            AGENT_ERROR,
            f"the agent returned {result!r:.200}; it returns a reward (number), an answer (text), or a mapping with "
            "reward, answer or rewards, and perhaps info",
        )
    rewards = result.get("rewards")
    if isinstance(rewards, Mapping):
        unknown = [key for key in rewards if key not in call_ids]
        if unknown:
            raise OrchestraFailure(AGENT_ERROR, f"rewards names {unknown[0]!r:.80}, which is no id of a completion")
        for key, reward in rewards.items():
            call_ids[key].reply.reward = reward
    elif rewards is not None:
        calls = [call for call in team.calls if call.received]
        if not isinstance(rewards, list | tuple) or len(rewards) != len(calls):
            raise OrchestraFailure(AGENT_ERROR, f"rewards is {rewards!r:.80} for {len(calls)} calls; give one for each")
        for call, reward in zip(calls, rewards, strict=True):
            call.reply.reward = reward
    if result.get("reward") is None and result.get("answer") is None:
        return None  # the sum of the rewards of its calls
    answer, info = result.get("answer"), result.get("info") or {}
    if not isinstance(info, Mapping):
        raise OrchestraFailure(AGENT_ERROR, f"info is {info!r:.80}; give numbers by name")
    figures = {str(key): float(value) for key, value in info.items() if isinstance(value, numbers.Real)}
    return Outcome(result.get("reward"), None if answer is None else str(answer), figures)
