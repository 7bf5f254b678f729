# SPDX-License-Identifier: Apache-2.0
"""The embedded generation engine on a tiny random Llama: batching, sampling, stopping, seeds, faults, memory bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from verl_ext.cpu.engine.engine import GenerationEngine, Request, kv_bytes_per_token
from verl_ext.cpu.engine.engine_thread import EngineThread
from verl_ext.cpu.engine.sampling import BatchSampling, SamplingParams, sample

VOCAB = 48


def tiny_model(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        attn_implementation="sdpa",
        **changes,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_model()


def prompts(count: int, seed: int = 1, low: int = 2, high: int = 30) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def run(engine: GenerationEngine, requests: list[Request]) -> list[Request]:
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        engine.step()
    return requests


def reference_logprobs(model, request: Request, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor([request.prompt_ids + request.token_ids])
    with torch.no_grad():
        logp = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    rows = logp[len(request.prompt_ids) - 1 : -1]
    return rows.gather(-1, torch.tensor(request.token_ids)[:, None])[:, 0]


def test_concurrent_equals_sequential_whatever_the_arrival(model):
    """Rows join and leave a running batch without changing what each of them samples."""
    lengths = [1, 3, 40, 7, 12, 25, 2, 33, 18, 5, 9, 14]
    specs = [
        (p, SamplingParams(max_tokens=n, temperature=0.9, seed=100 + i))
        for i, (p, n) in enumerate(zip(prompts(12), lengths, strict=True))
    ]
    engine = GenerationEngine(model, max_model_len=256)
    alone = [run(engine, [Request(list(p), s)])[0] for p, s in specs]
    together = run(engine, [Request(list(p), s) for p, s in specs])
    small = run(GenerationEngine(model, max_model_len=256, max_batch_size=3), [Request(list(p), s) for p, s in specs])
    staggered = [Request(list(p), s) for p, s in reversed(specs)]
    for request in staggered:
        engine.submit(request)
        engine.step()
        engine.step()
    while engine.has_work():
        engine.step()
    for i, request in enumerate(alone):
        assert len(request.token_ids) == lengths[i]
        for other in (together[i], small[i], staggered[-1 - i]):
            assert other.token_ids == request.token_ids
            assert other.logprobs == pytest.approx(request.logprobs, abs=1e-5)


def test_noise_on_the_logits_makes_the_sampler_disagree_by_as_much(model):
    """The reported log-probabilities are those of the noisy policy that was sampled from."""
    engine = GenerationEngine(model, max_model_len=256, logits_noise=0.1)
    params = SamplingParams(max_tokens=40)
    differences = torch.cat(
        [
            torch.tensor(request.logprobs) - reference_logprobs(model, request, 1.0)
            for request in run(engine, [Request(p, params) for p in prompts(9)])
        ]
    )
    assert 0.07 < differences.std() < 0.13
    with pytest.raises(ValueError, match="logits_noise=-1"):
        GenerationEngine(model, logits_noise=-1)
    with pytest.raises(ValueError, match="logits_noise_below=0"):
        GenerationEngine(model, logits_noise_below=0)


def test_noise_in_the_tail_leaves_the_likely_tokens_in_proportion(model):
    """Of two tokens without noise the sampler's log-probabilities differ by what the trainer's do."""
    below = 1 / model.config.vocab_size
    engine = GenerationEngine(model, max_model_len=256, logits_noise=3.0, logits_noise_below=below, top_logprobs=-1)
    requests = run(engine, [Request(p, SamplingParams(max_tokens=12)) for p in prompts(4)])
    for request in requests:
        ids = torch.tensor([[*request.prompt_ids, *request.token_ids]])
        with torch.no_grad():
            clean = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].double().log_softmax(-1)
        noisy = torch.tensor(np.stack([values for values, _ in request.top_logprobs])).double()
        likely = clean.exp() > below * 1.001
        moved = noisy - clean
        for row in range(len(moved)):
            shift = moved[row][likely[row]]
            assert (shift - shift[0]).abs().max() < 1e-4
            assert moved[row][clean[row].exp() < below * 0.999].std() > 2


@pytest.mark.parametrize("count", [-1, 4])
def test_the_largest_logprobs_come_with_what_is_sampled(model, count):
    """Those of the distribution that was sampled from, noise and truncation included; greedy requests have none."""
    engine = GenerationEngine(model, max_model_len=256, logits_noise=0.5, top_logprobs=count)
    sampled = SamplingParams(max_tokens=12, temperature=0.7, top_k=3)
    for request in run(engine, [Request(p, sampled) for p in prompts(5)]):
        assert len(request.top_logprobs) == len(request.token_ids)
        rows = zip(request.token_ids, request.logprobs, request.top_logprobs, strict=True)
        for token, logprob, (values, ids) in rows:
            assert values.shape == ((VOCAB,) if count < 0 else (4,)) and (ids is None) == (count < 0)
            assert np.isfinite(values).sum() == 3 and np.exp(values).sum() == pytest.approx(1.0, abs=1e-6)
            place = token if ids is None else ids.tolist().index(token)
            assert values[place] == pytest.approx(logprob, abs=1e-7)
    for params in (SamplingParams(max_tokens=3, temperature=0), SamplingParams(max_tokens=3, logprobs=False)):
        assert run(engine, [Request(prompts(1)[0], params)])[0].top_logprobs == []


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_plain_forward(model, temperature):
    engine = GenerationEngine(model, max_model_len=256)
    params = SamplingParams(max_tokens=20, temperature=temperature)
    for request in run(engine, [Request(p, params) for p in prompts(9)]):
        expected = reference_logprobs(model, request, temperature)
        torch.testing.assert_close(torch.tensor(request.logprobs), expected, atol=1e-5, rtol=0)


def test_logprobs_modes_differ_as_documented(model):
    prompt = prompts(1)[0]
    params = SamplingParams(max_tokens=12, temperature=0.6, top_k=4, seed=3)
    out = {
        mode: run(GenerationEngine(model, logprobs_mode=mode), [Request(prompt, params)])[0]
        for mode in ("processed_logprobs", "policy_logprobs", "raw_logprobs")
    }
    tokens = out["raw_logprobs"].token_ids
    assert all(r.token_ids == tokens for r in out.values())
    ids = torch.tensor([prompt + tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    index = torch.tensor(tokens)[:, None]
    top = (logits / 0.6).topk(4).values
    processed = (logits / 0.6).gather(-1, index)[:, 0] - top.logsumexp(-1)
    expected = {
        "raw_logprobs": logits.log_softmax(-1).gather(-1, index)[:, 0],
        "policy_logprobs": (logits / 0.6).log_softmax(-1).gather(-1, index)[:, 0],
        "processed_logprobs": processed,
    }
    for mode, request in out.items():
        torch.testing.assert_close(torch.tensor(request.logprobs), expected[mode], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="logprobs_mode='logits'"):
        GenerationEngine(model, logprobs_mode="logits")


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4}, {"attn_implementation": "eager"}])
def test_greedy_equals_transformers_generate(changes):
    torch.manual_seed(5)
    base = {"num_key_value_heads": 2, "attn_implementation": "sdpa", **changes}
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, **base
    )
    model = LlamaForCausalLM(config).eval()
    check_greedy(model)


def check_greedy(model) -> None:
    batch = prompts(6, seed=4)
    engine = GenerationEngine(model, max_model_len=256)
    got = run(engine, [Request(p, SamplingParams(max_tokens=25, temperature=0.0)) for p in batch])
    for prompt, request in zip(batch, got, strict=True):
        ids = torch.tensor([prompt])
        options = dict(max_new_tokens=25, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert request.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.seconds
def test_sliding_window_model_equals_transformers_generate():
    torch.manual_seed(6)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        initializer_range=0.15,
        attn_implementation="sdpa",
    )
    assert set(config.layer_types) == {"full_attention", "sliding_attention"}
    check_greedy(Qwen2ForCausalLM(config).eval())


def allowed_ids(logits: torch.Tensor, *, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The documented truncation, one id after the other."""
    probs = logits.double().softmax(-1)
    order = [i for i in probs.argsort(descending=True).tolist() if probs[i] >= min_p * probs.max()]
    order = order[:top_k] if top_k > 0 else order
    kept, mass, total = [], 0.0, sum(float(probs[i]) for i in order)
    for i in order:
        if mass >= top_p * total:
            break
        kept.append(i)
        mass += float(probs[i])
    return kept


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(-1, 1.0, 0.0), (5, 1.0, 0.0), (-1, 0.6, 0.0), (-1, 1.0, 0.2), (6, 0.8, 0.05), (1, 1.0, 0.0), (-1, 1e-6, 0.0)],
)
def test_sampler_set_and_frequencies(top_k, top_p, min_p):
    torch.manual_seed(7)
    logits = torch.randn(20) * 1.5
    rows, temperature = 20000, 0.8
    params = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    batch = BatchSampling([params] * rows, 20, torch.device("cpu"))
    uniforms = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).tolist()
    wide = logits.expand(rows, -1)
    tokens, found = sample(wide, wide, batch, uniforms)
    logprobs = found.gather(-1, tokens[:, None]).squeeze(-1)
    kept = allowed_ids(logits / temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert set(tokens.tolist()) <= set(kept)
    expected = torch.full((20,), -math.inf)
    expected[kept] = (logits / temperature)[kept].log_softmax(-1)
    torch.testing.assert_close(logprobs, expected[tokens], atol=1e-5, rtol=0)
    frequency = torch.bincount(tokens, minlength=20) / rows
    # four standard errors of a frequency
    bound = 4 * (expected.exp() * (1 - expected.exp()) / rows).sqrt() + 1e-12
    assert bool(((frequency - expected.exp()).abs() <= bound).all())


def test_rows_of_a_batch_keep_their_own_parameters(model):
    prompt = prompts(1, seed=9)[0]
    specs = [
        SamplingParams(max_tokens=15, temperature=0.0),
        SamplingParams(max_tokens=15, temperature=1.3, seed=1),
        SamplingParams(max_tokens=15, top_k=1, seed=2),
        SamplingParams(max_tokens=15, min_p=1.0, seed=3),
        SamplingParams(max_tokens=15, top_p=0.5, temperature=0.5, seed=4),
    ]
    engine = GenerationEngine(model)
    mixed = run(engine, [Request(prompt, s) for s in specs])
    for request, spec in zip(mixed, specs, strict=True):
        assert request.token_ids == run(engine, [Request(prompt, spec)])[0].token_ids
    # top_k=1 and min_p=1 leave the most likely id
    assert mixed[0].token_ids == mixed[2].token_ids == mixed[3].token_ids
    assert mixed[2].logprobs == [0.0] * 15
    assert mixed[1].token_ids != mixed[0].token_ids


def test_extreme_uniforms_stay_inside_the_support():
    logits = torch.tensor([[-math.inf, 0.0, 1.0, -math.inf]])
    batch = BatchSampling([SamplingParams(max_tokens=1)], 4, torch.device("cpu"))
    assert sample(logits, logits, batch, [0.0])[0].item() == 1
    assert sample(logits, logits, batch, [1.0])[0].item() == 2


def test_stop_ids_eos_and_ignore_eos(model):
    prompt = prompts(1, seed=11)[0]
    free = run(GenerationEngine(model), [Request(prompt, SamplingParams(max_tokens=30, seed=5))])[0]
    assert free.finish_reason == "length" and len(free.token_ids) == 30
    target = free.token_ids[10]
    first = free.token_ids.index(target)
    stopped = run(
        GenerationEngine(model),
        [Request(prompt, SamplingParams(max_tokens=30, seed=5, stop_token_ids=frozenset({target})))],
    )[0]
    assert stopped.finish_reason == "stop" and stopped.token_ids == free.token_ids[: first + 1]
    with_eos = GenerationEngine(model, eos_token_ids=[target])
    by_eos, ignoring = run(
        with_eos,
        [
            Request(prompt, SamplingParams(max_tokens=30, seed=5)),
            Request(prompt, SamplingParams(max_tokens=30, seed=5, ignore_eos=True)),
        ],
    )
    assert by_eos.token_ids == stopped.token_ids and by_eos.finish_reason == "stop"
    assert ignoring.token_ids == free.token_ids
    later = run(with_eos, [Request(prompt, SamplingParams(max_tokens=30, seed=5, min_tokens=20))])[0]
    assert len(later.token_ids) >= 20 and target not in later.token_ids[:20]


def test_penalties_follow_their_formulas(model):
    prompt = prompts(1, seed=12)[0]
    params = SamplingParams(
        max_tokens=20, temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2
    )
    request = run(GenerationEngine(model), [Request(prompt, params)])[0]
    tokens: list[int] = []
    for _ in range(20):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, -1].float()
        for i in range(VOCAB):
            if i in prompt or i in tokens:
                logits[i] = logits[i] / 1.4 if logits[i] > 0 else logits[i] * 1.4
            logits[i] -= 0.2 * tokens.count(i) + 0.3 * (i in tokens)
        tokens.append(int(logits.argmax()))
    assert request.token_ids == tokens
    plain = run(GenerationEngine(model), [Request(prompt, SamplingParams(max_tokens=20, temperature=0.0))])[0]
    assert plain.token_ids != tokens


