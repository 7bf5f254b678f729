# SPDX-License-Identifier: Apache-2.0
"""One of two ranks of a small network that FSDP 1 shards, for test_agent_gradients.py.

verl's FSDP 1 engine needs an accelerator, torch's FSDP 1 does not: the engine below has verl's methods around it.

python agent_gradients_process.py OUT RANK WORLD_SIZE
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

AGENTS_OF = ([0, 1, 1, 0, 1, 1, 0, 0], [0, 1, 2, 0, 1, 2, -1, 0])
"""Agent of each row of each rank; -1 goes with the first."""


def main(out: str, rank: int) -> None:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from verl.utils import tensordict_utils as tu

    from verl_ext.integration.engines.agent_gradients import AGENT, AGENTS, AgentGradientsMixin

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    device = torch.device("cpu")
    inner = FSDP(torch.nn.Linear(8, 16), device_id=device)
    module = FSDP(torch.nn.Sequential(inner, torch.nn.Tanh(), torch.nn.Linear(16, 1)), device_id=device)

    class Stock:
        """Two micro-batches, of which the first is not communicated; a loss of no particular meaning."""

        def __init__(self, only: int | None = None) -> None:
            self.module, self.only = module, only

        def get_data_parallel_group(self) -> Any:
            return None

        def prepare_model_outputs(self, **given: Any) -> dict[str, torch.Tensor]:
            value = given["output"]
            if self.only is not None:
                value = value * (given["micro_batch"][AGENT].clamp(min=0) == self.only)
            return {"log_probs": value}

        def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> dict[str, Any]:
            for rows, context in ((slice(0, 4), module.no_sync()), (slice(4, 8), contextlib.nullcontext())):
                micro_batch = data[rows]
                with context:
                    made = self.prepare_model_outputs(
                        output=module(micro_batch["x"]).squeeze(-1),
                        output_args=None,
                        micro_batch=micro_batch,
                        logits_processor_func=None,
                    )
                    made["log_probs"].square().sum().backward()
            return {"metrics": {}}

    class Engine(AgentGradientsMixin, Stock):
        """The mixin over it."""

    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(rank))

    def run(engine: Stock, agents: int = 0) -> tuple[list[torch.Tensor], dict[str, Any], float]:
        module.zero_grad()
        columns = {"x": rows, AGENT: torch.tensor(AGENTS_OF[rank])}
        output = engine.forward_backward_batch(tu.get_tensordict(columns, non_tensor_dict={AGENTS: agents}), None)
        gradients = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
        return gradients, output["metrics"], float(module.clip_grad_norm_(float("inf")))

    separated, metrics, _ = run(Engine(), agents=3)
    whole, none, norm = run(Engine())
    found = {
        "elements": sum(part.numel() for part in whole),
        "difference": max(float((one - other).abs().max()) for one, other in zip(separated, whole, strict=True)),
        "norm": norm,
        "own": [run(Stock(only=number))[2] for number in range(3)],
        "metrics": metrics,
        "without": none,
    }
    Path(f"{out}.{rank}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
