# SPDX-License-Identifier: Apache-2.0
"""verl's own FSDP engine on the CPU, with the pass over the logits and without it: same numbers, same gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import copies
import engine_process as cases
import pytest
import torch
from omegaconf import OmegaConf
from ranks import run_ranks, starts_ranks
from tensordict import TensorDict

from verl_ext.integration.compat.wraps import STRICT
from verl_ext.integration.engines import engine
from verl_ext.integration.engines.agent_gradients import AgentGradientsMixin
from verl_ext.integration.engines.engine import IN_SET, KEPT_MASS, OUT_OF_SET_METRIC, SET_SIZE
from verl_ext.integration.engines.imitation import ImitationMixin
from verl_ext.integration.engines.loss_turns import LossTurnsMixin
from verl_ext.integration.engines.micro_batch import ONE_PASS
from verl_ext.integration.engines.token_kl import TokenKLMixin
from verl_ext.integration.engines.update_step import UpdateStepMixin
from verl_ext.integration.parts.update.pruning import Pruning

HERE = Path(__file__).parent
LAYOUTS = ("padded", "packed")


def engine_ranks(model: Path, world: int) -> list[dict[str, Any]]:
    """Run `engine_process.py` as `world` processes and load what each left."""
    out = model.parent / f"out{world}"
    run_ranks(HERE / "engine_process.py", model, out, world=world)
    return [torch.load(f"{out}.{rank}", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="session")
def alone(model: Path) -> dict[str, Any]:
    return engine_ranks(model, 1)[0]


def responses(found: dict[str, Any], name: str) -> torch.Tensor:
    """The values at the positions whose output belongs to a response token, all rows after one another."""
    return torch.cat([row[p - 1 : p + r - 1].double() for (p, r), row in zip(cases.LENGTHS, found[name], strict=True)])


def definition(model: Path, kind: str, rho: float) -> dict[str, Any]:
    """Everything by its definition in float64, one row at a time, and the loss's gradient by autograd."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="sdpa")
    temperature = cases.TEMPERATURES[kind]
    every = cases.rows(cases.VOCABULARY)
    tokens = sum(int(row["loss_mask"].sum()) for row in every)
    out: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("log_probs", "entropy", "sum_pi_squared", IN_SET, KEPT_MASS, SET_SIZE, "mask")
    }
    loss: Any = 0.0
    for i, row in enumerate(every):
        prompt, response = cases.LENGTHS[i]
        z = network(row["input_ids"][None]).logits[0, prompt - 1 : prompt + response - 1]
        z = z / (temperature[i] if isinstance(temperature, list) else temperature)
        keep = z.exp() >= rho * z.exp().max(-1, keepdim=True).values
        pruned = z.masked_fill(~keep, -torch.inf).log_softmax(-1)
        p = pruned.exp()
        label = row["responses"][:, None]
        inside = keep.gather(-1, label).squeeze(-1)
        log_probs = z.gather(-1, label).squeeze(-1) - z.masked_fill(~keep, -torch.inf).logsumexp(-1)
        entropy = -(p * pruned.masked_fill(~keep, 0.0)).sum(-1)
        trained = row["response_mask"] * inside
        ratio = (log_probs - row["old_log_probs"].double()).exp()
        loss = loss - (trained * (row["advantages"] * ratio + cases.LOSS["entropy_coeff"] * entropy)).sum() / tokens
        found = (
            log_probs,
            entropy,
            p.square().sum(-1),
            inside,
            z.softmax(-1).masked_fill(~keep, 0).sum(-1),
            keep.sum(-1),
        )
        for name, value in zip(out, (*found, row["response_mask"]), strict=True):
            out[name].append(value.detach().double())
    loss.backward()
    result: dict[str, Any] = {name: torch.cat(parts) for name, parts in out.items()}
    result["grad"] = {name: value.grad.float() for name, value in network.named_parameters()}
    result["tokens"] = tokens
    return result


