# SPDX-License-Identifier: Apache-2.0
"""Rejection rules: turns whose trainer and sampler disagree, or that teach nothing, are left out of the loss.

    lr_t = log pi_train(y_t) - log pi_rollout(y_t)     rho_t = exp(lr_t)     D_t = KL(pi_rollout || pi_train) at token t

    mrs               lower <= exp(mean lr) <= upper over the trajectory (or another `level`), and no lr_t < log veto
    trm               max_t D_t <= max and mean_t D_t <= avg
    ln_trm            sum_t w_t |rho_t - 1| / sum_t w_t <= threshold, with weights w_t that fall to 0 at the end
    ser               mean_t |rho_t - 1| <= threshold
    simpletir         no turn of the trajectory is void
    variance_filter   the prompt's rewards deviate by more than a threshold, or are not in the lowest quantile

Every rule rewrites `response_mask` and nothing else: a rejected turn keeps its reward and its place in the statistics
of its group. Turns without model tokens are kept as they are. Several rules together are the AND of their masks, each
computed on the mask before any of them.

Sources: methods `mrs` hkust-nlp/KernelGYM `mismatch_helper.py` (arXiv 2602.05885); `trm`, `ln_trm`, `ser` arXiv
2512.23075; `simpletir` arXiv 2509.02479.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, get_args

import torch

from verl_ext.methods.groups import Column
from verl_ext.methods.options import Discount, NotNegative, Positive, below_one, checked
from verl_ext.methods.rows import Rows, check_token_field

Level = Literal["token", "turn", "turn_geo", "sequence", "geometric"]
LEVELS = get_args(Level)
#: Log ratios are cut here before an exponential, as verl does.
LARGEST_LOG_RATIO = 20.0
#: A statistic that is beyond its bound by this share alone is at it: columns are float32, bounds are not.
ROUNDING = 1e-6
#: Elements of the float64 copies of logits that `exact_token_kl` makes at a time; a few such blocks are its memory.
BLOCK_ELEMENTS = 1 << 21


class Rejection(NamedTuple):
    """What a rule decides.

    Attributes:
        response_mask: [B, T] in the dtype of the given mask, 0 where rejected.
        kept: [B] bool; True for turns without model tokens. At level "token": whether any token is kept.
        statistic: float64, what was compared with the bounds: [B], or [B, T] at level "token", 0 where there is no
            model token; for `trm` with both bounds [B, 2], maximum and mean.
    """

    response_mask: torch.Tensor
    kept: torch.Tensor
    statistic: torch.Tensor


@checked
def mrs(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    traj_uid: Column | None = None,
    turn_index: Column | None = None,
    index: Column | None = None,
    level: Level | None = "geometric",
    lower: Positive | None = None,
    upper: Positive | None = 1.001,
    veto: Positive | None = 1e-4,
    veto_scope: Literal["row", "trajectory"] = "row",
) -> Rejection:
    """Mismatch rejection sampling: keep what the trainer finds about as likely as the sampler did.

    Args:
        old_log_probs, rollout_log_probs: [B, T] float, log-probabilities of the sampled tokens, trainer and sampler.
        response_mask: [B, T] of 0 and 1.
        traj_uid: [B] trajectory; None: each turn is one.
        turn_index: [B] int, only named in errors.
        index: [B] prompt uid; trajectories of two prompts are never one.
        level: what the statistic is taken over. "token": e^lr. "turn", "turn_geo": e^(sum lr), e^(mean lr) of the
            turn. "sequence", "geometric": the same of all model tokens of all turns of the trajectory, so that opposite
            drifts of two turns cancel (released). None: the veto alone.
        lower, upper: bounds of the statistic, inclusive; `lower` None is 1 / upper, `upper` None is off.
        veto: a turn with a token that has e^lr below this is rejected, whatever the rest; None is off.
        veto_scope: "row" (released) or "trajectory".

    Raises:
        ValueError: a bound is not positive, lower > upper, or a log-probability of a model token is NaN.
    """
    if lower is None and upper is not None:
        lower = 1 / upper
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"lower={lower} is above upper={upper}")
    token = response_mask.bool()
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, token)
    rows = Rows(len(token), index=index, traj_uid=traj_uid, turn_index=turn_index)
    trajectory = _trajectories(rows)

    count = token.sum(-1).double()
    total = log_ratio.sum(-1)
    if level in ("sequence", "geometric"):
        total, count = _sum_over(trajectory, total), _sum_over(trajectory, count)
    if level == "token":
        log_statistic = log_ratio
    elif level in ("turn_geo", "geometric"):
        log_statistic = total / count.clamp(min=1)
    else:
        log_statistic = total
    log_statistic = log_statistic.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    inside = torch.ones_like(log_statistic, dtype=torch.bool)
    if level is not None:
        inside &= log_statistic >= (-math.inf if lower is None else math.log(lower) - ROUNDING)
        inside &= log_statistic <= (math.inf if upper is None else math.log(upper) + ROUNDING)

    vetoed = torch.zeros(len(token), dtype=torch.bool, device=token.device)
    if veto is not None:
        vetoed = ((log_ratio < math.log(veto) - ROUNDING) & token).any(-1)
        if veto_scope == "trajectory":
            vetoed = _sum_over(trajectory, vetoed.double()) > 0

    statistic = log_statistic.exp()
    if level == "token":
        chosen = token & inside & ~vetoed[:, None]
        kept = chosen.any(-1) | ~token.any(-1)
        return Rejection(response_mask * chosen.to(response_mask.dtype), kept, torch.where(token, statistic, 0.0))
    return _rejection(response_mask, inside & ~vetoed, statistic)


@checked
def trm(
    token_kl: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    max: NotNegative | None = 0.05,
    avg: NotNegative | None = 0.001,
) -> Rejection:
    """Trust region masking: keep a turn whose sampler stays close to the trainer at every token and on average.

    The guarantee (arXiv 2512.23075) holds for the exact divergence over the vocabulary (`exact_token_kl`);
    `top_k_token_kl` is a lower bound of it, `sampled_token_kl` an estimate from the sampled token.

    Args:
        token_kl: [B, T] float, KL(pi_rollout || pi_train) at every position, in nats; may be infinite.
        response_mask: [B, T] of 0 and 1.
        max: bound of the largest of the turn's model tokens (published 0.05); None is off.
        avg: bound of their mean (published 0.001; 0.1 and 0.002 work together only); None is off.

    Raises:
        ValueError: a bound is negative, or a divergence at a model token is NaN.
    """
    token = response_mask.bool()
    values = _on_tokens("token_kl", check_token_field("token_kl", token_kl, response_mask), token)
    largest = values.amax(-1) if values.shape[1] else values.sum(-1)
    mean = values.sum(-1) / token.sum(-1).clamp(min=1)
    inside = _at_most(largest, max) & _at_most(mean, avg)
    both = torch.stack([largest, mean], dim=-1)
    return _rejection(
        response_mask, inside, both if (max is None) == (avg is None) else mean if max is None else largest
    )


@checked
def ln_trm(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    epsilon: Positive,
    delta: Positive,
    threshold: NotNegative | None,
) -> Rejection:
    """Length-neutral trust region masking: the mean of |rho - 1|, each token weighted by what can still follow it.

        w_t = min(1, (T - t) epsilon, sqrt((T - t) delta / 2)),  t = 1..T over the turn's model tokens

    A turn of one token has no weight at all; its statistic is 0.

    Args:
        old_log_probs, rollout_log_probs, response_mask: as for `mrs`.
        epsilon: bound of the total variation a token, of the paper.
        delta: bound of the divergence a token, of the paper.
        threshold: bound of the statistic; None is off.
    """
    token = response_mask.bool()
    deviation = _deviation(old_log_probs, rollout_log_probs, token)
    left = (token.sum(-1, keepdim=True) - token.cumsum(-1)).double()  # T - t
    weight = torch.minimum(left * epsilon, (left * delta / 2).sqrt()).clamp(max=1.0) * token
    norm = weight.sum(-1)
    statistic = torch.where(norm > 0, (deviation * weight).sum(-1) / norm.clamp(min=1e-300), 0.0)
    return _rejection(response_mask, _at_most(statistic, threshold), statistic)


@checked
def ser(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    threshold: NotNegative | None,
) -> Rejection:
    """Sequence error rejection: keep a turn whose mean |rho - 1| is at most `threshold` (0.03 to 0.10 in the text).

    Args:
        old_log_probs, rollout_log_probs, response_mask: as for `mrs`.
        threshold: bound of the statistic; None is off.
    """
    token = response_mask.bool()
    statistic = _deviation(old_log_probs, rollout_log_probs, token).sum(-1) / token.sum(-1).clamp(min=1)
    return _rejection(response_mask, _at_most(statistic, threshold), statistic)


def simpletir(
    response_mask: torch.Tensor, *, void: Column, traj_uid: Column | None = None, index: Column | None = None
) -> Rejection:
    """Void-turn filter: a trajectory with a turn that neither calls a tool nor answers is not trained on.

    Args:
        response_mask: [B, T] of 0 and 1.
        void: [B] bool, whether the turn is void (`is_void_turn`).
        traj_uid, index: [B] trajectory and prompt uid, as for `mrs`.

    Returns:
        `Rejection`; the statistic is the number of void turns of the trajectory.
    """
    rows = Rows(len(response_mask), index=index, traj_uid=traj_uid, void=void)
    turns = torch.from_numpy(rows.bools("void")).to(response_mask.device).double()
    statistic = _sum_over(_trajectories(rows), turns)
    return _rejection(response_mask, statistic == 0, statistic)


CODE_BLOCK = re.compile(r"```(?:py|python)?\s*\n")
ANSWER = "\\boxed{"


def is_void_turn(text: str, code_block: re.Pattern[str] = CODE_BLOCK, answer: str = ANSWER) -> bool:
    """Whether a turn has neither a finished block of Python nor a final answer.

    Args:
        text: what the model wrote in this turn.
        code_block: opening of a code block; one counts when a closing fence follows it.
        answer: what begins a final answer.
    """
    opening = code_block.search(text)
    has_code = opening is not None and text.find("```", opening.end()) >= 0
    return not has_code and answer not in text


@checked
def variance_filter(
    response_mask: torch.Tensor,
    *,
    rewards: Column,
    index: Column,
    traj_uid: Column | None = None,
    threshold: NotNegative | None = 1e-3,
    quantile: Annotated[Discount, below_one] | None = None,
) -> Rejection:
    """Train on prompts whose samples differ in reward: a group without spread has no advantage to learn from.

    Args:
        response_mask: [B, T] of 0 and 1.
        rewards: [B] float, outcome of the turn's trajectory; a trajectory of several turns counts once, with its mean.
        index: [B] prompt uid.
        traj_uid: [B] trajectory; None: each turn is one.
        threshold: groups with a population standard deviation up to this are left out; None is off.
        quantile: the groups in this lowest share of the deviations are left out, in [0, 1); None is off.

    Returns:
        `Rejection`; the statistic is the standard deviation of the turn's prompt.
    """
    rows = Rows(len(response_mask), index=index, traj_uid=traj_uid, rewards=rewards)
    device = response_mask.device
    trajectory, prompt = _trajectories(rows).to(device), torch.from_numpy(rows.keys(("index",))).to(device)
    values = torch.from_numpy(rows.floats("rewards")).to(device)
    ones = torch.ones_like(values)
    share = 1 / _sum_over(trajectory, ones)  # every trajectory weighs 1
    outcome = _sum_over(trajectory, values) * share
    samples = _sum_over(prompt, share)
    centred = outcome - _sum_over(prompt, outcome * share) / samples
    statistic = (_sum_over(prompt, centred.square() * share) / samples).sqrt()
    inside = torch.ones_like(statistic, dtype=torch.bool)
    if threshold is not None:
        inside &= statistic > threshold
    if quantile:
        _, first = _first_of_each(prompt)
        inside &= statistic > torch.quantile(statistic[first], quantile, interpolation="lower")
    return _rejection(response_mask, inside, statistic)


def exact_token_kl(rollout_logits: torch.Tensor, train_logits: torch.Tensor) -> torch.Tensor:
    """KL(pi_rollout || pi_train) over the whole vocabulary at every position, [B, T] float64, in nats.

    Args:
        rollout_logits, train_logits: [B, T, V] float, of sampler and trainer, temperature already applied. A token that
            the sampler had cut off has logit -inf and counts 0; one that only the trainer has cut off makes the
            divergence infinite.
    """
    if rollout_logits.shape != train_logits.shape or rollout_logits.ndim != 3:
        raise ValueError(
            f"rollout_logits and train_logits must both be [B, T, V], got {tuple(rollout_logits.shape)} and "
            f"{tuple(train_logits.shape)}"
        )
    batch, length, vocabulary = rollout_logits.shape
    step = max(1, BLOCK_ELEMENTS // max(vocabulary, 1))
    pairs = zip(
        rollout_logits.reshape(batch * length, vocabulary).split(step),
        train_logits.reshape(batch * length, vocabulary).split(step),
        strict=True,
    )
    return torch.cat([_kl(a.double().log_softmax(-1), b.double().log_softmax(-1)) for a, b in pairs]).view(
        batch, length
    )


def top_k_token_kl(rollout_log_probs: torch.Tensor, train_log_probs: torch.Tensor) -> torch.Tensor:
    """Divergence of the sampler's K most likely tokens with all others as one, [B, T] float64: a lower bound.

    Putting tokens together can only bring two distributions closer (data processing), so a turn that this rejects the
    exact divergence rejects too, and one that it keeps may still be rejected by it. With K the whole vocabulary it is
    the exact one, up to the rounding of float32.

    Args:
        rollout_log_probs: [B, T, K] float, the sampler's K largest log-probabilities.
        train_log_probs: [B, T, K] float, the trainer's of the same tokens.
    """
    rollout, train = rollout_log_probs.double(), train_log_probs.double()
    left = (1 - rollout.exp().sum(-1, keepdim=True)).clamp(min=0)
    # Rounding must not make it infinite; more mass of the trainer in the rest can only bring the two closer.
    left_train = (1 - train.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(torch.float32).eps)
    return _kl(torch.cat([rollout, left.log()], -1), torch.cat([train, left_train.log()], -1)).clamp(min=0)


@checked
def sampled_token_kl(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    estimator: Literal["k2", "k3"],
) -> torch.Tensor:
    """Estimate of the divergence from the sampled token alone, [B, T] float64, 0 where there is no model token.

    Args:
        old_log_probs, rollout_log_probs, response_mask: as for `mrs`.
        estimator: "k2" (lr^2 / 2, symmetric; for the maximum) or "k3" (e^lr - 1 - lr, unbiased; for the mean).
    """
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, response_mask.bool())
    if estimator == "k2":
        return log_ratio.square() / 2
    log_ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def all_of(response_mask: torch.Tensor, rejections: Sequence[Rejection]) -> torch.Tensor:
    """The mask of several rules, each computed on `response_mask`, together: [B, T] in its dtype."""
    mask = response_mask
    for rejection in rejections:
        mask = mask * (rejection.response_mask != 0).to(mask.dtype)
    return mask


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension of p (log p - log q), where 0 log 0 is 0."""
    return torch.where(log_p > -math.inf, log_p.exp() * (log_p - log_q), 0.0).sum(-1)


