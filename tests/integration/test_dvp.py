# SPDX-License-Identifier: Apache-2.0
"""The ``dvp`` node: one key for trainer and sampler, what it refuses, and what becomes of tokens outside the set."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import math
import pickle
import types
from pathlib import Path
from typing import Any

import copies
import numpy as np
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from ray import cloudpickle
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from verl_ext.cpu.engine.sampling import BatchSampling, SamplingParams, sample
from verl_ext.integration import checks, dvp
from verl_ext.integration.compat import wraps
from verl_ext.integration.engines import engine
from verl_ext.integration.parts.update.pruning import Outside, PrunedUpdates, Pruning, hide_outside
from verl_ext.integration.settings.options import OptionError
from verl_ext.recipes import recipe_root, verl_config_dir

RHO = 6.144e-6
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def run_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the launch callback leaves the environment of every process."""
    monkeypatch.setenv(wraps.STRICT, "1")


@functools.cache
def composed(recipe: str) -> Any:
    with initialize_config_dir(version_base=None, config_dir=str(verl_config_dir())):
        return compose("ppo_trainer", overrides=[f"hydra.searchpath=[file://{recipe_root()}]", f"+recipe={recipe}"])


def config(*overrides: str, recipe: str = "[dvp,grpo]", rollout: str = "vllm") -> Any:
    """verl's config with the recipe; Hydra composes each once, the overrides are set on a copy."""
    cfg = copy.deepcopy(composed(recipe))
    for override in (f"{ROLLOUT}.name={rollout}", f"{ROLLOUT}.n=4", *overrides):
        key, _, value = override.lstrip("+").partition("=")
        OmegaConf.update(cfg, key, yaml.safe_load(value), force_add=True)
    return cfg


# ---- the node ----------------------------------------------------------------------------------------------------


def test_recipe_says_what_was_published() -> None:
    cfg = config()
    assert dvp.options(cfg) == dvp.DvpOptions(rho=RHO, prune_reference=True)
    assert RHO == pytest.approx(math.exp(-12), rel=1e-4)
    assert cfg.algorithm.rollout_correction.rollout_is == "token"
    assert cfg.algorithm.rollout_correction.rollout_is_threshold == 2.0
    assert checks.check(cfg) == []
    assert dvp.options(config("dvp.rho=1.0e-5")).rho == 1e-5  # type: ignore[union-attr]


@pytest.mark.seconds
@pytest.mark.parametrize("rollout", dvp.ROLLOUTS)
@pytest.mark.parametrize("recipe", ["[dvp,grpo]", "[dvp,otb,kpo]", "[dr_mas,kpo,dvp]", "[dvp,trloo,cpu]"])
def test_recipe_mixes(recipe: str, rollout: str) -> None:
    team = "actor_rollout_ref.rollout.agent.default_agent_loop=verl_ext_orchestra"
    assert checks.check(config(team, recipe=recipe, rollout=rollout)) == []


