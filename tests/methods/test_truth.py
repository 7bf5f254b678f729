# SPDX-License-Identifier: Apache-2.0
"""Bias and variance of the estimators on softmax policies small enough that every outcome can be enumerated.

The problems and the enumeration are those of the page that shows them as plots, `examples/truth`.
"""

from __future__ import annotations

import numpy as np
import pytest
from enumeration import (
    BANDIT,
    NORMALISATIONS,
    RAGGED,
    REWARDS,
    Sample,
    agent_moments,
    as_rows,
    as_tokens,
    bandit,
    block,
    centred_then_summed,
    energy,
    forgetful_room,
    lemma,
    moments,
    quality,
    ragged_reward,
    row_tensors,
    score,
    second_try,
    sequences,
    softmax,
    step_method,
    stop_or_go_on,
    true_gradient,
    two_agents,
    two_turns,
)

from verl_ext.methods.dr_mas import dr_mas_advantage
from verl_ext.methods.gigpo import gigpo_advantage
from verl_ext.methods.hgpo import hgpo_advantage
from verl_ext.methods.trloo import trloo_advantage

# ---------------------------------------------------------------------------------------------------------------------
# TRLOO
# ---------------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("group_size", "found"), [(2, -0.0875), (4, -0.171875)])
def test_rewards_centred_by_turn_and_then_summed_turn_the_gradient(group_size, found):
    """As verl's RFC 7244 warns: what comes after going on is compared with others who went on too."""
    samples = stop_or_go_on()
    assert true_gradient(samples)[1] == pytest.approx(0.025)
    assert moments(samples, group_size, centred_then_summed).mean[1] == pytest.approx(found, abs=1e-6)
    method = as_rows(trloo_advantage, "turn_index", "turn_reward")
    assert moments(samples, group_size, method).mean[1] == pytest.approx(0.025, abs=1e-6)


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


@pytest.mark.parametrize("worth", [1.0, 0.5, 0.1])
def test_the_lemma_says_what_each_statistic_does_to_an_agents_energy(worth):
    """E|g_k|^2 = E|z|^2 (s_k^2 + (mu_k - mu)^2) / s^2 + D_k, with the mean and the deviation that a cell takes."""
    samples = second_try(worth)
    for agent in ("x", "y"):
        sides = {cell: lemma(samples, agent, cell) for cell in NORMALISATIONS}
        for side in sides.values():
            assert side.energy == pytest.approx(side.score * side.factor + side.rest, rel=1e-12)
        assert sides["both the agent's"].factor == pytest.approx(1.0)
        assert sides["the agent's std"].factor >= 1 - 1e-12, "never below 1, however far the means are apart"
        each = sides["the agent's mean"].factor * sides["the agent's std"].factor
        assert each == pytest.approx(sides["mean and std of all"].factor), "the two effects multiply"
    if worth == 0.1:  # a small spread: the mean alone leaves nothing, the deviation alone makes the distance huge
        assert sides["the agent's mean"].factor < 0.02 and sides["the agent's std"].factor > 100
        groups = {
            cell: energy(agent_moments(samples, "y", group_size=6, **options))
            for cell, options in NORMALISATIONS.items()
        }
        assert groups["the agent's mean"] < 0.1 * groups["both the agent's"]
        assert groups["the agent's std"] > 10 * groups["both the agent's"]


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


@pytest.mark.seconds
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