def _on_tokens(name: str, values: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Values of model tokens in float64, 0 elsewhere; ValueError names the first that is NaN."""
    values = torch.where(token, values.detach().double(), 0.0)
    wrong = values.isnan()
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name} is NaN at a model token: row {row}, column {column}")
    return values


def _log_ratio(old: torch.Tensor, rollout: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """lr_t at model tokens, [B, T] float64, 0 elsewhere."""
    old = _on_tokens("old_log_probs", check_token_field("old_log_probs", old, token), token)
    rollout = _on_tokens("rollout_log_probs", check_token_field("rollout_log_probs", rollout, token), token)
    return _on_tokens("old_log_probs - rollout_log_probs", old - rollout, token)


def _deviation(old: torch.Tensor, rollout: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """|rho_t - 1| at model tokens, [B, T] float64, 0 elsewhere."""
    return torch.expm1(_log_ratio(old, rollout, token).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)).abs()


def _trajectories(rows: Rows) -> torch.Tensor:
    """[B] int64 ids of the turns' trajectories; a turn without one is one."""
    names = tuple(name for name in ("index", "traj_uid") if name in rows)
    if "traj_uid" not in rows:
        return torch.arange(rows.batch)
    return torch.from_numpy(rows.keys(names) if "index" in names else rows.ids("traj_uid"))


def _sum_over(group: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """For every turn the sum of `values` ([B] float64) over the turns of its group."""
    group = group.to(values.device)
    sums = values.new_zeros(int(group.max()) + 1 if len(group) else 0)
    return sums.index_add_(0, group, values)[group]


def _first_of_each(group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The groups and the position of one turn of each."""
    groups, inverse = group.unique(return_inverse=True)
    first = torch.empty_like(groups)
    first[inverse] = torch.arange(len(group), device=group.device)
    return groups, first


def _at_most(statistic: torch.Tensor, threshold: float | None) -> torch.Tensor:
    if threshold is None:
        return torch.ones_like(statistic, dtype=torch.bool)
    return statistic <= threshold * (1 + ROUNDING)


def _rejection(response_mask: torch.Tensor, inside: torch.Tensor, statistic: torch.Tensor) -> Rejection:
    """Drop whole turns; a turn without model tokens is kept as it is."""
    kept = inside | ~response_mask.bool().any(-1)
    return Rejection(response_mask * kept[:, None].to(response_mask.dtype), kept, statistic)