def test_null_is_off() -> None:
    cfg = config("dvp.rho=null", "actor_rollout_ref.rollout.top_p=0.9")
    assert dvp.options(cfg) is None and checks.check(cfg) == []
    assert dvp.options(OmegaConf.create({})) is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dvp.rho=0", r"dvp\.rho is 0; it is a fraction of the largest probability, in \(0, 1\]"),
        ("dvp.rho=1.5", r"dvp\.rho is 1\.5"),
        ("dvp.rho=-0.1", r"dvp\.rho is -0\.1"),
        ("dvp.rho=tiny", r"dvp\.rho is 'tiny'; give a number"),
        ("dvp.rho=.nan", r"dvp\.rho is "),
        (
            "+dvp.roh=0.1",
            r"dvp\.roh is not an option of dvp\. Did you mean 'rho'\? Known options: rho, prune_reference",
        ),
        ("dvp.prune_reference=1", r"dvp\.prune_reference is 1; give true or false"),
        ("verl_ext.one_pass=perhaps", r"verl_ext\.one_pass is 'perhaps'; choose one of auto, true, false"),
        ("verl_ext.mismatch_metrics=3", r"verl_ext\.mismatch_metrics is 3; give true or false"),
        ("verl_ext.one_pass=false", r"dvp\.rho=6\.144e-06 needs the pass .*verl_ext\.one_pass=false"),
        ("trainer.use_v1=false", r"trainer\.use_v1=false, but every recipe"),
        ("actor_rollout_ref.model.use_fused_kernels=true", r"use_fused_kernels=false"),
        ("actor_rollout_ref.actor.strategy=megatron", r"actor\.strategy=megatron .*Set .* to fsdp or fsdp2"),
        ("distillation.enabled=true", r"distillation\.enabled=true"),
        ("actor_rollout_ref.rollout.calculate_log_probs=false", r"calculate_log_probs=false\. Set it to true"),
        ("actor_rollout_ref.rollout.name=trtllm", r"rollout\.name=trtllm .*Choose one of vllm, sglang, embedded"),
        ("actor_rollout_ref.rollout.temperature=0", r"rollout\.temperature=0\b"),
    ],
)
def test_bad_settings_are_named(override: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        checks.check(config(override))


def test_reference_on_another_engine() -> None:
    overrides = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.ref.strategy=megatron"]
    with pytest.raises(OptionError, match=r"ref\.strategy=megatron .*or dvp\.prune_reference=false"):
        checks.check(config(*overrides))
    assert checks.check(config(*overrides, "dvp.prune_reference=false")) == []


@pytest.mark.parametrize(
    ("rollout", "override", "message"),
    [
        ("vllm", f"{ROLLOUT}.top_p=0.9", r"rollout\.top_p=0\.9, but with dvp\.rho=6\.144e-06 .* needs 1\.0"),
        ("vllm", f"{ROLLOUT}.top_k=50", r"rollout\.top_k=50, .* needs -1"),
        ("vllm", f"{ROLLOUT}.val_kwargs.top_p=0.7", r"val_kwargs\.top_p=0\.7"),
        ("vllm", f"{ROLLOUT}.val_kwargs.top_k=20", r"val_kwargs\.top_k=20"),
        ("vllm", f"{ROLLOUT}.val_kwargs.temperature=0.6", r"val_kwargs\.temperature=0\.6, .* needs 1\.0"),
        ("vllm", f"{ROLLOUT}.logprobs_mode=raw_logprobs", r"logprobs_mode=raw_logprobs, .* needs processed_logprobs"),
        ("embedded", f"{ROLLOUT}.logprobs_mode=policy_logprobs", r"logprobs_mode=policy_logprobs"),
        ("vllm", f"+{ROLLOUT}.min_p=0.1", r"rollout\.min_p=0\.1, but with dvp\.rho=6\.144e-06 .* needs 6\.144e-06"),
        ("vllm", f"+{ROLLOUT}.val_kwargs.min_p=0.1", r"val_kwargs\.min_p=0\.1"),
        ("vllm", f"+{ROLLOUT}.engine_kwargs.vllm.logprobs_mode=raw_logits", r"vllm\.logprobs_mode=raw_logits"),
        ("vllm", f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config={{model: m}}", r"vllm\.speculative_config="),
        (
            "vllm",
            f"+{ROLLOUT}.engine_kwargs.vllm.override_generation_config='{{\"min_p\": 0.2}}'",
            r"override_generation_config\.min_p=0\.2, but with dvp\.rho=6\.144e-06",
        ),
        (
            "sglang",
            f"+{ROLLOUT}.engine_kwargs.sglang.preferred_sampling_params='{{\"min_p\": 0.2}}'",
            r"preferred_sampling_params\.min_p=0\.2",
        ),
        ("sglang", f"+{ROLLOUT}.engine_kwargs.sglang.speculative_algorithm=EAGLE", r"speculative_algorithm=EAGLE"),
        (
            "vllm",
            f"+{ROLLOUT}.engine_kwargs.vllm.override_generation_config={{min_tokens: 3}}",
            r"override_generation_config\.min_tokens=3, .* needs None",
        ),
        ("embedded", f"+{ROLLOUT}.engine_kwargs.embedded.min_p=0.3", r"embedded\.min_p=0\.3"),
        ("embedded", f"+{ROLLOUT}.engine_kwargs.embedded.logprobs_mode=raw_logprobs", r"embedded\.logprobs_mode=raw"),
        ("sglang", "algorithm.rollout_correction.bypass_mode=true", r"sglang reports log-probabilities of the full"),
        ("vllm", f"+{ROLLOUT}.engine_kwargs.vllm.override_generation_config='no json'", r"which is not JSON"),
    ],
)
def test_two_sides_that_differ_are_refused(rollout: str, override: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        checks.check(config(override, rollout=rollout))


@pytest.mark.parametrize(
    "override",
    [
        f"{ROLLOUT}.val_kwargs.temperature=1.0",
        f"{ROLLOUT}.top_k=0",
        "algorithm.rollout_correction.bypass_mode=true",
        f"+{ROLLOUT}.engine_kwargs.vllm.logprobs_mode=processed_logprobs",
    ],
)
def test_two_sides_that_agree(override: str) -> None:
    assert checks.check(config(override)) == []


def test_what_is_left_out_is_warned_about() -> None:
    (warning,) = checks.check(config("algorithm.rollout_correction.rollout_is=null"))
    assert "rollout_is=null" in warning
    (warning,) = checks.check(config(recipe="dvp"))
    assert "gae, needs a critic" in warning and "+recipe=[dvp,grpo]" in warning


def test_sglangs_own_switch_for_unscaled_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "true")
    assert checks.check(config(rollout="sglang")) == []
    with pytest.raises(OptionError, match="SGLANG_RETURN_ORIGINAL_LOGPROB=true"):
        checks.check(config(f"{ROLLOUT}.temperature=0.7", rollout="sglang"))


def test_mismatch_metrics_without_pruning_are_one_key() -> None:
    assert dvp.mismatch_wanted(config(recipe="grpo")) is False
    assert dvp.mismatch_wanted(config("+verl_ext.mismatch_metrics=true", recipe="grpo")) is True


def test_a_run_without_the_launch_callback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(wraps.STRICT)
    with pytest.raises(OptionError, match=r"not started with a recipe\. Use \+recipe=dvp"):
        Pruning(config())
    monkeypatch.setenv(wraps.STRICT, "1")
    assert Pruning(config()).rho == RHO


# ---- the sampler -------------------------------------------------------------------------------------------------


class Server:
    """What is at the other end of verl's client: keeps the arguments of each request."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.generate = types.SimpleNamespace(remote=self._generate)

    async def _generate(self, **given: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.requests.append(copy.deepcopy(given))
        return TokenOutput(token_ids=[1], log_probs=[0.0], extra_fields={"global_steps": 3}, stop_reason="completed")


def client(cls: type, cfg: Any, server: Server) -> Any:
    made = cls(config=cfg)

    async def acquire(request_id: str, **extra: Any) -> Any:
        return "server", server

    made._acquire_server, made._release_server = acquire, lambda *a, **k: None
    return made


def ask(made: Any, **params: Any) -> None:
    asyncio.run(made.generate("r", prompt_ids=[1, 2], sampling_params=params))


TRAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@pytest.mark.seconds
@pytest.mark.parametrize("cls", [LLMServerClient, FullyAsyncLLMServerClient])
@pytest.mark.parametrize("rollout", dvp.ROLLOUTS)
def test_min_p_reaches_every_request(cls: type, rollout: str) -> None:
    """Through verl's own clients, in training and validation, for loops that pass their parameters on or cut them."""
    cfg, server = config(rollout=rollout), Server()
    plain = client(cls, cfg, server)
    made = Pruning(cfg).client(plain)
    assert made is plain and isinstance(made, cls)
    given = dict(TRAIN)
    asyncio.run(made.generate("r", prompt_ids=[1, 2], sampling_params=given))
    assert given == TRAIN  # the loop's own dict is left as it was
    ask(made, temperature=0, top_p=1.0, top_k=-1, logprobs=True)
    ask(made, max_tokens=4)
    ask(made, **TRAIN, min_p=RHO, logit_bias=None, min_tokens=0, bad_words=[])
    assert [request["sampling_params"]["min_p"] for request in server.requests] == [RHO] * 4
    first = server.requests[0]["sampling_params"]
    assert {name: first[name] for name in TRAIN} == TRAIN
    assert server.requests[2]["sampling_params"]["max_tokens"] == 4


@pytest.mark.parametrize("cls", [LLMServerClient, FullyAsyncLLMServerClient])
@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_client_travels_to_the_agent_loops(cls: type, dumps: Any) -> None:
    made = Pruning(config()).client(cls(config=OmegaConf.create({"a": 1})))
    again = pickle.loads(dumps(made))
    assert type(again) is type(made) and again._verl_ext_sampler.rho == RHO and again.config == {"a": 1}
    assert dvp.guard(again, made._verl_ext_sampler) is again  # once


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"temperature": 0.5},
            r"asks the sampler for temperature=0\.5, but with dvp\.rho=6\.144e-06 .*=1\.0",
        ),
        ({"top_p": 0.9}, r"top_p=0\.9"),
        ({"top_k": 5}, r"top_k=5"),
        ({"min_p": 0.2}, r"min_p=0\.2, .*min_p=6\.144e-06"),
        ({"repetition_penalty": 1.1}, r"repetition_penalty=1\.1"),
        ({"logit_bias": {"5": 2.0}}, r"logit_bias=\{'5': 2\.0\}, .* sampled with logit_bias=None"),
        ({"allowed_token_ids": [1, 2]}, r"allowed_token_ids=\[1, 2\]"),
        ({"bad_words": ["x"]}, r"bad_words=\['x'\]"),
        ({"min_tokens": 3}, r"min_tokens=3"),
    ],
)
def test_a_loop_that_samples_from_another_distribution_is_refused(change: dict[str, Any], message: str) -> None:
    cfg, server = config(), Server()
    made = Pruning(cfg).client(client(LLMServerClient, cfg, server))
    with pytest.raises(OptionError, match=message):
        ask(made, **{**TRAIN, **change})
    assert server.requests == []


