# SPDX-License-Identifier: Apache-2.0
"""A step of several models through verl's own trainer: what the parts of the run and of each model make of it, against
the same rows on one model. Workers are stood in for; store, cuts, advantages and updates are verl's."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradients
import models_process
import pytest
import torch
import verl.trainer.ppo.v1 as v1
from hydra import compose
from ranks import run_ranks, starts_ranks
from tensordict import TensorDict
from test_models import TWO
from test_rejection_part import put_fields
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import compute_value_loss
from verl.trainer.ppo.utils import Role, need_reference_policy
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.utils.padding import response_from_nested

from verl_ext.integration import checks, columns, parts
from verl_ext.integration.compat.wraps import STRICT
from verl_ext.integration.engines import engine, token_kl
from verl_ext.integration.models import members
from verl_ext.integration.models.lead import LeadMixin
from verl_ext.integration.models.side import own_parts
from verl_ext.integration.parts.update import pruning, rejection
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.options import has_critic

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verl_configuration")]  # starts Ray

RUN = (
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra",
    "+verl_ext.orchestra.name=solver_verifier",
    "verl_ext.updates_per_batch=3",  # of rows that are no multiple of it: verl pads
)
KEYS = [f"{uid}_{sample}_{turn}" for uid in "ab" for sample in range(4) for turn in range(2)]
"""Two prompts, four samples, of each a row of the solver (policy) and one of the verifier (small)."""
MODELS = dict(zip(KEYS, ["policy", "small"] * 8, strict=True))
GENERATOR = torch.Generator().manual_seed(1)
LENGTHS = {key: int(torch.randint(2, 7, (), generator=GENERATOR)) for key in KEYS}
SAMPLER = {key: -2 * torch.rand(length, generator=GENERATOR) for key, length in LENGTHS.items()}
TRAINER = {key: row + 0.3 * torch.randn(len(row), generator=GENERATOR) for key, row in SAMPLER.items()}
SQUARES = {key: torch.rand(length, generator=GENERATOR) for key, length in LENGTHS.items()}
REWARDS = {key: float(key[0] == "b" or key[2] in "13") for key in KEYS}
IN_SET = {key: (torch.rand(length, generator=GENERATOR) > 0.3).float() for key, length in LENGTHS.items()}
MASS = {key: 0.9 + 0.1 * torch.rand(length, generator=GENERATOR) for key, length in LENGTHS.items()}
FEATURES = {key: torch.rand(length, 3, generator=GENERATOR) for key, length in LENGTHS.items()}
WORDS = {"policy": ("\\boxed{1}", "plain"), "small": ("plain", "\\boxed{1}")}
VOID = {"policy": "1", "small": "2"}
"""The sample of each prompt in which the model says nothing that ends a turn."""


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def put(store: Any) -> KVBatchMeta:
    ones = jagged([torch.ones(LENGTHS[key], dtype=torch.int64) for key in KEYS])
    word = {
        key: WORDS[model].index("plain" if key[2] == VOID[model] else "\\boxed{1}") for key, model in MODELS.items()
    }
    fields = {
        "response_mask": ones,
        "loss_mask": ones.clone(),
        "responses": jagged([torch.full((LENGTHS[key],), word[key]) for key in KEYS]),
        "rollout_log_probs": jagged([SAMPLER[key] for key in KEYS]),
        "rm_scores": jagged([torch.nn.functional.pad(torch.tensor([REWARDS[k]]), (LENGTHS[k] - 1, 0)) for k in KEYS]),
    }
    tags = [{"seq_len": 2 + LENGTHS[key]} for key in KEYS]
    said = [{"model": MODELS[key], "agent_id": f"of_{MODELS[key]}"} for key in KEYS]
    return put_fields(store, KEYS, tags, fields, said)


class Group:
    """A model's workers: the log-probabilities are known, and each update is noted as it was asked for."""

    _dispatch_info = {"actor": [0]}

    def __init__(self, store: Any) -> None:
        self.store, self.updates = store, []

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        rows = {"log_probs": TRAINER, "entropy": TRAINER}
        if batch.extra_info.get("calculate_sum_pi_squared"):
            rows["sum_pi_squared"] = SQUARES
        if batch.extra_info.get(engine.SET_COLUMNS):
            rows |= {engine.IN_SET: IN_SET, engine.KEPT_MASS: MASS, engine.SET_SIZE: MASS}
        put_around(self.store, batch, rows)
        return batch

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        asked = batch.extra_info
        masks = stored(self.store, batch, "response_mask")
        assert len(masks) % 3 == 0 and not any(sum(mask) for key, mask in masks.items() if key not in MODELS)
        self.updates.append(({key: masks[key] for key in masks if key in MODELS}, dict(asked)))
        metrics: dict[str, Any] = {"mfu": 0.0, "grad_norm": 1.0}
        if "verl_ext_normalise" in asked:
            metrics["skipped_share"] = [0.5]
        if asked.get(engine.RHO):
            metrics[engine.OUT_OF_SET_METRIC] = [0.25]
        if "verl_ext_learning_rate" in asked:
            metrics["lr_factor"] = [asked["verl_ext_learning_rate"]]
        return {"metrics": metrics}


