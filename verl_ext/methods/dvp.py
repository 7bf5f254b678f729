# SPDX-License-Identifier: Apache-2.0
"""Dynamic Vocabulary Pruning: the policy restricted to its safe vocabulary.

Source: arXiv 2512.23087. The set rule and the renormalised log-probabilities are those of a co-author's public fork
(jiawei415/verl, commits a15a586, e6bccb8 and 3e1b61d), with two deliberate differences. The fork replaces the pruned
logits by the constant -50, so that its result changes when all logits move together; here the set and the policy are
relative to the largest logit of the row. And the fork has no rule for a sampled token outside the set; here it is
reported (`in_set`), to be masked out of the loss, and nothing is trained through its normaliser.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from verl_ext.methods.logits.logits_pass import token_statistics

__all__ = ["PUBLISHED_RHO", "PrunedLogProbs", "pruned_log_probs"]

#: e^-12, of the fork's example script.
PUBLISHED_RHO = 6.14421235332821e-06


class PrunedLogProbs(NamedTuple):
    """What :func:`pruned_log_probs` returns; every tensor has the shape of the labels."""

    log_probs: torch.Tensor  #: log pi_mp(label), differentiable; float32, float64 for float64 logits
    in_set: torch.Tensor  #: bool, the label is in the safe set; where it is not, mask it out of the loss
    entropy: torch.Tensor  #: of pi_mp, in nats, differentiable
    sum_pi_squared: torch.Tensor  #: sum over the vocabulary of pi_mp^2, no gradient
    kept_mass: torch.Tensor  #: mass of the set under the policy before pruning, in (0, 1], no gradient


def pruned_log_probs(
    logits: torch.Tensor, labels: torch.Tensor, rho: float, temperature: float | torch.Tensor = 1.0
) -> PrunedLogProbs:
    """Log-probabilities of the labels under the policy pruned to its safe set and renormalised.

        V_S = {a : z_a >= max_b z_b + ln rho},  z = logits / temperature
        pi_mp(a) = pi(a) 1[a in V_S] / sum_{V_S} pi

    The same set as a sampler's ``min_p = rho``: pi(a) >= rho max pi. It is a constant for the gradient, which is
    exactly zero off the set. A label outside it has a finite log-probability below ln rho, at least -1e4, and gradient
    zero for the whole row; the row's entropy keeps its own gradient.

    Args:
        logits: [..., V] float16, bfloat16, float32 or float64, before the temperature; -inf is a token of probability
            zero.
        labels: [...] int64 in [0, V).
        rho: threshold relative to the largest probability, at most 1; 1 keeps the maximum and what ties with it, 0 or
            less keeps everything.
        temperature: > 0; a number, or a tensor that broadcasts to the labels.

    Raises:
        ValueError: rho above 1 or NaN, a temperature that is not positive, labels out of range, shapes that do not
            match.

    Source: arXiv 2512.23087; the rule of the set, released code at commit a15a586.
    """
    found = token_statistics(logits, labels, temperature=temperature, rho=rho, entropy=True, sum_pi_squared=True)
    assert found.entropy is not None and found.sum_pi_squared is not None
    in_set, kept_mass = found.in_set, found.kept_mass
    if in_set is None or kept_mass is None:  # pruning is off
        in_set = torch.ones_like(labels, dtype=torch.bool, device=logits.device)
        kept_mass = torch.ones_like(found.sum_pi_squared)
    return PrunedLogProbs(found.log_probs, in_set, found.entropy, found.sum_pi_squared, kept_mass)