def test_padded_vocabulary_is_never_sampled(model):
    engine = GenerationEngine(model, vocab_limit=10)
    request = run(engine, [Request([1, 2, 3], SamplingParams(max_tokens=200, temperature=5.0))])[0]
    assert max(request.token_ids) < 10


def test_default_seeds_depend_on_prompt_version_and_occurrence(model):
    params = SamplingParams(max_tokens=16)
    a, b = prompts(2, seed=13)

    def samples(order: list[list[int]], version: int, seed: int = 7) -> list[list[int]]:
        engine = GenerationEngine(model, seed=seed)
        engine.set_version(version)
        return [r.token_ids for r in run(engine, [Request(list(p), params) for p in order])]

    one = samples([a, a, b, a], 1)
    assert len({tuple(t) for t in one}) == 4
    assert samples([a, b, a, a], 1) == [one[0], one[2], one[1], one[3]]
    assert samples([a, a, b, a], 2) != one
    assert samples([a, a, b, a], 1, seed=8) != one
    engine = GenerationEngine(model, seed=7)
    engine.set_version(1)
    first = run(engine, [Request(a, params)])[0].token_ids
    engine.set_version(2)
    engine.set_version(1)
    assert run(engine, [Request(a, params)])[0].token_ids == first


def test_abort_returns_what_was_sampled(model):
    engine = GenerationEngine(model, max_batch_size=2)
    batch = [Request(p, SamplingParams(max_tokens=50, seed=i), request_id=f"r{i}") for i, p in enumerate(prompts(4))]
    full = run(GenerationEngine(model), [Request(r.prompt_ids, r.params) for r in batch])
    for request in batch:
        engine.submit(request)
    for _ in range(6):
        engine.step()
    assert engine.abort(["r1", "r3"]) == [batch[3], batch[1]]
    assert batch[3].token_ids == [] and 0 < len(batch[1].token_ids) < 50
    assert batch[1].token_ids == full[1].token_ids[: len(batch[1].token_ids)]
    while engine.has_work():
        engine.step()
    assert [batch[0].token_ids, batch[2].token_ids] == [full[0].token_ids, full[2].token_ids]
    assert engine.abort() == []
    # the tokens so far, sent as a prompt, are continued
    resumed = run(engine, [Request(batch[1].prompt_ids + batch[1].token_ids, SamplingParams(max_tokens=3))])[0]
    torch.testing.assert_close(torch.tensor(resumed.logprobs), reference_logprobs(model, resumed), atol=1e-5, rtol=0)


