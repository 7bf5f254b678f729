# SPDX-License-Identifier: Apache-2.0
"""What an environment is: the types that it takes and returns, and the checks of what it returned.

An environment class has

``__init__(**kwargs)``
    keyword arguments from ``verl_ext.environment.kwargs`` and the row's ``extra_info.environment_kwargs``; plain data.
``reset(seed: int) -> Observation | str``
    begin an episode. The same seed gives the same episode: all rollouts of a prompt get the same seed. Gymnasium's
    pair ``(observation, info)`` is accepted as well.
``step(action: str) -> (Observation | str, reward, done, info)``
    act. Gymnasium's five values (``terminated`` and ``truncated`` apart) are accepted as well. ``info`` is a dict of
    plain data; ``info["success"]`` (or ``info["won"]``) says whether the episode's goal is reached. Without it an
    episode counts as a success if its rewards sum to more than 0.
``close()``
    optional.
``identify(seed: int)``
    optional: plain data that is the same on every machine where, and only where, the seed's task is the same, such as a
    game's name and checksum; asked after a reset with that seed. Without it, or where it is None, tasks are told apart
    by their first observation (:mod:`verl_ext.rollout.environments.panel`).

and optionally the class attributes

``invalid_action``
    ``"pass"``: an action that is not valid is handed to the environment as it is, which answers in its own words
    (text games; the default). ``"noop"``: the environment has no words for it; the step is spent, nothing happens,
    the reward is the observation's ``noop_reward`` (0).
``reuse``
    True if one object can be reset again for another trajectory, because it is costly to make. Default False.
``requires``
    packages that must be importable, ``{import name: what to install}``.
``preload(**kwargs)``
    class method that imports and loads what all objects share. It runs once in the process from which the
    environments' processes are forked, so it must start no threads.

The methods are ordinary functions, which are run in processes of their own, or coroutines, which are run in the
agent loop's event loop (see :mod:`verl_ext.rollout.environments.runner`). In such a process ``__init__`` (and
``preload``) is called in the run's working folder, ``reset`` and ``step`` in one that is empty at first, the episode's
own, and removed in the end: make relative paths absolute in ``__init__``.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verl_ext.rollout.shared.scores import storable

INVALID_ACTION = ("noop", "pass")

#: An observation, an action list and what comes with them, as JSON text.
MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class Observation:
    """What the model gets to see.

    Attributes:
        text: the raw observation, without history or instructions.
        actions: the admissible actions; None where any text may be one. A part in angle brackets stands for any text:
            ``search[<query>]``.
        task: what to do in this episode, read from the first observation.
        anchor: what makes two situations equal for HGPO and GiGPO (plain data); None: the text.
        noop_reward: what a step earns that an invalid action spends here (``invalid_action`` ``noop``). Where every
            step costs something, such a one has to, or nonsense is worth more than play.
    """

    text: str
    actions: tuple[str, ...] | None = None
    task: str = ""
    anchor: Any = None
    noop_reward: float = 0.0

    @property
    def anchor_obs(self) -> Any:
        """The turn field ``anchor_obs``."""
        return self.text if self.anchor is None else self.anchor


@dataclass(frozen=True)
class Step:
    """What a step led to: `reward` is finite, in float32 too, `info` plain data."""

    observation: Observation
    reward: float
    done: bool
    info: dict[str, Any] = field(default_factory=dict)


class EnvironmentFault(Exception):
    """An environment failed; its trajectory ends and the run goes on.

    Attributes:
        reason: one of :data:`FAULTS`, counted in the metrics.
        detail: what happened, for a person.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


ERROR = "environment_error"
TIMEOUT = "environment_timeout"
DIED = "environment_died"
GARBAGE = "environment_garbage"
FAULTS = (ERROR, TIMEOUT, DIED, GARBAGE)
"""It raised; it did not answer in time; its process ended; it returned something that is no observation or reward."""


class EnvironmentUnavailable(RuntimeError):
    """An environment cannot be used on this machine at all: a package or its data is missing, or its settings are
    wrong. Unlike a fault this ends the run, since every trajectory would meet it."""


def _garbage(detail: str) -> EnvironmentFault:
    return EnvironmentFault(GARBAGE, detail)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return text if len(text) <= 200 else text[:200] + "..."


