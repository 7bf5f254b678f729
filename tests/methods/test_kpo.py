# SPDX-License-Identifier: Apache-2.0
"""KPO: oracle vectors, accuracy of the filter against the sequential recurrence, the gradient, and its options."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vector_cases import assert_expected, case_name, load_cases, token_field

from verl_ext.methods.kpo import kalman_filter, kalman_gains, kpo_loss_terms, steady_state_gain, time_constant

qs, seeds = st.floats(-8.0, 0.0).map(lambda exponent: 10.0**exponent), st.integers(0, 2**32 - 1)


def sequential(z, q, mask=None, skip=False):
    """The recurrence in float64, column by column; q is a number, or one a row."""
    z = np.asarray(z, dtype=np.float64)
    mask = np.ones(z.shape, dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    out = np.zeros_like(z)
    state, gain = np.zeros(len(z)), np.zeros(len(z))
    for t in range(z.shape[1]):
        following = (gain + q) / (gain + q + 1)
        if skip:
            state = np.where(mask[:, t], (1 - following) * state + following * z[:, t], state)
            gain = np.where(mask[:, t], following, gain)
        else:
            gain = following
            state = (1 - gain) * state + gain * np.where(mask[:, t], z[:, t], 0.0)
        out[:, t] = state
    return out


def aggregate(loss, mask, mode):
    if mode == "token-mean":
        return (loss * mask).sum() / mask.sum()
    return ((loss * mask).sum(-1) / mask.sum(-1)).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", load_cases("kpo"), ids=case_name)
def test_vectors(case, dtype):
    config = case["config"]
    mask = token_field(case, "response_mask", torch.int64)
    old, new = (token_field(case, name, dtype) for name in ("old_log_probs", "log_probs"))
    new.requires_grad_(True)
    advantages = torch.tensor(case["inputs"]["row_advantage"], dtype=dtype)[:, None] * mask
    loss_mat, stats = kpo_loss_terms(
        old,
        new,
        advantages,
        mask,
        q=config["kalman_q"],
        r=config["kalman_r"],
        is_clip=config["is_clip"],
        clip_ratio_low=config["clip_ratio_low"],
        clip_ratio_high=config["clip_ratio_high"],
        max_log_ratio=config["max_log_ratio"],
    )
    assert loss_mat.dtype == dtype
    loss = aggregate(loss_mat, mask, config["loss_agg_mode"])
    assert_expected(case, "loss", loss)
    loss.backward()
    assert_expected(case, "grad_log_probs", new.grad)
    assert_expected(case, "clip_fraction", stats["clip_fraction"])
    q = config["kalman_q"] / config["kalman_r"]
    assert_expected(case, "kalman_gain", kalman_gains(mask.shape[1], q))
    assert_expected(case, "filtered_log_ratio", kalman_filter((new - old).detach(), q, mask) * mask)


@pytest.mark.seconds
@settings(max_examples=15)
@given(st.lists(qs, min_size=4, max_size=4), st.integers(1, 1500), seeds)
@example([1e-8, 1e-6, 1e-2, 1.0], 1, 0)
@example([1e-8, 1e-6, 1e-2, 1.0], 2, 0)
@example([1e-8, 1e-6, 1e-2, 1.0], 17, 0)
@example([1e-8, 1e-6, 1e-2, 1.0], 4096, 0)
@example([1e-8, 1e-7, 1e-6, 1e-4, 1e-2, 1e-1, 1.0], 131072, 0)
def test_filter_matches_the_sequential_recurrence(every, length, seed):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(2, length)) * 0.1 + rng.normal(size=(2, 1)) * 0.05
    found = sequential(np.tile([*z, *np.abs(z)], (len(every), 1)), np.repeat(every, 4)).reshape(len(every), 2, 2, -1)
    for q, (expected, scale) in zip(every, found, strict=True):
        double = kalman_filter(torch.from_numpy(z), q).numpy()
        assert np.abs(double - expected).max() <= 1e-12 * max(1.0, np.abs(z).max())
        single = kalman_filter(torch.from_numpy(z).float(), q).numpy()
        # Relative to the sum of absolute contributions, 1e-6 is a few roundings of float32.
        assert np.abs(single - expected).max() <= 1e-6 * scale.max()


@settings(max_examples=20)
@given(qs)
@example(1e-6)
@example(1.0)
def test_constant_offset_has_its_closed_form(q):
    # x_t = c (1 - 1 / prod), approximately c (1 - sech(sqrt(q) t)) for small q.
    length = 3000
    x = kalman_filter(torch.full((1, length), 2.0, dtype=torch.float64), q)[0].numpy()
    remaining = np.exp(np.cumsum(np.log1p(-kalman_gains(length, q))))
    np.testing.assert_allclose(x, 2.0 * (1 - remaining), rtol=1e-9, atol=1e-12)
    if q <= 1e-6:
        t = np.arange(1, length + 1)
        np.testing.assert_allclose(x, 2.0 * (1 - 1 / np.cosh(math.sqrt(q) * t)), rtol=0, atol=1e-3)


@settings(max_examples=10)
@given(qs)
@example(1e-8)
@example(1.0)
def test_gains(q):
    gains = kalman_gains(131072, q)
    assert gains.dtype == np.float64 and gains.shape == (131072,)
    assert gains[0] == pytest.approx(q / (1 + q), rel=1e-15)
    assert (np.diff(gains) >= 0).all() and np.isfinite(gains).all()
    fixed = steady_state_gain(q)
    assert fixed == pytest.approx((fixed + q) / (fixed + q + 1), rel=1e-12)
    if 131072 > 40 * time_constant(q):
        assert gains[-1] == pytest.approx(fixed, rel=1e-9)
    assert (kalman_gains(10, q) == gains[:10]).all()
    recurrence, gain = [], 0.0
    for _ in range(2000):
        gain = (gain + q) / (gain + q + 1.0)
        recurrence.append(gain)
    np.testing.assert_allclose(gains[:2000], recurrence, rtol=1e-12)


def test_time_constants_quoted_by_the_paper():
    assert time_constant(1e-6) == pytest.approx(1000, rel=1e-3)
    assert time_constant(1e-4) == pytest.approx(100, rel=1e-2)
    assert steady_state_gain(1e-6) == pytest.approx(1e-3, rel=1e-3)


def holes(rows, length, seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, length)) > 0.3
    mask[:, : length // 4] = rng.random((rows, 1)) > 0.5
    mask[0] = False
    return mask


@pytest.mark.parametrize("mask_mode", ["zero_observation", "skip"])
@settings(max_examples=15)
@given(qs, st.integers(1, 7), st.integers(1, 100), seeds)
@example(1.0, 7, 333, 0)
def test_mask_modes(mask_mode, q, rows, length, seed):
    mask = holes(rows, length, seed)
    z = np.random.default_rng(seed).normal(size=mask.shape)
    poisoned = np.where(mask, z, np.nan)
    got = kalman_filter(torch.from_numpy(poisoned), q, torch.from_numpy(mask), mask_mode).numpy()
    np.testing.assert_allclose(got, sequential(z, q, mask, mask_mode == "skip"), atol=1e-13)


def test_mask_modes_agree_on_a_prefix_and_differ_after_a_hole():
    z = torch.ones(1, 6, dtype=torch.float64)
    prefix, hole = torch.tensor([[1, 1, 1, 1, 0, 0]]), torch.tensor([[1, 0, 0, 1, 1, 1]])
    for mask, same in ((prefix, True), (hole, False)):
        a, b = (kalman_filter(z, 0.1, mask, mode)[mask.bool()] for mode in ("zero_observation", "skip"))
        assert torch.allclose(a, b) is same


def terms(batch=6, length=50, seed=0, spread=0.3, dtype=torch.float64, mask=None):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(batch, length, generator=g, dtype=dtype) * 2
    new = old + spread * torch.randn(batch, length, generator=g, dtype=dtype)
    advantages = torch.randn(batch, length, generator=g, dtype=dtype)
    if mask is None:
        mask = (torch.arange(length) < torch.randint(0, length + 1, (batch, 1), generator=g)).long()
    return old, new, advantages, mask


@settings(max_examples=12)
@given(st.booleans(), st.sampled_from(["zero_observation", "skip"]), st.booleans(), st.floats(1e-3, 10.0), seeds)
@example(True, "skip", True, 0.01, 3)
@example(True, "zero_observation", True, 10.0, 3)
@example(False, "skip", False, 10.0, 3)
@example(False, "zero_observation", False, 0.01, 3)
def test_loss_and_gradient_follow_the_definition(is_clip, mask_mode, weighted, max_log_ratio, seed):
    mask = torch.from_numpy(holes(6, 50, seed)).long()
    old, new, advantages, mask = terms(seed=seed, mask=mask)
    weights = torch.rand(6, 50, dtype=torch.float64) * 2 if weighted else None
    new.requires_grad_(True)
    options = {"q": 0.02, "r": 2.0, "clip_ratio_low": 0.01, "clip_ratio_high": 0.02}
    loss, stats = kpo_loss_terms(
        old,
        new,
        advantages,
        mask,
        **options,
        is_clip=is_clip,
        mask_mode=mask_mode,
        max_log_ratio=max_log_ratio,
        rollout_is_weights=weights,
    )
    outer = torch.randn(6, 50, dtype=torch.float64)
    (loss * outer).sum().backward()

    x = torch.from_numpy(sequential((new - old).detach(), 0.01, mask, mask_mode == "skip"))
    traced = new.detach().clone().requires_grad_(True)
    rho = torch.exp(torch.clamp(traced - traced.detach() + x, max=max_log_ratio))
    expected = -advantages * rho
    if is_clip:
        expected = torch.maximum(expected, -advantages * rho.clamp(0.99, 1.02))
    expected = expected * mask * (weights if weighted else 1.0)
    (expected * outer).sum().backward()
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(new.grad, traced.grad, rtol=1e-11, atol=1e-12)

    alive = mask.bool()
    ratio, a = rho.detach()[alive], advantages[alive]
    high, low = ((ratio > 1.02) & (a > 0)).double().mean(), ((ratio < 0.99) & (a < 0)).double().mean()
    z = (new - old).detach()[alive]
    wanted = {
        "log_ratio_mean": z.mean(),
        "log_ratio_std": z.std(correction=0),
        "log_ratio_abs_max": z.abs().max(),
        "filtered_log_ratio_mean": x[alive].mean(),
        "filtered_log_ratio_std": x[alive].std(correction=0),
        "filtered_log_ratio_abs_max": x[alive].abs().max(),
        "clip_fraction": (high + low) if is_clip else torch.tensor(0.0),
        "clip_fraction_high": high if is_clip else torch.tensor(0.0),
        "clip_fraction_low": low if is_clip else torch.tensor(0.0),
        "max_log_ratio_fraction": (x[alive] > max_log_ratio).double().mean(),
        "mean_response_length": mask.sum(-1)[mask.sum(-1) > 0].double().mean(),
    }
    for name, value in wanted.items():
        assert float(stats[name]) == pytest.approx(float(value), rel=1e-9, abs=1e-12), name
    assert stats["steady_state_gain"] == steady_state_gain(0.01)
    assert stats["time_constant"] == time_constant(0.01)


def test_gradient_never_flows_through_the_filter():
    old, new, advantages, mask = terms(2, 12, mask=torch.ones(2, 12, dtype=torch.long))
    new.requires_grad_(True)
    loss, _ = kpo_loss_terms(old, new, advantages, mask, q=0.5, is_clip=False)
    loss[:, 7].sum().backward()
    assert (new.grad[:, 7] != 0).all()
    assert (torch.cat([new.grad[:, :7], new.grad[:, 8:]], 1) == 0).all()


def test_first_update_has_ratio_one():
    old, _, advantages, mask = terms()
    new = old.clone().requires_grad_(True)
    loss, stats = kpo_loss_terms(old, new, advantages, mask)
    loss.sum().backward()
    torch.testing.assert_close(loss, -advantages * mask)
    torch.testing.assert_close(new.grad, -advantages * mask)
    assert stats["clip_fraction"] == 0


@pytest.mark.parametrize("mask_mode", ["zero_observation", "skip"])
def test_padding_width_changes_nothing(mask_mode):
    old, new, advantages, mask = terms(dtype=torch.float32)
    options = {"q": 0.3, "mask_mode": mask_mode}
    narrow, _ = kpo_loss_terms(old, new, advantages, mask, **options)
    wide = [torch.nn.functional.pad(t, (0, 150)) for t in (old, new, advantages, mask)]
    padded, _ = kpo_loss_terms(*wide, **options)
    torch.testing.assert_close(padded[:, :50], narrow, rtol=1e-6, atol=1e-7)
    assert (padded[:, 50:] == 0).all()


def test_masked_columns_may_hold_anything():
    old, new, advantages, mask = terms(mask=torch.from_numpy(holes(6, 50)).long())
    clean, clean_stats = kpo_loss_terms(old, new, advantages, mask)
    hidden = mask == 0
    for position in range(3):
        fields = [t.clone() for t in (old, new, advantages)]
        fields[position][hidden] = float("nan")
        fields[1].requires_grad_(True)
        loss, stats = kpo_loss_terms(*fields, mask)
        torch.testing.assert_close(loss, clean)
        loss.sum().backward()
        assert torch.isfinite(fields[1].grad).all() and (fields[1].grad[hidden] == 0).all()
        assert float(stats["log_ratio_std"]) == pytest.approx(float(clean_stats["log_ratio_std"]))
    weights = torch.ones_like(old)
    weights[hidden] = float("inf")
    torch.testing.assert_close(kpo_loss_terms(old, new, advantages, mask, rollout_is_weights=weights)[0], clean)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["old_log_prob", "log_prob", "advantages", "rollout_is_weights"])
def test_a_model_token_that_is_not_finite_is_named(name, value):
    """By row and column, and before there is a loss whose gradient could be applied."""
    old, new, advantages, mask = terms(mask=torch.from_numpy(holes(6, 50)).long())
    fields = {"old_log_prob": old, "log_prob": new.requires_grad_(), "advantages": advantages}
    fields["rollout_is_weights"] = torch.ones_like(old)
    row, column = mask.nonzero()[-1].tolist()
    fields[name] = fields[name].clone()
    with torch.no_grad():
        fields[name][row, column] = float(value)
    place = rf"a model token \(column {column}\) of row {row} of the micro-batch: {value}"
    with pytest.raises(ValueError, match=f"^{name} holds NaN or infinity on {place}"):
        kpo_loss_terms(**fields, response_mask=mask)
    assert new.grad is None


def test_very_large_ratios_are_clamped_without_gradient():
    old = torch.zeros(1, 400)
    new = torch.full((1, 400), 1e6, requires_grad=True)
    loss, stats = kpo_loss_terms(old, new, -torch.ones(1, 400), torch.ones(1, 400).long(), q=1.0, is_clip=False)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.full((1, 400), math.exp(10.0)))
    assert (new.grad == 0).all() and stats["max_log_ratio_fraction"] == 1


def test_empty_batches_and_fully_masked_rows():
    for shape in ((0, 5), (3, 0), (2, 4)):
        new = torch.zeros(shape, requires_grad=True)
        loss, stats = kpo_loss_terms(torch.zeros(shape), new, torch.ones(shape), torch.zeros(shape).long())
        loss.sum().backward()
        assert loss.shape == shape and (loss == 0).all() and (new.grad == 0).all()
        assert all(math.isfinite(float(v)) for v in stats.values())
        assert kalman_filter(torch.zeros(shape), 1e-4).shape == shape


def test_row_order_changes_nothing():
    old, new, advantages, mask = terms(9, 40, dtype=torch.float32)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(4))
    loss, stats = kpo_loss_terms(old, new, advantages, mask, q=0.1)
    moved, same = kpo_loss_terms(old[order], new[order], advantages[order], mask[order], q=0.1)
    assert torch.equal(moved, loss[order])
    for name in stats:
        assert float(stats[name]) == pytest.approx(float(same[name]), rel=1e-12), name


def test_half_precision_log_probs_get_half_precision_gradients():
    old, new, advantages, mask = terms(dtype=torch.float32)
    new = new.bfloat16().requires_grad_(True)
    loss, _ = kpo_loss_terms(old, new, advantages, mask)
    loss.sum().backward()
    assert loss.dtype == torch.float32 and new.grad.dtype == torch.bfloat16


def test_errors():
    old, new, advantages, mask = terms()
    for options, message in (
        ({"q": 0.0}, "q=0.0"),
        ({"r": -1.0}, "r=-1.0"),
        ({"mask_mode": "hold"}, "mask_mode='hold'"),
        ({"clip_ratio_low": -0.1}, "clip_ratio_low=-0.1"),
        ({"max_log_ratio": 0.0}, "max_log_ratio=0.0"),
        ({"rollout_is_weights": torch.ones(2, 2)}, "rollout_is_weights has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            kpo_loss_terms(old, new, advantages, mask, **options)
    with pytest.raises(ValueError, match="advantages has shape"):
        kpo_loss_terms(old, new, advantages[:, :3], mask)
    with pytest.raises(ValueError, match="positive"):
        kalman_filter(old, float("nan"))
