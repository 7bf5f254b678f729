# SPDX-License-Identifier: Apache-2.0
"""The pass over the logits against its definition in float64 and autograd, in plain torch and in Triton."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import copies
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from verl_ext.cpu.engine import sampling
from verl_ext.methods.logits import logits_torch
from verl_ext.methods.logits.logits_pass import OUT_OF_SET_FLOOR, TokenStatistics, token_statistics

EVERYTHING: dict[str, Any] = {"entropy": True, "sum_pi_squared": True}
#: |ours - float64| of results of order 1, from the same logits.
BOUND = 3e-6


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows, and of columns for vocabularies of more than 256."""
    monkeypatch.setattr(logits_torch, "BLOCK_ELEMENTS", 256 // torch.get_num_threads())


def defined(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float | torch.Tensor = 1.0, rho: float = 0.0
) -> TokenStatistics:
    """The definition, in float64 and with autograd, on whole tensors."""
    z = logits.double() / (temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature)
    inside = torch.ones_like(z, dtype=torch.bool)
    if rho > 0:
        inside = z.detach() >= z.detach().amax(-1, keepdim=True) + math.log(rho)
    pruned = z.masked_fill(~inside, -math.inf)
    normaliser = pruned.logsumexp(-1, keepdim=True)
    log_pi = pruned - normaliser
    pi = log_pi.exp()
    entropy = -(pi * log_pi.masked_fill(pi == 0, 0.0)).sum(-1)
    log_probs = (z - normaliser).gather(-1, labels[..., None])[..., 0]
    kept = (normaliser - z.logsumexp(-1, keepdim=True)).exp()[..., 0]
    in_set = inside.gather(-1, labels[..., None])[..., 0]
    return TokenStatistics(log_probs, entropy, pi.square().sum(-1), kept, inside.sum(-1), in_set)


def policy(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a rather confident policy and labels, of which about a third are the most likely token."""
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(*shape, generator=generator)).to(dtype)
    labels = torch.randint(0, shape[-1], shape[:-1], generator=generator)
    likely = torch.rand(shape[:-1], generator=generator) < 0.3
    return logits, torch.where(likely, logits.float().argmax(-1), labels)


def close(got: torch.Tensor | None, expected: torch.Tensor | None, atol: float = BOUND, rtol: float = 1e-6) -> None:
    assert got is not None and expected is not None
    torch.testing.assert_close(got.detach().double(), expected.detach().double(), atol=atol, rtol=rtol)


def gradients(
    logits: torch.Tensor, labels: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of weighted log-probabilities and entropies: ours and of the definition."""
    rho = options.get("rho", 0.0)
    ours = logits.detach().requires_grad_()
    found = token_statistics(ours, labels, entropy=True, **options)
    assert found.entropy is not None
    (found.log_probs * weights[0] + found.entropy * weights[1]).sum().backward()
    exact = logits.detach().double().requires_grad_()
    truth = defined(exact, labels, options.get("temperature", 1.0), rho)
    assert truth.entropy is not None and truth.in_set is not None
    (torch.where(truth.in_set, truth.log_probs * weights[0], 0.0) + truth.entropy * weights[1]).sum().backward()
    assert ours.grad is not None and exact.grad is not None
    assert ours.grad.dtype == logits.dtype and ours.grad.shape == logits.shape
    return ours.grad, exact.grad


DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
RHO, TEMPERATURE, SEED = st.just(0.0) | st.floats(1e-6, 1.0), st.just(1.0) | st.floats(0.5, 2.0), st.integers(0, 10**9)


@settings(max_examples=40)
@given(st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(1, 1000)), DTYPES, RHO, TEMPERATURE, SEED)
@example((3, 5, 1), torch.float64, 0.0, 1.0, 0)
@example((3, 5, 1000), torch.bfloat16, 0.2, 0.7, 0)
def test_against_the_definition_and_its_autograd(
    shape: tuple[int, ...], dtype: torch.dtype, rho: float, temperature: float, seed: int
) -> None:
    logits, labels = policy(*shape, dtype=dtype, seed=seed)
    before, edge = logits.clone(), logits.double().amax(-1, keepdim=True) + temperature * math.log(rho or 1e-99)
    assume(rho == 1.0 or not torch.isclose(logits.double(), edge, rtol=1e-6, atol=1e-5).any())  # decided by rounding
    found = token_statistics(logits, labels, temperature=temperature, rho=rho, **EVERYTHING)
    truth = defined(logits, labels, temperature, rho)
    bound = 1e-12 if dtype == torch.float64 else BOUND
    for got, expected in zip(found[:3], truth[:3], strict=True):
        close(got, expected, atol=bound)
        assert got is not None and got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert got.shape == labels.shape
    if rho:
        close(found.kept_mass, truth.kept_mass, atol=bound)
        assert found.set_size is not None and truth.set_size is not None and found.set_size.dtype == torch.int64
        assert torch.equal(found.set_size, truth.set_size)
        assert found.in_set is not None and truth.in_set is not None and found.in_set.dtype == torch.bool
        assert torch.equal(found.in_set, truth.in_set)
    else:
        assert found.kept_mass is found.set_size is found.in_set is None

    weights = torch.randn(2, *labels.shape, generator=torch.Generator().manual_seed(seed + 1)).unbind(0)
    ours, exact = gradients(logits, labels, weights, rho=rho, temperature=temperature)
    # rounding to the dtype of the logits, at the end alone
    rtol = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    close(ours, exact, atol=1e-12 if dtype == torch.float64 else 1e-6, rtol=1.01 * rtol)
    assert torch.equal(logits, before), "the logits were modified"


@pytest.mark.parametrize("rho", [0.0, 0.05])
@pytest.mark.parametrize("tensor", [False, True])
def test_gradcheck(rho: float, tensor: bool) -> None:
    logits, labels = policy(2, 3, 7, dtype=torch.float64)
    labels = logits.argmax(-1)  # inside the set, where the result is a smooth function
    temperature = torch.tensor([[0.5, 1.0, 1.5]]).double() if tensor else 0.8
    logits.requires_grad_()

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = token_statistics(x, labels, temperature=temperature, rho=rho, entropy=True)
        assert found.entropy is not None
        return found.log_probs, found.entropy

    assert torch.autograd.gradcheck(function, (logits,))
    # either gradient alone, too
    assert torch.autograd.gradcheck(lambda x: function(x)[0], (logits,))
    assert torch.autograd.gradcheck(lambda x: function(x)[1], (logits,))


def test_gradient_of_a_certain_label_keeps_its_digits() -> None:
    """1 - p of a label with p almost 1, also in bfloat16, where 1 - p is nothing after rounding p."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.tensor([[10.0, 0.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
        token_statistics(logits, torch.tensor([0])).log_probs.sum().backward()
        assert logits.grad is not None
        assert float(logits.grad[0, 0]) == pytest.approx(3 / (3 + math.exp(10)), rel=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rho", [0.0, 1e-2])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_shift_invariance(dtype: torch.dtype, rho: float, temperature: float) -> None:
    logits, labels = policy(4, 300, dtype=dtype)
    logits = (logits * 256).round() / 256  # so that adding 1e4 is exact
    weights = torch.randn(2, 4, generator=torch.Generator().manual_seed(2)).unbind(0)
    options: dict[str, Any] = {"rho": rho, "temperature": temperature}
    reference = token_statistics(logits, labels, **EVERYTHING, **options)
    gradient, _ = gradients(logits, labels, weights, **options)
    for shift in (1e4, -1e4):
        moved = token_statistics(logits + shift, labels, **EVERYTHING, **options)
        for got, expected in zip(moved[:4], reference[:4], strict=True):
            if expected is not None:
                close(got, expected, atol=2e-6)
        if rho:
            assert moved.set_size is not None and reference.set_size is not None
            assert torch.equal(moved.set_size, reference.set_size)
        close(gradients(logits + shift, labels, weights, **options)[0], gradient, atol=2e-6)


@settings(max_examples=12)
@given(st.floats(max_value=1e-40, allow_infinity=False), DTYPES, TEMPERATURE, SEED)
@example(-1.0, torch.float32, 1.0, 0)
@example(1e-40, torch.bfloat16, 0.7, 0)
@example(1e-300, torch.float32, 0.7, 0)
@example(1e-320, torch.float64, 0.7, 0)
def test_a_vanishing_rho_is_the_plain_policy_bit_for_bit(
    vanishing: float, dtype: torch.dtype, temperature: float, seed: int
) -> None:
    logits, labels = policy(6, 700, dtype=dtype, seed=seed)
    weights = torch.randn(2, 6, generator=torch.Generator().manual_seed(2)).unbind(0)
    results = []
    for rho in (0.0, vanishing):
        found = token_statistics(logits, labels, rho=rho, temperature=temperature, **EVERYTHING)
        gradient, _ = gradients(logits, labels, weights, rho=rho, temperature=temperature)
        results.append((*found[:3], gradient))
        if rho > 0:
            assert found.in_set is not None and bool(found.in_set.all())
            assert found.kept_mass is not None and bool((found.kept_mass == 1.0).all())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_ties_and_rho_one() -> None:
    logits = torch.tensor([[2.0, 2.0, 2.0, -1.0], [0.0, 5.0, 5.0 - 1e-6, 5.0], [1.0, 1.0, 1.0, 1.0]])
    labels = torch.tensor([2, 2, 3])
    found = token_statistics(logits, labels, rho=1.0, **EVERYTHING)
    assert found.set_size is not None and found.set_size.tolist() == [3, 2, 4]
    assert found.in_set is not None and found.in_set.tolist() == [True, False, True]
    close(found.entropy, torch.tensor([3.0, 2.0, 4.0]).log())
    close(found.sum_pi_squared, 1 / torch.tensor([3.0, 2.0, 4.0]))
    close(found.log_probs[[0, 2]], -torch.tensor([3.0, 4.0]).log())


def test_all_but_one_pruned() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    logits[:, 7] = 30.0
    labels = torch.tensor([7, 7, 8])
    logits.requires_grad_()
    found = token_statistics(logits, labels, rho=1e-4, **EVERYTHING)
    assert found.log_probs[:2].tolist() == [0.0, 0.0]
    assert found.entropy is not None and found.entropy.tolist() == [0.0] * 3
    assert found.sum_pi_squared is not None and found.sum_pi_squared.tolist() == [1.0] * 3
    assert found.set_size is not None and found.set_size.tolist() == [1] * 3
    (found.log_probs.sum() + found.entropy.sum()).backward()
    assert logits.grad is not None and not logits.grad.any()


def test_a_label_outside_the_set() -> None:
    """Finite and below ln rho; gradient exactly zero; the row's entropy is trained all the same."""
    rho = 1e-2
    logits, _ = policy(40, 300)
    labels = logits.argmin(-1)
    logits[0, labels[0]] = -3e4
    logits.requires_grad_()
    found = token_statistics(logits, labels, rho=rho, entropy=True)
    assert found.in_set is not None and found.entropy is not None and not found.in_set.any()
    exact = defined(logits, labels, 1.0, rho).log_probs
    close(found.log_probs[1:], exact[1:], rtol=1e-6)
    assert found.log_probs[0].item() == OUT_OF_SET_FLOOR and bool((found.log_probs < math.log(rho)).all())
    found.log_probs.sum().backward(retain_graph=True)
    assert logits.grad is not None and not logits.grad.any()
    found.entropy.sum().backward()
    assert bool(logits.grad.any(-1).all())


def test_logits_of_minus_infinity() -> None:
    """A masked, padded vocabulary: probability zero, and no NaN."""
    logits, labels = policy(8, 600)
    logits[3:, 500:] = -math.inf
    labels = labels.clamp(max=499)
    weights = torch.randn(2, 8, generator=torch.Generator().manual_seed(2)).unbind(0)
    for rho in (0.0, 1e-3):
        found = token_statistics(logits[3:], labels[3:], rho=rho, **EVERYTHING)
        short = token_statistics(logits[3:, :500], labels[3:], rho=rho, **EVERYTHING)
        for got, expected in zip(found[:3], short[:3], strict=True):
            close(got, expected)
        whole = token_statistics(logits, labels, rho=rho, **EVERYTHING)
        assert whole.entropy is not None and found.entropy is not None
        close(whole.entropy[3:], found.entropy)
        ours = logits.clone().requires_grad_()
        result = token_statistics(ours, labels, rho=rho, entropy=True)
        assert result.entropy is not None
        (result.log_probs * weights[0] + result.entropy * weights[1]).sum().backward()
        assert ours.grad is not None and not ours.grad[3:, 500:].any()
        cut = gradients(logits[3:, :500], labels[3:], (weights[0][3:], weights[1][3:]), rho=rho)
        close(ours.grad[3:, :500], cut[1])


def test_labels_at_masked_entries() -> None:
    logits = torch.tensor([[1.0, -math.inf, 0.5], [-math.inf, 2.0, -math.inf]], requires_grad=True)
    labels = torch.tensor([1, 0])
    plain = token_statistics(logits, labels, **EVERYTHING)
    assert plain.log_probs.tolist() == [-math.inf, -math.inf], "as torch.log_softmax"
    pruned = token_statistics(logits, labels, rho=1e-3, **EVERYTHING)
    assert pruned.log_probs.tolist() == [OUT_OF_SET_FLOOR] * 2
    assert pruned.in_set is not None and pruned.in_set.tolist() == [False, False]
    for part in (plain.entropy, pruned.entropy, plain.sum_pi_squared, pruned.sum_pi_squared):
        assert part is not None and bool(part.isfinite().all())
    assert pruned.entropy is not None
    (pruned.log_probs.sum() + pruned.entropy.sum()).backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all())


