# SPDX-License-Identifier: Apache-2.0
"""``verl_ext.orchestra.*``: which team plays, with what options, prompts, limits and retriever. Typed and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_ext.integration.settings import endpoints, model_options, options
from verl_ext.integration.settings.model_options import POLICY
from verl_ext.integration.settings.options import OptionError, near, select
from verl_ext.methods.options import AtLeastOne, NotPositive, Positive
from verl_ext.rollout.orchestra.agents import Agent, Example, as_examples
from verl_ext.rollout.orchestra.core import Result
from verl_ext.rollout.orchestra.registry import Orchestra, check_options, find
from verl_ext.rollout.retrieval import Retriever, make_retriever
from verl_ext.rollout.shared import mcp_tools
from verl_ext.rollout.shared.tools import ToolSettings

WHERE = "verl_ext.orchestra"


@dataclass(frozen=True)
class Limits:
    """What bounds a trajectory, of an orchestra or of the gateway's agent.

    Attributes:
        max_calls: model calls a trajectory may make.
        call_timeout_s: seconds for one model call.
        time_limit_s: seconds for one trajectory, its judgement included.
        reward_timeout_s: seconds for one judgement by the reward function.
        overlong_prompt: a prompt longer than ``rollout.prompt_length`` is shortened (``shorten``: the longest message,
            never the role or an example, loses its middle, marked ``[...]``; if it does not fit even so, the next
            longest too), or its call fails (``end``). Both are counted.
        on_failure: turns of a trajectory that failed get outcome `failed_reward` and stay samples (``zero_reward``), or
            are taken out of statistics and loss (``exclude``, ``valid_row=False``).
        failed_reward: outcome of a trajectory that failed. Set it to the lowest reward of the task or below: where a
            wrong answer earns less than 0, breaking what plays or judges would pay.
    """

    max_calls: AtLeastOne = 64
    call_timeout_s: Positive = 600.0
    time_limit_s: Positive = 3600.0
    reward_timeout_s: Positive = 60.0
    overlong_prompt: Literal["shorten", "end"] = "shorten"
    on_failure: Literal["zero_reward", "exclude"] = "zero_reward"
    failed_reward: NotPositive = 0.0


@dataclass(frozen=True)
class AgentSettings:
    """``verl_ext.orchestra.agents.<name>``: what a run changes about an agent.

    Attributes:
        role: the role prompt. Null: the agent's own.
        role_file: a text file with the role prompt; not together with `role`.
        model: name of the model that answers. Null: the agent's own.
        max_tokens: bound on its answers. Null: the agent's own.
        tools: names of tools that it may call. Null: the agent's own.
        examples: demonstrations, chat turns between the role and a call's messages: a list of ``{user, assistant}``,
            or a YAML or JSON file with such a list, or with one for each agent's name. Null: the agent's own; ``[]``:
            none.
    """

    role: str | None = None
    role_file: str | None = None
    model: str | None = None
    max_tokens: AtLeastOne | None = None
    tools: tuple[str, ...] | None = None
    examples: tuple[Example, ...] | str | None = None

    def __post_init__(self) -> None:
        if self.role is not None and self.role_file is not None:
            raise ValueError("role_file: both role and role_file are set; keep one of them")


@dataclass(frozen=True)
class OrchestraSettings(ToolSettings, Limits):
    """``verl_ext.orchestra``. Every key may also stand in the entry of an agent loop config, except that there the
    orchestra's name is called ``orchestra`` (``name`` is verl's).

    Attributes:
        name: the orchestra, unless the data column ``orchestra`` names another.
        modules: import paths of your modules with orchestras. A single path may be given as text.
        options: the orchestra's own options (keyword-only parameters).
        agents: changes to agents, by name.
        retriever: ``{kind: bm25, ...}`` or ``{kind: http, ...}``; see `verl_ext.rollout.retrieval`.
        role_as: the role prompt is a ``system`` message, or the beginning of the first ``user`` message (for chat
            templates without system messages).
    """

    name: str | None = None
    modules: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    agents: dict[str, AgentSettings] = field(default_factory=dict)
    retriever: dict[str, Any] | None = None
    role_as: Literal["system", "user"] = "system"


def read(config: Any, entry: Mapping[str, Any] | None = None) -> OrchestraSettings:
    """The settings of a run.

    Args:
        config: verl's whole config, or None.
        entry: keys of the agent loop config's entry; they win over ``verl_ext.orchestra``.

    Raises:
        OptionError: unknown key, wrong type or value out of range; the message names it.
    """
    node = _plain(select(select(config, "verl_ext"), "orchestra", {}))
    if not isinstance(node, Mapping):
        raise OptionError(f"{WHERE} must hold keys such as name and options, but it is {node!r}.")
    given = {key: _plain(value) for key, value in [*node.items(), *(entry or {}).items()] if value is not None}
    if isinstance(given.get("modules"), str):
        given["modules"] = [given["modules"]]
    read = options.read({"orchestra": given}, "orchestra", OrchestraSettings, where=WHERE)
    return dataclasses.replace(read, agents={name: _agent(name, one) for name, one in read.agents.items()})


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value


def _agent(name: str, node: Any) -> AgentSettings:
    where = f"{WHERE}.agents.{name}"
    given = dict(node) if isinstance(node, Mapping) else node
    examples = given.pop("examples", None) if isinstance(given, dict) else None
    if not isinstance(examples, str | None):
        examples = _examples(examples, where)
    return dataclasses.replace(options.read({"agent": given}, "agent", AgentSettings, where=where), examples=examples)


def _examples(given: Any, where: str) -> tuple[Example, ...]:
    try:
        return as_examples(given)
    except ValueError as error:
        raise OptionError(f"{where}.examples: {error}.") from error


def _examples_of_file(path: str, name: str, where: str) -> tuple[Example, ...]:
    """Examples of the agent `name` in a YAML or JSON file: a list, or a list for each agent's name."""
    try:
        given = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{where}.examples: {error}") from error
    except yaml.YAMLError as error:
        raise OptionError(f"{where}.examples: {path} is neither YAML nor JSON: {error}") from error
    if isinstance(given, Mapping):
        if name not in given:
            raise OptionError(
                f"{where}.examples: {path} has no examples of {name}.{near(name, given)} It has: "
                f"{', '.join(map(str, given)) or 'none'}."
            )
        given = given[name]
    return _examples(given, f"{path}: {where}")


