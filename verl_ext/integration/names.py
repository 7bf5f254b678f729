# SPDX-License-Identifier: Apache-2.0
"""Our names in verl's registries of estimators and losses: in runs of ours only, and only those that the run asks for.

verl refuses a second estimator of one name where it is registered, and lets a second loss replace the first without a
word. So a run that names nothing of ours finds none of our names taken, and a run of ours refuses a name that somebody
else has, whoever came first. By hand, in a notebook, `register` puts all of them there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from verl_ext.integration import estimators, losses, mix
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.options import OptionError, select
from verl_ext.recipes import method_entry_points

VARIABLE = "VERL_EXT_NAMES"
"""Variable of the environment: the names that a run asks for, set by the launch callback."""

MARKS = {
    "kpo": "actor/kpo/log_ratio_std",
    "divergence_augmented": "actor/divergence/mean",
    "hybrid_imitation": "actor/imitation/kl",
}
"""For each loss a metric that no other reports."""


def asked(config: Any) -> set[str]:
    """Those of our estimators and losses that the settings of a run, further models included, name."""
    found: set[str] = set()
    for one in [config, *(model.config(config) for model in model_options.of(config))]:
        name = _plain(select(one.algorithm, "adv_estimator"))
        found |= {name, *map(str, select(one.algorithm, "mix") or ())} if name == "mix" else {name}
        found.add(str(one.actor_rollout_ref.actor.policy_loss.loss_mode))
    return found & {*_estimators(), *losses.LOSSES}


def register(names: Iterable[str] | None = None) -> None:
    """Register estimators and losses with verl: those of these names, or all. Idempotent. Raises OptionError: a name is
    taken."""
    from verl.trainer.ppo.core_algos import (
        ADV_ESTIMATOR_REGISTRY,
        POLICY_LOSS_REGISTRY,
        register_adv_est,
        register_policy_loss,
    )

    estimators.load_others()
    for registry, put, ours, what in (
        (ADV_ESTIMATOR_REGISTRY, register_adv_est, _estimators(), "advantage estimator"),
        (POLICY_LOSS_REGISTRY, register_policy_loss, losses.LOSSES, "policy loss"),
    ):
        for name in ours if names is None else [name for name in names if name in ours]:
            _require_free(registry, name, ours, what)
            put(name)(ours[name])


def require(config: Any) -> None:
    """Raise OptionError unless the estimators of a run that are ours are in force in this process."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    ours = _estimators()
    for name in sorted(asked(config) & {*ours}):
        _require_free(ADV_ESTIMATOR_REGISTRY, name, ours, "advantage estimator")
        if name not in ADV_ESTIMATOR_REGISTRY:
            raise OptionError(
                f"the advantage estimator {name!r} is one of verl_ext, which are there in runs with a recipe only, "
                f"where the settings are checked and the engines compute what they read. Add +recipe={_recipe(name)}, "
                "or any other recipe."
            )


def require_loss(name: str) -> None:
    """Raise OptionError if another function stands under the name of a loss of ours in this process."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    if name in losses.LOSSES:
        _require_free(POLICY_LOSS_REGISTRY, name, losses.LOSSES, "policy loss")


def is_ours(estimator: Any) -> bool:
    """Whether this value of ``algorithm.adv_estimator`` means one of ours: another function of that name does not."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    name, ours = _plain(estimator), _estimators()
    if name not in ADV_ESTIMATOR_REGISTRY:
        return name in ours or name in {point.name for point in method_entry_points()}
    return name in ours and ADV_ESTIMATOR_REGISTRY[name] is ours[name]


def in_environment() -> list[str] | None:
    """The names that the run of this process asks for; None where nothing says so."""
    given = os.environ.get(VARIABLE)
    return None if given is None else [name for name in given.split(",") if name]


def _estimators() -> dict[str, Callable[..., Any]]:
    return {"mix": mix.mix, **{name: one.function for name, one in estimators.ESTIMATORS.items()}}


def _plain(name: Any) -> str:
    return str(getattr(name, "value", name))


def _recipe(name: str) -> str:
    return "trloo" if name == "mix" else name


def _require_free(registry: Any, name: str, ours: Any, what: str) -> None:
    taken = registry.get(name)
    if taken is not None and taken is not ours[name]:
        raise OptionError(
            f"the {what} {name!r} is registered by {getattr(taken, '__module__', taken)}, and verl_ext has one of that "
            "name, which this run asks for: one would replace the other. Give yours another name, do not load it "
            f"(VERL_USE_EXTERNAL_MODULES, model.external_lib), or leave out what asks for {name!r}."
        )
