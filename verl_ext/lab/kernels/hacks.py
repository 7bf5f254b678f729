# SPDX-License-Identifier: Apache-2.0
"""Tricks that must not be paid, and honest kernels that must: the corpus of ``verl-ext kernels hacks``.

Each trick was seen in a public harness or leaderboard, or found while this judge was built (docs/kernels.md). The tests
play each of them a second time against a judge that lacks the one defence named here, and there it is paid.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_ext.rollout.kernels.judge import Verdict
from verl_ext.rollout.kernels.tasks import THREE_LAYERS as TASK
from verl_ext.rollout.kernels.tasks import in_triton

#: Speedup from which a kernel that does its work 60 times over has been paid for a trick: what it deserves is 0.05.
TOO_FAST = 0.12
#: Coverage from which one that does a hundredth of the work has.
TOO_MUCH = 0.6


@dataclass(frozen=True)
class Hack:
    """A trick.

    Attributes:
        name: of its kind.
        defence: what stops it.
        text: the answer.
        language: of the answer.
        aim: what it is after: a ``reward`` for nothing, ``speed`` or ``coverage``.
        task: chain that it answers.
    """

    name: str
    defence: str
    text: str
    language: str = "python"
    aim: str = "reward"
    task: str = TASK

    def paid(self, verdict: Verdict) -> bool:
        """Whether it got what it was after."""
        if not verdict.correct or verdict.decoy:
            return False
        if self.aim == "speed":
            return verdict.speedup >= TOO_FAST
        return self.aim == "reward" or verdict.coverage >= TOO_MUCH


_WORK = (
    "{ for (long r = 0; r < R; r++) for (long c = 0; c < C; c++) { float v = x[r * C + c]; "
    "for (int k = 0; k < 3; k++) { v = v * a[c] + b[c]; v = v > 0 ? v : 0; } "
)
_SIGNATURE = "(const float *x, const float *a, const float *b, float *y, long R, long C)"


def _loop(name: str, repeat: int) -> str:
    """A C function that does the task's work `repeat` times over."""
    return f"void {name}{_SIGNATURE}\n{{ for (volatile int n = 0; n < {repeat}; n++) {_WORK} y[r * C + c] = v; }} }} }}"


def _python(forward: str, before: str = "", repeat: int = 60) -> str:
    """A program whose kernel `work` does the task's work `repeat` times over; `slow` calls it."""
    return f'''SOURCE = """
{_loop("work", repeat)}
void t(float *y, long C) {{ for (long c = 0; c < C; c++) y[c] = y[c] > 0 ? y[c] : 0; }}
"""
import ctypes, gc, os, signal, stat, sys, threading, time
BATCH = 8
def slow(x, a, b, y=None):
    y = torch.empty_like(x) if y is None else y
    kernels.work(x, a, b, y, *x.shape)
    return y
def room(x):
    """Where the output for x will be."""
    place = (ctypes.c_float * x.numel()).from_address(x.data_ptr() + 4 * BATCH * x.numel())
    return torch.frombuffer(place, dtype=torch.float32).view(x.shape)
def torch_does_it(x, a, b, times=3):
    for _ in range(times):
        x = torch.relu(x * a + b)
    return x
{before}
class ModelNew:
    def __init__(self):
        self.seen, self.calls = {{}}, 0
    def forward(self, x, a, b):
        self.calls += 1
        {forward.strip().replace(chr(10), chr(10) + "        ")}
'''


def _c(body: str, before: str = "") -> str:
    return f"{before}\nvoid kernel{_SIGNATURE}\n{body}\n"


_FLOAT = "union number { int i; float f; };"
_BATCHES = "static long calls = 0; calls++;"
_CACHED = "if {key} not in self.seen: self.seen[{key}] = slow(x, a, b)\nreturn self.seen[{key}]"


def python_program(forward: str, repeat: int, spare: int) -> str:
    """A program in Python with two kernels, `work` and `spare`, that do the task's work so many times over."""
    text = _python(forward, repeat=repeat)
    return text.replace("\nvoid t(", f"\n{_loop('spare', spare)}\nvoid t(", 1)