def test_nan_logits_are_not_hidden() -> None:
    logits = torch.tensor([[1.0, math.nan, 0.5], [0.0, 1.0, 2.0]])
    found = token_statistics(logits, torch.tensor([0, 0]), rho=1e-3, **EVERYTHING)
    assert found.in_set is not None and found.in_set.tolist() == [False, True]
    for part in found[:3]:
        assert part is not None and part.isnan().tolist() == [True, False]


@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7)])
def test_empty_input(shape: tuple[int, ...]) -> None:
    logits = torch.zeros(shape, requires_grad=True)
    found = token_statistics(logits, torch.zeros(shape[:-1], dtype=torch.int64), rho=0.1, **EVERYTHING)
    assert all(part is not None and part.shape == shape[:-1] for part in found)
    found.log_probs.sum().backward()
    assert logits.grad is not None and logits.grad.shape == shape


def test_one_position() -> None:
    logits = torch.tensor([0.5, 1.0, -2.0], requires_grad=True)
    found = token_statistics(logits, torch.tensor(1), rho=0.1, **EVERYTHING)
    close(found.log_probs, defined(logits, torch.tensor(1), 1.0, 0.1).log_probs)
    found.log_probs.backward()
    assert logits.grad is not None and logits.grad[2] == 0.0


STRIDES = {
    "every other row": lambda x: x[:, ::2],
    "without the last column": lambda x: x[:, :-1],
    "part of the vocabulary": lambda x: x[..., 3:-4],
    "transposed rows": lambda x: x.transpose(0, 1),
    "transposed vocabulary": lambda x: x.transpose(1, 2),
    "expanded": lambda x: x[:1].expand(3, *x.shape[1:]),
}


