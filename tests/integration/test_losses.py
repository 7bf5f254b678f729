# SPDX-License-Identifier: Apache-2.0
"""The loss `kpo` under verl's arguments: configuration, aggregation, metrics, warning."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import verl.trainer.ppo.core_algos as core_algos
import verl.workers.utils.losses as verl_losses
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import FSDPActorConfig

from verl_ext.integration import losses
from verl_ext.integration.config import DivergenceAugmentedPolicyLossConfig, KPOPolicyLossConfig
from verl_ext.methods.divergence_augmented import divergence_augmented_terms
from verl_ext.methods.kpo import kpo_loss_terms

LARGEST = ("actor/kpo/log_ratio_abs_max", "actor/kpo/filtered_log_ratio_abs_max")
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def actor(**options: Any) -> FSDPActorConfig:
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
        policy_loss=KPOPolicyLossConfig(loss_mode="kpo", **options),
    )
    config.global_batch_info.update(dp_size=1, batch_num_tokens=20, global_batch_size=6, loss_scale_factor=None)
    return config


def tensors(rows: int = 4, length: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(length) < torch.tensor([12, 7, 0, 3])[:, None]
    return {
        "old_log_prob": -torch.rand(rows, length, generator=generator),
        "log_prob": -torch.rand(rows, length, generator=generator),
        "advantages": torch.randn(rows, length, generator=generator),
        "response_mask": mask,
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_is_the_terms_under_verls_aggregation(mode: str, weighted: bool) -> None:
    data = tensors()
    weights = torch.rand(4, 12) if weighted else None
    data["log_prob"].requires_grad_()
    config = actor(kalman_q=1e-2)
    loss, metrics = core_algos.get_policy_loss_fn("kpo")(
        **data, loss_agg_mode=mode, config=config, rollout_is_weights=weights
    )
    terms, _ = kpo_loss_terms(**data, q=1e-2, rollout_is_weights=weights)
    expected = core_algos.agg_loss(terms, data["response_mask"], mode, **config.global_batch_info)
    assert torch.equal(loss, expected)
    loss.backward()
    assert torch.isfinite(data["log_prob"].grad).all() and data["log_prob"].grad[2].abs().sum() == 0
    assert metrics["actor/kpo/response_length_mean"] == pytest.approx(22 / 3)
    assert 0 <= metrics["actor/pg_clipfrac"] <= 1
    assert metrics["actor/kpo/filtered_log_ratio_std"] < metrics["actor/kpo/log_ratio_std"]
    assert {name for name, value in metrics.items() if not isinstance(value, float)} == set(LARGEST)
    assert all(metrics[name].aggregation is AggregationType.MAX for name in LARGEST)


def test_the_largest_log_ratio_is_a_maximum_over_micro_batches_and_ranks() -> None:
    """By the line of verl's `ppo_loss` that makes every metric of a loss a mean, and verl's aggregation over ranks."""
    data = tensors()
    data["log_prob"] = data["old_log_prob"] + torch.tensor([0.1, 0.2, 0.0, 3.0])[:, None]
    found = []
    for row in (0, 1, 3):
        _, metrics = losses.kpo(**{name: field[row : row + 1] for name, field in data.items()}, config=actor())
        found.append(verl_losses.Metric.from_dict(metrics, aggregation=AggregationType.MEAN))
    for name in LARGEST:
        values = [metrics[name] for metrics in found]
        assert all(isinstance(value, Metric) for value in values)
        assert Metric.aggregate_dp(values) == max(value.aggregate() for value in values)
    assert Metric.aggregate_dp([metrics[LARGEST[0]] for metrics in found]) == pytest.approx(3.0)
    clipped = [metrics["actor/pg_clipfrac"] for metrics in found]
    assert Metric.aggregate_dp(clipped) == pytest.approx(sum(value.aggregate() for value in clipped) / 3)


def test_first_update_of_a_batch_is_the_policy_gradient() -> None:
    """Before any update the ratio is 1 everywhere: the loss is -A and nothing is clipped."""
    data = tensors()
    data["log_prob"] = data["old_log_prob"].clone().requires_grad_()
    loss, metrics = losses.kpo(**data, loss_agg_mode="token-sum", config=actor())
    assert loss.item() == pytest.approx(-data["advantages"][data["response_mask"]].sum().item(), rel=1e-5)
    loss.backward()
    assert torch.allclose(data["log_prob"].grad, -data["advantages"] * data["response_mask"], atol=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0


@pytest.mark.parametrize("weighted", [False, True])
def test_divergence_augmented_is_its_terms_under_verls_aggregation(weighted: bool) -> None:
    data = tensors()
    weights = torch.rand(4, 12) if weighted else None
    options = DivergenceAugmentedPolicyLossConfig(loss_mode="divergence_augmented", dapo_beta=0.7, dapo_c=0.5)
    config = actor()
    object.__setattr__(config, "policy_loss", options)
    loss_fn = core_algos.get_policy_loss_fn("divergence_augmented")
    loss, metrics = loss_fn(**data, loss_agg_mode="token-mean", config=config, rollout_is_weights=weights)
    terms, divergence = divergence_augmented_terms(**data, beta=0.7, c=0.5)
    terms = terms if weights is None else terms * weights
    torch.testing.assert_close(loss, terms.sum() / 20)
    if weights is not None:  # where no model token is, anything may stand in the weights
        weights[~data["response_mask"]] = torch.nan
        mode = "seq-mean-token-sum"
        again, _ = loss_fn(**data, loss_agg_mode=mode, config=config, rollout_is_weights=weights)
        torch.testing.assert_close(again, terms.sum() / 6)
    charged = divergence[data["response_mask"]]
    assert metrics["actor/divergence/mean"] == pytest.approx(float(charged.mean()))
    assert metrics["actor/divergence/abs_mean"] == pytest.approx(float(charged.abs().mean()))
    nothing = {**data, "response_mask": torch.zeros(4, 12, dtype=torch.bool)}
    loss, metrics = loss_fn(**nothing, loss_agg_mode="token-mean", config=config)
    assert loss == 0 and all(value == 0 for value in metrics.values())


def test_options_come_through_verls_own_config_machinery() -> None:
    node = OmegaConf.create({"_target_": "verl_ext.integration.config.KPOPolicyLossConfig", "loss_mode": "kpo"})
    options = omega_conf_to_dataclass(node)
    assert options.kalman_q == 1e-6 and options.rollout_correction is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kalman_q": 0.0}, r"policy_loss\.kalman_q is 0\.0; it must be greater than 0"),
        ({"kalman_q": 1e-9}, r"kalman_q/kalman_r is 1e-09; the filter is defined for ratios from 1e-8 to 1"),
        ({"kalman_r": float("nan")}, r"kalman_r is nan"),
        ({"is_clip": 1}, r"is_clip is 1; give true or false"),
        ({"mask_mode": "jump"}, r"mask_mode is 'jump'; choose one of 'zero_observation', 'skip'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KPOPolicyLossConfig(loss_mode="kpo", **options)


@pytest.mark.parametrize("value", [-0.1, float("nan"), True, "1"])
def test_bad_options_of_divergence_augmented_are_named(value: Any) -> None:
    message = r"policy_loss\.dapo_c is .*; (it must be at least 0|give a number|give a finite number)\.$"
    with pytest.raises(ValueError, match=message):
        DivergenceAugmentedPolicyLossConfig(loss_mode="divergence_augmented", dapo_c=value)


def test_loss_without_its_options_says_what_to_do() -> None:
    from verl.workers.config import PolicyLossConfig

    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=2, ppo_micro_batch_size_per_gpu=1, policy_loss=PolicyLossConfig()
    )
    with pytest.raises(ValueError, match=r"Use \+recipe=kpo"):
        losses.kpo(**tensors(), config=config)


def test_short_responses_are_warned_about_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_warned", False)
    with caplog.at_level(logging.WARNING, logger=losses.__name__):
        for _ in range(2):
            losses.kpo(**tensors(), config=actor(kalman_q=1e-6))
    (record,) = caplog.records
    assert "7 tokens on average" in record.getMessage() and "time constant is 1000" in record.getMessage()
