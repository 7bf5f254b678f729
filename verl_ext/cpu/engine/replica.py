# SPDX-License-Identifier: Apache-2.0
"""verl's two ends of the embedded rollout: the replica that launches the server and the trainer's weight sender."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, Iterable
from typing import Any

import ray
import torch
from omegaconf import DictConfig
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch.distributed.device_mesh import DeviceMesh
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from verl_ext.cpu.engine.options import EmbeddedOptions
from verl_ext.cpu.engine.server import CONTROL, EmbeddedServer
from verl_ext.cpu.engine.weights import BucketWriter, resolve_dtype

__all__ = ["EmbeddedReplica", "EmbeddedRollout", "server_name"]


def server_name(replica_rank: int, *, suffix: str = "", role: str = "") -> str:
    """Name of a replica's server actor; ``role`` is ``reward``, ``teacher`` or empty for the policy."""
    return f"embedded_server_{role + '_' if role else ''}{replica_rank}_0{suffix}"


class CancellingHandle:
    """The server actor as verl's clients hold it: a `generate` call that its caller gives up ends on the server too.

    With a plain handle Ray lets it go on, in a slot that nobody waits for. All other calls are the actor's.
    """

    def __init__(self, actor: ActorHandle) -> None:
        self.actor = actor

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.actor,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actor, name)

    @property
    def generate(self) -> CancellingHandle:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> asyncio.Future[TokenOutput]:
        """`generate.remote`."""
        reference = self.actor.generate.remote(*args, **kwargs)

        def ended(answer: asyncio.Future[TokenOutput]) -> None:
            if answer.cancelled():
                ray.cancel(reference)

        answer = asyncio.ensure_future(reference)
        answer.add_done_callback(ended)  # called also for a task that is cancelled before it began
        return answer


class EmbeddedReplica(RolloutReplica):
    """One server actor for the ``world_size`` training ranks of the replica.

    Tensor, data and pipeline parallel sizes only say how many training ranks share the server; the model itself is
    never split. The actor asks Ray for no GPU and a fraction of a CPU.
    """

    async def launch_servers(self) -> None:
        """Start the server actor, on the node of the replica's first worker where there is one.

        Raises:
            ValueError: a generative reward model, which needs an HTTP endpoint.
        """
        if self.is_reward_model:
            raise ValueError(
                "rollout.name=embedded cannot serve a generative reward model: its router needs an HTTP endpoint; "
                "use vllm or sglang for reward.reward_model.rollout.name"
            )
        options = EmbeddedOptions.from_config(self.config)
        placement: dict[str, Any] = {}
        if self.workers:
            node_id = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
            placement["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
        name = server_name(self.replica_rank, suffix=self.name_suffix, role="teacher" if self.is_teacher_model else "")
        server = (
            ray.remote(concurrency_groups=dict(CONTROL))(EmbeddedServer)
            .options(
                name=name,
                num_cpus=options.num_cpus,
                num_gpus=0,
                max_concurrency=self.max_concurrency,
                **placement,
            )
            .remote(
                config=self.config,
                model_config=self.model_config,
                rollout_mode=self.rollout_mode,
                replica_rank=self.replica_rank,
            )
        )
        await server.launch_server.remote()
        self.servers = [server]
        self._server_handle = CancellingHandle(server)
        self._server_address = await server.get_server_address.remote()

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """End one request; see :meth:`EmbeddedServer.abort_request`."""
        return await self.servers[0].abort_request.remote(request_id)


class EmbeddedRollout(BaseRollout):
    """Trainer-side end: wakes and sleeps the replica's server and sends it the weights.

    Args:
        config: rollout config.
        model_config: model config.
        device_mesh: unused; part of verl's interface.
        replica_rank: the replica; -1 derives it from this process's ``RANK``.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig | DictConfig,
        device_mesh: DeviceMesh | None,
        replica_rank: int = -1,
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        world_size = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        rank = int(os.environ.get("RANK", "0"))
        self.replica_rank = rank // world_size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % world_size == 0
        self.options = EmbeddedOptions.from_config(self.config)
        self._dtype = resolve_dtype(self.config.dtype)
        self._server: ActorHandle | None = None

    @property
    def server(self) -> ActorHandle:
        # looked up late: the replica starts its server after the training workers
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """Wake the server's ``weights`` or ``kv_cache``."""
        if self.is_leader_rank and self.config.free_cache_engine:
            await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Put the server to sleep."""
        if self.is_leader_rank and self.config.free_cache_engine:
            await self.server.sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = False,
        **kwargs: Any,
    ) -> None:
        """Send weights to the server in buckets through Ray's shared-memory object store.

        Every rank runs the generator to its end, since producing a tensor is a collective operation; the leader sends.
        One bucket is under way while the next is packed.

        Args:
            weights: ``(name, tensor)`` pairs. With ``peft_config`` and ``base_sync_done`` they are a LoRA adapter,
                otherwise the model's full weights.
            wire_format: must be ``"named_tensors"``.
            global_steps: version of the weights.
            peft_config: LoRA config as a dictionary.
            base_sync_done: the base weights are at the server already.

        Raises:
            ValueError: another wire format, or the server refused the weights (unknown, missing or ill-shaped names).
        """
        if wire_format != "named_tensors":
            raise ValueError(
                f"rollout.name=embedded receives full tensors, not wire_format={wire_format!r}: "
                "set actor_rollout_ref.rollout.checkpoint_engine.backend to one that sends full tensors"
            )
        stream = ensure_async_iterator(weights)
        if not self.is_leader_rank:
            async for _ in stream:
                pass
            return
        adapter = bool(peft_config) and base_sync_done
        message = {
            "kind": "adapter" if adapter else "base",
            "peft_config": peft_config if adapter else None,
            "global_steps": global_steps,
        }
        bucket_mb = min(self.options.weight_bucket_mb, self.config.checkpoint_engine.update_weights_bucket_megabytes)
        writer = BucketWriter(bucket_mb << 20, self._dtype)
        pending: Any = None
        first = True
        failure: Exception | None = None

        async def send(pieces: list[Any], data: Any, last: bool) -> None:
            nonlocal pending, first
            # An asyncio actor may reorder calls: one at a time, while the next bucket is being packed.
            previous, pending = pending, None
            if previous is not None:
                await previous
            # Ray copies the bytes before .remote returns, so the writer may reuse its buffer
            pending = self.server.update_weights_bucket.remote(pieces, data, first=first, last=last, **message)
            first = False

        try:
            with torch.no_grad():
                async for name, tensor in stream:
                    if failure is not None:
                        continue
                    try:
                        for pieces, data in writer.add(name, _full(tensor)):
                            await send(pieces, data, last=False)
                    except Exception as error:
                        # the other ranks still wait in the collectives of the remaining tensors
                        failure = error
            if failure is not None:
                raise failure
            await send(*writer.flush(), last=True)
            await pending
        except Exception as error:
            # without this a server that received a part would wait for the rest for ever
            if pending is not None:
                await _settle(pending)
            await _settle(self.server.abort_weight_update.remote(str(error)))
            raise


async def _settle(reference: Any) -> None:
    """Wait for a remote call whose outcome no longer matters."""
    try:
        await reference
    except Exception:  # the first failure is the one reported
        return


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """A distributed tensor gathered, any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