def put_around(store: Any, batch: KVBatchMeta, rows: dict[str, dict[str, torch.Tensor]]) -> None:
    """What engines compute of each row: one number more on both sides of its response."""
    masks = stored(store, batch, "response_mask")
    around = {
        name: [torch.nn.functional.pad(of.get(key, torch.zeros(len(mask))), (1, 1)) for key, mask in masks.items()]
        for name, of in rows.items()
    }
    fields = TensorDict({name: jagged(of) for name, of in around.items()}, batch_size=len(batch))
    store.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


class Critic:
    """A critic's workers: values are linear in a token's features, each row's part of the gradient is noted."""

    def __init__(self, store: Any) -> None:
        self.store, self.weights = store, torch.tensor([1.0, -0.5, 0.25], requires_grad=True)
        self.valued: list[str] = []
        self.gradients: dict[str, torch.Tensor] = {}
        self.asked: dict[str, Any] = {}

    def infer_batch(self, batch: KVBatchMeta) -> SimpleNamespace:
        self.valued += [key for key in batch.keys if key in MODELS]
        values = {key: (FEATURES[key] @ self.weights).detach() for key in batch.keys if key in MODELS}
        put_around(self.store, batch, {"values": values})
        return SimpleNamespace(futures=[])

    def train_mini_batch(self, batch: KVBatchMeta) -> SimpleNamespace:
        self.asked = dict(batch.extra_info)
        assert 3 * self.asked["mini_batch_size"] == len(batch)
        columns = {name: stored(self.store, batch, name) for name in ("returns", "values", "response_mask")}
        for key in filter(MODELS.get, batch.keys):
            returns, values, mask = (torch.tensor([of[key]]) for of in columns.values())
            found = (FEATURES[key] @ self.weights)[None]
            loss, _ = compute_value_loss(found, returns, values, mask, cliprange_value=0.5, loss_agg_mode="token-sum")
            (self.gradients[key],) = torch.autograd.grad(loss, self.weights)
        norm = sum(self.gradients.values()).norm().item()
        return SimpleNamespace(get=lambda: {"metrics": {"mfu": 0.0, "grad_norm": norm}})


def stored(store: Any, batch: KVBatchMeta, name: str) -> dict[str, list[float]]:
    found = store.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=[name])[name]
    return {key: row.tolist() for key, row in zip(batch.keys, found.unbind(), strict=True)}


class Tokenizer:
    """Words by number, joined by blanks."""

    eos_token_id = 0

    def __init__(self, model: str) -> None:
        self.words = WORDS[model]

    def decode(self, ids: torch.Tensor) -> str:
        return " ".join(self.words[int(token)] for token in ids)


