# SPDX-License-Identifier: Apache-2.0
"""Rejected turns, exactly: a chain of 64 tokens by dynamic programming, and small groups by enumeration.

The chain. Token 1 counts, token 0 does not, token 2 is rare and makes the next position an odd one, where trainer and
sampler disagree strongly whatever the update is. The reward is 1 if at least half of the tokens count. With the reward
R in [0, 1], pi the policy and mu the sampler,

    J(pi) - J(mu) = sum_t E_pi[g_t],   surrogate L = sum_t E_mu[g_t] = E_mu[R sum_t (rho_t - 1)],
    g_t = sum_a (pi - mu)(a) Q_mu(s, a),   |g_t| <= TV(mu, pi) <= sqrt(D / 2)

|E_pi g - E_mu g| is at most 2 TV of the two distributions of s_t times max |g_t|. The classical bound puts
(t - 1) sqrt(D / 2) for the former; Pinsker's inequality for the joint distribution puts sqrt((t - 1) D / 2):

    classical  |J(pi) - J(mu) - L| <= D T (T - 1) / 2                     D: the largest divergence anywhere
    masked     J(pi) - J(mu) >= L_M - E_mu[R (1 - M)] - delta sum_t sqrt(t - 1)

where M keeps a turn iff no position of it diverges by more than delta, L_M = E_mu[M R sum_t (rho_t - 1)] is what
masking optimises, and delta is the largest divergence among kept positions. The second line is the first argument for
the reward M R >= 0, whose g_t is 0 wherever the turn is lost already. It has T^1.5 in the place of T^2, as the paper's
(arXiv 2512.23075) Pinsker bound, and a delta in the place of D.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch
from enumeration import BANDIT, REWARDS, Moments, Sample, block, moments, row_tensors, score, softmax, true_gradient

from verl_ext.methods.empg import empg
from verl_ext.methods.trloo import trloo_advantage

LENGTH = 64
PLAIN, ODD = 0, 1
SAMPLER = np.array([[0.0, 0.0, -9.0], [0.0, 0.0, -9.0]])
MISMATCH = np.array([3.0, -3.0, 0.0])
"""How the trainer's logits differ from the sampler's at an odd position."""


class Chain(NamedTuple):
    """What is exact about one policy on the chain."""

    gain: float  # J(pi) - J(mu)
    surrogate: float  # E_mu[R sum (rho - 1)]
    masked: float  # E_mu[M R sum (rho - 1)]
    lost: float  # E_mu[R (1 - M)]
    kept: float  # E_mu[M]
    divergence: np.ndarray  # KL(mu || pi) at a plain and at an odd position


def policies(step):
    """Sampler and trainer, [position kind, token]; `step` moves every position's logit of token 1."""
    moved = SAMPLER + step * np.array([0.0, 1.0, 0.0])
    moved[ODD] += MISMATCH
    return np.stack([softmax(x) for x in SAMPLER]), np.stack([softmax(x) for x in moved])


def chain(step, length=LENGTH):
    """Exact values by dynamic programming over (kind of position, tokens that counted, turn still kept)."""
    mu, pi = policies(step)
    # Before a token at an odd position the turn is lost, so a kept turn is at a plain position: [kind, kept, count].
    start = np.zeros((2, 2, length + 1))
    start[PLAIN, 1, 0] = 1.0

    def after(distribution, policy, token):
        out = np.zeros_like(distribution)
        for kind, kept in itertools.product((PLAIN, ODD), (0, 1)):
            moved = distribution[kind, kept] * policy[kind, token]
            if token == 1:
                moved = np.concatenate([[0.0], moved[:-1]])
            out[ODD if token == 2 else PLAIN, 0 if kind == ODD else kept] += moved
        return out

    def run(policy):
        found = [start]
        for _ in range(length):
            found.append(sum(after(found[-1], policy, token) for token in range(3)))
        return found

    reward = (np.arange(length + 1) >= length / 2).astype(float)
    visits, end = run(mu), run(pi)[-1]
    surrogates = []
    for value in (np.broadcast_to(reward, (2, 2, length + 1)), np.stack([np.zeros_like(reward), reward])[None]):
        value, total = np.broadcast_to(value, (2, 2, length + 1)), 0.0
        for t in reversed(range(length)):
            worth = [_value_after(value, token) for token in range(3)]  # Q_mu(s, token) of every state
            q = np.stack(worth, axis=1)
            total += float((visits[t] * np.einsum("ka,kaxc->kxc", pi - mu, q)).sum())
            value = np.einsum("ka,kaxc->kxc", mu, q)
        surrogates.append(total)
    last = visits[-1]
    return Chain(
        gain=float(((end - last) * reward).sum()),
        surrogate=surrogates[0],
        masked=surrogates[1],
        lost=float((last[:, 0] * reward).sum()),
        kept=float(last[:, 1].sum()),
        divergence=(mu * np.log(mu / pi)).sum(-1),
    )


