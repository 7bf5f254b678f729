# SPDX-License-Identifier: Apache-2.0
"""One rank of verl's actor worker that trains on the same turns a sequence a call and merged: test_merged_gradients.

python merged_process.py OUT ULYSSES RANK WORLD_SIZE
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import verl  # noqa: F401  (loads the plugin)

sys.path.insert(0, str(Path(__file__).parent))

import turn_advantages  # noqa: E402
from turn_advantages import VERLS  # noqa: E402

from verl_ext.integration.estimators import ESTIMATORS  # noqa: E402

KPO = {"_target_": "verl_ext.integration.config.KPOPolicyLossConfig", "loss_mode": "kpo", "kalman_q": 0.05}
DRIFT = {
    "_target_": "verl_ext.integration.config.DivergenceAugmentedPolicyLossConfig",
    "loss_mode": "divergence_augmented",
}
CASES: dict[str, dict[str, Any]] = {
    "vanilla": {"entropy_coeff": 0.01, "use_kl_loss": True},
    "three updates": {"updates": 3, "loss_agg_mode": "seq-mean-token-sum"},
    "token weights": {"weights": True},
    "kpo": {"policy_loss": KPO},
    "kpo along the sequence": {"policy_loss": {**KPO, "reset": "sequence"}},
    "divergence_augmented": {"policy_loss": DRIFT},
    "cispo": {"policy_loss": {"loss_mode": "cispo"}},
    "a rejected turn": {"rejected": True},
    "dvp": {"rho": 0.2},
    "lora": {"lora": True},
    **{f"advantages of {name}": {"estimator": name} for name in (*ESTIMATORS, "mix", *VERLS)},
}


def column(fields: dict[str, Any], name: str, plus: float = 0.0, scale: float = 0.3) -> Any:
    """A number a token of the response that follows from the token, its place in the context and the name."""

    ids, begin = fields["responses"].double(), len(fields["prompts"])
    return (plus + scale * torch.sin(ids + begin + torch.arange(len(ids)) + len(name))).float()


def attend_to_all(
    module: Any, query: Any, key: Any, value: Any, mask: Any, *, position_ids: Any, scaling: float, **_: Any
) -> tuple[Any, None]:
    """Attention of this rank's slice of a packed sequence to all of it, in place of verl's by flash attention."""

    place = torch.distributed.get_rank()
    keys, values = (Gathered.apply(one) for one in (key, value))
    positions = Gathered.apply(position_ids[:, None, :, None].double())[0, 0, :, 0]
    row, at = (positions == 0).cumsum(0), torch.arange(len(positions))
    own = slice(place * query.shape[2], (place + 1) * query.shape[2])
    seen = (row[own, None] == row) & (at[own, None] >= at)
    found = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen, scale=scaling)
    return found.transpose(1, 2).contiguous(), None


class Gathered(torch.autograd.Function):
    """[B, heads, slice, D] of all ranks, along the third dimension."""

    @staticmethod
    def forward(ctx: Any, own: Any) -> Any:
        parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, own.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        whole = gradient.contiguous().clone()
        torch.distributed.all_reduce(whole)
        return whole.chunk(torch.distributed.get_world_size(), dim=2)[torch.distributed.get_rank()]


def data_of(case: dict[str, Any], merged: bool, rank: int, world: int) -> Any:
    """What the trainer hands to this rank, and the settings of its updates."""
    import turn_cases as cases
    from omegaconf import OmegaConf
    from verl.utils import tensordict_utils as tu

    from verl_ext.integration.engines import engine, loss_turns, update_step
    from verl_ext.integration.parts.update import updates

    count, mode = case.get("updates", 1), case.get("loss_agg_mode", "token-mean")
    dynamic = {"use_dynamic_bsz": True, "log_prob_use_dynamic_bsz": True}
    config = OmegaConf.create({"actor_rollout_ref": {"actor": dynamic, "rollout": dynamic, "ref": dynamic}})
    keys, tags, fields = cases.batch(merged)
    layout = cases.layout(keys, tags, fields)
    numbers = layout.turns.numbers() if layout.turns.sequence is not None else None
    if case.get("rejected"):
        rejected = layout.keys.index("p0_2_1")
        kept = layout.turns.unpack(cases.padded(fields, "response_mask")).clone()
        kept[rejected] = 0
        mask = layout.turns.pack(kept)
    else:
        mask = cases.padded(fields, "response_mask")
    estimated = turn_advantages.estimated(case["estimator"], merged)[0] if "estimator" in case else None
    rows = []
    for row, one in enumerate(fields):
        length = len(one["responses"])
        ids = torch.cat([one["prompts"], one["responses"]])
        found = {
            "prompts": one["prompts"],
            "responses": one["responses"],
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "response_mask": mask[row, :length],
            "loss_mask": one["response_mask"],
            "old_log_probs": column(one, "old", -3.6),
            "ref_log_prob": column(one, "reference", -3.5),
            "advantages": column(one, "advantage", 0.1, 1.0),
        }
        if case.get("weights"):
            found["rollout_is_weights"] = column(one, "weights", 1.0)
        if estimated is not None:
            found["advantages"] = estimated.batch["advantages"][row, :length].float()
        if numbers is not None:
            found[loss_turns.COLUMN] = numbers[row, :length]
        rows.append(found)
    for number in range(-len(rows) % updates.row_multiple(config, count, world, critic=False)):
        short = {name: value[:1] for name, value in rows[0].items()}
        zero = {"response_mask", "loss_mask"}
        short = {name: torch.zeros_like(value) if name in zero else value for name, value in short.items()}
        short |= {"input_ids": torch.tensor([2, 2]), "position_ids": torch.arange(2)}
        rows.append(short)
        keys, tags = [*keys, f"pad_{number}_0"], [*tags, {"seq_len": 2, "is_padding": True}]
    dealt = updates.deal([tag["seq_len"] for tag in tags], [bool(tag.get("is_padding")) for tag in tags], count, world)
    own = [rows[row] for part in dealt for row in part[rank]]
    data = tu.get_tensordict(
        {name: torch.nested.as_nested_tensor([one[name] for one in own], layout=torch.jagged) for name in own[0]},
        {},
    )
    told: dict[str, Any] = engine.engine_info("on", case["rho"]) if "rho" in case else {}
    if case.get("rejected"):
        told[update_step.NORMALISE] = "kept"
    tu.assign_non_tensor(
        data,
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
        temperature=1.0,
        calculate_entropy=True,
        max_token_len_per_gpu=64,
        **updates.settings(keys, tags, 4, count, mode),
        **told,
    )
    return data


def gradient(worker: Any, case: dict[str, Any], merged: bool, rank: int, world: int) -> Any:
    """The gradients of the updates of the batch, added up."""
    from hydra.utils import instantiate
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    own = ("loss_agg_mode", "entropy_coeff", "use_kl_loss")
    loss = dict(case.get("policy_loss", {}))
    if loss:
        loss.setdefault("_target_", "verl.workers.config.PolicyLossConfig")
    config: Any = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        ppo_mini_batch_size=4,
        use_dynamic_bsz=True,
        **{name: case[name] for name in own if name in case},
        **({"policy_loss": instantiate(loss)} if loss else {}),
    )
    worker.set_loss_fn(partial(ppo_loss, config=config))
    engine, found = worker.engine, list[Any]()
    step = engine.optimizer_step

    def recording_step() -> Any:
        whole = [p.grad for p in engine.module.parameters() if p.grad is not None]
        found.append(
            torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for g in whole]).double()
        )
        return step()

    engine.optimizer_step = recording_step
    try:
        worker.train_mini_batch(data_of(case, merged, rank, world))
    finally:
        engine.optimizer_step = step
    return sum(found)


def main(out: str, ulysses: int, rank: int, world: int) -> None:
    """`ulysses` ranks share each row."""
    import gradients
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from verl_ext.integration import names

    shared: dict[str, Any] = {"ulysses": ulysses}
    if ulysses > 1:
        ALL_ATTENTION_FUNCTIONS.register("attend_to_all", attend_to_all)
        shared["attention"] = "attend_to_all"
    workers = {False: gradients.make_worker(**shared), True: None}
    names.register()
    found = {}
    for name, case in CASES.items():
        lora = bool(case.get("lora"))
        if workers[lora] is None:
            workers[lora] = gradients.make_worker(lora_rank=4, **shared)
        parts = rank // ulysses, world // ulysses
        found[name] = [gradient(workers[lora], case, merged, *parts) for merged in (False, True)]
    if rank == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