def trainer_of(store: Any, recipe: str, *overrides: str) -> Any:
    """verl's trainer with ours in front, as far as the step goes, and its members."""
    cfg = compose("ppo_trainer", overrides=[f"+recipe=[{recipe},cpu]", *RUN, *overrides])
    checks.complete(cfg)
    checks.check(cfg)
    cls = v1.get_trainer_cls("sync")
    trainer = cls.__new__(cls)
    trainer.parts = parts.active(cfg, trainer)
    trainer._rows, trainer._updates_metrics = columns.ActiveBatch(columns={}), []
    trainer.global_steps, trainer.local_trigger_step = 1, 0
    trainer.config, trainer.replay_buffer, trainer.use_reference_policy = cfg, None, need_reference_policy(cfg)
    ready(trainer, store, "policy")
    further, bases = model_options.of(cfg), cls.__bases__
    trainer._members = {
        model.name: members.member(model, trainer, bases[bases.index(LeadMixin) + 1 :]) for model in further
    }
    for name, member in trainer._members.items():
        ready(member, store, name)
    if further:
        trainer.own_parts = own_parts(cfg, trainer)
    return trainer


def ready(trainer: Any, store: Any, model: str) -> None:
    trainer.actor_rollout_wg, trainer.tokenizer = Group(store), Tokenizer(model)
    trainer.use_critic, trainer.distillation_config = has_critic(trainer.config), None
    trainer.critic_wg = Critic(store)


def step(trainer: Any, store: Any, batch: KVBatchMeta | None = None) -> SimpleNamespace:
    """One step: the updates that each model's workers were asked for, the batch after it and what was reported."""
    metrics: dict[str, Any] = {}
    batch = trainer._balance_batch(batch or put(store), metrics)
    batch = trainer._compute_old_log_prob(batch, metrics)
    if trainer.use_critic:
        batch = trainer._compute_values(batch, metrics)
    batch = trainer._compute_advantage(batch, metrics)
    if trainer.use_critic:
        batch = trainer._update_critic(batch, metrics)
    advantages = {key: row for key, row in stored(store, batch, "advantages").items() if key in MODELS}
    batch = trainer._update_actor(batch, metrics)
    for _, reported in [*trainer._updates_metrics, *((0, part.metrics) for part in trainer.parts)]:
        metrics.update(reported)
    return SimpleNamespace(
        updates={name: one.actor_rollout_wg.updates for name, one in trainer._trainers().items()},
        advantages=advantages,
        critics={name: getattr(one, "critic_wg", None) for name, one in trainer._trainers().items()},
        masks={key: mask for key, mask in stored(store, batch, "response_mask").items() if key in MODELS},
        metrics=metrics,
    )


@pytest.mark.parametrize(
    "rule",
    [
        *(f"mrs,level={level},lower=0.85,upper=1.15" for level in rejection.rejection.LEVELS),
        "trm,max=0.15,avg=0.05",
        "ln_trm,epsilon=0.1,delta=0.1,threshold=0.2",
        "ser,threshold=0.2",
        "variance_filter,threshold=0.1",
    ],
)
def test_rules_decide_on_the_rows_of_all_models_as_on_those_of_one(store: Any, rule: str) -> None:
    name, *options = rule.split(",")
    given = [f"+algorithm.rejection.{name}=true", *(f"++algorithm.{name}.{option}" for option in options)]
    alone, apart = (step(trainer_of(store, "dr_mas", *given, *more), store) for more in ((), TWO))
    ((masks, asked),) = alone.updates["policy"]
    kept = {key for key, mask in masks.items() if any(mask)}
    assert 0 < sum(map(sum, masks.values())) < sum(LENGTHS.values()) and len(masks) == len(KEYS)
    for model in ("policy", "small"):
        ((own, told),) = apart.updates[model]
        assert own == {key: mask for key, mask in masks.items() if MODELS[key] == model}
        assert told["verl_ext_normalise"] == asked["verl_ext_normalise"] == "all"
        assert apart.metrics[f"updates/{model}/per_batch"] == 3
        assert apart.metrics[f"rejection/{model}/skipped_updates/count"] == 2  # half of them, rounded
    assert {key for key in kept if MODELS[key] == "small"}
    assert apart.advantages == alone.advantages
    assert alone.masks == apart.masks == {key: [1] * length for key, length in LENGTHS.items()}
    figures = {key for key in alone.metrics if key.startswith("rejection/") and "skipped" not in key}
    assert {key: apart.metrics[key] for key in figures} == pytest.approx({key: alone.metrics[key] for key in figures})