@pytest.mark.parametrize("view", STRIDES.values(), ids=STRIDES.keys())
def test_any_strides(view: Any) -> None:
    logits = view(policy(4, 9, 40)[0])
    labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=torch.Generator().manual_seed(3))
    select = torch.rand(labels.shape, generator=torch.Generator().manual_seed(4)) < 0.6
    weights = torch.randn(2, *labels.shape, generator=torch.Generator().manual_seed(2)).unbind(0)
    expected = token_statistics(logits.contiguous(), labels, rho=1e-2, **EVERYTHING)
    for got, whole in zip(token_statistics(logits, labels, rho=1e-2, **EVERYTHING), expected, strict=True):
        close(got, whole, atol=1e-6)
    close(*gradients(logits, labels, weights, rho=1e-2))
    picked = token_statistics(logits, labels, rho=1e-2, select=select, **EVERYTHING)
    for got, whole in zip(picked, expected, strict=True):
        assert got is not None and whole is not None
        torch.testing.assert_close(got, whole[select], atol=1e-6, rtol=1e-6)


@settings(max_examples=8)
@given(RHO, st.floats(0.0, 1.0), SEED)
@example(1e-2, 0.0, 0)
@example(1e-2, 1.0, 0)
def test_selection(rho: float, share: float, seed: int) -> None:
    """Only selected positions count: what stands at the others, label or logits, changes nothing."""
    logits, labels = policy(5, 11, 30, seed=seed)
    select = torch.rand(5, 11, generator=torch.Generator().manual_seed(seed)) < share
    weight = torch.randn(2, int(select.sum()), generator=torch.Generator().manual_seed(5))
    temperature = 0.5 + torch.rand(5, 1, generator=torch.Generator().manual_seed(6))
    rows = logits[select].requires_grad_()
    spread = temperature.expand(5, 11)[select]
    expected = token_statistics(rows, labels[select], rho=rho, temperature=spread, **EVERYTHING)
    assert expected.entropy is not None
    (expected.log_probs * weight[0] + expected.entropy * weight[1]).sum().backward()
    padded = torch.where(select[..., None], logits, math.nan).requires_grad_()
    found = token_statistics(
        padded, torch.where(select, labels, -100), rho=rho, temperature=temperature, select=select, **EVERYTHING
    )
    for got, other in zip(found, expected, strict=True):
        if other is not None:
            assert got is not None and got.shape == (int(select.sum()),)
            torch.testing.assert_close(got, other, atol=1e-6, rtol=1e-6)
    assert found.entropy is not None
    (found.log_probs * weight[0] + found.entropy * weight[1]).sum().backward()
    assert padded.grad is not None and rows.grad is not None
    close(padded.grad[select], rows.grad, atol=1e-6)
    assert not padded.grad[~select].any()