def test_model_failure_reaches_its_requests_and_the_engine_goes_on():
    model = tiny_model(3)
    engine = GenerationEngine(model)
    running = [Request(p, SamplingParams(max_tokens=20)) for p in prompts(3)]
    for request in running:
        engine.submit(request)
    engine.step()
    weight = model.lm_head.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    ended = engine.step()
    assert sorted(map(id, ended)) == sorted(map(id, running))
    assert all(isinstance(r.error, FloatingPointError) and "NaN" in str(r.error) for r in running)
    assert not engine.has_work() and engine.kv_nbytes == 0
    late = Request([1, 2], SamplingParams(max_tokens=2))
    engine.submit(late)
    assert engine.step() == [late] and isinstance(late.error, FloatingPointError)
    with torch.no_grad():
        weight.copy_(good)
    assert run(engine, [Request([1, 2], SamplingParams(max_tokens=2))])[0].finish_reason == "length"


def test_failing_prefill_spares_the_running_rows(model, monkeypatch):
    engine = GenerationEngine(model)
    spec = SamplingParams(max_tokens=12, seed=1)
    expected = run(engine, [Request([1, 2, 3], spec)])[0].token_ids
    running = engine.submit(Request([1, 2, 3], spec))
    engine.step()
    collect = engine._collect

    def broken_collect(first):
        # only a prefill collects from a later row on; by then its rows are placed, the worst moment to fail
        if first:
            raise MemoryError("prefill")
        return collect(first)

    monkeypatch.setattr(engine, "_collect", broken_collect)
    bad = engine.submit(Request([4, 5], SamplingParams(max_tokens=5)))
    ended = engine.step()
    assert bad in ended and isinstance(bad.error, MemoryError)
    monkeypatch.undo()
    while engine.has_work():
        engine.step()
    assert running.token_ids == expected


