# SPDX-License-Identifier: Apache-2.0
"""Run by test_logits_pass.py in a process of its own, with Triton's interpreter: both backends on the same tensors."""

from __future__ import annotations

import itertools
import math

import torch

from verl_ext.methods.logits import logits_triton
from verl_ext.methods.logits.logits_pass import token_statistics


def compare(logits: torch.Tensor, rho: float, kind: str, entropy: bool, squares: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=generator)
    labels[0] = logits[0].float().argmax(-1)
    labels[1] = logits[1].float().argmin(-1)
    select = torch.rand(labels.shape, generator=generator) > 0.3 if kind == "selection" else None
    temperature = {"plain": 1.0, "scaled": 0.7}.get(kind, 0.5 + torch.rand(labels.shape[0], 1, generator=generator))
    count = labels.numel() if select is None else int(select.sum())
    weights = torch.randn(2, count, generator=generator)
    results = []
    for backend in ("torch", "triton"):
        variable = logits.detach().requires_grad_()
        found = token_statistics(
            variable, labels, temperature=temperature, rho=rho, entropy=entropy, sum_pi_squared=squares,
            select=select, backend=backend,
        )  # fmt: skip
        loss = (found.log_probs.reshape(-1) * weights[0]).sum()
        if found.entropy is not None:
            loss = loss + (found.entropy.reshape(-1) * weights[1]).sum()
        loss.backward()
        results.append((*found, variable.grad))
    *plain, gradient = results[0]
    *ours, ours_gradient = results[1]
    for name, a, b in zip(found._fields, ours, plain, strict=True):
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, atol=3e-6, rtol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert gradient is not None and ours_gradient is not None and ours_gradient.dtype == logits.dtype
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[logits.dtype]
    torch.testing.assert_close(ours_gradient, gradient, atol=2e-6, rtol=rtol)


def main() -> None:
    assert logits_triton.INTERPRETED
    logits_triton.BLOCK = 64
    generator = torch.Generator().manual_seed(0)
    cases = 0
    for kind, rho, vocabulary in itertools.product(("plain", "scaled", "selection"), (0.0, 1e-3, 0.3, 1.0), (5, 200)):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[cases % 3]
        logits = (4 * torch.randn(3, 4, vocabulary, generator=generator)).to(dtype)
        compare(logits, rho, kind, entropy=True, squares=cases % 2 == 0)
        cases += 1
    # The largest logit at the end: the set shrinks while the row is read, and is read again.
    logits = torch.randn(3, 3, 300, generator=generator)
    logits[..., -1] = 9.0
    # A masked vocabulary, a first tile without any probability, and rows whose strides are not those of a block.
    masked = torch.randn(3, 3, 300, generator=generator)
    masked[..., :70] = -math.inf
    masked[1, 1, 200:] = -math.inf
    strided = torch.randn(3, 8, 64, generator=generator)[:, ::2, 3:]
    for case, rho in itertools.product((logits, masked, strided, strided.transpose(1, 2)), (0.0, 1e-2)):
        compare(case, rho, "plain", entropy=True, squares=True)
        cases += 1
    compare(logits, 0.0, "plain", entropy=False, squares=False)
    empty = torch.zeros(0, 4, requires_grad=True)
    found = token_statistics(empty, torch.zeros(0, dtype=torch.int64), rho=0.1, backend="triton")
    found.log_probs.sum().backward()
    assert found.log_probs.shape == (0,) and empty.grad is not None
    print(cases, "cases")


if __name__ == "__main__":
    main()
