# SPDX-License-Identifier: Apache-2.0
"""Bias and variance of the estimators on softmax policies small enough that every outcome can be enumerated.

A problem lists the trajectories of one sample: probability, rows, and the score of each row (gradient of its log
probability with respect to the policy's logits). Every group of N samples is then one prompt of a single batch, so one
call of the estimator gives the advantage in every possible group, and

    E[g] = sum over groups of p(group) g(group),      g(group) = 1/N sum over rows (and tokens) of A * score

is exact up to the float32 of the advantages, as is the variance E|g|^2 - |E[g]|^2.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from verl_ext.methods.dr_mas import dr_mas_advantage
from verl_ext.methods.gigpo import gigpo_advantage
from verl_ext.methods.hgpo import hgpo_advantage
from verl_ext.methods.otb import otb_advantage
from verl_ext.methods.trloo import trloo_advantage


class Sample(NamedTuple):
    """One possible trajectory; lists have one entry a row."""

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
    assert probability.sum() == pytest.approx(1.0)
    mean = probability @ estimate
    return Moments(mean, float(probability @ (estimate**2).sum(1) - (mean**2).sum()))


def true_gradient(samples, tokens=1):
    """E[R * score of the whole trajectory], R the undiscounted sum of the turn rewards."""
    return sum(
        s.probability * sum(s.fields["turn_reward"]) * sum(np.reshape(x, (tokens, -1)).sum(0) for x in s.scores)
        for s in samples
    )


def row_tensors(rewards):
    """Rewards on the only token of each row."""
    return torch.tensor(rewards, dtype=torch.float64)[:, None], torch.ones(len(rewards), 1, dtype=torch.long)


def as_rows(function, *names, **options):
    """Adapter: row-level estimator on `turn_reward` as score, with the row fields `names`."""

    def estimator(index, traj_uid, fields):
        rewards, mask = row_tensors(fields["turn_reward"])
        given = {"traj_uid": traj_uid, **{name: fields[name] for name in names}}
        return function(rewards, mask, index, **given, **options)[0]

    return estimator


# ---------------------------------------------------------------------------------------------------------------------
# TRLOO
# ---------------------------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("group_size", [2, 3, 4, 5])
def test_trloo_is_unbiased_and_the_self_inclusive_mean_shrinks_by_one_minus_one_over_n(group_size):
    truth = true_gradient(bandit())
    trloo = moments(bandit(), group_size, as_rows(trloo_advantage, "turn_index"))
    mean = moments(bandit(), group_size, as_rows(trloo_advantage, "turn_index", baseline="mean"))
    np.testing.assert_allclose(trloo.mean, truth, atol=2e-7)
    np.testing.assert_allclose(mean.mean, (1 - 1 / group_size) * truth, atol=2e-7)
    assert mean.variance == pytest.approx((1 - 1 / group_size) ** 2 * trloo.variance, rel=1e-5)


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_trloo_is_unbiased_over_turns(group_size):
    truth = true_gradient(two_turns(False))
    fields = ("turn_index", "turn_reward")
    trloo = moments(two_turns(False), group_size, as_rows(trloo_advantage, *fields))
    mean = moments(two_turns(False), group_size, as_rows(trloo_advantage, *fields, baseline="mean"))
    np.testing.assert_allclose(trloo.mean, truth, atol=2e-7)
    np.testing.assert_allclose(mean.mean, (1 - 1 / group_size) * truth, atol=2e-7)


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_trloo_stays_unbiased_when_episodes_end_early_and_the_mean_does_not_even_keep_direction(group_size):
    truth = true_gradient(two_turns(True))
    fields = ("turn_index", "turn_reward")
    trloo = moments(two_turns(True), group_size, as_rows(trloo_advantage, *fields))
    np.testing.assert_allclose(trloo.mean, truth, atol=2e-7)
    # The later turn has fewer rows, so its share shrinks differently: no common factor repairs the mean baseline.
    mean = moments(two_turns(True), group_size, as_rows(trloo_advantage, *fields, baseline="mean")).mean
    cosine = mean @ truth / np.linalg.norm(mean) / np.linalg.norm(truth)
    assert np.abs(mean - (1 - 1 / group_size) * truth).max() > 1e-3 and cosine < 1 - 1e-5


def test_masking_turns_by_their_outcome_biases_the_gradient():
    # A first turn is solved or not; a regression of the second turn is dropped from the groups and from the loss.
    logits = [0.4, 0.1]
    samples = [
        Sample(
            softmax(logits)[a] * softmax(logits)[b],
            [block(score(logits, a), 0, 4), block(score(logits, b), 2, 4)],
            {"turn_reward": [float(a), float(b)], "turn_index": [0, 1]},
        )
        for a in (0, 1)
        for b in (0, 1)
    ]
    fields = ("turn_index", "turn_reward")
    truth = true_gradient(samples)
    plain = moments(samples, 3, as_rows(trloo_advantage, *fields)).mean
    masked = moments(samples, 3, as_rows(trloo_advantage, *fields, mask_regressions=True)).mean
    np.testing.assert_allclose(plain, truth, atol=2e-7)
    assert np.abs(masked - truth).max() > 0.05


def test_rejected_samples_must_stay_in_the_baseline():
    """With an outcome-dependent rejection the gradient of the kept rows needs the rejected ones in the baseline."""
    truth = sum(p * r * score(BANDIT, a) for a, (p, r) in enumerate(zip(softmax(BANDIT), REWARDS, strict=True)) if a)

    def rejecting(drop):
        def estimator(index, traj_uid, fields):
            rewards, mask = row_tensors(fields["turn_reward"])
            rejected = rewards[:, 0] == REWARDS[0]
            mask[rejected] = 0
            valid = ~rejected.numpy() if drop else None
            return trloo_advantage(rewards, mask, index, valid_row=valid)[0]

        return estimator

    # Given a baseline b independent of the row, the expected update is sum over kept a of pi (r - E[b]) score.
    expected_return = float(softmax(BANDIT) @ np.array(REWARDS))
    kept = sum(softmax(BANDIT)[a] * score(BANDIT, a) for a in (1, 2))
    stay = moments(bandit(), 4, rejecting(False)).mean
    np.testing.assert_allclose(stay, truth - expected_return * kept, atol=2e-7)
    dropped = moments(bandit(), 4, rejecting(True)).mean
    assert np.linalg.norm(dropped - stay) > 0.1 * np.linalg.norm(stay)


# ---------------------------------------------------------------------------------------------------------------------
# Dr. MAS
# ---------------------------------------------------------------------------------------------------------------------


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


def agent_moments(samples, agent, level, norm_by_std=True, group_size=4):
    part = slice(0, 2) if agent == "x" else slice(2, 4)
    only = [
        s._replace(scores=[g if (k == 0) == (agent == "x") else 0 * g for k, g in enumerate(s.scores)]) for s in samples
    ]
    estimator = as_rows(dr_mas_advantage, "agent_id", level=level, norm_by_std=norm_by_std)
    found = moments(only, group_size, estimator)
    return Moments(found.mean[part], found.variance)


def energy(found):
    """E|g|^2."""
    return found.variance + float((found.mean**2).sum())


def test_agent_wise_normalisation_is_blind_to_the_reward_scale_of_the_other_agent():
    plain, scaled = two_agents(1.0, 0.0), two_agents(100.0, 0.0)
    for agent in ("x", "y"):
        before, after = agent_moments(plain, agent, "agent"), agent_moments(scaled, agent, "agent")
        np.testing.assert_allclose(after.mean, before.mean, rtol=1e-4)
        assert after.variance == pytest.approx(before.variance, rel=1e-4)
    # Both agents have the same policy and the same kind of outcome, so both learn at the same rate.
    assert energy(agent_moments(scaled, "x", "agent")) == pytest.approx(
        energy(agent_moments(scaled, "y", "agent")), rel=1e-4
    )
    # Under one scale for all rows the agent with the small rewards hardly learns.
    x, y = agent_moments(scaled, "x", "global_rows"), agent_moments(scaled, "y", "global_rows")
    assert np.linalg.norm(x.mean) < 0.2 * np.linalg.norm(y.mean)


def test_a_common_mean_drowns_the_signal_of_every_agent_whose_rewards_lie_elsewhere():
    samples = two_agents(1.0, 10.0)
    for agent in ("x", "y"):
        own, common = (agent_moments(samples, agent, level, norm_by_std=False) for level in ("agent", "global_rows"))
        # Both point the same way, but around the common mean the offset of 5 is noise.
        assert own.mean @ common.mean > 0.99 * np.linalg.norm(own.mean) * np.linalg.norm(common.mean)
        ratio = [(found.mean**2).sum() / found.variance for found in (own, common)]
        assert ratio[0] > 20 * ratio[1]


def test_energy_of_the_common_scale_follows_its_prediction():
    """Second moment of the advantage, common over agent-wise scale: (sigma_k^2 + (mu_k - mu)^2) / sigma^2."""
    probability = softmax([0.3, -0.2])[1]
    generator = np.random.default_rng(0)
    size = 20000
    for scale, offset in ((1.0, 10.0), (5.0, 0.0), (3.0, -2.0)):
        outcome = generator.random((size, 2)) < probability
        rewards, mask = row_tensors((outcome * [1.0, scale] + [0.0, offset]).reshape(-1).tolist())
        index, agents = np.zeros(2 * size, dtype=int), ["x", "y"] * size
        own, _ = dr_mas_advantage(rewards, mask, index, agent_id=agents, level="agent")
        common, _ = dr_mas_advantage(rewards, mask, index, agent_id=agents, level="global_rows")
        mu, sigma = np.array([probability, offset + scale * probability]), np.array([1.0, scale])
        sigma = sigma * np.sqrt(probability * (1 - probability))
        total = (sigma**2).mean() + ((mu - mu.mean()) ** 2).mean()
        for k in (0, 1):
            measured = float((common[k::2] ** 2).mean() / (own[k::2] ** 2).mean())
            predicted = (sigma[k] ** 2 + (mu[k] - mu.mean()) ** 2) / total
            assert measured == pytest.approx(predicted, rel=0.02)


# ---------------------------------------------------------------------------------------------------------------------
# OTB
# ---------------------------------------------------------------------------------------------------------------------


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
    """Adapter: OTB, or a row-level estimator spread over the tokens."""

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


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_leave_one_out_token_baseline_is_unbiased_and_the_self_inclusive_one_is_not(group_size):
    samples, length = sequences(RAGGED, ragged_reward)
    truth = true_gradient(samples, length)
    loo = moments(samples, group_size, as_tokens(length, baseline="leave_one_out"), length)
    np.testing.assert_allclose(loo.mean, truth, atol=1e-6)
    released = moments(samples, group_size, as_tokens(length), length)
    assert np.linalg.norm(released.mean - truth) > 0.1 * np.linalg.norm(truth)


def test_bias_of_the_self_inclusive_token_baseline_falls_with_the_group_size():
    samples, length = sequences(RAGGED, ragged_reward)
    truth = true_gradient(samples, length)
    bias = [np.linalg.norm(moments(samples, n, as_tokens(length), length).mean - truth) for n in (2, 3, 4, 5)]
    assert bias == sorted(bias, reverse=True)


def test_self_inclusive_token_baseline_shrinks_the_gradient_when_the_right_answer_is_rare():
    # One token, four samples: of the true gradient's norm between a fifth and three quarters is left.
    for logits, low, high in (([3.0, 0.0, 0.0], 0.19, 0.6), ([0.0, 0.0, 0.0], 0.6, 0.76)):
        samples, length = sequences({(): logits}, lambda tokens: float(tokens == (1,)))
        truth = true_gradient(samples, length)
        released = moments(samples, 4, as_tokens(length), length)
        loo = moments(samples, 4, as_tokens(length, baseline="leave_one_out"), length)
        assert low <= np.linalg.norm(released.mean) / np.linalg.norm(truth) <= high
        np.testing.assert_allclose(loo.mean, truth, atol=1e-6)


def token_and_mean_variance(logits, rewards, group_size=4):
    samples, length = sequences(logits, lambda tokens: rewards[tokens])
    otb = moments(samples, group_size, as_tokens(length, baseline="leave_one_out"), length)
    mean = moments(samples, group_size, as_tokens(length, trloo_advantage), length)
    np.testing.assert_allclose(otb.mean, mean.mean, atol=1e-6)
    return otb.variance, mean.variance


def test_token_baseline_has_less_variance_where_long_samples_have_returns_of_their_own():
    # Stopping earns nothing, going on 5 or 6: at the second token only the samples that went on are compared.
    logits = {(): [0.0, 0.0], (0,): [0.3, -0.2]}
    otb, mean = token_and_mean_variance(logits, {(1,): 0.0, (0, 0): 5.0, (0, 1): 6.0})
    assert otb < 0.9 * mean


def test_token_baseline_equals_the_group_mean_where_all_tokens_have_the_same_energy():
    otb, mean = token_and_mean_variance({(): [0.0] * 4}, {(0,): 0.0, (1,): 5.0, (2,): 5.5, (3,): 6.0})
    assert otb == pytest.approx(mean, rel=1e-5)


def test_token_baseline_has_more_variance_than_the_mean_in_a_small_group_with_a_confident_token():
    # The weights lean on the few energetic samples: closer to the optimum on average, but estimated from fewer of them.
    otb, mean = token_and_mean_variance({(): [3.0, 0.0, 0.0, 0.0]}, {(0,): 0.0, (1,): 5.0, (2,): 5.5, (3,): 6.0})
    assert mean < otb < 1.1 * mean


# ---------------------------------------------------------------------------------------------------------------------
# HGPO against GiGPO
# ---------------------------------------------------------------------------------------------------------------------


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


def quality(found, truth):
    """Length of the mean along the true gradient, relative to it; cosine with it; variance at equal length."""
    along = float(found.mean @ truth / (truth @ truth))
    cosine = float(found.mean @ truth / np.linalg.norm(found.mean) / np.linalg.norm(truth))
    return along, cosine, found.variance / along**2


def test_hgpo_against_gigpo_where_the_optimal_action_depends_on_history():
    samples, group_size = forgetful_room(gap=5.0), 6
    truth = true_gradient(samples)
    methods = {
        "gigpo": step_method(gigpo_advantage),
        "level 1": step_method(hgpo_advantage, history_length=0),
        "hgpo": step_method(hgpo_advantage, history_length=1),
        "level 2": step_method(hgpo_advantage, history_length=1, length_weight_alpha=20.0),
    }
    along, cosine, variance = {}, {}, {}
    for name, method in methods.items():
        along[name], cosine[name], variance[name] = quality(moments(samples, group_size, method), truth)
    # Bias. Groups that mix the histories keep the direction: GiGPO adds two advantages that shrink by (1 - 1/N) each.
    assert cosine["gigpo"] > 1 - 1e-9 and cosine["level 1"] > 1 - 1e-9
    assert along["gigpo"] == pytest.approx(2 * (1 - 1 / group_size), rel=1e-4)
    assert along["level 1"] == pytest.approx(1 - 1 / group_size, rel=1e-4)
    # Finer groups are smaller and shrink more; and a row whose fine item is missing or 0 falls back on the coarse one,
    # which depends on its own action, so HGPO turns the gradient.
    assert along["level 2"] < along["hgpo"] < along["level 1"]
    assert 0.85 < cosine["level 2"] < cosine["hgpo"] < 0.97
    # Variance. Comparing rows with the same history takes out the difference between the doors.
    assert variance["level 1"] == pytest.approx(variance["gigpo"], rel=1e-4)
    assert variance["level 2"] < variance["hgpo"] < 0.9 * variance["gigpo"]


def test_hgpo_keeps_the_direction_where_the_histories_do_not_differ():
    samples = forgetful_room(gap=0.0)
    truth = true_gradient(samples)
    for alpha in (1.0, 20.0):
        method = step_method(hgpo_advantage, history_length=1, length_weight_alpha=alpha)
        along, cosine, _ = quality(moments(samples, 4, method), truth)
        assert cosine > 0.999 and 0.7 < along < 1 - 1 / 4
