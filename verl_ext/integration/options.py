# SPDX-License-Identifier: Apache-2.0
"""Hyper-parameters of the estimators at ``algorithm.<method>.*``, typed and checked.

verl hands the whole ``algorithm`` node to a registered estimator as an untyped DictConfig. `read` turns one of its
children into a frozen dataclass and refuses what the dataclass does not know.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from omegaconf import DictConfig, ListConfig, OmegaConf

T = TypeVar("T")


class OptionError(ValueError):
    """A key or value under ``algorithm`` is not what the method takes. The message names the key and the choices."""


def select(config: Any, key: str, default: Any = None) -> Any:
    """``config[key]`` of a DictConfig, a dict, an object or None, with a default for a missing or null value."""
    if config is None:
        return default
    if isinstance(config, Mapping | DictConfig):
        value = config.get(key, default)
    else:
        value = getattr(config, key, default)
    return default if value is None else value


def _plain(value: Any) -> Any:
    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=True)
    return value


def read(config: Any, name: str, options: type[T], where: str | None = None) -> T:
    """Return ``algorithm.<name>`` as an instance of the dataclass `options`.

    Args:
        config: verl's ``algorithm`` node, a plain mapping, or None (all defaults).
        name: name of the method, the key under ``algorithm``.
        where: how messages call the node, if it is not ``algorithm.<name>``.
        options: frozen dataclass whose fields are the allowed keys; its ``__post_init__`` checks ranges and raises
            ValueError with the bare key.

    Raises:
        OptionError: unknown key (with the nearest known one), wrong type or value out of range.
    """
    node = _plain(select(config, name, {}))
    where = where or f"algorithm.{name}"
    if not isinstance(node, Mapping):
        raise OptionError(f"{where} must hold keys of the method, but it is {node!r}")
    hints = typing.get_type_hints(options)
    known = {field.name: hints[field.name] for field in dataclasses.fields(options)}  # type: ignore[arg-type]
    values = {}
    for key, value in node.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"{where}.{key} is not an option of {name}.{hint} Known options: {', '.join(known)}.")
        values[key] = _coerce(value, known[key], f"{where}.{key}")
    try:
        return options(**values)
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(f"{where}.{error}") from error


def _coerce(value: Any, hint: Any, where: str) -> Any:
    """Check `value` against the annotation `hint`; ints are accepted for floats and lists for tuples."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise OptionError(f"{where} is {value!r}; choose one of {', '.join(map(repr, arguments))}.")
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        inner = [argument for argument in arguments if argument is not type(None)]
        return _coerce(value, inner[0], where)
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise OptionError(f"{where} is {value!r}; give keys and values, such as {{key: value}}.")
        return dict(value)
    if origin is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise OptionError(f"{where} is {value!r}; give a list of names, such as [index, agent_id].")
        return tuple(value)
    if hint is bool:
        if not isinstance(value, bool):
            raise OptionError(f"{where} is {value!r}; give true or false.")
        return value
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise OptionError(f"{where} is {value!r}; give a number.")
        if not math.isfinite(value):
            raise OptionError(f"{where} is {value!r}; give a finite number.")
        return float(value)
    if hint is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise OptionError(f"{where} is {value!r}; give a whole number.")
        return value
    if hint is str:
        if not isinstance(value, str):
            raise OptionError(f"{where} is {value!r}; give a name.")
        return value
    raise OptionError(f"{where} has an annotation that cannot be checked: {hint!r}")


def discount(config: Any, default: float = 1.0) -> float:
    """``algorithm.gamma``, checked to lie in [0, 1].

    Raises:
        OptionError: gamma is not a number between 0 and 1.
    """
    gamma = select(config, "gamma", default)
    if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0.0 <= float(gamma) <= 1.0:
        raise OptionError(f"algorithm.gamma is {gamma!r}; the discount must lie in [0, 1].")
    return float(gamma)


