# SPDX-License-Identifier: Apache-2.0
"""``verl_ext.gateway.*``: the agent that plays, its limits, and what its requests may ask for. Typed and checked."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from verl_ext.integration.settings import model_options, options
from verl_ext.integration.settings.options import OptionError, coerce, select
from verl_ext.methods.options import AtLeastOne, Positive
from verl_ext.rollout.orchestra.agents import POLICY
from verl_ext.rollout.orchestra.settings import Limits
from verl_ext.sandbox import program

WHERE = "verl_ext.gateway"

NAME = re.compile(r"[\w.:/@+-]{1,64}")
"""What an agent may be called: as models are."""


@dataclass(frozen=True)
class Named:
    """``verl_ext.gateway.agents.<name>``.

    Attributes:
        max_tokens: bound on an answer; None: ``rollout.response_length`` alone.
        model: which model of the run answers, ``policy`` or one of ``verl_ext.models``.
    """

    max_tokens: int | None = None
    model: str = POLICY


@dataclass(frozen=True)
class GatewaySettings(Limits):
    """``verl_ext.gateway``; its ``max_calls`` bounds requests, refused ones included.

    Attributes:
        agent: the agent, ``pkg.module:function`` or ``path/to/file.py:function``.
        command: in its place a program and its arguments, which gets the task as JSON on standard input.
        cage: ``required`` starts the command in the sandbox (`verl_ext.sandbox.program`), ``none`` beside the run.
        readable: files and folders that a command in the sandbox may read and run besides.
        memory_mb: MiB that a command in the sandbox may use.
        agent_id: the name that the agent is given as its ``model``; the turn field ``agent_id``.
        agents: agents by name with ``max_tokens`` and ``model`` of each, see `Named`; if any is named, requests of
            others are refused.
        host: address that the gateway listens on, at a free port.
        sampling: sampling parameters of a request that are not the run's are refused (``refuse``), left out
            (``ignore``), or used and noted in the turn field ``sampling`` (``record``).
        max_bytes: bytes of its requests together, or of what a command writes.
        body_timeout_s: seconds for the body of a request to arrive.
        agent_timeout_s: seconds for the agent.
        tools_in_prompt: the agent's own prompts describe its tools, so that the chat template is not given their
            schemas. Needed where the template does not show them.
        read_thinking: tool calls inside ``<think>...</think>`` are calls; otherwise only those after it are.
    """

    agent: str | None = None
    command: tuple[str, ...] | None = None
    cage: Literal["none", "required"] = "none"
    readable: tuple[str, ...] = ()
    memory_mb: AtLeastOne = 4096
    agent_id: str = "agent"
    agents: dict[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    sampling: Literal["refuse", "ignore", "record"] = "refuse"
    max_bytes: AtLeastOne = 1 << 26
    body_timeout_s: Positive = 30.0
    agent_timeout_s: Positive = 1800.0
    tools_in_prompt: bool = False
    read_thinking: bool = False
    overlong_prompt: Literal["shorten", "end"] = "end"

    # What the loop of orchestras asks for and agents of the gateway do for themselves.
    role_as: ClassVar[str] = "system"
    mcp: ClassVar[dict[str, Any]] = {}
    max_tool_rounds: ClassVar[int] = 0
    tool_timeout_s: ClassVar[float] = 60.0

    def __post_init__(self) -> None:
        if (self.agent is None) == (not self.command):
            raise ValueError(
                "agent is the agent's function (pkg.module:function, or file.py:function), command a program in its "
                f"place; set one of them ({'both are set' if self.agent else 'none is'})."
            )
        if self.cage == "required" and not self.command:
            raise ValueError("cage=required is for a command; a function runs in the worker. Give it as a command.")
        if self.readable and self.cage == "none":
            raise ValueError("readable is for a command in a cage; set cage=required, or leave it out.")
        if self.memory_mb != type(self).memory_mb and self.cage == "none":
            raise ValueError("memory_mb is for a command in a cage; set cage=required, or leave it out.")
        for path in self.readable:
            if not Path(path).exists():
                raise ValueError(f"readable names {path}, which is not there.")
        if self.agent is not None and not all(self.agent.rpartition(":")[::2]):
            raise ValueError(f"agent is {self.agent!r}; give pkg.module:function or path/to/file.py:function.")
        for name in (self.agent_id, *self.agents):
            if not NAME.fullmatch(name):
                raise ValueError(f"agent_id or a name in agents is {name!r}; give at most 64 of A-Z a-z 0-9 _.:/@+-")
        for name in self.agents:
            self.named(name)

    def named(self, agent: str) -> Named:
        """``agents.<name>``. Raises OptionError: an agent that is not named, or a key of it that can't be used."""
        if self.agents and agent not in self.agents:
            raise OptionError(f"{WHERE}.agents names {', '.join(self.agents)}; {agent!r} is none of them")
        node, where = self.agents.get(agent) or {}, f"{WHERE}.agents.{agent}"
        if not isinstance(node, Mapping) or set(node) - {"max_tokens", "model"}:
            raise OptionError(f"{where} is {node!r}; give {{max_tokens: N, model: NAME}}, or {{}}.")
        limit = coerce(node.get("max_tokens"), AtLeastOne | None, f"{where}.max_tokens")
        return Named(limit, coerce(node.get("model") or POLICY, str, f"{where}.model"))

    @property
    def played(self) -> str:
        """What plays, in a word."""
        return self.agent or " ".join(self.command or ())


