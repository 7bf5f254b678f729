# SPDX-License-Identifier: Apache-2.0
"""The teacher of ``hybrid_imitation`` in verl's engines, and what the launch refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import imitation_process as cases
import pytest
import torch
from hydra import compose, initialize_config_dir
from ranks import run_ranks, starts_ranks
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_ext.integration import checks, losses
from verl_ext.integration.config import HybridImitationPolicyLossConfig
from verl_ext.integration.engines import imitation, token_kl
from verl_ext.integration.engines.micro_batch import ONE_PASS
from verl_ext.integration.parts.update.pruning import Pruning
from verl_ext.integration.settings.options import OptionError
from verl_ext.recipes import recipe_root, verl_config_dir

LOSS = "actor_rollout_ref.actor.policy_loss"


@pytest.fixture(scope="module")
def found(model: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    teacher = model.parent / "teacher"
    generator = torch.Generator().manual_seed(5)
    made = AutoModelForCausalLM.from_pretrained(model)
    for parameter in made.parameters():
        parameter.data += 0.3 * parameter.data.std() * torch.randn(parameter.shape, generator=generator)
    made.save_pretrained(teacher)
    AutoTokenizer.from_pretrained(model).save_pretrained(teacher)
    out = model.parent / "imitation"
    run_ranks(Path(cases.__file__), model, teacher, out, world=1)
    return torch.load(f"{out}.0", weights_only=False)


@pytest.mark.seconds
@starts_ranks
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", ["cool", "rows"])
@pytest.mark.parametrize("teacher", cases.TEACHERS)
def test_gradient_in_the_engine_is_that_of_the_formula(
    found: dict[str, Any], layout: str, kind: str, teacher: str
) -> None:
    """Top tokens and whole vocabulary, of the reference and as verl's teacher sends them."""
    ours, plain = found[f"{layout}/{kind}/{teacher}"], found[f"plain/{kind}/{teacher}"]
    assert ours["grad"].keys() == plain["grad"].keys()
    for name, gradient in plain["grad"].items():
        torch.testing.assert_close(ours["grad"][name], gradient, atol=2e-5, rtol=2e-3)
    (mass,) = {
        round(float(torch.tensor(v).mean()), 3) for k, v in ours["metrics"].items() if k.endswith("teacher_mass")
    }
    assert mass == pytest.approx(1.0, abs=1e-3) if teacher in ("all", "full") else 0.05 < mass < 0.95


@pytest.fixture(scope="module")
def by_hand(model: Path) -> dict[str, list[torch.Tensor]]:
    """KL(sampler || trainer) of both networks' logits, by temperature, each row at its response tokens."""
    from transformers import AutoModelForCausalLM

    trainer, sampler = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (model, model.parent / "teacher")
    )
    out: dict[str, list[torch.Tensor]] = {"cool": [], "rows": []}
    for kind, rows in out.items():
        for number, ((prompt, _), row) in enumerate(zip(cases.LENGTHS, cases.rows(259), strict=True)):
            degree = cases.TEMPERATURES[kind][number] if kind == "rows" else cases.TEMPERATURES[kind]
            with torch.no_grad():
                q, p = (one(row["input_ids"][None]).logits[0, prompt - 1 : -1] / degree for one in (trainer, sampler))
            p, q = p.log_softmax(-1), q.log_softmax(-1)
            rows.append((p.exp() * (p - q)).sum(-1) * row["response_mask"] * int(number != cases.PADDING))
    return out


