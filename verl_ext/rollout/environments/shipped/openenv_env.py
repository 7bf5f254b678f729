# SPDX-License-Identifier: Apache-2.0
"""Environments of OpenEnv, played on a server that runs already, over WebSocket; a trajectory is a session.

This speaks the server's protocol itself: `openenv-core`, its client included, wants versions that verl can't have.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import ExitStack, suppress
from typing import Any

from pydantic import BaseModel

from verl_ext.rollout.environments import protocol
from verl_ext.rollout.environments.protocol import EnvironmentFault, EnvironmentUnavailable, Observation

with suppress(ImportError):  # `requires` says what brings it
    from websockets.exceptions import ConnectionClosed, WebSocketException
    from websockets.sync.client import connect


class _Answer(BaseModel):
    observation: dict[str, Any] | None = None
    reward: float | None = None
    done: bool = False
    code: str = "no observation"
    message: str = ""
    errors: list[dict[str, Any]] = []


class OpenEnvEnvironment:
    """An environment of an OpenEnv server, which hands it the seed if its ``reset`` takes one.

    Args:
        base_url: of the server, such as ``http://127.0.0.1:8000``.
        action_key: the field of the action that the model's text is; None: the text is the action, a JSON object.
        observation_key: the field of the observation that is shown; None: all of them, by name, but ``metadata``,
            where an environment keeps what is not for its player (servers of openenv 0.10 send it).
        wait_s: seconds to wait for a session while the server has none free.
    """

    requires = {"websockets": "pip install 'verl-ext[openenv]'"}

    def __init__(
        self, base_url: str, action_key: str | None = "message", observation_key: str | None = None, wait_s: float = 60
    ) -> None:
        self.base_url, self.wait_s, self.session = base_url, wait_s, ExitStack()
        self.action_key, self.observation_key = action_key, observation_key

    def _connect(self) -> Any:
        url = re.sub("^http", "ws", self.base_url.rstrip("/")) + "/ws"
        try:  # without pings: how long the server may be busy is `step_timeout_s`
            return self.session.enter_context(connect(url, max_size=protocol.MAX_BYTES, ping_interval=None, proxy=None))
        except (OSError, WebSocketException) as error:
            where = f"verl_ext.environment.kwargs.base_url={self.base_url!r}"
            remedy = "Start it there, or correct the address."
            raise EnvironmentUnavailable(f"no OpenEnv server answers at {where}: {error}. {remedy}") from error

    def _ask(self, kind: str, data: Any) -> _Answer:
        try:
            with suppress(ConnectionClosed):  # what the server has said before that is still to be read
                self.socket.send(json.dumps({"type": kind, "data": data}))
            return _Answer.model_validate(json.loads(self.socket.recv())["data"])
        except ConnectionClosed as error:
            raise EnvironmentFault(protocol.DIED, f"{self.base_url} ended the session at {kind}: {error}") from error
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise EnvironmentFault(protocol.GARBAGE, f"{self.base_url} answered {kind} wrongly: {error}") from error

    def _shown(self, answer: _Answer) -> Observation:
        seen, key = answer.observation, self.observation_key
        if seen is None:
            raise EnvironmentFault(protocol.ERROR, f"{self.base_url} says {answer.code}: {answer.message}")
        if key is not None and key not in seen:
            raise EnvironmentUnavailable(f"observation_key={key!r}: {self.base_url} shows {', '.join(seen)}")
        seen = seen if key else {name: value for name, value in seen.items() if name != "metadata"}
        texts = {name: text if isinstance(text, str) else json.dumps(text) for name, text in seen.items()}
        return Observation(texts[key] if key else "\n".join(f"{name}: {text}" for name, text in texts.items()))

    def reset(self, seed: int) -> Observation:
        until = time.monotonic() + self.wait_s
        while True:
            self.close()  # the session of the last trajectory
            self.socket = self._connect()
            answer = self._ask("reset", {"seed": seed})
            if answer.code != "CAPACITY_REACHED" or time.monotonic() > until:
                return self._shown(answer)
            time.sleep(0.2)

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        fields: Any = {self.action_key: action}
        if self.action_key is None:
            fields = action
            with suppress(ValueError, RecursionError):  # the server says what is wrong with it
                fields = json.loads(action)
        answer = self._ask("step", fields)
        if answer.code != "VALIDATION_ERROR":
            won = (answer.observation or {}).get("success")
            info = {"success": won} if isinstance(won, bool) else {}
            return self._shown(answer), answer.reward or 0.0, answer.done, info
        why = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in answer.errors)
        if self.action_key and any(one["type"] in ("missing", "extra_forbidden") for one in answer.errors):
            raise EnvironmentUnavailable(f"action_key={self.action_key!r} is no whole action of {self.base_url}: {why}")
        return Observation(f"The action is not taken: {why}"), 0.0, False, {}

    def close(self) -> None:
        self.session.close()
