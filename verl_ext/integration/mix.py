# SPDX-License-Identifier: Apache-2.0
"""``algorithm.adv_estimator=mix``: a weighted sum of registered estimators.

    A = sum_k w_k A_k,   returns = sum_k w_k returns_k,   w_k = weight_k / sum of weights (``mix_normalize: true``)

``algorithm.mix`` maps registered names, verl's own included, to weights. A mixture of one estimator with weight 1 is
that estimator, bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from verl_ext.integration.columns import batch_of
from verl_ext.integration.estimators import ESTIMATORS, UNUSABLE
from verl_ext.integration.settings.options import OptionError, select


def weights(config: Any) -> dict[str, float]:
    """``algorithm.mix`` as {name: weight}, checked, and normalised unless ``algorithm.mix_normalize`` is false.

    Args:
        config: verl's ``algorithm`` node.

    Raises:
        OptionError: the map is missing or empty, a weight is not a finite number, all weights are zero, a name is
            not registered, or ``mix`` names itself.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    node = select(config, "mix")
    if not node:
        raise OptionError(
            "algorithm.adv_estimator is 'mix', but algorithm.mix is empty: give names and weights, for example "
            "algorithm.mix={trloo: 1.0}."
        )
    parts = {}
    for name, weight in dict(node).items():
        if name == "mix":
            raise OptionError("algorithm.mix names 'mix': a mixture cannot contain itself.")
        if name not in {*ADV_ESTIMATOR_REGISTRY, *ESTIMATORS}:
            if name in UNUSABLE:
                raise OptionError(f"algorithm.mix.{name}: {UNUSABLE[name]}.")
            known = ", ".join(sorted({*ADV_ESTIMATOR_REGISTRY, *ESTIMATORS} - {"mix"}))
            raise OptionError(f"algorithm.mix.{name}: no estimator of that name is registered. Known: {known}.")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise OptionError(f"algorithm.mix.{name} is {weight!r}; a weight is a finite number.")
        if weight != 0:
            parts[str(name)] = float(weight)
    if not parts:
        raise OptionError("algorithm.mix gives every estimator the weight 0; nothing would be learned.")
    normalize = select(config, "mix_normalize", True)
    if not isinstance(normalize, bool):
        raise OptionError(f"algorithm.mix_normalize is {normalize!r}; give true or false.")
    if normalize:
        total = sum(parts.values())
        if total <= 0:
            raise OptionError(
                f"the weights of algorithm.mix add up to {total}; they cannot be normalised. "
                "Set algorithm.mix_normalize=false to use them as they are."
            )
        parts = {name: weight / total for name, weight in parts.items()}
    return parts


def component_names(config: Any) -> list[str]:
    """The estimators that ``algorithm`` asks for: those of the mixture, or the one that is named."""
    name = select(config, "adv_estimator")
    return list(weights(config)) if name == "mix" else [getattr(name, "value", name)]


def mix(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    config: Any = None,
    **columns: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the estimators of ``algorithm.mix``.

    Args:
        token_level_rewards: [B, T] float, as for every estimator.
        response_mask: [B, T] 0/1.
        index: [B] prompt uids.
        config: verl's ``algorithm`` node.
        **columns: further columns, handed to every component.

    Returns:
        ``(advantages, returns)``, both [B, T] float32.

    Raises:
        OptionError: see `weights`.
        RowFieldMissing: it is called in a training process, but not by verl_ext's trainer.
    """
    batch = batch_of("mix")
    shared = {"token_level_rewards": token_level_rewards, "response_mask": response_mask, "index": index}
    parts = []
    for name, weight in weights(config).items():
        if batch is not None and batch.component is not None:
            advantages, returns = batch.component(name)
        else:
            advantages, returns = _by_hand(name, {**shared, "config": config, **columns})
        parts.append((name, weight, advantages, returns))

    if len(parts) == 1 and parts[0][1] == 1.0:
        return parts[0][2], parts[0][3]
    total = torch.zeros_like(parts[0][2])
    total_returns = torch.zeros_like(parts[0][3])
    for _, weight, advantages, returns in parts:
        total.add_(advantages, alpha=weight)
        total_returns.add_(returns, alpha=weight)
    if batch is not None:
        batch.metrics.update(_shares(parts, total, response_mask))
    return total, total_returns


def _by_hand(name: str, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a registered estimator outside a trainer, with verl's two special signatures taken care of."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    config = arguments["config"]
    if name == "grpo":
        arguments = {key: arguments[key] for key in ("token_level_rewards", "response_mask", "index")}
        arguments["norm_adv_by_std_in_grpo"] = select(config, "norm_adv_by_std_in_grpo", True)
    elif name == "gae":
        arguments = {key: arguments[key] for key in ("token_level_rewards", "values", "response_mask")}
        arguments.update(gamma=select(config, "gamma", 1.0), lam=select(config, "lam", 1.0))
    return get_adv_estimator_fn(name)(**arguments)


def _shares(parts: list[Any], total: torch.Tensor, response_mask: torch.Tensor) -> dict[str, float]:
    """Of each component root mean square, correlations, and share <w_k A_k, A> / <A, A>; the shares add up to 1."""
    chosen = response_mask.bool()
    if not bool(chosen.any()):
        return {}
    mixed = total[chosen].double()
    energy = float(mixed @ mixed)
    values = {name: advantages[chosen].double() for name, _, advantages, _ in parts}
    out: dict[str, float] = {}
    for name, weight, _, _ in parts:
        own = values[name]
        out[f"mix/{name}/weight"] = weight
        out[f"mix/{name}/rms"] = float(own.square().mean().sqrt())
        out[f"mix/{name}/share"] = weight * float(own @ mixed) / energy if energy > 0 else 0.0
    names = list(values)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            a, b = values[first] - values[first].mean(), values[second] - values[second].mean()
            norm = float(a.norm() * b.norm())
            out[f"mix/correlation/{first}-{second}"] = float(a @ b) / norm if norm > 0 else 0.0
    return out
