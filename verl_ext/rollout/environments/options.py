# SPDX-License-Identifier: Apache-2.0
"""``verl_ext.environment.*``: which environment is played, and how it is shown to the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from verl_ext.integration.settings.options import OptionError, read, select
from verl_ext.methods.options import AtLeastOne, Count, NotPositive, Positive

ROOT = "verl_ext.environment"


@dataclass(frozen=True)
class EnvironmentOptions:
    """``verl_ext.environment.*``.

    Attributes:
        name: ``gymnasium``, ``textworld``, ``textarena``, ``openenv``, ``alfworld``, ``webshop`` or the import
            path ``module:Class`` of your own; null if every row of the data names one (``extra_info.environment``).
        kwargs: arguments of the environment's class. A row adds to them or replaces some with the JSON object
            ``extra_info.environment_kwargs``.
        max_steps: steps after which an episode ends.
        history_length: K, past observation-action pairs shown in the prompt. null: what
            ``algorithm.hgpo.history_length`` says, or 2 in a run without HGPO.
        history: ``render``: each prompt is rendered anew, with K past steps. ``continue``: the episode is a
            conversation, and a prompt is the tokens so far with the new observation, so that turns merge
            (``verl_ext.merge_turns``); one that no longer fits is rendered anew.
        template: name of a shipped prompt template (``default``, ``compact``, ``alfworld``, ``webshop``) or the path of
            a file of your own; see :mod:`verl_ext.rollout.environments.templates`.
        action_tag: the action is the text of the first ``<tag>...</tag>``; null: the whole answer is the action.
        read_thinking: an action inside ``<think>...</think>`` counts too; otherwise only what comes after it.
        required_tags: an answer without a pair of each of these is not valid, such as ``[think]``.
        check_admissible: an action is valid only if it is among the admissible ones, where the environment lists them.
        invalid_action: what happens to an action that is not valid; null: as the environment says. ``noop``: the step
            is spent, nothing happens, the reward is what the environment says of such a step (0, or -1 in CliffWalking
            and Taxi). ``pass``: the environment gets the text (without a tag: its last
            30 characters) and answers in its own words, which ``gymnasium`` cannot (its numbered actions have no
            number for it: the trajectory fails).
        reward_scale: factor of the environment's rewards. (Published for ALFWorld and WebShop: 10 at success.)
        agent_id: the turn field ``agent_id``.
        reset_timeout_s: seconds for making the environment, and again for its reset.
        step_timeout_s: seconds for a step.
        processes: environments alive at the same time in one agent loop worker, over all settings, idle ones that wait
            for reuse included; further trajectories wait.
        failed_trajectories: what becomes of a trajectory whose environment failed. ``keep``: if an action broke it,
            its turns are trained on and what it had earned is lost; if not, it is missing. ``raise``: it is missing.
            ``mask``: its turns are in no statistic and not in the loss.
        failed_reward: what a trajectory earns at most, with ``keep``, whose environment an action broke. Set it to the
            lowest reward of the task or below: where an honest failure earns less than 0, breaking things would pay.
    """

    name: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    max_steps: AtLeastOne = 50
    history_length: Count | None = None
    history: Literal["render", "continue"] = "render"
    template: str = "default"
    action_tag: str | None = "action"
    read_thinking: bool = False
    required_tags: tuple[str, ...] = ()
    check_admissible: bool = True
    invalid_action: Literal["noop", "pass"] | None = None
    reward_scale: Positive = 1.0
    agent_id: str = "agent"
    reset_timeout_s: Positive = 120.0
    step_timeout_s: Positive = 30.0
    processes: AtLeastOne = 256
    failed_trajectories: Literal["keep", "raise", "mask"] = "keep"
    failed_reward: NotPositive = 0.0

    def __post_init__(self) -> None:
        for tag in (*self.required_tags, *([] if self.action_tag is None else [self.action_tag])):
            if not tag.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"action_tag or required_tags has {tag!r}; give a bare name such as action")


DEFAULT_HISTORY = 2
"""Past steps shown where no key says otherwise; HGPO's own default."""


def _hgpo(algorithm: Any) -> bool:
    """Whether the run's estimator is HGPO or a mixture with it. Looks at names only: the loop needs no registry."""
    name = select(algorithm, "adv_estimator")
    return name == "hgpo" or (name == "mix" and bool(select(select(algorithm, "mix"), "hgpo", 0)))


def read_options(config: Any) -> EnvironmentOptions:
    """The options of verl's whole config, with ``history_length`` settled.

    Raises OptionError: unknown key, bad value, or a ``history_length`` that is not HGPO's.
    """
    options = read(select(config, "verl_ext"), "environment", EnvironmentOptions, where=ROOT)
    algorithm = select(config, "algorithm", {})
    groups = int(select(select(algorithm, "hgpo"), "history_length", DEFAULT_HISTORY)) if _hgpo(algorithm) else None
    if options.history_length is None:
        shown = DEFAULT_HISTORY if groups is None else groups
        return replace(options, history_length=shown)
    if groups is not None and options.history_length != groups:
        raise OptionError(
            f"{ROOT}.history_length={options.history_length} past steps are shown in the prompt, but "
            f"algorithm.hgpo.history_length={groups} are compared. Set only algorithm.hgpo.history_length."
        )
    return options


def check_environment(config: Any) -> None:
    """Look at ``verl_ext.environment`` before a run, if it is there.

    Raises OptionError: bad options, a template that cannot be used, or an environment that cannot be played here.
    """
    if select(select(config, "verl_ext"), "environment") is None:
        return
    from verl_ext.rollout.environments.protocol import EnvironmentUnavailable
    from verl_ext.rollout.environments.registry import load
    from verl_ext.rollout.environments.templates import TemplateError, load_template

    options = read_options(config)
    try:
        load_template(options.template)
        if options.name is not None:
            load(options.name)
    except TemplateError as error:
        raise OptionError(f"{ROOT}.template: {error}") from error
    except EnvironmentUnavailable as error:
        raise OptionError(f"{ROOT}.name: {error}") from error


def of_row(options: EnvironmentOptions, row: Mapping[str, Any]) -> tuple[str, dict[str, Any], int]:
    """Which environment a row of the data is about.

    Args:
        options: of the run.
        row: the columns of the row as the agent loop gets them: ``extra_info`` and ``index``.

    Returns:
        ``(name, kwargs, seed)``. The seed is ``extra_info.env_seed``, else ``extra_info.index``, else ``index``: it
        belongs to the prompt, so that all rollouts of a prompt begin in the same state.

    Raises:
        ValueError: no environment or no seed is named; the message says where to put it.
    """
    extra = row.get("extra_info") or {}
    name = extra.get("environment") or options.name
    if not name:
        raise ValueError(
            f"row index={row.get('index', '?')} names no environment: set {ROOT}.name, or put extra_info.environment "
            "in the data (verl_ext.rollout.environments.data writes it)"
        )
    kwargs = extra.get("environment_kwargs") or {}
    if isinstance(kwargs, str):
        try:
            kwargs = json.loads(kwargs)
        except json.JSONDecodeError as error:
            raise ValueError(f"extra_info.environment_kwargs={kwargs!r} is not JSON: {error}") from error
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"extra_info.environment_kwargs={kwargs!r} is no JSON object")
    seeds = (extra.get("env_seed"), extra.get("index"), row.get("index"))
    seed = next((value for value in seeds if value is not None), None)
    try:
        whole = int(seed)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the environment's seed is {seed!r}; put a whole number in extra_info.env_seed (or extra_info.index)"
        ) from error
    return str(name), {**options.kwargs, **kwargs}, whole
