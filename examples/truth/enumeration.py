# SPDX-License-Identifier: Apache-2.0
"""Exact mean and variance of a gradient estimate on softmax policies small enough to enumerate every outcome.

A problem lists the trajectories of one sample: probability, turns, and the score of each turn (gradient of its log
probability with respect to the policy's logits). Every group of N samples is then one prompt of a single batch, so one
call of the estimator gives the advantage in every possible group, and

    E[g] = sum over groups of p(group) g(group),      g(group) = 1/N sum over turns (and tokens) of A * score

is exact up to the float32 of the advantages, as is the variance E|g|^2 - |E[g]|^2.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch

from verl_ext.methods.dr_mas import dr_mas_advantage
from verl_ext.methods.otb import otb_advantage
from verl_ext.methods.returns import turn_returns
from verl_ext.methods.trloo import trloo_advantage


class Sample(NamedTuple):
    """One possible trajectory; lists have one entry a turn."""

    probability: float
    scores: list[np.ndarray]  # [parameters], or [tokens, parameters] for token methods
    fields: dict[str, list[Any]]


class Moments(NamedTuple):
    mean: np.ndarray
    variance: float


def softmax(logits):
    weights = np.exp(np.asarray(logits, dtype=np.float64) - np.max(logits))
    return weights / weights.sum()


def score(logits, action):
    """Gradient of log softmax(logits)[action] with respect to the logits."""
    return np.eye(len(logits))[action] - softmax(logits)


def block(values, start, size):
    out = np.zeros(size)
    out[start : start + len(values)] = values
    return out


def moments(samples, group_size, estimator, tokens=1):
    """Exact mean and variance of the gradient estimate over all groups of `group_size` samples."""
    fields: dict[str, list[Any]] = {name: [] for name in samples[0].fields}
    index, traj_uid, owner, scores = [], [], [], []
    probability = []
    for number, group in enumerate(itertools.product(samples, repeat=group_size)):
        probability.append(float(np.prod([sample.probability for sample in group])))
        for member, sample in enumerate(group):
            for row, gradient in enumerate(sample.scores):
                index.append(number)
                traj_uid.append(member)
                owner.append(number)
                scores.append(gradient)
                for name, values in sample.fields.items():
                    fields[name].append(values[row])
    advantages = estimator(np.array(index), np.array(traj_uid), fields).double().numpy()
    scores = np.stack([np.reshape(s, (tokens, -1)) for s in scores])
    rows = np.einsum("bt,btp->bp", advantages, scores) / group_size
    estimate = np.zeros((len(probability), rows.shape[1]))
    np.add.at(estimate, np.array(owner), rows)
    probability = np.array(probability)
    assert abs(probability.sum() - 1.0) < 1e-9
    mean = probability @ estimate
    return Moments(mean, float(probability @ (estimate**2).sum(1) - (mean**2).sum()))


def true_gradient(samples, tokens=1):
    """E[R * score of the whole trajectory], R the undiscounted sum of the turn rewards."""
    return sum(
        s.probability * sum(s.fields["turn_reward"]) * sum(np.reshape(x, (tokens, -1)).sum(0) for x in s.scores)
        for s in samples
    )


def quality(found, truth):
    """Length of the mean along the true gradient, relative to it; cosine with it; variance at equal length."""
    along = float(found.mean @ truth / (truth @ truth))
    cosine = float(found.mean @ truth / np.linalg.norm(found.mean) / np.linalg.norm(truth))
    return along, cosine, found.variance / along**2


def row_tensors(rewards):
    """Rewards on the only token of each turn."""
    return torch.tensor(rewards, dtype=torch.float64)[:, None], torch.ones(len(rewards), 1, dtype=torch.long)


def as_rows(function, *names, **options):
    """Adapter: turn-level estimator on `turn_reward` as score, with the turn fields `names`."""

    def estimator(index, traj_uid, fields):
        rewards, mask = row_tensors(fields["turn_reward"])
        given = {"traj_uid": traj_uid, **{name: fields[name] for name in names}}
        return function(rewards, mask, index, **given, **options)[0]

    return estimator


BANDIT = [0.3, -0.4, 1.1]
REWARDS = [1.0, 0.0, 2.5]


def bandit():
    return [
        Sample(softmax(BANDIT)[a], [score(BANDIT, a)], {"turn_reward": [REWARDS[a]], "turn_index": [0]})
        for a in range(3)
    ]


def two_turns(early_stop):
    """Turn 0 has two actions; turn 1 has two with a policy of its own a first action; action 1 may end the episode."""
    logits = [[0.2, -0.3], [0.5, 0.0], [-0.6, 0.4]]
    samples = []
    for first in (0, 1):
        if early_stop and first == 1:
            samples.append(
                Sample(
                    softmax(logits[0])[1], [block(score(logits[0], 1), 0, 6)], {"turn_reward": [0.7], "turn_index": [0]}
                )
            )
            continue
        for second in (0, 1):
            policy = logits[1 + first]
            samples.append(
                Sample(
                    softmax(logits[0])[first] * softmax(policy)[second],
                    [block(score(logits[0], first), 0, 6), block(score(policy, second), 2 + 2 * first, 6)],
                    {"turn_reward": [0.3 * first - 0.2, 1.0 if first == second else -0.4], "turn_index": [0, 1]},
                )
            )
    return samples


def stop_or_go_on(success=0.9):
    """Stop for 1, or go on for 0.2 and then, with this probability, for 1 more; both actions are equally likely."""
    stop, go_on = (score([0.0, 0.0], action) for action in (0, 1))
    return [
        Sample(0.5, [stop], {"turn_reward": [1.0], "turn_index": [0]}),
        Sample(0.5 * success, [go_on, np.zeros(2)], {"turn_reward": [0.2, 1.0], "turn_index": [0, 1]}),
        Sample(0.5 * (1 - success), [go_on, np.zeros(2)], {"turn_reward": [0.2, 0.0], "turn_index": [0, 1]}),
    ]


def centred_then_summed(index, traj_uid, fields):
    """What verl's RFC 7244 warns of: each turn's reward less the mean of the same turn of the others, then summed over
    one's own turns from there on."""
    centred = as_rows(trloo_advantage, "turn_index", "turn_reward", gamma=0.0)(index, traj_uid, fields)
    trajectory = index * (max(traj_uid) + 1) + traj_uid
    turns = np.array(fields["turn_index"])
    return torch.from_numpy(turn_returns(centred[:, 0].double().numpy(), trajectory, turns, gamma=1.0))[:, None]


