# SPDX-License-Identifier: Apache-2.0
"""Properties that hold for every estimator: what may not change the result, and what comes out at the edges."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_ext.methods.dr_mas import dr_mas_advantage
from verl_ext.methods.gigpo import gigpo_advantage
from verl_ext.methods.hgpo import hgpo_advantage
from verl_ext.methods.maxrl import maxrl_advantage
from verl_ext.methods.otb import otb_advantage
from verl_ext.methods.trloo import trloo_advantage

#: method -> (function, row fields, token fields)
TURN = ("traj_uid", "turn_index", "turn_reward")
STEP = (*TURN, "anchor_obs", "is_action_valid")
TOKEN = ("old_log_probs", "sum_pi_squared")
VARIANTS = {
    "trloo": (trloo_advantage, TURN, (), {}),
    "trloo-mean": (trloo_advantage, TURN, (), {"baseline": "mean", "gamma": 0.5}),
    "trloo-masked": (trloo_advantage, TURN, (), {"mask_regressions": True}),
    "trloo-score": (trloo_advantage, TURN[:2], (), {}),
    "dr_mas": (dr_mas_advantage, ("agent_id", "is_action_valid"), (), {"invalid_action_penalty_coef": 0.1}),
    "dr_mas-mean": (dr_mas_advantage, ("agent_id",), (), {"norm_by_std": False}),
    "dr_mas-global": (dr_mas_advantage, ("traj_uid", "is_action_valid"), (), {"level": "global"}),
    "dr_mas-agent-mean": (dr_mas_advantage, ("traj_uid", "agent_id"), (), {"statistics": "mean", "std": "paper"}),
    "dr_mas-agent-std": (dr_mas_advantage, ("traj_uid", "agent_id", "is_action_valid"), (), {"statistics": "std"}),
    "dr_mas-rows": (dr_mas_advantage, (), (), {"level": "global_rows"}),
    "gigpo": (gigpo_advantage, STEP, (), {}),
    "gigpo-mean": (gigpo_advantage, STEP, (), {"mode": "mean_norm", "episode_stats": "trajectories"}),
    "hgpo": (hgpo_advantage, STEP, (), {}),
    "hgpo-base": (hgpo_advantage, STEP, (), {"mode": "mean_norm", "base_group": True, "history_length": 4}),
    "hgpo-paper": (hgpo_advantage, STEP, (), {"level_weights": "paper", "history_length": 0}),
    "maxrl": (maxrl_advantage, ("traj_uid",), (), {}),
    "maxrl-rows": (maxrl_advantage, (), (), {}),
    "otb": (otb_advantage, (), TOKEN, {}),
    "otb-no-tail": (otb_advantage, (), TOKEN, {"handle_zero_tail": False}),
    "otb-loo": (otb_advantage, (), TOKEN, {"baseline": "leave_one_out"}),
    "otb-column": (otb_advantage, (), TOKEN, {"alignment": "column"}),
}
ROW_FIELDS = (
    "index",
    "traj_uid",
    "turn_index",
    "agent_id",
    "anchor_obs",
    "turn_reward",
    "is_action_valid",
    "valid_row",
)
TOKEN_FIELDS = ("token_level_rewards", "response_mask", "old_log_probs", "sum_pi_squared")

every_variant = pytest.mark.parametrize("variant", VARIANTS)
examples = functools.partial(
    settings, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
RELATIVE = {"rtol": 1e-5, "atol": 1e-5}


def run(variant, batch):
    function, row_names, token_names, options = VARIANTS[variant]
    fields = {name: batch[name] for name in (*row_names, *token_names, "valid_row")}
    rewards = batch["token_level_rewards"]
    if variant.startswith("maxrl"):
        rewards = rewards.abs()  # it takes no others
    advantages, returns = function(rewards, batch["response_mask"], batch["index"], **fields, **options)
    for out in (advantages, returns):
        assert out.shape == batch["response_mask"].shape and out.dtype == torch.float32
        assert torch.isfinite(out).all()
        assert (out[batch["response_mask"] == 0] == 0).all()
        assert (out[~torch.from_numpy(batch["valid_row"])] == 0).all()
    return advantages, returns


def column(values):
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


@st.composite
def batches(draw, rewards=(0.0, 0.0, 1.0, 0.5, -1.0, 10.0, 0.3)):
    """Prompts with trajectories of unequal length, turns left out, holes in the masks, rejected and invalid rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for prompt in range(draw(st.integers(1, 3))):
        for sample in range(draw(st.integers(1, 4))):
            outcome = rng.choice(rewards)
            for turn in range(draw(st.integers(1, 4))):
                if turn and rng.random() < 0.2:
                    continue
                rows.append((f"u{prompt}", f"t{prompt}.{sample}", turn, outcome))
    size, length = len(rows), draw(st.integers(1, 6))
    mask = (np.arange(length) < rng.integers(0, length + 1, (size, 1))) & (rng.random((size, length)) > 0.2)
    scores = np.zeros((size, length), dtype=np.float32)
    scores[:, -1] = [row[3] for row in rows]
    place = np.where(mask.any(1), length - 1 - mask[:, ::-1].argmax(1), length - 1)
    scores = np.zeros_like(scores)
    scores[np.arange(size), place] = [row[3] for row in rows]
    logits = rng.normal(size=(size, length, 5)) * 2
    pi = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return {
        "index": column([row[0] for row in rows]),
        "traj_uid": column([row[1] for row in rows]),
        "turn_index": np.array([row[2] for row in rows]),
        "agent_id": column(rng.choice(["solver", "verifier"], size).tolist()),
        "anchor_obs": column([[{"room": int(i)}, "x"] for i in rng.integers(0, 3, size)]),
        "turn_reward": rng.choice(rewards, size).astype(np.float64),
        "is_action_valid": rng.random(size) > 0.2,
        "valid_row": rng.random(size) > 0.15,
        "token_level_rewards": torch.from_numpy(scores),
        "response_mask": torch.from_numpy(mask.astype(np.int64)),
        "old_log_probs": torch.from_numpy(np.log(pi[..., 0]).astype(np.float32)),
        "sum_pi_squared": torch.from_numpy((pi**2).sum(-1).astype(np.float32)),
    }


