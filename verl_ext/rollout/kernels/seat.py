# SPDX-License-Identifier: Apache-2.0
"""A player as the judge holds it: shared memory, a wire of single bytes, and the processor time of its process.

What counts is taken from outside: outputs out of the shared memory at the moment of the player's byte, its time from
the kernel's clock of its process. All the time that the process has used since the last outputs were taken is
charged, so that nothing is free that it does between two batches, in a thread or after its byte.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import torch

from verl_ext.rollout.kernels.compiler import Library
from verl_ext.rollout.kernels.languages import CandidateError
from verl_ext.rollout.kernels.players import player
from verl_ext.rollout.kernels.players.cuda import Cuda
from verl_ext.sandbox import Sandbox, SandboxError

SLOWER = 4
#: The core on which the calling thread is.
CORE = ctypes.CDLL(None).sched_getcpu
#: Copies of inputs and outputs alone, of which the shortest is taken off each batch on a GPU.
COPIES = 5
#: Seconds that a dead player's reason may take to come.
REASON_S = 30.0
_STATUS = {name: name for name in ("timeout", "memory", "crashed", "error")} | {"output": "error", "input": "error"}


class Infrastructure(RuntimeError):
    """There is no verdict, and the candidate is not to blame."""


class Seat:
    """A player in its cage, from its start to its end.

    Args:
        sandbox: where it runs; `player` should be among its modules.
        shape: batch, rows, columns.
        plan: of the program.
        library: its kernels; None if it has none.
        lost: kernels whose results are lost.
        cpu_s: seconds of processor time that it may use in all.
        target: what runs in the cage.

    Attributes:
        x, y, a, b: tensors in the shared memory.
        pid: as this process sees it.

    Raises:
        CandidateError: it came to nothing.
        Infrastructure: it was not begun.
    """

    target = "verl_ext.rollout.kernels.players.player:play"
    go = player.GO
    slower = 1

    def __init__(
        self,
        sandbox: Sandbox,
        shape: Sequence[int],
        plan: dict[str, Any],
        library: Library | None,
        lost: Sequence[str] = (),
        cpu_s: float = 10.0,
    ) -> None:
        self._memory = os.memfd_create("verl_ext_batch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._memory, self._size(shape))
        fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map(shape)
        plan = self._prepare(sandbox, shape, plan)
        self.wire, theirs = socket.socketpair()
        self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        descriptors = [theirs.fileno(), self._memory]
        names = [] if library is None else list(library.kernels)
        if library is not None:
            descriptors.append(library.descriptor)
        try:
            self._call = sandbox.submit(
                self.target,
                shape,
                plan,
                names,
                list(lost),
                timeout_s=self.slower * cpu_s,
                descriptors=descriptors,
            )
            self._call.add_done_callback(lambda _: theirs.close())  # then the wire ends here too
            self.pid = self._answer()
            theirs.close()
            self._clock = (~self.pid << 3) | 2  # the processor time of that process
            self._charged = self._time()
        except SandboxError as error:
            self.close()
            raise Infrastructure(str(error)) from error
        except BaseException:
            self.close()
            raise

    def _size(self, shape: Sequence[int]) -> int:
        return player.size(*shape)

    def _map(self, shape: Sequence[int]) -> None:
        self.x, self.y, self.a, self.b = player.views(self._memory, *shape)

    def _prepare(self, sandbox: Sandbox, shape: Sequence[int], plan: dict[str, Any]) -> dict[str, Any]:
        """Make what else the player needs; the plan that says so."""
        return plan

    def batch(self, *given: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Have it play a batch.

        Args:
            given: x [batch, rows, columns], a and b [columns], float32.

        Returns:
            The outputs [batch, rows, columns], and the seconds of processor time since the last ones.

        Raises:
            CandidateError: it ended.
            Infrastructure: it was ended.
        """
        self.begin(*given)
        return self.end()

    def begin(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Reveal a batch and say go."""
        self.y.fill_(float("nan"))  # what is not written must not look right
        self.x.copy_(x)
        self.a.copy_(a)
        self.b.copy_(b)
        self._say(self.go)

    def follow(self) -> None:
        """Have it play on this thread's core. Two cores are not equally fast where others use the machine too."""
        with contextlib.suppress(ProcessLookupError):  # its end is said where its answer is read
            os.sched_setaffinity(self.pid, {CORE()})

    def _say(self, byte: bytes) -> None:
        try:
            self.wire.send(byte, socket.MSG_NOSIGNAL)
        except OSError:
            self.raise_why()

    def end(self) -> tuple[torch.Tensor, float]:
        """Wait for its byte and take the outputs at that moment, and the time that is charged for them."""
        self._answer()
        y = self.y.clone()
        now = self._time()
        seconds, self._charged = now - self._charged, now
        return y, seconds

    def _time(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            self.raise_why()
            raise

    def _answer(self) -> int:
        """Wait for its byte; the process that wrote it."""
        try:
            said, extra, _, _ = self.wire.recvmsg(1, socket.CMSG_SPACE(12))
        except ConnectionError:  # it has ended with a byte of ours unread
            said, extra = b"", []
        if not said:
            self.raise_why()
        for level, kind, content in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                return int(struct.unpack("3i", content)[0])
        raise Infrastructure("a player's byte came without its process")

    def waits(self, seconds: float) -> bool:
        """Whether its byte, or its end, has come in so many seconds; the byte is left on the wire."""
        time.sleep(seconds)
        try:
            self.wire.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            pass
        return True

    def raise_why(self) -> None:
        """Raise what says why it has ended."""
        try:
            self._call.result(timeout=REASON_S)
        except SandboxError as error:
            if error.reason in _STATUS:
                raise CandidateError(_STATUS[error.reason], error.text) from None
            raise Infrastructure(str(error)) from error
        except concurrent.futures.TimeoutError:
            raise CandidateError("crashed", "the process closed its wire") from None
        raise CandidateError("crashed", "the process ended before its time")

    def close(self) -> None:
        """End the player, whatever it does."""
        if call := getattr(self, "_call", None):
            call.cancel()
        self.wire.close()
        os.close(self._memory)


class TritonSeat(Seat):
    """A player that has Triton's interpreter, which takes a second for what a compiled kernel does in a millisecond.

    It plays the first input of each batch alone: its outputs are [1, rows, columns]. It has `SLOWER` times the others'
    processor time.
    """

    target = "verl_ext.rollout.kernels.players.triton_player:play"
    slower = SLOWER

    def __init__(
        self,
        sandbox: Sandbox,
        shape: Sequence[int],
        plan: dict[str, Any],
        library: Library | None,
        lost: Sequence[str] = (),
        cpu_s: float = 10.0,
    ) -> None:
        super().__init__(sandbox, [1, *shape[1:]], plan, library, lost, cpu_s)

    def begin(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        super().begin(x[:1], a, b)


class DeviceSeat(Seat):
    """A player on a GPU, in whose memory x, y, a and b are. It has `SLOWER` times the others' processor time.

    What is charged is the judge's clock, from before the inputs are in that memory until the outputs are taken from it
    and the judge's own GPU calls are done, less what these copies take alone. So nothing is free that the player does
    later than its byte says, on whatever stream; and before, it knows nothing that counts.
    """

    target = "verl_ext.rollout.kernels.players.cuda_player:play"
    slower = SLOWER
    device = Cuda()

    def _prepare(self, sandbox: Sandbox, shape: Sequence[int], plan: dict[str, Any]) -> dict[str, Any]:
        (self.x, self.y, self.a, self.b), handle = self.device.share(self._memory, shape)
        folder = plan.get("folder", sandbox.scratch)
        environment = {
            **self.device.environment(),
            **dict.fromkeys(("TMPDIR", "HOME", "TRITON_CACHE_DIR"), folder),
        }
        given = [torch.zeros_like(tensor) for tensor in (self.x, self.y, self.a, self.b)]
        # Now, before there is a candidate that could delay it.
        self._copies = min(self._copying(given) for _ in range(COPIES))
        return {**plan, "handle": handle, "memory_mb": sandbox.limits.memory_mb, "environment": environment}

    def begin(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        self.y.fill_(float("nan"))
        given = [self.device.take(tensor) for tensor in (x, a, b)]
        self.device.flush()
        self.device.synchronise()
        self._began = time.monotonic()
        for mine, tensor in zip((self.x, self.a, self.b), given, strict=True):
            mine.copy_(tensor)
        self.device.synchronise()
        self._say(self.go)

    def follow(self) -> None:
        """It has threads, and its time is not the processor's."""

    def _copying(self, tensors: Sequence[torch.Tensor]) -> float:
        self.device.synchronise()
        began = time.monotonic()
        for tensor in tensors:
            tensor.clone()
        self.device.synchronise()
        return time.monotonic() - began

    def end(self) -> tuple[torch.Tensor, float]:
        self._answer()
        y = self.y.clone()
        self.device.synchronise()
        seconds = time.monotonic() - self._began
        return y.cpu(), seconds - min(self._copies, seconds / 2)

    def close(self) -> None:
        views = [self.x, self.y, self.a, self.b]
        super().close()
        self.device.free(views)
