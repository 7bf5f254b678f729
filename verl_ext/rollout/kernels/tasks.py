# SPDX-License-Identifier: Apache-2.0
"""Tasks: problems in KernelBench's form (see `problems`), and the task `fuse`.

A module of `fuse` is a chain of row-wise stages on x [128, 512] float32, with vectors a, b [512]. A tensor fits into a
core's private cache, so that the cost of an operation's call and of its traffic to memory are as visible on one core as
on a GPU: stages that are done in one kernel are really faster. 24 chains are for training, 8 are held out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

ROWS, COLUMNS = 128, 512
EPSILON = 1e-5
PROBLEM = "# task: "

Stage = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
STAGES: dict[str, Stage] = {
    "mul": lambda x, a, b: x * a,
    "add": lambda x, a, b: x + b,
    "relu": lambda x, a, b: torch.relu(x),
    "sq": lambda x, a, b: x * x,
    "tanh": lambda x, a, b: torch.tanh(x),
    "gelu": lambda x, a, b: torch.nn.functional.gelu(x, approximate="tanh"),
    "cmean": lambda x, a, b: x - x.mean(-1, keepdim=True),
    "rms": lambda x, a, b: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON),
    "softmax": lambda x, a, b: torch.softmax(x, -1),
}


def run(stages: list[str], x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The chain in torch, one operation after the other: x [rows, columns], a and b [columns]."""
    for stage in stages:
        x = STAGES[stage](x, a, b)
    return x


@dataclass(frozen=True)
class Task:
    """One module to be made faster.

    Attributes:
        name: ``fuse-7``, ``fuse-val-2``; or ``fuse`` for a chain that somebody wrote.
        stages: names of `STAGES`, in order.
        code: of a problem in KernelBench's form, which has no stages.
    """

    name: str
    stages: tuple[str, ...]
    code: str = ""

    @property
    def text(self) -> str:
        """What `of` reads: the chain as the prompt has it, or name and code of a problem."""
        return f"{PROBLEM}{self.name}\n{self.code}" if self.code else " ".join(self.stages)

    @classmethod
    def of(cls, said: str) -> Task:
        """A task by its name, or from the chain or the problem's code itself.

        Raises:
            ValueError: neither.
        """
        if "def get_inputs" in said and "class Model" in said:
            head, _, code = said.partition("\n")
            named = head.startswith(PROBLEM)
            return cls(head.removeprefix(PROBLEM), (), code) if named else cls("problem", (), said)
        for task in (*training(), *held_out()):
            if said in (task.name, task.text):
                return task
        stages = tuple(said.split())
        wrong = [stage for stage in stages if stage not in STAGES]
        if wrong or not 1 <= len(stages) <= 12:
            raise ValueError(
                f"there is no task {said!r}. Take fuse-0 to fuse-23, fuse-val-0 to fuse-val-7, or write a chain of 1 "
                f"to 12 of {' '.join(STAGES)}, such as 'gelu mul add rms'."
            )
        return cls("fuse", stages)


#: The first 24 are for training. Each of their stages changes what comes out, as a test shows.
_CHAINS = (
    "gelu sq mul add gelu cmean",
    "mul tanh rms cmean add sq",
    "add rms tanh softmax mul",
    "tanh sq add relu softmax mul cmean",
    "tanh cmean add sq cmean",
    "add gelu cmean add rms",
    "relu gelu cmean add sq mul",
    "add relu tanh gelu cmean",
    "mul relu add gelu rms",
    "mul tanh gelu mul gelu",
    "gelu rms mul add cmean",
    "tanh mul rms gelu relu",
    "mul relu sq tanh cmean add",
    "tanh gelu sq mul gelu",
    "add gelu cmean add mul",
    "tanh relu add rms relu",
    "tanh relu sq cmean mul",
    "mul relu add sq rms gelu",
    "add sq gelu tanh add",
    "gelu add sq mul tanh",
    "add rms gelu add gelu",
    "gelu mul add cmean relu cmean",
    "mul gelu rms mul cmean",
    "sq add tanh relu rms",
    "sq tanh cmean add gelu",
    "tanh gelu add gelu relu",
    "tanh add relu softmax rms",
    "tanh relu cmean gelu add mul add",
    "relu mul add gelu cmean",
    "tanh relu gelu softmax mul",
    "relu sq add cmean tanh mul",
    "tanh add relu sq add tanh cmean",
)


def training() -> list[Task]:
    """The 24 chains for training."""
    return [Task(f"fuse-{number}", tuple(chain.split())) for number, chain in enumerate(_CHAINS[:24])]


def held_out() -> list[Task]:
    """The 8 that are held out."""
    return [Task(f"fuse-val-{number}", tuple(chain.split())) for number, chain in enumerate(_CHAINS[24:])]


THREE_LAYERS = "mul add relu mul add relu mul add relu"
"""The chain of the program in Triton."""

_TRITON = """import torch, triton
import triton.language as tl
@triton.jit
def work(x, a, b, y, C: tl.constexpr):
    at = tl.arange(0, C)
    row = tl.program_id(0) * C + at
    v = tl.load(x + row)
    for _ in tl.static_range(3):
        v = tl.maximum(v * tl.load(a + at) + tl.load(b + at), 0.0)
    tl.store(y + row, v)
def launch(x, a, b):
    y = torch.empty_like(x)
    work[(x.shape[0],)](x, a, b, y, x.shape[1])
    return y
def torch_does_it(x, a, b):
    for _ in range(3): x = torch.relu(x * a + b)
    return x
class ModelNew:
    def forward(self, x, a, b):
        FORWARD
"""


def in_triton(forward: str) -> str:
    """A program in Triton for `THREE_LAYERS`, whose `launch` does the work; `forward` is the body of its module's."""
    return _TRITON.replace("FORWARD", forward)
