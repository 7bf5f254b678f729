# SPDX-License-Identifier: Apache-2.0
"""The embedded rollout server: gates, weight synchronisation, LoRA, and the way verl reaches it through Ray."""

from __future__ import annotations

import asyncio
import copy
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from own_ray import own_ray
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from verl.workers.rollout.replica import RolloutMode

from verl_ext.cpu.engine import replica as replica_module
from verl_ext.cpu.engine.replica import CancellingHandle, EmbeddedReplica, EmbeddedRollout
from verl_ext.cpu.engine.server import EmbeddedOptions, EmbeddedServer
from verl_ext.cpu.engine.weights import BucketWriter, WeightStore, clean_name, resolve_dtype

VOCAB = 48


def build_model(seed: int = 0, tie: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return build_model()


@pytest.fixture(scope="module")
def model_path(model, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return str(path)


def rollout_config(**changes) -> RolloutConfig:
    settings = dict(
        name="embedded",
        dtype="float32",
        prompt_length=32,
        response_length=24,
        tensor_model_parallel_size=1,
        max_num_seqs=64,
        seed=3,
    )
    return RolloutConfig(**{**settings, **changes})


def model_config(path: str) -> HFModelConfig:
    return HFModelConfig(path=path, load_tokenizer=False, override_config={"attn_implementation": "sdpa"})


def make_server(path: str, mode: RolloutMode = RolloutMode.HYBRID, **changes) -> EmbeddedServer:
    return EmbeddedServer(rollout_config(**changes), model_config(path), rollout_mode=mode)


async def push(server: EmbeddedServer, named, bucket_bytes: int = 1 << 20, **message) -> int:
    """Send weights to a local server the way EmbeddedRollout does; returns the number of buckets."""
    writer = BucketWriter(bucket_bytes, torch.float32)
    count = 0
    for name, tensor in named:
        for pieces, data in writer.add(name, tensor):
            await server.update_weights_bucket(pieces, data.copy(), first=count == 0, last=False, **message)
            count += 1
    pieces, data = writer.flush()
    await server.update_weights_bucket(pieces, data, first=count == 0, last=True, **message)
    return count + 1


def forward_logprobs(model, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        logp = (model(torch.tensor([prompt + tokens])).logits[0].float() / temperature).log_softmax(-1)
    return logp[len(prompt) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()


PARAMS = dict(temperature=1.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, logprobs=True)


# ---- generation ---------------------------------------------------------------------------------------------------


def test_generate_returns_what_verl_reads(model, model_path):
    async def main():
        server = make_server(model_path)
        await push(server, model.state_dict().items(), global_steps=4)
        outputs = await asyncio.gather(
            *[server.generate(list(range(1, 5 + i)), dict(PARAMS), request_id=str(i)) for i in range(6)]
        )
        silent = await server.generate([1, 2], {**PARAMS, "logprobs": False, "max_tokens": 3}, request_id="x")
        long = await server.generate([1] * 40, dict(PARAMS), request_id="y", image_data=None, priority=0)
        await server.shutdown()
        return outputs, silent, long

    outputs, silent, long = asyncio.run(main())
    for i, output in enumerate(outputs):
        assert len(output.token_ids) == 24 and output.stop_reason == "completed"
        assert output.extra_fields == {
            "global_steps": 4,
            "min_global_steps": 4,
            "max_global_steps": 4,
            "finish_reason": "length",
        }
        expected = forward_logprobs(model, list(range(1, 5 + i)), output.token_ids)
        assert output.log_probs == pytest.approx(expected, abs=1e-5)
    assert silent.log_probs is None and len(silent.token_ids) == 3
    # prompt and response share prompt_length + response_length
    assert len(long.token_ids) == 16


def test_bad_calls_name_the_trouble(model, model_path, tmp_path):
    async def main():
        server = make_server(model_path, max_model_len=64)
        await push(server, model.state_dict().items())
        with pytest.raises(ValueError, match=r"unknown sampling parameter\(s\) \['stop'\]"):
            await server.generate([1], {"stop": ["x"]}, request_id="a")
        with pytest.raises(ValueError, match=r"text only and cannot use \['image_data'\]"):
            await server.generate([1], dict(PARAMS), request_id="a", image_data=["picture"])
        with pytest.raises(ValueError, match="64 tokens leaves no room"):
            await server.generate([1] * 64, dict(PARAMS), request_id="a")
        with pytest.raises(ValueError, match="vocabulary"):
            await server.generate([VOCAB], dict(PARAMS), request_id="a")
        assert len((await server.generate([1] * 63, dict(PARAMS), request_id="a")).token_ids) == 1
        await server.shutdown()

    asyncio.run(main())
    with pytest.raises(ValueError, match="max_model_len=1024"):
        make_server(model_path, max_model_len=1024)
    model.config.save_pretrained(tmp_path)
    long = {"path": str(tmp_path), "override_config": {"attn_implementation": "sdpa", "max_position_embeddings": 8192}}
    small = rollout_config(response_length=3300, engine_kwargs={"embedded": {"kv_cache_mb": 1}})
    with pytest.raises(ValueError, match=r"response_length together need 3332 tokens .*embedded\.kv_cache_mb to 2 at"):
        EmbeddedServer(small, HFModelConfig(load_tokenizer=False, **long))


def test_a_failing_model_fails_the_requests_in_flight(model, model_path):
    async def main():
        server = make_server(model_path)
        await push(server, model.state_dict().items())
        forward = server.engine._forward

        def broken(**kwargs):
            if server.engine.num_running:
                raise ArithmeticError("boom")
            return forward(**kwargs)

        server.engine._forward = broken
        results = await asyncio.gather(
            *[server.generate([1, 2, i], dict(PARAMS), request_id=str(i)) for i in range(5)], return_exceptions=True
        )
        assert all(isinstance(r, RuntimeError) and "ArithmeticError: boom" in str(r) for r in results)
        server.engine._forward = forward
        assert (await server.generate([1, 2], dict(PARAMS), request_id="z")).stop_reason == "completed"
        # a defect of the engine itself ends the requests as well
        step, server.engine.step = server.engine.step, None
        with pytest.raises(RuntimeError, match="TypeError"):
            await server.generate([1, 2], dict(PARAMS), request_id="z")
        server.engine.step = step
        assert (await server.generate([1, 2], dict(PARAMS), request_id="z")).stop_reason == "completed"
        await server.shutdown()

    asyncio.run(main())


def slow_down(server: EmbeddedServer) -> None:
    """A token takes a hundredth of a second, so that what is done to a request finds it under way."""
    forward = server.engine._forward

    def slowly(**kwargs):
        time.sleep(0.01)
        return forward(**kwargs)

    server.engine._forward = slowly


# ---- gates --------------------------------------------------------------------------------------------------------


def test_abort_parks_or_rejects_and_resume_admits(model, model_path):
    async def main():
        server = make_server(model_path, response_length=400)
        slow_down(server)
        await push(server, model.state_dict().items(), global_steps=1)
        tasks = [asyncio.create_task(server.generate([1, 2, i], dict(PARAMS), request_id=f"r{i}")) for i in range(4)]
        while not any(request.token_ids for request in list(server.engine._running)):
            await asyncio.sleep(0.001)
        result = await server.abort_all_requests()
        aborted = await asyncio.gather(*tasks)
        assert result["aborted_count"] == 4 and sorted(result["request_ids"]) == ["r0", "r1", "r2", "r3"]
        assert all(a.stop_reason == "aborted" and len(a.log_probs) == len(a.token_ids) < 400 for a in aborted)
        assert any(a.token_ids for a in aborted)

        parked = asyncio.create_task(server.generate([1], {**PARAMS, "max_tokens": 2}, request_id="p"))
        await asyncio.sleep(0.05)
        assert not parked.done()
        await server.wait_for_requests_to_drain()
        await server.resume_generation()
        assert (await parked).stop_reason == "completed"

        await server.abort_all_requests()
        parked = asyncio.create_task(server.generate([1], {**PARAMS, "max_tokens": 2}, request_id="p"))
        await asyncio.sleep(0.01)
        await server.abort_all_requests(reject_request=True)
        for rejected in (await parked, await server.generate([1], dict(PARAMS), request_id="q")):
            assert rejected.stop_reason == "aborted" and rejected.token_ids == []
            assert rejected.extra_fields["global_steps"] == 1
        await server.resume_generation()
        task = asyncio.create_task(server.generate([1], dict(PARAMS), request_id="one"))
        while not server.engine.num_running:
            await asyncio.sleep(0.001)
        assert (await server.abort_request("one"))["aborted"]
        assert (await task).stop_reason == "aborted"
        assert not (await server.abort_request("one"))["aborted"]
        await server.shutdown()

    asyncio.run(main())


def test_a_cancelled_caller_leaves_the_batch(model, model_path):
    async def main():
        server = make_server(model_path, response_length=400)
        slow_down(server)
        await push(server, model.state_dict().items())
        task = asyncio.create_task(server.generate([1], dict(PARAMS), request_id="gone"))
        while not server.engine.num_running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await server.health())["running"] <= 1
        await server.wait_for_requests_to_drain()
        assert not server.engine.has_work() and server.engine.kv_nbytes == 0
        await server.shutdown()

    asyncio.run(main())


def test_sleep_drains_frees_and_wakes_with_the_same_weights(model, model_path):
    async def main():
        server = make_server(model_path)
        await push(server, model.state_dict().items())
        greedy = {**PARAMS, "temperature": 0}
        before = await server.generate([1, 2, 3], greedy, request_id="a")
        running = asyncio.create_task(server.generate([4, 5], dict(PARAMS), request_id="b"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await server.sleep()
        assert running.done() and len(running.result().token_ids) == 24
        assert server.engine.kv_nbytes == 0
        held = asyncio.create_task(server.generate([1, 2, 3], greedy, request_id="c"))
        await server.wake_up(tags=["weights"])
        await asyncio.sleep(0.05)
        assert not held.done()
        await server.wake_up(tags=["kv_cache"])
        after = await held
        assert after.token_ids == before.token_ids and after.log_probs == before.log_probs
        await server.release_kv_cache()
        assert server.engine.kv_nbytes == 0
        held = asyncio.create_task(server.generate([1, 2, 3], greedy, request_id="d"))
        await asyncio.sleep(0.05)
        assert not held.done()
        await server.resume_kv_cache()
        assert (await held).token_ids == before.token_ids
        await server.clear_kv_cache()
        await server.shutdown()

        for mode, changes in ((RolloutMode.STANDALONE, {}), (RolloutMode.HYBRID, {"free_cache_engine": False})):
            server = make_server(model_path, mode, load_format="auto", **changes)
            await server.sleep()
            assert (await server.generate([1, 2, 3], greedy, request_id="a")).token_ids == before.token_ids
            await server.shutdown()

    asyncio.run(main())


# ---- weights ------------------------------------------------------------------------------------------------------


def test_weights_come_from_a_synchronisation_or_from_disk(model, model_path):
    async def main():
        greedy = {**PARAMS, "temperature": 0}
        dummy = make_server(model_path)
        with pytest.raises(RuntimeError, match="load_format=dummy"):
            await dummy.generate([1], greedy, request_id="a")
        await push(dummy, model.state_dict().items())
        sent = await dummy.generate([1], greedy, request_id="a")
        await dummy.shutdown()
        for mode in (RolloutMode.HYBRID, RolloutMode.COLOCATED):
            server = make_server(model_path, mode, load_format="auto")
            await server.launch_server()
            assert server.weights.ready == (mode == RolloutMode.COLOCATED)
            loaded = await server.generate([1], greedy, request_id="a")
            assert loaded.token_ids == sent.token_ids and loaded.log_probs == sent.log_probs
            await server.shutdown()

    asyncio.run(main())


def test_update_changes_outputs_and_versions_and_goes_on_in_flight(model, model_path):
    other = build_model(seed=9)

    async def main():
        server = make_server(model_path, response_length=300)
        slow_down(server)
        assert await push(server, model.state_dict().items(), bucket_bytes=4096, global_steps=1) > 5
        task = asyncio.create_task(server.generate([1, 2, 3], dict(PARAMS), request_id="a"))
        while not server.engine.num_running:
            await asyncio.sleep(0.001)
        await push(server, other.state_dict().items(), bucket_bytes=4096, global_steps=2)
        del server.engine._forward  # the rest as fast as it can
        crossing = await task
        fresh = await server.generate([1, 2, 3], {**PARAMS, "max_tokens": 20}, request_id="b")
        await server.set_global_steps(7)
        tagged = await server.generate([1, 2, 3], {**PARAMS, "max_tokens": 1}, request_id="b")
        # no version given: the last one stays
        await push(server, other.state_dict().items())
        assert server.engine.version == server.global_steps == 7
        await server.shutdown()
        return crossing, fresh, tagged

    crossing, fresh, tagged = asyncio.run(main())
    assert crossing.extra_fields["min_global_steps"] == 1 and crossing.extra_fields["max_global_steps"] == 2
    assert len(crossing.token_ids) == 300
    assert fresh.extra_fields["global_steps"] == 2
    assert fresh.log_probs == pytest.approx(forward_logprobs(other, [1, 2, 3], fresh.token_ids), abs=1e-5)
    assert fresh.log_probs != pytest.approx(forward_logprobs(model, [1, 2, 3], fresh.token_ids), abs=1e-2)
    assert tagged.extra_fields["min_global_steps"] == 7


def test_wrong_weights_are_refused_and_named(model, model_path):
    async def main():
        server = make_server(model_path)
        state = dict(model.state_dict())
        missing = {k: v for k, v in state.items() if k != "model.layers.1.mlp.up_proj.weight"}
        with pytest.raises(ValueError, match=r"did not arrive: model\.layers\.1\.mlp\.up_proj\.weight"):
            await push(server, missing.items())
        with pytest.raises(RuntimeError, match="did not arrive"):
            await server.generate([1], dict(PARAMS), request_id="a")
        with pytest.raises(ValueError, match=r"does not have: visual\.patch\.weight"):
            await push(server, [*state.items(), ("visual.patch.weight", torch.zeros(3))])
        wrong = {**state, "model.norm.weight": torch.zeros(31)}
        with pytest.raises(ValueError, match=r"'model\.norm\.weight' has shape \(31,\).*\(32,\)"):
            await push(server, wrong.items())
        await push(server, state.items())
        assert (await server.generate([1], dict(PARAMS), request_id="a")).stop_reason == "completed"
        await server.update_weights_bucket([], np.empty(0, np.uint8), first=True, last=False)
        await server.abort_weight_update("the trainer died")
        with pytest.raises(RuntimeError, match="broken off: the trainer died"):
            await server.generate([1], dict(PARAMS), request_id="a")
        await server.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("send_head", [True, False])
def test_tied_embeddings_and_wrapped_names(send_head):
    source, target = build_model(seed=4, tie=True), build_model(seed=5, tie=True)
    named = {
        "module._fsdp_wrapped_module." + name.replace("layers.0.", "layers.0._checkpoint_wrapped_module."): tensor
        for name, tensor in source.state_dict().items()
        if send_head or name != "lm_head.weight"
    }
    assert any(name.endswith("lm_head.weight") for name in named) == send_head
    store = WeightStore(target)
    store.begin("base")
    store.load(named.items())
    store.finish()
    assert store.ready
    for name, tensor in target.state_dict().items():
        torch.testing.assert_close(tensor, source.state_dict()[name], atol=0, rtol=0)
    assert target.lm_head.weight is target.model.embed_tokens.weight
    # the body alone, without its prefix
    store.begin("base")
    store.load((name, tensor) for name, tensor in source.model.state_dict().items())
    store.finish()
    untied = WeightStore(build_model(seed=6))
    untied.begin("base")
    untied.load((name, t) for name, t in source.state_dict().items() if name != "lm_head.weight")
    with pytest.raises(ValueError, match=r"did not arrive: lm_head\.weight"):
        untied.finish()


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("qwen3_moe", dict(num_experts=4, moe_intermediate_size=16)), ("mixtral", {"num_local_experts": 4})],
)
def test_packed_experts_arrive_one_by_one_as_verl_sends_them(kind, sizes):
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    shape = dict(zip(names, (VOCAB, 32, 48, 4, 2), strict=True))
    config = AutoConfig.for_model(kind, num_hidden_layers=2, **shape, **sizes)
    source, target = (AutoModelForCausalLM.from_config(config, dtype=torch.float32) for _ in range(2))
    sent = dict(unfuse_moe_params(iter(source.state_dict().items()), kind))
    up = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert up in sent and up not in source.state_dict()
    store, writer = WeightStore(target), BucketWriter(900)  # smaller than an expert
    store.begin("base")
    for name, tensor in sent.items():
        for pieces, data in writer.add("_fsdp_wrapped_module." + name, tensor):
            store.load_bucket(pieces, data)
    store.load_bucket(*writer.flush())
    store.finish()
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name]), name
    store.begin("base")
    store.load((name, tensor) for name, tensor in sent.items() if name != up)
    with pytest.raises(ValueError, match=r"did not arrive: model\.layers\.1\.mlp\.experts\.gate_up_proj$"):
        store.finish()
    store.begin("base")
    store.load([*sent.items(), (up.replace("3", "4"), sent[up])])
    with pytest.raises(ValueError, match=r"does not have: model\.layers\.1\.mlp\.experts\.4\.up_proj\.weight$"):
        store.finish()


def test_buckets_are_bounded_and_whole():
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"t{i}": torch.randn(shape, generator=generator).to(dtype)
        for i, (shape, dtype) in enumerate(
            [((3, 5), torch.float32), ((700,), torch.bfloat16), ((), torch.float32), ((2, 90), torch.float16)]
        )
    }
    tensors["steps"] = torch.arange(7)
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, torch.zeros_like(tensor))
    for size in (64, 1000, 1 << 20):
        store = WeightStore(copy.deepcopy(module))
        store.begin("base")
        writer = BucketWriter(size)
        buckets = []
        for name, tensor in tensors.items():
            buckets += [(pieces, data.copy()) for pieces, data in writer.add(name, tensor)]
        buckets.append(writer.flush())
        assert max(len(data) for _, data in buckets) <= size
        for pieces, data in buckets:
            store.load_bucket(pieces, data)
        store.finish()
        for name, tensor in tensors.items():
            assert torch.equal(getattr(store.model, name), tensor)
    assert len(buckets) == 1


