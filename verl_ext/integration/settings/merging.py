# SPDX-License-Identifier: Apache-2.0
"""``verl_ext.merge_turns``: whether the turns of a trajectory are stored and trained as one sequence.

``auto`` merges where a loss is the same whatever sequences its tokens are in, and sees the turns of a loop with one
output where an estimator of ours computes the advantages. ``true`` does both wherever it can be, ``false`` neither.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any, Literal

from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.options import OptionError, has_critic, option, select

KEY = "verl_ext.merge_turns"
OURS = ("kpo", "divergence_augmented", "hybrid_imitation")
"""Losses that look along a turn and are computed turn by turn in a merged sequence (`verl_ext.integration.losses`)."""
BY_TOKEN = ("vanilla", "dppo_tv", "dppo_kl", "gpg", "clip_cov", "kl_cov", "dro", "cispo", "bypass_mode", *OURS)
"""Losses of verl and ours that have a term a token, which the other tokens of its sequence don't enter."""
FIXED_MODE = re.compile(r"""loss_agg_mode\s*=\s*["']([\w-]+)["']\s*[,)]""")
"""In the source of a loss: it hands `agg_loss` a mode of its own, whatever ``loss_agg_mode`` says."""


def asked(config: Any) -> Any:
    """``verl_ext.merge_turns``: True, False or "auto". Raises OptionError: it is something else."""
    return option(config, "merge_turns", Literal["auto", True, False], "auto")


def merges(config: Any) -> bool:
    """Whether outputs that continue each other become one sequence. Raises OptionError: `asked`, or it can't be."""
    how = asked(config)
    if how is True and _reward_model(config):
        raise OptionError(
            f"{KEY}=true, but reward.reward_model.enable=true without a resource pool of its own scores each sequence "
            "that is stored, and would read whole conversations in place of their last calls. Set "
            f"reward.reward_model.enable_resource_pool=true, or {KEY}=false."
        )
    return how is True or (how == "auto" and why_not(config) is None)


def sees_turns(config: Any, ours: bool) -> bool:
    """Whether the runs of 1 in the mask of a loop's single output are turns; `ours`: an estimator is none of verl's."""
    how = asked(config)
    return how is True or (how == "auto" and ours)


def statement(config: Any) -> str:
    """For the start of a run: whether it merges, and why not."""
    how = asked(config)
    said = f"{KEY}={'auto' if how == 'auto' else str(how).lower()}"
    if merges(config):
        fixed = select(config.get("verl_ext"), "updates_per_batch") is not None
        cut = (
            "; verl's mini-batches are of sequences, so a batch gets fewer updates than with a sequence a call "
            "(verl_ext.updates_per_batch=N makes N in either case)"
        )
        return f"{said}: turns that continue each other are one sequence{'' if fixed else cut}"
    why = f", since {why_not(config)}; {KEY}=true merges all the same" if how == "auto" else ""
    return f"{said}: each model call is a sequence{why}"


def why_not(config: Any) -> str | None:
    """Why ``auto`` leaves each call a sequence: the first setting, of the run or of a further model, with which a run's
    numbers would be others; None: there is none."""
    further = model_options.of(config)
    found = [_of_run(config), _of_model(config)]
    found += [
        why and f"{model_options.KEY}.{one.name}: {why}" for one in further for why in [_of_model(one.config(config))]
    ]
    return next((why for why in found if why), None)


def _of_run(config: Any) -> str | None:
    correction, kl = select(config.algorithm, "rollout_correction"), select(config.algorithm, "use_kl_in_reward", False)
    weights, rejection = (str(select(correction, name) or "token") for name in ("rollout_is", "rollout_rs"))
    by_token = all(one.strip().startswith("token") for one in rejection.split(","))
    control = select(select(config.algorithm, "kl_ctrl"), "type", "fixed")
    taught = select(config.get("distillation"), "enabled", False)
    reasons = {
        "the values of a critic end with the call": has_critic(config),
        f"algorithm.rollout_correction.rollout_is={weights} weighs whole sequences": weights != "token",
        f"algorithm.rollout_correction.rollout_rs={rejection} rejects whole sequences": not by_token,
        f"algorithm.kl_ctrl.type={control} follows the KL of whole sequences": kl and control != "fixed",
        "reward.reward_model scores each sequence that is stored": _reward_model(config),
        "verl asks a teacher of distillation for the last call alone": taught,
    }
    return next((why for why, holds in reasons.items() if holds), None)


def _of_model(config: Any) -> str | None:
    actor = config.actor_rollout_ref.actor
    loss = _loss(actor)
    if loss not in BY_TOKEN and fixed_mode(loss) is None:
        return f"actor_rollout_ref.actor.policy_loss.loss_mode={loss} is a loss of sequences, as far as is known"
    mode = fixed_mode(loss) or str(select(actor, "loss_agg_mode", "token-mean"))
    # With `updates_per_batch` a sequence of this mode is a trajectory, however many turns it has.
    by_sample = (
        mode.startswith("seq-mean-token-sum") and select(config.get("verl_ext"), "updates_per_batch") is not None
    )
    if mode.startswith("seq-mean") and not by_sample:
        return f"actor_rollout_ref.actor.loss_agg_mode={mode} averages over sequences"
    return None


def _reward_model(config: Any) -> bool:
    """Whether a reward model takes turns with the trainer and scores what is stored."""
    node = select(config.get("reward"), "reward_model")
    return bool(select(node, "enable", False)) and not select(node, "enable_resource_pool", False)


def losses(config: Any) -> Sequence[str]:
    """The policy losses of a run's models."""
    configs = [config, *(one.config(config) for one in model_options.of(config))]
    return [_loss(one.actor_rollout_ref.actor) for one in configs]


def _loss(actor: Any) -> str:
    return str(select(select(actor, "policy_loss"), "loss_mode", "vanilla"))


def fixed_mode(loss: str) -> str | None:
    """The aggregation mode that a registered loss of verl always uses, or None if it follows ``loss_agg_mode``.

    In verl 0.9.1 that is ``sapo``; in older trees ``gspo`` too. Told by its source, since no version tells.
    """
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    try:
        source = inspect.getsource(POLICY_LOSS_REGISTRY[loss])
    except (KeyError, OSError):  # no such loss, which verl says; or one without a source file
        return None
    found = FIXED_MODE.search(source.split('"""')[-1])  # after the docstring
    return found.group(1) if found else None
