# SPDX-License-Identifier: Apache-2.0
"""Registered advantage estimators: the functions of `verl_ext.methods` under verl's names, arguments and config keys.

One call serves every method (`Estimator.function`). It takes verl's arguments, fills in the columns that the method's
signature names, reads the options that the signature declares from ``algorithm.<name>.*``, calls the method and logs
its metrics. In a training run the columns come from the trainer (`verl_ext.integration.columns`); by hand they are
passed:

    fn = ESTIMATORS["trloo"].function
    advantages, returns = fn(token_level_rewards=r, response_mask=m, index=uid, traj_uid=t, turn_index=k, config=cfg)

A method of another package is known by an entry point of the group ``verl_ext.methods``, whose name is the estimator's
and whose object is the method's function or an `Estimator`. What is registered with verl, and when: `names`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from verl_ext import methods
from verl_ext.integration import metrics
from verl_ext.integration.columns import (
    FROM_EXTRA_FIELDS,
    FROM_KEY,
    TOKEN_COLUMNS,
    ActiveBatch,
    batch_of,
    demand,
)
from verl_ext.integration.settings.options import OptionError, dataclass_of, discount, read, select
from verl_ext.methods.dr_mas import dr_mas_advantage
from verl_ext.methods.gigpo import gigpo_advantage
from verl_ext.methods.hgpo import hgpo_advantage
from verl_ext.methods.maxrl import maxrl_advantage
from verl_ext.methods.options import Parameters, parameters
from verl_ext.methods.otb import otb_advantage
from verl_ext.methods.rows import LABELS, Advantage, MissingFieldError
from verl_ext.methods.trloo import trloo_advantage
from verl_ext.recipes import METHODS_GROUP, method_entry_points

Result = tuple[torch.Tensor, torch.Tensor]

VERLS_OWN: dict[str, Callable[[Any], Any]] = {
    "gamma": lambda algorithm: None if select(algorithm, "gamma") is None else discount(algorithm),
    "norm_by_std": lambda algorithm: select(algorithm, "norm_adv_by_std_in_grpo"),
}
"""Options that verl has a key of its own for; it counts where ``algorithm.<method>`` does not give the option."""


@dataclass(frozen=True)
class Estimator:
    """A registered estimator.

    Attributes:
        name: value of ``algorithm.adv_estimator`` or key of ``algorithm.mix``.
        method: ``(token_level_rewards, response_mask, index, *, columns..., row_fields, options...) -> Advantage``.
        requires: columns that the method can do without by hand, but not in a training run.
        columns: token columns that the training engine must deliver with the old log-probabilities.
        metrics: ``(name, result, inputs) -> {metric: value}``, where inputs are the method's arguments.
    """

    name: str
    method: Callable[..., Advantage]
    requires: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    metrics: Callable[[str, Advantage, Mapping[str, Any]], dict[str, float]] = metrics.of_groups

    @functools.cached_property
    def parameters(self) -> Parameters:
        """Turn fields, token fields and options in the method's signature."""
        return parameters(self.method)

    @functools.cached_property
    def options(self) -> type:
        """Dataclass of ``algorithm.<name>.*``."""
        return dataclass_of(self.method)

    def settings(self, algorithm: Any) -> dict[str, Any]:
        """The method's options: ``algorithm.<name>.*``, else verl's own key, else the default of the signature. Raises
        OptionError: an unknown key or a value that does not fit."""
        own = {name: get(algorithm) for name, get in VERLS_OWN.items() if name in self.parameters.options}
        given = {name: value for name, value in own.items() if value is not None}
        return dataclasses.asdict(read(algorithm, self.name, self.options, defaults=given))

    def group_by(self, algorithm: Any) -> tuple[str, ...]:
        """The turn fields that the options group by."""
        return self.settings(algorithm).get("group_by") or ()

    @functools.cached_property
    def function(self) -> Callable[..., Result]:
        """What verl calls."""

        def call(
            token_level_rewards: torch.Tensor,
            response_mask: torch.Tensor,
            index: Any = None,
            config: Any = None,
            **given: Any,
        ) -> Result:
            return self._compute(batch_of(self.name), token_level_rewards, response_mask, index, config, given)

        call.__name__ = call.__qualname__ = self.name
        call.__doc__ = (
            f"Registered as ``{self.name}``: {inspect.getdoc(self.method)}\n\n{inspect.getdoc(methods)}\n\n"
            f"The options are read from ``config``, verl's ``algorithm`` node: {', '.join(self.parameters.options)} at "
            f"``{self.name}.*``."
        )
        call.__signature__ = self._signature()  # type: ignore[attr-defined]
        return call

    def _signature(self) -> inspect.Signature:
        """verl's arguments, then the method's columns by keyword."""
        own = inspect.signature(self.method).parameters
        known = {**self.parameters.row_fields, **self.parameters.token_fields, "row_fields": None}
        fields = [own[name] for name in own if name in known]
        verls = [own["token_level_rewards"], own["response_mask"], own["index"].replace(default=None)]
        config = inspect.Parameter("config", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        further = inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)
        optional = [field.replace(default=None) for field in fields]
        return inspect.Signature([*verls, config, *optional, further], return_annotation="tuple[Tensor, Tensor]")

    def _compute(
        self,
        batch: ActiveBatch | None,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: Any,
        config: Any,
        given: Mapping[str, Any],
    ) -> Result:
        options = self.settings(config)
        fields = {**self.parameters.row_fields, **self.parameters.token_fields}
        further = (*(options.get("group_by") or ()), *LABELS)  # to group by, and to say in an error where a turn is
        known = dict(given)
        if batch is not None:
            known |= {name: batch.column(name) for name in (*fields, *further) if known.get(name) is None}
        known = {name: column for name, column in known.items() if column is not None}
        needed = [name for name, field in fields.items() if field.default is inspect.Parameter.empty]
        for name in (*needed, *(self.requires if batch else ())):
            if name not in known:
                raise demand(name, self.name)
        inputs = {name: known[name] for name in fields if name in known}
        row_fields = {name: known[name] for name in further if name in known and name not in fields}
        inputs["row_fields"] = {**row_fields, **known.get("row_fields", {})}
        try:
            result = self.method(token_level_rewards, response_mask, index, **inputs, **options)
        except MissingFieldError as error:
            if batch is None:
                raise
            raise demand(error.field, self.name) from error
        if not isinstance(result, Advantage):
            raise TypeError(f"{self.name} returned a {type(result).__name__}; a method returns an Advantage")
        if batch is not None:
            batch.metrics.update(self.metrics(self.name, result, {"response_mask": response_mask, **inputs}))
        return result.advantages, result.returns