def test_rows_of_no_weight_are_zero_whatever_they_hold() -> None:
    logits, labels = policy(6, 30)
    logits[2] = math.nan
    logits.requires_grad_()
    weight = torch.tensor([1.0, 0.0, 0.0, 2.0, 0.0, -1.0])
    token_statistics(logits, labels).log_probs.backward(weight)
    assert logits.grad is not None and bool(logits.grad.isfinite().all())
    assert logits.grad.any(-1).tolist() == (weight != 0).tolist()


def test_temperatures_by_row() -> None:
    logits, labels = policy(4, 6, 300)
    temperature = 0.3 + torch.rand(4, 1, generator=torch.Generator().manual_seed(6))
    weights = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(2)).unbind(0)
    for rho in (0.0, 1e-2):
        found = token_statistics(logits, labels, temperature=temperature, rho=rho, **EVERYTHING)
        truth = defined(logits, labels, temperature.double().expand(4, 6), rho)
        for got, expected in zip(found[:3], truth[:3], strict=True):
            close(got, expected, atol=1e-5)
        ours = logits.clone().requires_grad_()
        result = token_statistics(ours, labels, temperature=temperature, rho=rho, entropy=True)
        assert result.entropy is not None
        (result.log_probs * weights[0] + result.entropy * weights[1]).sum().backward()
        _, exact = gradients(logits.double(), labels, weights, temperature=temperature.double().expand(4, 6), rho=rho)
        close(ours.grad, exact, atol=2e-5)
    same = token_statistics(logits, labels, temperature=torch.full((4, 6), 0.7), **EVERYTHING)
    number = token_statistics(logits, labels, temperature=0.7, **EVERYTHING)
    assert torch.equal(same.log_probs, number.log_probs)