def _value_after(value, token):
    """The value of the state that a token leads to, for every state [kind, kept, count]."""
    kind = ODD if token == 2 else PLAIN
    out = np.stack([value[kind], np.stack([value[kind, 0], value[kind, 0]])])  # at an odd position the turn is lost
    return np.concatenate([out[..., 1:], out[..., -1:]], axis=-1) if token == 1 else out


def classical_bound(found, length=LENGTH):
    return float(found.divergence.max()) * length * (length - 1) / 2


def masked_bound(found, length=LENGTH):
    return float(found.divergence[PLAIN]) * float(np.sqrt(np.arange(length)).sum())


def rejecting(divisor, rejected):
    """Adapter: leave-one-out over all turns; one reward's are rejected; divided by ``all`` or by the ``kept``."""

    def estimator(index, traj_uid, fields):
        rewards, mask = row_tensors(fields["turn_reward"])
        keep = (rewards != rejected).double()
        given = {"traj_uid": traj_uid, "turn_index": fields["turn_index"]}
        advantages = trloo_advantage(rewards, mask, index, **given)[0].double() * keep
        if divisor == "all":
            return advantages
        _, group = np.unique(index, return_inverse=True)
        group = torch.from_numpy(group)
        kept = torch.zeros(int(group.max()) + 1, dtype=torch.float64).index_add_(0, group, keep[:, 0])
        return advantages * (torch.bincount(group) / kept.clamp(min=1))[group][:, None]

    return estimator


def kept_gradient(rejected):
    """The gradient that masking is meant to have, E[M (R - J) score]."""
    pi = softmax(BANDIT)
    mean = float(pi @ np.array(REWARDS))
    return sum(
        p * (r - mean) * score(BANDIT, a) for a, (p, r) in enumerate(zip(pi, REWARDS, strict=True)) if r != rejected
    )


def sure_and_unsure():
    """Two binary steps; after action 1 the second step is sure, after action 0 unsure. The reward wants (0, 1)."""
    logits = [[0.2, -0.2], [0.1, -0.1], [2.5, -0.5]]
    entropy = [-(softmax(x) * np.log(softmax(x))).sum() for x in logits]
    return [
        Sample(
            softmax(logits[0])[a] * softmax(logits[1 + a])[b],
            [block(score(logits[0], a), 0, 6), block(score(logits[1 + a], b), 2 + 2 * a, 6)],
            {
                "turn_reward": [0.0, {(0, 1): 1.0, (1, 0): 0.6}.get((a, b), 0.0)],
                "turn_index": [0, 1],
                "entropy": [entropy[0], entropy[1 + a]],
            },
        )
        for a, b in itertools.product((0, 1), repeat=2)
    ]


def modulated(k, zeta, group_size=3):
    """Moments of the gradient with EMPG over leave-one-out advantages; every group is a batch of its own."""

    def estimator(index, traj_uid, fields):
        rewards, mask = row_tensors(fields["turn_reward"])
        turn = np.array(fields["turn_index"])
        plain = trloo_advantage(rewards, mask, index, traj_uid=traj_uid, turn_index=turn, turn_reward=rewards[:, 0])[0]
        entropy = torch.tensor(fields["entropy"], dtype=torch.float64)[:, None]
        out = torch.zeros_like(plain)
        for number in np.unique(index):
            rows = np.flatnonzero(index == number)
            names = {"traj_uid": traj_uid[rows], "turn_index": turn[rows], "index": index[rows]}
            out[rows] = empg(plain[rows], entropy[rows], mask[rows], **names, k=k, k_f=1.0, zeta=zeta)
        return out

    return moments(sure_and_unsure(), group_size, estimator)


def direction(found: Moments) -> tuple[float, float, float]:
    """Length along the truth, cosine with it, and share of the energy of the unsure step's parameters."""
    truth = true_gradient(sure_and_unsure())
    along = float(found.mean @ truth / (truth @ truth))
    cosine = float(found.mean @ truth / np.linalg.norm(found.mean) / np.linalg.norm(truth))
    return along, cosine, float((found.mean[2:4] ** 2).sum() / (found.mean**2).sum())
