# SPDX-License-Identifier: Apache-2.0
"""Peak memory and time of one estimator call at one size, each in a process of its own.

``python -m verl_ext.lab.bench._memory otb:4096x1024 trloo:...`` forks a child a case. The child fills its inputs block
by block, so that its resident memory is no more than they are, calls the estimator once and prints one JSON line: the
growth of the process's highest resident memory over the call, which counts every allocation, numpy's too, and the CPU
time. The outputs are part of the growth.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

#: Samples of one prompt.
GROUP = 8
#: Length of a turn and of the tool output after it, in columns, of rows with tool tokens.
TURN, TOOL = 384, 128


class Batch(NamedTuple):
    """Synthetic single-turn data: groups of 8 rows, lengths uniform between a quarter of T and T, an outcome of 0 or 1
    on the last model token."""

    rewards: torch.Tensor  #: [B, T] float32
    mask: torch.Tensor  #: [B, T] int64, as verl has it
    index: np.ndarray  #: [B] str
    traj_uid: np.ndarray  #: [B] str
    turn_index: np.ndarray  #: [B] int64
    turn_reward: np.ndarray  #: [B] float64
    agent_id: np.ndarray  #: [B] str
    old_log_probs: torch.Tensor  #: [B, T] float32
    sum_pi_squared: torch.Tensor  #: [B, T] float32

    def trloo(self, column: bool = True) -> None:
        """As the trainer calls it, with the turn's reward as a column, or with token rewards alone."""
        from verl_ext.methods.trloo import trloo_advantage

        fields = {"traj_uid": self.traj_uid, "turn_index": self.turn_index, "turn_reward": self.turn_reward}
        trloo_advantage(self.rewards, self.mask, self.index, **(fields if column else {}))

    def dr_mas(self) -> None:
        from verl_ext.methods.dr_mas import dr_mas_advantage

        dr_mas_advantage(self.rewards, self.mask, self.index, traj_uid=self.traj_uid, agent_id=self.agent_id)

    def maxrl(self) -> None:
        from verl_ext.methods.maxrl import maxrl_advantage

        maxrl_advantage(self.rewards, self.mask, self.index, traj_uid=self.traj_uid)

    def otb(self, baseline: Literal["self_inclusive", "leave_one_out"] = "self_inclusive") -> None:
        from verl_ext.methods.otb import otb_advantage

        fields = {"old_log_probs": self.old_log_probs, "sum_pi_squared": self.sum_pi_squared}
        otb_advantage(self.rewards, self.mask, self.index, **fields, baseline=baseline)

    def otb_leave_one_out(self) -> None:
        self.otb("leave_one_out")

    def exact_kl(self) -> None:
        """KL of two sets of logits: rows stand for tokens, columns for the vocabulary."""
        from verl_ext.methods.rejection import exact_token_kl

        exact_token_kl(self.old_log_probs[None], self.sum_pi_squared[None])


#: Estimators and the exact divergence by name, with the number of [B, T] float32 tensors that they return.
METHODS: dict[str, tuple[Callable[[Batch], None], int]] = {
    "otb": (Batch.otb, 2),
    "otb_leave_one_out": (Batch.otb_leave_one_out, 2),
    "trloo": (Batch.trloo, 1),
    "dr_mas": (Batch.dr_mas, 1),
    "exact_kl": (Batch.exact_kl, 0),
}


def make_batch(rows: int, length: int, *, tools: bool = False, seed: int = 0) -> Batch:
    """A batch of `rows` x `length`.

    Args:
        rows: B, a multiple of 8.
        length: T.
        tools: mask `TOOL` columns after every `TURN` as tool output; the last token of a row stays a model token.
        seed: of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = (length * (0.25 + 0.75 * torch.rand(rows, generator=generator))).long().clamp(1, length)
    column = torch.arange(length)
    rewards, old_log_probs, squares = (torch.empty(rows, length) for _ in range(3))
    mask = torch.empty(rows, length, dtype=torch.int64)
    rewards.zero_()
    rewards[torch.arange(rows), lengths - 1] = (torch.rand(rows, generator=generator) > 0.5).float()
    step = max(1, (1 << 18) // length)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        last = lengths[part, None] - 1
        inside = column <= last
        if tools:
            inside &= (column % (TURN + TOOL) < TURN) | (column == last)
        mask[part] = inside
        # Most tokens are almost certain, as in a trained model; the rest of the mass sits on one other token.
        surprise = 3 * torch.rand(inside.shape, generator=generator) ** 4
        chosen = (-surprise).exp()
        old_log_probs[part] = -surprise
        squares[part] = chosen**2 + (1 - chosen) ** 2
    index = np.array([f"{i // GROUP:032x}" for i in range(rows)], dtype=object)
    traj_uid = np.array([f"{i // GROUP:032x}_{i % GROUP}" for i in range(rows)], dtype=object)
    agent_id = np.array([("solver", "verifier")[i % 2] for i in range(rows)], dtype=object)
    reward = np.array(rewards[torch.arange(rows), lengths - 1].tolist())
    turn = np.zeros(rows, dtype=np.int64)
    return Batch(rewards, mask, index, traj_uid, turn, reward, agent_id, old_log_probs, squares)


def measure(method: str, rows: int, length: int) -> dict[str, float]:
    """Growth of this process's peak resident memory, in bytes, and CPU seconds of one call."""
    function, outputs = METHODS[method]
    function(make_batch(2 * GROUP, 16))  # imports, and tables that are kept
    batch = make_batch(rows, length)
    ballast = fill_to_peak()
    before = peak()
    start = time.thread_time()
    function(batch)
    seconds = time.thread_time() - start
    grown = peak() - before
    del ballast
    unit = rows * length * 4
    return {"tokens": rows * length, "bytes": grown, "extra": grown / unit - outputs, "seconds": seconds}


def fill_to_peak() -> np.ndarray | None:
    """Memory that lifts this process to its highest resident size so far, after free memory went back to the system.

    Without it the first growth of the measured call would hide below an earlier peak. Linux only.
    """
    gc.collect()
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    missing = peak() - int(statm.read_text().split()[1]) * resource.getpagesize()
    return np.ones(max(0, missing), dtype=np.uint8)


def peak() -> int:
    """Highest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main(cases: list[str]) -> int:
    """Measure the cases ``method:ROWSxLENGTH``, each in a child process; one JSON line each. Returns the exit code."""
    torch.set_num_threads(1)
    for name in METHODS:  # imported once, before the children are made
        METHODS[name][0](make_batch(GROUP, 8))
    for case in cases:
        method, shape = case.split(":")
        rows, length = (int(number) for number in shape.split("x"))
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                print(json.dumps({"case": case, **measure(method, rows, length)}), flush=True)
                status = 0
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1] != 0:
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