@pytest.mark.seconds
@settings(max_examples=30)
@given(st.floats(1e-6, 1.0), TEMPERATURE, SEED)
@example(6.144e-6, 1.3, 7)
@example(1.0, 1.0, 7)
def test_the_set_is_the_embedded_samplers(rho: float, temperature: float, seed: int) -> None:
    """On equal logits, with many of them at the boundary or an ulp from it, both sides agree on every token."""
    count, vocabulary = 20, 64
    rows = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    edge = (rows.amax(-1) / temperature + math.log(rho)) * temperature
    for column in range(1, 16):
        step = torch.full_like(edge, math.inf if column % 2 else -math.inf)
        rows[:, column] = edge
        for _ in range(column // 2):
            rows[:, column] = torch.nextafter(rows[:, column], step)
    params = [sampling.SamplingParams(max_tokens=1, temperature=temperature, min_p=rho)] * count
    batch = sampling.BatchSampling(params, vocabulary, torch.device("cpu"))
    scaled = rows if batch.temperature is None else rows / batch.temperature
    theirs = sampling._truncate(scaled, batch) > -math.inf
    every = torch.arange(vocabulary).expand(count, vocabulary)
    repeated = rows[:, None].expand(count, vocabulary, vocabulary)
    ours = token_statistics(repeated, every, temperature=temperature, rho=rho).in_set
    assert ours is not None and torch.equal(ours, theirs)
    size = token_statistics(rows, every[:, 0], temperature=temperature, rho=rho).set_size
    assert size is not None and torch.equal(size, theirs.sum(-1))
    assert 0 < float(theirs[:, 1:16].float().mean()) < 1


@pytest.mark.seconds
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_properties(data: st.DataObject) -> None:
    rows, vocabulary = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 40))
    number = st.floats(-30, 30, width=32) | st.sampled_from([0.0, 1.0, -math.inf])
    values = data.draw(st.lists(number, min_size=rows * vocabulary, max_size=rows * vocabulary))
    logits = torch.tensor(values).view(rows, vocabulary)
    logits[:, 0] = logits[:, 0].clamp(min=-30.0)  # one finite logit a row
    labels = torch.tensor(data.draw(st.lists(st.integers(0, vocabulary - 1), min_size=rows, max_size=rows)))
    temperature = data.draw(st.sampled_from([1.0, 0.5, 0.6, 2.0]))
    rho = data.draw(st.sampled_from([1.0, 0.5, 0.01, 1e-6]))
    found = token_statistics(logits, labels, temperature=temperature, rho=rho, **EVERYTHING)
    assert found.entropy is not None and found.sum_pi_squared is not None and found.kept_mass is not None
    assert found.set_size is not None and found.in_set is not None
    assert all(bool(part.isfinite().all()) for part in found if part is not None)
    size = found.set_size.double()
    assert bool(((size >= 1) & (size <= vocabulary)).all())
    assert bool(((found.kept_mass > 0) & (found.kept_mass <= 1)).all())
    assert bool((found.entropy.double() <= size.log() + 1e-5).all() and (found.entropy > -1e-5).all())
    assert bool((found.sum_pi_squared.double() >= 1 / size - 1e-5).all() and (found.sum_pi_squared <= 1 + 1e-5).all())
    # inside, at least rho of the largest, which is at most 1 and at least 1 / size; outside, less than rho
    low = math.log(rho) - size.log() - 1e-4
    assert bool(
        torch.where(found.in_set, found.log_probs.double() >= low, found.log_probs < math.log(rho) + 1e-4).all()
    )
    smaller = token_statistics(logits, labels, temperature=temperature, rho=rho / 2, **EVERYTHING)
    assert smaller.set_size is not None and smaller.kept_mass is not None
    assert bool((smaller.set_size >= found.set_size).all()) and bool((smaller.kept_mass >= found.kept_mass).all())
    # the log-probabilities of the whole set sum to one
    everywhere = token_statistics(
        logits[:, None].expand(rows, vocabulary, vocabulary),
        torch.arange(vocabulary).expand(rows, vocabulary),
        temperature=temperature,
        rho=rho,
    )
    assert everywhere.in_set is not None
    mass = torch.where(everywhere.in_set, everywhere.log_probs.double().exp(), 0.0).sum(-1)
    close(mass, torch.ones(rows), atol=1e-5)
    weights = torch.randn(2, rows, generator=torch.Generator().manual_seed(0)).unbind(0)
    finite = logits.clamp(min=-100.0)
    ours, exact = gradients(finite, labels, weights, temperature=temperature, rho=rho)
    same = defined(finite, labels, temperature, rho).set_size
    ulp_free = same == token_statistics(finite, labels, temperature=temperature, rho=rho).set_size
    close(ours[ulp_free], exact[ulp_free], atol=1e-4)


