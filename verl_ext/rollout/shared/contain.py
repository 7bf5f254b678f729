# SPDX-License-Identifier: Apache-2.0
"""Nothing that a trajectory runs ends more than its trajectory.

Tools, environments, orchestrations and reward functions act on what a model wrote. What they raise is caught as an
``Exception`` and counted; but a ``SystemExit`` or ``KeyboardInterrupt`` leaves any asyncio task through the event loop
and so ends the worker, and a ``CancelledError`` of their own looks as if somebody had cancelled the trajectory.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Contained(RuntimeError):
    """Code that a trajectory runs raised what would have ended more than the trajectory."""


def _task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop in this thread
        return None


@contextmanager
def contained(what: str) -> Iterator[None]:
    """A block that raises ordinary exceptions only, or is cancelled from outside.

    Args:
        what: runs in it, for the message.

    Raises:
        Contained: in place of any other ``BaseException``, its cause.
    """
    task = _task()
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and task is not None:
            # Python 3.10 cannot tell who has cancelled.
            if getattr(task, "cancelling", lambda: True)():
                raise
        if isinstance(error, GeneratorExit) and _task() is not task:  # a coroutine that is thrown away
            raise
        raise Contained(f"{what} raised {type(error).__name__}: {error}") from error


def contained_reward_function(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """verl's ``get_custom_reward_fn(config)``, whose function raises ordinary exceptions only."""

    @functools.wraps(get)
    def get_custom_reward_fn(config: Any) -> Any:
        function = get(config)
        if function is None:
            return None
        if inspect.iscoroutinefunction(function):

            async def score_async(*args: Any, **kwargs: Any) -> Any:
                with contained("the reward function"):
                    return await function(*args, **kwargs)

            return score_async

        def score(*args: Any, **kwargs: Any) -> Any:
            with contained("the reward function"):
                return function(*args, **kwargs)

        return score

    return get_custom_reward_fn