def test_without_dvp_the_client_is_verls() -> None:
    cfg = config(recipe="grpo")
    made = LLMServerClient(config=cfg)
    assert Pruning(cfg).client(made) is made and type(made) is LLMServerClient


def test_embedded_server_takes_what_the_client_sends() -> None:
    cfg, server = config(rollout="embedded"), Server()
    ask(Pruning(cfg).client(client(LLMServerClient, cfg, server)), **TRAIN)
    params = SamplingParams.from_dict(server.requests[0]["sampling_params"], default_max_tokens=4, max_tokens_limit=8)
    assert params.min_p == RHO and params.temperature == 1.0 and params.top_p == 1.0 and params.top_k == -1


@settings(max_examples=20)
@given(st.floats(1e-6, 1.0), st.just(1.0) | st.floats(0.5, 2.0), st.integers(0, 10**9))
@example(6.144e-6, 0.7, 0)
@example(1e-3, 1.3, 0)
@example(0.05, 1.0, 0)
@example(1.0, 1.0, 0)
def test_embedded_sampler_and_trainer_have_the_same_set(rho: float, temperature: float, seed: int) -> None:
    """On equal logits: same tokens (also at the very edge), same renormalised log-probabilities, in float32."""
    from verl_ext.methods.logits.logits_pass import token_statistics

    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(64, 100, generator=generator)
    # tokens at the edge of the set, above and below by one rounding
    edge = logits.max(-1).values + temperature * math.log(rho)
    logits[:, 0], logits[:, 1], logits[:, 2] = edge, edge.nextafter(edge - 1), edge.nextafter(edge + 1)
    params = [SamplingParams(max_tokens=1, temperature=temperature, min_p=rho)] * 64
    batch = BatchSampling(params, 100, logits.device)
    labels = torch.arange(100).repeat_interleave(64)
    found = token_statistics(logits.repeat(100, 1), labels, temperature=temperature, rho=rho)
    assert found.in_set is not None and found.set_size is not None
    members = found.in_set.view(100, 64).T
    assert torch.equal(members.sum(-1), found.set_size[:64])
    uniforms = torch.rand(50, 64, generator=generator, dtype=torch.float64)
    drawn = [sample(logits, logits, batch, row.tolist()) for row in uniforms]
    tokens, of_all = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    log_probs = of_all.gather(-1, tokens[:, None])[:, 0]
    found = token_statistics(logits.repeat(50, 1), tokens, temperature=temperature, rho=rho)
    assert found.in_set is not None and bool(found.in_set.all())
    torch.testing.assert_close(found.log_probs, log_probs, rtol=1e-6, atol=2e-6)
    assert bool(members[torch.arange(64).repeat(50), tokens].all())
    # the sampler's own set, token by token
    from verl_ext.cpu.engine.sampling import _truncate

    kept = torch.isfinite(_truncate(logits if temperature == 1.0 else logits / temperature, batch))
    assert torch.equal(kept, members)
    assert int(members.sum()) < members.numel()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_embedded_engine_samples_inside_the_trainers_set(temperature: float) -> None:
    """Rollouts of a model, scored by one forward pass over the whole sequences as the trainer does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from verl_ext.cpu.engine.engine import GenerationEngine, Request
    from verl_ext.methods.logits.logits_pass import token_statistics

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    ).eval()
    model.lm_head.weight.data *= 8.0
    made = GenerationEngine(model, seed=1)
    params = SamplingParams(max_tokens=12, temperature=temperature, min_p=0.2, logprobs=True, ignore_eos=True)
    requests = [made.submit(Request([1 + i % 5, 7, 9], params, request_id=str(i))) for i in range(40)]
    while made.has_work():
        made.step()
    inside, size = [], []
    for request in requests:
        ids = torch.tensor([request.prompt_ids + request.token_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
        found = token_statistics(logits, torch.tensor(request.token_ids), temperature=temperature, rho=0.2)
        inside.append(found.in_set)
        size.append(found.set_size)
        torch.testing.assert_close(found.log_probs, torch.tensor(request.logprobs), rtol=0, atol=1e-5)
    assert bool(torch.cat(inside).all())
    assert 1 < float(torch.cat(size).double().mean()) < 60  # of 97: the pruning bites


# ---- verl's servers, which are imported without their engines ---------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rollout", ["vllm", "sglang"])
def test_what_reaches_the_engine(rollout: str) -> None:
    """The last of verl's code before vLLM and SGLang: engine arguments and sampling parameters, as they leave it."""
    cfg, end = config(rollout=rollout), Server()
    ask(Pruning(cfg).client(client(LLMServerClient, cfg, end)), **TRAIN)
    node = OmegaConf.to_container(cfg.actor_rollout_ref.rollout, resolve=True)
    boundary, asked = Path(__file__).parent / "server_boundary.py", end.requests[0]["sampling_params"]
    done = copies.python(boundary, rollout, json.dumps(node), json.dumps(asked), timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    request = found["request"]
    assert request["min_p"] == RHO
    assert request["temperature"] == 1.0 and request["top_p"] == 1.0 and request["top_k"] == -1
    if rollout == "vllm":
        assert found["engine"]["logprobs_mode"] == "processed_logprobs"
        assert request["logprobs"] == 0  # that of the sampled token
        assert "speculative_config" not in found["engine"]
    else:
        assert found["return_logprob"] is True
        assert "speculative_algorithm" not in found["engine"]


# ---- tokens outside the trainer's set -----------------------------------------------------------------------------


def reported(**changed: Any) -> dict[str, torch.Tensor]:
    """Columns after the old-log-prob pass: two rows of 4 and 3 model tokens; one token of each is outside."""
    columns = {
        "response_mask": torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 0, 0]]),
        "old_log_probs": torch.tensor([[-0.1, -1.0, 0.0, -3.0, -15.0], [-0.2, -20.0, -2.0, 0.0, 0.0]]),
        "rollout_log_probs": torch.tensor([[-0.1, -1.1, 0.0, -3.4, -9.0], [-0.2, -9.0, -2.0, 0.0, 0.0]]),
        engine.IN_SET: torch.tensor([[1.0, 1, 0, 1, 0], [1, 0, 1, 0, 0]]),
        engine.KEPT_MASS: torch.tensor([[0.5, 0.9, 0, 0.8, 0.7], [1.0, 0.9, 0.9, 0, 0]]),
        engine.SET_SIZE: torch.tensor([[2.0, 3, 0, 5, 7], [1, 2, 4, 0, 0]]),
    }
    return {**columns, **changed}


