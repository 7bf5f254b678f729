# SPDX-License-Identifier: Apache-2.0
"""A training step: what pruning and the sum of squared probabilities add to it, in verl's own engine on the CPU.

A step is what the trainer asks of the actor's engine for one batch: the old log-probabilities with entropy, and one
update (forward, backward, optimiser) with verl's PPO loss. The model has the size of the demo's and a vocabulary of
32k, so nearly all the time goes into the logits. Variants take turns in one process on one engine; times are CPU time
of the process, and each ratio is the median over the rounds of the ratio within a round.

    verl    verl's own code: what +recipe=grpo costs with verl_ext.one_pass=false
    grpo    +recipe=grpo: the pass over the logits
    otb     +recipe=otb: the pass, which also gives the sum of squared probabilities
    dvp     +recipe=dvp: the pass, pruned
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from verl_ext.lab.bench._shared import Parser, alternate, child, ratio

VARIANTS = ("verl", "grpo", "otb", "dvp")
GOAL = 1.05
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_EXT_STRICT": "1",
    "VERL_USE_EXTERNAL_MODULES": "verl_ext.plugin",
    "VERL_EXT_TRAINING_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
}
"""Of a process of its own: verl settles on its platform, and the plugin on extending the engines, at their import."""


def make_engine(folder: str, vocabulary: int, positions: int = 1024) -> Any:
    """verl's FSDP engine with an untrained model of the demo's size."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a", pad_token="a").save_pretrained(folder)
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(
            path=folder, override_config={"attn_implementation": "sdpa"}, enable_gradient_checkpointing=False
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            dtype="float32",
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-6),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def _batch(rows: int, prompt: int, response: int, vocabulary: int, **settings: Any) -> Any:
    """Rows of random tokens as the trainer sends them."""
    import torch
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, vocabulary, (rows, prompt + response), generator=generator)

    def nested(parts: Any) -> Any:
        return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)

    ones = torch.ones(rows, response, dtype=torch.int64)
    columns = {
        "prompts": nested(ids[:, :prompt]),
        "responses": nested(ids[:, prompt:]),
        "input_ids": nested(ids),
        "position_ids": nested(torch.arange(prompt + response).expand(rows, -1)),
        "response_mask": nested(ones),
        "loss_mask": nested(ones),
        "old_log_probs": nested(torch.full((rows, response), -10.4)),
        "advantages": nested(torch.randn(rows, response, generator=generator)),
    }
    shared = {
        "temperature": 1.0,
        "global_batch_size": rows,
        "use_remove_padding": False,
        "use_dynamic_bsz": False,
        "global_token_num": [prompt + response] * rows,
    }
    return tu.get_tensordict(columns, non_tensor_dict={**shared, **settings})


def measure(rounds: int, rows: int, prompt: int, response: int, vocabulary: int, micro: int) -> dict[str, Any]:
    """CPU seconds of the old-log-prob pass and of the update by variant, an entry a round; a first one is not kept."""
    import torch
    import verl  # noqa: F401  (loads the plugin, which extends the engines)
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    from verl_ext.integration.engines.engine import engine_info

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    info = {
        "verl": {},
        "grpo": engine_info("on", None),
        "otb": engine_info("on", None),
        "dvp": engine_info("on", 6.144e-6, set_columns=True),
    }
    loss = partial(ppo_loss, config=FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=micro))

    def step(engine: Any, name: str) -> tuple[float, float]:
        make = partial(_batch, rows, prompt, response, vocabulary, micro_batch_size_per_gpu=micro, **info[name])
        old, new = make(calculate_entropy=True, calculate_sum_pi_squared=name == "otb"), make(calculate_entropy=False)
        start = time.process_time()
        with engine.eval_mode():
            engine.infer_batch(old, loss_function=None)
        middle = time.process_time()
        with engine.train_mode():
            engine.train_batch(new, loss_function=loss)
        return middle - start, time.process_time() - middle

    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(folder, vocabulary)
        torch.set_num_threads(1)
        found = alternate(lambda call: call(), [partial(step, engine, name) for name in VARIANTS], rounds)
    torch.distributed.destroy_process_group()
    parts = ("old_log_prob", "update")
    return {
        name: dict(zip(parts, zip(*times, strict=True), strict=True))
        for name, times in zip(VARIANTS, found, strict=True)
    }


def summarise(times: dict[str, Any]) -> dict[str, Any]:
    """Medians, and the ratios to `grpo` and to `verl` within the rounds."""
    whole = {name: [sum(pair) for pair in zip(*parts.values(), strict=True)] for name, parts in times.items()}
    out: dict[str, Any] = {
        "seconds": {
            name: {**{part: statistics.median(v) for part, v in parts.items()}, "step": statistics.median(whole[name])}
            for name, parts in times.items()
        }
    }
    for one, other in (("otb", "grpo"), ("dvp", "grpo"), ("grpo", "verl"), ("otb", "verl")):
        out[f"{one}_over_{other}"] = ratio(whole[one], whole[other])
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print a table, and with ``--json`` one JSON object in the last line."""
    parser = Parser("step", __doc__)
    parser.number("rounds", 7, "measured rounds")
    parser.number("rows", 32, "rows of the batch")
    parser.number("prompt", 32, "prompt tokens a row")
    parser.number("response", 32, "response tokens a row")
    parser.number("vocabulary", 32768, "size of the vocabulary")
    parser.number("micro", 8, "rows of a micro-batch")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parsed(argv)
    if options.rows % options.micro:
        parser.error(f"--rows {options.rows} is no multiple of --micro {options.micro}")
    shape = [options.rows, options.prompt, options.response, options.vocabulary, options.micro]
    if options.child:
        print("\n" + json.dumps(measure(options.rounds, *shape)))
        return 0
    environment = {**os.environ, **ENVIRONMENT}
    try:
        said = child("step", "--child", *(sys.argv[1:] if argv is None else argv), environment=environment)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    found = summarise(json.loads(said.splitlines()[-1]))
    print(
        f"{options.rows} rows of {options.prompt} + {options.response} tokens, vocabulary {options.vocabulary}, "
        f"{options.rounds} rounds; CPU seconds, medians\n"
    )
    print(f"{'':<8}{'old_log_prob':>14}{'update':>10}{'step':>10}")
    for name, parts in found["seconds"].items():
        print(f"{name:<8}{parts['old_log_prob']:>14.3f}{parts['update']:>10.3f}{parts['step']:>10.3f}")
    print(f"\notb over grpo {found['otb_over_grpo']:.3f} (goal: at most {GOAL})")
    print(f"dvp over grpo {found['dvp_over_grpo']:.3f}")
    print(f"grpo over verl's own {found['grpo_over_verl']:.3f}, otb over verl's own grpo {found['otb_over_verl']:.3f}")
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
