# SPDX-License-Identifier: Apache-2.0
"""Gradients of verl's own actor worker on rows made here, in a process of its own (the platform is set at import).

Run as ``python gradients.py OUT.pt RANK WORLD_SIZE`` in torch's environment. It trains on several batches with a
learning rate of zero and saves, for each, the gradient of every update, what the micro-batches held and the CPU time.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any

VOCAB, TEMPERATURE = 40, 1.0


def one_row(number: int, prompt: int, response: int) -> dict[str, Any]:
    """A row with tokens and advantages that follow from its number."""
    ids = [(7 * number + 3 * position + number * position) % VOCAB for position in range(prompt + response)]
    return {
        "prompt": ids[:prompt],
        "response": ids[prompt:],
        "advantage": [((5 * number + position) % 7 - 3) / 2 for position in range(response)],
        "key": f"p{number // 4}_{number % 4}_0",
    }


def split(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The same tokens in two rows, as an agent that answers in two calls leaves them."""
    half = len(row["response"]) // 2
    uid = row["key"].rsplit("_", 1)[0]
    first = {**row, "response": row["response"][:half], "advantage": row["advantage"][:half], "key": f"{uid}_0"}
    second = {
        "prompt": row["prompt"] + row["response"][:half],
        "response": row["response"][half:],
        "advantage": row["advantage"][half:],
        "key": f"{uid}_1",
    }
    return [first, second]


def padding(number: int) -> dict[str, Any]:
    """What verl appends: a fresh uid and no token to learn from."""
    return {"prompt": [2] * 6, "response": [2], "advantage": [9.0], "key": f"pad_{number}_0", "padding": True}


PLAIN = [one_row(number, 3 + number % 4, 4 + 2 * (number % 3)) for number in range(8)]
SPLIT = [part for row in PLAIN for part in split(row)]
DOUBLED = [{**row, "key": row["key"][:-1] + str(index)} for row in PLAIN for index in range(2)]
ONE_TALKS = [*(part for row in PLAIN[:1] for part in split(row)), *PLAIN[1:]]
EVEN = [one_row(number, 10, 6) for number in range(64)]
UNEVEN = [
    {
        **one_row(number, *((120, 8) if number == 0 else (10, 6))),
        "key": f"p0_0_{number}" if number < 57 else f"p1_{number}_0",
    }
    for number in range(64)
]

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def cases() -> list[dict[str, Any]]:
    """Each case: rows, updates (None: verl's own mini-batches of 4 rows), loss_agg_mode, tokens of a micro-batch."""
    out: list[dict[str, Any]] = []
    for mode in MODES:
        for name, rows in (("plain", PLAIN), ("split", SPLIT), ("doubled", DOUBLED), ("one_talks", ONE_TALKS)):
            for updates in (1, 3):
                out.append({"name": name, "rows": rows, "updates": updates, "mode": mode, "tokens": 64})
        for name, rows in (("plain", PLAIN), ("split", SPLIT)):
            out.append({"name": name, "rows": rows, "updates": None, "mode": mode, "tokens": 64})
        out.append({"name": "big_micro", "rows": PLAIN, "updates": 1, "mode": mode, "tokens": 4096})
    for name, rows in (("even", EVEN), ("uneven", UNEVEN)):
        out.append({"name": name, "rows": rows, "updates": 4, "mode": "token-mean", "tokens": 160})
    return out


def tensordict(rows: list[dict[str, Any]]) -> Any:
    """The columns that the transfer queue hands to a worker, nested as verl keeps them."""
    import torch
    from verl.utils import tensordict_utils as tu

    def nested(values: list[list[Any]], dtype: Any) -> Any:
        return torch.nested.as_nested_tensor([torch.tensor(v, dtype=dtype) for v in values], layout=torch.jagged)

    ids = [row["prompt"] + row["response"] for row in rows]
    mask = [[0 if row.get("padding") else 1] * len(row["response"]) for row in rows]
    return tu.get_tensordict(
        {
            "prompts": nested([row["prompt"] for row in rows], torch.int64),
            "responses": nested([row["response"] for row in rows], torch.int64),
            "input_ids": nested(ids, torch.int64),
            "position_ids": nested([list(range(len(row))) for row in ids], torch.int64),
            "response_mask": nested(mask, torch.int64),
            "loss_mask": nested(mask, torch.int64),
            "old_log_probs": nested([[-3.6] * len(row["response"]) for row in rows], torch.float32),
            "advantages": nested([row["advantage"] for row in rows], torch.float32),
        },
        {},
    )