def test_a_rule_reads_what_a_model_wrote_in_the_words_of_its_own_tokenizer(store: Any) -> None:
    found = step(trainer_of(store, "dr_mas", "+algorithm.rejection.simpletir=true", *TWO), store)
    for model, ((masks, _),) in found.updates.items():
        assert {key for key in masks if not any(masks[key])} == {
            key for key in KEYS if MODELS[key] == model and key[2] in "12"
        }


GAE = (
    "algorithm.adv_estimator=gae",
    "algorithm.gamma=0.9",
    "algorithm.lam=0.8",
    "trainer.length_lr.warmup_steps=4",
)


def test_each_critic_values_its_models_rows_and_has_their_part_of_the_gradient(store: Any, model: Path) -> None:
    rule = ["+algorithm.rejection.mrs=true", "++algorithm.mrs.level=token", "++algorithm.mrs.lower=0.85"]
    given = [*GAE, *rule, "++algorithm.mrs.upper=1.15", f"critic.model.path={model}"]
    runs, columns_of = [], {}
    for name, more in (("alone", ()), ("apart", TWO)):
        batch = put(store)
        runs.append(step(trainer_of(store, "length_lr", *given, *more), store, batch))
        columns_of[name] = {column: stored(store, batch, column) for column in ("values", "returns")}
    alone, apart = runs
    assert columns_of["apart"] == columns_of["alone"]
    assert apart.advantages == {key: pytest.approx(row, rel=1e-5, abs=1e-6) for key, row in alone.advantages.items()}
    shared = alone.critics["policy"]
    assert set(shared.gradients) == set(KEYS) and 0 < sum(map(sum, alone.updates["policy"][0][0].values())) < sum(
        LENGTHS.values()
    )
    for name, own in apart.critics.items():
        keys = {key for key in KEYS if MODELS[key] == name}
        assert set(own.valued) == set(own.gradients) == keys and len(own.valued) == 8
        part, whole = (torch.stack([one.gradients[key] for key in sorted(keys)]).sum(0) for one in (own, shared))
        torch.testing.assert_close(part, whole, rtol=1e-6, atol=1e-6)
        assert apart.metrics[f"critic/{name}/grad_norm"] == pytest.approx(part.norm().item()) and part.norm() > 0.01
        for asked in ("verl_ext_normalise", "verl_ext_learning_rate"):
            assert own.asked[asked] == shared.asked[asked]
    assert shared.asked["verl_ext_learning_rate"] == 0.25
    total = sum(sum(own.gradients.values()) for own in apart.critics.values())
    torch.testing.assert_close(total, sum(shared.gradients.values()), rtol=1e-5, atol=1e-5)


def test_the_critic_of_a_model_without_a_token_to_train_on_is_not_updated(store: Any, model: Path) -> None:
    batch = put(store)
    masks = jagged([torch.full((LENGTHS[key],), int(name == "policy")) for key, name in MODELS.items()])
    fields = TensorDict({"response_mask": masks, "loss_mask": masks.clone()}, batch_size=len(KEYS))
    store.kv_batch_put(keys=batch.keys, partition_id="train", fields=fields)
    found = step(trainer_of(store, "length_lr", *GAE, f"critic.model.path={model}", *TWO), store, batch)
    own = found.critics["small"]
    assert len(own.valued) == 8 and not own.gradients and not found.updates["small"]
    assert len(found.critics["policy"].gradients) == 8 and len(found.updates["policy"]) == 1
    assert "critic/policy/grad_norm" in found.metrics and "critic/small/grad_norm" not in found.metrics


@pytest.mark.parametrize("group_by", ["[index]", "[index,agent_id]"])
def test_optimal_token_baselines_have_the_energies_of_each_rows_model(store: Any, group_by: str) -> None:
    given = [f"algorithm.otb.group_by={group_by}"]
    alone, apart = (step(trainer_of(store, "otb", *given, *more), store) for more in ((), TWO))
    assert apart.advantages == alone.advantages and any(map(any, alone.advantages.values()))


