# SPDX-License-Identifier: Apache-2.0
"""Options in a run's configuration: looked up, typed and checked.

verl hands the whole ``algorithm`` node to a registered estimator as an untyped DictConfig. `read` turns one of its
children into an instance of a dataclass and refuses what the dataclass does not know; `dataclass_of` makes such a
dataclass from the signature of a method, so that types, ranges and defaults are stated once.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_ext.methods.options import OptionError, fit, parameters

__all__ = ["OptionError", "coerce", "dataclass_of", "discount", "read", "select"]

T = TypeVar("T")


def select(config: Any, key: str, default: Any = None) -> Any:
    """``config[key]`` of a DictConfig, a dict, an object or None, with a default for a missing or null value."""
    if config is None:
        return default
    if isinstance(config, Mapping | DictConfig):
        value = config.get(key, default)
    else:
        value = getattr(config, key, default)
    return default if value is None else value


def dataclass_of(method: Callable[..., Any]) -> type:
    """A frozen dataclass of a method's options: the names, annotations and defaults of its parameters."""
    options = parameters(method).options.values()
    fields = [(option.name, option.annotation, dataclasses.field(default=option.default)) for option in options]
    return dataclasses.make_dataclass(f"{method.__name__}_options", fields, frozen=True)


def read(
    config: Any, name: str, options: type[T], where: str | None = None, defaults: Mapping[str, Any] | None = None
) -> T:
    """Return ``algorithm.<name>`` as an instance of the dataclass `options`.

    Args:
        config: verl's ``algorithm`` node, a plain mapping, or None (all defaults).
        name: name of the method, the key under ``algorithm``.
        options: frozen dataclass whose fields are the allowed keys; its ``__post_init__``, if any, checks ranges and
            raises ValueError with the bare key.
        where: how messages call the node, if it is not ``algorithm.<name>``.
        defaults: values of options that the node leaves out or null, before the dataclass's own.

    Raises:
        OptionError: unknown key (with the nearest known one), wrong type or value out of range.
    """
    node = select(config, name, {})
    if isinstance(node, DictConfig | ListConfig):
        node = OmegaConf.to_container(node, resolve=True)
    where = where or f"algorithm.{name}"
    if not isinstance(node, Mapping):
        raise OptionError(f"{where} must hold keys of the method, but it is {node!r}")
    hints = typing.get_type_hints(options, include_extras=True)
    known = {option.name: hints[option.name] for option in dataclasses.fields(options) if option.init}  # type: ignore[arg-type]
    values = dict(defaults or {})
    for key, value in node.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"{where}.{key} is not an option of {name}.{hint} Known options: {', '.join(known)}.")
        if value is not None or key not in values:
            values[key] = coerce(value, known[key], f"{where}.{key}")
    try:
        return options(**values)
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(f"{where}.{error}") from error


def coerce(value: Any, hint: Any, where: str) -> Any:
    """`fit` a value to an annotation; the OptionError calls it `where`."""
    try:
        return fit(value, hint)
    except ValueError as error:
        raise OptionError(f"{where} is {value!r}; {error}.") from None


def discount(config: Any, default: float = 1.0) -> float:
    """``algorithm.gamma``, checked to lie in [0, 1].

    Raises:
        OptionError: gamma is not a number between 0 and 1.
    """
    gamma = select(config, "gamma", default)
    if isinstance(gamma, bool) or not isinstance(gamma, int | float) or not 0.0 <= float(gamma) <= 1.0:
        raise OptionError(f"algorithm.gamma is {gamma!r}; the discount must lie in [0, 1].")
    return float(gamma)
