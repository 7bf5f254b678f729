# SPDX-License-Identifier: Apache-2.0
"""`verl_ext.methods.rejection` against vectors, formulas by hand and properties."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vector_cases import assert_expected, case_name, load_cases, row_fields, token_field

from verl_ext.methods import rejection

CASES = load_cases("rollout_correction")


def of_family(*families: str) -> list[dict[str, Any]]:
    return [case for case in CASES if case["config"]["family"] in families]


@pytest.mark.parametrize("case", of_family("kernelgym_mrs"), ids=case_name)
def test_mrs_vectors(case: dict[str, Any]) -> None:
    config = case["config"]
    got = rejection.mrs(
        token_field(case, "old_log_probs"),
        token_field(case, "rollout_log_probs"),
        token_field(case, "response_mask"),
        **row_fields(case, "traj_uid", "turn_index", "index"),
        level=config["rollout_rs"],
        lower=config["lower"],
        upper=config["upper"],
        veto=config["token_veto_threshold"],
    )
    assert_expected(case, "response_mask", got.response_mask)
    assert_expected(case, "row_kept", got.kept)


@pytest.mark.parametrize("case", of_family("trm_exact_kl"), ids=case_name)
def test_trm_vectors(case: dict[str, Any]) -> None:
    mask = token_field(case, "response_mask")
    logits = []
    for name in ("rollout_logits", "train_logits"):
        ragged = case["inputs"][name]
        dense = torch.zeros(*mask.shape, len(ragged[0][0]), dtype=torch.float64)
        for row, tokens in enumerate(ragged):
            dense[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.float64)
        logits.append(dense)
    token_kl = rejection.exact_token_kl(*logits)
    assert_expected(case, "token_kl", token_kl * mask)
    largest = rejection.trm(token_kl, mask, max=case["config"]["delta_max"], avg=None)
    mean = rejection.trm(token_kl, mask, max=None, avg=case["config"]["delta_avg"])
    assert_expected(case, "max_kl", largest.statistic)
    assert_expected(case, "mean_kl", mean.statistic)
    assert_expected(case, "row_kept_max", largest.kept)
    assert_expected(case, "row_kept_avg", mean.kept)


def batch(seed: int, rows: int = 9, length: int = 7) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    mask = torch.from_numpy((generator.random((rows, length)) < 0.7).astype(np.int64))
    mask[rows // 2] = 0  # a row without model tokens
    rollout = torch.from_numpy(-generator.exponential(1.0, (rows, length)))
    old = rollout + torch.from_numpy(generator.normal(0, 0.02, (rows, length)))
    names = generator.integers(0, 3, rows)
    traj = np.array([f"t{name}" for name in names], dtype=object)
    turn = np.array([int((names[:i] == names[i]).sum()) for i in range(rows)])
    return {"old": old, "rollout": rollout, "mask": mask, "traj": traj, "turn": turn, "index": np.array(["p"] * rows)}


def rules(b: dict[str, Any]) -> dict[str, rejection.Rejection]:
    given = (b["old"], b["rollout"], b["mask"])
    groups = {"traj_uid": b["traj"], "index": b["index"]}
    kl = rejection.sampled_token_kl(*given, estimator="k3")
    return {
        **{
            f"mrs_{level}": rejection.mrs(*given, **groups, level=level, lower=0.99, upper=1.01, veto=0.95)
            for level in rejection.LEVELS
        },
        "mrs_veto": rejection.mrs(*given, **groups, level=None, veto=0.97, veto_scope="trajectory"),
        "trm": rejection.trm(kl, b["mask"], max=5e-4, avg=2e-4),
        "ln_trm": rejection.ln_trm(*given, epsilon=0.05, delta=1e-3, threshold=0.015),
        "ser": rejection.ser(*given, threshold=0.015),
        "simpletir": rejection.simpletir(b["mask"], void=b["turn"] == 2, **groups),
        "variance_filter": rejection.variance_filter(
            b["mask"], rewards=b["turn"] * 0.5, index=b["traj"], threshold=0.3, quantile=0.4
        ),
    }


@pytest.mark.seconds
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_properties_of_every_rule(seed: int) -> None:
    b = batch(seed)
    got = rules(b)
    order = torch.from_numpy(np.random.default_rng(seed + 1).permutation(len(b["mask"])))
    shuffled = rules({k: v[order] if isinstance(v, torch.Tensor) else v[order.numpy()] for k, v in b.items()})
    wide = {k: torch.nn.functional.pad(b[k], (0, 3), value=math.nan) for k in ("old", "rollout")}
    padded = rules({**b, **wide, "mask": torch.nn.functional.pad(b["mask"], (0, 3))})
    empty = ~b["mask"].bool().any(-1)
    for name, one in got.items():
        assert one.response_mask.dtype == b["mask"].dtype
        assert bool((one.response_mask <= b["mask"]).all()), name
        assert bool(one.kept[empty].all()), name
        assert bool(one.statistic.isfinite().all()), name
        assert torch.equal(shuffled[name].response_mask, one.response_mask[order]), name
        assert torch.equal(padded[name].response_mask[:, : b["mask"].shape[1]], one.response_mask), name
        assert torch.equal(padded[name].kept, one.kept), name
    together = rejection.all_of(b["mask"], list(got.values()))
    assert torch.equal(together.bool(), torch.stack([one.response_mask.bool() for one in got.values()]).all(0))


def test_levels_by_hand() -> None:
    old = torch.tensor([[0.01, 0.03], [-0.05, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    rollout = torch.zeros(2, 2)
    expected = {
        "turn": [0.04, -0.05],
        "turn_geo": [0.02, -0.05],
        "sequence": [-0.01, -0.01],
        "geometric": [-0.01 / 3] * 2,
    }
    for level, logs in expected.items():
        got = rejection.mrs(
            old, rollout, mask, traj_uid=["t", "t"], index=["p", "p"], level=level, lower=0.97, upper=1.03
        )
        torch.testing.assert_close(got.statistic.log(), torch.tensor(logs, dtype=torch.float64), atol=1e-8, rtol=0)
        assert got.kept.tolist() == [bool(0.97 <= math.exp(value) <= 1.03) for value in logs]
    tokens = rejection.mrs(old, rollout, mask, level="token", lower=0.97, upper=1.02, veto=None)
    assert tokens.response_mask.tolist() == [[1, 0], [0, 0]]
    assert tokens.kept.tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_statistic_at_its_bound_is_kept_whatever_the_rounding(dtype: torch.dtype) -> None:
    """0.05 in float32 is above the bound 0.05, and the mean of ten times 0.001 is above 0.001 in any dtype."""
    ten, one = torch.ones(1, 10, dtype=dtype), torch.ones(1, 1, dtype=dtype)
    for more, kept in ((1.0, True), (1.0001, False)):
        assert rejection.trm(0.05 * more * ten, ten, max=0.05, avg=None).kept.tolist() == [kept]
        assert rejection.trm(0.001 * more * ten, ten, max=None, avg=0.001).kept.tolist() == [kept]
        for bound in (0.03, 0.1, 0.4, 0.5, 0.6):
            old = (bound * more * ten).log1p()
            assert rejection.ser(old, 0 * ten, ten, threshold=bound).kept.tolist() == [kept]
            assert rejection.ln_trm(old, 0 * ten, ten, epsilon=0.1, delta=0.1, threshold=bound).kept.tolist() == [kept]
        for level in rejection.LEVELS:
            for ratio in (1.001, 1.3, 2.0, 3.0):
                up = (ratio * more * one).log()
                assert rejection.mrs(up, 0 * one, one, level=level, upper=ratio).kept.tolist() == [kept]
                assert rejection.mrs(-up, 0 * one, one, level=level, lower=1 / ratio).kept.tolist() == [kept]
        for veto in (1e-4, 0.1, 0.7):
            log = (veto / more * one).log()
            assert rejection.mrs(log, 0 * one, one, level=None, veto=veto).kept.tolist() == [kept]


def test_a_ratio_is_cut_before_it_is_compared() -> None:
    old, mask = torch.tensor([[25.0], [-25.0]]), torch.ones(2, 1)
    for level in rejection.LEVELS:
        got = rejection.mrs(old, torch.zeros(2, 1), mask, level=level, lower=1e-9, upper=1e9, veto=None)
        torch.testing.assert_close(got.statistic.flatten(), torch.tensor([20.0, -20.0], dtype=torch.float64).exp())
        assert got.kept.tolist() == [True, True]


def test_veto_is_one_sided_and_of_row_or_trajectory() -> None:
    old = torch.tensor([[-10.0, 0.0], [0.0, 0.0], [12.0, 0.0]])
    mask = torch.ones(3, 2, dtype=torch.int64)
    names = {"traj_uid": ["a", "a", "b"], "index": ["p"] * 3}
    row = rejection.mrs(old, torch.zeros(3, 2), mask, **names, level=None)
    whole = rejection.mrs(old, torch.zeros(3, 2), mask, **names, level=None, veto_scope="trajectory")
    assert row.kept.tolist() == [False, True, True]
    assert whole.kept.tolist() == [False, False, True]


def test_equal_trajectory_names_of_two_prompts_are_two() -> None:
    old = torch.tensor([[0.1], [-0.1]])
    got = rejection.mrs(old, torch.zeros(2, 1), torch.ones(2, 1), traj_uid=["t", "t"], index=["p", "q"])
    assert got.kept.tolist() == [False, False]


def test_divergences() -> None:
    generator = torch.Generator().manual_seed(0)
    rollout, train = torch.randn(2, 3, 4, 12, generator=generator)
    exact = rejection.exact_token_kl(rollout, train)
    p, q = rollout.double().softmax(-1), train.double().softmax(-1)
    torch.testing.assert_close(exact, (p * (p / q).log()).sum(-1))
    last = torch.zeros_like(exact)
    for k in (1, 3, 11):
        top, ids = rollout.double().log_softmax(-1).topk(k)
        lower = rejection.top_k_token_kl(top, train.double().log_softmax(-1).gather(-1, ids))
        assert bool((lower <= exact + 1e-12).all()) and bool((lower >= last - 1e-12).all())
        last = lower
    torch.testing.assert_close(last, exact)
    pruned = rollout.masked_fill(rollout < 0, -math.inf)
    assert bool(rejection.exact_token_kl(pruned, train).isfinite().all())
    assert bool((rejection.exact_token_kl(train, pruned) == math.inf).all())
    assert rejection.trm(torch.tensor([[math.inf, 0.0]]), torch.ones(1, 2)).kept.tolist() == [False]


def test_k3_is_unbiased_for_the_divergence() -> None:
    rollout, train = torch.randn(2, 6, generator=torch.Generator().manual_seed(1)).double().log_softmax(-1)
    each = rejection.sampled_token_kl(train[None], rollout[None], torch.ones(1, 6), estimator="k3")[0]
    torch.testing.assert_close((rollout.exp() * each).sum(), (rollout.exp() * (rollout - train)).sum())


def test_length_neutral_weights_by_hand() -> None:
    old = torch.tensor([[0.1, -0.2, 0.3], [0.5, 0.0, 0.0]]).log1p()
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    got = rejection.ln_trm(old, torch.zeros(2, 3), mask, epsilon=0.1, delta=0.01, threshold=0.14)
    weight = [min(1, left * 0.1, math.sqrt(left * 0.01 / 2)) for left in (2, 1, 0)]
    by_hand = (0.1 * weight[0] + 0.2 * weight[1]) / sum(weight)
    torch.testing.assert_close(got.statistic, torch.tensor([by_hand, 0.0], dtype=torch.float64), atol=1e-7, rtol=0)
    assert got.kept.tolist() == [by_hand <= 0.14, True]
    mean = rejection.ser(old, torch.zeros(2, 3), mask, threshold=0.3)
    torch.testing.assert_close(mean.statistic, torch.tensor([0.2, 0.5], dtype=torch.float64), atol=1e-7, rtol=0)
    assert mean.kept.tolist() == [True, False]


def test_void_turns() -> None:
    python = "```python\nprint(1)\n```"
    for text, void in [
        (python, False),
        ("```py\n1\n```", False),
        ("```\n1\n```", False),  # as in the released code
        ("```python\nprint(1)", True),  # not finished
        ("so \\boxed{3}", False),
        ("```bash\nls\n```", True),
        ("", True),
        ("`" * 50_000, True),
    ]:
        assert rejection.is_void_turn(text) is void, text[:20]
    got = rejection.simpletir(
        torch.ones(4, 2), void=[False, True, False, False], traj_uid=["a", "a", "b", "a"], index=["p", "p", "p", "q"]
    )
    assert got.kept.tolist() == [False, False, True, True]


def test_variance_filter_counts_trajectories_not_rows() -> None:
    index = ["p"] * 4 + ["q"] * 2
    traj = ["a", "a", "a", "b", "c", "d"]
    got = rejection.variance_filter(torch.ones(6, 1), rewards=[1, 1, 1, 0, 0.5, 0.5], index=index, traj_uid=traj)
    assert got.statistic.tolist() == [0.5] * 4 + [0.0] * 2
    assert got.kept.tolist() == [True] * 4 + [False] * 2
    lowest = rejection.variance_filter(
        torch.ones(6, 1), rewards=[1, 1, 1, 0, 0.5, 0.4], index=index, traj_uid=traj, threshold=None, quantile=0.5
    )
    assert lowest.kept.tolist() == [True] * 4 + [False] * 2


def test_nothing_to_keep_and_nothing_at_all() -> None:
    mask = torch.ones(2, 3)
    got = rejection.ser(torch.full((2, 3), 5.0), torch.zeros(2, 3), mask, threshold=0.1)
    assert not got.kept.any() and not got.response_mask.any()
    none = rejection.mrs(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3))
    assert none.kept.shape == (0,)
    assert rejection.trm(torch.zeros(2, 0), torch.zeros(2, 0)).kept.tolist() == [True, True]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda o, r, m: rejection.mrs(o * math.nan, r, m), "old_log_probs is NaN at a model token: row 0, column 0"),
        (lambda o, r, m: rejection.mrs(o, r, m, upper=-1.0), "upper=-1.0: it must be greater than 0"),
        (lambda o, r, m: rejection.mrs(o, r, m, lower=2.0, upper=1.0), "lower=2.0 is above upper=1.0"),
        (lambda o, r, m: rejection.mrs(o, r, m, level="word"), "level='word': choose one of"),
        (lambda o, r, m: rejection.mrs(o[:, :1], r, m), "old_log_probs has shape"),
        (lambda o, r, m: rejection.trm(o, m, max=-1.0), "max=-1.0: it must be at least 0"),
        (lambda o, r, m: rejection.ser(o, r, m, threshold=-0.1), "threshold=-0.1: it must be at least 0"),
        (
            lambda o, r, m: rejection.ln_trm(o, r, m, epsilon=0.0, delta=1.0, threshold=None),
            "epsilon=0.0: it must be greater than 0",
        ),
        (lambda o, r, m: rejection.exact_token_kl(o, r), "must both be"),
    ],
)
def test_bad_input(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2, 3))
