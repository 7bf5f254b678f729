# SPDX-License-Identifier: Apache-2.0
"""`verl_ext.methods.hybrid_imitation` against a tree whose paths are all enumerated, in float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from verl_ext.methods import hybrid_imitation
from verl_ext.methods.hybrid_imitation import hybrid_imitation_terms, teacher_kl

V, DEPTH = 3, 3
PREFIXES = [p for n in range(DEPTH) for p in itertools.product(range(V), repeat=n)]
PATHS = list(itertools.product(range(V), repeat=DEPTH))


def tree(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the policy and of the teacher at every prefix, and a reward for every path; a policy a prefix."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(PREFIXES), V)
    policy, teacher = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return policy.requires_grad_(), teacher, torch.randn(len(PATHS), generator=generator, dtype=torch.float64)


def objective(
    policy: torch.Tensor, teacher: torch.Tensor, reward: torch.Tensor, tokens: list[int], direction: str, weight: float
) -> torch.Tensor:
    """C, written out: sum over paths of p(path) (sum of the KLs at its prefixes - lambda r)."""
    log_pi = policy.log_softmax(-1)
    p, q = policy[:, tokens].log_softmax(-1), teacher[:, tokens].log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1) if direction == "reverse" else (q.exp() * (q - p)).sum(-1)
    total = policy.new_zeros(())
    for path, r in zip(PATHS, reward, strict=True):
        at = [PREFIXES.index(path[:t]) for t in range(DEPTH)]
        chance = sum(log_pi[place, path[t]] for t, place in enumerate(at)).exp()
        total = total + chance * (kl[at].sum() - weight * r)
    return total


def surrogate(
    policy: torch.Tensor,
    teacher: torch.Tensor,
    reward: torch.Tensor,
    tokens: list[int],
    direction: str,
    weight: float,
    future: bool = True,
    baseline: float = 0.0,
) -> torch.Tensor:
    """The loss of the method, with every path as a row that counts as often as it occurs."""
    at = torch.tensor([[PREFIXES.index(path[:t]) for t in range(DEPTH)] for path in PATHS])
    taken = torch.tensor(PATHS)
    log_prob = policy.log_softmax(-1)[at].gather(-1, taken[..., None]).squeeze(-1)
    kl = teacher_kl(policy[:, tokens][at.flatten()], teacher[:, tokens][at.flatten()], direction).view(at.shape)
    advantages = (reward - baseline)[:, None].expand(at.shape)
    mask = torch.ones_like(at)
    dense, sparse = hybrid_imitation_terms(
        kl, log_prob.detach(), log_prob, advantages, mask, imitation_lambda=weight, future_kl=future
    )
    return (log_prob.detach().sum(-1).exp()[:, None] * (dense + sparse)).sum()


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("tokens", [[0, 1, 2], [2, 0]])
def test_gradient_is_that_of_the_objective_by_enumeration(direction: str, tokens: list[int]) -> None:
    policy, teacher, reward = tree()
    (truth,) = torch.autograd.grad(objective(policy, teacher, reward, tokens, direction, 0.7), policy)
    for baseline in (0.0, 3.0):
        loss = surrogate(policy, teacher, reward, tokens, direction, 0.7, baseline=baseline)
        (found,) = torch.autograd.grad(loss, policy)
        torch.testing.assert_close(found, truth, atol=1e-12, rtol=0)
    (blind,) = torch.autograd.grad(surrogate(policy, teacher, reward, tokens, direction, 0.7, False), policy)
    assert (blind - truth).norm() > 0.05 * truth.norm()  # without the future a part of the gradient is missing
    last = [PREFIXES.index(prefix) for prefix in PREFIXES if len(prefix) == DEPTH - 1]
    torch.testing.assert_close(blind[last], truth[last], atol=1e-12, rtol=0)  # none of it at the last token


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_divergence_and_its_gradient_in_blocks(monkeypatch: pytest.MonkeyPatch, direction: str) -> None:
    monkeypatch.setattr(hybrid_imitation, "BLOCK_ELEMENTS", 11)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(7, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    p, q = x.log_softmax(-1), y.log_softmax(-1)
    plain = (p.exp() * (p - q)).sum(-1) if direction == "reverse" else (q.exp() * (q - p)).sum(-1)
    found = teacher_kl(x, y + 3.0, direction)  # a constant a row, as between logits and log-probabilities
    torch.testing.assert_close(found, plain)
    weight = torch.randn(7, generator=generator, dtype=torch.float64)
    for one, other in zip(torch.autograd.grad(found @ weight, x), torch.autograd.grad(plain @ weight, x), strict=True):
        torch.testing.assert_close(one, other)
    assert teacher_kl(x[:0], y[:0]).shape == (0,)
    assert teacher_kl(x.bfloat16(), y.bfloat16()).dtype == torch.float32


def test_tokens_that_are_not_the_models_have_no_part() -> None:
    nan = float("nan")
    mask = torch.tensor([[1, 0, 1, 0]])
    kl = torch.tensor([[0.5, nan, 0.25, 9.0]])
    log_prob = torch.tensor([[-1.0, nan, -2.0, nan]], requires_grad=True)
    advantages = torch.tensor([[1.0, nan, 2.0, nan]])
    dense, sparse = hybrid_imitation_terms(
        kl, log_prob.detach() - 0.1, log_prob, advantages, mask, imitation_lambda=2.0
    )
    ratio = torch.tensor(0.1).exp()
    torch.testing.assert_close(dense, torch.tensor([[0.5, 0.0, 0.25, 0.0]]))
    torch.testing.assert_close(sparse.detach(), torch.tensor([[0.25 - 2.0, 0.0, -4.0, 0.0]]) * ratio)
    (gradient,) = torch.autograd.grad(sparse.sum(), log_prob)
    torch.testing.assert_close(gradient, sparse.detach())
    with pytest.raises(ValueError, match="kl has shape"):
        hybrid_imitation_terms(kl[:, :2], log_prob, log_prob, advantages, mask)
    with pytest.raises(ValueError, match="direction is 'both'"):
        teacher_kl(torch.zeros(1, 2), torch.zeros(1, 2), "both")
    with pytest.raises(ValueError, match=r"must both be \[N, K\]"):
        teacher_kl(torch.zeros(1, 2), torch.zeros(1, 3))
