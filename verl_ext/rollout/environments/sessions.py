# SPDX-License-Identifier: Apache-2.0
"""What an agent loop plays, and environments whose methods are coroutines, which are played in its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from verl_ext.rollout.environments import protocol
from verl_ext.rollout.environments.host import explain
from verl_ext.rollout.environments.panel import check_task
from verl_ext.rollout.environments.protocol import EnvironmentFault, EnvironmentUnavailable, Observation, Step
from verl_ext.rollout.shared.contain import contained

T = TypeVar("T")


class Session(Protocol):
    """One environment, played by one trajectory: ``reset`` once, then ``step``, then ``close``."""

    async def reset(self, seed: int, task: str = "") -> Observation:
        """Begin the episode of a seed, whose fingerprint is `task` (see :mod:`verl_ext.rollout.environments.panel`).

        Raises:
            EnvironmentFault: the environment raised, hung, ended, or returned garbage.
            EnvironmentUnavailable: no trajectory of the run can use it, or the seed is another task here.
        """

    async def step(self, action: str) -> Step:
        """Act. Raises as :meth:`reset` does."""

    async def close(self) -> None:
        """Give the environment back. Never raises."""


class LoopSession(Session):
    """An environment with coroutine methods."""

    def __init__(self, kind: type, kwargs: Mapping[str, Any], reset_timeout_s: float, step_timeout_s: float) -> None:
        self.kind, self.kwargs = kind, dict(kwargs)
        self.reset_timeout_s, self.step_timeout_s = reset_timeout_s, step_timeout_s
        self.environment: Any = None

    async def _call(self, name: str, argument: Any, limit: float, check: Callable[[Any], T]) -> T:
        async def call() -> Any:
            with contained(f"{self.kind.__name__}.{name}"):
                if self.environment is None:
                    self.environment = self.kind(**self.kwargs)
                return await getattr(self.environment, name)(argument)

        try:
            return check(await asyncio.wait_for(call(), limit))
        except asyncio.TimeoutError as error:
            raise EnvironmentFault(protocol.TIMEOUT, f"{name} did not end within {limit} s") from error
        except (EnvironmentFault, EnvironmentUnavailable):
            raise
        except Exception as error:
            raise EnvironmentFault(protocol.ERROR, explain(error)) from error

    async def reset(self, seed: int, task: str = "") -> Observation:
        seen = await self._call("reset", seed, self.reset_timeout_s, protocol.reset_result)
        check_task(self.environment, seed, seen, task)
        return seen

    async def step(self, action: str) -> Step:
        return await self._call("step", action, self.step_timeout_s, protocol.step_result)

    async def close(self) -> None:
        async def end() -> None:
            with contained("close"):
                close = getattr(self.environment, "close", None)
                result = close() if close is not None else None
                if asyncio.iscoroutine(result):
                    await result

        try:
            await asyncio.wait_for(end(), self.step_timeout_s)
        except Exception:
            pass  # the trajectory is complete; there is nobody left to tell
        self.environment = None
