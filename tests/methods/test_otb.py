# SPDX-License-Identifier: Apache-2.0
"""OTB: oracle vectors, a plain reference, verl's own estimators, edge cases, the order of rows and the blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import verl.trainer.ppo.core_algos as core_algos
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vector_cases import assert_expected, case_name, load_cases, row_field, token_field

from verl_ext.methods import otb
from verl_ext.methods.otb import otb_advantage
from verl_ext.methods.rows import RowFieldError


def run(case, **options):
    weights = token_field(case, "rollout_is_weights") if "rollout_is_weights" in case["inputs"] else None
    return otb_advantage(
        token_field(case, "token_level_rewards"),
        token_field(case, "response_mask", torch.int64),
        row_field(case, "index"),
        old_log_probs=token_field(case, "old_log_probs"),
        sum_pi_squared=token_field(case, "sum_pi_squared"),
        rollout_is_weights=weights,
        epsilon=case["config"]["epsilon"],
        **options,
    )


@pytest.mark.parametrize("case", load_cases("otb"), ids=case_name)
@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize(("name", "alignment"), [("tir_otb", "model_tokens"), ("otb", "column")])
def test_vectors(case, name, alignment, zero_tail):
    advantages, returns = run(case, alignment=alignment, handle_zero_tail=zero_tail)
    assert_expected(case, f"advantages__{name}__zero_tail_{str(zero_tail).lower()}", advantages)
    assert_expected(case, "returns", returns)


@pytest.mark.parametrize("case", load_cases("otb"), ids=case_name)
def test_vectors_leave_one_out(case):
    advantages, returns = run(case, baseline="leave_one_out")
    assert_expected(case, "advantages__loo_float64", advantages)
    assert_expected(case, "returns", returns)


def reference(rewards, mask, index, old_log_probs, sum_pi_squared, baseline, zero_tail, weights=None, epsilon=1e-8):
    """The definition in float64, one row and one position at a time (model_tokens alignment)."""
    rows = []
    for i in range(len(index)):
        keep = mask[i].bool()
        r, w = rewards[i][keep].double(), 1 - 2 * old_log_probs[i][keep].double().exp()
        w = (w + sum_pi_squared[i][keep].double()).clamp(min=0.0)  # below it by rounding alone
        if weights is not None:
            w = w * weights[i][keep].double() ** 2
        rows.append(
            (keep, [float(r[t:].sum()) for t in range(len(r))], [float(w[: t + 1].sum()) for t in range(len(r))])
        )
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for i, (keep, togo, _) in enumerate(rows):
        mates = [j for j in range(len(index)) if index[j] == index[i] and len(rows[j][1])]
        second = max([len(rows[j][1]) for j in mates if j != i], default=0)
        values = []
        for t in range(len(togo)):
            alive = [j for j in mates if t < len(rows[j][1]) and (baseline == "self_inclusive" or j != i)]
            numerator = sum(rows[j][1][t] * rows[j][2][t] for j in alive)
            denominator = sum(rows[j][2][t] for j in alive)
            b = numerator / (denominator + epsilon) if alive else 0.0
            if baseline == "self_inclusive" and (len(mates) == 1 or (zero_tail and t >= second)):
                b = 0.0
            values.append(togo[t] - b)
        out[i, keep] = torch.tensor(values, dtype=torch.float64)
    return out


def batch(seed, rows=23, length=19, holes=True, dense=False):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, length + 1, (rows,), generator=g)
    mask = (torch.arange(length) < lengths[:, None]).long()
    if holes:
        mask *= (torch.rand(rows, length, generator=g) > 0.3).long()
    logits = torch.randn(rows, length, 7, generator=g, dtype=torch.float64) * 2
    probabilities = logits.softmax(-1)
    sampled = torch.randint(0, 7, (rows, length, 1), generator=g)
    rewards = torch.randn(rows, length, generator=g) * mask
    if not dense:
        rewards = rewards * (torch.cumsum(mask, -1) == mask.sum(-1, keepdim=True))
    index = [f"u{int(i)}" for i in torch.randint(0, 5, (rows,), generator=g)]
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": index,
        "old_log_probs": probabilities.gather(-1, sampled).squeeze(-1).log().float(),
        "sum_pi_squared": (probabilities**2).sum(-1).float(),
    }


yes_or_no, seeds = st.booleans(), st.integers(0, 2**32 - 1)


@settings(max_examples=150)
@given(
    st.builds(batch, seeds, st.integers(1, 25), st.integers(1, 20), holes=yes_or_no, dense=yes_or_no),
    st.sampled_from(["self_inclusive", "leave_one_out"]),
    yes_or_no,
    yes_or_no,
    st.integers(1, 600),
)
@example(batch(3), "self_inclusive", True, True, 1 << 17)
@example(batch(3, dense=True), "leave_one_out", False, False, 1)
def test_it_agrees_with_the_definition_whatever_the_blocks(data, baseline, zero_tail, ordered, block):
    if ordered:
        data["index"] = [f"u{i // 4}" for i in range(len(data["index"]))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(otb, "BLOCK_ELEMENTS", block)
        got, returns = otb_advantage(**data, baseline=baseline, handle_zero_tail=zero_tail)
    expected = reference(*data.values(), baseline, zero_tail)
    np.testing.assert_allclose(got.numpy(), expected.numpy(), atol=3e-6, rtol=3e-6)
    assert got.dtype == returns.dtype == torch.float32


@pytest.mark.parametrize("alignment", ["column", "model_tokens"])
@settings(max_examples=40)
@given(zero_tail=yes_or_no, weighted=yes_or_no, holes=yes_or_no, dense=yes_or_no, seed=seeds)
def test_both_alignments_give_verls_numbers(alignment, zero_tail, weighted, holes, dense, seed):
    data = batch(seed, rows=30, holes=holes, dense=dense)
    data["index"] = np.array(["u1", *data["index"][1:-1], "u1"], dtype=object)
    alone = data["index"] == "u1"  # a prompt of several rows of which one has tokens
    data["response_mask"][torch.from_numpy(alone)] = 0
    data["response_mask"][0, 2:9] = 1
    data["token_level_rewards"][0, 8], data["old_log_probs"][0, 2] = 1.0, -1.0  # of some weight: epsilon is nothing
    # float64, as verl's float32 sums would cost digits
    given = {name: data[name].double() for name in ("token_level_rewards", "old_log_probs", "sum_pi_squared")}
    if weighted:
        given["rollout_is_weights"] = 0.5 + torch.rand(30, 19, generator=torch.Generator().manual_seed(seed)).double()
    theirs = {
        "column": core_algos.compute_optimal_token_baseline_advantage,
        "model_tokens": core_algos.compute_multi_turn_optimal_token_baseline_advantage,
    }[alignment]
    expected, togo = theirs(**(data | given), handle_zero_tail=zero_tail)
    got, returns = otb_advantage(**(data | given), alignment=alignment, handle_zero_tail=zero_tail)
    np.testing.assert_allclose(got.numpy(), expected.numpy(), atol=2e-6, rtol=2e-6)
    np.testing.assert_allclose(returns, togo * data["response_mask"], atol=2e-6, rtol=2e-6)
    lone = torch.from_numpy(alone)
    if not zero_tail and alignment == "column":
        assert returns[lone].abs().max() > 0.1 and got[lone].abs().max() < 1e-6
    else:
        assert torch.equal(got[lone], returns[lone])


def test_the_result_does_not_depend_on_the_order_of_the_rows():
    """Weights of 1e4 are squared: a row that has ended must leave nothing of its 1e10 in the sums of the others."""
    rows, length = 32, 64
    data = batch(29, rows=rows, length=length, holes=False)
    lengths = torch.tensor([8, 16, 56, 64] * 8)
    data["response_mask"] = (torch.arange(length) < lengths[:, None]).long()
    data["token_level_rewards"] = torch.zeros(rows, length)
    data["token_level_rewards"][torch.arange(rows), lengths - 1] = torch.randn(
        rows, generator=torch.Generator().manual_seed(1)
    )
    weights = torch.where(lengths < 20, 1e4, 1e-2)[:, None].expand(rows, length)
    uid = np.repeat(np.arange(8), 4)
    for baseline in ("self_inclusive", "leave_one_out"):
        results = []
        for order in (np.arange(rows), np.arange(rows).reshape(8, 4).T.reshape(-1), np.arange(rows)[::-1].copy()):
            fields = {name: data[name][order] for name in data if name != "index"}
            got, _ = otb_advantage(
                **fields, index=uid[order], rollout_is_weights=weights[order], baseline=baseline, epsilon=1e-12
            )
            results.append(got[np.argsort(order)])
        fields = data | {"index": uid}
        expected = reference(*fields.values(), baseline, True, weights, 1e-12)
        for got in results:
            np.testing.assert_allclose(got.numpy(), results[0].numpy(), atol=1e-6, rtol=1e-6)
            np.testing.assert_allclose(got.numpy(), expected.numpy(), atol=3e-6, rtol=3e-6)


def test_importance_weights_enter_squared_inside_the_sum():
    data = batch(5)
    weights = torch.rand(23, 19, generator=torch.Generator().manual_seed(1)) * 2
    got, _ = otb_advantage(**data, rollout_is_weights=weights)
    expected = reference(*data.values(), "self_inclusive", True, weights)
    np.testing.assert_allclose(got.numpy(), expected.numpy(), atol=3e-6, rtol=3e-6)


@settings(max_examples=25)
@given(st.floats(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), yes_or_no, yes_or_no, seeds)
@example(float("nan"), torch.float32, True, False, 13)
@example(float("inf"), torch.float64, True, True, 13)
@example(float("-inf"), torch.bfloat16, False, True, 13)
def test_anything_may_stand_in_the_padding(inside, dtype, weighted, zero_tail, seed):
    data = batch(seed, rows=24, holes=False)
    data["index"] = [f"u{i // 4}" for i in range(24)]
    fields = {name: data[name].to(dtype) for name in ("token_level_rewards", "old_log_probs", "sum_pi_squared")}
    if weighted:
        fields["rollout_is_weights"] = torch.rand(24, 19, generator=torch.Generator().manual_seed(2)).to(dtype) * 2
    padding = data["response_mask"] == 0
    weights = fields.get("rollout_is_weights")
    known = {name: field for name, field in fields.items() if name in data}
    expected = reference(*(data | known).values(), "self_inclusive", zero_tail, weights)
    clean = otb_advantage(**(data | fields), handle_zero_tail=zero_tail)
    np.testing.assert_allclose(clean[0].numpy(), expected.numpy(), atol=3e-6, rtol=3e-6)
    assert torch.equal(clean[1], fields["token_level_rewards"].float().sum(-1, keepdim=True) * ~padding)
    spoiled = {name: field.masked_fill(padding, torch.tensor(inside).to(dtype)) for name, field in fields.items()}
    got = otb_advantage(**(data | spoiled), handle_zero_tail=zero_tail)
    assert all(torch.equal(a, b) for a, b in zip(got, clean, strict=True))


def test_groups_of_every_size_and_rows_that_are_no_samples():
    data = batch(19, rows=22, holes=False)
    # Rows 0-15 in groups of 4, a padding row of its own prompt, 17-20 with one more far away.
    data["index"] = [f"u{i // 4}" for i in range(16)] + ["padding", *["v"] * 4, "u0"]
    data["response_mask"][16] = 0
    for rows, valid in ((21, [True] * 21 + [False]), (22, None)):
        result = otb_advantage(**data, valid_row=valid)
        fields = {name: field[:rows] for name, field in data.items()}
        expected = reference(*fields.values(), "self_inclusive", True)
        np.testing.assert_allclose(result.advantages[:rows].numpy(), expected.numpy(), atol=3e-6, rtol=3e-6)
        assert (result.advantages[rows:] == 0).all()
        assert result.rows.kept.tolist() == list(range(rows)) and len(result.groups) == rows
        assert len(set(result.groups.tolist())) == 6


def test_a_small_second_reward_counts():
    # 1e8 + 1 is 1e8 in float32, but the row is not one of a single reward.
    data = batch(17, rows=8, holes=False)
    data["index"] = [f"u{i // 4}" for i in range(8)]
    data["response_mask"][:, :3] = 1
    rewards = torch.zeros(8, 19, dtype=torch.float64)
    rewards[torch.arange(8), data["response_mask"].sum(-1) - 1] = 1e8
    rewards[::4, 0] = 1.0
    for data["token_level_rewards"] in (rewards, rewards.float()):
        got, _ = otb_advantage(**data)
        expected = reference(*data.values(), "self_inclusive", True)
        assert (expected[::4, 0] > 0.2).all()
        np.testing.assert_allclose(got[:, :2].numpy(), expected[:, :2].numpy(), atol=0.05)


def test_two_samples_by_hand():
    # Both tokens have pi = 1/2 of two, so w = 1 - 1 + 1/2 each; the first row has reward 1, the second 0.
    mask = torch.tensor([[1, 1], [1, 0]])
    half = torch.full((2, 2), 0.5)
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    fields = {"old_log_probs": half.log(), "sum_pi_squared": half}
    got, returns = otb_advantage(rewards, mask, ["a", "a"], **fields)
    torch.testing.assert_close(got, torch.tensor([[0.5, 1.0], [-0.5, 0.0]]))
    assert returns.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    no_tail, _ = otb_advantage(rewards, mask, ["a", "a"], **fields, handle_zero_tail=False)
    torch.testing.assert_close(no_tail, torch.tensor([[0.5, 0.0], [-0.5, 0.0]]), atol=1e-7, rtol=0)
    loo, _ = otb_advantage(rewards, mask, ["a", "a"], **fields, baseline="leave_one_out")
    torch.testing.assert_close(loo, torch.tensor([[1.0, 1.0], [-1.0, 0.0]]), atol=1e-7, rtol=0)


def test_certain_tokens_have_no_weight_and_no_baseline():
    ones = torch.ones(3, 2)
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    for baseline in ("self_inclusive", "leave_one_out"):
        for epsilon in (1e-8, 0.0):
            if epsilon == 0.0 and baseline == "self_inclusive":
                continue
            got, _ = otb_advantage(
                rewards,
                ones.long(),
                ["a"] * 3,
                old_log_probs=ones * 0,
                sum_pi_squared=ones,
                baseline=baseline,
                epsilon=epsilon,
            )
            torch.testing.assert_close(got, rewards[:, 1:].expand(3, 2))


@pytest.mark.parametrize("baseline", ["self_inclusive", "leave_one_out"])
@pytest.mark.parametrize("holes", [False, True])
def test_confident_tokens_give_the_exact_epsilon_effect(baseline, holes):
    # w = 1 - 2 pi + sum pi^2 of about 1e-8 is a difference of numbers near 1: float32 rounds it to multiples of 6e-8,
    # and four identical rewards would get a large advantage that the definition does not have.
    doubt = torch.tensor([1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 0.0]).expand(4, 6) * torch.tensor([[0.5], [1.0], [2.0], [3.0]])
    old_log_probs = torch.log1p(-doubt.double()).float()
    # Rounded to float32, which leaves w anywhere between 0 and a few times epsilon.
    squares = (2.0 * old_log_probs.double().exp() - 1.0 + 1e-8 * torch.tensor([[1.0], [2.0], [0.0], [5.0]])).float()
    mask = torch.ones(4, 6, dtype=torch.long)
    if holes:
        mask[:, 2] = 0
        mask[1, 4] = 0
    rewards = torch.zeros(4, 6)
    rewards[:, -1] = 1.0
    fields = {"old_log_probs": old_log_probs, "sum_pi_squared": squares}
    got, _ = otb_advantage(rewards, mask, ["a"] * 4, **fields, baseline=baseline)
    expected = reference(rewards, mask, ["a"] * 4, *fields.values(), baseline, True)
    np.testing.assert_allclose(got.numpy(), expected.numpy(), atol=1e-5)
    assert expected.max() < 1.01 and (expected[:, 0] > 1e-3).any()  # epsilon matters here


def test_a_confident_row_is_exact_after_energetic_rows_have_ended():
    # The rows that ended take a weight of about 5 out of the sums of the two that stay, which have about 1e-7 a token.
    lengths = torch.tensor([5, 4, 9, 9])
    mask = (torch.arange(9) < lengths[:, None]).long()
    doubt = torch.where(lengths < 9, 0.9, 3e-4).double()[:, None].expand(4, 9)
    fields = {
        "old_log_probs": torch.log1p(-doubt),
        "sum_pi_squared": (1 - doubt) ** 2 + doubt**2 * torch.tensor([[0.5], [0.5], [1.0], [0.1]]).double(),
    }
    rewards = torch.zeros(4, 9)
    rewards[torch.arange(4), lengths - 1] = torch.tensor([1.0, -3.0, 2.0, 1.0])
    got, _ = otb_advantage(rewards, mask, ["a"] * 4, **fields)
    expected = reference(rewards, mask, ["a"] * 4, *fields.values(), "self_inclusive", True)
    np.testing.assert_allclose(got.numpy(), expected.numpy(), atol=2e-6)


def test_leave_one_out_survives_very_unequal_weights():
    # The other sample is almost certain (W about 2e-8 a token) beside one of W about 1e4.
    length = 8192
    rewards = torch.zeros(2, length)
    rewards[1, -1] = 1.0
    pi = torch.tensor([[0.01], [1 - 1e-4]], dtype=torch.float64).expand(2, length)
    squares = torch.stack([pi[0] ** 2 + (0.99**2) / 100, pi[1] ** 2 + 1e-8])
    fields = {"old_log_probs": pi.log(), "sum_pi_squared": squares}
    got, _ = otb_advantage(rewards, torch.ones(2, length).long(), ["a", "a"], **fields, baseline="leave_one_out")
    expected = reference(
        rewards[:, -8:], torch.ones(2, 8).long(), ["a", "a"], pi[:, :8].log(), squares[:, :8], "leave_one_out", False
    )
    np.testing.assert_allclose(got[:, :8].numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[0, -1].item(), -1.0, atol=1e-4)


def test_group_by_agent_and_masked_rows():
    data = batch(7)
    agents = ["x" if i % 2 else "y" for i in range(23)]
    together, _ = otb_advantage(**data, group_by=["index", "agent_id"], row_fields={"agent_id": agents})
    joined = data | {"index": [u + a for u, a in zip(data["index"], agents, strict=True)]}
    apart, _ = otb_advantage(**joined)
    torch.testing.assert_close(together, apart)
    valid = [i % 3 != 0 for i in range(23)]
    some, returns = otb_advantage(**data, valid_row=valid)
    subset = {k: v[torch.tensor(valid)] if isinstance(v, torch.Tensor) else v for k, v in data.items()}
    subset["index"] = [u for u, v in zip(data["index"], valid, strict=True) if v]
    alone, _ = otb_advantage(**subset)
    torch.testing.assert_close(some[torch.tensor(valid)], alone)
    assert (some[~torch.tensor(valid)] == 0).all() and (returns[~torch.tensor(valid)] == 0).all()


def test_nan_in_padding_is_harmless_and_on_a_model_token_named():
    data = batch(11)
    clean, _ = otb_advantage(**data)
    spoiled = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in data.items()}
    for name in ("token_level_rewards", "old_log_probs", "sum_pi_squared"):
        spoiled[name][data["response_mask"] == 0] = float("nan")
    for alignment in ("model_tokens", "column"):
        for baseline in ("self_inclusive", "leave_one_out"):
            again, returns = otb_advantage(**spoiled, alignment=alignment, baseline=baseline)
            assert torch.isfinite(again).all() and torch.isfinite(returns).all()
    torch.testing.assert_close(otb_advantage(**spoiled)[0], clean, atol=1e-6, rtol=1e-6)
    row = int(data["response_mask"].sum(-1).argmax())
    column = int(data["response_mask"][row].argmax())
    for name in ("token_level_rewards", "old_log_probs", "sum_pi_squared"):
        for value in ("nan", "inf", "-inf"):
            bad = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in data.items()}
            bad[name][row, column] = float(value)
            where = rf"column {column}\) of row {row} \(uid {data['index'][row]}\): {value}"
            with pytest.raises(ValueError, match=f"{name} holds NaN or infinity on a model token.*{where}"):
                otb_advantage(**bad)
    weights = torch.ones(data["response_mask"].shape, dtype=torch.float64)
    weights[row, column] = 1e200
    with pytest.raises(ValueError, match="importance weights are too large"):
        otb_advantage(**data, rollout_is_weights=weights)


def test_errors():
    data = batch(1)
    with pytest.raises(ValueError, match="alignment='row'"):
        otb_advantage(**data, alignment="row")
    with pytest.raises(ValueError, match="baseline='mean'"):
        otb_advantage(**data, baseline="mean")
    with pytest.raises(ValueError, match="sum_pi_squared has shape"):
        otb_advantage(**(data | {"sum_pi_squared": data["sum_pi_squared"][:, :3]}))
    with pytest.raises(RowFieldError, match="sum_pi_squared is required"):
        otb_advantage(**(data | {"sum_pi_squared": None}))
    with pytest.raises(RowFieldError, match="agent_id"):
        otb_advantage(**data, group_by=["index", "agent_id"])