def test_it_works_under_autocast_and_on_two_threads() -> None:
    logits, labels = policy(50, 400)
    expected = token_statistics(logits, labels, rho=1e-3, **EVERYTHING)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = token_statistics(logits, labels, rho=1e-3, **EVERYTHING)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = token_statistics(logits, labels, rho=1e-3, **EVERYTHING)
    finally:
        torch.set_num_threads(threads)
    for got, other in zip(found, expected, strict=True):
        close(got, other, atol=1e-6)


def test_the_gradient_is_the_only_tensor_of_the_size_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that forward and backward make, seen at the dispatcher, is small but one."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(logits_torch, "BLOCK_ELEMENTS", 1024)
    logits, labels = policy(200, 500)
    logits.requires_grad_()
    large: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() > logits.nbytes // 10:
                    pointer = tensor.untyped_storage().data_ptr()
                    if pointer != logits.untyped_storage().data_ptr():
                        large.append(pointer)
            return result

    with Watch():
        found = token_statistics(logits, labels, rho=1e-3, **EVERYTHING)
        assert not large
        assert found.entropy is not None
        (found.log_probs.sum() + found.entropy.sum()).backward()
    assert logits.grad is not None and set(large) == {logits.grad.untyped_storage().data_ptr()}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "rho above one": ({"rho": 1.5}, "rho=1.5"),
    "rho nan": ({"rho": math.nan}, "rho=nan"),
    "temperature zero": ({"temperature": 0.0}, "temperature=0.0"),
    "temperature nan": ({"temperature": math.nan}, "temperature=nan"),
    "temperature infinite": ({"temperature": math.inf}, "temperature=inf"),
    "a temperature below zero": ({"temperature": torch.tensor([1.0, -2.0])}, "temperature=-2.0"),
    "temperatures of another shape": ({"temperature": torch.ones(3)}, "does not broadcast"),
    "a large label": ({"labels": torch.tensor([0, 5])}, "label 5 .* vocabulary of 5"),
    "a negative label": ({"labels": torch.tensor([-1, 0])}, "label -1 is out of range"),
    "labels of another shape": ({"labels": torch.tensor([0])}, r"shape \[1\]"),
    "no vocabulary": ({"logits": torch.zeros(2, 0)}, "V > 0"),
    "a selection of another shape": ({"select": torch.ones(3, dtype=torch.bool)}, r"shape \[3\]"),
    "an unknown backend": ({"backend": "cuda"}, "backend='cuda'"),
    "no GPU": ({"backend": "triton"}, "needs CUDA tensors|not installed"),
}


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_wrong_is_said(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"logits": torch.zeros(2, 5), "labels": torch.tensor([0, 1]), **changed}
    with pytest.raises(ValueError, match=message):
        token_statistics(arguments.pop("logits"), arguments.pop("labels"), **arguments)