@pytest.mark.seconds
@starts_ranks
@pytest.mark.parametrize("kind", cases.TEMPERATURES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pass_gives_what_verl_gives(alone: dict[str, Any], layout: str, kind: str) -> None:
    """Log-probabilities, entropy, sum of squares, loss and gradients: float32 rounding apart, the same."""
    verls, ours = alone[f"{layout}/{kind}/verl"], alone[f"{layout}/{kind}/pass"]
    for name in ("log_probs", "entropy", "sum_pi_squared"):
        torch.testing.assert_close(responses(ours, name), responses(verls, name), rtol=2e-6, atol=2e-6)
    assert not torch.equal(*(torch.cat(found["log_probs"]) for found in (verls, ours)))  # the prompts are left out
    for name, grad in verls["grad"].items():
        torch.testing.assert_close(ours["grad"][name], grad, rtol=1e-4, atol=3e-7)
        assert grad.abs().max() > 1e-6
    assert ours["metrics"]["actor/pg_loss"] == pytest.approx(verls["metrics"]["actor/pg_loss"], rel=1e-5, abs=1e-6)
    assert OUT_OF_SET_METRIC not in ours["metrics"] and IN_SET not in ours


@starts_ranks
@pytest.mark.parametrize("kind", cases.TEMPERATURES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pruned_policy_is_the_definition(alone: dict[str, Any], model: Path, layout: str, kind: str) -> None:
    """Also the gradient of verl's loss, where tokens outside the safe set neither train nor move the normaliser."""
    found, wanted = alone[f"{layout}/{kind}/pruned"], definition(model, kind, cases.RHO)
    inside = wanted[IN_SET].bool()
    assert 0.2 < float(inside.double().mean()) < 0.95  # the pruning bites
    assert torch.equal(responses(found, IN_SET), wanted[IN_SET])
    assert torch.equal(responses(found, SET_SIZE), wanted[SET_SIZE])
    for name in ("entropy", "sum_pi_squared", KEPT_MASS, "log_probs"):
        torch.testing.assert_close(responses(found, name), wanted[name], rtol=1e-5, atol=1e-5)
    for name, grad in wanted["grad"].items():
        torch.testing.assert_close(found["grad"][name], grad, rtol=1e-3, atol=2e-6)
    outside = float((wanted["mask"] * ~inside).sum()) / wanted["tokens"]
    assert sum(found["metrics"][OUT_OF_SET_METRIC]) == pytest.approx(outside, rel=1e-6)
    assert found["mask_kept"]  # the caller's batch keeps its response_mask


@starts_ranks
def test_without_pruning_the_gradient_is_another(alone: dict[str, Any]) -> None:
    plain, pruned = (alone[f"padded/cool/{name}"]["grad"]["lm_head.weight"] for name in ("pass", "pruned"))
    assert (plain - pruned).abs().max() > 0.1 * plain.abs().max()


def check_agents(found: dict[str, Any]) -> dict[str, list[float]]:
    """The agents' parts add up to the whole gradient, and each norm is that of a backward of the agent's own.

    Returns:
        The norms by case.
    """
    norms = {}
    for case, one in found.items():
        if case == "dropout":
            separated, whole = one
        else:
            separated, whole = one["separated"], one["whole"]
            reported = {name: value for name, value in one["metrics"].items() if name.startswith("agent_gradient/")}
            norms[case] = []
            for number, own in enumerate(one["own"]):
                names = [f"agent_gradient/{number}/{statistic}" for statistic in ("mean", "max")]
                norm = torch.stack([value.double().square().sum() for value in own.values()]).sum().sqrt().item()
                if number == cases.AGENTS - 1:  # no rows, no pass
                    assert norm == 0 and not any(name in reported for name in names)
                    continue
                assert norm > 1e-3 and all(reported[name] == [pytest.approx(norm, rel=1e-5)] for name in names)
                norms[case].append(norm)
            assert len(set(norms[case])) == cases.AGENTS - 1
            assert set(one["metrics"]) - set(reported) == set(one["plain_metrics"])
            for name, value in one["plain_metrics"].items():  # the loss and what else verl reports
                assert getattr(one["metrics"][name], "values", one["metrics"][name]) == getattr(value, "values", value)
        for name, value in whole.items():
            torch.testing.assert_close(separated[name], value, rtol=1e-5, atol=1e-7)
            assert value.abs().max() > 1e-6
    return norms


@starts_ranks
def test_agents_parts_add_up_to_the_gradient(alone: dict[str, Any]) -> None:
    norms = check_agents(alone["agents"])
    assert norms["pruned"] != pytest.approx(norms["pass"], rel=1e-3)
    plain, with_dropout = alone["agents"]["verl"]["whole"], alone["agents"]["dropout"][1]
    assert any((with_dropout[name] - value).abs().max() > 1e-4 for name, value in plain.items())


def check_steps(steps: dict[str, Any], alone: dict[str, Any]) -> None:
    """What an update divides by, the step that is not made, and the factor of the learning rate, as on one rank."""
    tokens = [int(row["response_mask"].sum()) for row in cases.rows(cases.VOCABULARY)]
    assert steps["verl"]["skipped"] is None and steps["verl"]["lr"] == steps["slower"]["lr"] == 0.01
    assert steps["verl"]["factor"] is None and steps["slower"]["factor"] == [0.25]
    assert steps["slower"]["moved"] == pytest.approx(steps["verl"]["moved"] / 4, rel=1e-3)
    assert steps["every"]["moved"] == pytest.approx(steps["verl"]["moved"], rel=1e-4)
    ratio = steps["kept"]["grad_norm"] / steps["all"]["grad_norm"]
    assert ratio == pytest.approx(sum(tokens) / sum(tokens[::2]), rel=1e-4)
    assert steps["kept rows"]["grad_norm"] / steps["all rows"]["grad_norm"] == pytest.approx(2.0, rel=1e-4)
    for name in ("none", "none kept"):  # the optimiser's weight decay alone would move the weights
        assert steps[name] == {"moved": 0.0, "grad_norm": None, "skipped": [1.0], "factor": None, "lr": 0.01}
    for name in ("every", "all", "kept"):
        assert steps[name]["skipped"] == [0.0] and steps[name]["moved"] > 0
    for name in ("verl", "all", "kept"):
        assert steps[name]["moved"] == pytest.approx(alone[name]["moved"], rel=1e-3)


@starts_ranks
def test_rejected_rows_and_learning_rate(alone: dict[str, Any]) -> None:
    check_steps(alone["steps"], alone["steps"])


@starts_ranks
def test_ranks_whose_tokens_all_left_the_safe_set_report_as_often(alone: dict[str, Any]) -> None:
    """verl puts the ranks' metrics together only if every rank has each of them equally often."""
    from verl.utils.metric import Metric

    some, *others = (alone["empty"][name] for name in ("some", "outside", "padding"))
    assert some["moved"]
    for other in others:
        assert not other["moved"]
        assert other["metrics"].keys() == some["metrics"].keys()
        for name, value in some["metrics"].items():
            if isinstance(value, Metric):
                both = Metric.aggregate_dp([value, other["metrics"][name]])
                if name != OUT_OF_SET_METRIC:
                    assert both == pytest.approx(value.aggregate() / 2)


@pytest.mark.seconds
@starts_ranks
def test_two_ranks_and_ulysses(alone: dict[str, Any], model: Path) -> None:
    both = engine_ranks(model, 2)
    norms = check_agents(alone["agents"])
    for rank in both:
        check_steps(rank["steps"], alone["steps"])
        for case, own in check_agents(rank["agents"]).items():
            assert own == pytest.approx(norms[case], rel=1e-4)
    for case, one in alone.items():
        if "/" not in case:
            continue
        for name in ("log_probs", "entropy", "sum_pi_squared", *([IN_SET] if case.endswith("pruned") else [])):
            for row, (prompt, response) in enumerate(cases.LENGTHS):
                place = slice(prompt - 1, prompt + response - 1)  # the last position predicts another row's token
                two = both[row % 2][case][name][row // 2]
                torch.testing.assert_close(two[place], one[name][row][place], rtol=1e-6, atol=2e-6)
        for rank in both:
            for name, grad in one["grad"].items():
                torch.testing.assert_close(rank[case]["grad"][name], grad, rtol=1e-4, atol=3e-7)
        if case.endswith("pruned"):
            shares = [sum(rank[case]["metrics"][OUT_OF_SET_METRIC]) for rank in both]
            assert sum(shares) / 2 == pytest.approx(sum(one["metrics"][OUT_OF_SET_METRIC]), rel=1e-5)
    for rmpad in (False, True):
        verls, ours = (both[0]["sharded"][f"{name}/{rmpad}"] for name in ("verl", "pass"))
        for name in ("log_probs", "entropy", "sum_pi_squared"):
            for row, (prompt, response) in enumerate(cases.LENGTHS[: len(ours[name])]):
                place = slice(prompt - 1, prompt + response - 1)
                torch.testing.assert_close(ours[name][row][place], verls[name][row][place], rtol=1e-5, atol=5e-6)
    for rank in both:
        verls, ours, pruned = (rank["ulysses"][name] for name in ("verl", "pass", "pruned"))
        taken = verls["taken"]
        assert verls["pad"] == ours["pad"] == 1
        for name in ("log_probs", "entropy", "sum_pi_squared"):
            torch.testing.assert_close(ours[name][taken], verls[name][taken], rtol=1e-5, atol=5e-6)
        torch.testing.assert_close(ours["grad"], verls["grad"], rtol=1e-4, atol=5e-6)
        assert 0 < float(pruned[IN_SET][taken].mean()) < 1 and float(pruned[KEPT_MASS][taken].max()) < 1
        assert torch.equal(pruned[IN_SET], both[0]["ulysses"]["pruned"][IN_SET])  # gathered: the same on all ranks


def test_registry_is_extended_once() -> None:
    from verl.workers.engine.base import BaseEngine, EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    class Other(BaseEngine):
        """An engine that is not FSDP."""

    class Mine(FSDPEngineWithLMHead):
        """A user's subclass, for a vendor's device."""

    before = {name: dict(value) for name, value in EngineRegistry._engines["language_model"].items()}
    values = {name: dict(value) for name, value in EngineRegistry._engines["value_model"].items()}
    registry = EngineRegistry._engines["language_model"]
    try:
        registry["fsdp"][("cuda", "mine")] = Mine
        registry["fsdp"][("cuda", "other")] = Other
        engine.extend_registry()
        extended = dict(registry["fsdp"])
        engine.extend_registry()
        assert registry["fsdp"] == extended
        own = (UpdateStepMixin, AgentGradientsMixin, LossTurnsMixin)
        mixins = (*own, ImitationMixin, TokenKLMixin, engine.OnePassMixin)
        assert extended[("cuda", "mine")].__mro__[1:8] == (*mixins, Mine)
        assert extended[("cuda", "other")] is Other
        for device in ("cuda", "npu"):
            assert extended[device].__mro__[1:8] == (*mixins, FSDPEngineWithLMHead)
            assert issubclass(registry["fsdp2"][device], engine.OnePassMixin)
        critic = EngineRegistry._engines["value_model"]["fsdp"]["cuda"]
        assert critic.__mro__[1:3] == (UpdateStepMixin, FSDPEngineWithValueHead)
        assert issubclass(critic, FSDPEngineWithValueHead) and not issubclass(critic, engine.OnePassMixin)
    finally:
        for model_type, kept in (("language_model", before), ("value_model", values)):
            for name, value in kept.items():
                EngineRegistry._engines[model_type][name].clear()
                EngineRegistry._engines[model_type][name].update(value)


class Stock:
    """verl's engine below the mixin, as far as these tests go: says that it was asked."""

    def prepare_model_outputs(self, **given: Any) -> str:
        return "verl's answer"


class Engine(engine.OnePassMixin, Stock):
    """The mixin over it."""


def asked(logits: torch.Tensor | None = None, **settings: Any) -> Any:
    from verl.utils import tensordict_utils as tu

    output = type("Output", (), {"logits": torch.zeros(1, 2, 4) if logits is None else logits})()
    data = tu.get_tensordict({"a": torch.zeros(2)}, non_tensor_dict=settings)
    return Engine().prepare_model_outputs(output, {}, data, None)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        engine.engine_info("off", None),
        {**engine.engine_info("on", None), "use_fused_kernels": True},
        {**engine.engine_info("on", None), "distillation_use_topk": True},
        {**engine.engine_info("on", None), "distillation_only": True},
    ],
)
def test_what_the_pass_does_not_know_goes_to_verl(settings: dict[str, Any]) -> None:
    assert asked(**settings) == "verl's answer"


def test_auto_uses_the_pass_where_it_was_measured() -> None:
    assert asked(torch.zeros(1, 2, 4, device="meta"), **engine.engine_info("auto", None)) == "verl's answer"
    with pytest.raises(KeyError):  # the pass begins, and this batch has no rows
        asked(**engine.engine_info("auto", None))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_fused_kernels": True}, "fused kernels never form the logits. Set .*use_fused_kernels=false"),
        ({"distillation_use_topk": True}, "distillation reads the whole vocabulary"),
        ({"pad_mode": "right"}, "padded by the data set"),
    ],
)
def test_pruning_where_it_cannot_be_done_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"dvp.rho=0.01 cannot prune here: .*{message}"):
        asked(**engine.engine_info("auto", 0.01), **settings)


