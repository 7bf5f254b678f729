# SPDX-License-Identifier: Apache-2.0
"""A player as the judge holds it: shared memory, a wire of single bytes, and the processor time of its process.

What counts is taken from outside: outputs out of the shared memory at the moment of the player's byte, its time from
the kernel's clock of its process. All the time that the process has used since the last outputs were taken is
charged, so that nothing is free that it does between two batches, in a thread or after its byte.
"""

from __future__ import annotations

import concurrent.futures
import fcntl
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

import torch

from verl_ext.kernels import player
from verl_ext.kernels.compiler import Library
from verl_ext.kernels.languages import CandidateError
from verl_ext.sandbox import Sandbox, SandboxError

SLOWER = 4
#: Seconds that a dead player's reason may take to come.
REASON_S = 30.0
_STATUS = {"timeout": "timeout", "memory": "memory", "crashed": "crashed", "error": "error", "output": "error"}


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

    target = "verl_ext.kernels.player:play"
    go = player.GO

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
        self.wire, theirs = socket.socketpair()
        self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        descriptors = [theirs.fileno(), self._memory]
        names = [] if library is None else list(library.kernels)
        if library is not None:
            descriptors.append(library.descriptor)
        try:
            self._call = sandbox.submit(
                self.target, shape, plan, names, list(lost), timeout_s=cpu_s, descriptors=descriptors
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

    def _say(self, byte: bytes) -> None:
        try:
            self.wire.send(byte, socket.MSG_NOSIGNAL)
        except OSError:
            self._ended()

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
            self._ended()
            raise

    def _answer(self) -> int:
        """Wait for its byte; the process that wrote it."""
        try:
            said, extra, _, _ = self.wire.recvmsg(1, socket.CMSG_SPACE(12))
        except ConnectionError:  # it has ended with a byte of ours unread
            said, extra = b"", []
        if not said:
            self._ended()
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

    def _ended(self) -> None:
        """Say why it has ended."""
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

    target = "verl_ext.kernels.triton_player:play"

    def __init__(
        self,
        sandbox: Sandbox,
        shape: Sequence[int],
        plan: dict[str, Any],
        library: Library | None,
        lost: Sequence[str] = (),
        cpu_s: float = 10.0,
    ) -> None:
        super().__init__(sandbox, [1, *shape[1:]], plan, library, lost, SLOWER * cpu_s)

    def begin(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        super().begin(x[:1], a, b)