def make_worker(attention: str = "sdpa", ulysses: int = 1, **model: Any) -> Any:
    """verl's actor worker around a small Llama, AdamW with learning rate 0 and no clipping; `model`: further keys."""
    import tempfile

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(
                    path=folder,
                    load_tokenizer=False,
                    override_config={"attn_implementation": attention},
                    use_remove_padding=ulysses > 1,
                    enable_gradient_checkpointing=False,
                    **model,
                ),
                engine_config=FSDPEngineConfig(
                    strategy="fsdp2",
                    dtype="float32",
                    mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                    use_torch_compile=False,
                    use_dynamic_bsz=True,
                    max_token_len_per_gpu=64,
                    ulysses_sequence_parallel_size=ulysses,
                ),
                optimizer_config=FSDPOptimizerConfig(lr=0.0, weight_decay=0.0, clip_grad=1e9, total_training_steps=1),
            )
        )
        worker.reset()
    return worker


def run(worker: Any, case: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Train on one case as the trainer would hand it to this rank."""
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import ActorConfig, FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    from verl_ext.integration.parts.update import updates

    rows, count = list(case["rows"]), case["updates"]
    multiple = 4 if count is None else updates.row_multiple(CONFIG, count, world, critic=False)
    rows += [padding(number) for number in range(-len(rows) % multiple)]
    tags = [{"is_padding": bool(row.get("padding")), "seq_len": len(row["prompt"] + row["response"])} for row in rows]
    keys = [row["key"] for row in rows]
    if count is None:
        own = rows[rank * len(rows) // world : (rank + 1) * len(rows) // world]
        sizes = {"mini_batch_size": 4, "global_batch_size": 4}
    else:
        dealt = updates.deal([tag["seq_len"] for tag in tags], [tag["is_padding"] for tag in tags], count, world)
        own = [rows[row] for part in dealt for row in part[rank]]
        sizes = updates.settings(keys, tags, 4, count, case["mode"])
    data = tensordict(own)
    tu.assign_non_tensor(
        data,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        temperature=TEMPERATURE,
        calculate_entropy=True,
        max_token_len_per_gpu=case["tokens"],
        **sizes,
    )
    config: ActorConfig = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        ppo_mini_batch_size=4,
        use_dynamic_bsz=True,
        loss_agg_mode=case["mode"],
        loss_scale_factor=8 if case["mode"].endswith("norm") else None,
        entropy_coeff=0.01,
    )
    worker.set_loss_fn(partial(ppo_loss, config=config))
    gradients: list[Any] = []
    micro: list[dict[str, int]] = []
    engine = worker.engine
    step, forward = engine.optimizer_step, engine.forward_step

    def recording_step() -> Any:
        whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in engine.module.parameters()]
        gradients.append(torch.cat([g.flatten() for g in whole]).double())
        return step()

    def recording_forward(micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = micro_batch["input_ids"].offsets().diff().tolist()
        micro.append({"update": len(gradients), "rows": len(lengths), "tokens": sum(lengths), "longest": max(lengths)})
        return forward(micro_batch, *args, **kwargs)

    engine.optimizer_step, engine.forward_step = recording_step, recording_forward
    try:
        start = time.thread_time()
        output = worker.train_mini_batch(data)
        seconds = time.thread_time() - start
    finally:
        engine.optimizer_step, engine.forward_step = step, forward
    tokens = sum(len(row["response"]) for row in rows if not row.get("padding"))
    return {
        "name": case["name"],
        "mode": case["mode"],
        "updates": count,
        "rows": len(rows),
        "loss": list(tu.get(output, "metrics")["loss"]),
        "gradients": gradients,
        "micro": micro,
        "seconds": seconds,
        "response_tokens": tokens,
        "sizes": sizes,
    }


CONFIG: Any = None


def main(out: str, rank: int, world: int) -> None:
    os.environ.update(VERL_PLATFORM="cpu", OMP_NUM_THREADS="1", VERL_EXT_TRAINING_THREADS="1")
    from omegaconf import OmegaConf

    global CONFIG
    CONFIG = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "actor": {"use_dynamic_bsz": True},
                "rollout": {"log_prob_use_dynamic_bsz": True},
                "ref": {"log_prob_use_dynamic_bsz": True},
            }
        }
    )
    worker = make_worker()
    results = [run(worker, case, rank, world) for case in cases()]
    if rank == 0:
        import torch

        torch.save(results, out)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