def test_sampled_tokens_outside_the_set_leave_the_batch_and_are_reported() -> None:
    pruning = Pruning(config())
    changed, metrics = pruning._after(reported(), ["a_0_0", "b_0_0"]), pruning.metrics
    assert changed["response_mask"].tolist() == [[1, 1, 0, 1, 0], [1, 0, 1, 0, 0]] and set(changed) == {"response_mask"}
    assert metrics["dvp/out_of_set_fraction"] == pytest.approx(2 / 7)
    # of the first row's four tokens the last quarter is outside; of the second's three the second (places 0, 1, 2 of 3)
    quarters = [metrics[f"dvp/out_of_set_quarter_{k}"] for k in (1, 2, 3, 4)]
    assert quarters == pytest.approx([0.0, 0.5, 0.0, 1.0])
    assert metrics["dvp/set_size/mean"] == pytest.approx(24 / 7) and metrics["dvp/set_size/max"] == 7
    assert metrics["dvp/kept_mass/mean"] == pytest.approx(5.7 / 7) and metrics["dvp/kept_mass/min"] == 0.5
    assert metrics["mismatch/max"] == pytest.approx(0.4) and metrics["mismatch/mean"] == pytest.approx(0.5 / 5)
    # unpruned: all model tokens, the trainer's log-probability without renormalisation
    plain = [-0.1 + math.log(0.5), -1 + math.log(0.9), -3 + math.log(0.8), -15 + math.log(0.7), -0.2]
    plain += [-20 + math.log(0.9), -2 + math.log(0.9)]
    theirs = [-0.1, -1.1, -3.4, -9.0, -0.2, -9.0, -2.0]
    wanted = [abs(p - t) for p, t in zip(plain, theirs, strict=True)]
    assert metrics["mismatch_unpruned/max"] == pytest.approx(max(wanted), rel=1e-5)
    assert metrics["mismatch_unpruned/mean"] == pytest.approx(sum(wanted) / 7, rel=1e-5)
    assert metrics["mismatch_unpruned/p_0_1e-06/count"] == 2
    assert pruning.outside is not None and pruning.outside.tokens.sum() == 2


