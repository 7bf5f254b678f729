# SPDX-License-Identifier: Apache-2.0
"""Options of a method: the keyword parameters of its function, with their types, choices, ranges and defaults.

A method declares each option once, in its signature::

    @checked
    def trloo_advantage(..., *, gamma: Discount = 1.0, baseline: Literal["leave_one_out", "mean"] = "leave_one_out")

`checked` makes a call by hand refuse what the annotations do not allow. A training run reads the same annotations and
defaults for the keys at ``algorithm.<method>.*``.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin

import numpy as np
import torch

P = ParamSpec("P")
R = TypeVar("R")


class OptionError(ValueError):
    """An option is unknown or its value is not what is taken. The message names it, its value and the choices."""


def _rule(fits: Callable[[Any], bool], otherwise: str) -> Callable[[Any], str | None]:
    return lambda value: None if fits(value) else otherwise


fraction = _rule(lambda value: 0.0 <= value <= 1.0, "it must lie in [0, 1]")
below_one = _rule(lambda value: value < 1, "it must be less than 1")
not_negative = _rule(lambda value: value >= 0, "it must be at least 0")
not_positive = _rule(lambda value: value <= 0, "it must be at most 0")
positive = _rule(lambda value: value > 0, "it must be greater than 0")
at_least_one = _rule(lambda value: value >= 1, "it must be at least 1")
names_index = _rule(lambda names: "index" in names, "it must name 'index', or turns of different prompts would mix")

# What an option may be: a type with functions that say what is wrong with a value of that type, or None.
Discount = Annotated[float, fraction]
NotNegative = Annotated[float, not_negative]
NotPositive = Annotated[float, not_positive]
Positive = Annotated[float, positive]
Count = Annotated[int, not_negative]
AtLeastOne = Annotated[int, at_least_one]
#: Turn fields that make a group: turns that agree in all of them are compared.
GroupBy = Annotated[Sequence[str], names_index]

#: Types that an option may have, what fits them, and what to say otherwise.
PLAIN: dict[type, tuple[Any, str]] = {
    bool: ((bool, np.bool_), "true or false"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a name"),
}


def fit(value: Any, hint: Any) -> Any:
    """The value as an annotation has it: whole numbers serve as floats, and sequences become tuples.

    `hint` is bool, int, float, str, Literal, a tuple or Sequence of str, dict, one of these or None, or one of these
    Annotated with functions as above. ValueError says what to give instead, without the option's name.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        value = fit(value, arguments[0])
        for wrong in [check(value) for check in arguments[1:]]:
            if wrong:
                raise ValueError(wrong)
        return value
    if origin in (Union, types.UnionType):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else fit(value, inner)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"choose one of {', '.join(map(repr, arguments))}")
        return value
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError("give keys and values, such as {key: value}")
        return dict(value)
    if origin in (tuple, Sequence):
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ValueError("give a list of names, such as [index, agent_id]")
        return tuple(value)
    if hint not in PLAIN:
        raise ValueError(f"its annotation {hint!r} cannot be checked")
    kinds, what = PLAIN[hint]
    if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"give {what}")
    if hint is float and not math.isfinite(value):
        raise ValueError("give a finite number")
    return hint(value)


class Parameters(NamedTuple):
    """The keyword parameters of a method by kind: `inspect.Parameter` with evaluated annotations, by name."""

    row_fields: dict[str, inspect.Parameter]  #: columns with one entry a turn, annotated ``Column``
    token_fields: dict[str, inspect.Parameter]  #: [B, T] tensors, annotated ``torch.Tensor``
    options: dict[str, inspect.Parameter]  #: all others


def parameters(method: Callable[..., Any]) -> Parameters:
    """The keyword-only parameters of a method by kind, but for the mapping ``row_fields``."""
    hints = typing.get_type_hints(method, include_extras=True)
    found = Parameters({}, {}, {})
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and name != "row_fields":
            kinds = (hints[name], *get_args(hints[name]))
            kind = found.row_fields if np.ndarray in kinds else found.options
            kind = found.token_fields if torch.Tensor in kinds and np.ndarray not in kinds else kind
            kind[name] = parameter.replace(annotation=hints[name])
    return found


def checked(method: Callable[P, R]) -> Callable[P, R]:
    """Let a method refuse options that do not fit its annotations, with an OptionError that names option and value."""
    options = parameters(method).options

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in options.keys() & kwargs.keys():
            try:
                kwargs[name] = fit(kwargs[name], options[name].annotation)
            except ValueError as error:
                raise OptionError(f"{name}={kwargs[name]!r}: {error}") from None
        return method(*args, **kwargs)

    return call