def watched(engine: GenerationEngine) -> list[int]:
    """The largest number of key-value bytes held after any step and inside any forward, kept up to date."""
    most = [0]
    forward, step = engine._forward, engine.step

    def spy(action):
        def run_it(*args, **kwargs):
            result = action(*args, **kwargs)
            most[0] = max(most[0], engine.kv_nbytes)
            return result

        return run_it

    engine._forward, engine.step = spy(forward), spy(step)
    return most


@pytest.mark.seconds
def test_key_value_memory_is_bounded(model):
    per_token = kv_bytes_per_token(model.config, torch.float32)
    assert per_token == 2 * 2 * 2 * 8 * 4
    engine = GenerationEngine(model, max_model_len=256, kv_cache_bytes=per_token * 400)
    most = watched(engine)
    batch = [Request(p, SamplingParams(max_tokens=60, seed=i)) for i, p in enumerate(prompts(20, low=10, high=20))]
    for request in batch:
        engine.submit(request)
    most_rows = 0
    while engine.has_work():
        engine.step()
        most_rows = max(most_rows, engine.num_running)
    assert 2 <= most_rows <= 400 // 70
    # less than the bound by one layer's keys, which are held twice while the layout changes
    assert per_token * 200 < most[0] <= per_token * 400 * 4 / 5
    free = run(GenerationEngine(model), [Request(r.prompt_ids, r.params) for r in batch])
    assert [r.token_ids for r in batch] == [r.token_ids for r in free]
    assert engine.kv_nbytes == 0


