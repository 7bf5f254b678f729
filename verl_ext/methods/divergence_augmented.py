# SPDX-License-Identifier: Apache-2.0
"""Divergence-augmented policy optimisation (NeurIPS 2019, arXiv 2501.15034) over the tokens of a response.

    d_t = log pi(y_t) - log pi_old(y_t),   ratio_t = exp(d_t)
    V_t = min(rho_bar, ratio_t) d_t + min(c, ratio_t) V_{t+1}
    D_t = d_t + V_{t+1}                                            what the old data will have drifted by from here on
    L_t = -A_t ratio_t + beta ratio_t D_t                          A_t and D_t without gradient

so the effective advantage is A_t - beta D_t. c = 0 looks one token ahead, c = 1 to the end of the response. Tokens that
are not the model's are skipped. In the first update of a batch d = 0 and nothing changes. The form for responses (a
reward at the end, no discount) is derived from lns/dapo `darl/learner/ppo.py`, whose V_t weighs with the ratio of the
same index, as here.
"""

from __future__ import annotations

import torch

from verl_ext.methods.options import NotNegative, checked
from verl_ext.methods.returns import accumulated
from verl_ext.methods.rows import check_token_field

LARGEST_LOG_RATIO = 20.0


@checked
def divergence_augmented_terms(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    beta: NotNegative = 0.5,
    c: NotNegative = 1.0,
    rho_bar: NotNegative = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of every token and the divergence that it was charged.

    Args:
        old_log_prob, log_prob: [B, T] float, of the sampled tokens under the policy of the batch's start and now.
        advantages: [B, T] float.
        response_mask: [B, T] of 0 and 1, model tokens.
        beta: weight of the divergence, at least 0. Published (Atari): 0.5 or 1.
        c: cut of the trace, at least 0; 0 one step, 1 multi-step.
        rho_bar: cut of the ratio in front of d_t. Published: 1.

    Returns:
        ``(loss, divergence)``: L_t in the dtype of `log_prob`, with gradient, and D_t in float64, without; both [B, T],
        0 where there is no model token.

    Raises:
        ValueError: an option is out of range or a shape is wrong.
    """
    for name, field in (("old_log_prob", old_log_prob), ("log_prob", log_prob), ("advantages", advantages)):
        check_token_field(name, field, response_mask)
    token = response_mask.bool()
    log_ratio = torch.where(token, log_prob - old_log_prob, 0.0).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratio = log_ratio.exp()

    d, weight = log_ratio.detach().double(), ratio.detach().double()
    V = accumulated(
        torch.where(token, weight.clamp(max=rho_bar) * d, 0.0), torch.where(token, weight.clamp(max=c), 1.0)
    )
    divergence = torch.where(token, d + torch.nn.functional.pad(V[:, 1:], (0, min(1, d.shape[1]))), 0.0)
    effective = torch.where(token, advantages.detach() - beta * divergence.to(log_prob.dtype), 0.0)
    return -effective * ratio, divergence
