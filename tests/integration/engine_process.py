# SPDX-License-Identifier: Apache-2.0
"""One rank of verl's real FSDP engine on the CPU, for test_engine.py: runs the cases and leaves what came out.

python engine_process.py MODEL OUT RANK WORLD_SIZE
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

LENGTHS = [(3, 5), (6, 4), (2, 9), (5, 1), (4, 7), (1, 6), (7, 2), (3, 8)]
"""(prompt, response) tokens of each row; row i goes to rank i % world size."""

VOCABULARY = 259
RHO = 0.05
# Nothing is clipped, so that the loss has a short definition.
LOSS = {"entropy_coeff": 0.1, "clip_ratio_low": 1e6, "clip_ratio_high": 1e6, "clip_ratio_c": 1e9}
ULYSSES_ROWS = 3
AGENT_OF = [0, 1, 2, 0, 1, 0, -1, 1]
"""Agent of each row, -1 for none; on two ranks the third has rows on one of them only. A fourth agent has none."""
AGENTS = 4
TEMPERATURES = {"one": 1.0, "cool": 0.7, "rows": [0.5 + 0.2 * row for row in range(len(LENGTHS))]}


def rows(vocabulary: int) -> list[dict[str, Any]]:
    """Random prompts and responses, the same in every process; one response token in five is a tool's."""
    import torch

    generator = torch.Generator().manual_seed(3)
    out = []
    for prompt, response in LENGTHS:
        ids = torch.randint(3, vocabulary, (prompt + response,), generator=generator)
        mask = (torch.rand(response, generator=generator) > 0.2).long()
        mask[0] = 1
        out.append(
            {
                "prompts": ids[:prompt],
                "responses": ids[prompt:],
                "input_ids": ids,
                "position_ids": torch.arange(prompt + response),
                "response_mask": mask,
                "loss_mask": mask.clone(),
                "old_log_probs": -5.5 + 0.1 * torch.randn(response, generator=generator),
                "advantages": torch.randn(response, generator=generator),
            }
        )
    return out


def batch(chosen: list[int], vocabulary: int, **settings: Any) -> Any:
    """The rows as verl's trainer sends them: jagged columns and non-tensor settings."""
    import torch
    from verl.utils import tensordict_utils as tu

    every = rows(vocabulary)
    columns = {
        name: torch.nested.as_nested_tensor([every[i][name] for i in chosen], layout=torch.jagged) for name in every[0]
    }
    temperature = settings.pop("temperature")
    if isinstance(temperature, list):
        columns["temperature"] = torch.tensor([temperature[i] for i in chosen])
    else:
        settings["temperature"] = temperature
    return tu.get_tensordict(columns, non_tensor_dict={"global_batch_size": len(LENGTHS), **settings})


def fsdp_engine(path: str, forward_only: bool = False) -> Any:
    """verl's engine with the model at `path`, in float32."""
    import verl  # noqa: F401  (loads the plugin)
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    float32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(
            path=path, override_config={"attn_implementation": "sdpa"}, enable_gradient_checkpointing=False
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            dtype="float32",
            mixed_precision=float32,
            use_torch_compile=False,
            forward_only=forward_only,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=0.0),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def main(model: str, out: str, rank: int, world: int) -> None:
    import torch
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    from verl_ext.integration.engines.engine import OnePassMixin, engine_info

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    engine = fsdp_engine(model)
    assert isinstance(engine, OnePassMixin)
    vocabulary = engine.module.config.vocab_size
    chosen = list(range(rank, len(LENGTHS), world))
    loss = partial(
        ppo_loss,
        config=FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, **LOSS),
    )
    results: dict[str, Any] = {"class": type(engine).__mro__[1].__name__}
    for rmpad in (False, True):
        for kind, temperature in TEMPERATURES.items():
            for name, info in {
                "verl": {},
                "pass": engine_info("auto", None),
                "pruned": engine_info("auto", RHO, set_columns=True),
            }.items():
                settings = {
                    "temperature": temperature,
                    "use_remove_padding": rmpad,
                    "use_dynamic_bsz": False,
                    "micro_batch_size_per_gpu": 2,
                    "calculate_entropy": True,
                    **info,
                }
                found: dict[str, Any] = {}
                data = batch(chosen, vocabulary, calculate_sum_pi_squared=True, **settings)
                with torch.no_grad(), engine.eval_mode():
                    output = engine.forward_backward_batch(data, loss_function=None, forward_only=True)
                found.update(
                    {key: [row.clone() for row in value.unbind()] for key, value in output["model_output"].items()}
                )
                data = batch(chosen, vocabulary, **settings)
                with engine.train_mode():
                    engine.optimizer_zero_grad()
                    output = engine.forward_backward_batch(data, loss_function=loss)
                    found["grad"] = {
                        key: value.grad.full_tensor().clone() for key, value in engine.module.named_parameters()
                    }
                found["metrics"] = {key: getattr(value, "values", value) for key, value in output["metrics"].items()}
                found["mask_kept"] = torch.equal(
                    data["response_mask"].values(), batch(chosen, vocabulary, **settings)["response_mask"].values()
                )
                results[f"{'packed' if rmpad else 'padded'}/{kind}/{name}"] = found
    results["empty"] = empty(engine, vocabulary)
    results["agents"] = agents(engine, chosen, vocabulary)
    results["steps"] = steps(engine, chosen, vocabulary)
    if world > 1:
        results["sharded"] = sharded_vocabulary(engine, vocabulary)
        results["ulysses"] = ulysses(engine, vocabulary)
    torch.save(results, f"{out}.{rank}")
    torch.distributed.destroy_process_group()