@pytest.mark.seconds
def test_one_long_request_after_many_short_ones_keeps_the_bound():
    model = tiny_model(4)
    model.config.max_position_embeddings = 4096
    bound = 2400 * kv_bytes_per_token(model.config, torch.float32)
    engine = GenerationEngine(model, max_model_len=4096, max_batch_size=128, kv_cache_bytes=bound)
    most = watched(engine)
    short = [engine.submit(Request([1, 2, 3, 4], SamplingParams(max_tokens=4))) for _ in range(128)]
    long = engine.submit(Request([5] * 1700, SamplingParams(max_tokens=180, seed=1)))
    after = [engine.submit(Request([7, 8], SamplingParams(max_tokens=6 + 90 * (i == 0)))) for i in range(128)]
    sizes = []
    while engine.has_work():
        engine.step()
        sizes.append(engine.kv_nbytes)
    assert all(r.finish_reason == "length" for r in (*short, long, *after))
    assert most[0] <= bound
    # what many rows or a long one needed is given back to the last one, and all of it at the end
    assert sizes[-2] < bound // 8 and sizes[-1] == 0
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(long.logprobs), reference_logprobs(model, long), atol=2e-5, rtol=0)


def test_the_bound_holds_for_latent_attention_too():
    """transformers caches its keys and values unfolded: for every head, and of different widths."""
    config = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=24,
        v_head_dim=16,
        max_position_embeddings=256,
    )
    per_token = kv_bytes_per_token(config, torch.float32)
    assert per_token == 2 * 4 * (32 + 16) * 4
    model = DeepseekV3ForCausalLM(config).eval()
    engine = GenerationEngine(model, max_model_len=64, kv_cache_bytes=per_token * 400)
    most = watched(engine)
    batch = run(engine, [Request([5, i], SamplingParams(max_tokens=40)) for i in range(30)])
    assert all(r.finish_reason == "length" for r in batch)
    # one layer's keys, a third of a token's bytes, may be held twice
    assert per_token * 200 < most[0] <= per_token * 400 * 3 / 4


