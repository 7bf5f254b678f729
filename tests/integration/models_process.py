# SPDX-License-Identifier: Apache-2.0
"""One rank of verl's actor worker, for test_models_step.py: trains on the rows that a model's trainer dealt to it.

python models_process.py CUTS OUT RANK WORLD_SIZE
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import gradients


def main(cuts: str, out: str, rank: int, world: int) -> None:
    """`cuts`: by name, the columns of all rows in their order, what the workers are told and the loss's mode."""
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    worker = gradients.make_worker()
    step = worker.engine.optimizer_step
    found: dict[str, list[torch.Tensor]] = {}
    for name, (columns, told, mode) in torch.load(cuts, weights_only=False).items():
        updates = found[name] = []

        def record(updates: list[torch.Tensor] = updates) -> Any:
            whole = [one.grad.full_tensor().flatten() for one in worker.engine.module.parameters()]
            updates.append(torch.cat(whole).double())
            return step()

        own = {key: rows[rank * len(rows) // world : (rank + 1) * len(rows) // world] for key, rows in columns.items()}
        nested = {key: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for key, rows in own.items()}
        data = tu.get_tensordict(nested, {})
        tu.assign_non_tensor(data, **told, max_token_len_per_gpu=300)
        config = FSDPActorConfig(
            strategy="fsdp2", rollout_n=4, ppo_mini_batch_size=1, use_dynamic_bsz=True, loss_agg_mode=mode
        )
        worker.set_loss_fn(partial(ppo_loss, config=config))
        worker.engine.optimizer_step = record
        worker.train_mini_batch(data)
    if rank == 0:
        torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
