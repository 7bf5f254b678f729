# SPDX-License-Identifier: Apache-2.0
"""Group keys by value, segment statistics and the import line of the methods package."""

from __future__ import annotations

import enum
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from verl_ext.methods.groups import Segments, joint_ids, value_ids
from verl_ext.methods.rows import TRAJECTORY, Advantage, RowFieldError, Rows


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def pattern(column):
    """First position with an equal id, for every row: the partition without its labels."""
    ids = value_ids(column)
    assert ids.dtype == np.int64 and (not len(ids) or set(ids.tolist()) == set(range(int(ids.max()) + 1)))
    return [int(np.argmax(ids == i)) for i in ids]


def objects(*values):
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (["a", "b", "a", ""], [0, 1, 0, 3]),
        (np.array(["x", "yy", "x"]), [0, 1, 0]),
        (np.array([5, -3, 5, 10**15]), [0, 1, 0, 3]),
        (np.array([2**64 - 1, 2**63, 2**64 - 1], dtype=np.uint64), [0, 1, 0]),
        (np.array([True, False, True]), [0, 1, 0]),
        (torch.tensor([3, 3, 1]), [0, 0, 2]),
        (torch.tensor([0.5, 0.25, 0.5], dtype=torch.bfloat16), [0, 1, 0]),
        ([0.0, -0.0, float("nan"), float("nan"), 1.5], [0, 0, 2, 2, 4]),
        ([{"a": 1, "b": [1, 2]}, {"b": (1, 2), "a": 1}, {"a": 1, "b": [2, 1]}], [0, 0, 2]),
        ([[1, [2]], (1, (2,)), [1, 2], "1"], [0, 0, 2, 3]),
        ([1, "1", b"1"], [0, 1, 2]),
        (objects(np.zeros((2, 3)), np.zeros((3, 2)), np.zeros((2, 3), dtype=np.int32), np.zeros(6)), [0, 1, 0, 3]),
        (objects(np.array([0.5, -0.0]), np.array([0.5, 0.0]), np.array([0.5, np.nan])), [0, 0, 2]),
        (objects(torch.ones(2), np.ones(2), torch.ones(2, 1)), [0, 0, 2]),
        (objects(np.array(["u", "v"]), np.array(["u", "v"]), np.array(["v", "u"])), [0, 0, 2]),
        (np.array([[1, 2], [3, 4], [1, 2]]), [0, 1, 0]),
        ([{1, 2}, {2, 1}, {1}], [0, 0, 2]),
        ([Colour.RED, Colour.BLUE, Colour.RED], [0, 1, 0]),
        (["a", np.str_("a"), "b"], [0, 0, 2]),
        ([1, True, 1.0, "1", 2], [0, 0, 0, 3, 4]),
        (["a", ["a"], "a", ("a",)], [0, 1, 0, 1]),
        ([np.array(5.0), torch.tensor(5.0), np.array(6.0), np.array([5.0])], [0, 0, 2, 3]),
        ([], []),
    ],
)
def test_value_ids_compare_by_value(column, expected):
    assert pattern(column) == expected


def test_identity_objects_and_none_are_refused():
    with pytest.raises(TypeError, match="compared by value"):
        value_ids([object(), object()])
    with pytest.raises(ValueError, match="entry 1 is None"):
        value_ids(["a", None])


def test_joint_ids_and_value_ids():
    first, second = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    assert joint_ids(first, second).tolist() == [0, 1, 2, 3]
    assert joint_ids(first).tolist() == [0, 0, 1, 1]
    assert joint_ids(first, np.array([0, 1, 1, 1])).tolist() == [0, 1, 2, 2]
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, 900, 1000) for _ in range(3)]
    same = np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1)
    np.testing.assert_array_equal(joint_ids(*columns), same)
    codes = np.array([3, 0, 2, 1])
    value_ids(codes)[0] = 7  # a column of its own
    assert codes.tolist() == [3, 0, 2, 1]
    assert value_ids(np.array([5, 5])).tolist() == [0, 0]
    assert value_ids(np.array([10**12, -(10**12), 10**12])).tolist() == [1, 0, 1]
    assert value_ids(np.array([], dtype=np.int64)).tolist() == []


def test_segment_statistics_match_numpy():
    rng = np.random.default_rng(0)
    ids = value_ids(rng.integers(0, 7, size=60))
    values = rng.normal(size=60) * 3 + 5
    groups = Segments(ids)
    deviation = groups.deviation(values)
    for group in range(groups.count.size):
        member = ids == group
        assert groups.count[group] == member.sum()
        np.testing.assert_allclose(groups.sum(values)[group], values[member].sum())
        np.testing.assert_allclose(groups.mean(values)[group], values[member].mean())
        np.testing.assert_allclose(deviation[member], values[member] - values[member].mean())
        for ddof in (0, 1):
            np.testing.assert_allclose(groups.std(deviation, ddof)[member], values[member].std(ddof=ddof))
        others = np.array([np.delete(values[member], i).mean() for i in range(member.sum())])
        np.testing.assert_allclose(groups.leave_one_out(values)[member], values[member] - others)