def _simplify(value: Any) -> Any:
    """For JSON: numpy's scalars and arrays, and anything else with ``tolist``, as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} is no plain data")


def plain(value: Any, what: str) -> Any:
    """`value` as JSON would give it back: numbers, strings, lists, dicts.

    Raises EnvironmentFault: it holds something else, a NaN or an infinity, or is larger than 16 MiB.
    """
    try:
        text = json.dumps(value, default=_simplify, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _garbage(f"{what} is {_shown(value)}: {error}") from error
    if len(text) > MAX_BYTES:
        raise _garbage(f"{what} takes {len(text)} bytes; at most {MAX_BYTES} are allowed")
    return json.loads(text)


def _number(value: Any, what: str) -> float:
    number = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise _garbage(f"{what} {_shown(value)}; expected a number")
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if not storable(number):
        raise _garbage(f"{what} {_shown(value)}; expected a finite number, in float32 too")
    return number


def observation(value: Any, where: str) -> Observation:
    """Check what an environment returned as an observation. Raises EnvironmentFault: it is none."""
    if isinstance(value, str):
        value = Observation(value)
    if not isinstance(value, Observation):
        raise _garbage(f"{where} returned {_shown(value)} as its observation; expected a str or an Observation")
    if value.actions is not None and not isinstance(value.actions, str) and hasattr(value.actions, "__iter__"):
        value = replace(value, actions=tuple(value.actions))  # an iterator can be read once
    try:
        "".join((value.text, value.task, *(value.actions or ()))).encode()
    except UnicodeEncodeError as error:
        raise _garbage(f"{where} returned text that is no Unicode: {error}") from error
    except TypeError:
        pass  # told below
    if not isinstance(value.text, str):
        raise _garbage(f"{where} returned an Observation whose text is {_shown(value.text)}; expected a str")
    actions = value.actions
    if actions is not None:
        if isinstance(actions, str) or not hasattr(actions, "__iter__"):
            raise _garbage(f"{where} returned the actions {_shown(actions)}; expected a list of str or None")
        bad = [action for action in actions if not isinstance(action, str)]
        if bad:
            raise _garbage(f"{where} returned {_shown(bad[0])} as an action; expected a str")
    if not isinstance(value.task, str):
        raise _garbage(f"{where} returned an Observation whose task is {_shown(value.task)}; expected a str")
    anchor = plain(value.anchor, f"the anchor of {where}")
    if max(len(value.text), len(value.task), sum(map(len, actions or ()))) > MAX_BYTES:
        raise _garbage(f"{where} returned more than {MAX_BYTES} characters")
    noop_reward = _number(value.noop_reward, f"{where} returned an Observation whose noop_reward is")
    return Observation(value.text, actions, value.task, anchor, noop_reward)


def reset_result(value: Any) -> Observation:
    """Check what ``reset`` returned. Raises EnvironmentFault: it is no observation."""
    if isinstance(value, tuple) and len(value) == 2:
        value = value[0]
    return observation(value, "reset")


def _truth(value: Any, name: str) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise _garbage(f"step returned {name}={_shown(value)}; expected True or False")


def step_result(value: Any) -> Step:
    """Check what ``step`` returned.

    Raises EnvironmentFault: it is not (observation, reward, done, info), or the reward is not finite in float32.
    """
    if not isinstance(value, tuple) or len(value) not in (4, 5):
        raise _garbage(f"step returned {_shown(value)}; expected (observation, reward, done, info)")
    seen = observation(value[0], "step")
    reward = _number(value[1], "step returned the reward")
    info = {} if value[-1] is None else value[-1]
    if not isinstance(info, Mapping):
        raise _garbage(f"step returned the info {_shown(info)}; expected a dict")
    info = {str(key): entry for key, entry in info.items()}
    if len(value) == 5:
        terminated, truncated = _truth(value[2], "terminated"), _truth(value[3], "truncated")
        info.setdefault("truncated", truncated)
        done = terminated or truncated
    else:
        done = _truth(value[2], "done")
    return Step(seen, reward, done, plain(info, "the info of step"))


def to_wire(value: Observation | Step) -> dict[str, Any]:
    """Plain data for :func:`from_wire`."""
    if isinstance(value, Step):
        wire = to_wire(value.observation)
        return {**wire, "reward": value.reward, "done": value.done, "info": value.info}
    actions = None if value.actions is None else list(value.actions)
    return {**vars(value), "actions": actions}


def from_wire(wire: Any) -> Observation | Step:
    """The inverse of :func:`to_wire`, checked again: who sends may have been anything.

    Raises EnvironmentFault: it is neither an observation nor a step.
    """
    try:
        actions = wire["actions"]
        actions = None if actions is None else tuple(actions)
        seen = Observation(wire["text"], actions, wire["task"], wire["anchor"], wire["noop_reward"])
        given = (seen, wire["reward"], wire["done"], wire["info"]) if "reward" in wire else None
    except (KeyError, TypeError) as error:
        raise _garbage(f"its process sent {_shown(wire)}: {type(error).__name__}: {error}") from error
    return observation(seen, "the process") if given is None else step_result(given)