@dataclass(frozen=True)
class Lineup:
    """An orchestra as a run plays it: options filled in, agents as overridden."""

    orchestra: Orchestra
    agents: tuple[Agent, ...]
    options: Mapping[str, Any]

    def failed(self, reward: float) -> Result:
        """What a trajectory that failed has earned, `reward` at most: no more than one that did not."""
        lowest = self.orchestra.lowest_reward
        if lowest is None:
            return Result(reward)
        lowest = min(lowest, reward)
        return Result(lowest, rewards={agent.name: lowest for agent in self.agents})

    def checked(self, result: Result) -> Result:
        """`result`, with rewards of the kind that failures have. Raises TypeError, ValueError: it has others."""
        name, lowest = self.orchestra.name, self.orchestra.lowest_reward
        if lowest is None:
            if result.rewards:
                raise TypeError(
                    "it gave a reward to each agent: say the least that one can get, for trajectories that fail, in "
                    f"@orchestra({name!r}, lowest_reward=...)"
                )
            return result
        if not result.rewards:
            raise TypeError(f"@orchestra({name!r}, lowest_reward={lowest}) must return Outcome(rewards=...)")
        for agent, reward in result.rewards.items():
            if reward < lowest:
                raise ValueError(f"the reward {reward} of agent {agent} is below lowest_reward={lowest} of {name!r}")
        return result