def empty(engine: Any, vocabulary: int) -> dict[str, Any]:
    """What one micro-batch reports of a pruned update: with tokens in the safe set, with none, with none at all."""
    import torch
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    from verl_ext.integration.engines.engine import engine_info

    config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, **LOSS)
    found = {}
    for name, rho, kept in (("some", 1e-6, 1), ("outside", 1.0, 1), ("padding", 1e-6, 0)):
        settings = {"use_remove_padding": True, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
        data = batch([2, 3], vocabulary, temperature=1.0, calculate_entropy=True, **settings, **engine_info("on", rho))
        masks = [mask * kept for mask in data["response_mask"].unbind()]
        data["response_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, loss_function=partial(ppo_loss, config=config))
            gradients = [value.grad for value in engine.module.parameters()]
        found[name] = {
            "metrics": output["metrics"],
            "moved": any(bool(gradient.full_tensor().any()) for gradient in gradients if gradient is not None),
        }
    return found


def steps(engine: Any, chosen: list[int], vocabulary: int) -> dict[str, Any]:
    """How far an update moves the weights, and its metrics, with rejected rows and with a factor of the learning rate.

    Rows with an odd number are rejected, which on two ranks are all rows of the second; or every row.
    """
    import torch
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    from verl_ext.integration.engines.update_step import LEARNING_RATE, NORMALISE

    start = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    kept = {"some": [1 - i % 2 for i in chosen], "none": [0 for _ in chosen], "every": [1 for _ in chosen]}
    found = {}
    for name, rows_kept, mode, told in (
        ("verl", "every", "token-mean", {}),
        ("slower", "every", "token-mean", {LEARNING_RATE: 0.25}),
        ("every", "every", "token-mean", {NORMALISE: "all"}),
        ("all", "some", "token-mean", {NORMALISE: "all"}),
        ("kept", "some", "token-mean", {NORMALISE: "kept"}),
        ("all rows", "some", "seq-mean-token-sum", {NORMALISE: "all"}),
        ("kept rows", "some", "seq-mean-token-sum", {NORMALISE: "kept"}),
        ("none", "none", "token-mean", {NORMALISE: "all"}),
        ("none kept", "none", "token-mean", {NORMALISE: "kept"}),
    ):
        data = batch(
            chosen,
            vocabulary,
            temperature=1.0,
            use_remove_padding=False,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
            calculate_entropy=True,
            **told,
        )
        masks = zip(data["response_mask"].unbind(), kept[rows_kept], strict=True)
        data["response_mask"] = torch.nested.as_nested_tensor([mask * one for mask, one in masks], layout=torch.jagged)
        config = FSDPActorConfig(
            strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, loss_agg_mode=mode, **LOSS
        )
        engine.optimizer.state.clear()
        engine.optimizer.param_groups[0].update(lr=0.01, weight_decay=0.1)
        with engine.train_mode():
            metrics = engine.train_batch(data, partial(ppo_loss, config=config))["metrics"]
        parameters = dict(engine.module.named_parameters())
        moved = sum(float((parameters[n].detach() - start[n]).full_tensor().square().sum()) for n in start)
        found[name] = {
            "moved": moved**0.5,
            "grad_norm": None if "grad_norm" not in metrics else float(metrics["grad_norm"]),
            "skipped": metrics.get("skipped_share"),
            "factor": metrics.get("lr_factor"),
            "lr": engine.optimizer.param_groups[0]["lr"],
        }
        with torch.no_grad():
            for n, value in parameters.items():
                value.copy_(start[n])
    return found


def agents(engine: Any, chosen: list[int], vocabulary: int) -> dict[str, Any]:
    """Gradients with the agents separated and without, and of the loss of each agent's tokens by a backward of its own.

    The loss has terms for entropy and KL. Also with dropout, in the attention.
    """
    import torch
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    from verl_ext.integration.engines.agent_gradients import AGENT
    from verl_ext.integration.engines.agent_gradients import AGENTS as COUNT
    from verl_ext.integration.engines.engine import engine_info

    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, use_kl_loss=True, kl_loss_coef=0.3, **LOSS
    )
    loss = partial(ppo_loss, config=config)

    def gradient(rmpad: bool, info: dict[str, Any], loss_function: Any, **told: Any) -> tuple[dict[str, Any], Any]:
        data = batch(
            chosen,
            vocabulary,
            temperature=0.7,
            use_remove_padding=rmpad,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2,
            calculate_entropy=True,
            **info,
            **told,
        )
        pairs = zip(data["old_log_probs"].unbind(), data["advantages"].unbind(), strict=True)
        reference = [old + 0.3 * advantage for old, advantage in pairs]
        data["ref_log_prob"] = torch.nested.as_nested_tensor(reference, layout=torch.jagged)
        data[AGENT] = torch.tensor([AGENT_OF[i] for i in chosen])
        torch.manual_seed(1)
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, loss_function=loss_function)
            found = {name: value.grad.full_tensor().clone() for name, value in engine.module.named_parameters()}
        return found, output

    def only(number: int) -> Any:
        def own(model_output: Any, data: Any, dp_group: Any = None) -> Any:
            agent = data[AGENT].clamp(min=0)  # rows of no agent go with the first
            masks = zip(data["response_mask"].unbind(), agent, strict=True)
            rows = [mask * int(one == number) for mask, one in masks]
            data["response_mask"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            return loss(model_output=model_output, data=data, dp_group=dp_group)

        return own

    found: dict[str, Any] = {}
    for name, info, rmpad in (
        ("verl", {}, False),
        ("pass", engine_info("on", None), True),
        ("pruned", engine_info("on", RHO), True),
    ):
        separated, output = gradient(rmpad, info, loss, **{COUNT: AGENTS})
        whole, plain = gradient(rmpad, info, loss)
        found[name] = {
            "separated": separated,
            "whole": whole,
            "own": [gradient(rmpad, info, only(number))[0] for number in range(AGENTS)],
            "metrics": output["metrics"],
            "plain_metrics": plain["metrics"],
        }
    attention = [part for part in engine.module.modules() if hasattr(part, "attention_dropout")]
    assert attention
    for part in attention:
        part.attention_dropout = 0.5
    found["dropout"] = [gradient(False, {}, loss, **told)[0] for told in ({COUNT: AGENTS}, {})]
    for part in attention:
        part.attention_dropout = 0.0
    return found


def sharded_vocabulary(engine: Any, vocabulary: int) -> dict[str, Any]:
    """What the engine makes of logits that tensor parallelism has left sharded over the vocabulary, ours and verl's."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    from verl_ext.integration.engines.engine import engine_info

    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found = {}
    for name, info in {"verl": {}, "pass": engine_info("on", None)}.items():
        for rmpad in (False, True):
            data = batch(
                [0, 1, 2],
                vocabulary,
                temperature=0.7,
                use_remove_padding=rmpad,
                calculate_entropy=True,
                calculate_sum_pi_squared=True,
                **info,
            )
            inputs, arguments = engine.prepare_model_inputs(data)
            generator = torch.Generator().manual_seed(5)
            logits = 3 * torch.randn((*inputs["input_ids"].shape, vocabulary), generator=generator)
            output = type("Output", (), {"logits": distribute_tensor(logits, mesh, [Shard(-1)])})()
            made = engine.prepare_model_outputs(output, arguments, data, None)
            found[f"{name}/{rmpad}"] = {key: [row.clone() for row in value.unbind()] for key, value in made.items()}
    return found


def ulysses(engine: Any, vocabulary: int) -> dict[str, Any]:
    """What the engine makes of this rank's slice of the logits under Ulysses sequence parallelism, ours and verl's."""
    import torch
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group

    from verl_ext.integration.engines.engine import engine_info

    set_ulysses_sequence_parallel_group(torch.distributed.group.WORLD)
    engine.use_ulysses_sp, engine.ulysses_sequence_parallel_size = True, torch.distributed.get_world_size()
    found = {}
    for name, info in {"verl": {}, "pass": engine_info("on", None), "pruned": engine_info("on", RHO, True)}.items():
        data = batch(
            list(range(ULYSSES_ROWS)),  # an odd number of tokens, so that the slices are padded
            vocabulary,
            temperature=0.7,
            use_remove_padding=True,
            calculate_entropy=True,
            calculate_sum_pi_squared=True,
            **info,
        )
        inputs, arguments = engine.prepare_model_inputs(data)
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        shape = (1, inputs["input_ids"].shape[1], vocabulary)
        logits = (0.7 * torch.randn(shape, generator=generator)).requires_grad_()
        output = type("Output", (), {"logits": logits})()
        made = engine.prepare_model_outputs(output, arguments, data, None)
        weight = torch.linspace(-1, 1, made["log_probs"].values().numel())
        taken = torch.cat([torch.arange(p + r) >= p - 1 for p, r in LENGTHS[:ULYSSES_ROWS]])
        taken[torch.tensor([p + r for p, r in LENGTHS[:ULYSSES_ROWS]]).cumsum(0) - 1] = False
        loss = (taken * weight * (made["log_probs"].values() + 0.3 * made["entropy"].values())).sum()
        loss.backward()
        found[name] = {
            "taken": taken,
            "grad": logits.grad,
            "pad": arguments["pad_size"],
            **{key: value.values().detach() for key, value in made.items()},
        }
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