def test_names_and_dtypes():
    assert clean_name("base_model.model.model.layers.0.q_proj.base_layer.weight") == "model.layers.0.q_proj.weight"
    assert resolve_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ValueError, match=r"rollout\.dtype='int4'"):
        resolve_dtype("int4")


def test_lora_base_then_adapter_as_verl_sends_them(model, model_path):
    """Names as the FSDP engine makes them with lora.merge=False; the adapter is applied, replaced and resized."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from verl.utils.fsdp_utils import collect_lora_params, replace_lora_wrapper

    def trainer(rank: int, seed: int):
        base = copy.deepcopy(model)
        config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=16, target_modules="all-linear", bias="none")
        peft = get_peft_model(base, config)
        torch.manual_seed(seed)
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        return peft.eval()

    async def main():
        first, second, wider = trainer(4, 1), trainer(4, 2), trainer(8, 3)
        config = first.peft_config["default"]
        base = collect_lora_params(first, layered_summon=False, base_sync_done=False)
        base = {replace_lora_wrapper(name, config): tensor for name, tensor in base.items()}
        assert "model.layers.0.self_attn.q_proj.base_layer.weight" in base
        server = make_server(model_path)
        adapter = {"kind": "adapter", "peft_config": config.to_dict()}
        with pytest.raises(RuntimeError, match="before base weights"):
            await push(server, get_peft_model_state_dict(first).items(), **adapter)
        await push(server, base.items(), global_steps=1)
        for peft, step in ((first, 1), (second, 2), (wider, 3)):
            adapter["peft_config"] = peft.peft_config["default"].to_dict()
            await push(server, get_peft_model_state_dict(peft).items(), bucket_bytes=2048, global_steps=step, **adapter)
            out = await server.generate([3, 1, 2], dict(PARAMS), request_id="a")
            assert out.extra_fields["global_steps"] == step
            assert out.log_probs == pytest.approx(forward_logprobs(peft, [3, 1, 2], out.token_ids), abs=1e-5)
            assert out.log_probs != pytest.approx(forward_logprobs(model, [3, 1, 2], out.token_ids), abs=1e-2)
        broken = dict(get_peft_model_state_dict(wider))
        broken.pop(next(iter(broken)))
        with pytest.raises(ValueError, match=r"adapter weights that did not arrive: .*lora_"):
            await push(server, broken.items(), **adapter)
        with pytest.raises(RuntimeError, match="no usable weights: .*lora_"):
            await server.generate([3, 1, 2], dict(PARAMS), request_id="a")
        # the base is intact: a complete adapter suffices
        await push(server, get_peft_model_state_dict(wider).items(), **adapter)
        assert (await server.generate([3, 1, 2], dict(PARAMS), request_id="a")).stop_reason == "completed"
        await server.shutdown()
        # with weights on disk verl sends the adapter alone
        server = make_server(model_path, load_format="safetensors")
        await push(server, get_peft_model_state_dict(wider).items(), **adapter)
        out = await server.generate([3, 1, 2], dict(PARAMS), request_id="a")
        assert out.log_probs == pytest.approx(forward_logprobs(wider, [3, 1, 2], out.token_ids), abs=1e-5)
        await server.shutdown()

    asyncio.run(main())


# ---- configuration ------------------------------------------------------------------------------------------------


def test_options_are_checked():
    def options(logprobs_mode="processed_logprobs", **embedded):
        return EmbeddedOptions.from_config(
            rollout_config(engine_kwargs={"vllm": {}, "embedded": embedded}, logprobs_mode=logprobs_mode)
        )

    assert options() == EmbeddedOptions()
    assert options(num_threads=2, kv_cache_mb=None).num_threads == 2
    assert EmbeddedOptions.from_config(rollout_config()) == EmbeddedOptions()
    nested = rollout_config(engine_kwargs=OmegaConf.create({"embedded": {"max_batch_size": 4}}))
    assert EmbeddedOptions.from_config(nested).max_batch_size == 4
    with pytest.raises(ValueError, match=r"engine_kwargs\.embedded\.threads is not an option.*'num_threads'"):
        options(threads=2)
    with pytest.raises(ValueError, match=r"embedded\.kv_cache_mb is 0; it must be at least 1"):
        options(kv_cache_mb=0)
    with pytest.raises(ValueError, match="attn_implementation is 'flash'; choose one of 'sdpa'"):
        options(attn_implementation="flash")
    with pytest.raises(ValueError, match=r"rollout\.logprobs_mode='processed_logits'"):
        options("processed_logits")
    with pytest.raises(ValueError, match=r"embedded\.logprobs_mode='x'"):
        EmbeddedOptions.from_config(rollout_config(engine_kwargs={"embedded": {"logprobs_mode": "x"}}))


# ---- through Ray --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_cluster():
    import ray

    with own_ray(2, "verl_ext.cpu.engine.replica,verl_ext.cpu.engine.server"):
        yield ray


def actor_model_config(path: str):
    return OmegaConf.create({"path": path, "load_tokenizer": False, "override_config": {"attn_implementation": "sdpa"}})


async def launch(config: RolloutConfig, model_cfg) -> EmbeddedReplica:
    import ray

    class TrainingWorker:
        """Stands where verl's training worker is: the replica asks it for its node."""

    worker = ray.remote(TrainingWorker).options(num_cpus=0).remote()
    replica = EmbeddedReplica(replica_rank=0, config=config, model_config=model_cfg, gpus_per_node=1)
    await replica.init_hybrid(SimpleNamespace(workers=[worker], world_size=1))
    return replica