def test_the_schedule_watches_the_whole_team_and_all_models_are_told_its_factor(store: Any) -> None:
    given = ["trainer.length_lr.warmup_steps=4"]
    alone, apart = (step(trainer_of(store, "dr_mas,length_lr", *given, *more), store) for more in ((), TWO))
    for updates in (*alone.updates.values(), *apart.updates.values()):
        assert [asked["verl_ext_learning_rate"] for _, asked in updates] == [0.25]
    figures = {key: value for key, value in alone.metrics.items() if key.startswith("length_lr/")}
    assert figures == {key: apart.metrics[key] for key in figures} and figures["length_lr/factor"] == 0.25


@pytest.mark.parametrize("method", ["dr_mas", "otb"])
def test_each_engine_prunes_its_own_rows_as_that_of_one_model(
    store: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv(STRICT, "1")
    runs = [trainer_of(store, f"{method},dvp", *more) for more in ((), TWO)]
    for run in runs:
        (part,) = (one for one in run.parts if isinstance(one, pruning.Pruning))
        part._guarded = True  # no agent loop has sampled these rows
        client = LLMServerClient(run.config, None)
        if run._members:
            client.verl_ext_clients = {"small": LLMServerClient(run.config, None)}
        again = pickle.loads(pickle.dumps(part.client(client)))  # as it goes to the agent loops
        for one in (again, *getattr(again, "verl_ext_clients", {}).values()):
            assert one._verl_ext_sampler.rho == part.rho > 0
    alone, apart = (step(run, store) for run in runs)
    ((masks, asked),) = alone.updates["policy"]
    assert asked[engine.RHO] > 0 and masks == {key: IN_SET[key].tolist() for key in KEYS} == apart.masks
    for model in ("policy", "small"):
        ((own, told),) = apart.updates[model]
        assert own == {key: mask for key, mask in masks.items() if MODELS[key] == model}
        assert told[engine.RHO] == asked[engine.RHO]
        assert apart.metrics[f"actor/{model}/dvp/out_of_set_fraction"] == 0.25
    assert apart.advantages == alone.advantages and any(map(any, alone.advantages.values()))
    figures = {key: value for key, value in alone.metrics.items() if key.startswith(("dvp/", "mismatch"))}
    assert len(figures) > 8 and figures == {key: apart.metrics[key] for key in figures}


def test_a_batch_whose_tokens_are_all_of_a_frozen_model_updates_nothing(store: Any) -> None:
    batch, frozen = put(store), ["+verl_ext.models.small.trained=false", TWO[1]]
    masks = jagged([torch.full((LENGTHS[key],), int(model == "small")) for key, model in MODELS.items()])
    fields = TensorDict({"response_mask": masks, "loss_mask": masks.clone()}, batch_size=len(KEYS))
    store.kv_batch_put(keys=batch.keys, partition_id="train", fields=fields)
    given = ["trainer.length_lr.warmup_steps=4", "verl_ext.agent_gradients=true", *frozen]
    found = step(trainer_of(store, "dr_mas,mrs,length_lr", *given), store, batch)
    assert found.updates == {"policy": [], "small": []} and found.metrics["length_lr/factor"] == 0.25


def test_rows_of_a_model_that_is_not_trained_have_the_log_probabilities_of_their_sampler(store: Any) -> None:
    rule = [
        f"++algorithm.{key}" for key in ("rejection.mrs=true", "mrs.level=token", "mrs.lower=0.85", "mrs.upper=1.15")
    ]
    frozen, apart = (
        trainer_of(store, "dr_mas", *rule, f"+verl_ext.models.small.trained={trained}", TWO[1])
        for trained in ("false", "true")
    )
    batch = put(store)
    found, beside = step(frozen, store, batch), step(apart, store)
    assert found.updates["small"] == [] and found.masks == beside.masks
    ((masks, _),), ((as_beside, _),) = found.updates["policy"], beside.updates["policy"]
    assert masks == as_beside and 0 < sum(map(sum, masks.values())) < sum(map(len, masks.values()))
    assert found.metrics["model/small/sequences"] == 8 and "updates/small/per_batch" not in found.metrics
    assert found.metrics["rejection/kept_tokens_share"] > beside.metrics["rejection/kept_tokens_share"]
    own = batch.select_keys([key for key in KEYS if MODELS[key] == "small"])
    own.extra_info[token_kl.WANTED] = True
    for method in ("_compute_old_log_prob", "_compute_ref_log_prob"):
        assert getattr(frozen._members["small"], method)(own, {}) is own
    sampled = stored(store, own, "rollout_log_probs")
    assert stored(store, own, "old_log_probs") == stored(store, own, "ref_log_prob") == sampled
    of_engine = store.kv_batch_get(keys=own.keys, partition_id="train", select_fields=["token_kl", "response_mask"])
    kl = response_from_nested(of_engine["token_kl"], of_engine["response_mask"])
    assert [len(row) for row in kl.unbind()] == [LENGTHS[key] for key in own.keys] and not kl.values().any()


@pytest.mark.parametrize(
    ("overrides", "policy", "small"),
    [
        (["+verl_ext.models.small.actor.use_kl_loss=true"], Role.ActorRollout, Role.ActorRolloutRef),
        (["+verl_ext.models.small.model.lora_rank=4"], Role.ActorRollout, Role.ActorRollout),
        (
            ["actor_rollout_ref.actor.use_kl_loss=true", "+verl_ext.models.small.model.lora_rank=4"],
            Role.ActorRolloutRef,
            Role.ActorRollout,  # its base is the reference
        ),
        (
            ["actor_rollout_ref.actor.use_kl_loss=true", "+verl_ext.models.small.actor.use_kl_loss=false"],
            Role.ActorRolloutRef,
            Role.ActorRollout,
        ),
    ],
)
def test_adapters_and_references_are_a_models_own(store: Any, overrides: list[str], policy: Role, small: Role) -> None:
    trainer = trainer_of(store, "dr_mas", *TWO, *overrides)
    trainer._init_resource_pool_mgr()
    trainer.resource_pool_manager.resource_pool_dict = {"global_pool": object()}
    (member,) = trainer._members.values()
    member._init_resource_pool_mgr()
    assert [list(one.role_worker_mapping) for one in (trainer, member)] == [[policy], [small]]
    kl = [any("use_kl_loss=true" in one and ("small" in one) == own for one in overrides) for own in (False, True)]
    inherits = kl[0] and "+verl_ext.models.small.actor.use_kl_loss=false" not in overrides
    assert [trainer.use_reference_policy, member.use_reference_policy] == [kl[0], kl[1] or inherits]
    ranks = [one.config.actor_rollout_ref.model.lora_rank for one in (trainer, member)]
    assert ranks == [0, 4 if "+verl_ext.models.small.model.lora_rank=4" in overrides else 0]


# ---- two ranks -------------------------------------------------------------------------------------------------------

SHARES = {"uneven": 5, "few": 1, "none": 0}
"""Of 16 rows those of `small`; on two ranks one has more rows of a model than the other, or none."""
COLUMNS = (
    "prompts",
    "responses",
    "input_ids",
    "position_ids",
    "response_mask",
    "loss_mask",
    "old_log_probs",
    "advantages",
)


class Dealt(Group):
    """A model's workers on some ranks: the rows of each update as they are dealt to them, with what they are told."""

    def __init__(self, store: Any, ranks: int) -> None:
        super().__init__(store)
        self._dispatch_info = {"actor": list(range(ranks))}

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        put_around(self.store, batch, {"log_probs": {}, "entropy": {}})  # zeros
        return batch

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        found = self.store.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=list(COLUMNS))
        real = [not tag.get("is_padding") for tag in batch.tags]
        self.updates.append(({name: list(found[name].unbind()) for name in COLUMNS}, dict(batch.extra_info), real))
        return {"metrics": {"mfu": 0.0, "grad_norm": 1.0}}


