# SPDX-License-Identifier: Apache-2.0
"""`passes.py MODEL DEVICE JSON PROMPTS SAMPLES TOKENS ROUNDS`: the two passes of a training step, by recipe.

verl's own FSDP engine, alone, on rows of random tokens: the old log-probabilities, with what the recipe reads of the
logits, and one update (forward, backward, optimiser), in seconds, and the peak of the allocator. Variants take turns;
the first round is not kept. The JSON is written after every variant.

    verl        grpo with verl's own code                    otb        otb, the sum of squares by the pass
    grpo        grpo by the pass over the logits             dvp        pruned, by the pass
    trloo       trloo, by the pass                           trloo_kpo  trloo with KPO's loss
    otb_verl    otb, the sum of squares by verl's code       trm_exact  the divergence over the vocabulary, that alone

Between the two passes the estimator works on [rows, tokens], on the processors: `advantage_s`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

#: Tokens of a micro-batch: with 151,936 logits a token 2.6 GiB in float32, of which several live at once.
MICRO_TOKENS = 8 * 576


def engine(model: str, cuda: bool) -> Any:
    """verl's FSDP2 engine for one process."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    low = {} if cuda else {"mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}
    made = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(
            path=model, override_config={"attn_implementation": "sdpa"}, enable_gradient_checkpointing=cuda
        ),
        engine_config=FSDPEngineConfig(strategy="fsdp2", dtype="float32", use_torch_compile=False, **low),
        optimizer_config=FSDPOptimizerConfig(lr=1e-6),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def measure(model: str, device: str, path: Path, prompts: int, samples: int, tokens: int, rounds: int) -> None:
    """Measure all variants and write `path`."""
    import torch
    import verl  # noqa: F401  (loads the plugin, which extends the engines)
    from transformers import AutoConfig
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    from verl_ext.integration.config import KPOPolicyLossConfig
    from verl_ext.integration.engines.engine import engine_info
    from verl_ext.lab.bench.step import _batch

    cuda = device == "cuda"
    rows, prompt = prompts * samples, 64 if cuda else 8
    vocabulary = AutoConfig.from_pretrained(model).vocab_size
    micro = max(1, min(rows, MICRO_TOKENS // (prompt + tokens)))
    while rows % micro:
        micro -= 1
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=0, world_size=1)
    made = engine(model, cuda)

    def loss(mode: str) -> Any:
        config = FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=micro,
            policy_loss=(KPOPolicyLossConfig if mode == "kpo" else PolicyLossConfig)(loss_mode=mode),
        )
        return partial(ppo_loss, config=config)

    on, off = engine_info("on", None), {}
    variants: dict[str, tuple[dict[str, Any], bool, str]] = {
        "verl": (off, False, "vanilla"),
        "grpo": (on, False, "vanilla"),
        "otb_verl": (off, True, "vanilla"),
        "otb": (on, True, "vanilla"),
        "dvp": (engine_info("on", 6.144e-6, set_columns=True), False, "vanilla"),
        "trloo_kpo": (on, False, "kpo"),
    }
    variants["trloo"] = variants["grpo"]
    found: dict[str, Any] = {
        "tokens": {"rows": rows, "prompt": prompt, "response": tokens, "micro_rows": micro},
        "vocabulary": vocabulary,
        "rounds": rounds,
        "variants": {},
    }

    def timed(function: Any) -> tuple[float, float]:
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun, torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0

    estimators = advantages(variants, prompts, samples, tokens)

    def once(name: str) -> dict[str, float]:
        info, squares, mode = variants[name]
        shape = (rows, prompt, tokens, vocabulary)
        make = partial(_batch, *shape, micro_batch_size_per_gpu=micro, **info)
        old, new = make(calculate_entropy=True, calculate_sum_pi_squared=squares), make(calculate_entropy=False)

        def score() -> None:
            with made.eval_mode():
                made.infer_batch(old, loss_function=None)

        def update() -> None:
            with made.train_mode():
                made.train_batch(new, loss_function=loss(mode))

        old_s, old_gib = timed(score)
        advantage_s, _ = timed(estimators[name])
        update_s, update_gib = timed(update)
        return {
            "old_log_prob_s": old_s,
            "advantage_s": advantage_s,
            "update_s": update_s,
            "old_log_prob_gib": old_gib,
            "update_gib": update_gib,
        }

    taken: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        for name in list(variants):
            try:
                result = once(name)
            except Exception as error:  # what one recipe cannot, the others may
                found["variants"][name] = {"failed": f"{type(error).__name__}: {error}"[:600]}
                del variants[name]
                continue
            if turn:
                taken[name].append(result)
                medians = {key: statistics.median(one[key] for one in taken[name]) for key in result}
                found["variants"][name] = {key: round(value, 4) for key, value in medians.items()}
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    found["variants"]["trm_exact"] = divergence(torch, timed, device, rows * tokens, vocabulary, micro * tokens)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    torch.distributed.destroy_process_group()


def advantages(names: Iterable[str], prompts: int, samples: int, tokens: int) -> dict[str, Callable[[], Any]]:
    """By variant, a call of its estimator on rows with a reward each."""
    import numpy as np
    import torch
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    from verl_ext.methods.otb import otb_advantage
    from verl_ext.methods.trloo import trloo_advantage

    index = np.repeat(np.arange(prompts), samples)
    mask = torch.ones(len(index), tokens)
    rewards = torch.zeros_like(mask)
    rewards[:, -1] = torch.rand(len(index), generator=torch.Generator().manual_seed(2))
    squares = torch.full_like(mask, 0.1)
    calls: dict[str, Callable[[], Any]] = {
        "grpo": partial(compute_grpo_outcome_advantage, rewards, mask, index),
        "trloo": partial(trloo_advantage, rewards, mask, index),
        "otb": partial(otb_advantage, rewards, mask, index, old_log_probs=-2 * mask, sum_pi_squared=squares),
    }
    return {name: calls.get(name.split("_")[0], calls["grpo"]) for name in names}


def divergence(torch: Any, timed: Any, device: str, tokens: int, vocabulary: int, micro: int) -> dict[str, float]:
    """Of sampler and trainer over the vocabulary, a micro-batch's tokens at a time, scaled to all tokens."""
    from verl_ext.methods.rejection import exact_token_kl

    few = min(micro, 512)
    ours = torch.log_softmax(torch.randn(few, vocabulary, device=device), -1)
    theirs = torch.log_softmax(torch.randn(few, vocabulary, device=device), -1)
    timed(lambda: exact_token_kl(theirs[None], ours[None]))
    seconds, peak = timed(lambda: exact_token_kl(theirs[None], ours[None]))
    return {"old_log_prob_s": round(seconds * tokens / few, 4), "old_log_prob_gib": round(peak, 3)}


if __name__ == "__main__":
    model, device, out = sys.argv[1:4]
    os.environ |= {"VERL_USE_EXTERNAL_MODULES": "verl_ext.plugin", "VERL_EXT_STRICT": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
    }
    if device == "cpu":
        os.environ |= {"VERL_PLATFORM": "cpu", "VERL_EXT_TRAINING_THREADS": "1"}
    measure(model, device, Path(out), *map(int, sys.argv[4:8]))