@pytest.mark.slow
def test_replica_rollout_and_client_through_ray(ray_cluster, model, model_path, monkeypatch):
    """Launch, synchronise, generate, abort, sleep and wake as verl's manager, worker and client do it."""
    ray = ray_cluster
    other = build_model(seed=8)
    config = rollout_config(engine_kwargs={"embedded": {"weight_bucket_mb": 1, "num_cpus": 0.1}})
    model_cfg = actor_model_config(model_path)

    async def main():
        replica = await launch(config, model_cfg)
        assert replica.server_address.startswith("embedded://")
        await replica.sleep()

        def collective(source, seen):
            for name, tensor in source.state_dict().items():
                seen.append(name)
                yield name, tensor

        monkeypatch.setenv("RANK", "0")
        rollout = EmbeddedRollout(config, model_config(model_path), device_mesh=None)
        monkeypatch.setenv("RANK", "1")
        follower = EmbeddedRollout(rollout_config(tensor_model_parallel_size=2), model_config(model_path), None)
        assert rollout.is_leader_rank and not follower.is_leader_rank and follower.replica_rank == 0
        seen: list[str] = []
        await follower.update_weights(collective(model, seen))
        assert len(seen) == len(model.state_dict())

        async def synchronise(source, step):
            await rollout.resume(tags=["weights"])
            await rollout.update_weights(collective(source, []), global_steps=step, base_sync_done=True)
            await rollout.resume(tags=["kv_cache"])

        await synchronise(model, 1)
        server = replica.server_handle
        prompts = [[1, 2, 3 + i] for i in range(16)]
        outputs = await asyncio.gather(
            *[
                server.generate.remote(prompt_ids=p, sampling_params=dict(PARAMS), request_id=str(i), video_data=None)
                for i, p in enumerate(prompts)
            ]
        )
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.extra_fields["global_steps"] == 1
            assert output.log_probs == pytest.approx(forward_logprobs(model, prompt, output.token_ids), abs=1e-5)

        await rollout.release()
        await synchronise(other, 2)
        output = await server.generate.remote([1, 2], dict(PARAMS), "a")
        assert output.log_probs == pytest.approx(forward_logprobs(other, [1, 2], output.token_ids), abs=1e-5)

        # the generator is run to its end although the server refuses the weights
        seen = []

        def wrong():
            for name, tensor in collective(model, seen):
                yield name + (".typo" if "norm" in name else ""), tensor

        with pytest.raises(Exception, match=r"does not have: .*norm\.weight\.typo"):
            await rollout.update_weights(wrong(), global_steps=3)
        assert len(seen) == len(model.state_dict())
        with pytest.raises(Exception, match="no usable weights"):
            await server.generate.remote([1, 2], dict(PARAMS), "a")

        def dying():
            yield from list(collective(model, []))[:3]
            raise ArithmeticError("trainer")

        with pytest.raises(ArithmeticError, match="trainer"):
            await rollout.update_weights(dying())
        with pytest.raises(Exception, match="broken off: trainer"):
            await server.generate.remote([1, 2], dict(PARAMS), "a")
        with pytest.raises(ValueError, match="delta_flush"):
            await rollout.update_weights(iter(()), wire_format="delta_flush")
        await synchronise(model, 4)

        await replica.abort_all_requests()
        parked = asyncio.ensure_future(_wait(server.generate.remote([1, 2], dict(PARAMS), "late")))
        await asyncio.sleep(0.05)
        assert not parked.done()
        await replica.resume_generation()
        assert (await parked).extra_fields["global_steps"] == 4
        assert not (await replica.abort_request("late"))["aborted"]
        for action in (
            replica.release_kv_cache,
            replica.resume_kv_cache,
            replica.clear_kv_cache,
            replica.start_profile,
            replica.stop_profile,
            replica.sleep,
            replica.wake_up,
        ):
            await action()
        assert (await server.generate.remote([1, 2], dict(PARAMS), "end")).stop_reason == "completed"

        reward = EmbeddedReplica(1, config, model_cfg, gpus_per_node=1, is_reward_model=True)
        with pytest.raises(ValueError, match="generative reward model"):
            await reward.launch_servers()
        ray.kill(replica.servers[0])

    async def _wait(reference):
        return await reference

    asyncio.run(main())