def select(batch, rows):
    rows = np.asarray(rows)
    return {k: v[torch.from_numpy(rows)] if isinstance(v, torch.Tensor) else v[rows] for k, v in batch.items()}


def stack(*parts):
    return {
        name: torch.cat([p[name] for p in parts])
        if isinstance(parts[0][name], torch.Tensor)
        else np.concatenate([p[name] for p in parts])
        for name in parts[0]
    }


@every_variant
@examples(max_examples=12)
@given(batch=batches(), seed=st.integers(0, 999))
def test_row_order_plays_no_part(variant, batch, seed):
    order = np.random.default_rng(seed).permutation(len(batch["index"]))
    for before, after in zip(run(variant, batch), run(variant, select(batch, order)), strict=True):
        torch.testing.assert_close(after, before[torch.from_numpy(order)], **RELATIVE)


@every_variant
@examples(max_examples=12)
@given(batch=batches(), seed=st.integers(0, 999))
def test_copies_marked_as_no_sample_change_nothing(variant, batch, seed):
    size = len(batch["index"])
    copies = select(batch, np.random.default_rng(seed).integers(0, size, 5))
    copies["valid_row"] = np.zeros(5, dtype=bool)
    copies["turn_reward"] = copies["turn_reward"] + 100.0
    copies["token_level_rewards"] = copies["token_level_rewards"] + 100.0
    for before, after in zip(run(variant, batch), run(variant, stack(batch, copies)), strict=True):
        torch.testing.assert_close(after[:size], before, **RELATIVE)
        assert (after[size:] == 0).all()


@every_variant
@examples(max_examples=12)
@given(batch=batches())
def test_padding_rows_with_a_fresh_uid_change_nothing(variant, batch):
    # As verl pads before the advantage: fresh uid, no reward, empty mask, every other column copied from the first row.
    size = len(batch["index"])
    padding = select(batch, np.zeros(3, dtype=int))
    padding["index"] = column(["pad-1", "pad-2", "pad-3"])
    padding["valid_row"] = np.ones(3, dtype=bool)
    padding["token_level_rewards"] = torch.zeros_like(padding["token_level_rewards"])
    padding["response_mask"] = torch.zeros_like(padding["response_mask"])
    for before, after in zip(run(variant, batch), run(variant, stack(batch, padding)), strict=True):
        torch.testing.assert_close(after[:size], before, **RELATIVE)
        assert (after[size:] == 0).all()


@every_variant
@examples(max_examples=12)
@given(batch=batches(), extra=st.integers(1, 9), left=st.booleans())
def test_padding_columns_change_nothing(variant, batch, extra, left):
    if left and variant == "otb-column":
        left = False  # its zero tail counts model tokens from column 0
    size = batch["response_mask"].shape[1]
    wide = dict(batch)
    for name in TOKEN_FIELDS:
        wide[name] = torch.nn.functional.pad(batch[name], (extra, 0) if left else (0, extra))
    start = extra if left else 0
    for before, after in zip(run(variant, batch), run(variant, wide), strict=True):
        torch.testing.assert_close(after[:, start : start + size], before, **RELATIVE)


@every_variant
@examples(max_examples=12)
@given(batch=batches())
def test_names_of_ids_play_no_part(variant, batch):
    renamed = dict(batch)
    renamed["index"] = np.array([{"u0": 7, "u1": 3, "u2": 5}[v] for v in batch["index"]])
    renamed["traj_uid"] = column([("z", v[::-1]) for v in batch["traj_uid"]])
    renamed["agent_id"] = column([{"solver": "b", "verifier": "a"}[v] for v in batch["agent_id"]])
    renamed["anchor_obs"] = column([np.full((2, 2), 9.5 - v[0]["room"]) for v in batch["anchor_obs"]])
    renamed["turn_index"] = batch["turn_index"] + 3
    for before, after in zip(run(variant, batch), run(variant, renamed), strict=True):
        torch.testing.assert_close(after, before, **RELATIVE)


