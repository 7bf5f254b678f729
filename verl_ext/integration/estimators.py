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

import numpy as np
import torch

from verl_ext.integration import columns, metrics, options
from verl_ext.methods import dr_mas as dr_mas_method
from verl_ext.methods import gigpo as gigpo_method
from verl_ext.methods import hgpo as hgpo_method
from verl_ext.methods import otb as otb_method
from verl_ext.methods import trloo as trloo_method
from verl_ext.methods.groups import joint_ids
from verl_ext.methods.returns import regressed_turns, turn_returns
from verl_ext.methods.rows import Rows

Result = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Estimator:
    """A registered estimator.

    Attributes:
        function: what verl calls.
        options: dataclass of ``algorithm.<name>.*``.
        columns: token columns that the training engine must deliver with the old log-probabilities.
        check: looks at the whole config before the run; raises OptionError.
    """

    function: Callable[..., Result]
    options: type
    columns: tuple[str, ...] = ()
    check: Callable[[Any], None] = lambda config: None


ESTIMATORS: dict[str, Estimator] = {}


def estimator(
    name: str,
    options_type: type,
    requires: tuple[str, ...] = (),
    engine_columns: tuple[str, ...] = (),
    check: Callable[[Any], None] = lambda config: None,
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
                # For `group_by`. Token columns are no group keys, and passing them on would copy them.
                fields = {key: value for key, value in batch.columns.items() if key not in columns.TOKEN_COLUMNS}
                kwargs.setdefault("row_fields", fields)
            return function(*args, **kwargs)

        ESTIMATORS[name] = Estimator(call, options_type, engine_columns, check)
        return call

    return declare


def _report(values: dict[str, float]) -> None:
    """Add an estimator's metrics to those of the step."""
    batch = columns.current()
    if batch is not None:
        batch.metrics.update(values)


@estimator("trloo", options.TrlooOptions, requires=("turn_reward",))
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
    result = trloo_method.trloo_advantage(
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
        rewards = rows.floats("turn_reward")
        sample = np.ones(len(rewards), dtype=bool)
        if chosen.mask_regressions:
            sample = ~regressed_turns(rewards, trajectory, turn)
        returns = turn_returns(rewards, trajectory, turn, gamma=gamma, valid_row=sample)
        advantage = metrics.row_advantages(result[0], response_mask)[rows.kept]
        _report(metrics.group_metrics("trloo", rows.keys(chosen.group_by)[sample]))
        _report(metrics.turn_metrics("trloo", turn[sample], returns[sample], advantage[sample]))
    return result


@estimator("dr_mas", options.DrMasOptions, requires=("traj_uid",))
def dr_mas(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    config: Any = None,
    *,
    traj_uid: Any = None,
    agent_id: Any = None,
    is_action_valid: Any = None,
    valid_row: Any = None,
    row_fields: Any = None,
    **_: Any,
) -> Result:
    """Agent-wise normalisation (arXiv 2602.08847); see `verl_ext.methods.dr_mas.dr_mas_advantage`.

    Args:
        token_level_rewards: [B, T] float; its row sum is the outcome of the row's trajectory.
        response_mask: [B, T] 0/1, model tokens.
        index: [B] prompt uid.
        config: verl's ``algorithm`` node: ``norm_adv_by_std_in_grpo`` and ``dr_mas.*``.
        traj_uid: [B] trajectory, for ``level: global``.
        agent_id: [B] str, for ``level: agent``.
        is_action_valid: [B] bool; False rows pay ``invalid_action_penalty_coef``.
        valid_row: [B] bool; False rows are in no statistic.
        row_fields: further columns by name, for ``group_by``.

    Returns:
        ``(advantages, returns)``, both [B, T] float32.
    """
    chosen = options.read(config, "dr_mas", options.DrMasOptions)
    if columns.current() is not None and agent_id is None and "agent_id" in _dr_mas_groups(chosen):
        raise columns.demand("agent_id", "dr_mas")
    norm_by_std = chosen.norm_by_std
    if norm_by_std is None:
        norm_by_std = bool(options.select(config, "norm_adv_by_std_in_grpo", True))
    fields = {"traj_uid": traj_uid, "agent_id": agent_id, "valid_row": valid_row}
    result = dr_mas_method.dr_mas_advantage(
        token_level_rewards,
        response_mask,
        index,
        **fields,
        is_action_valid=is_action_valid,
        level=chosen.level,
        norm_by_std=norm_by_std,
        invalid_action_penalty_coef=chosen.invalid_action_penalty_coef,
        epsilon=chosen.epsilon,
        group_by=chosen.group_by,
        row_fields=row_fields,
    )
    if columns.current() is not None:
        rows = Rows(len(response_mask), index=index, row_fields=row_fields, **fields)
        _report(metrics.group_metrics("dr_mas", rows.keys(_dr_mas_groups(chosen))))
    return result


def _dr_mas_groups(chosen: options.DrMasOptions) -> tuple[str, ...]:
    if chosen.group_by is not None:
        return chosen.group_by
    return ("index", "agent_id") if chosen.level == "agent" else ("index",)


STEP_FIELDS = ("traj_uid", "turn_index", "anchor_obs", "turn_reward")


@estimator("hgpo", options.HgpoOptions, requires=STEP_FIELDS)
def hgpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    config: Any = None,
    *,
    traj_uid: Any = None,
    turn_index: Any = None,
    anchor_obs: Any = None,
    turn_reward: Any = None,
    is_action_valid: Any = None,
    valid_row: Any = None,
    row_fields: Any = None,
    **_: Any,
) -> Result:
    """Hierarchy-of-groups policy optimisation (arXiv 2602.22817); see `verl_ext.methods.hgpo.hgpo_advantage`.

    Args:
        token_level_rewards: [B, T] float; its row sum is the episode return, for ``base_group``.
        response_mask: [B, T] 0/1, model tokens.
        index: [B] prompt uid.
        config: verl's ``algorithm`` node: ``gamma`` and ``hgpo.*``.
        traj_uid: [B] trajectory.
        turn_index: [B] int, step in the trajectory.
        anchor_obs: [B] raw observation of the step, compared by value.
        turn_reward: [B] float, the environment's reward of the step.
        is_action_valid: [B] bool; False rows pay ``invalid_action_penalty_coef``, after discounting.
        valid_row: [B] bool; False rows are in no group.
        row_fields: further columns by name, for ``group_by``.

    Returns:
        ``(advantages, returns)``, both [B, T] float32.
    """
    chosen = options.read(config, "hgpo", options.HgpoOptions)
    fields = {
        "traj_uid": traj_uid,
        "turn_index": turn_index,
        "anchor_obs": anchor_obs,
        "turn_reward": turn_reward,
        "is_action_valid": is_action_valid,
        "valid_row": valid_row,
    }
    result = hgpo_method.hgpo_advantage(
        token_level_rewards,
        response_mask,
        index,
        **fields,
        gamma=options.discount(config, default=0.95),
        history_length=chosen.history_length,
        mode=chosen.mode,
        length_weight_alpha=chosen.length_weight_alpha,
        base_group=chosen.base_group,
        level_weights=chosen.level_weights,
        invalid_action_penalty_coef=chosen.invalid_action_penalty_coef,
        epsilon=chosen.epsilon,
        group_by=chosen.group_by,
        row_fields=row_fields,
    )
    if columns.current() is not None:
        rows = Rows(len(response_mask), index=index, row_fields=row_fields, **fields)
        trajectory, turn = rows.turns()
        levels = hgpo_method.history_groups(
            rows.ids("anchor_obs"), trajectory, turn, rows.keys(chosen.group_by), chosen.history_length + 1
        )
        _report(metrics.level_metrics("hgpo", [groups for _, groups in levels], len(rows.kept)))
    return result


@estimator("gigpo", options.GigpoOptions, requires=STEP_FIELDS)
def gigpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    config: Any = None,
    *,
    traj_uid: Any = None,
    turn_index: Any = None,
    anchor_obs: Any = None,
    turn_reward: Any = None,
    is_action_valid: Any = None,
    valid_row: Any = None,
    row_fields: Any = None,
    **_: Any,
) -> Result:
    """Group-in-group policy optimisation (arXiv 2505.10978); see `verl_ext.methods.gigpo.gigpo_advantage`.

    Args:
        token_level_rewards: [B, T] float; its row sum is the episode return.
        response_mask: [B, T] 0/1, model tokens.
        index: [B] prompt uid.
        config: verl's ``algorithm`` node: ``gamma`` and ``gigpo.*``.
        traj_uid: [B] trajectory.
        turn_index: [B] int, step in the trajectory.
        anchor_obs: [B] raw observation of the step, compared by value or by similarity.
        turn_reward: [B] float, the environment's reward of the step.
        is_action_valid: [B] bool; False rows pay ``invalid_action_penalty_coef``, after discounting.
        valid_row: [B] bool; False rows are in no group.
        row_fields: further columns by name, for ``group_by``.

    Returns:
        ``(advantages, returns)``, both [B, T] float32.
    """
    chosen = options.read(config, "gigpo", options.GigpoOptions)
    fields = {
        "traj_uid": traj_uid,
        "turn_index": turn_index,
        "anchor_obs": anchor_obs,
        "turn_reward": turn_reward,
        "is_action_valid": is_action_valid,
        "valid_row": valid_row,
    }
    result = gigpo_method.gigpo_advantage(
        token_level_rewards,
        response_mask,
        index,
        **fields,
        gamma=options.discount(config, default=0.95),
        mode=chosen.mode,
        step_advantage_w=chosen.step_advantage_w,
        episode_stats=chosen.episode_stats,
        enable_similarity=chosen.enable_similarity,
        similarity_thresh=chosen.similarity_thresh,
        invalid_action_penalty_coef=chosen.invalid_action_penalty_coef,
        epsilon=chosen.epsilon,
        group_by=chosen.group_by,
        row_fields=row_fields,
    )
    if columns.current() is not None:
        rows = Rows(len(response_mask), index=index, row_fields=row_fields, **fields)
        # Groups of equal observations; clustering by similarity is quadratic and is not done a second time for this.
        _report(metrics.group_metrics("gigpo", joint_ids(rows.keys(chosen.group_by), rows.ids("anchor_obs"))))
    return result


