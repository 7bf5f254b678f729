# SPDX-License-Identifier: Apache-2.0
"""The trainer's end of verl's weight transfer to vLLM on the CPU. Imports vLLM; `cpu.platform.watch` does not."""

from __future__ import annotations

import concurrent.futures
from typing import Any

from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from verl_ext.cpu.platform.watch import Receiver, WatchedSocket, timeout_s
from verl_ext.integration.compat import wraps

# Declared here, not in `wraps`, since its module can be imported only where vLLM is.
SENDER = wraps.Target(
    module="verl.workers.rollout.vllm_rollout.vllm_rollout",
    name="BucketedWeightSender",
    parameters=("zmq_handle", "bucket_size_mb", "use_shm"),
    written_for="verl 0.9.1, workers/rollout/vllm_rollout/vllm_rollout.py `update_weights`",
    reason="the adapter constructs its sender by name, and the sender sets no limit on its socket",
)


class WatchedServerAdapter(ServerAdapter):
    """verl's adapter between a training rank and its vLLM server; a sync whose receiver is gone raises."""

    _receiver = Receiver(None)

    async def _execute_method(self, method: str, *args: Any, **kwargs: Any) -> Any:
        result = await super()._execute_method(method, *args, **kwargs)
        if method == "update_weights_from_ipc":
            # None on the ranks that have no server of their own. `.future()` completes without an event loop.
            self._receiver = Receiver(result.future(), self._ask) if result is not None else Receiver(None)
        return result

    def _ask(self) -> concurrent.futures.Future[bool]:
        """Ask the server, which has no method for it, whether its engine process is dead."""
        return self.server_handle.__ray_call__.remote(lambda server: bool(server.engine.errored)).future()

    async def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """See verl's `ServerAdapter.update_weights`. Raises WeightSyncError: the engine did not take the weights."""
        adapter = self
        limit = timeout_s()

        def make(original: Any) -> Any:
            class WatchedSender(original):
                socket: Any

                def _init_socket(self) -> None:
                    super()._init_socket()
                    self.socket = WatchedSocket(self.socket, adapter._receiver, limit)

            return WatchedSender

        try:
            with wraps.replaced(SENDER, make):
                await super().update_weights(*args, **kwargs)
        finally:
            self._receiver = Receiver(None)
