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
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_ext.methods.options import Discount, OptionError, fit, parameters

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
            hint = f"{near(key, known)} Known options: {', '.join(known)}."
            raise OptionError(f"{where}.{key} is not an option of {name}.{hint}")
        if value is not None or key not in values:
            values[key] = coerce(value, known[key], f"{where}.{key}")
    try:
        return options(**values)
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(f"{where}.{error}") from error


def near(key: Any, known: Iterable[str]) -> str:
    """The known name that a misspelled one may mean, as a sentence; empty if none is close."""
    found = difflib.get_close_matches(str(key), list(known), n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def coerce(value: Any, hint: Any, where: str, remedy: str = "") -> Any:
    """`fit` a value to an annotation; the OptionError calls it `where` and says `remedy`, if given, for what to do."""
    try:
        return fit(value, hint)
    except ValueError as error:
        raise OptionError(f"{where} is {value!r}; {remedy or error}.") from None


def option(config: Any, key: str, hint: Any, default: Any = None, remedy: str = "") -> Any:
    """``verl_ext.<key>`` of a whole config, or `default` where it is missing or null; otherwise as `coerce`."""
    return coerce(select(select(config, "verl_ext"), key, default), hint, f"verl_ext.{key}", remedy)


def discount(config: Any, default: float = 1.0) -> float:
    """``algorithm.gamma``, checked to lie in [0, 1]. Raises OptionError: gamma is not a number between 0 and 1."""
    return coerce(select(config, "gamma", default), Discount, "algorithm.gamma", "the discount must lie in [0, 1]")


def require_fsdp(
    config: Any, does: str, instead: str = "", sections: Iterable[str] = ("actor_rollout_ref.actor",)
) -> None:
    """Refuse an engine that is none of verl's FSDP engines, which alone have what `does` tells in words."""
    for section in sections:
        strategy = OmegaConf.select(config, f"{section}.strategy")
        if strategy not in ("fsdp", "fsdp2"):
            raise OptionError(
                f"{does} in verl's FSDP engine; {section}.strategy={strategy} has none of its code. Set it "
                f"to fsdp or fsdp2{instead}."
            )


def not_extended(what: str, instead: str = "") -> RuntimeError:
    """The error for a training engine that has not done what a part asked of it, told in words."""
    return RuntimeError(
        f"{what}. Its class is not one of verl's FSDP engines, or was registered after they were extended. Use "
        f"actor_rollout_ref.actor.strategy=fsdp2, and register engines when verl is imported "
        f"(VERL_USE_EXTERNAL_MODULES){instead}."
    )


def bypass(config: Any) -> bool:
    """``algorithm.rollout_correction.bypass_mode``: the sampler's log-probabilities are taken for the trainer's."""
    return bool(select(select(config.algorithm, "rollout_correction"), "bypass_mode", False))


def has_critic(config: Any) -> bool:
    """Whether a run has a critic, as verl decides it, without its warning."""
    enabled = select(config.get("critic"), "enable")
    name = select(config.algorithm, "adv_estimator")
    return bool(enabled) if enabled is not None else getattr(name, "value", name) == "gae"


def updated(config: Any) -> dict[str, Any]:
    """verl's sections of what is updated, by key: the actor's, and the critic's where there is one."""
    critic = {"critic": config.critic} if config.get("critic") is not None and has_critic(config) else {}
    return {"actor_rollout_ref.actor": config.actor_rollout_ref.actor, **critic}