@estimator("otb", options.OtbOptions, engine_columns=("sum_pi_squared",))
def otb(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    config: Any = None,
    *,
    old_log_probs: Any = None,
    sum_pi_squared: Any = None,
    rollout_is_weights: Any = None,
    valid_row: Any = None,
    row_fields: Any = None,
    **_: Any,
) -> Result:
    """Optimal token baseline (arXiv 2602.07078); see `verl_ext.methods.otb.otb_advantage`.

    Args:
        token_level_rewards: [B, T] float.
        response_mask: [B, T] 0/1, model tokens.
        index: [B] prompt uid.
        config: verl's ``algorithm`` node: ``otb.*``.
        old_log_probs: [B, T] float, of the sampled tokens.
        sum_pi_squared: [B, T] float, sum of squared probabilities of the old policy at every position.
        rollout_is_weights: [B, T] float, detached importance weights, or None.
        valid_row: [B] bool; False rows are in no sum.
        row_fields: further columns by name, for ``group_by``.

    Returns:
        ``(advantages, returns)``, both [B, T] float32; returns are the rewards to go.
    """
    for name, value in (("old_log_probs", old_log_probs), ("sum_pi_squared", sum_pi_squared)):
        if value is None:
            raise columns.demand(name, "otb")
    chosen = options.read(config, "otb", options.OtbOptions)
    result = otb_method.otb_advantage(
        token_level_rewards,
        response_mask,
        index,
        old_log_probs=old_log_probs,
        sum_pi_squared=sum_pi_squared,
        rollout_is_weights=rollout_is_weights,
        valid_row=valid_row,
        alignment=chosen.alignment,
        baseline=chosen.baseline,
        handle_zero_tail=chosen.handle_zero_tail,
        epsilon=chosen.epsilon,
        group_by=chosen.group_by,
        row_fields=row_fields,
    )
    if columns.current() is not None:
        rows = Rows(len(response_mask), index=index, row_fields=row_fields, valid_row=valid_row)
        group = rows.keys(chosen.group_by)
        _report(metrics.group_metrics("otb", group))
        energy = metrics.path_energy(old_log_probs, sum_pi_squared, response_mask, rollout_is_weights)
        _report(metrics.baseline_metrics("otb", result[0], result[1], response_mask, energy[rows.kept], group))
    return result


def register() -> None:
    """Register every estimator of this module, and ``mix``, with verl. Idempotent."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    from verl_ext.integration.mix import mix

    for name, function in {**{key: value.function for key, value in ESTIMATORS.items()}, "mix": mix}.items():
        if ADV_ESTIMATOR_REGISTRY.get(name) is not function:
            register_adv_est(name)(function)
