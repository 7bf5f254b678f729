# SPDX-License-Identifier: Apache-2.0
"""Judges that lack one defence each, to show that it is that one which keeps a trick from being paid."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from verl_ext.methods.kernel_reward import profiling_reward
from verl_ext.rollout.kernels import tasks
from verl_ext.rollout.kernels.compiler import Library
from verl_ext.rollout.kernels.judge import Judge, Verdict
from verl_ext.rollout.kernels.languages import Program
from verl_ext.rollout.kernels.options import JudgeOptions
from verl_ext.rollout.kernels.seat import Seat
from verl_ext.rollout.kernels.tasks import Task
from verl_ext.sandbox import Limits, Sandbox

STAGES = ["mul", "add", "relu"] * 3


class WeakJudge(Judge):
    """As other harnesses do it, a kernel that was compiled counts, and nobody asks whether it matters."""

    def _alive(self, task: Task, program: Program, kernels: Sequence[str], library: Library | None = None) -> set[str]:
        return set(kernels)


class Unprofiled(WeakJudge):
    """Nor how much of the time it takes."""

    def _profile(self, task: Task, seat: Seat, library: Library, name: str, batch_s: float) -> dict[str, float]:
        return {"work": 1.0}


class TalkingSeat(Seat):
    """Reads more than one byte, and remembers it."""

    said = b""
    latest: TalkingSeat

    def __init__(self, sandbox: Sandbox, shape: Sequence[int], plan: dict[str, Any], *others: Any) -> None:
        super().__init__(sandbox, shape, {**plan, "stages": STAGES}, *others)
        TalkingSeat.latest = self

    def _answer(self) -> int:
        self.said, extra, _, _ = self.wire.recvmsg(9, socket.CMSG_SPACE(12))
        if not self.said:
            self.raise_why()
        return int(struct.unpack("3i", extra[0][2])[0])


class ClockedSeat(TalkingSeat):
    target = "weak_players:clocked"

    def end(self) -> tuple[torch.Tensor, float]:
        y, _ = super().end()
        return y, float(struct.unpack("d", self.said[1:])[0])


class ComparingSeat(TalkingSeat):
    target = "weak_players:compares"


class BelievesTheClock(Unprofiled):
    seat = ClockedSeat


class BelievesTheVerdict(Unprofiled):
    seat = ComparingSeat

    def _worst(self, y: torch.Tensor, expected: torch.Tensor) -> float:
        return 0.0 if TalkingSeat.latest.said[:1] == b"1" else 2.0


class SameInputs(Unprofiled):
    def _inputs(self) -> list[torch.Tensor]:
        if not hasattr(self, "always"):
            x, a, b = super()._inputs()
            self.always = [x[:1].repeat(len(x), 1, 1), a, b]
        return self.always


class SeenInputs(Unprofiled):
    """Computes what is right from the memory that the player can write."""

    seat = TalkingSeat

    def _worst(self, y: torch.Tensor, expected: torch.Tensor) -> float:
        seat = TalkingSeat.latest
        return super()._worst(y, tasks.run(STAGES, seat.x, seat.a, seat.b))


def wait_until_idle(seat: Seat) -> None:
    """Until its process has used no processor time for a fifth of a second, and has not waited for a processor."""
    until, quiet, before = time.monotonic() + 60, 0, -1.0
    while quiet < 10 and time.monotonic() < until:
        now = seat._time()
        quiet, before = (quiet + 1 if now == before and not runnable(seat) else 0), now
        time.sleep(0.02)


def runnable(seat: Seat) -> bool:
    """Whether a thread of its process runs, or would if it had a processor."""
    states = []
    for stat in Path(f"/proc/{seat.pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            states.append(stat.read_text().rpartition(") ")[2][:1])
    return "R" in states


class LateSeat(Seat):
    """Charges from go to the byte, and takes the outputs some time later."""

    def end(self) -> tuple[torch.Tensor, float]:
        self._answer()
        seconds = self._time() - self._charged
        wait_until_idle(self)
        self._charged = self._time()
        return self.y.clone(), seconds


class LateJudge(Unprofiled):
    seat = LateSeat


class Uncaged(LateJudge):
    def __init__(self, options: JudgeOptions) -> None:
        super().__init__(options)
        self.sandbox.close()
        self.sandbox = Sandbox(
            Limits(workers=80), "rlimits", modules=["uncaged", "verl_ext.rollout.kernels.players.player"]
        )


class ShownSeat(Seat):
    """Shows the inputs some time before go, and charges from go on."""

    def begin(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        self.y.fill_(float("nan"))
        self.a.copy_(a)
        self.b.copy_(b)
        self.x.view(-1)[1:].copy_(x.view(-1)[1:])
        self.x.view(-1)[0] = x.view(-1)[0]
        wait_until_idle(self)
        self._charged = self._time()
        self.wire.send(self.go)

    def end(self) -> tuple[torch.Tensor, float]:
        self._answer()
        seconds = self._time() - self._charged
        return self.y.clone(), seconds


class ChargesFromGo(Unprofiled):
    seat = ShownSeat


class Wildcards(Unprofiled):
    def _worst(self, y: torch.Tensor, expected: torch.Tensor) -> float:
        error = (y - expected).abs() / (self.options.tolerance * (y.abs() + 1.0))
        return 2.0 if bool((error > 1.0).any()) else 0.0


class FilledSeat(Seat):
    """The memory of the outputs holds those of the reference."""

    def begin(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        self.y.copy_(tasks.run(STAGES, x, a, b))
        self.x.copy_(x)
        self.wire.send(self.go)


class Unpoisoned(Unprofiled):
    seat = FilledSeat


class Samples(Unprofiled):
    """Compares some outputs of the first input, in the first batch."""

    def _judge(self, *given: Any) -> Verdict:
        self.compared = False
        return super()._judge(*given)

    def _worst(self, y: torch.Tensor, expected: torch.Tensor) -> float:
        if self.compared:
            return 0.0
        self.compared = True
        return super()._worst(y[:1, : y.shape[1] // 2, ::2], expected[:1, : y.shape[1] // 2, ::2])


class Released(Unprofiled):
    """The released tolerance, whatever the size of the outputs."""

    def _worst(self, y: torch.Tensor, expected: torch.Tensor) -> float:
        return float(((y - expected).abs() / (3e-2 + 3e-2 * expected.abs())).max())


class Announces(WeakJudge):
    def _profile(self, task: Task, seat: Seat, library: Library, name: str, batch_s: float) -> dict[str, float]:
        seat.go = b"p"
        return super()._profile(task, seat, library, name, batch_s)


class ByName(Judge):
    """The released profiling reward: one name in the other, whatever the case."""

    def evaluate(self, task: Task, text: str, language: str = "") -> Verdict:
        verdict = super().evaluate(task, text, language)
        rows = [{"name": place, "cuda_time_us": share, "cpu_time_us": 0.0} for place, share in verdict.profile.items()]
        return dataclasses.replace(verdict, coverage=float(profiling_reward(["t"], rows, variant="released")))


WITHOUT: dict[str, type[Judge]] = {
    "judge's clock": BelievesTheClock,
    "fresh inputs": SameInputs,
    "snapshot at the byte": LateJudge,
    "cage": Uncaged,
    "all time is charged": ChargesFromGo,
    "judge's verdict": BelievesTheVerdict,
    "judge's inputs": SeenInputs,
    "finite outputs": Wildcards,
    "poisoned outputs": Unpoisoned,
    "every output": Samples,
    "tolerance": Released,
    "decoy check": Unprofiled,
    "ablation": WeakJudge,
    "profiled batches like any other": Announces,
    "names of kernels": ByName,
}