def line_up(settings: OrchestraSettings, name: str | None = None, models: tuple[str, ...] = (POLICY,)) -> Lineup:
    """Find the orchestra and apply what the run changes about it.

    Args:
        settings: of the run.
        name: the row's own choice, from the data column ``orchestra``. Options and agents of the settings hold for it
            as far as it has them, since another row may mean another orchestra.
        models: names of the models there are.

    Raises:
        OptionError: no such orchestra, option, agent, model or file.
    """
    chosen = name or settings.name
    if not chosen:
        raise OptionError(
            f"which orchestra? Set {WHERE}.name (for example +{WHERE}.name=solver_verifier), or give the rows a column "
            "`orchestra`."
        )
    team = find(chosen, settings.modules)
    chosen_options, changes = settings.options, settings.agents
    names = [one.name for one in team.agents]
    if name and name != settings.name:
        chosen_options = {key: value for key, value in chosen_options.items() if key in team.options}
        changes = {key: value for key, value in changes.items() if key in names}
    for key in changes:
        if key not in names:
            raise OptionError(
                f"{WHERE}.agents.{key}: the orchestra {team.name} has no such agent.{near(key, names)} It has: "
                f"{', '.join(names)}."
            )
    agents = tuple(_changed(one, changes.get(one.name), models) for one in team.agents)
    return Lineup(team, agents, check_options(team, chosen_options))


def _changed(agent: Agent, change: AgentSettings | None, models: tuple[str, ...]) -> Agent:
    if change is not None:
        where = f"{WHERE}.agents.{agent.name}"
        given = {name: value for name, value in vars(change).items() if value is not None}
        if "role_file" in given:
            try:
                given["role"] = Path(given.pop("role_file")).expanduser().read_text(encoding="utf-8").strip()
            except OSError as error:
                raise OptionError(f"{where}.role_file: {error}") from error
        if isinstance(given.get("examples"), str):
            given["examples"] = _examples_of_file(given["examples"], agent.name, where)
        try:
            agent = dataclasses.replace(agent, **given)
        except ValueError as error:
            raise OptionError(f"{where}.examples: {error}.") from error
    if agent.model not in models:
        raise OptionError(
            f"agent {agent.name} asks for the model {agent.model!r}; this run has {', '.join(models)}. Set "
            f"{WHERE}.agents.{agent.name}.model."
        )
    return agent


def retriever(settings: OrchestraSettings) -> Retriever | None:
    """The run's retriever, shared by all trajectories of the process; None without one.

    Raises OptionError: unknown kind or key, or a file or package that is missing.
    """
    if settings.retriever is None:
        return None
    try:
        return make_retriever(settings.retriever)
    except OptionError as error:
        raise OptionError(f"{WHERE}.{error}") from error
    except (ValueError, ImportError, OSError) as error:
        raise OptionError(f"{WHERE}.retriever: {error}") from error


def check(config: Any) -> Lineup | None:
    """Check ``verl_ext.orchestra`` of a composed config before a run: everything that needs no model and no network.

    Returns:
        The line-up, or None if the config names no orchestra (the data column may).

    Raises:
        OptionError: see `read`, `line_up` and `retriever`.
    """
    if select(select(config, "verl_ext"), "orchestra") is None:
        return None
    settings = read(config)
    retriever(settings)
    mcp_tools.check(settings.mcp, f"{WHERE}.mcp")
    if not settings.name:
        return None
    names = model_options.names(config)
    found = line_up(settings, models=names)
    for name in names[1:]:
        if name not in {agent.model for agent in found.agents}:
            raise OptionError(
                f"{model_options.KEY}.{name}: no agent of the orchestra {settings.name} asks for this model. Set "
                f"{WHERE}.agents.<agent>.model={name} for one of {', '.join(agent.name for agent in found.agents)}, or "
                "leave the model out."
            )
    outside = [agent for agent in found.agents if agent.model in endpoints.of(config)]
    for agent in outside:
        if agent.tools:
            raise OptionError(
                f"{WHERE}.agents.{agent.name}.model={agent.model}: an agent whose model is an endpoint calls no tools "
                f"by itself. Set {WHERE}.agents.{agent.name}.tools=[], or give it a model of the run."
            )
    if len(outside) == len(found.agents):
        raise OptionError(f"{WHERE}: every agent of {settings.name} has an endpoint; there is nothing to train.")
    return found