@given(st.floats(-1e30, 1e30))
@example(0.9)
@example(0.99)
@example(1e12 + 0.1)
@example(1e-12)
def test_constant_groups_have_exactly_zero_deviation(value):
    values = np.full(7, np.float32(value), dtype=np.float64)
    values[3] *= 1 + 1e-9
    groups = Segments(np.zeros(7, dtype=np.int64))
    assert groups.constant(values).all()
    assert (groups.deviation(values) == 0).all()
    assert (groups.standardise(values, ddof=1, epsilon=1e-6) == 0).all()


def test_zero_variance_threshold():
    groups = Segments(np.array([0, 0, 1, 1]))
    assert groups.constant(np.array([0.0, 0.9e-6, 0.0, 1.1e-6])).tolist() == [True, False]
    assert groups.constant(np.array([1e6, 1e6 + 0.9, 1e6, 1e6 + 1.1])).tolist() == [True, False]


@pytest.mark.filterwarnings("error:overflow")
@given(st.floats(1e-9, 1e160), st.floats(0.0, 3e-6) | st.floats(0.0, 1.0), st.integers(2, 64))
@example(1e160, 0.99e-6, 64)
@example(1.0, 0.0, 2)
@example(1.0, 0.7e-6, 64)
@example(1e3, 1.5e-6, 64)
@example(1e9, 1e-3, 2)
@example(1e160, 1.01e-6, 2)
@example(1e-9, 1.0, 3)
def test_zero_variance_is_decided_by_the_spread_of_the_group(scale, spread, size):
    # Beside a large group that moves the norm of all values, whatever the position of the odd one out.
    level = max(1.0, scale)
    group = np.full(size, scale)
    group[size // 2] = scale - spread * level
    values, ids = np.concatenate([group, [0.0, 2.0 * level]]), np.array([0] * size + [1] * 2)
    groups = Segments(ids)
    constant = group.max() - group.min() <= 1e-6 * max(1.0, np.abs(group).max())
    deviation = groups.deviation(values)
    assert (deviation[:size] == 0).all() if constant else np.abs(deviation[:size]).max() > 0
    assert (groups.constant(values) == [constant, False]).all()
    standard = groups.standardise(values, ddof=1, epsilon=0.0)
    assert np.isfinite(standard).all() and (standard[:size] == 0).all() == constant


def test_no_epsilon_and_no_variance_give_no_advantage():
    groups = Segments(np.array([0, 0, 1]))
    assert groups.standardise(np.array([0.9, 0.9, 0.5]), ddof=1, epsilon=0.0).tolist() == [0.0, 0.0, 0.5]


def test_trajectories_are_keyed_by_prompt_and_compared_by_value():
    def ids(column, index=("p", "p", "q")):
        return Rows(3, index=list(index), traj_uid=column).keys(TRAJECTORY).tolist()

    assert ids(["a", "b", "c"]) == [0, 1, 2]
    assert ids(["a", "a", "a"]) == [0, 0, 1]
    assert ids([[1], (1,), [2]]) == [0, 0, 1]
    assert ids([float("nan"), float("nan"), 1.0]) == [0, 0, 1]
    with pytest.raises(RowFieldError, match="'traj_uid' cannot serve as a group key: entry 1 is None"):
        ids(["a", None, "c"])
    with pytest.raises(RowFieldError, match="compared by value"):
        ids([object(), object(), object()])


def test_rows_read_columns_of_every_kind():
    rows = Rows(
        3, index=["a", "b", "a"], turn_reward=torch.tensor([1.0, 2.0, 3.0]), turn_index=objects(0, 1, np.int64(2))
    )
    assert rows.floats("turn_reward").tolist() == [1.0, 2.0, 3.0]
    assert rows.ints("turn_index").tolist() == [0, 1, 2]
    assert Rows(2, flag=[True, False]).bools("flag").tolist() == [True, False]
    with pytest.raises(ValueError, match="'flag' must be True or False"):
        Rows(2, flag=[0.5, 1.0]).bools("flag")
    with pytest.raises(ValueError, match="'turn_reward' must be a number a turn, got None in row 1"):
        Rows(2, turn_reward=objects(1.0, None)).floats("turn_reward")
    with pytest.raises(ValueError, match="'turn_index' must be a whole number, got 0.5"):
        Rows(2, turn_index=[0, 0.5]).ints("turn_index")


@pytest.mark.parametrize("flag", ["False", "0", "1", float("nan"), np.nan, None, 2, np.str_("True"), [True]])
@pytest.mark.parametrize("name", ["valid_row", "is_action_valid"])
def test_a_flag_that_is_neither_true_nor_false_is_refused_by_name(name, flag):
    """bool("False") and bool(nan) are True: such a row would count as a sample."""
    for column in ([True, flag], objects(True, flag)):
        with pytest.raises(RowFieldError, match=rf"turn field '{name}' must be True or False.* in row 1"):
            Rows(2, **{name: column}).bools(name)
    if isinstance(flag, float):
        with pytest.raises(RowFieldError, match=rf"turn field '{name}' must be True or False, got nan in row 1"):
            Rows(2, **{name: np.array([1.0, flag])}).bools(name)
    for good in ([1, 0], np.array([1.0, 0.0]), objects(np.bool_(True), False), torch.tensor([True, False])):
        assert Rows(2, **{name: good}).column(name).tolist() in ([1, 0], [1])


def test_turn_indices_beyond_the_integers_that_a_float_holds():
    first = 2**53
    for column in ([first, first + 1], np.array([first, first + 1]), torch.tensor([first, first + 1])):
        rows = Rows(2, index=["a", "a"], traj_uid=["t", "t"], turn_index=column)
        assert rows.ints("turn_index").tolist() == [first, first + 1]
        assert rows.turns()[1].tolist() == [first, first + 1]
    with pytest.raises(RowFieldError, match="'turn_index' must be an integer, as a float is not exact beyond"):
        Rows(2, turn_index=[0.0, 2.0**54]).ints("turn_index")
    with pytest.raises(RowFieldError, match="'turn_index' must be a whole number"):
        Rows(2, turn_index=[0, 2**64]).ints("turn_index")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_row_scores_are_float64_sums_of_the_whole_row(dtype):
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(5, 300, generator=generator).to(dtype)
    sparse = torch.zeros(6, 300, dtype=dtype)
    sparse[0, 7], sparse[1, 299], sparse[3, 0], sparse[4, 5] = 0.9, -1.5, 1e12, 2.0
    cancelling = torch.zeros(2, 300, dtype=dtype)
    cancelling[:, 0], cancelling[:, 1], cancelling[:, 2] = 4096.0, -4096.0, 0.875
    unequal = torch.zeros(4, 300, dtype=dtype)
    unequal[0, 3], unequal[0, 9], unequal[1, 0], unequal[2, 5], unequal[2, 6] = 1e8, 1.0, -0.0, 2.0, -2.0
    transposed = dense.T.contiguous().T
    whole = torch.cat([sparse, dense])
    ones = torch.ones(3, 1, dtype=dtype)
    for rewards in (dense, sparse, cancelling, unequal, transposed, sparse[:, ::2], whole, ones, dense[:, :0]):
        scores = Rows(len(rewards)).scores(rewards)
        assert scores.dtype == np.float64
        np.testing.assert_allclose(scores, [math.fsum(row) for row in rewards.tolist()], rtol=1e-13, atol=1e-13)
    with pytest.raises(ValueError, match="token_level_rewards must be a finite number, got nan in row 0"):
        Rows(1).scores(torch.tensor([[0.0, float("nan")]], dtype=dtype))


def broadcast_rows(values, mask):
    return Advantage.of_rows(values, mask, Rows(len(values)), np.zeros(len(values), dtype=np.int64)).advantages


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32])
def test_broadcast_is_value_times_mask(dtype):
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(7, 1100, generator=generator) > 0.4).to(dtype)
    values = torch.randn(7, generator=generator, dtype=torch.float64).numpy()
    given = mask.clone()
    tokens = broadcast_rows(values, mask)
    assert tokens.dtype == torch.float32 and tokens.is_contiguous() and torch.equal(mask, given)
    np.testing.assert_array_equal(tokens.numpy(), values.astype(np.float32)[:, None] * mask.numpy().astype(np.float32))
    shuffled = mask.T.contiguous().T
    np.testing.assert_array_equal(broadcast_rows(values, shuffled).numpy(), tokens.numpy())