def test_settings_that_a_loss_reports_are_the_same_of_a_micro_batch_without_tokens() -> None:
    """verl averages them over the micro-batches."""
    from verl.utils.metric import AggregationType, Metric

    def loss(*, model_output: Any, data: Any) -> Any:
        return model_output["log_probs"].values().sum(), {"kl_coef": 0.001, "loss": Metric(AggregationType.MEAN, 0.2)}

    def jagged(values: list[int]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(values)], layout=torch.jagged)

    data = TensorDict({"response_mask": jagged([0, 0])}, batch_size=1)
    value, found = engine._unless_empty(loss)(model_output={"log_probs": jagged([1, 2])}, data=data)
    assert value == 0.0 and found["kl_coef"] == 0.001 and found["loss"].aggregate() == 0.0


def test_engine_is_told_by_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STRICT, "1")
    config = OmegaConf.create({"dvp": {"rho": 0.01, "prune_reference": False}})
    pruning = Pruning(config)
    assert pruning.info("old") == {ONE_PASS: "auto", engine.RHO: 0.01, engine.SET_COLUMNS: True}
    assert pruning.info("update") == {ONE_PASS: "auto", engine.RHO: 0.01, engine.SET_COLUMNS: False}
    assert pruning.info("reference") == {ONE_PASS: "auto", engine.RHO: 0.0, engine.SET_COLUMNS: False}
    assert Pruning(OmegaConf.create({"verl_ext": {"one_pass": False}})).info("old") == {}


@pytest.mark.slow
def test_bench_of_a_step_runs_every_variant() -> None:
    command = ["-m", "verl_ext.lab.bench.step", "--json", "--rounds=1", "--rows=2", "--micro=1"]
    done = copies.python(*command, "--vocabulary=300", "--prompt=3", "--response=4", timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["seconds"]) == {"verl", "grpo", "otb", "dvp"}
    assert all(value > 0 for value in (found["otb_over_grpo"], found["dvp_over_grpo"], found["grpo_over_verl"]))
