# SPDX-License-Identifier: Apache-2.0
"""The makers of `examples/aliased_rooms` and `examples/otb_variance` measure what they say, at a tiny size."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def module(folder: str, name: str) -> ModuleType:
    """A module of an example, under a name of its own: two examples have a `make`."""
    known = f"{folder}_{name}"
    if known not in sys.modules:
        sys.path.insert(0, str(EXAMPLES / folder))
        try:
            spec = importlib.util.spec_from_file_location(known, EXAMPLES / folder / f"{name}.py")
            assert spec is not None and spec.loader is not None
            sys.modules[known] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[known])
        finally:
            sys.path.remove(str(EXAMPLES / folder))
    return sys.modules[known]


# Aliased rooms -------------------------------------------------------------------------------------------------------


@pytest.mark.seconds
@pytest.mark.parametrize("pay", ["equal", "unequal"])
def test_the_enumerated_gradient_is_the_mean_of_leave_one_out_estimates(pay: str) -> None:
    make, rooms = module("aliased_rooms", "make"), module("aliased_rooms", "rooms")
    problem = rooms.episodes(pay, "half-trained")
    assert problem.probability.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(np.einsum("e,esp->p", problem.probability, problem.score), 0.0, atol=1e-12)
    found = make.estimates(make.METHODS["rloo"], problem, make.drawn(problem, 4000, 4, [1]))
    error, moves = found.std(0) / len(found) ** 0.5, found.std(0) > 1e-12
    assert moves.all()
    # 32 logits in 16 opposite pairs: the largest of 16 deviations is above 3.5 standard errors once in 130 seeds.
    assert np.abs((found.mean(0) - problem.gradient()) / error).max() < 3.5


def test_the_right_action_of_a_room_depends_on_its_sign_alone() -> None:
    rooms = module("aliased_rooms", "rooms")
    problem = rooms.episodes("unequal", "untrained")
    assert problem.reward.max() == 4.0
    # An untrained agent finds a quarter of the pay; a half-trained one the square of the logistic of 1.
    for policy, share in (("untrained", 0.25), ("half-trained", (1 / (1 + np.exp(-1.0))) ** 2)):
        problem = rooms.episodes("unequal", policy)
        assert problem.probability @ problem.reward.sum(1) == pytest.approx(2 * 2.5 * share)


@pytest.mark.seconds
def test_the_maker_of_aliased_rooms_tells_all_methods_apart(tmp_path: Path) -> None:
    make = module("aliased_rooms", "make")
    found = make.condition("unequal", "half-trained", 4, 1000)
    low, high = found["rloo"]["along"][1:]
    assert low < 1.0 < high
    # GRPO's own part in its mean is a factor and nothing else.
    low, high = found["grpo"]["along"][1:]
    assert low < 0.75 < high
    assert found["grpo"]["cosine"][0] == pytest.approx(found["rloo"]["cosine"][0], abs=1e-5)
    for figures in found.values():
        assert all(low <= value <= high for value, low, high in figures.values())


# The optimal token baseline ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 23, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False, initializer_range=0.3)).eval()
    for one in model.parameters():
        if one.ndim == 1:
            one.data.uniform_(0.5, 1.5)
    return model


@pytest.mark.seconds
def test_inner_products_of_tokens_are_those_of_autograd(llama: Any) -> None:
    gradients = module("otb_variance", "token_gradients")
    prompt = torch.tensor([1, 5, 7, 2, 9])
    answers = gradients.sample(llama, prompt, 8, 6, 3, torch.Generator().manual_seed(1))
    lengths = answers.mask.sum(1)
    assert len(set(lengths.tolist())) > 1
    found = gradients.products(llama, answers)
    advantages = torch.randn(answers.ids.shape, generator=torch.Generator().manual_seed(2))
    weights = torch.zeros(len(lengths), int(lengths.sum()))
    weights[answers.mask.nonzero()[:, 0], torch.arange(int(lengths.sum()))] = advantages[answers.mask]

    block = [*llama.model.layers[-1].parameters(), llama.model.norm.weight]
    rows, squares = [], []
    for ids, length, a in zip(answers.ids, lengths.tolist(), advantages, strict=True):
        logits = llama(torch.cat([prompt, ids[:length]])[None]).logits[0, len(prompt) - 1 : -1]
        log_pi = logits.log_softmax(-1)
        squares.append(log_pi.exp().pow(2).sum(-1))
        own = (log_pi.gather(-1, ids[:length, None])[:, 0] * a[:length]).sum()
        rows.append([one.flatten() for one in torch.autograd.grad(own, [*block, llama.lm_head.weight])])
    for matrix, of in ((found.block, slice(0, -1)), (found.head, slice(-1, None))):
        whole = torch.stack([torch.cat(row[of]) for row in rows])
        torch.testing.assert_close(weights @ matrix @ weights.T, whole @ whole.T, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(found.sum_pi_squared, torch.cat(squares), rtol=1e-4, atol=1e-6)


@pytest.mark.seconds
def test_the_maker_of_otb_variance_reads_what_it_recorded(llama: Any, tmp_path: Path) -> None:
    """From files that are there, as a run that resumes finds them.

    The group mean is RLOO's gradient, shortened; without a baseline the variance is that of one sample, over N.
    """
    gradients = module("otb_variance", "token_gradients")
    folder = tmp_path / "answers-8"
    folder.mkdir()
    alone = {"block": 0.0, "head": 0.0}
    for prompt in range(3):
        generator = torch.Generator().manual_seed(prompt)
        answers = gradients.sample(llama, torch.tensor([1, prompt + 4]), 8, 5, 3, generator)
        scores = (answers.ids[:, 0] % 2).double().numpy()
        of_tokens = {name: one.numpy() for name, one in gradients.products(llama, answers)._asdict().items()}
        of_samples = answers.mask.nonzero()[:, 0] == torch.arange(8)[:, None]
        rewarded = of_samples.double().numpy() * scores[:, None]
        for part in alone:
            inner = rewarded @ of_tokens[part].astype(np.float64) @ rewarded.T
            alone[part] += (inner.trace() - (inner.sum() - inner.trace()) / 7) / 8
        np.savez(folder / f"{prompt:03d}.npz", mask=answers.mask.numpy(), scores=scores, **of_tokens)
    make = module("otb_variance", "make")
    found = make.numbers(make.record(tmp_path, 3, 8), 8)
    assert found["prompts"] == 3 and found["tokens"] > 24
    assert not (tmp_path / "smollm2").exists()
    for part in ("block", "head"):
        mean = found[f"{part} apart 4 mean"]
        np.testing.assert_allclose(mean["ratio"], 0.75**2, rtol=1e-4)
        np.testing.assert_allclose(mean["length"], 0.75, rtol=1e-4)
        np.testing.assert_allclose(mean["ratio at equal length"], 1.0, rtol=1e-4)
        assert found[f"{part} apart 4 none"]["variance"] == pytest.approx(alone[part] / 4, rel=0.05)
        assert f"{part} replaced 8 otb_loo" in found and f"{part} apart 8 otb" not in found