@pytest.mark.parametrize("value", [1e39, -1e39, float("nan"), float("inf")])
def test_an_advantage_that_does_not_fit_names_its_row(value):
    mask = torch.ones(3, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="the advantage must be within float32.* in row 1"):
        broadcast_rows(np.array([3e38, value, 0.0]), mask)
    assert broadcast_rows(np.array([3e38, -3e38, 0.0]), mask)[:, 1].tolist() == pytest.approx([3e38, -3e38, 0.0])


@pytest.mark.seconds
def test_methods_import_without_verl_ray_or_transformers():
    code = (
        "import sys, pkgutil, importlib\n"
        "class Closed:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('verl', 'ray', 'transformers', 'hydra', 'omegaconf', 'tensordict'):\n"
        "            raise ImportError(name + ' must not be imported by verl_ext.methods')\n"
        "sys.meta_path.insert(0, Closed())\n"
        "import verl_ext.methods as methods\n"
        "names = [m.name for m in pkgutil.iter_modules(methods.__path__)]\n"
        "assert len(names) >= 4, names\n"
        "for name in names: importlib.import_module('verl_ext.methods.' + name)\n"
        "found = {n.split('.')[0] for n in sys.modules} & {'verl', 'ray', 'transformers', 'hydra', 'omegaconf'}\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
