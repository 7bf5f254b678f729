# SPDX-License-Identifier: Apache-2.0
"""`verl_ext.agent_gradients`: what is checked, and how rows and metrics are named. test_engine.py has the gradients."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue
from omegaconf import OmegaConf
from ranks import run_ranks, starts_ranks
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from verl_ext.integration.columns import VALID, ActiveBatch, RowFieldMissing, active
from verl_ext.integration.engines.agent_gradients import AGENT, AGENTS, AgentGradientsMixin, through_rows
from verl_ext.integration.parts.update import agent_gradients
from verl_ext.integration.parts.update.agent_gradients import AgentGradients
from verl_ext.integration.settings.options import OptionError


def config(value: Any = True, **changes: Any) -> Any:
    made = OmegaConf.create(
        {
            "verl_ext": {"agent_gradients": value},
            "trainer": {"use_v1": True},
            "actor_rollout_ref": {"actor": {"strategy": "fsdp2"}},
        }
    )
    for key, changed in changes.items():
        OmegaConf.update(made, key.replace("__", "."), changed)
    return made


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config("yes"), r"verl_ext\.agent_gradients is 'yes'; give true or false"),
        (
            config(actor_rollout_ref__actor__strategy="megatron"),
            r"actor\.strategy=megatron has none of its code\. Set .* to fsdp or fsdp2",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(settings: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        AgentGradients.check(settings)


def test_without_the_key_nothing_is_asked_for() -> None:
    assert not AgentGradients.wanted(OmegaConf.create({})) and not AgentGradients.wanted(config(False))
    AgentGradients.check(config(False, actor_rollout_ref__actor__strategy="megatron"))
    assert AgentGradients.wanted(config())
    AgentGradients.check(config())


def test_rows_are_numbered_by_the_agents_names() -> None:
    keys = ["u_0_0", "u_0_1", "u_1_0", "pad_0_0"]
    agents = agent_gradients.agent_by_key({"agent_id": np.array(["solver", "max", "solver", "max"])}, keys)
    names, column = agent_gradients.number_agents(agents, keys, [False, False, False, True])
    assert names == ["max", "solver"] and column.tolist() == [1, 0, 1, -1] and column.dtype == torch.int64
    names, column = agent_gradients.number_agents(agents, keys[::-1], [True, False, True, False])  # in another order
    assert names == ["solver"] and column.tolist() == [-1, 0, -1, 0]


def test_rows_that_no_update_is_made_of_ask_for_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding, rows that were taken out, and those of a model that is not trained."""
    keys = ["u_0_0", "u_0_1", "u_1_0", "u_1_1", "pad_0_0"]
    batch = KVBatchMeta(
        keys=keys, tags=[{}, {VALID: False}, {}, {}, {"is_padding": True}], partition_id="train", extra_info={"told": 1}
    )
    put: list[Any] = []
    monkeypatch.setattr(transfer_queue, "kv_batch_put", lambda fields, **given: put.append(fields[AGENT]) or batch)
    part = AgentGradients(config(), SimpleNamespace(updated_rows=lambda batch: {"u_0_0", "u_0_1", "u_1_1", "pad_0_0"}))
    part._agent_of = dict(zip(keys, ["solver", "judge", "frozen", "max", "solver"], strict=True))
    assert part.before_update(batch).extra_info == {"told": 1, AGENTS: 2}
    assert put[0].tolist() == [1, -1, -1, 0, -1]
    part.trainer.updated_rows = lambda batch: frozenset()
    assert part.before_update(batch).extra_info[AGENTS] == 0
    part.after_update({})
    assert part.metrics == {}


def test_rows_without_an_agent_are_refused() -> None:
    lacking = ActiveBatch(columns={}, missing={"agent_id": "1 of 2 turns lack it, the first is u_0_1"})
    message = r"agent_gradients needs the turn field 'agent_id'.* \(1 of 2 turns lack it, the first is u_0_1\): put"
    with active(lacking), pytest.raises(RowFieldMissing, match=message):
        agent_gradients.agent_by_key(lacking.columns, ["u_0_0", "u_0_1"])