def test_a_request_that_never_fits_names_the_key_to_raise(model):
    engine = GenerationEngine(model, kv_cache_bytes=50 * 320)
    assert engine.kv_cache_tokens == 50
    fits = [Request([1] * 20, SamplingParams(max_tokens=30, seed=i)) for i in range(3)]
    assert all(r.finish_reason for r in run(engine, fits))
    with pytest.raises(ValueError, match=r"need 51 tokens .* bound is 50: raise .*embedded\.kv_cache_mb to 1 at least"):
        engine.submit(Request([1] * 20, SamplingParams(max_tokens=31)))
    assert not engine.has_work()


def test_a_row_of_nan_fails_alone_and_leaves_nothing_behind():
    """A token whose embedding is NaN ends the rows that meet it, in the prefill or later; no other row notices."""
    model = tiny_model(3)
    bad = 5
    params = [SamplingParams(max_tokens=40, seed=i) for i in range(12)]
    clean = [[t for t in p if t != bad] for p in prompts(12, seed=21, low=3)]
    clean[3].append(bad)
    clean[7] = [bad, bad]
    alone = run(GenerationEngine(model), [Request(p, s) for p, s in zip(clean, params, strict=True)])
    with torch.no_grad():
        model.model.embed_tokens.weight[bad] = float("nan")
    meets = [bad in r.prompt_ids or bad in r.token_ids[:-1] for r in alone]
    assert meets[3] and meets[7] and sum(meets) > 2 and not all(meets)
    engine = GenerationEngine(model, max_batch_size=8)
    for again in range(2):
        got = run(engine, [Request(p, s) for p, s in zip(clean, params, strict=True)])
        for request, expected, broken in zip(got, alone, meets, strict=True):
            if broken:
                assert isinstance(request.error, FloatingPointError)
            else:
                assert request.error is None and request.token_ids == expected.token_ids
                assert request.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert engine.num_running == engine._cache.rows == 0
        # nothing but finite numbers in any slot
        assert all(bool(buffer.isfinite().all()) for buffer in engine._cache._keys + engine._cache._values), again


def test_min_tokens_and_penalties_hold_from_the_first_token_in_any_mix(model):
    """As many rows join as run already: the first token of those that join is edited like the others."""
    prompt = prompts(1, seed=11)[0]
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    first = run(GenerationEngine(model), [Request(prompt, greedy)])[0].token_ids[0]
    engine = GenerationEngine(model, eos_token_ids=[first])
    plain = [engine.submit(Request(p, SamplingParams(max_tokens=30, ignore_eos=True))) for p in prompts(2)]
    engine.step()
    late = engine.submit(Request(prompt, SamplingParams(max_tokens=8, temperature=0.0, min_tokens=4)))
    penalised = SamplingParams(max_tokens=8, temperature=0.0, repetition_penalty=50.0, ignore_eos=True)
    wide = engine.submit(Request([*prompt[:-1], first, prompt[-1]], penalised))
    engine.step()
    assert engine.num_running == 4 and len(plain[0].token_ids) > 1
    while engine.has_work():
        engine.step()
    assert first not in late.token_ids[:4] and len(late.token_ids) >= 4
    assert wide.token_ids[0] not in wide.prompt_ids


def test_bfloat16_model_agrees_with_its_own_forward():
    model = tiny_model(2).to(torch.bfloat16)
    engine = GenerationEngine(model, max_model_len=256)
    for request in run(engine, [Request(p, SamplingParams(max_tokens=20)) for p in prompts(6)]):
        expected = reference_logprobs(model, request)
        torch.testing.assert_close(torch.tensor(request.logprobs), expected, atol=0.05, rtol=0)