@pytest.mark.slow
def test_control_is_answered_while_more_calls_are_parked_than_verl_lets_run(ray_cluster, model, model_path):
    """Health, weights, abort and resume reach a server in which every place for a generate call is taken."""
    other = build_model(seed=8)

    async def main():
        replica = await launch(rollout_config(load_format="auto"), actor_model_config(model_path))
        server, control = replica.server_handle, replica.servers[0]
        rollout = EmbeddedRollout(rollout_config(), model_config(model_path), device_mesh=None)
        await replica.abort_all_requests()
        places = replica.max_concurrency
        short = {**PARAMS, "max_tokens": 1}
        calls = [server.generate.remote([1, 2, 3], short, str(i)) for i in range(places + 100)]
        while (await control.health.remote())["parked"] < places:
            await asyncio.sleep(0.05)
        await rollout.update_weights(iter(other.state_dict().items()), global_steps=5)
        await replica.abort_all_requests()
        assert await control.health.remote() == {
            "running": 0,
            "waiting": 0,
            "parked": places,
            "closed": ["paused"],
            "kv_cache_bytes": 0,
            "global_steps": 5,
            "weights_error": None,
        }
        assert not any(call.done() for call in calls)
        await replica.resume_generation()
        outputs = await asyncio.gather(*calls)
        assert {output.extra_fields["min_global_steps"] for output in outputs} == {5}
        ray_cluster.kill(control)

    asyncio.run(asyncio.wait_for(main(), 300))