def test_metrics_are_reduced_by_verl_and_named() -> None:
    from verl.utils.metric import reduce_metrics

    logged = {
        "agent_gradient/0/mean": [1.0, 3.0],
        "agent_gradient/0/max": [1.0, 3.0],
        "agent_gradient/1/mean": [5.0],
        "agent_gradient/1/max": [5.0],
        "grad_norm": [2.0, 4.0],
    }
    metrics = reduce_metrics({f"actor/{name}": value for name, value in logged.items()})
    assert agent_gradients.named_metrics(metrics, ["max", "solver", "absent"]) == {
        "agent/max/grad_norm/mean": 2.0,
        "agent/max/grad_norm/max": 3.0,
        "agent/solver/grad_norm/mean": 5.0,
        "agent/solver/grad_norm/max": 5.0,
    }
    assert metrics == {"actor/grad_norm": 3.0}
    assert agent_gradients.named_metrics(metrics, []) == {}
    with pytest.raises(RuntimeError, match="the training engine has not separated the agents"):
        agent_gradients.named_metrics(metrics, ["solver"])


@pytest.mark.parametrize("jagged", [False, True])
def test_gradient_passes_through_the_rows_alone(jagged: bool) -> None:
    source = torch.arange(12.0).requires_grad_()
    value: torch.Tensor = source.square().view(3, 4)
    lengths = torch.tensor([4, 4, 4])
    if jagged:
        lengths = torch.tensor([2, 7, 3])
        value = torch.nested.nested_tensor_from_jagged(source.square(), torch.tensor([0, 2, 9, 12]))
    made = through_rows(value, torch.tensor([True, False, True]), "log_probs")
    flat = made.values() if jagged else made.view(-1)
    assert torch.equal(flat, source.square())
    flat.sum().backward()
    passed = torch.repeat_interleave(torch.tensor([True, False, True]), lengths)
    assert source.grad is not None and torch.equal(source.grad, 2 * source.detach() * passed)


def test_a_value_without_rows_is_refused_if_it_carries_a_gradient() -> None:
    keep = torch.tensor([True, False])
    assert through_rows("text", keep) == "text"
    constant = torch.zeros(5)
    assert through_rows(constant, keep) is constant
    with pytest.raises(RuntimeError, match=r"which agent router_loss of shape \(5,\) belongs to"):
        through_rows(constant.clone().requires_grad_(), keep, "router_loss")


def test_a_batch_without_the_column_is_refused() -> None:
    from verl.utils import tensordict_utils as tu

    class Stock:
        """verl's engine below the mixin: says that it was asked."""

        def forward_backward_batch(self, *given: Any) -> str:
            return "verl's answer"

    class Engine(AgentGradientsMixin, Stock):
        """The mixin over it."""

    plain = tu.get_tensordict({"a": torch.zeros(2)}, non_tensor_dict={})
    assert Engine().forward_backward_batch(plain, None) == "verl's answer"
    told = tu.get_tensordict({"a": torch.zeros(2)}, non_tensor_dict={AGENTS: 2})
    assert Engine().forward_backward_batch(told, None, forward_only=True) == "verl's answer"
    with pytest.raises(RuntimeError, match=f"there are 2 agents, but has no column '{AGENT}'"):
        Engine().forward_backward_batch(told, None)


@pytest.mark.seconds
@starts_ranks
def test_norms_of_parts_that_fsdp_1_shards(tmp_path: Path) -> None:
    run_ranks(Path(__file__).with_name("agent_gradients_process.py"), tmp_path / "out", world=2)
    for number in range(2):
        found = json.loads((tmp_path / f"out.{number}").read_text())
        assert found["elements"] == (8 * 16 + 16 + 16 + 1 + 1) // 2  # a half, rounded up, of each of the two units
        assert found["difference"] < 1e-6 < found["norm"] and found["without"] == {}
        for agent, own in enumerate(found["own"]):
            assert own > 0.1 and found["metrics"][f"agent_gradient/{agent}/mean"] == [pytest.approx(own, rel=1e-6)]


@pytest.mark.slow
def test_what_other_parts_told_the_engine_stays(store: Any) -> None:
    """verl's store returns a batch that knows nothing of the engine's orders: pruning, a teacher, the one pass."""
    keys = ["u_0_0", "u_0_1", "u_1_0"]
    fields = TensorDict({"rewards": torch.zeros(3)}, batch_size=3)
    batch = store.kv_batch_put(keys=keys, partition_id="told", fields=fields, tags=[{"seq_len": 1}] * 3)
    batch.extra_info["rho"] = 0.05
    part = AgentGradients(config(), SimpleNamespace(updated_rows=lambda batch: set(batch.keys)))
    part._agent_of = dict(zip(keys, ("b", "a", "b"), strict=True))
    batch = part.before_update(batch)
    assert batch.extra_info == {"rho": 0.05, AGENTS: 2}
    assert store.kv_batch_get(keys=keys, partition_id="told", select_fields=[AGENT])[AGENT].tolist() == [1, 0, 1]
    store.kv_clear(keys=keys, partition_id="told")