def test_equal_prompts_are_computed_once(model):
    engine = GenerationEngine(model)
    widths = []
    forward = engine._forward

    def spy(**kwargs):
        widths.append(tuple(kwargs["input_ids"].shape))
        return forward(**kwargs)

    engine._forward = spy
    batch = run(engine, [Request([5, 6, 7], SamplingParams(max_tokens=4)) for _ in range(8)])
    assert widths == [(1, 3), (8, 1), (8, 1), (8, 1)]
    assert len({tuple(r.token_ids) for r in batch}) > 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temprature": 1.0, "best_of": 2}, r"unknown sampling parameter\(s\) \['best_of', 'temprature'\]"),
        ({"n": 2}, "n=2"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -2}, "top_k=-2"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": "hot"}, "temperature='hot' is not a number"),
        ({"temperature": 1e-46}, r"temperature=1e-46 is out of range: expected 0 \(greedy\) or .* >= 1e-6"),
        ({"top_p": 10**400}, "top_p=1000.* is not a number"),
        ({"top_k": 1.5}, "top_k=1.5 is not an integer"),
        ({"max_tokens": "16.0"}, r"max_tokens='16\.0' is not an integer"),
        ({"max_tokens": math.inf}, "max_tokens=inf is not an integer"),
        ({"ignore_eos": "false"}, "ignore_eos='false' is neither true nor false"),
        ({"stop_token_ids": "12"}, "stop_token_ids='12' is neither an id nor a list of ids"),
        ({"stop_token_ids": 5.0}, r"stop_token_ids=5\.0 is neither an id nor a list of ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids='a' is not an integer"),
        (
            {"stop_token_ids": [7, -1]},
            r"stop_token_ids=frozenset\(.*-1.*\) is out of range: expected ids of at least 0",
        ),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ],
)
def test_bad_sampling_parameters_are_named(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams.from_dict(params, default_max_tokens=4, max_tokens_limit=8)


def test_sampling_parameters_from_a_dictionary():
    def build(params, **kwargs):
        return SamplingParams.from_dict(params, **{"default_max_tokens": 4, "max_tokens_limit": 8, **kwargs})

    verl = dict(temperature=0.5, top_p=1, top_k=-1, repetition_penalty=1.0, logprobs=True)
    assert build(verl) == SamplingParams(max_tokens=4, temperature=0.5, logprobs=True)
    assert build({"max_new_tokens": 100}).max_tokens == 8
    assert build({"max_tokens": 0}).max_tokens == 1
    assert build({"max_tokens": None}, default_max_tokens=-3).max_tokens == 1
    assert build({"seed": 2**62 + 1}).seed == 2**62 + 1
    assert build({"stop_token_ids": [3, np.int64(4)]}).stop_token_ids == {3, 4}
    assert build({"stop_token_ids": 3, "ignore_eos": 1}) == SamplingParams(
        max_tokens=4, stop_token_ids=frozenset({3}), ignore_eos=True, logprobs=False
    )
    assert build({"max_tokens": "3", "top_k": 5.0}) == SamplingParams(max_tokens=3, top_k=5, logprobs=False)
    assert not build({}).logprobs and not build({"logprobs": 0}).logprobs and build({"logprobs": 5}).logprobs
    assert build({}, ignore_eos=True, repetition_penalty=1.2) == SamplingParams(
        max_tokens=4, ignore_eos=True, repetition_penalty=1.2, logprobs=False
    )


def test_an_end_of_sequence_id_below_zero_bans_nothing(model):
    engine = GenerationEngine(model, eos_token_ids=[-1], top_logprobs=-1)
    (request,) = run(engine, [Request([1, 2], SamplingParams(max_tokens=1, min_tokens=1))])
    assert np.isfinite(request.top_logprobs[0][0]).all()


def test_after_the_end_of_the_thread_nobody_waits(model):
    engine = GenerationEngine(model)
    thread = EngineThread(engine, engine.submit)
    long = Request([1, 2], SamplingParams(max_tokens=1900))
    running, idle = thread.submit(long), thread.call(int, when_idle=True)
    thread.stop()
    thread.stop()
    assert running.result(5) is None and long.finish_reason == "abort"
    later = Request([1, 2], SamplingParams(max_tokens=1))
    for future in (idle, thread.call(int), thread.call(int, when_idle=True), thread.submit(later), thread.abort()):
        with pytest.raises(RuntimeError, match="the embedded engine has been shut down"):
            future.result(5)


def test_bad_requests_and_models_are_refused(model):
    engine = GenerationEngine(model, max_model_len=32)
    params = SamplingParams(max_tokens=4)
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        engine.submit(Request([], params))
    with pytest.raises(ValueError, match=r"outside the model's vocabulary \[0, 48\)"):
        engine.submit(Request([1, 48], params))
    with pytest.raises(ValueError, match="max_model_len=32"):
        engine.submit(Request([1] * 30, params))
    with pytest.raises(ValueError, match="max_batch_size=0"):
        GenerationEngine(model, max_batch_size=0)
    assert not engine.has_work()
