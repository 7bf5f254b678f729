# SPDX-License-Identifier: Apache-2.0
"""Agents and orchestras by name: the decorators that make them, and how a run finds them."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from verl_ext.integration.settings.options import OptionError, coerce, near
from verl_ext.rollout.orchestra.agents import POLICY, Agent, Example, as_examples

SHIPPED = {
    "solver_verifier": "verl_ext.rollout.orchestra.solver_verifier",
    "search": "verl_ext.rollout.orchestra.search",
    "planner_worker": "verl_ext.rollout.orchestra.planner_worker",
    "textarena_game": "verl_ext.rollout.orchestra.textarena_game",
    "python": "verl_ext.rollout.orchestra.python_turns",
}
"""Orchestras of this package and the modules that register them."""


@dataclass(frozen=True)
class Orchestra:
    """A registered team.

    Attributes:
        name: what the data column ``orchestra`` and ``verl_ext.orchestra.name`` say.
        play: ``async def (task, *agents, **options)``.
        agents: the team, in the order of the parameters.
        options: annotation of each keyword-only parameter.
        defaults: their default values.
        summary: first line of the docstring.
        lowest_reward: see `orchestra`.
    """

    name: str
    play: Callable[..., Awaitable[Any]]
    agents: tuple[Agent, ...]
    options: Mapping[str, Any]
    defaults: Mapping[str, Any]
    summary: str = ""
    lowest_reward: float | None = None


_orchestras: dict[str, Orchestra] = {}


@overload
def agent(name: Callable[[str], Any]) -> Agent: ...
@overload
def agent(
    name: str | None = None,
    *,
    role: str | None = None,
    tools: Sequence[str] = (),
    model: str = POLICY,
    max_tokens: int | None = None,
    ends: Callable[[str], int | None] | None = None,
    examples: Sequence[Example | Mapping[str, str]] = (),
) -> Callable[[Callable[[str], Any]], Agent]: ...
def agent(
    name: str | Callable[[str], Any] | None = None,
    *,
    role: str | None = None,
    tools: Sequence[str] = (),
    model: str = POLICY,
    max_tokens: int | None = None,
    ends: Callable[[str], int | None] | None = None,
    examples: Sequence[Example | Mapping[str, str]] = (),
) -> Agent | Callable[[Callable[[str], Any]], Agent]:
    """Make an agent of a function that reads its answers. The docstring is the agent's role.

    ::

        @agent
        def solver(text):
            "Solve the problem. End with the number alone in the last line."
            return int(text.splitlines()[-1])      # ValueError, or None: not a valid action

    Args:
        name: the agent's name; the function's by default.
        role: the role prompt; the docstring by default.
        tools: names of tools that it may call.
        model: name of the model that answers.
        max_tokens: bound on its answers, on top of ``rollout.response_length``.
        ends: where an answer is over; see `Agent`.
        examples: demonstrations, a list of ``{user, assistant}``: chat turns between the role and a call's messages.

    Returns:
        An `Agent`, which orchestras take as a parameter of its name.

    Raises:
        ValueError: a name, bound or example that can't be used; the message names it.
    """

    def make(read: Callable[[str], Any], named: str | None = None) -> Agent:
        prompt = inspect.cleandoc(read.__doc__ or "") if role is None else role
        shown = as_examples(examples)
        return Agent(named or read.__name__, prompt, read, tuple(tools), model, max_tokens, ends, shown)

    if callable(name):
        return make(name)
    return lambda read: make(read, name)


def orchestra(
    name: str, agents: Sequence[Agent] | None = None, *, lowest_reward: float | None = None
) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Awaitable[Any]]]:
    """Register an orchestration under a name.

    ::

        @orchestra("guess_and_check")
        async def guess_and_check(task, guesser, checker, *, rounds: int = 2):
            ...

    The first parameter is the `Task`; the other positional ones are the team's agents, found by name in the module
    (or in `agents`); keyword-only parameters are options with a type and a default, set by
    ``verl_ext.orchestra.options``. What it may return: see `Outcome`, or a reward (number), an answer for the run's
    reward function (text), or None for the sum of its calls' rewards.

    Args:
        name: the orchestra's name.
        agents: the team's agents; by default those of the module.
        lowest_reward: where agents have a reward each, ``Outcome(rewards=...)``, the least that one can get. Each agent
            of a trajectory that fails gets it, or ``failed_reward`` if that is lower.

    Raises:
        TypeError: it is not an async function of that form.
        ValueError: another orchestra has the name, or an agent is not defined.
    """

    def register(play: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        made = _orchestra(name, play, agents, lowest_reward)
        known = _orchestras.get(name)
        if known is not None and (known.play.__module__, known.play.__qualname__) != (
            play.__module__,
            play.__qualname__,
        ):
            raise ValueError(
                f"the orchestra {name!r} is defined twice, in {known.play.__module__} and {play.__module__}; rename one"
            )
        _orchestras[name] = made
        return play

    return register


def _orchestra(
    name: str, play: Callable[..., Awaitable[Any]], agents: Sequence[Agent] | None, lowest_reward: float | None
) -> Orchestra:
    if not inspect.iscoroutinefunction(play):
        raise TypeError(f"orchestra {name!r}: {play.__qualname__} must be an `async def`")
    parameters = list(inspect.signature(play).parameters.values())
    if not parameters or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise TypeError(f"orchestra {name!r} takes (task, agents..., *, options...), without *args and **kwargs")
    if agents is None:
        agents = [one for one in getattr(play, "__globals__", {}).values() if isinstance(one, Agent)]
    known = {one.name: one for one in agents}
    team = []
    for parameter in [p for p in parameters if p.kind is not p.KEYWORD_ONLY][1:]:
        if parameter.name not in known:
            raise ValueError(
                f"orchestra {name!r} takes an agent {parameter.name!r}, which {play.__module__} does not define above "
                f"it (it has: {', '.join(known) or 'none'}). Decorate its reader with @agent, or import it."
            )
        team.append(known[parameter.name])
    if not team:
        raise TypeError(f"orchestra {name!r} has no agent: add a parameter named like one, after the task")
    hints = typing.get_type_hints(play, include_extras=True)
    options, defaults = {}, {}
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.default is parameter.empty or parameter.name not in hints:
                raise TypeError(f"orchestra {name!r}: the option {parameter.name} needs a type and a default")
            options[parameter.name] = hints[parameter.name]
            defaults[parameter.name] = parameter.default
    summary = (inspect.getdoc(play) or "").partition("\n")[0]
    return Orchestra(name, play, tuple(team), options, defaults, summary, lowest_reward)


def find(name: str, modules: Sequence[str] = ()) -> Orchestra:
    """The orchestra registered as `name`, after the import of `modules`, which define orchestras.

    Raises OptionError: a module can't be imported, or no orchestra has the name; the known ones are listed.
    """
    for path in modules:
        try:
            importlib.import_module(path)
        except ImportError as error:
            raise OptionError(
                f"verl_ext.orchestra.modules names {path!r}, which can't be imported ({error}). It must be importable "
                "in every process of the run: install it, or put its folder on PYTHONPATH."
            ) from error
    if name not in _orchestras and name in SHIPPED:
        importlib.import_module(SHIPPED[name])
    if name not in _orchestras:
        known = sorted({*_orchestras, *SHIPPED})
        raise OptionError(
            f"no orchestra is called {name!r}.{near(name, known)} Known: {', '.join(known)}. Your own: name its module "
            "in verl_ext.orchestra.modules."
        )
    return _orchestras[name]


def check_options(team: Orchestra, given: Mapping[str, Any]) -> dict[str, Any]:
    """The orchestra's options: defaults, replaced by what is given.

    Raises OptionError: unknown option or wrong type; the message names the key and the choices.
    """
    where = "verl_ext.orchestra.options"
    values = dict(team.defaults)
    for key, value in given.items():
        if key not in team.options:
            raise OptionError(
                f"{where}.{key} is not an option of the orchestra {team.name}.{near(key, team.options)} Known options: "
                f"{', '.join(team.options) or 'none'}."
            )
        values[key] = coerce(value, team.options[key], f"{where}.{key}")
    return values
