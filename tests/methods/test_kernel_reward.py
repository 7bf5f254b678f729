# SPDX-License-Identifier: Apache-2.0
"""`verl_ext.methods.kernel_reward` against vectors, cases by hand and properties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from vector_cases import assert_expected, load_cases

from verl_ext.methods.kernel_reward import (
    kernel_reward,
    profiling_reward,
    prs_keep_probability,
    stts_select,
    void_turns,
)
from verl_ext.methods.options import OptionError
from verl_ext.methods.rows import MissingFieldError, RowFieldError

CASES = {case["config"]["function"]: case for case in load_cases("dr_kernel_rewards")}
NOBODY = [False]


def coverage_of(metadata: dict[str, Any]) -> float | None:
    """The time coverage in the metadata of a released result, None where it has none."""
    if "total_kernel_run_time_in_profiling_us" not in metadata:
        return None
    return metadata["custom_kernel_cuda_time_in_profiling_us"] / metadata["total_kernel_run_time_in_profiling_us"]


def test_reward_vectors() -> None:
    case = CASES["reward_speedup"]
    results, config = case["inputs"]["result"], case["config"]
    names = ("correct_weight", "speedup_weight", "coverage_weight", "speedup_upper", "speedup_lower")
    for variant in ("released", "paper"):
        got = kernel_reward(
            [result.get("correctness") for result in results],
            [result.get("speedup") for result in results],
            [coverage_of(result.get("metadata", {})) for result in results],
            penalised=[result["status"] != "completed" or result["decoy_kernel"] for result in results],
            variant=variant,
            **{name: config[name] for name in names},
        )
        assert got.dtype == np.float64
        assert_expected(case, f"turn_reward_{variant}", got)


def test_profiling_vectors() -> None:
    case = CASES["profiling_reward"]
    kernels, profiles = case["inputs"]["captured_kernels"], case["inputs"]["profile_entries"]
    for variant in ("paper", "released"):
        got = profiling_reward(kernels, profiles, variant=variant)
        assert_expected(case, f"pr_{variant}", got)
        one = [profiling_reward(names, rows, variant=variant) for names, rows in zip(kernels, profiles, strict=True)]
        assert got.dtype == one[0].dtype == np.float64
        assert got.tolist() == one


def test_prs_vectors() -> None:
    case = CASES["prs_keep_probability"]
    inputs, config = case["inputs"], case["config"]
    got = prs_keep_probability(
        inputs["time_coverage"],
        inputs["correctness"],
        inputs["speedup"],
        traj_uid=inputs["traj_uid"],
        turn_index=inputs["turn_index"],
        nonempty=inputs["row_nonempty"],
        level=config["coverage_rs"],
        **{name: config[name] for name in ("threshold", "factor", "speedup_threshold")},
    )
    assert got.dtype == np.float64
    assert_expected(case, "keep_probability", got)


def test_void_turn_vectors() -> None:
    case = CASES["void_turn_mask"]
    got = [void_turns(rewards, failed=False).tolist() for rewards in case["inputs"]["turn_reward_per_trajectory"]]
    assert got == case["expected"]["valid_row_mask_void_turn_true"]


def test_stts_vectors() -> None:
    case = CASES["stts_select"]
    names = {"paper": "top_w_paper", "released_best": "best_window_released", "last": "last"}
    for select, name in names.items():
        trajectories = case["inputs"]["turn_reward_per_trajectory"]
        got = [stts_select(rewards, case["config"]["keep"], select=select) for rewards in trajectories]
        assert [turns.tolist() for turns in got] == case["expected"][name]
        assert all(turns.dtype == np.float64 for turns in got)


# The reward ---------------------------------------------------------------------------------------------------------


def one_reward(correct: Any, speedup: Any, coverage: Any, **options: Any) -> float:
    (reward,) = kernel_reward([correct], [speedup], [coverage], penalised=NOBODY, **options)
    return float(reward)


@pytest.mark.parametrize("nothing", [None, np.nan])
def test_what_was_not_measured_counts_as_zero(nothing: Any) -> None:
    for variant, right in (("released", 0.5), ("paper", 1.0)):
        assert one_reward(True, nothing, nothing, variant=variant) == right
        assert one_reward(False, nothing, nothing, variant=variant) == 0.0


@pytest.mark.parametrize(("speedup", "counts"), [(3.0, 3), (3.1, 3), (np.inf, 3), (1.0, 1), (0.99, 0), (-4, 0)])
def test_bounds_of_the_speedup(speedup: float, counts: float) -> None:
    assert one_reward(True, speedup, 0.0, speedup_lower=1.0) == 0.5 + 0.5 * counts
    # Eq. 8 has a bound above and none below, and no weights.
    assert one_reward(True, speedup, 0.0, speedup_lower=1.0, speedup_upper=9, correct_weight=7, variant="paper") == (
        1 + max(0, min(speedup, 3))
    )


def test_each_weight_weighs_its_own_part() -> None:
    weights = {"correct_weight": 1.0, "speedup_weight": 10.0, "coverage_weight": 100.0, "speedup_upper": 2.0}
    assert one_reward(True, 5.0, 0.25, **weights) == 1 + 20 + 25
    # The released formula has no C beside the speedup; the coverage of a wrong kernel is worth nothing.
    assert one_reward(False, 5.0, 0.25, **weights) == 20
    assert one_reward(False, 5.0, 0.25, variant="paper", **weights) == 0


def test_a_penalised_row_gets_the_penalty_whatever_it_claims() -> None:
    for variant in ("released", "paper"):
        got = kernel_reward(
            [True, None, np.nan, True],
            [9.0, None, "fast", 1.0],
            [1.0, 7.0, -3.0, 1.0],
            penalised=[True, True, True, False],
            variant=variant,
            penalty=-0.25,
        )
        assert got.tolist() == [-0.25, -0.25, -0.25, 1.5 if variant == "released" else 3.0]


def test_columns_may_be_arrays_tensors_or_empty() -> None:
    columns = [1, 0, 1], [2.0, 0.0, 0.5], [1.0, 0.0, 0.5]
    expected = kernel_reward(*columns, penalised=[0, 0, 0])
    assert expected.tolist() == [2.0, 0.0, 1.0]
    for kind in (np.array, torch.tensor):
        given_as = [kind(column) for column in columns]
        assert kernel_reward(*given_as, penalised=kind([0, 0, 0])).tolist() == expected.tolist()
        assert given_as[1].tolist() == columns[1]  # not changed in place
    assert kernel_reward([], [], [], penalised=[]).shape == (0,)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"correct": [None, True]}, "'correct' must be True or False a turn, got None in row 0"),
        ({"correct": [True, 2]}, "'correct' must be True or False, got 2 in row 1"),
        ({"coverage": [0.5, 1.5]}, r"'coverage' must be a share of the time, in \[0, 1\], got 1.5 in row 1"),
        ({"coverage": [-0.1, 0.5]}, "got -0.1 in row 0"),
        ({"speedup": ["fast", 1.0]}, "'speedup' must be a number a turn, or None, got 'fast' in row 0"),
        ({"speedup": [1.0]}, "'speedup' has 1 entries for a batch of 2 rows"),
        ({"penalised": [False, None]}, "'penalised'"),
        ({"variant": "published"}, "variant='published': choose one of 'released', 'paper'"),
        ({"speedup_upper": -1.0}, "speedup_upper=-1.0: it must be at least 0"),
        ({"speedup_lower": 4.0}, "speedup_lower=4.0 is above speedup_upper=3.0"),
        ({"penalty": np.nan}, "penalty=nan: give a finite number"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], words: str) -> None:
    columns = {"correct": [True, False], "speedup": [1.0, 0.0], "coverage": [0.5, 0.0], "penalised": [False, False]}
    with pytest.raises(ValueError, match=words):
        kernel_reward(**{**columns, **change})


# The profiling reward -----------------------------------------------------------------------------------------------


def kernel(name: str, device: float, cpu: float = 0.0, *, on_device: bool = True) -> dict[str, Any]:
    return {"name": name, "cuda_time_us": device, "cpu_time_us": cpu, "device_kernel": on_device}


def test_a_generated_name_counts_every_launch_and_no_operator() -> None:
    rows = [
        kernel("mine", 30.0, 5.0),
        kernel("mine", 10.0),
        kernel("gemm", 60.0),
        kernel("mine", 40.0, on_device=False),
    ]
    assert profiling_reward(["mine", "mine", "never launched"], rows) == pytest.approx(0.4)
    # The released rule adds CPU time and the operator's row: (30 + 10 + 40) / (30 + 5 + 10 + 60 + 40).
    assert profiling_reward(["mine"], rows, variant="released") == pytest.approx(80 / 145)


@pytest.mark.parametrize("name", ["m", "Mine", "mine_2", "in"])
def test_a_name_like_another_counts_in_the_released_rule_alone(name: str) -> None:
    rows = [kernel("mine", 50.0), kernel("gemm", 50.0)]
    assert profiling_reward([name], rows) == 0.0
    assert profiling_reward([name], rows, variant="released") >= 0.5


def test_a_name_may_have_spaces() -> None:
    rows = [kernel("void f<float, 3>(float*)", 1.0), kernel("void", 3.0)]
    assert profiling_reward(["void f<float, 3>(float*) grid=(8, 1, 1)"], rows) == 0.25


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_an_empty_profile_and_one_without_time_are_zero(variant: Any) -> None:
    for rows in ([], [kernel("mine", 0.0)]):
        assert profiling_reward(["mine"], rows, variant=variant) == 0.0
        assert profiling_reward([], rows, variant=variant) == 0.0
    assert profiling_reward([[], ["a"]], [[], []], variant=variant).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("generated", "entries", "words"),
    [
        (["a"], [kernel("a", -1.0)], r"row 0 of the profile \(a\) has cuda_time_us -1.0"),
        (["a"], [kernel("b", 1.0), kernel("a", float("nan"))], r"row 1 of the profile \(a\) has cuda_time_us nan"),
        (["a"], [{"name": "a", "device_kernel": True}], "has cuda_time_us nan"),
        (["a"], [{"name": "a", "cuda_time_us": 1.0}], "row 0 of the profile has no device_kernel"),
        (["a"], [{"cuda_time_us": 1.0, "device_kernel": True}], "has no name"),
        ([" grid=(1,)"], [kernel("a", 1.0)], "name of a generated kernel is empty"),
        ([["a"], ["b"]], [[kernel("a", 1.0)]], "2 lists of generated names for 1 profiles"),
    ],
)
def test_a_bad_profile_is_named(generated: Any, entries: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        profiling_reward(generated, entries)


# PRS ----------------------------------------------------------------------------------------------------------------


def test_without_a_factor_the_threshold_is_a_step() -> None:
    for factor in (0, 0.0, None):
        got = prs_keep_probability([0.29, 0.3, 0.31, 0.0], [1, 1, 1, 0], factor=factor)
        assert got.tolist() == [0.0, 1.0, 1.0, 1.0]


def test_a_fast_kernel_is_kept_whatever_its_coverage() -> None:
    coverage, correct, speedup = [0.0, 0.35, 0.0, 0.35], [True] * 4, [1.5, 1.49, None, 9.0]
    keep = prs_keep_probability(coverage, correct, speedup, speedup_threshold=1.5)
    np.testing.assert_allclose(keep, [1.0, 0.5, 0.0, 1.0])
    for off in (None, -1.0):
        keep = prs_keep_probability(coverage, correct, speedup, speedup_threshold=off)
        np.testing.assert_allclose(keep, [0.0, 0.5, 0.0, 0.5])


def test_coverage_is_not_rounded() -> None:
    keep = prs_keep_probability([0.3549, None, np.nan, 1.7], [True] * 4)
    np.testing.assert_allclose(keep, [0.549, 0.0, 0.0, 1.0])


def test_the_geometric_mean_is_over_the_turns_with_tokens() -> None:
    keep = prs_keep_probability(
        [0.2, 0.72, 0.0, 0.3, 0.3, 0.3, 0.9, 0.9, 0.0, 0.1],
        [True, True, False, True, True, True, True, True, False, True],
        traj_uid=["a", "a", "a", "b", "b", "b", "c", "c", "c", "d"],
        turn_index=[0, 1, 2, 0, 1, 2, 0, 1, 2, 0],
        nonempty=[True, True, False, True, True, True, True, True, True, False],
        level="geometric",
    )
    # a: sqrt(0.144) = 0.3795; b: 0.3; c: (0.81e-8)^(1/3), far below; d: no turn with tokens, a mean of 1.
    mean = np.sqrt(0.2 * 0.72)
    np.testing.assert_allclose(keep, [(mean - 0.3) / 0.1] * 2 + [1.0] + [0.0] * 3 + [0.0] * 2 + [1.0] * 2, atol=1e-12)


def test_trajectories_of_two_prompts_are_two() -> None:
    keep = prs_keep_probability(
        [0.9, 0.9, 0.0, 0.0], [True] * 4, index=["p", "p", "q", "q"], traj_uid=[0] * 4, level="geometric"
    )
    assert keep.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_equal_coverages_reach_the_threshold_that_they_equal() -> None:
    # The mean of three logarithms of 0.3 is off by rounding; the step must not see it.
    for turns in range(1, 12):
        got = prs_keep_probability([0.3] * turns, [True] * turns, traj_uid=[0] * turns, level="geometric", factor=None)
        assert got.tolist() == [1.0] * turns


@given(st.floats(0.01, 0.99))
@example(0.1)
@example(0.3)
@example(0.35)
@example(0.7)
@example(0.99)
def test_a_float32_column_reaches_the_bound_that_it_equals(bound: float) -> None:
    """0.7 and 0.99 are below themselves in float32."""
    for make in (np.float32, torch.tensor):
        at, under = make([bound]), make([bound * 0.9999])
        assert prs_keep_probability(at, [True], threshold=bound, factor=None).tolist() == [1.0]
        assert prs_keep_probability(under, [True], threshold=bound, factor=0).tolist() == [0.0]
        assert prs_keep_probability([0.0], [True], at, speedup_threshold=bound).tolist() == [1.0]
        assert prs_keep_probability([0.0], [True], under, speedup_threshold=bound).tolist() == [0.0]
        rewards = [kernel_reward([True], speed, [0.0], penalised=NOBODY, speedup_lower=bound) for speed in (at, under)]
        np.testing.assert_allclose(rewards, [[0.5 + 0.5 * bound], [0.5]], rtol=1e-6)


def test_prs_names_what_is_wrong() -> None:
    with pytest.raises(MissingFieldError, match="'traj_uid' is required"):
        prs_keep_probability([0.5], [True], level="geometric")
    with pytest.raises(MissingFieldError, match="'speedup' is required"):
        prs_keep_probability([0.5], [True], speedup_threshold=1.5)
    with pytest.raises(RowFieldError, match=r"at least 0, got -0.5 in row 1 \(turn 4\)"):
        prs_keep_probability([0.5, -0.5], [True, True], turn_index=[3, 4])
    with pytest.raises(OptionError, match="factor=-0.1: it must be at least 0"):
        prs_keep_probability([0.5], [True], factor=-0.1)
    with pytest.raises(OptionError, match="level='row'"):
        prs_keep_probability([0.5], [True], level="row")  # type: ignore[arg-type]


# Void turns and STTS ------------------------------------------------------------------------------------------------


def test_a_failed_trajectory_is_void_from_the_first_turn() -> None:
    assert void_turns([1.0, 0.0, 2.0], failed=True).tolist() == [0.0, 0.0, 0.0]
    assert void_turns([], failed=False).shape == void_turns([], failed=True).shape == (0,)


def test_ties_go_to_the_earlier_turn_and_the_first_window() -> None:
    assert stts_select([1.0, 2.0, 1.0, 1.0], 2).tolist() == [0.0, 1.0]
    assert stts_select([1.0, 0.0, 1.0, 0.0, 1.0], 2, select="released_best").tolist() == [0.0, 1.0]
    # 0.1 + 0.2 and 0.3 + 0.0 are one sum, whatever floats make of them, in either order.
    assert stts_select([0.3, 0.0, -1.0, 0.1, 0.2], 2, select="released_best").tolist() == [0.0, 1.0]


@pytest.mark.parametrize("select", ["paper", "released_best", "last"])
def test_few_turns_are_all_kept(select: Any) -> None:
    for turns in range(5):
        assert stts_select([-1.0] * turns, 4, select=select).tolist() == list(range(turns))


def test_turns_need_finite_rewards_and_a_count() -> None:
    for call in (lambda rewards: void_turns(rewards, failed=False), lambda rewards: stts_select(rewards, 2)):
        with pytest.raises(ValueError, match="turn_rewards' must be a finite number, got nan in row 1"):
            call([0.0, np.nan])
    with pytest.raises(OptionError, match="keep=0 must be at least 1"):
        stts_select([1.0], 0)


# Properties ---------------------------------------------------------------------------------------------------------

share = st.floats(0, 1) | st.just(None)
kernels = st.lists(
    st.tuples(st.booleans(), st.floats(-1, 10) | st.none(), share, st.booleans(), st.integers(0, 3), st.booleans()),
    min_size=1,
    max_size=12,
)


@given(kernels, st.randoms(use_true_random=False), st.sampled_from(["released", "paper"]))
def test_reward_is_bounded_and_follows_its_row(rows: list, random: Any, variant: Any) -> None:
    def reward(order: list[int]) -> np.ndarray:
        correct, speedup, coverage, out, _, _ = zip(*[rows[i] for i in order], strict=True)
        return kernel_reward(correct, speedup, coverage, penalised=out, variant=variant)

    order = list(range(len(rows)))
    got = reward(order)
    random.shuffle(order)
    np.testing.assert_array_equal(reward(order), got[order])
    assert ((0 <= got) & (got <= (2.5 if variant == "released" else 5.0))).all()
    assert (got[[row[3] for row in rows]] == 0).all()


@given(kernels, st.randoms(use_true_random=False), st.sampled_from(["turn", "geometric"]))
def test_prs_does_not_depend_on_the_order(rows: list, random: Any, level: Any) -> None:
    def keep(order: list[int]) -> np.ndarray:
        correct, speedup, coverage, _, trajectory, nonempty = zip(*[rows[i] for i in order], strict=True)
        return prs_keep_probability(coverage, correct, speedup, traj_uid=trajectory, nonempty=nonempty, level=level)

    order = list(range(len(rows)))
    got = keep(order)
    random.shuffle(order)
    np.testing.assert_allclose(keep(order), got[order], atol=1e-9)
    assert ((0 <= got) & (got <= 1)).all()
    assert (got[[not row[0] for row in rows]] == 1).all()


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=3), st.floats(0, 1e6), st.booleans()), max_size=8))
def test_profiling_reward_is_a_share_that_does_not_depend_on_the_order(rows: list) -> None:
    entries = [kernel(name, time, on_device=on_device) for name, time, on_device in rows]
    for variant in ("paper", "released"):
        got = profiling_reward(["ab", "b"], entries, variant=variant)
        assert 0 <= got <= 1
        assert profiling_reward(["b", "ab"], entries[::-1], variant=variant) == pytest.approx(got)
    both = profiling_reward(["ab"], entries) + profiling_reward(["b"], entries)
    assert profiling_reward(["ab", "b"], entries) == pytest.approx(both)


rewards_of_turns = st.lists(st.integers(-8, 8).map(lambda n: n / 4), max_size=10)


@given(rewards_of_turns)
def test_void_turns_against_the_rule_read_aloud(rewards: list[float]) -> None:
    stays = [not (reward <= 0 and any(r > 0 for r in rewards[:turn])) for turn, reward in enumerate(rewards)]
    assert void_turns(rewards, failed=False).tolist() == stays


@given(rewards_of_turns, st.integers(1, 6))
def test_stts_against_all_choices(rewards: list[float], keep: int) -> None:
    paper, window, last = (
        stts_select(rewards, keep, select=select).astype(int).tolist() for select in ("paper", "released_best", "last")
    )
    count = min(keep, len(rewards))
    ranked = sorted(range(len(rewards)), key=lambda turn: (-rewards[turn], turn))
    assert paper == sorted(ranked[:count])
    starts = range(len(rewards) - count + 1)
    best = max(starts, key=lambda start: (sum(rewards[start : start + count]), -start))
    assert window == list(range(best, best + count))
    assert last == list(range(len(rewards) - count, len(rewards)))