@pytest.mark.parametrize("turns", [0, 1])
def test_a_call_that_is_given_up_at_once_is_cancelled_too(turns, monkeypatch):
    class Reference:
        def __await__(self):
            return asyncio.get_running_loop().create_future().__await__()

    reference, cancelled = Reference(), []
    actor = SimpleNamespace(generate=SimpleNamespace(remote=lambda *args: reference))
    monkeypatch.setattr(replica_module.ray, "cancel", cancelled.append)

    async def main():
        call = CancellingHandle(actor).generate.remote([1], dict(PARAMS), "given up")
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(main())
    assert cancelled == [reference]


@pytest.mark.slow
def test_a_call_that_is_given_up_ends_on_the_server(ray_cluster, model, model_path):
    """By a cancelled task, a time limit, or ray.cancel; running or held by a gate: its slot is free for another."""

    def slow(server):
        import time

        forward = server.engine._forward

        def slowly(**kwargs):
            time.sleep(0.1)
            return forward(**kwargs)

        server.engine._forward = slowly

    async def main():
        config = rollout_config(load_format="auto", response_length=400, max_num_seqs=3)
        replica = await launch(config, actor_model_config(model_path))
        server, control = replica.server_handle, replica.servers[0]
        await control.__ray_call__.remote(slow)

        async def counted(**wanted):
            while not wanted.items() <= (await control.health.remote()).items():
                await asyncio.sleep(0.02)

        for running, parked in ((3, 0), (0, 3)):
            if parked:
                await replica.abort_all_requests()
            # 40 seconds if nobody stops them
            cancelled = asyncio.ensure_future(server.generate.remote([1, 2], dict(PARAMS), "cancelled"))
            late = server.generate.remote([1, 2], dict(PARAMS), "late")
            by_ray = control.generate.remote([1, 2], dict(PARAMS), "ray")
            await asyncio.wait_for(counted(running=running, parked=parked), 60)
            cancelled.cancel()
            ray_cluster.cancel(by_ray)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(late, 0.1)
            with pytest.raises(ray_cluster.exceptions.TaskCancelledError):
                await by_ray
            await asyncio.wait_for(counted(running=0, waiting=0, parked=0, kv_cache_bytes=0), 30)
        await replica.resume_generation()
        assert len((await server.generate.remote([1], {**PARAMS, "max_tokens": 2}, "next")).token_ids) == 2
        ray_cluster.kill(control)

    asyncio.run(asyncio.wait_for(main(), 300))
