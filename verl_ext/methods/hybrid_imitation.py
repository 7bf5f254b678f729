# SPDX-License-Identifier: Apache-2.0
"""Hybrid online RL and imitation (arXiv 2512.23097): stay near a teacher pi* and collect reward, with one gradient.

    C = E_{y ~ pi}[ sum_t KL_t - lambda r(y) ],     KL_t = KL(pi(.|s_t) || pi*(.|s_t))

    grad C = E sum_t grad KL_t                                                dense: every token of the vocabulary
           + E sum_t grad log pi(y_t) ( sum_{k>t} KL_k - lambda A_t )         sparse: the sampled token

    d KL_t / d z_a = pi(a) ( log pi(a)/pi*(a) - KL_t )                               direction reverse
    d KL_t / d z_a = pi(a) - pi*(a)          with KL_t = KL(pi* || pi)               direction forward

A_t is the reward less a baseline. Without the sum over k > t this is on-policy distillation beside RL, which is blind
to what a token makes of the states after it. Of a teacher that is known on K tokens only, both sides are restricted to
them and renormalised. The formulas are derived (the paper's abstract was read, not its body); they are exact by
enumeration.
"""

from __future__ import annotations

from typing import Any

import torch

from verl_ext.methods.rows import check_token_field

DIRECTIONS = ("reverse", "forward")
BLOCK_ELEMENTS = 1 << 24
"""Elements of a block of rows: 64 MB a buffer in float32."""
LARGEST_LOG_RATIO = 20.0


def teacher_kl(logits: torch.Tensor, teacher: torch.Tensor, direction: str = "reverse") -> torch.Tensor:
    """Divergence of two distributions over the last dimension, each renormalised, with the analytic gradient.

    Nothing as wide as the vocabulary is kept for backward but the two arguments.

    Args:
        logits: [N, K] float, of the policy, temperature applied; all finite.
        teacher: [N, K] float, logits or log-probabilities of the teacher for the same tokens, up to a constant a row;
            without gradient.
        direction: "reverse", KL(pi || teacher), or "forward", KL(teacher || pi).

    Returns:
        [N] float32 (float64 for float64 logits), in nats.

    Raises:
        ValueError: the shapes differ, or an unknown direction.
    """
    if logits.shape != teacher.shape or logits.ndim != 2:
        raise ValueError(f"logits {tuple(logits.shape)} and teacher {tuple(teacher.shape)} must both be [N, K]")
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; choose one of {', '.join(DIRECTIONS)}")
    return _TeacherKL.apply(logits, teacher, direction == "reverse")


class _TeacherKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, teacher: torch.Tensor, reverse: bool) -> torch.Tensor:
        ctx.save_for_backward(logits, teacher)
        ctx.reverse = reverse
        found = [_divergence(x, y, reverse)[0] for x, y in _blocks(logits, teacher)]
        return torch.cat(found) if found else logits.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, teacher = ctx.saved_tensors
        out, first = torch.empty_like(logits), 0
        for x, y in _blocks(logits, teacher):
            kl, log_pi, log_teacher = _divergence(x, y, ctx.reverse)
            pi = log_pi.exp()
            if ctx.reverse:
                slope = pi.mul_(log_pi.sub_(log_teacher).sub_(kl[:, None]))
            else:
                slope = pi.sub_(log_teacher.exp_())
            last = first + len(kl)
            out[first:last] = slope.mul_(grads[0][first:last, None])
            first = last
        return out, None, None


def _divergence(x: torch.Tensor, teacher: torch.Tensor, reverse: bool) -> tuple[torch.Tensor, ...]:
    """KL, log pi and log pi* of a block, in float32 or float64."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    log_pi, log_teacher = x.to(dtype).log_softmax(-1), teacher.to(dtype).log_softmax(-1)
    ahead, behind = (log_pi, log_teacher) if reverse else (log_teacher, log_pi)
    return (ahead.exp() * (ahead - behind)).sum(-1), log_pi, log_teacher


def _blocks(*tensors: torch.Tensor) -> Any:
    rows = max(1, BLOCK_ELEMENTS // max(tensors[0].shape[1], 1))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True) if len(tensors[0]) else ()


def hybrid_imitation_terms(
    kl: torch.Tensor,
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    imitation_lambda: float = 1.0,
    future_kl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense and sparse loss of every token; their sum has the gradient of C.

    The sparse term is carried by the ratio pi/pi_old, which is 1 in the first update of a batch, where its gradient is
    that of log pi, and corrects for the sampled token later.

    Args:
        kl: [B, T] float, KL_t with gradient.
        old_log_prob, log_prob: [B, T] float, of the sampled tokens under the policy of the batch's start and now.
        advantages: [B, T] float, reward less baseline.
        response_mask: [B, T] of 0 and 1, model tokens; elsewhere there is no KL, now or in the future.
        imitation_lambda: weight of the reward against the divergence.
        future_kl: charge a token for the divergence of the tokens after it.

    Returns:
        ``(dense, sparse)``, [B, T] each, 0 where there is no model token.

    Raises:
        ValueError: a shape is wrong.
    """
    fields = {"kl": kl, "old_log_prob": old_log_prob, "log_prob": log_prob, "advantages": advantages}
    for name, field in fields.items():
        check_token_field(name, field, response_mask)
    token = response_mask.bool()
    dense = torch.where(token, kl, 0.0)
    now = dense.detach().double()
    ahead = now.flip(-1).cumsum(-1).flip(-1) - now if future_kl else torch.zeros_like(now)
    cost = torch.where(token, ahead - imitation_lambda * advantages.detach().double(), 0.0)
    log_ratio = torch.where(token, log_prob - old_log_prob, 0.0).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return dense, cost.to(log_prob.dtype) * log_ratio.exp()