def test_sglang_log_probs_are_renormalised_on_arrival() -> None:
    changed = Pruning(config(rollout="sglang"))._after(reported(), ["a_0_0", "b_0_0"])
    expected = (
        reported()["rollout_log_probs"]
        - torch.where(reported()["response_mask"].bool(), reported()[engine.KEPT_MASS], 1.0).log()
    )
    assert torch.equal(changed["rollout_log_probs"], expected)
    assert torch.isfinite(changed["rollout_log_probs"]).all() and changed["rollout_log_probs"][0, 2] == 0


def test_nothing_outside_changes_nothing() -> None:
    pruning = Pruning(config())
    inside = reported()
    inside[engine.IN_SET] = torch.ones(2, 5)
    assert pruning._after(inside, ["a_0_0", "b_0_0"]) == {} and pruning.outside is None
    assert pruning.metrics["dvp/out_of_set_fraction"] == 0.0
    from verl import DataProto

    data = DataProto.from_dict(tensors={"response_mask": torch.ones(2, 5)})
    assert pruning.show_outside(data, ["a_0_0", "b_0_0"]) is None


def test_mismatch_without_pruning() -> None:
    pruning = Pruning(config("+verl_ext.mismatch_metrics=true", recipe="grpo"))
    metrics = pruning.metrics
    plain = {name: value for name, value in reported().items() if not name.startswith("dvp_")}
    assert pruning._after(plain, ["a_0_0", "b_0_0"]) == {}
    assert metrics["mismatch/max"] == pytest.approx(11.0)
    assert metrics["mismatch/p_0.1_0.5/count"] == 2 and metrics["mismatch/p_0.1_0.5/mean"] == pytest.approx(0.05)
    assert not any(name.startswith(("dvp/", "mismatch_unpruned")) for name in metrics)


