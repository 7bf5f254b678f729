# SPDX-License-Identifier: Apache-2.0
"""What needs a GPU with CUDA. `make test-gpu` names this file; nothing else collects it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from triton_programs import TASK, TRITON, forward

from verl_ext.lab.kernels.hacks import HACKS, HONEST, Hack
from verl_ext.methods.logits.logits_pass import token_statistics
from verl_ext.rollout.kernels.judge import Judge
from verl_ext.rollout.kernels.options import JudgeOptions
from verl_ext.rollout.kernels.players.cuda import Cuda
from verl_ext.rollout.kernels.tasks import Task

RIGHT = "return launch(x, a, b)"
HOG = (
    "y = launch(x, a, b)",
    "self.stream = getattr(self, 'stream', None) or torch.cuda.Stream()",
    "with torch.cuda.stream(self.stream):",
    "    m = torch.ones(2048, 2048, device='cuda')",
    "    for _ in range(3): m = m @ m",
    "return y",
)
ENDLESS = """@triton.jit
def endless(y):
    i = 0
    while tl.load(y) > -1e30:
        i += 1
        tl.store(y, i * 0.0)
"""
FAR = """@triton.jit
def far(y):
    tl.store(y + 100000000000 + tl.arange(0, 128), 1.0)
"""


def launching(kernel: str, name: str) -> str:
    """A right program that launches one more kernel first."""
    return forward(f"{name}[(1,)](x)", RIGHT).replace("class ModelNew", kernel + "class ModelNew")


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    assert not Cuda().lacks(), Cuda().lacks()
    with Judge(JudgeOptions("triton", "triton", run_s=3.0)) as made:  # in the whole cage
        yield made


def test_a_right_kernel_is_paid_with_its_speed(judge: Judge) -> None:
    verdict = judge.evaluate(TASK, TRITON)
    assert verdict.correct and not verdict.decoy, verdict
    assert 0.3 < verdict.low <= verdict.speedup <= verdict.high < 3 and 0 < verdict.coverage <= 1


@pytest.mark.parametrize("hack", [hack for hack in HACKS if hack.language == "triton"], ids=lambda hack: hack.name)
def test_a_trick_is_not_paid(judge: Judge, hack: Hack) -> None:
    verdict = judge.evaluate(Task.of(hack.task), hack.text)
    assert verdict.correct and verdict.decoy and verdict.reward() == 0.0, verdict


@pytest.mark.parametrize("honest", [hack for hack in HONEST if hack.language == "triton"], ids=lambda hack: hack.name)
def test_an_honest_kernel_is_paid(judge: Judge, honest: Hack) -> None:
    verdict = judge.evaluate(Task.of(honest.task), honest.text)
    assert honest.paid(verdict), verdict


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (forward("return launch(x, a, a)"), "wrong"),
        (launching(FAR, "far"), "error"),
        (forward("torch.empty(1 << 36, device='cuda')", RIGHT), "memory"),
        (TRITON.replace("tl.maximum", "tl.no_such_thing"), "error"),
        (forward("import os", "os._exit(0)"), "crashed"),
        (forward("import socket", "socket.socket()", RIGHT), "error"),
        (launching(ENDLESS, "endless"), "timeout"),
    ],
    ids=["wrong", "out_of_bounds", "memory", "does_not_compile", "ends_itself", "network", "endless"],
)
def test_what_fails_is_named_and_the_next_verdict_is_right(judge: Judge, code: str, status: str) -> None:
    verdict = judge.evaluate(TASK, code)
    assert verdict.status == status and verdict.error and verdict.reward() == 0.0, verdict
    quick = dataclasses.replace(judge.options, pairs=3, max_pairs=3)
    judge.options, usual = quick, judge.options
    assert judge.evaluate(TASK, TRITON).correct
    judge.options = usual


def test_work_on_another_stream_slows_the_candidate_and_not_the_reference(judge: Judge) -> None:
    verdict = judge.evaluate(TASK, forward(*HOG))
    assert verdict.correct and verdict.speedup < 0.5, verdict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [50_257, 152_064])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rho", [0.0, 6.144e-6])
def test_the_pass_is_float64s(dtype: torch.dtype, vocabulary: int, temperature: float, rho: float) -> None:
    generator = torch.Generator("cuda").manual_seed(vocabulary)
    logits = (torch.randn(64, vocabulary, generator=generator, device="cuda") * 3).to(dtype)
    labels = logits.argmax(-1)
    labels[::2] = torch.randint(vocabulary, (32,), generator=generator, device="cuda")

    def statistics(given: torch.Tensor, backend: str):  # type: ignore[no-untyped-def]
        given = given.requires_grad_()
        found = token_statistics(
            given, labels, temperature=temperature, rho=rho, entropy=True, sum_pi_squared=True, backend=backend
        )
        (0.7 * found.log_probs.sum() + 0.01 * found.entropy.sum()).backward()
        return found, given.grad

    ours, gradient = statistics(logits.clone(), "triton")
    exact, truth = statistics(logits.double(), "torch")
    inside = exact.in_set if rho else torch.ones_like(labels, dtype=torch.bool)
    torch.testing.assert_close(ours.log_probs[inside].double(), exact.log_probs[inside], atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(ours.entropy.double(), exact.entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.sum_pi_squared.double(), exact.sum_pi_squared, atol=1e-6, rtol=1e-5)
    assert (gradient.double() - truth).norm() < (1e-6 if dtype == torch.float32 else 3e-3) * truth.norm()
    if rho:  # a token at the set's edge may be in one and not in the other
        assert (ours.set_size - exact.set_size).abs().max() <= 2 and (ours.in_set != exact.in_set).sum() <= 1