OURS = (
    Estimator("trloo", trloo_advantage, requires=("turn_reward",), metrics=metrics.of_turns),
    Estimator("dr_mas", dr_mas_advantage),
    Estimator("hgpo", hgpo_advantage, metrics=metrics.of_levels),
    Estimator("gigpo", gigpo_advantage),
    Estimator("otb", otb_advantage, columns=("sum_pi_squared",), metrics=metrics.of_baseline),
    Estimator("maxrl", maxrl_advantage),
)

ESTIMATORS: dict[str, Estimator] = {one.name: one for one in OURS}
"""Our estimators by name; `load_others` adds those of other packages."""


def of_loops(name: str, algorithm: Any) -> list[str]:
    """The turn fields, of those that only an agent loop can say, that an estimator cannot do without."""
    estimator = ESTIMATORS[name]
    fields = set(estimator.group_by(algorithm))
    if name in ("hgpo", "gigpo"):
        fields.add("anchor_obs")
    if name == "dr_mas" and not fields and estimator.settings(algorithm)["level"] == "agent":
        fields.add("agent_id")
    return sorted(fields & {"agent_id", "anchor_obs"})


def check(algorithm: Any, names: Collection[str]) -> None:
    """Check the options of the named estimators, and of every other one that ``algorithm`` has a node for.

    A ``group_by`` is refused where it names no turn field: a column of tokens, or a known field misspelled. Any other
    name is taken for a field that the agent loop returns; the first batch says so if it does not.

    Args:
        algorithm: verl's node.
        names: the run's estimators.

    Raises:
        OptionError: names the key, its value and what to give.
    """
    fields = ["index", *FROM_KEY, *FROM_EXTRA_FIELDS]
    for name, estimator in ESTIMATORS.items():
        if name not in names and select(algorithm, name) is None:
            continue
        for field in estimator.group_by(algorithm):
            near = difflib.get_close_matches(field, fields, n=1, cutoff=0.8)
            if field in TOKEN_COLUMNS:
                raise OptionError(f"algorithm.{name}.group_by names {field!r}, which has an entry a token, not a turn.")
            if field not in fields and near:
                raise OptionError(
                    f"algorithm.{name}.group_by names {field!r}, which is no turn field; did you mean {near[0]!r}? "
                    "A field of your own agent loop needs a name that is not so close to it."
                )


def load_others() -> None:
    """Add the methods of other packages to `ESTIMATORS`. Idempotent."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    ours = {one.name for one in OURS}
    for point in method_entry_points():
        if point.name not in UNUSABLE and (point.name in ours or point.name not in ESTIMATORS):
            _add(point, ours | set(ADV_ESTIMATOR_REGISTRY))


UNUSABLE: dict[str, str] = {}
"""Methods of other packages that could not be registered, and why."""


def _add(point: Any, taken: set[str]) -> None:
    """Add the method of another package, or remember why it can't be, and say so once."""
    try:
        if point.name in taken:
            raise ValueError(f"there is an estimator {point.name!r} already; give the entry point another name")
        found = point.load()
        made = found if isinstance(found, Estimator) else Estimator(point.name, found)
        if made.name != point.name:
            raise ValueError(f"the Estimator's name is {made.name!r}; it must be that of the entry point")
        _ = made.options, made.function  # its signature can be read
    except Exception as error:  # the package is another's: its failure must not take the rest along
        UNUSABLE[point.name] = f"the entry point {point.name} = {point.value} ({METHODS_GROUP}) failed: {error!r}"
        print(f"verl_ext: {UNUSABLE[point.name]}. A run that names it is refused.", file=sys.stderr, flush=True)
    else:
        ESTIMATORS[point.name] = made
