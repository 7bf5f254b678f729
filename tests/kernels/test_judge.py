# SPDX-License-Identifier: Apache-2.0
"""The judge with real compilers, cages and players: what is right, what is wrong, and what each failure is called."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import re2
import torch
from conftest import QUICK, most

from verl_ext.integration.settings.options import OptionError
from verl_ext.lab.kernels.bench import shared
from verl_ext.rollout.kernels import compiler, coverage, languages, seat, tasks
from verl_ext.rollout.kernels.feedback import feedback, prompt, scrub
from verl_ext.rollout.kernels.judge import STATUSES, Judge, Verdict, _how_wrong, fastest, interval, ratio
from verl_ext.rollout.kernels.languages import CandidateError
from verl_ext.rollout.kernels.options import JudgeOptions, KernelOptions, check_kernels
from verl_ext.rollout.kernels.seat import Infrastructure
from verl_ext.rollout.kernels.tasks import Task

TASK = Task.of("mul add relu")
C = """```c
void kernel(const float *x, const float *a, const float *b, float *y, long rows, long columns)
{
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < columns; c++) {
            float v = x[r * columns + c] * a[c] + b[c];
            y[r * columns + c] = v > 0 ? v : 0;
        }
}
```"""
PYTHON = '''```python
SOURCE = """
static float positive(float v) { return v > 0 ? v : 0; }
void first(const float *x, const float *a, float *y, long rows, long columns)
{ for (long r = 0; r < rows; r++) for (long c = 0; c < columns; c++) y[r * columns + c] = x[r * columns + c] * a[c]; }
void second(const float *x, const float *b, float *y, long rows, long columns)
{ for (long r = 0; r < rows; r++) for (long c = 0; c < columns; c++)
      y[r * columns + c] = positive(x[r * columns + c] + b[c]); }
"""
class ModelNew:
    def forward(self, x, a, b):
        y = torch.empty_like(x)
        kernels.first(x, a, y, *x.shape)
        kernels.second(y, b, y, *x.shape)
        return y
```'''

MANY = 'SOURCE = """\n' + "".join(f"void s{number}(void) {{}}\n" for number in range(40))  # each would be left out once
DEEP = C.replace(
    "void kernel",
    "static long deep(volatile long n) { volatile char big[4096]; big[n % 4096] = 1; return deep(n + 1) + big[0]; }\n"
    "void kernel",
).replace("{\n    for", "{\n    y[0] = deep(0);\n    for", 1)

