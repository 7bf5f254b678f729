# SPDX-License-Identifier: Apache-2.0
"""Dynamic Vocabulary Pruning against the oracle vectors, and what its definition says must hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from vector_cases import case_name, load_cases

from verl_ext.methods.dvp import PUBLISHED_RHO, PrunedLogProbs, pruned_log_probs
from verl_ext.methods.logits.logits_pass import token_statistics

CASES = load_cases("dvp")
DTYPES = [torch.float64, torch.float32]


def prune(case: dict[str, Any], side: str, dtype: torch.dtype) -> tuple[torch.Tensor, PrunedLogProbs]:
    logits = torch.tensor(case["inputs"][f"{side}_logits"], dtype=dtype, requires_grad=True)
    tokens = torch.tensor(case["inputs"]["tokens"])
    return logits, pruned_log_probs(logits, tokens, case["config"]["rho"], case["config"]["temperature"])


def compare(case: dict[str, Any], got: torch.Tensor, expected: list[Any]) -> None:
    """Entries that the case leaves open (null: the token is outside the set) are left out."""
    known = [row for row, value in enumerate(expected) if value is not None]
    truth = torch.tensor([expected[row] for row in known], dtype=torch.float64)
    torch.testing.assert_close(got.detach()[known].double(), truth, **case["tolerance"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_vectors(case: dict[str, Any], dtype: torch.dtype) -> None:
    """Every expected field of the case, from the public function alone."""
    assert case["config"]["loss"] == "dvp" and case["config"]["logits_are_before_temperature"] is True
    assert case["inputs"].keys() == {"train_logits", "rollout_logits", "tokens"}
    expected = dict(case["expected"])
    logits, found = prune(case, "train", dtype)
    _, rollout = prune(case, "rollout", dtype)
    assert found.in_set.tolist() == expected.pop("in_set")
    assert bool(rollout.in_set.all()), "the sampler's tokens are in the sampler's set"
    compare(case, found.log_probs, expected.pop("train_log_prob"))
    compare(case, rollout.log_probs, expected.pop("rollout_log_prob"))
    compare(case, found.log_probs - rollout.log_probs, expected.pop("log_ratio"))
    for name in ("entropy", "sum_pi_squared", "kept_mass"):
        compare(case, getattr(found, name), expected.pop(name))

    # the set: a token is in it if it is in the set as a label
    vocabulary = logits.shape[-1]
    every = torch.arange(vocabulary).expand(logits.shape)
    members = pruned_log_probs(
        logits[:, None].expand(-1, vocabulary, -1), every, case["config"]["rho"], case["config"]["temperature"]
    ).in_set
    assert [row.nonzero().flatten().tolist() for row in members] == expected.pop("keep_ids_train")

    for row, derivative in enumerate(expected.pop("dlogp_dlogits_first_rows")):
        (gradient,) = torch.autograd.grad(found.log_probs[row], logits, retain_graph=True)
        wanted = torch.zeros(logits.shape, dtype=torch.float64)
        if derivative is not None:
            wanted[row] = torch.tensor(derivative, dtype=torch.float64)
        torch.testing.assert_close(gradient.double(), wanted, **case["tolerance"])
        assert not gradient[row][~members[row]].any(), "exactly zero off the set"
        if not found.in_set[row]:
            assert not gradient.any(), "exactly zero for a token outside the set"
    assert not expected, f"fields that were not compared: {sorted(expected)}"


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_the_loss_trains_what_is_in_the_set_alone(case: dict[str, Any]) -> None:
    """- sum of sg(w) A log pi_mp in_set: a token outside the set adds nothing, whatever its weight and advantage."""
    logits, found = prune(case, "train", torch.float64)
    _, rollout = prune(case, "rollout", torch.float64)
    advantage = torch.linspace(-1.0, 2.0, len(found.log_probs), dtype=torch.float64)
    weight = (found.log_probs - rollout.log_probs).detach().clamp(-20, 20).exp().clamp(max=2.0)
    assert bool(weight.isfinite().all())
    loss = -(weight * advantage * found.log_probs * found.in_set).sum()
    loss.backward()
    exact = logits.detach().clone().requires_grad_()
    z = exact.masked_fill(exact < exact.amax(-1, keepdim=True) + math.log(case["config"]["rho"]), -math.inf)
    for row, token in enumerate(case["inputs"]["tokens"]):
        if bool(found.in_set[row]):
            (-weight[row] * advantage[row] * torch.log_softmax(z[row], -1)[token]).backward(retain_graph=True)
    assert exact.grad is not None and logits.grad is not None
    torch.testing.assert_close(logits.grad, exact.grad, atol=1e-12, rtol=1e-9)


def test_it_is_the_pass() -> None:
    logits = torch.randn(4, 6, 50, generator=torch.Generator().manual_seed(0)) * 3
    labels = logits.argmax(-1)
    found = pruned_log_probs(logits, labels, 1e-2, 0.7)
    other = token_statistics(logits, labels, rho=1e-2, temperature=0.7, entropy=True, sum_pi_squared=True)
    for name in PrunedLogProbs._fields:
        assert torch.equal(getattr(found, name), getattr(other, name))


def test_pruning_changes_the_policy_as_the_set_says() -> None:
    """The pruned log-probability is the plain one less the log of the kept mass."""
    logits = torch.randn(64, 200, generator=torch.Generator().manual_seed(0)) * 3
    labels = logits.argmax(-1)
    pruned = pruned_log_probs(logits, labels, 0.05)
    plain = torch.log_softmax(logits.double(), -1).gather(-1, labels[:, None])[:, 0]
    assert bool((pruned.kept_mass < 0.999).any())
    torch.testing.assert_close(pruned.log_probs.double(), plain - pruned.kept_mass.double().log(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rho", [0.0, -1.0])
def test_off(rho: float) -> None:
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    labels = logits.argmin(-1)
    found = pruned_log_probs(logits, labels, rho)
    assert bool(found.in_set.all()) and bool((found.kept_mass == 1.0).all())
    torch.testing.assert_close(found.log_probs, torch.log_softmax(logits, -1).gather(-1, labels[:, None])[:, 0])
    vanishing = pruned_log_probs(logits, labels, 1e-300)
    assert all(torch.equal(a, b) for a, b in zip(found, vanishing, strict=True))


def test_bfloat16_logits() -> None:
    """As from the same logits in float64: only their own rounding is lost. The set is the same too."""
    logits = (torch.randn(32, 5000, generator=torch.Generator().manual_seed(1)) * 4).bfloat16()
    labels = logits.float().argmax(-1)
    found = pruned_log_probs(logits, labels, PUBLISHED_RHO)
    exact = pruned_log_probs(logits.double(), labels, PUBLISHED_RHO)
    assert torch.equal(found.in_set, exact.in_set) and found.log_probs.dtype == torch.float32
    for name in ("log_probs", "entropy", "sum_pi_squared", "kept_mass"):
        torch.testing.assert_close(getattr(found, name).double(), getattr(exact, name), atol=3e-6, rtol=0)


def test_the_published_threshold() -> None:
    assert PUBLISHED_RHO == math.exp(-12)


@pytest.mark.parametrize("rho", [1.01, math.nan, math.inf])
def test_a_bad_rho_is_refused(rho: float) -> None:
    with pytest.raises(ValueError, match=f"rho={rho}"):
        pruned_log_probs(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), rho)