@starts_ranks
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("kind", ["cool", "rows"])
def test_divergence_of_the_sampler_in_the_engine(
    found: dict[str, Any], by_hand: dict[str, list[torch.Tensor]], layout: str, kind: str
) -> None:
    """Exact is the sum over the vocabulary, top_k is never above it and equal to it with all tokens."""
    exact = torch.cat(by_hand[kind])
    lower = []
    for top_k in (None, 1, cases.TOP_K, 259):
        rows = found["token_kl"][f"{layout}/{kind}/{top_k}"]
        for (prompt, _), row in zip(cases.LENGTHS, rows, strict=True):
            assert not row[: prompt - 1].any() and row[-1] == 0
        lower.append(torch.cat([row[p - 1 : -1] for (p, _), row in zip(cases.LENGTHS, rows, strict=True)]).double())
    whole, one, some, every = lower
    torch.testing.assert_close(whole, exact, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(every, exact, atol=1e-5, rtol=1e-4)
    assert bool((one <= some + 1e-6).all()) and bool((some <= exact + 1e-6).all())
    assert float(exact.max()) > 0.01 and float(some.sum()) < 0.9 * float(exact.sum())


@starts_ranks
def test_distributions_of_other_tokens_are_refused(found: dict[str, Any]) -> None:
    assert "distributions of the sampler. An agent loop has to return the extra_fields" in found["token_kl"]["short"]
    assert "are not those of the sequence's tokens" in found["token_kl"]["other"]


@pytest.mark.parametrize("temperature", [0.7, torch.tensor([0.7, 1.3]), 1.0])
@pytest.mark.parametrize("top_k", [None, 20])
def test_the_temperature_divides_in_float32(temperature: Any, top_k: int | None) -> None:
    """A sampler with the trainer's very logits, which are bfloat16: nothing is between them but the rounding."""
    vocabulary, prompt, lengths = 2000, 2, (1100, 200)
    generator = torch.Generator().manual_seed(0)

    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    ids = [torch.randint(vocabulary, (prompt + length,), generator=generator) for length in lengths]
    logits = [(torch.randn(len(row), vocabulary, generator=generator) * 3 + 25).bfloat16() for row in ids]
    degrees = torch.as_tensor(temperature).expand(2)
    sampler = [(x[prompt - 1 : -1].float() / degree).log_softmax(-1) for x, degree in zip(logits, degrees, strict=True)]
    label = [x.gather(-1, row[prompt:, None])[:, 0] for x, row in zip(sampler, ids, strict=True)]
    said = [{token_kl.LOG_PROBS: x.numpy()} for x in sampler]
    if top_k is not None:
        few = [x.topk(top_k) for x in sampler]
        said = [{token_kl.LOG_PROBS: x.values.numpy(), token_kl.IDS: x.indices.int().numpy()} for x in few]
    columns = {
        "input_ids": ids,
        "prompts": [row[:prompt] for row in ids],
        "responses": [row[prompt:] for row in ids],
        "response_mask": [torch.ones(length, dtype=torch.int64) for length in lengths],
        "rollout_log_probs": label,
    }
    micro_batch = TensorDict({name: jagged(rows) for name, rows in columns.items()}, batch_size=2)
    tu.assign_non_tensor(micro_batch, use_remove_padding=True)
    tu.assign_non_tensor_stack(micro_batch, "extra_fields", said)
    if isinstance(temperature, torch.Tensor):
        micro_batch["temperature"] = temperature
    else:
        tu.assign_non_tensor(micro_batch, temperature=temperature)
    at = imitation.Positions(SimpleNamespace(logits=torch.cat(logits)[None]), micro_batch)
    assert token_kl.token_kl(at).max() < 1e-6
    torch.testing.assert_close(at.logits().float().log_softmax(-1), torch.cat(sampler))
    if top_k is not None:
        found = imitation.teacher_columns(at, top_k)["teacher_logprobs"].values()[at.chosen]
        torch.testing.assert_close(found, torch.cat([x.values for x in few]))


def config(*overrides: str, recipe: str = "[grpo,hybrid_imitation]") -> Any:
    search = f"hydra.searchpath=[file://{recipe_root()}]"
    more = ["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.name=vllm", *overrides]
    with initialize_config_dir(version_base=None, config_dir=str(verl_config_dir())):
        made = compose("ppo_trainer", overrides=[search, f"+recipe={recipe}", *more])
    checks.complete(made)
    return made


def test_recipe_passes_and_asks_for_the_reference() -> None:
    made = config()
    assert checks.check(made) == []
    assert made.actor_rollout_ref.actor.use_kl_loss is True and made.actor_rollout_ref.actor.kl_loss_coef == 0.0


@pytest.mark.parametrize("recipe", ["[grpo,hybrid_imitation]", "[grpo,trm,cpu]", "[otb,hybrid_imitation]"])
def test_one_pass_makes_all_log_probabilities_where_one_of_them_needs_it(recipe: str) -> None:
    """Also where auto leaves them to verl, on CUDA: the old policy's must be comparable with the update's."""
    exact = ["algorithm.trm.divergence=exact", "actor_rollout_ref.rollout.name=embedded"] if "trm" in recipe else []
    part = Pruning(config(*exact, recipe=recipe))
    assert [part.info(what)[ONE_PASS] for what in ("old", "reference", "update")] == ["on"] * 3
    without = config(*exact, "++verl_ext.one_pass=false", recipe=recipe)
    with pytest.raises(OptionError, match=r"(exact|hybrid_imitation) needs the pass over the logits, but verl_ext\.on"):
        checks.check(without)


@pytest.mark.seconds
def test_verls_teacher_is_asked_for_its_top_tokens_and_its_own_loss_counts_nothing() -> None:
    teacher = ["distillation.enabled=true", "actor_rollout_ref.actor.use_kl_loss=false"]
    made = config(*teacher, f"{LOSS}.teacher_topk=16")
    checks.check(made)
    of_verl = made.distillation.distillation_loss
    assert (of_verl.loss_mode, of_verl.topk, of_verl.distillation_loss_coef) == ("forward_kl_topk", 16, 0.0)
    assert of_verl.use_task_rewards is True and of_verl.use_policy_gradient is False
    with pytest.raises(OptionError, match=r"sends its top tokens alone\. Set .*teacher_topk to a number"):
        checks.check(config(*teacher, f"{LOSS}.teacher_topk=null"))
    for engine in ("embedded", "sglang"):
        with pytest.raises(OptionError, match=r"needs vllm: SGLang .*teacher_models\.\*\.inference\.name=vllm"):
            checks.check(config(*teacher, f"distillation.teacher_models.teacher_model.inference.name={engine}"))
    several = "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_multi_turn"
    with pytest.raises(OptionError, match="last sequence of a trajectory alone.*verl_ext_multi_turn makes several"):
        checks.check(config(*teacher, f"{LOSS}.teacher_topk=16", several))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor_rollout_ref.actor.use_kl_loss=false"], r"frozen reference.*use_kl_loss=true"),
        ([f"{LOSS}.teacher_topk=null", "actor_rollout_ref.model.lora_rank=8"], r"whole vocabulary.*teacher_topk"),
        ([f"{LOSS}.teacher_topk=null", "trainer.v1.trainer_mode=separate_async"], r"whole vocabulary.*teacher_topk"),
        (["actor_rollout_ref.model.use_fused_kernels=true"], r"use_fused_kernels=false"),
        (["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"], r"ulysses_sequence_parallel_size=1"),
        ([f"{LOSS}.teacher_topk=1"], r"teacher_topk is 1; give a whole number of at least 2, or null"),
        ([f"{LOSS}.kl_direction=both"], r"kl_direction is 'both'; choose one of 'reverse', 'forward'"),
        ([f"{LOSS}.future_kl=1"], r"future_kl is 1; give true or false"),
    ],
)
def test_what_is_not_supported_is_refused_at_launch(overrides: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        checks.check(config(*overrides))


TEAM = (
    "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "+verl_ext.orchestra.name=solver_verifier",
    "+verl_ext.orchestra.agents.verifier.model=small",
    "+verl_ext.models.small.actor.optim.lr=3e-6",
)
SMALL = "+verl_ext.models.small.actor.policy_loss"


@pytest.mark.parametrize(
    ("run", "own", "message"),
    [
        (
            [],
            ["kl_direction=forward"],
            r"small\.actor\.policy_loss\.kl_direction is forward and .* is reverse",
        ),
        ([f"{LOSS}.teacher_topk=16"], ["teacher_topk=8"], r"small\.actor\.policy_loss\.teacher_topk is 8 and .* is 16"),
        ([f"{LOSS}.teacher_topk=16"], ["teacher_topk=null"], r"teacher_topk is null and .*teacher_topk is 16"),
        ([], ["loss_mode=vanilla"], r"small\.actor\.policy_loss\.loss_mode is vanilla and .*mode is hybrid_imitation"),
        (
            ["verl_ext.losses.hybrid_imitation=false", f"{LOSS}.loss_mode=vanilla"],
            ["loss_mode=hybrid_imitation"],
            r"mode is hybrid_imitation and .* is vanilla",
        ),
    ],
)
def test_models_that_imitate_in_other_ways_are_refused(run: list[str], own: list[str], message: str) -> None:
    """The engines are told the policy's values: those of the model were taken and had no effect, or failed later."""
    given = [*TEAM, *run, *(f"{SMALL}.{one}" for one in own)]
    with pytest.raises(OptionError, match=rf"hybrid_imitation: .*{message}.*Leave it out of the model, or set {LOSS}"):
        checks.check(config(*given, recipe="[dr_mas,hybrid_imitation]"))


def test_models_that_imitate_alike_pass_and_one_that_is_not_trained_does_not_count() -> None:
    for more in ([], ["+verl_ext.models.small.trained=false", f"{SMALL}.kl_direction=forward"]):
        checks.check(config(*TEAM, *more, recipe="[dr_mas,hybrid_imitation]"))


def test_pruned_policy_has_no_teacher() -> None:
    with pytest.raises(OptionError, match="no divergence from a teacher"):
        checks.check(config(recipe="[grpo,hybrid_imitation,dvp]"))


def test_loss_without_the_engine_says_so() -> None:
    from verl.workers.config import FSDPActorConfig

    options = HybridImitationPolicyLossConfig(loss_mode="hybrid_imitation")
    actor = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=options)
    one = torch.ones(1, 1)
    with pytest.raises(RuntimeError, match="has computed no divergence"):
        losses.hybrid_imitation(one, one, one, one, config=actor)