TRITON = """```python
import torch, triton
from triton import language as tl
@triton.jit
def positive(v):
    return tl.maximum(v, 0.0)
@triton.autotune([triton.Config({"SIZE": 512}), triton.Config({"SIZE": 256})], key=["C"])
@triton.jit
def fused(x, a, b, y, C, SIZE: tl.constexpr):
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    row = tl.program_id(0) * C + at
    v = tl.load(x + row, mask=at < C) * tl.load(a + at, mask=at < C) + tl.load(b + at, mask=at < C)
    tl.store(y + row, positive(v), mask=at < C)
class ModelNew:
    def forward(self, x, a, b):
        y = torch.empty_like(x)
        rows, columns = x.shape
        fused[lambda meta: (rows, triton.cdiv(columns, meta["SIZE"]))](x, a, b, y, columns)
        return y
```"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("fuse", "krve mul add relu"),
        ("fuse", "kcse mul;t add;krvf relu"),
        ("c", C),
        ("python", PYTHON),
    ],
)
def test_right_kernels_are_right(judge: Judge, language: str, text: str) -> None:
    verdict = most(judge, TASK, text, language, lambda found: not found.decoy)
    assert verdict.status == "right", verdict
    assert verdict.correct and not verdict.decoy and verdict.worst < 0.1
    assert 0 < verdict.low <= verdict.speedup <= verdict.high
    assert verdict.reference_us > 0 < verdict.candidate_us
    assert sum(verdict.profile.values()) == pytest.approx(1.0) and 0 <= verdict.coverage <= 1


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("language", "text", "status"),
    [
        ("fuse", "krve add mul relu", "wrong"),
        ("fuse", "krve mul add", "wrong"),
        ("fuse", "", "no_code"),
        ("fuse", "krve", "no_code"),
        ("fuse", "kxve mul add relu", "no_code"),
        ("fuse", "t mul add relu leap", "no_code"),
        ("c", "```c\nint main(void) { return 0; }\n```", "no_code"),
        ("c", C.replace("v > 0", "w > 0"), "compile_error"),
        ("c", C.replace("{\n    for", "{\n    for (;;) ;\n    for", 1), "timeout"),
        ("c", C.replace("{\n    for", "{\n    *(volatile int *)8 = 1;\n    for", 1), "crashed"),
        ("c", C.replace("rows; r++", "rows - 1; r++", 1), "wrong"),
        ("python", PYTHON.replace("return y", "return z"), "error"),
        ("python", PYTHON.replace("return y", "return y[:1]"), "error"),
        ("python", PYTHON.replace("return y", "return torch.empty(1 << 30)"), "error"),
        ("python", PYTHON.replace("return y", "raise SystemExit"), "error"),
        ("python", PYTHON.replace("return y", "import os; os._exit(0)"), "crashed"),
        ("python", PYTHON.replace("return y", "import missing_module"), "error"),
        ("python", PYTHON.replace("ModelNew", "ModelOld"), "no_code"),
        ("python", PYTHON.replace("return y", "return ("), "no_code"),
        ("python", PYTHON.replace('SOURCE = """', MANY), "no_code"),
        ("triton", TRITON.replace("@triton.jit", "@triton.jit(" + "a+" * 400 + "a)"), "no_code"),
        ("c", C.replace("{\n    for", "{\n    __builtin_trap();\n    for", 1), "crashed"),
        ("c", DEEP, "crashed"),
        ("c", C.replace("void kernel", "char big[1L << 40] = {1};\nvoid kernel", 1), "compile_error"),
        ("c", C.replace("void kernel", "int big[] = {[1 << 28] = 1};\nvoid kernel", 1), "compile_error"),
        ("c", C.replace("v > 0", "(" + "w + " * 10_000 + "1)"), "compile_error"),
        ("python", PYTHON.replace("return y", "os = __import__('os'); os.abort()"), "crashed"),
        ("python", PYTHON.replace("return y", "return (f := lambda: f())()"), "error"),
        ("python", PYTHON.replace("return y", "os = __import__('os')\n        while True: os.fork()"), "error"),
        ("python", PYTHON.replace("return y", "raise ValueError('x' * 10**8)"), "error"),
        ("python", PYTHON.replace("return y", "open('/tmp/verl_ext_big', 'wb').write(b'x' * 10**9)"), "error"),
        ("python", PYTHON.replace("return y", "while True: print('x', file=__import__('sys').stderr)"), "timeout"),
        ("python", PYTHON.replace("return y", "return y * float('nan')"), "wrong"),
        ("python", PYTHON.replace("return y", "return y.int()"), "wrong"),
        ("python", PYTHON.replace("return y", "return y.to('meta')"), "error"),
        ("python", PYTHON.replace("return y", "return None"), "error"),
        ("triton", TRITON.replace("positive(v), mask", "v, mask"), "wrong"),
        ("triton", TRITON.replace("return y", "return y.cuda()"), "error"),
        ("triton", TRITON.replace("tl.maximum", "tl.maximal"), "error"),
        ("triton", TRITON.replace("y = torch", "while True: pass\n        y = torch"), "timeout"),
        ("triton", TRITON.replace("@triton.jit", ""), "no_code"),
    ],
)
def test_what_fails_is_named_and_the_next_verdict_is_right(judge: Judge, language: str, text: str, status: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    verdict = judge.evaluate(TASK, text, language)
    assert verdict.status == status in STATUSES, verdict
    assert not verdict.correct and verdict.speedup == verdict.coverage == 0.0 and verdict.error
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 3  # the reference's player, once
    assert judge.evaluate(TASK, "krve mul add relu", "fuse").correct


def test_the_compilers_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of processor time, however long the clock would let it: the limit is the shell's."""
    monkeypatch.setattr(compiler, "PATIENCE", 10_000)
    long = "float kernel(float v)\n{\n" + "v = v * v + __builtin_sinf(v);\n" * 20_000 + "return v;\n}"
    with pytest.raises(CandidateError) as said:
        compiler.build(long, 1, "verl_ext_long")
    assert said.value.status == "compile_timeout"


@pytest.mark.seconds
def test_what_is_interpreted_is_right_or_wrong_and_has_no_speed(judge: Judge) -> None:
    verdict = judge.evaluate(TASK, TRITON, "triton")
    assert verdict.status == "right" and not verdict.decoy and verdict.worst < 0.1, verdict
    assert verdict.speedup == verdict.coverage == verdict.worth == 0.0 and not verdict.profile
    assert verdict.reward() == 0.5 and feedback(verdict, "triton") == "Status: right"
    # The torch of the program makes up for a kernel that did nothing: it does not matter.
    spare = TRITON.replace("return y", "return y + 0 * y if torch.relu(x * a + b).equal(y) else torch.relu(x * a + b)")
    verdict = judge.evaluate(TASK, spare, "triton")
    assert verdict.correct and verdict.decoy and verdict.reward() == 0.0
    assert verdict.reward(pay_decoys=True) == 0.5  # what the check takes from it, and for an experiment alone
    assert "No kernel of yours changes the result" in feedback(verdict, "triton")


@pytest.mark.seconds
def test_text_that_no_file_can_hold_is_the_compilers_to_judge(judge: Judge) -> None:
    odd = PYTHON.replace('SOURCE = """', 'SOURCE = """// \\ud800')
    assert judge.evaluate(TASK, odd, "python").status == "right"  # a comment


def test_errors_in_words_and_in_tolerances(judge: Judge) -> None:
    assert "the largest error is 1," in _how_wrong(torch.tensor([True, False]), torch.tensor([False, True]))
    assert judge._worst(torch.zeros(8), torch.full((8,), 1e25)) > 1  # whose norm is infinite in float32


LINES = '''"""A language of a user's: a line for each kernel, the stages that it does."""

from verl_ext.rollout.kernels.languages import CandidateError, Program
from verl_ext.rollout.kernels.players.player import launcher

HOW = "Write in one fenced block, for each kernel, a line: times or plus."
CODE = {"times": "y[i] = x[i] * a[i % C];", "plus": "y[i] = x[i] + b[i % C];"}
HEAD = "void {}(const float *x, const float *a, const float *b, float *y, long R, long C) "


def read(code):
    words = code.split()
    if unknown := [word for word in words if word not in CODE]:
        raise CandidateError("no_code", f"no such kernel: {unknown[0]}")
    bodies = [(HEAD.format(w) + "{{ for (long i = 0; i < R * C; i++) {{ {} }} }}").format(CODE[w]) for w in set(words)]
    return Program("lines", "\\n".join(bodies), {"lines": words}, " ".join(words))


def program(plan, library, names, lost):
    kernels = {name: launcher(library, name, name in lost) for name in names}

    def run(x, a, b, y):
        for line in plan["lines"]:
            kernels[line](x, a, b, y, *x.shape)
            x = y

    return run
'''


def test_a_language_is_a_module_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_languages").mkdir()
    (tmp_path / "my_languages" / "lines.py").write_text(LINES, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    name, task = "my_languages.lines", Task.of("mul add")
    assert "a line: times or plus" in prompt(task, name)
    with Judge(dataclasses.replace(QUICK, language=name, looks=100)) as own:
        right = own.evaluate(task, "```\ntimes\nplus\n```")
        assert right.status == "right" and right.speedup > 0 and right.coverage > 0.5 and not right.decoy, right
        assert {"times", "plus"} <= set(right.profile)
        assert own.evaluate(task, "plus").status == "wrong"
        assert own.evaluate(task, "minus").error == "no such kernel: minus"
        assert own.evaluate(task, "krve mul add", "fuse").status == "right"
    with Judge(QUICK) as other, pytest.raises(ValueError, match=r"not made for the language my_languages\.lines"):
        other.evaluate(task, "plus", name)
    assert KernelOptions(language=name).backend == "c"
    (tmp_path / "my_languages" / "keyless.py").write_text(LINES.replace(', " ".join(words))', ")"), encoding="utf-8")
    keys = {languages.read(text, "my_languages.keyless", task).key for text in ("times", "plus", "plus\n")}
    assert keys == {"times", "plus"}  # else the first verdict would be everybody's
    with pytest.raises(ValueError, match=r"takes the language triton, not my_languages\.lines"):
        KernelOptions(language=name, backend="triton")
    with pytest.raises(ValueError, match="choose one of fuse, c, python, triton, or name a module of yours"):
        JudgeOptions("lines")
    with pytest.raises(ValueError, match=r"my_languages\.none', which cannot be imported"):
        JudgeOptions("my_languages.none")
    with pytest.raises(ValueError, match=r"json\.decoder', a module that lacks HOW"):
        JudgeOptions("json.decoder")


@pytest.mark.seconds
def test_one_that_ends_with_a_word_of_the_judge_unread_is_to_blame(judge: Judge) -> None:
    ends = "import os, time\ndef end(*_):\n    time.sleep(0.5)\n    os._exit(0)\nos.read = end\nclass ModelNew:"
    verdict = judge.evaluate(TASK, PYTHON.replace("class ModelNew:", ends), "python")
    assert verdict.status == "crashed", verdict
    assert most(judge, TASK, C, "c", lambda found: not found.decoy).status == "right"


@pytest.mark.seconds
def test_one_that_ends_while_it_is_profiled_has_crashed(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(seat: Any, *given: Any) -> Any:
        os.kill(seat.pid, signal.SIGTERM)
        while not seat.waits(0.01):
            pass
        raise FileNotFoundError(f"/proc/{seat.pid}/maps")

    with monkeypatch.context() as patch:
        patch.setattr(coverage, "profile", profile)
        assert judge.evaluate(TASK, PYTHON, "python").status == "crashed"
    assert judge.evaluate(TASK, PYTHON, "python").correct


def test_all_in_torch_is_a_decoy(judge: Judge) -> None:
    verdict = judge.evaluate(TASK, "t mul add relu")
    assert verdict.correct and verdict.decoy and verdict.coverage == 0.0


@pytest.mark.parametrize(
    "bad",
    [
        '#include "/etc/passwd"\n',
        "%:include </etc/passwd>\n",
        '__asm__(".incbin 1");\n',
        "void begin(void) __attribute__((constructor));\n",
        'char *text = "text";\n',
        "#pragma GCC optimize (fast)\n",
        "#define long int\n",
    ],
)
def test_c_that_speaks_to_others_than_the_compiler_is_refused(bad: str) -> None:
    with pytest.raises(CandidateError) as caught:
        languages.read(C.replace("```c\n", f"```c\n{bad}"), "c", TASK)
    assert caught.value.status == "no_code"


def test_comments_without_an_end_are_read_in_linear_time() -> None:
    assert isinstance(languages._COMMENT, type(re2.compile("x")))
    languages.check_c("/* " * 20_000 + "\ud800")
    with pytest.raises(CandidateError, match="#include"):
        languages.check_c("/* a */ /* \n\n */\n#include <b>")


@pytest.mark.parametrize("call", ["system", "dlsym", "PyRun_SimpleString", "fork", "write"])
def test_kernels_call_mathematics_and_nothing_else(call: str) -> None:
    source = languages.read(C.replace("float v =", f"{call}(0); float v ="), "c", TASK).source
    with pytest.raises(CandidateError, match=call) as caught:
        compiler.build(f"long {call}(long);\n{source}", 10, "test")
    assert caught.value.status == "compile_error"


def test_every_stage_of_every_chain_changes_what_comes_out() -> None:
    """So that leaving one out is wrong, and a constant too: the same 24 and 8 chains as ever, all different."""
    generator = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(size, generator=generator) for size in ((64, 512), (512,), (512,)))
    tolerance = JudgeOptions().tolerance
    chains = [*tasks.training(), *tasks.held_out()]
    assert len({task.text for task in chains}) == len({task.name for task in chains}) == 32
    for task in chains:
        right = tasks.run(list(task.stages), x, a, b)
        size = right.square().mean().sqrt()
        assert torch.isfinite(right).all()
        others = [task.stages[:place] + task.stages[place + 1 :] for place in range(len(task.stages))]
        for other in [tasks.run(list(stages), x, a, b) for stages in others] + [right.mean() + torch.zeros_like(right)]:
            assert ((other - right).abs() > 100 * tolerance * (right.abs() + size)).double().mean() > 0.3, task


def test_names_of_tasks(judge: Judge) -> None:
    assert Task.of("fuse-3") == tasks.training()[3] == Task.of(tasks.training()[3].text)
    assert Task.of("fuse-val-7") == tasks.held_out()[7]
    with pytest.raises(ValueError, match="fuse-0 to fuse-23"):
        Task.of("fuse-24")


def test_the_fastest_third_says_the_speedup() -> None:
    """What else a machine does adds to batches; a third of them without it is enough."""
    times = np.array([(4.0, 2.0), (9.0, 2.0), (4.2, 5.0), (4.0, 2.0), (8.0, 3.0), (4.1, 2.2)])
    assert fastest(times).tolist() == [4.0, 2.0] and ratio(times) == 2.0
    assert fastest(times[:, 0]) == 4.0 and fastest(times[:4, 1]) == 2.0 and fastest(times[:1, 1]) == 2.0
    assert ratio(np.stack([times, times * [1, 2]])).tolist() == [2.0, 1.0]


def test_interval_of_the_speedup() -> None:
    """It holds the truth in about 95 of a hundred judgements, its lower end in nearly all."""
    rng = np.random.default_rng(7)
    widths = []
    for pairs in (7, 28):
        found = [interval(rng.gamma(8.0, 0.01, (pairs, 2)) + [2.0, 1.0]) for _ in range(200)]
        truth = ratio(rng.gamma(8.0, 0.01, (100_000, 2)) + [2.0, 1.0])
        assert np.mean([low <= truth <= high for low, high in found]) > 0.87
        assert np.mean([low <= truth for low, _ in found]) > 0.96
        widths.append(np.mean([high - low for low, high in found]))
    assert widths[1] < 0.7 * widths[0]
    assert interval([(2.0, 1.0)] * 5) == (2.0, 2.0)
    few = [rng.gamma(8.0, 0.01, (3, 2)) + [2.0, 1.0] for _ in range(200)]
    assert all(low <= ratio(times) <= high for times in few for low, high in [interval(times)])
    given = rng.gamma(8.0, 0.01, (7, 2)) + [2.0, 1.0]
    assert interval(given) == interval(given) and interval(given)[0] <= ratio(given) <= interval(given)[1]


@pytest.mark.seconds
@pytest.mark.parametrize("by", ["the kernel's clock", "ptrace"])
def test_both_ways_to_look_find_the_share_of_a_kernel(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    if by == "ptrace":
        monkeypatch.setattr(coverage, "_PERF", {})
    looks: list[str] = []
    for name in ("sampled", "traced"):
        monkeypatch.setattr(coverage, name, partial(_noted, looks, name, getattr(coverage, name)))
    assert coverage.works() == ""
    with Judge(dataclasses.replace(QUICK, looks=100)) as judge:
        little, most_of_it = (shared(judge, share) for share in (0.2, 0.8))
    assert looks == ["traced" if by == "ptrace" or not coverage.may_sample(os.getpid()) else "sampled"] * 2
    assert little.correct and most_of_it.correct and not little.decoy
    assert little.coverage == pytest.approx(0.2, abs=0.25) and most_of_it.coverage == pytest.approx(0.8, abs=0.25)


def _noted(looks: list[str], name: str, look: Callable[..., Any], *given: Any) -> Any:
    looks.append(name)
    return look(*given)


def test_a_pair_is_played_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    cores, seen = sorted(os.sched_getaffinity(0)), []
    monkeypatch.setattr(seat, "CORE", lambda: cores[len(seen) // 2 % len(cores)])
    end = seat.Seat.end
    monkeypatch.setattr(seat.Seat, "end", lambda self: (seen.append(os.sched_getaffinity(self.pid)), end(self))[1])
    with Judge(QUICK) as judge:
        assert judge.evaluate(TASK, f"krve {TASK.text}", "fuse").status == "right"
    played = seen[: 2 * (QUICK.pairs + 1)]
    assert played[::2] == played[1::2] == [{cores[pair % len(cores)]} for pair in range(QUICK.pairs + 1)]


def test_inputs_are_new_in_every_batch(judge: Judge) -> None:
    """Rows of a pool, by a factor each: of a batch's rows none is one of another batch, and their spread is 1."""
    batches = [judge._inputs() for _ in range(3)]
    rows = torch.cat([x.flatten(0, 1) for x, _, _ in batches])
    assert len(torch.unique(rows, dim=0)) == len(rows) and rows.std() == pytest.approx(1.0, abs=0.03)
    assert rows.mean() == pytest.approx(0.0, abs=0.01) and rows.abs().max() > 4
    assert len({float(a[0]) for _, a, _ in batches} | {float(b[0]) for _, _, b in batches}) == 6


def test_feedback_names_nothing_of_the_host() -> None:
    said = "in /home/someone/lib/torch.py: no kernel at 0x7f0123456789 of candidate.py:3"
    assert scrub(said) == "in torch.py: no kernel at 0x... of candidate.py:3"
    text = feedback(Verdict("error", error=said), "c")
    assert "/home" not in text and "status: error" in text.lower()
    right = Verdict("right", 1.23, 1.1, 1.3, 7, 100.0, 80.0, 0.5, profile={"kernel": 0.5, "torch": 0.5})
    assert feedback(right, "fuse") == "right x1.2 cov 0.5"
    assert "Speedup: 1.23" in feedback(right, "c") and "50% torch" in feedback(right, "python")
    assert TASK.text in prompt(TASK, "fuse") and "void kernel" in prompt(TASK, "c")


def test_options_are_checked() -> None:
    for bad in ({"language": "rust"}, {"pairs": 1}, {"pairs": 9, "max_pairs": 8}, {"tolerance": 0.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            JudgeOptions(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend is 'cuda'; this version has c, triton_interpret"):
        KernelOptions(backend="cuda")
    with pytest.raises(ValueError, match="backend triton_interpret takes the language triton, not fuse"):
        KernelOptions(backend="triton_interpret")
    with pytest.raises(ValueError, match="backend c takes the language fuse or c or python, not triton"):
        KernelOptions(language="triton")


def test_where_triton_is_missing_nobody_is_to_blame(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Infrastructure, match="pip install triton"):
        judge.evaluate(TASK, TRITON, "triton")
    options = {"backend": "triton_interpret", "language": "triton"}
    with pytest.raises(OptionError, match=r"verl_ext\.kernels\.language: triton is not installed"):
        check_kernels({"verl_ext": {"kernels": options}})


@pytest.mark.seconds
def test_nothing_is_left_of_a_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # others use the machine's
    with Judge(JudgeOptions(pairs=3, max_pairs=3, looks=10)) as judge:
        assert judge.evaluate(TASK, "krve mul add relu").correct
        players = judge._references["mul add relu"].pid
        assert Path(f"/proc/{players}").exists()
    until = time.monotonic() + 120
    while Path(f"/proc/{players}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{players}").exists()
    assert not list(tmp_path.iterdir())
