# SPDX-License-Identifier: Apache-2.0
"""One rank of verl's actor worker that trains on the same turns a row a call and merged, for test_merged_gradients.py.

python merged_process.py OUT RANK WORLD_SIZE
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

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
}


def column(fields: dict[str, Any], name: str, plus: float = 0.0, scale: float = 0.3) -> Any:
    """A number a token of the response that follows from the token, its place in the context and the name."""
    import torch

    ids, begin = fields["responses"].double(), len(fields["prompts"])
    return (plus + scale * torch.sin(ids + begin + torch.arange(len(ids)) + len(name))).float()


def data_of(case: dict[str, Any], merged: bool, rank: int, world: int) -> Any:
    """What the trainer hands to this rank, and the settings of its updates."""
    import torch
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
    import torch
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


def main(out: str, rank: int, world: int) -> None:
    import gradients
    import torch

    from verl_ext.integration import names

    workers = {False: gradients.make_worker(), True: None}
    names.register()
    found = {}
    for name, case in CASES.items():
        lora = bool(case.get("lora"))
        if workers[lora] is None:
            workers[lora] = gradients.make_worker(lora_rank=4)
        found[name] = [gradient(workers[lora], case, merged, rank, world) for merged in (False, True)]
    if rank == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
