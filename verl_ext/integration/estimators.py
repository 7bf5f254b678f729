# SPDX-License-Identifier: Apache-2.0
"""Registered advantage estimators: `verl_ext.methods` under verl's names, arguments and config keys.

Every function takes verl's arguments and, by keyword, the row fields that its method needs. In a training run the
trainer mixin provides them (`verl_ext.integration.columns`); by hand they are passed:

    fn = verl.trainer.ppo.core_algos.get_adv_estimator_fn("trloo")
    advantages, returns = fn(token_level_rewards=r, response_mask=m, index=uid, traj_uid=t, turn_index=k, config=cfg)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from verl_ext.integration import checks, columns, metrics, options
from verl_ext.methods import trloo as method
from verl_ext.methods.returns import turn_returns
from verl_ext.methods.rows import Rows

Result = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Estimator:
    """A registered estimator.

    Attributes:
        function: what verl calls.
        options: dataclass of ``algorithm.<name>.*``.
        columns: token columns that the training engine must deliver with the old log-probabilities.
        check: looks at the whole config before the run; returns warnings or raises OptionError.
    """

    function: Callable[..., Result]
    options: type
    columns: tuple[str, ...] = ()
    check: Callable[[Any], list[str]] = lambda config: []


ESTIMATORS: dict[str, Estimator] = {}


def estimator(
    name: str,
    options_type: type,
    requires: tuple[str, ...] = (),
    engine_columns: tuple[str, ...] = (),
    check: Callable[[Any], list[str]] = lambda config: [],
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Declare a registered estimator; arguments that were not given are taken from the active batch.

    Args:
        name: value of ``algorithm.adv_estimator`` or key of ``algorithm.mix``.
        options_type: dataclass of the method's options.
        requires: row fields without which there is no answer, inside a training run.
        engine_columns: see `Estimator`.
        check: see `Estimator`.
    """

    def declare(function: Callable[..., Result]) -> Callable[..., Result]:
        parameters = inspect.signature(function).parameters
        fillable = [parameter for parameter in parameters if parameter in columns.NAMES]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Result:
            batch = columns.current()
            if batch is not None:
                for field in fillable:
                    if kwargs.get(field) is None and field in batch.columns:
                        kwargs[field] = batch.columns[field]
                for field in requires:
                    if kwargs.get(field) is None:
                        raise columns.demand(field, name)
                kwargs.setdefault("row_fields", batch.columns)
            return function(*args, **kwargs)

        ESTIMATORS[name] = Estimator(call, options_type, engine_columns, check)
        return call

    return declare


def _report(values: dict[str, float]) -> None:
    """Add an estimator's metrics to those of the step."""
    batch = columns.current()
    if batch is not None:
        batch.metrics.update(values)


@estimator("trloo", options.TrlooOptions, requires=("turn_reward",), check=checks.check_trloo)
def trloo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    config: Any = None,
    *,
    traj_uid: Any = None,
    turn_index: Any = None,
    turn_reward: Any = None,
    valid_row: Any = None,
    row_fields: Any = None,
    **_: Any,
) -> Result:
    """Turn-level REINFORCE leave-one-out (arXiv 2602.05885); see `verl_ext.methods.trloo.trloo_advantage`.

    Args:
        token_level_rewards: [B, T] float; the row's score is its sum where `turn_reward` is not given.
        response_mask: [B, T] 0/1, model tokens.
        index: [B] prompt uid.
        config: verl's ``algorithm`` node: ``gamma`` and ``trloo.*``.
        traj_uid: [B] trajectory; None means one row a trajectory.
        turn_index: [B] int, position in the trajectory.
        turn_reward: [B] float, reward of the row alone.
        valid_row: [B] bool; False rows are in no statistic.
        row_fields: further columns by name, for ``group_by``.

    Returns:
        ``(advantages, returns)``, both [B, T] float32.
    """
    chosen = options.read(config, "trloo", options.TrlooOptions)
    fields = {"traj_uid": traj_uid, "turn_index": turn_index, "turn_reward": turn_reward, "valid_row": valid_row}
    gamma = options.discount(config)
    result = method.trloo_advantage(
        token_level_rewards,
        response_mask,
        index,
        **fields,
        gamma=gamma,
        baseline=chosen.baseline,
        batch_std=chosen.batch_std,
        mask_regressions=chosen.mask_regressions,
        group_by=chosen.group_by,
        row_fields=row_fields,
    )
    if columns.current() is not None:
        rows = Rows(len(response_mask), index=index, row_fields=row_fields, **fields)
        trajectory, turn = rows.turns()
        returns = turn_returns(rows.floats("turn_reward"), trajectory, turn, gamma=gamma)
        advantage = metrics.row_advantages(result[0], response_mask)[rows.kept]
        _report(metrics.group_metrics("trloo", rows.keys(chosen.group_by)))
        _report(metrics.turn_metrics("trloo", turn, returns, advantage))
    return result


def register() -> None:
    """Register every estimator of this module, and ``mix``, with verl. Idempotent."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    from verl_ext.integration.mix import mix

    for name, function in {**{key: value.function for key, value in ESTIMATORS.items()}, "mix": mix}.items():
        if ADV_ESTIMATOR_REGISTRY.get(name) is not function:
            register_adv_est(name)(function)