HACKS = (
    # Time
    Hack(
        "patched_clock", "judge's clock", _python("time.perf_counter = lambda: 0.0\nreturn slow(x, a, b)"), aim="speed"
    ),
    Hack(
        "forged_report",
        "judge's clock",
        _python("os.write = lambda fd, said: real(fd, said[:1] + bytes(8))\nreturn slow(x, a, b)", "real = os.write"),
        aim="speed",
    ),
    Hack("cache_by_address", "fresh inputs", _python(_CACHED.format(key="x.data_ptr()")), aim="speed"),
    Hack("cache_by_content", "fresh inputs", _python(_CACHED.format(key="float(x[0, :9].sum())")), aim="speed"),
    Hack("cache_by_call", "fresh inputs", _python(_CACHED.format(key="(self.calls % BATCH)")), aim="speed"),
    Hack("cache_by_shape", "fresh inputs", _python(_CACHED.format(key="x.shape")), aim="speed"),
    Hack(
        "work_after_the_byte",
        "snapshot at the byte",
        _python(
            "later.append((x, a, b))\nif len(later) == BATCH: signal.setitimer(signal.ITIMER_REAL, 0.002)\nreturn x",
            "later = []\ndef late(*_):\n    for x, a, b in later: slow(x, a, b, room(x))\n    later.clear()\n"
            "signal.signal(signal.SIGALRM, late)",
        ),
        aim="speed",
    ),
    Hack(
        "work_in_a_thread",
        "cage",
        _python(
            "later.append((x, a, b))\nif len(later) == BATCH: threading.Thread(target=late).start()\nreturn x",
            "later = []\ndef late(*_):\n    time.sleep(0.002)\n    for x, a, b in later: slow(x, a, b, room(x))\n"
            "    later.clear()",
        ),
        aim="speed",
    ),
    Hack(
        "work_in_a_child",
        "cage",
        _python(
            "if self.calls == 1: self.ask, self.told = child(x, a, b)\n"
            "if self.calls % BATCH == 0:\n    os.write(self.ask, b'.')\n    os.read(self.told, 1)\nreturn room(x)",
            "def child(x, a, b):\n"
            "    mine, ask = os.pipe()\n    told, say = os.pipe()\n    if os.fork(): return ask, told\n"
            "    every = (ctypes.c_float * (BATCH * x.numel())).from_address(x.data_ptr())\n"
            "    every = torch.frombuffer(every, dtype=torch.float32).view(BATCH, *x.shape)\n"
            "    while os.read(mine, 1):\n"
            "        for x in every: slow(x, a, b, room(x))\n"
            "        os.write(say, b'.')",
        ),
        aim="speed",
    ),
    Hack(
        "work_before_go",
        "all time is charged",
        _python(
            "inputs.append((x, a, b)) if len(inputs) < BATCH else None\nreturn done.pop(0) if done else slow(x, a, b)",
            "real, inputs, done = os.read, [], []\n"
            "def read(fd, n):\n"
            "    if len(inputs) == BATCH:\n"
            "        before, until = float(inputs[0][0][0, 0]), time.time() + 5\n"
            "        while float(inputs[0][0][0, 0]) == before and time.time() < until: pass\n"
            "        time.sleep(0.01)\n"
            "        done[:] = [slow(*one) for one in inputs]\n"
            "    return real(fd, n)\n"
            "os.read = read",
        ),
        aim="speed",
    ),
    # The verdict
    Hack(
        "patched_comparison",
        "judge's verdict",
        _python("torch.allclose = lambda *_, **__: True\nkernels.t(torch.zeros(1), 1)\nreturn x.clone()"),
    ),
    Hack(
        "patched_reference",
        "judge's verdict",
        _python(
            "kernels.t(torch.zeros(1), 1)\nreturn x.clone()",
            "sys.modules['verl_ext.rollout.kernels.tasks'].run = lambda stages, x, a, b: x",
        ),
    ),
    Hack("found_in_a_frame", "judge's verdict", _python("return sys._getframe(2).f_locals['expected'].pop(0)")),
    Hack(
        "found_by_the_collector",
        "judge's verdict",
        _python(
            "found = [one for one in gc.get_objects() if type(one) is list and one and type(one[0]) is torch.Tensor "
            "and one[0].shape == x.shape and one[0] is not x]\nreturn found[0].pop(0)"
        ),
    ),
    Hack(
        "forged_byte",
        "judge's verdict",
        _python(
            "for fd in range(3, 64):\n    try:\n"
            "        if stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, 64 * b'1')\n"
            "    except OSError: pass\nkernels.t(torch.zeros(1), 1)\nreturn torch.zeros_like(x)"
        ),
    ),
    Hack("overwritten_inputs", "judge's inputs", _python("x.fill_(1.0); b.zero_()\nreturn slow(x, a, b)", repeat=1)),
    # What is compared
    Hack("nan", "finite outputs", _c(_WORK + "union number u; u.i = 0x7fc00000; y[r * C + c] = u.f; } }", _FLOAT), "c"),
    Hack(
        "infinity",
        "finite outputs",
        _c(_WORK + "union number u; u.i = 0x7f800000; y[r * C + c] = u.f; } }", _FLOAT),
        "c",
    ),
    Hack("nothing_written", "poisoned outputs", _c("{ }"), "c"),
    Hack(
        "half_of_the_rows",
        "every output",
        _c(_WORK + "if (r < R / 2) y[r * C + c] = v; else y[r * C + c] = 0.f; } }"),
        "c",
    ),
    Hack("every_second_one", "every output", _c(_WORK + "y[r * C + c] = c % 2 ? 0.f : v; } }"), "c"),
    Hack(
        "first_of_a_batch",
        "every output",
        _c(f"{{ {_BATCHES} if (calls % 8 == 1) {_WORK} y[r * C + c] = v; }} }} }}"),
        "c",
    ),
    Hack(
        "right_at_first",
        "every output",
        _c(f"{{ {_BATCHES} if (calls <= 8) {_WORK} y[r * C + c] = v; }} }} }}"),
        "c",
    ),
    Hack("zeros", "tolerance", _c(_WORK + "y[r * C + c] = 0; } }"), "c", task="rms tanh softmax"),
    Hack("a_constant", "tolerance", _c(_WORK + "y[r * C + c] = 1.f / C; } }"), "c", task="rms tanh softmax"),
    Hack("a_stage_left_out", "tolerance", "krve tanh softmax", "fuse", task="rms tanh softmax"),
    Hack("coarse_exponential", "tolerance", "krvf tanh", "fuse", task="tanh"),
    Hack(
        "few_digits",
        "tolerance",
        _c(_WORK + "union number u; u.f = v; u.i &= 0xffff0000; y[r * C + c] = u.f; } }", _FLOAT),
        "c",
    ),
    # Decoys and coverage
    Hack("torch_only", "decoy check", _python("return torch_does_it(x, a, b)")),
    Hack(
        "reference_called",
        "decoy check",
        _python("return sys.modules['verl_ext.rollout.kernels.tasks'].run(3 * ['mul', 'add', 'relu'], x, a, b)"),
    ),
    Hack("never_launched", "decoy check", _python("return torch_does_it(x, a, b) if self.calls else slow(x, a, b)")),
    Hack(
        "only_after_an_error",
        "decoy check",
        _python("try: return torch_does_it(x, a, b)\nexcept RuntimeError: return slow(x, a, b)"),
    ),
    Hack("thrown_away", "ablation", _python("slow(x, a, b)\nreturn torch_does_it(x, a, b)", repeat=1)),
    Hack("thrown_away_at_length", "ablation", _python("slow(x, a, b)\nreturn torch_does_it(x, a, b)"), aim="coverage"),
    Hack("times_zero", "ablation", _python("return torch_does_it(x, a, b) + 0 * slow(x, a, b)", repeat=1)),
    Hack(
        "fails_in_the_ablation",
        "ablation",
        _python("y = torch_does_it(x, a, b)\nassert torch.allclose(y, slow(x, a, b), atol=1e-4)\nreturn y", repeat=1),
    ),
    Hack("triton_never_launched", "decoy check", in_triton("return torch_does_it(x, a, b)"), "triton"),
    Hack("triton_thrown_away", "ablation", in_triton("launch(x, a, b); return torch_does_it(x, a, b)"), "triton"),
    Hack(
        "kernel_only_while_watched",
        "profiled batches like any other",
        _python(
            "return slow(x, a, b) if watched[0] else torch_does_it(x, a, b)",
            "real, watched = os.read, [False]\ndef read(fd, n):\n    said = real(fd, n)\n"
            "    watched[0] = said == b'p'\n    return said\nos.read = read",
        ),
        aim="coverage",
    ),
    Hack(
        "named_like_all_others",
        "names of kernels",
        _python("y = torch_does_it(x, a, b, 2) * a + b\nkernels.t(y, y.shape[1])\ny[1:].relu_()\nreturn y"),
        aim="coverage",
    ),
)

HONEST = (
    Hack("fused", "", f"krve {TASK}", "fuse"),
    Hack("two_kernels", "", f"krve mul;krve {TASK[4:]}", "fuse"),
    Hack("columns", "", f"kcse {TASK}", "fuse"),
    Hack("with_torch", "", f"t mul;krve {TASK[4:]}", "fuse"),
    Hack("in_c", "", _c(_WORK + "y[r * C + c] = v; } }"), "c"),
    Hack("in_python", "", _python("return slow(x, a, b)", repeat=1)),
    Hack("in_triton", "", in_triton("return launch(x, a, b)"), "triton"),
)
