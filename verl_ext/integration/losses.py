# SPDX-License-Identifier: Apache-2.0
"""Registered policy losses: `verl_ext.methods` under verl's names, arguments and config keys."""

from __future__ import annotations

import logging
from typing import Any

import torch

from verl_ext.integration.compat import wraps
from verl_ext.integration.engines import imitation, loss_turns
from verl_ext.integration.turns import Turns
from verl_ext.methods.divergence_augmented import divergence_augmented_terms
from verl_ext.methods.hybrid_imitation import hybrid_imitation_terms
from verl_ext.methods.kpo import kpo_loss_terms, steady_state_gain, time_constant

logger = logging.getLogger(__name__)

OPTIONS = {
    "kpo": "KPOPolicyLossConfig",
    "divergence_augmented": "DivergenceAugmentedPolicyLossConfig",
    "hybrid_imitation": "HybridImitationPolicyLossConfig",
}
"""For each loss the class of `verl_ext.integration.config` with its options."""

SHORT = 0.5
"""Responses shorter than this many time constants of the filter are warned about."""

_warned = False


def kpo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Policy loss with a causal Kalman filter over the log ratio (arXiv 2602.10609), ``loss_mode: kpo``.

    Args:
        old_log_prob, log_prob, advantages: [B, T] float.
        response_mask: [B, T] bool or 0/1, model tokens.
        loss_agg_mode: verl's aggregation mode.
        config: verl's ActorConfig; its ``policy_loss`` is a `verl_ext.integration.config.KPOPolicyLossConfig`.
        rollout_is_weights: [B, T] detached importance weights, or None.

    Returns:
        The aggregated loss, a scalar with gradient, and metrics.

    Raises:
        ValueError: ``policy_loss`` has not the options of this loss; use the recipe ``kpo``.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    options = _options(config, "kpo", "kalman_q")
    turns = loss_turns.current() if options.reset == "turn" else Turns()
    low = config.clip_ratio_low if config.clip_ratio_low is not None else config.clip_ratio
    high = config.clip_ratio_high if config.clip_ratio_high is not None else config.clip_ratio
    loss_mat, stats = kpo_loss_terms(
        *map(turns.unpack, (old_log_prob, log_prob, advantages, response_mask)),
        q=options.kalman_q,
        r=options.kalman_r,
        is_clip=options.is_clip,
        clip_ratio_low=low,
        clip_ratio_high=high,
        max_log_ratio=options.max_log_ratio,
        mask_mode=options.mask_mode,
        rollout_is_weights=None if rollout_is_weights is None else turns.unpack(rollout_is_weights),
    )
    loss_mat = turns.pack(loss_mat)
    loss = agg_loss(loss_mat=loss_mat, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    return loss, _metrics(stats, options.kalman_q / options.kalman_r)


def divergence_augmented(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Policy loss that charges the drift from the old policy (arXiv 2501.15034), ``loss_mode: divergence_augmented``.

    Arguments and results as of `kpo`; ``policy_loss`` is a `config.DivergenceAugmentedPolicyLossConfig`. The formula
    is in `verl_ext.methods.divergence_augmented`.

    Raises:
        ValueError: ``policy_loss`` has not the options of this loss; use the recipe ``divergence_augmented``.
    """
    options = _options(config, "divergence_augmented", "dapo_beta")
    turns = loss_turns.current()
    found = divergence_augmented_terms(
        *map(turns.unpack, (old_log_prob, log_prob, advantages, response_mask)),
        beta=options.dapo_beta,
        c=options.dapo_c,
        rho_bar=options.dapo_rho_bar,
    )
    terms, divergence = map(turns.pack, found)
    if rollout_is_weights is not None:
        terms = terms * torch.where(response_mask.bool(), rollout_is_weights, 0.0)
    means = {
        "actor/ppo_kl": old_log_prob - log_prob,
        "actor/divergence/mean": divergence,
        "actor/divergence/abs_mean": divergence.abs(),
    }
    return _unclipped(terms, response_mask, loss_agg_mode, config, means)


def hybrid_imitation(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Divergence from a teacher and reward in one gradient (arXiv 2512.23097), ``loss_mode: hybrid_imitation``.

    Arguments and results as of `kpo`; ``policy_loss`` is a `config.HybridImitationPolicyLossConfig`, and the divergence
    of each token is that of `imitation.current`. The formula is in `verl_ext.methods.hybrid_imitation`. The weights
    ``rollout_is_weights`` act on the sparse term, the one about the sampled token.

    Raises:
        ValueError: ``policy_loss`` has not the options of this loss; use the recipe ``hybrid_imitation``.
        RuntimeError: the engine has computed no divergence.
    """
    options = _options(config, "hybrid_imitation", "imitation_lambda")
    found = imitation.current()
    if found is None:
        raise RuntimeError(
            "hybrid_imitation: the training engine has computed no divergence from the teacher. Start the run with "
            "+recipe=hybrid_imitation and actor_rollout_ref.actor.strategy=fsdp2."
        )
    kl, *masses = (found[name] for name in imitation.OUTPUTS)
    turns = loss_turns.current()
    both = hybrid_imitation_terms(
        *map(turns.unpack, (kl, old_log_prob, log_prob, advantages, response_mask)),
        imitation_lambda=options.imitation_lambda,
        future_kl=options.future_kl,
    )
    dense, sparse = map(turns.pack, both)
    if rollout_is_weights is not None:
        sparse = sparse * torch.where(response_mask.bool(), rollout_is_weights, 0.0)
    means = {"actor/imitation/kl": kl, "actor/imitation/student_mass": masses[0]}
    means |= {"actor/imitation/teacher_mass": masses[1], "actor/ppo_kl": old_log_prob - log_prob}
    return _unclipped(dense + sparse, response_mask, loss_agg_mode, config, means)


def _unclipped(
    terms: torch.Tensor, response_mask: torch.Tensor, loss_agg_mode: str, config: Any, means: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss of these terms, [B, T], as verl aggregates it; as metrics the means of others over the model tokens."""
    from verl.trainer.ppo.core_algos import agg_loss

    loss = agg_loss(loss_mat=terms, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    columns = torch.stack([column.detach() for column in means.values()], dim=-1)[response_mask.bool()].double()
    metrics = dict(zip(means, (columns.sum(0) / max(len(columns), 1)).tolist(), strict=True))
    return loss, {**metrics, "actor/pg_clipfrac": 0.0, "actor/pg_clipfrac_lower": 0.0}  # nothing is clipped


def _options(config: Any, loss: str, option: str) -> Any:
    """The actor's ``policy_loss``, which carries the options of the loss."""
    options: Any = getattr(config, "policy_loss", None)
    if not hasattr(options, option):
        raise ValueError(
            f"loss_mode={loss} needs actor_rollout_ref.actor.policy_loss._target_=verl_ext.integration.config."
            f"{OPTIONS[loss]}, which carries its options. Use +recipe={loss}."
        )
    return options


def _metrics(stats: dict[str, Any], q: float) -> dict[str, Any]:
    """verl's own names where it has them; the largest log ratios are maxima, which verl would average."""
    from verl.utils.metric import AggregationType, Metric

    wraps.replace(wraps.LOSS_METRICS, _keeping_metrics)
    names = [name for name, value in stats.items() if isinstance(value, torch.Tensor)]
    values = dict(zip(names, torch.stack([stats[name].double() for name in names]).tolist(), strict=True))
    _warn_if_short(values["mean_response_length"], q)
    return {
        "actor/ppo_kl": -values["log_ratio_mean"],
        "actor/pg_clipfrac": values["clip_fraction"],
        "actor/pg_clipfrac_lower": 0.0,  # no dual clip here
        "actor/kpo/clip_fraction_low": values["clip_fraction_low"],
        "actor/kpo/clip_fraction_high": values["clip_fraction_high"],
        "actor/kpo/log_ratio_std": values["log_ratio_std"],
        "actor/kpo/log_ratio_abs_max": Metric(AggregationType.MAX, values["log_ratio_abs_max"]),
        "actor/kpo/filtered_log_ratio_std": values["filtered_log_ratio_std"],
        "actor/kpo/filtered_log_ratio_abs_max": Metric(AggregationType.MAX, values["filtered_log_ratio_abs_max"]),
        "actor/kpo/max_log_ratio_fraction": values["max_log_ratio_fraction"],
        "actor/kpo/response_length_mean": values["mean_response_length"],
        "actor/kpo/time_constant_tokens": time_constant(q),
        "actor/kpo/steady_state_gain": steady_state_gain(q),
    }


def _keeping_metrics(original: Any) -> Any:
    """verl's class of metrics as its loss calls it, except that a metric with an aggregation of its own keeps it."""

    class Metrics:
        def __new__(cls, aggregation: Any, value: Any = None) -> Any:
            return value if isinstance(value, original) else original(aggregation, value)

        @classmethod
        def from_dict(cls, data: dict[str, Any], aggregation: Any) -> dict[str, Any]:
            return {name: cls(aggregation, value) for name, value in data.items()}

    return Metrics


def _warn_if_short(mean_response_length: float, q: float) -> None:
    """Once a process: a filter that remembers longer than a response lasts hardly follows the ratio at all."""
    global _warned
    constant = time_constant(q)
    if not _warned and 0 < mean_response_length < SHORT * constant:
        _warned = True
        logger.warning(
            "kpo: the responses have %.0f tokens on average, but the filter's time constant is %.0f tokens at "
            "kalman_q/kalman_r=%g, so the filtered ratio stays near 1. A kalman_q of about %.1e would follow a change "
            "within half a response.",
            mean_response_length,
            constant,
            q,
            min(1.0, 4.0 / mean_response_length**2),
        )


LOSSES = {"kpo": kpo, "divergence_augmented": divergence_augmented, "hybrid_imitation": hybrid_imitation}