def read(config: Any) -> GatewaySettings:
    """The settings of a run.

    Raises OptionError: unknown key, wrong type or value out of range; the message names it.
    """
    return options.read(select(config, "verl_ext"), "gateway", GatewaySettings, where=WHERE)


@functools.cache
def load(agent: str) -> Callable[..., Any]:
    """The function of ``verl_ext.gateway.agent``.

    Raises OptionError: it can't be loaded in this process, or is no function.
    """
    from verl.utils.import_utils import load_extern_object

    path, _, name = agent.rpartition(":")
    try:
        function = load_extern_object(path if path.endswith(".py") else f"pkg://{path}", name)
    except Exception as error:
        raise OptionError(
            f"{WHERE}.agent={agent} can't be loaded ({type(error).__name__}: {error}). It must be importable in every "
            "process of the run: install it, put its folder on PYTHONPATH, or name its file."
        ) from error
    if not callable(function):
        raise OptionError(f"{WHERE}.agent={agent} is no function.")
    return function


def check(config: Any) -> None:
    """Check the settings before a run, the agent's function included.

    Raises:
        OptionError: see `read`; or the function can't be imported here, or an agent's model is not there, or a model
            has no agent.
    """
    settings = read(config)
    if settings.agent is not None:
        load(settings.agent)
    if settings.sampling == "record" and (rho := select(config.get("dvp"), "rho")) is not None:
        raise OptionError(
            f"{WHERE}.sampling=record lets an agent sample as it likes, but with dvp.rho={rho:g} the sampler prunes as "
            "the trainer does. Set it to refuse or ignore."
        )
    if settings.cage == "required":
        try:
            program.check()
        except program.CageError as error:
            raise OptionError(
                f"{WHERE}.cage=required: {error}. cage=none runs the command with your rights."
            ) from error
    served = [POLICY, *(model.name for model in model_options.of(config))]
    asked = {name: settings.named(name).model for name in settings.agents}
    for name, model in asked.items():
        if model not in served:
            raise OptionError(f"{WHERE}.agents.{name}.model is {model!r}; this run serves {', '.join(served)}.")
    if select(select(config, "verl_ext"), "orchestra") is not None:
        return  # its agents may have the models, too
    for model in model_options.names(config)[1:]:
        if model not in asked.values():
            remedy = f"Set {WHERE}.agents.NAME.model={model}" if model in served else "An agent asks endpoints itself"
            raise OptionError(f"{model_options.KEY}.{model}: no agent of {WHERE}.agents asks for it. {remedy}.")