def put_tokens(store: Any, of_small: int) -> KVBatchMeta:
    """16 rows with tokens, of two prompts with four samples each."""
    rows = gradients.SPLIT
    column = lambda name: jagged([torch.tensor(row[name]) for row in rows])  # noqa: E731
    ids = [torch.tensor(row["prompt"] + row["response"]) for row in rows]
    ones = [torch.ones(len(row["response"]), dtype=torch.int64) for row in rows]
    fields = {
        "prompts": column("prompt"),
        "responses": column("response"),
        "input_ids": jagged(ids),
        "position_ids": jagged([torch.arange(len(one)) for one in ids]),
        "response_mask": jagged(ones),
        "loss_mask": jagged(ones).clone(),
        "rollout_log_probs": jagged([torch.full((len(one),), -3.6) for one in ones]),
        "rm_scores": jagged([float(number % 3 == 0) * one / len(one) for number, one in enumerate(ones)]),
    }
    every = range(len(rows))
    small = {(7 * number) % len(rows) for number in range(of_small)}
    said = [{"model": "small" if number in small else "policy", "agent_id": f"a{number % 2}"} for number in every]
    return put_fields(store, [row["key"] for row in rows], [{"seq_len": len(one)} for one in ids], fields, said)


def dealt(store: Any, mode: str, updates: int | None, of_small: int | None) -> dict[int, dict[str, Any]]:
    """What the workers of each model get of a batch, on one rank and on two; with all rows on one model if `of_small`
    is None."""
    given = [f"verl_ext.updates_per_batch={updates or 'null'}", "actor_rollout_ref.actor.ppo_mini_batch_size=1"]
    sums = [f"actor_rollout_ref.actor.loss_agg_mode={mode}"]
    trainer, found = trainer_of(store, "dr_mas", *given, *sums, *(() if of_small is None else TWO)), {}
    for ranks in (1, 2):
        for one in trainer._trainers().values():
            one.actor_rollout_wg = Dealt(store, ranks)
        step(trainer, store, put_tokens(store, of_small or 0))
        found[ranks] = {name: one.actor_rollout_wg.updates for name, one in trainer._trainers().items()}
    return found


