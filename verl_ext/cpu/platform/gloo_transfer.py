# SPDX-License-Identifier: Apache-2.0
"""``rollout.checkpoint_engine.backend=gloo``: weights from the trainer to rollout servers of their own, over gloo.

What `trainer.v1.trainer_mode=separate_async` needs on the CPU, where verl's transfers (NCCL, NIXL, ...) do not run: the
first training rank broadcasts each tensor, in pieces of a bucket at most, to the workers of all rollout replicas. The
group lives for one synchronisation, so that replicas may come and go.
"""

from __future__ import annotations

import pickle
from collections.abc import AsyncGenerator, Generator
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, merge_weight_chunks, split_weight_chunks

__all__ = ["GlooCheckpointEngine"]

_TIMEOUT = timedelta(minutes=10)


class GlooCheckpointEngine(CheckpointEngine):
    """Broadcast from the first training rank to all rollout workers.

    Args:
        bucket_size: bytes of one broadcast at most.
        is_master: this is the first training rank.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.bucket_size = bucket_size
        self.is_master = is_master
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None

    def prepare(self) -> dict[str, Any]:
        """Where the group meets: the address of the first training rank, which opens a port for it."""
        if not self.is_master:
            return {}
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        return {"host": host, "port": self._store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 sends, the rollout workers are 1 and up; the other training ranks have none."""

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            count = len(ranks)
            return {"rank": ranks, "world_size": [1 + rollout_world_size] * count, "master": [metadata[0]] * count}

        senders = [0] + [-1] * (actor_wg_world_size - 1)
        return arguments(senders), arguments(list(range(1, 1 + rollout_world_size)))

    def init_process_group(self, rank: int, world_size: int, master: dict[str, Any]) -> None:
        """Meet the others."""
        if rank < 0:
            return
        if self._store is None:
            self._store = TCPStore(master["host"], master["port"], is_master=False, timeout=_TIMEOUT)
        self._group = ProcessGroupGloo(self._store, rank, world_size, _TIMEOUT)

    def finalize(self) -> None:
        """Leave the group."""
        self._group = self._store = None

    def _broadcast(self, data: torch.Tensor) -> torch.Tensor:
        assert self._group is not None
        self._group.broadcast(data, 0).wait()
        return data

    def _send(self, meta: Any) -> None:
        head = torch.frombuffer(bytearray(pickle.dumps(meta)), dtype=torch.uint8)
        self._broadcast(torch.tensor([head.numel()]))
        self._broadcast(head)

    @torch.no_grad()
    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> None:
        """Send all tensors. Every training rank runs the generator, since producing a tensor is a collective."""
        if self._group is None:
            for _ in weights:
                pass
            return
        whole = ((name, weight.detach().cpu().contiguous()) for name, weight in weights)
        async for meta, chunk in split_weight_chunks(whole, self.bucket_size):
            self._send(meta)
            self._broadcast(chunk)
        self._send(None)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield ``(name, tensor)`` as they were sent."""
        async for named in merge_weight_chunks(self._chunks(), self.bucket_size):
            yield named

    async def _chunks(self) -> AsyncGenerator[tuple[Any, torch.Tensor], None]:
        while True:
            size = int(self._broadcast(torch.zeros(1, dtype=torch.long)))
            meta = pickle.loads(self._broadcast(torch.empty(size, dtype=torch.uint8)).numpy().tobytes())
            if meta is None:
                return
            yield meta, self._broadcast(torch.empty(meta.chunk_size, dtype=torch.uint8))
