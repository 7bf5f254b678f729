# SPDX-License-Identifier: Apache-2.0
"""verl's real FSDP engine for actor and reference in one process, for test_imitation.py: gradients of the hybrid loss.

python imitation_process.py MODEL TEACHER OUT RANK WORLD_SIZE
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from engine_process import LENGTHS, TEMPERATURES, batch, fsdp_engine, rows

TOP_K, LAMBDA = 8, 0.5
PADDING = 6
"""Row of `token_kl` that has no model tokens."""
TEACHERS = {"top": TOP_K, "all": None, "full": None, "server": TOP_K}


def main(model: str, teacher: str, out: str, rank: int) -> None:
    import torch
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.workers.config import DistillationConfig, DistillationLossConfig, FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    from verl_ext.integration.config import HybridImitationPolicyLossConfig
    from verl_ext.integration.engines import imitation

    torch.distributed.init_process_group("gloo")
    reference, actor = fsdp_engine(teacher, forward_only=True), fsdp_engine(model)
    vocabulary = actor.module.config.vocab_size
    options = HybridImitationPolicyLossConfig(loss_mode="hybrid_imitation", imitation_lambda=LAMBDA, teacher_topk=TOP_K)
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, loss_agg_mode="token-mean", policy_loss=options
    )
    of_verl = DistillationLossConfig(
        loss_mode="forward_kl_topk", topk=TOP_K, use_policy_gradient=False, distillation_loss_coef=0.0
    )
    server = DistillationConfig(distillation_loss=of_verl)
    results: dict[str, Any] = {}
    for rmpad in (False, True):
        for kind in ("cool", "rows"):
            settings = {
                "temperature": TEMPERATURES[kind],
                "use_remove_padding": rmpad,
                "use_dynamic_bsz": False,
                "micro_batch_size_per_gpu": 2,
            }
            for name in TEACHERS:
                chosen = list(range(len(LENGTHS)))
                told = {imitation.DIRECTION: "reverse", imitation.FULL: name == "full"}
                data = batch(chosen, vocabulary, **settings, **told, distillation_use_topk=name == "server")
                if name != "full":
                    top_k = {imitation.TOP_K: vocabulary if name == "all" else TOP_K}
                    with torch.no_grad(), reference.eval_mode():
                        output = reference.forward_backward_batch(
                            batch(chosen, vocabulary, **settings, **top_k), loss_function=None, forward_only=True
                        )
                    for column in ("teacher_ids", "teacher_logprobs"):
                        found = list(output["model_output"][column].unbind())
                        data[column] = torch.nested.as_nested_tensor(found, layout=torch.jagged)
                loss = partial(ppo_loss, config=config)
                if name == "server":  # as verl's worker does with a distillation teacher, settings of our launch
                    loss = partial(distillation_ppo_loss, config=config, distillation_config=server)
                with actor.train_mode():
                    actor.optimizer_zero_grad()
                    output = actor.forward_backward_batch(data, loss_function=loss)
                    gradient = {n: p.grad.full_tensor().clone() for n, p in actor.module.named_parameters()}
                metrics = {key: getattr(value, "values", value) for key, value in output["metrics"].items()}
                results[f"{'packed' if rmpad else 'padded'}/{kind}/{name}"] = {"grad": gradient, "metrics": metrics}
    for kind in ("cool", "rows"):
        for name, top_k in TEACHERS.items():
            results[f"plain/{kind}/{name}"] = {"grad": plain(model, teacher, TEMPERATURES[kind], top_k, vocabulary)}
    results["token_kl"] = token_kl(actor, teacher, vocabulary)
    torch.save(results, f"{out}.{rank}")
    torch.distributed.destroy_process_group()


def token_kl(actor: Any, sampler: str, vocabulary: int) -> dict[str, Any]:
    """The engine's divergence of a sampler with the weights `sampler`: exact, and of its top tokens.

    Names are layout/temperature/K; one row is padding, and one is of another answer than its distributions.
    """
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM
    from verl.utils import tensordict_utils as tu

    from verl_ext.integration.engines.token_kl import IDS, LOG_PROBS, WANTED

    network = AutoModelForCausalLM.from_pretrained(sampler, dtype=torch.float32)
    chosen, every = list(range(len(LENGTHS))), rows(vocabulary)

    def run(kind: str, top_k: int | None, rmpad: bool, wrong: str = "") -> Any:
        said, reported, masks = [], [], []
        for number, ((prompt, _), row) in enumerate(zip(LENGTHS, every, strict=True)):
            degree = TEMPERATURES[kind][number] if kind == "rows" else TEMPERATURES[kind]
            with torch.no_grad():
                whole = (network(row["input_ids"][None]).logits[0, prompt - 1 : -1] / degree).log_softmax(-1)
            reported.append(whole.gather(-1, row["responses"][:, None]).squeeze(-1))
            masks.append(row["response_mask"] * int(number != PADDING))
            sampled = whole[row["response_mask"].bool()]
            if top_k is None:
                said.append({LOG_PROBS: sampled.numpy()})
            else:
                found = sampled.topk(top_k)
                said.append({LOG_PROBS: found.values.numpy(), IDS: found.indices.numpy().astype(np.int32)})
        if wrong == "short":
            said[1][LOG_PROBS] = said[1][LOG_PROBS][:-1]
        if wrong == "other":
            said[1][LOG_PROBS] = said[1][LOG_PROBS][::-1].copy()
        settings = {"use_remove_padding": rmpad, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
        data = batch(chosen, vocabulary, temperature=TEMPERATURES[kind], **settings, **{WANTED: True})
        for name, columns in (("rollout_log_probs", reported), ("response_mask", masks)):
            data[name] = torch.nested.as_nested_tensor(columns, layout=torch.jagged)
        tu.assign_non_tensor_stack(data, "extra_fields", said)
        with torch.no_grad(), actor.eval_mode():
            output = actor.forward_backward_batch(data, loss_function=None, forward_only=True)
        return list(output["model_output"]["token_kl"].unbind())

    found: dict[str, Any] = {
        f"{'packed' if rmpad else 'padded'}/{kind}/{top_k}": run(kind, top_k, rmpad)
        for rmpad in (False, True)
        for kind in ("cool", "rows")
        for top_k in (None, 1, TOP_K, vocabulary)
    }
    for wrong in ("short", "other"):
        try:
            run("cool", None, True, wrong)
        except RuntimeError as error:
            found[wrong] = str(error)
    return found


def plain(model: str, teacher: str, temperature: Any, top_k: int | None, vocabulary: int) -> dict[str, Any]:
    """The gradient by the formula, row by row, with autograd through the divergence."""
    import torch
    from transformers import AutoModelForCausalLM

    student, other = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (model, teacher))
    total, tokens = torch.zeros(()), 0
    for number, ((prompt, _), row) in enumerate(zip(LENGTHS, rows(vocabulary), strict=True)):
        degree = temperature[number] if isinstance(temperature, list) else temperature
        ids = row["input_ids"][None]
        x = student(ids).logits[0, prompt - 1 : -1] / degree
        with torch.no_grad():
            y = other(ids).logits[0, prompt - 1 : -1] / degree
        kept = y.topk(top_k or vocabulary).indices
        p, q = x.gather(-1, kept).log_softmax(-1), y.gather(-1, kept).log_softmax(-1)
        mask = row["response_mask"].bool()
        kl = torch.where(mask, (p.exp() * (p - q)).sum(-1), 0.0)
        ahead = torch.stack([kl[t + 1 :].sum() for t in range(len(kl))]).detach()
        log_prob = x.log_softmax(-1).gather(-1, row["responses"][:, None]).squeeze(-1)
        sparse = (ahead - LAMBDA * row["advantages"]) * (log_prob - row["old_log_probs"]).exp()
        total, tokens = total + (kl + sparse)[mask].sum(), tokens + int(mask.sum())
    (total / tokens).backward()
    return {name: parameter.grad for name, parameter in student.named_parameters()}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