@starts_ranks
def test_on_two_ranks_each_model_has_its_part_of_the_gradient_whatever_rows_it_has(store: Any, tmp_path: Path) -> None:
    """Cut by the trainers of both models, trained by verl's worker: with one rank, with two, and on one model."""
    cases = [
        *((mode, updates, share) for mode, updates in (("token-sum", None), ("token-sum", 2)) for share in SHARES),
        ("token-mean", 1, "uneven"),
        *(("token-sum", updates, None) for updates in (None, 2)),
    ]
    cuts: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    for mode, updates, share in cases:
        count = None if share is None else SHARES[share]
        for ranks, models in dealt(store, mode, updates, count).items():
            for model, found in models.items():
                own = (count or 0) if model == "small" else 16 - (count or 0)
                if not own:
                    assert found == []
                    continue
                ((columns_of, told, real),) = found
                assert sum(real) == own and len(real) % told["mini_batch_size"] == 0
                if ranks == 2:
                    of_ranks = [sum(real[: len(real) // 2]), sum(real[len(real) // 2 :])]
                    assert of_ranks[0] != of_ranks[1] or own % 2 == 0
                    assert (min(of_ranks) == 0) == (own == 1)
                cuts[ranks][f"{mode}/{updates}/{share}/{model}"] = (columns_of, told, mode)
    script, gradient = Path(models_process.__file__), {}
    for ranks, found in cuts.items():
        torch.save(found, tmp_path / "cuts.pt")
        run_ranks(script, tmp_path / "cuts.pt", tmp_path / "out.pt", world=ranks)
        by_update = torch.load(tmp_path / "out.pt", weights_only=False)
        for name, (_, told, _) in found.items():
            rows = len(found[name][0]["prompts"])
            assert len(by_update[name]) == rows // told["mini_batch_size"]
            gradient[ranks, name] = torch.stack(by_update[name]).sum(0)

    def same(one: torch.Tensor, two: torch.Tensor) -> bool:
        return float((one - two).norm()) <= 1e-5 * float(two.norm()) and float(two.norm()) > 1e-3

    for name in cuts[2]:
        assert same(gradient[2, name], gradient[1, name]), name
    for mode, updates, share in cases[:6]:
        parts = [gradient.get((2, f"{mode}/{updates}/{share}/{model}"), 0) for model in ("policy", "small")]
        assert same(sum(parts), gradient[1, f"{mode}/{updates}/None/policy"]), (updates, share)