def group_keys(value: tuple[str, ...]) -> tuple[str, ...]:
    """Check a ``group_by``: no two prompts may ever share a group, so it must name ``index``."""
    if "index" not in value:
        raise ValueError(f"group_by is {list(value)}; it must name 'index', or rows of different prompts would mix")
    return value


@dataclasses.dataclass(frozen=True)
class TrlooOptions:
    """``algorithm.trloo.*``; see `verl_ext.methods.trloo`."""

    baseline: Literal["leave_one_out", "mean"] = "leave_one_out"
    batch_std: bool = False
    mask_regressions: bool = False
    group_by: tuple[str, ...] = ("index", "turn_index")

    def __post_init__(self) -> None:
        group_keys(self.group_by)


@dataclasses.dataclass(frozen=True)
class DrMasOptions:
    """``algorithm.dr_mas.*``; see `verl_ext.methods.dr_mas`. ``norm_by_std: null`` follows verl's own key."""

    level: Literal["agent", "global", "global_rows"] = "agent"
    norm_by_std: bool | None = None
    invalid_action_penalty_coef: float = 0.1
    epsilon: float = 1e-6
    group_by: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _at_least_zero(invalid_action_penalty_coef=self.invalid_action_penalty_coef)
        _positive(epsilon=self.epsilon)
        if self.group_by is not None:
            group_keys(self.group_by)


@dataclasses.dataclass(frozen=True)
class HgpoOptions:
    """``algorithm.hgpo.*``; see `verl_ext.methods.hgpo`."""

    history_length: int = 2
    mode: Literal["mean_std_norm", "mean_norm"] = "mean_std_norm"
    length_weight_alpha: float = 1.0
    base_group: bool = False
    level_weights: Literal["released", "paper"] = "released"
    invalid_action_penalty_coef: float = 0.1
    epsilon: float = 1e-6
    group_by: tuple[str, ...] = ("index",)

    def __post_init__(self) -> None:
        if self.history_length < 0:
            raise ValueError(f"history_length is {self.history_length}; it counts past steps, so it is at least 0")
        _at_least_zero(invalid_action_penalty_coef=self.invalid_action_penalty_coef)
        _positive(epsilon=self.epsilon)
        group_keys(self.group_by)


@dataclasses.dataclass(frozen=True)
class GigpoOptions:
    """``algorithm.gigpo.*``; see `verl_ext.methods.gigpo`."""

    mode: Literal["mean_std_norm", "mean_norm"] = "mean_norm"
    step_advantage_w: float = 1.0
    episode_stats: Literal["rows", "trajectories"] = "rows"
    enable_similarity: bool = False
    similarity_thresh: float = 0.9
    invalid_action_penalty_coef: float = 0.1
    epsilon: float = 1e-6
    group_by: tuple[str, ...] = ("index",)

    def __post_init__(self) -> None:
        if not 0.0 < self.similarity_thresh <= 1.0:
            raise ValueError(f"similarity_thresh is {self.similarity_thresh}; it is a ratio in (0, 1]")
        _at_least_zero(invalid_action_penalty_coef=self.invalid_action_penalty_coef)
        _positive(epsilon=self.epsilon)
        group_keys(self.group_by)


@dataclasses.dataclass(frozen=True)
class OtbOptions:
    """``algorithm.otb.*``; see `verl_ext.methods.otb`."""

    alignment: Literal["model_tokens", "column"] = "model_tokens"
    baseline: Literal["self_inclusive", "leave_one_out"] = "self_inclusive"
    handle_zero_tail: bool = True
    epsilon: float = 1e-8
    group_by: tuple[str, ...] = ("index",)

    def __post_init__(self) -> None:
        _positive(epsilon=self.epsilon)
        group_keys(self.group_by)


def _at_least_zero(**values: float) -> None:
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name} is {value}; it must be at least 0")


def _positive(**values: float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} is {value}; it must be greater than 0")
