# SPDX-License-Identifier: Apache-2.0
"""`verl_ext.methods.empg` against vectors and properties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vector_cases import assert_expected, case_name, load_cases, row_fields, token_field

from verl_ext.methods.empg import empg


@pytest.mark.parametrize("case", load_cases("empg"), ids=case_name)
def test_vectors(case: dict[str, Any]) -> None:
    options = {name: case["config"][name] for name in ("k", "k_f", "zeta")}
    got = empg(
        token_field(case, "advantages_in"),
        token_field(case, "token_entropy"),
        token_field(case, "response_mask"),
        **row_fields(case, "traj_uid", "turn_index", "valid_row", "index"),
        **options,
    )
    assert_expected(case, "advantages", got)


def batch(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    turns = generator.integers(1, 5, 4)
    traj = np.repeat(np.array([f"t{i}" for i in range(4)], dtype=object), turns)
    mask = torch.from_numpy((generator.random((len(traj), 5)) < 0.8).astype(np.int64))
    mask[:, 0] = 1
    return {
        "advantages": torch.from_numpy(generator.normal(size=(len(traj), 1)) * np.ones((1, 5))).float(),
        "token_entropy": torch.from_numpy(generator.exponential(1.0, (len(traj), 5))).float(),
        "response_mask": mask,
        "traj_uid": traj,
        "turn_index": np.concatenate([np.arange(n) for n in turns]),
        "valid_row": np.ones(len(traj), dtype=bool),
    }


def take(b: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
    return {
        name: column[torch.from_numpy(rows)] if isinstance(column, torch.Tensor) else column[rows]
        for name, column in b.items()
    }


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_order_padding_and_copies_play_no_part(seed: int) -> None:
    b = batch(seed)
    size = len(b["traj_uid"])
    got = empg(**b)
    order = np.random.default_rng(seed + 1).permutation(size)
    torch.testing.assert_close(empg(**take(b, order)), got[torch.from_numpy(order)])
    wide = dict(b)
    for name, value in (("advantages", float("nan")), ("token_entropy", float("nan")), ("response_mask", 0)):
        wide[name] = torch.nn.functional.pad(b[name], (0, 2), value=value)
    assert torch.equal(empg(**wide)[:, :5], got)
    copies = take(b, np.concatenate([np.arange(size), [0, 0]]))
    copies["valid_row"][size:] = False
    extended = empg(**copies)
    assert torch.equal(extended[:size], got) and not extended[size:].any()
    mean = (got.double() * b["response_mask"]).sum(-1) / b["response_mask"].sum(-1)
    assert abs(float(mean.mean())) < 1e-6


def test_equal_entropies_only_add_the_bonus() -> None:
    b = batch(3)
    b["token_entropy"] = torch.ones_like(b["token_entropy"])
    mask = b["response_mask"].bool()
    row = b["advantages"][:, 0].double()
    torch.testing.assert_close(
        empg(**b, zeta=0.0), torch.where(mask, (row - row.mean())[:, None].float(), 0.0), atol=1e-6, rtol=1e-6
    )
    followed = torch.tensor([i + 1 < len(row) and b["traj_uid"][i + 1] == b["traj_uid"][i] for i in range(len(row))])
    with_bonus = row + 0.1 * followed
    torch.testing.assert_close(
        empg(**b), torch.where(mask, (with_bonus - with_bonus.mean())[:, None].float(), 0.0), atol=1e-6, rtol=1e-6
    )


def test_entropies_that_differ_by_rounding_are_equal() -> None:
    b = batch(3)
    for entropy in (0.0, 0.7, 11.93):
        b["token_entropy"] = torch.full_like(b["token_entropy"], entropy)
        equal = empg(**b)
        noise = torch.rand(b["token_entropy"].shape, generator=torch.Generator().manual_seed(0))
        b["token_entropy"] = b["token_entropy"] + 4e-7 * max(1.0, entropy) * noise
        torch.testing.assert_close(empg(**b), equal, atol=1e-6, rtol=0)


def test_a_gap_in_the_turns_and_a_step_without_tokens_give_no_bonus() -> None:
    shape = (3, 2)
    options = {"traj_uid": ["t"] * 3, "zeta": 1.0}
    ones = torch.ones(shape)
    gap = empg(torch.zeros(shape), ones, ones, turn_index=[0, 2, 3], **options)
    torch.testing.assert_close(gap[:, 0], torch.tensor([-1.0, 2.0, -1.0]) / 3)
    mask = torch.tensor([[1, 1], [0, 0], [1, 1]])
    assert not empg(torch.zeros(shape), ones, mask, turn_index=[0, 1, 2], **options).any()


def test_nothing_to_change_and_bad_input() -> None:
    assert empg(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)
    assert not empg(torch.ones(2, 3), torch.ones(2, 3), torch.zeros(2, 3)).any()
    with pytest.raises(ValueError, match="zeta=-1.0: it must be at least 0"):
        empg(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3), zeta=-1.0)
    with pytest.raises(ValueError, match="token_entropy is not finite"):
        empg(torch.ones(2, 3), torch.full((2, 3), float("inf")), torch.ones(2, 3))
    with pytest.raises(ValueError, match="token_entropy has shape"):
        empg(torch.ones(2, 3), torch.ones(2, 2), torch.ones(2, 3))