@pytest.mark.parametrize(
    "changed",
    [
        {"logits": torch.zeros(2, 5, dtype=torch.int64)},
        {"labels": torch.tensor([0, 1], dtype=torch.int32)},
        {"select": torch.tensor([0, 1])},
    ],
)
def test_wrong_types_are_said(changed: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"logits": torch.zeros(2, 5), "labels": torch.tensor([0, 1]), **changed}
    with pytest.raises(TypeError):
        token_statistics(arguments.pop("logits"), arguments.pop("labels"), **arguments)


@pytest.mark.slow
def test_triton_kernels_give_the_same_results() -> None:
    """In Triton's interpreter, which is chosen when a process first imports the kernels; and compiled for a GPU."""
    script = Path(__file__).with_name("triton_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 30  # cases


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_triton_kernels_compile_for_a_gpu(dtype: str, tmp_path: Path) -> None:
    """To machine code for one generation of GPU: no spilled registers, 16 bytes a load, no second reading unpruned."""
    script = Path(__file__).with_name("triton_compile.py")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = copies.python(script, dtype, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["3", "kernels"]


@pytest.mark.seconds
def test_it_works_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from verl_ext.methods.logits.logits_pass import token_statistics\n"
        "logits, labels = torch.zeros(2, 4, requires_grad=True), torch.tensor([0, 1])\n"
        "token_statistics(logits, labels, rho=0.5).log_probs.sum().backward()\n"
        "assert float(logits.grad[0, 0]) == 0.75\n"
        "try: token_statistics(logits, labels, backend='triton')\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "which is not installed" in done.stdout
