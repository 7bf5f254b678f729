# SPDX-License-Identifier: Apache-2.0
"""``actor/logit_update``: the length of the policy gradient in the logits, and who gets it."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from verl_ext.integration.metrics import logit_update
from verl_ext.integration.parts.advantage.columns import Columns
from verl_ext.integration.parts.advantage.variance_proxy import VarianceProxy
from verl_ext.integration.settings.options import OptionError


def test_is_the_norm_of_the_gradient_with_respect_to_the_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    taken = torch.randint(7, (2, 3), generator=generator)
    advantages = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    log_pi = logits.log_softmax(-1)
    log_probs = log_pi.gather(-1, taken[..., None]).squeeze(-1)
    (gradient,) = torch.autograd.grad((advantages * log_probs).sum(), logits)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    length = gradient.norm(dim=-1)[mask.bool()]
    found = logit_update(advantages, log_probs.detach(), log_pi.detach().exp().square().sum(-1), mask)
    assert found["actor/logit_update/mean"] == pytest.approx(float(length.mean()))
    assert found["actor/logit_update/max"] == pytest.approx(float(length.max()))
    assert logit_update(advantages, advantages, advantages, torch.zeros(2, 3)) == {}


def test_a_run_that_names_it_has_the_column_and_another_one_has_not() -> None:
    made = OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"bypass_mode": False}},
            "verl_ext": {"logit_update": False},
            "actor_rollout_ref": {"model": {"use_fused_kernels": False}, "actor": {"strategy": "fsdp2"}},
        }
    )
    assert not VarianceProxy.wanted(made) and Columns.check(made) == []
    made.verl_ext.logit_update = True
    assert VarianceProxy.wanted(made) and Columns(made).needs == {"sum_pi_squared"}
    made.algorithm.rollout_correction.bypass_mode = True
    with pytest.raises(OptionError, match=r"verl_ext\.logit_update needs sum_pi_squared.*bypass_mode=true"):
        Columns.check(made)
    made.verl_ext.logit_update = "yes"
    with pytest.raises(OptionError, match=r"verl_ext\.logit_update is 'yes'; give true or false"):
        VarianceProxy.wanted(made)
