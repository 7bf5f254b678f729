# SPDX-License-Identifier: Apache-2.0
"""Problems in KernelBench's form with the real judge: candidates in Triton and in C, and refusals."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_ext import cli
from verl_ext.rollout.kernels import problems
from verl_ext.rollout.kernels.feedback import prompt
from verl_ext.rollout.kernels.judge import Judge
from verl_ext.rollout.kernels.loop import KernelLoop
from verl_ext.rollout.kernels.options import KernelOptions
from verl_ext.rollout.kernels.seat import Infrastructure
from verl_ext.rollout.kernels.tasks import Task


def problem(name: str, forward: str, inputs: str, init: str = "", made: str = "") -> Task:
    code = f"""import torch
import torch.nn as nn
class Model(nn.Module):
    def __init__(self{init and ", size"}):
        super().__init__()
        {made or "pass"}
    def forward(self, x, *more):
        return {forward}
def get_inputs():
    return [{inputs}]
def get_init_inputs():
    return [{init}]
"""
    return Task(name, (), code)


RELU = problem("relu", "torch.relu(x)", "torch.randn(6, 50)")
SOFTMAX = problem("softmax", "torch.softmax(x, -1)", "torch.randn(6, 50)")
MATMUL = problem("matmul", "x @ more[0] * more[1]", "torch.rand(20, 30), torch.rand(30, 10), 0.5")
LINEAR = problem("linear", "torch.relu(self.layer(x)) + self.bias", "torch.rand(8, 16)", "(16, 12)",
                 "self.layer = nn.Linear(*size); self.bias = nn.Parameter(torch.randn(size[1]))")  # fmt: skip
ARGMAX = problem("argmax", "torch.argmax(x, -1)", "torch.randn(6, 50)")

ROWS = """
import torch, torch.nn as nn, triton, triton.language as tl
@triton.jit
def rows(x, y, columns, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    v = tl.load(x + tl.program_id(0) * columns + at, mask=at < columns, other=-float("inf"))
    {body}
class ModelNew(nn.Module):
    def forward(self, x):
        y = {out}
        rows[(x.shape[0],)](x, y, x.shape[1], SIZE=64)
        return y
"""
STORE = "tl.store(y + tl.program_id(0) * columns + at, {}, mask=at < columns)"
TRITON = {
    "relu": ROWS.format(body=STORE.format("tl.maximum(v, 0.0)"), out="torch.empty_like(x)"),
    "softmax": ROWS.format(
        body="v = tl.exp(v - tl.max(v, 0))\n    " + STORE.format("v / tl.sum(v, 0)"), out="torch.empty_like(x)"
    ),
    "argmax": ROWS.format(
        body="tl.store(y + tl.program_id(0), tl.argmax(v, 0))", out="torch.empty(len(x), dtype=torch.int64)"
    ),
    "matmul": """
import torch, triton, triton.language as tl
@triton.jit
def product(a, b, y, scale, K, N: tl.constexpr, SIZE: tl.constexpr):
    k, n = tl.arange(0, SIZE), tl.arange(0, 16)
    row = tl.load(a + tl.program_id(0) * K + k, mask=k < K, other=0.0)
    block = tl.load(b + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
    tl.store(y + tl.program_id(0) * N + n, tl.sum(row[:, None] * block, 0) * scale, mask=n < N)
class ModelNew:
    def forward(self, a, b, scale):
        y = torch.empty(a.shape[0], b.shape[1])
        product[(a.shape[0],)](a, b, y, scale, a.shape[1], N=b.shape[1], SIZE=32)
        return y
""",
    "linear": """
import torch, torch.nn as nn, triton, triton.language as tl
@triton.jit
def finish(x, bias, y, columns, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    here, inside = tl.program_id(0) * columns + at, at < columns
    v = tl.maximum(tl.load(x + here, mask=inside), 0.0) + tl.load(bias + at, mask=inside)
    tl.store(y + here, v, mask=inside)
class ModelNew(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.layer = nn.Linear(*size)
        self.bias = nn.Parameter(torch.randn(size[1]))
    def forward(self, x):
        x = self.layer(x)
        y = torch.empty_like(x)
        finish[(len(x),)](x, self.bias, y, x.shape[1], SIZE=16)
        return y
""",
}
PYTHON = '''
SOURCE = """
void positive(const float *x, float *y, long n) { for (long i = 0; i < n; i++) y[i] = x[i] > 0 ? x[i] : 0; }
"""
class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        kernels.positive(x, y, x.numel())
        return y
'''


@pytest.mark.seconds
@pytest.mark.parametrize("task", [RELU, SOFTMAX, MATMUL, LINEAR, ARGMAX], ids=lambda task: task.name)
def test_right_kernels_in_triton(judge: Judge, task: Task) -> None:
    verdict = judge.evaluate(task, TRITON[task.name], "triton")
    assert (verdict.status, verdict.error, verdict.decoy) == ("right", "", False)
    assert verdict.speedup == 0.0 and verdict.worst < 1.0 and not judge._references.get(task.text)


@pytest.mark.parametrize(
    ("task", "old", "new", "status"),
    [
        (RELU, "tl.maximum(v, 0.0)", "tl.maximum(v, 0.01)", "wrong"),
        (ARGMAX, "tl.argmax(v, 0)", "tl.argmax(v, 0) + (tl.program_id(0) == 3)", "wrong"),
        (LINEAR, "self.layer = nn.Linear(*size)", "torch.rand(1); self.layer = nn.Linear(*size)", "wrong"),
        (RELU, "return y", "return y[:3]", "error"),
        (RELU, "class ModelNew(nn.Module):", "import sys\nclass ModelNew(nn.Module):\n    hidden = Model", "error"),
    ],
)
def test_wrong_kernels(judge: Judge, task: Task, old: str, new: str, status: str) -> None:
    assert old in TRITON[task.name]
    assert judge.evaluate(task, TRITON[task.name].replace(old, new), "triton").status == status


def test_torch_that_does_it_all_is_a_decoy(judge: Judge) -> None:
    spare = TRITON["softmax"].replace("return y", "return torch.softmax(x, -1)")
    verdict = judge.evaluate(SOFTMAX, spare, "triton")
    assert verdict.correct and verdict.decoy and verdict.reward() == 0.0


def test_kernels_in_c_are_timed(judge: Judge) -> None:
    large = problem("relu", "torch.relu(x)", "torch.randn(256, 512)")
    verdict = judge.evaluate(large, PYTHON, "python")
    assert verdict.correct and not verdict.decoy and verdict.speedup > 0 and verdict.pairs == 3, verdict


@pytest.mark.seconds
def test_what_a_machine_cannot_hold_is_refused(judge: Judge) -> None:
    huge = problem("huge", "torch.relu(x)", "torch.randn(1 << 20, 1 << 12)")
    with pytest.raises(Infrastructure, match=r"huge needs about 65536 MiB .* limit is 1024 MiB, .* memory_mb=1024"):
        judge.evaluate(huge, PYTHON, "python")
    two = problem("two", "(x, x)", "torch.randn(2)")
    with pytest.raises(Infrastructure, match="two cannot be played: TypeError: forward returns a tuple, not a tensor"):
        judge.evaluate(two, PYTHON, "python")
    same = problem("same", "torch.relu(-x.abs())", "torch.randn(20)")
    with pytest.raises(Infrastructure, match="same is no task: its outputs are the same for different inputs"):
        judge.evaluate(same, PYTHON, "python")
    found = {task.name: why for task, _, why in problems.check([RELU, huge, two], 1024)}
    assert found["relu"] == "" and "65536 MiB" in found["huge"] and "returns a tuple" in found["two"]


def test_words_and_names() -> None:
    assert Task.of(RELU.text) == RELU and Task.of(RELU.code).name == "problem"
    row = {"reward_model": {"ground_truth": RELU.code}, "extra_info": {"level": 1, "problem_id": 19, "name": "19_ReLU"}}
    assert problems.task_of(row).name == "kernelbench-1-19"
    assert RELU.code.strip() in prompt(RELU, "triton") and "ModelNew" in prompt(RELU, "python")
    asked = KernelLoop.task(SimpleNamespace(options=KernelOptions(language="python")), row)  # type: ignore[arg-type]
    assert asked.task == problems.task_of(row) and asked.question == prompt(RELU, "python")
    with pytest.raises(ValueError, match="relu is for the languages python and triton, not fuse"):
        prompt(RELU, "fuse")


@pytest.mark.seconds
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "relu.py").write_text(RELU.code)
    (tmp_path / "answer.txt").write_text(PYTHON)
    command = ["kernels", "evaluate", str(tmp_path / "answer.txt"), "--task", str(tmp_path / "relu.py")]
    assert cli.main([*command, "--language", "python", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["correct"]
    assert cli.main(command) == 2
    assert "relu is a problem in KernelBench's form, for the languages python and triton" in capsys.readouterr().err


@pytest.mark.seconds
@pytest.mark.parametrize("where", ["def get_inputs():\n", "        super().__init__()\n"])
def test_a_reference_that_fails_is_nobodys_fault(judge: Judge, where: str) -> None:
    """On the meta device, where a problem's size is looked at, all is well."""
    fails = "1 / int(torch.empty(0).is_meta)\n"
    indent = "        " if where.startswith(" ") else "    "
    bad = Task("bad", (), RELU.code.replace(where, f"{where}{indent}{fails}"))
    with pytest.raises(Infrastructure, match="the reference of bad"):
        judge.evaluate(bad, PYTHON, "python")
    assert judge.evaluate(RELU, PYTHON, "python").correct


def test_the_judges_process_stays_as_it_is(judge: Judge) -> None:
    """Triton is interpreted in players alone: in a process that judges or trains it may be needed for a GPU."""
    assert judge.evaluate(RELU, "nothing", "triton").status == "no_code"
    assert "TRITON_INTERPRET" not in os.environ and "verl_ext.rollout.kernels.players.problem_player" not in sys.modules