@every_variant
@examples(max_examples=6)
@given(batch=batches())
def test_inputs_are_not_modified(variant, batch):
    before = copy.deepcopy(batch)
    for mask_type in (torch.float32, torch.bool, torch.int64):
        batch["response_mask"] = before["response_mask"].to(mask_type)
        advantages, _ = run(variant, batch)
        advantages.fill_(99.0)
        assert torch.equal(batch["response_mask"], before["response_mask"].to(mask_type))
    for name in (*ROW_FIELDS, *TOKEN_FIELDS):
        if name == "response_mask":
            continue
        if isinstance(before[name], torch.Tensor):
            assert torch.equal(batch[name], before[name]), name
        else:
            assert batch[name].tolist() == before[name].tolist(), name


@every_variant
@examples(max_examples=10)
@given(batch=batches(rewards=(0.9,)))
def test_equal_rewards_give_no_residue(variant, batch):
    """Groups of at least two rows with one reward value get 0 (OTB: rounding size, nothing divides by a spread)."""
    batch["turn_index"] = np.zeros_like(batch["turn_index"])
    keep = np.unique(batch["traj_uid"].astype(str), return_index=True)[1]
    batch = stack(*[select(batch, keep)] * 2)
    batch["traj_uid"] = column([f"{v}/{i}" for i, v in enumerate(batch["traj_uid"])])
    batch["agent_id"] = column(["solver"] * len(batch["index"]))
    batch["valid_row"][:] = True
    batch["is_action_valid"][:] = True
    advantages, _ = run(variant, batch)
    if variant.startswith("otb"):
        assert advantages.numel() == 0 or float(advantages.abs().max()) < 1e-4
    else:
        assert (advantages == 0).all()


@every_variant
@examples(max_examples=8)
@given(batch=batches(), scale=st.sampled_from([1e12, 1e-12]))
def test_huge_and_tiny_rewards_stay_finite(variant, batch, scale):
    batch["turn_reward"] = batch["turn_reward"] * scale
    batch["token_level_rewards"] = batch["token_level_rewards"] * scale
    advantages, _ = run(variant, batch)
    assert float(advantages.abs().max()) <= 1e4 * max(1.0, scale)


@every_variant
def test_groups_of_one_row(variant):
    """A lone row: TRLOO, OTB and the episode part keep the reward, HGPO and MaxRL have nothing to compare it with."""
    batch = {
        "index": column(["u"]),
        "traj_uid": column(["t"]),
        "turn_index": np.array([0]),
        "agent_id": column(["solver"]),
        "anchor_obs": column(["s"]),
        "turn_reward": np.array([2.0]),
        "is_action_valid": np.array([True]),
        "valid_row": np.array([True]),
        "token_level_rewards": torch.tensor([[0.0, 2.0, 0.0]]),
        "response_mask": torch.tensor([[1, 1, 0]]),
        "old_log_probs": torch.full((1, 3), -0.5),
        "sum_pi_squared": torch.full((1, 3), 0.5),
    }
    expected = 0.0 if variant in ("hgpo", "hgpo-paper", "maxrl", "maxrl-rows") else 2.0
    advantages, _ = run(variant, batch)
    torch.testing.assert_close(advantages, torch.tensor([[expected, expected, 0.0]]), rtol=5e-6, atol=0)


@every_variant
@examples(max_examples=6)
@given(batch=batches())
def test_all_rows_rejected_masked_or_absent(variant, batch):
    rejected = dict(batch, response_mask=torch.zeros_like(batch["response_mask"]))
    assert all((out == 0).all() for out in run(variant, rejected))
    masked = dict(batch, valid_row=np.zeros_like(batch["valid_row"]))
    assert all((out == 0).all() for out in run(variant, masked))
    empty = run(variant, select(batch, np.array([], dtype=int)))
    assert all(out.shape == (0, batch["response_mask"].shape[1]) for out in empty)


@every_variant
@examples(max_examples=6)
@given(batch=batches(), seed=st.integers(0, 99))
def test_rejected_rows_keep_their_place_in_the_statistics(variant, batch, seed):
    """Emptying the mask of some rows changes no other row; in OTB such rows leave the sums instead."""
    reject = torch.from_numpy(np.random.default_rng(seed).random(len(batch["index"])) < 0.4)
    mask = batch["response_mask"] * (~reject).long()[:, None]
    kept, _ = run(variant, dict(batch, response_mask=mask))
    if variant.startswith("otb"):
        without, _ = run(variant, dict(batch, valid_row=batch["valid_row"] & ~reject.numpy()))
        torch.testing.assert_close(kept, without, **RELATIVE)
    else:
        whole, _ = run(variant, batch)
        torch.testing.assert_close(kept, whole * mask, **RELATIVE)