def two_agents(scale, offset):
    """Two agents with one binary decision each and the same policy; the second one's rewards are scaled and shifted."""
    logits = [0.3, -0.2]
    samples = []
    for first, second in itertools.product((0, 1), repeat=2):
        samples.append(
            Sample(
                softmax(logits)[first] * softmax(logits)[second],
                [block(score(logits, first), 0, 4), block(score(logits, second), 2, 4)],
                {"turn_reward": [float(first), offset + scale * second], "agent_id": ["x", "y"]},
            )
        )
    return samples


def second_try(worth):
    """A solver, and a reviser who is called when it fails and whose success earns `worth`; the outcome is both's."""
    logits = [0.3, -0.2]
    right, wrong = softmax(logits)
    samples = [Sample(right, [block(score(logits, 0), 0, 4)], {"turn_reward": [1.0], "agent_id": ["x"]})]
    for action, reward in ((0, worth), (1, 0.0)):
        scores = [block(score(logits, 1), 0, 4), block(score(logits, action), 2, 4)]
        fields = {"turn_reward": [reward] * 2, "agent_id": ["x", "y"]}
        samples.append(Sample(wrong * softmax(logits)[action], scores, fields))
    return samples


def agent_moments(samples, agent, level, norm_by_std=True, group_size=4, **options):
    part = slice(0, 2) if agent == "x" else slice(2, 4)
    only = [
        s._replace(scores=[g if (k == 0) == (agent == "x") else 0 * g for k, g in enumerate(s.scores)]) for s in samples
    ]
    names = ("agent_id",) if level != "global" else ()
    estimator = as_rows(dr_mas_advantage, *names, level=level, norm_by_std=norm_by_std, **options)
    found = moments(only, group_size, estimator)
    return Moments(found.mean[part], found.variance)


#: The four cells of Dr. MAS's ablation: whose mean and whose standard deviation.
NORMALISATIONS = {
    "mean and std of all": {"level": "global"},
    "the agent's mean": {"level": "agent", "statistics": "mean"},
    "the agent's std": {"level": "agent", "statistics": "std"},
    "both the agent's": {"level": "agent"},
}


class Lemma(NamedTuple):
    """Both sides of Dr. MAS's lemma 4.2 for an agent k, by the statistics of the whole population."""

    energy: float  # E|g_k|^2, of a turn of the agent
    factor: float  # (s_k^2 + (mu_k - mu)^2) / s^2, with the mean and the deviation that the cell takes
    score: float  # E|z|^2
    rest: float  # D_k: how far |z|^2 and the squared advantage go together


