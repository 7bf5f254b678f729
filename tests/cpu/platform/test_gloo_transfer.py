# SPDX-License-Identifier: Apache-2.0
"""The weight transfer over gloo: every rollout worker gets what the first training rank sends, to the bit."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch

from verl_ext.cpu.platform.gloo_transfer import GlooCheckpointEngine


def test_all_receive_what_is_sent_again_and_again() -> None:
    torch.manual_seed(0)
    tensors = {
        "large": torch.randn(300, 7),
        "half": torch.randn(5, 3).to(torch.bfloat16),
        "transposed": torch.randn(4, 6).t(),
        "scalar": torch.tensor(2.5),
        "steps": torch.arange(11),
    }
    engines = [GlooCheckpointEngine(bucket_size=1000, is_master=i == 0) for i in range(4)]
    actors, rollouts = engines[:2], engines[2:]
    asked: list[str] = []

    def weights():
        for name, tensor in tensors.items():
            asked.append(name)
            yield name, tensor

    async def receive(engine: GlooCheckpointEngine) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() async for name, tensor in engine.receive_weights(global_steps=1)}

    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            asked.clear()
            metadata = [engine.prepare() for engine in engines]
            sending, receiving = GlooCheckpointEngine.build_topology(2, 2, metadata)
            assert sending["rank"] == [0, -1] and receiving["rank"] == [1, 2]
            arguments = [{k: v[i] for k, v in side.items()} for side in (sending, receiving) for i in range(2)]
            list(pool.map(lambda pair: pair[0].init_process_group(**pair[1]), zip(engines, arguments, strict=True)))
            sent = [pool.submit(lambda e: asyncio.run(e.send_weights(weights(), global_steps=1)), e) for e in actors]
            got = [pool.submit(lambda e: asyncio.run(receive(e)), e) for e in rollouts]
            for future in sent:
                future.result(timeout=300)
            for future in got:
                result = future.result(timeout=300)
                assert list(result) == list(tensors)
                for name, tensor in tensors.items():
                    assert result[name].dtype == tensor.dtype and torch.equal(result[name], tensor)
            # each training rank ran its generator, whose tensors are collective
            assert sorted(asked) == sorted([*tensors, *tensors])
            for engine in engines:
                engine.finalize()