def test_bins_of_the_mismatch() -> None:
    """Each bin counts the tokens whose trainer probability lies in it; edges belong to the bin above."""
    probabilities = torch.tensor([[1.0, 0.9, 0.5, 0.1, 0.05, 1e-2, 5e-3, 1e-7]], dtype=torch.float64)
    metrics = dvp.mismatch_metrics(probabilities.log(), probabilities.log() - 0.25, torch.ones(1, 8))
    counts = {name: value for name, value in metrics.items() if name.endswith("/count")}
    assert counts == {
        "mismatch/p_0.9_1/count": 2,
        "mismatch/p_0.5_0.9/count": 1,
        "mismatch/p_0.1_0.5/count": 1,
        "mismatch/p_0.01_0.1/count": 2,
        "mismatch/p_0.001_0.01/count": 1,
        "mismatch/p_0_1e-06/count": 1,
    }
    assert metrics["mismatch/mean"] == pytest.approx(0.25)
    assert dvp.mismatch_metrics(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2)) == {}


def advantages(name: str, mask: torch.Tensor, pruning: Pruning | None) -> Any:
    """verl's advantage computation on two samples of a prompt, with the tokens of `pruning` shown and hidden again."""
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    rewards = torch.zeros(2, 5)
    rewards[0, 4], rewards[1, 2] = 1.0, 0.25  # at the last token of each row
    data = DataProto.from_dict(
        tensors={
            "token_level_rewards": rewards,
            "token_level_scores": rewards,
            "response_mask": mask,
            "old_log_probs": torch.full((2, 5), -1.0),
            "sum_pi_squared": torch.full((2, 5), 0.4),
        },
        non_tensors={"uid": np.array(["u", "u"], dtype=object)},
    )
    keys = ["u_1_0", "u_0_0"]  # another order than when the tokens were found
    shown = None if pruning is None else pruning.show_outside(data, keys)
    cfg = OmegaConf.create({"gamma": 1.0, "norm_adv_by_std_in_grpo": True})
    data = compute_advantage_for_multi_trajectories(data, keys, name, config=cfg, gamma=1.0, lam=1.0)
    hide_outside(data, shown)
    return data


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus", "opo", "optimal_token_baseline"])
def test_estimators_see_the_rows_as_the_model_wrote_them(name: str) -> None:
    """A token that is kept out of the loss takes no reward with it, not even where it is the row's last."""
    written = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    outside = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 1, 0, 0]]).bool()
    trained = written * ~outside
    pruning = Pruning(config())
    pruning.outside = Outside(["u_0_0", "u_1_0"], outside[[1, 0]])
    found, plain = advantages(name, trained, pruning), advantages(name, written, None)
    assert torch.equal(found.batch["response_mask"], trained)
    assert (found.batch["advantages"][outside] == 0).all()
    kept = trained.bool()
    if name not in ("optimal_token_baseline", "reinforce_plus_plus"):
        assert torch.equal(found.batch["advantages"][kept], plain.batch["advantages"][kept])
    assert torch.equal(found.batch["returns"][kept], plain.batch["returns"][kept])
    assert found.batch["advantages"][kept].abs().sum() > 0


def test_rejected_rows_stay_rejected() -> None:
    from verl import DataProto

    pruning = Pruning(config())
    pruning.outside = Outside(["a_0_0", "b_0_0"], torch.tensor([[False, True], [False, True]]))
    data = DataProto.from_dict(tensors={"response_mask": torch.tensor([[0, 0], [1, 0]])})
    pruning.show_outside(data, ["a_0_0", "b_0_0"])
    assert data.batch["response_mask"].tolist() == [[0, 0], [1, 1]]


def test_an_engine_that_did_not_prune_is_not_believed() -> None:
    updates = PrunedUpdates(config())
    updates.after_update({engine.OUT_OF_SET_METRIC: 0.0})
    with pytest.raises(RuntimeError, match="the training engine has not pruned: the update reported no"):
        updates.after_update({"actor/grad_norm": 1.0})