def lemma(samples, agent, cell):
    """The lemma for turns z (r - mean) / std, the mean and std of `NORMALISATIONS` those of the population."""
    rows = [
        (s.probability, s.fields["turn_reward"][k], float(g @ g))
        for s in samples
        for k, g in enumerate(s.scores)
        if s.fields["agent_id"][k] == agent
    ]
    weight, reward, z = (np.array(column) for column in zip(*rows, strict=True))
    weight /= weight.sum()  # given that the agent speaks
    own = _mean_and_std(weight, reward)
    common = _mean_and_std(*np.array([(s.probability, s.fields["turn_reward"][0]) for s in samples]).T)
    mean = (own if cell in ("the agent's mean", "both the agent's") else common)[0]
    std = (own if cell in ("the agent's std", "both the agent's") else common)[1]
    advantage = ((reward - mean) / std) ** 2
    factor = (own[1] ** 2 + (own[0] - mean) ** 2) / std**2
    rest = weight @ (z * advantage) - (weight @ z) * (weight @ advantage)
    return Lemma(float(weight @ (z * advantage)), float(factor), float(weight @ z), float(rest))


def _mean_and_std(weight, values):
    mean = weight @ values
    return mean, np.sqrt(weight @ (values - mean) ** 2)


def energy(found):
    """E|g|^2."""
    return found.variance + float((found.mean**2).sum())


def sequences(logits, reward):
    """All token sequences of a policy given as {prefix: logits}; a prefix that is no key ends the sequence."""
    length = 1 + max(len(prefix) for prefix in logits)
    names = sorted(logits)
    width = len(next(iter(logits.values())))
    samples = []

    def grow(prefix, probability, gradients, old, squares):
        if prefix not in logits:
            pad = length - len(prefix)
            gradient = np.concatenate([np.stack(gradients), np.zeros((pad, width * len(names)))])
            fields = {
                "turn_reward": [reward(prefix)],
                "tokens": [len(prefix)],
                "old_log_probs": [old + [0.0] * pad],
                "sum_pi_squared": [squares + [0.0] * pad],
            }
            samples.append(Sample(probability, [gradient], fields))
            return
        pi = softmax(logits[prefix])
        for token in range(width):
            gradient = block(score(logits[prefix], token), width * names.index(prefix), width * len(names))
            step = (probability * pi[token], gradients + [gradient], old + [np.log(pi[token])])
            grow(prefix + (token,), *step, squares + [float((pi**2).sum())])

    grow((), 1.0, [], [], [])
    return samples, length


def as_tokens(length, function=None, **options):
    """Adapter: OTB, or a turn-level estimator spread over the tokens."""

    def estimator(index, traj_uid, fields):
        mask = (torch.arange(length) < torch.tensor(fields["tokens"])[:, None]).long()
        rewards = torch.zeros(mask.shape, dtype=torch.float64)
        rewards[torch.arange(len(mask)), mask.sum(-1) - 1] = torch.tensor(fields["turn_reward"], dtype=torch.float64)
        if function is not None:
            return function(rewards, mask, index, **options)[0]
        given = {k: torch.tensor(fields[k], dtype=torch.float64) for k in ("old_log_probs", "sum_pi_squared")}
        return otb_advantage(rewards, mask, index, **given, **options)[0]

    return estimator


RAGGED = {(): [0.5, -0.2], (0,): [0.3, 0.9], (0, 1): [-0.8, 0.1]}


def ragged_reward(tokens):
    return {(1,): 0.2, (0, 0): 1.0, (0, 1, 0): -0.5, (0, 1, 1): 2.0}[tokens]


def forgetful_room(gap):
    """A door, chosen by chance, then a room that looks the same behind both but wants a different action.

    The first observation tells the door; the second is equal for all. Behind door 1 everything earns `gap` more.
    """
    logits = [[0.4, -0.1], [-0.3, 0.2]]
    samples = []
    for door, action in itertools.product((0, 1), repeat=2):
        samples.append(
            Sample(
                0.5 * softmax(logits[door])[action],
                [np.zeros(4), block(score(logits[door], action), 2 * door, 4)],
                {
                    "turn_index": [0, 1],
                    "turn_reward": [0.0, gap * door + float(action == door)],
                    "anchor_obs": [f"door {door}", "room"],
                },
            )
        )
    return samples


def step_method(function, **options):
    def estimator(index, traj_uid, fields):
        mask = torch.ones(len(index), 1, dtype=torch.long)
        episode = np.add.reduceat(fields["turn_reward"], np.arange(0, len(index), 2)).repeat(2)
        rewards = torch.from_numpy(episode)[:, None]
        names = ("turn_index", "turn_reward", "anchor_obs")
        given = {"traj_uid": traj_uid, **{name: fields[name] for name in names}}
        return function(rewards, mask, index, **given, gamma=1.0, mode="mean_norm", **options)[0]

    return estimator
