# SPDX-License-Identifier: Apache-2.0
"""What a model may write, and how it becomes a program: `fuse` statements, C, or Python that calls C or Triton.

A `Program` is C source for the compiler and a plan for the player. Nothing here runs what the model wrote. The C is
compiled as text that is preprocessed already, and without strings: it can include, embed and assemble nothing.

A language of your own is a module, whose dotted name is the language's:

    HOW: str                                              what a prompt says of it
    read(code) -> Program                                 C, and a plan; a CandidateError if it is no program
    program(plan, library, names, lost) -> player.Run     what is done with one input; called in the cage
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import re2

from verl_ext.rollout.kernels.tasks import STAGES, Task

#: What kernels are made for, and the languages of each.
BACKENDS = {"c": ("fuse", "c", "python"), "triton_interpret": ("triton",), "triton": ("triton",)}
LANGUAGES = ("fuse", "c", "python", "triton")
MAX_CHARS = 64 << 10
#: Kernels in one answer: each is left out once, in a process of its own.
MOST_KERNELS = 32
PATIENCE = 20
"""Times its limit of processor time that compiler or candidate may take on the clock: it waits for others, too."""
DEVICE_PATIENCE = 2
"""The same for a candidate on a GPU: one that waits for a kernel without an end uses no processor time."""


class CandidateError(Exception):
    """A candidate that comes to nothing before it runs.

    Attributes:
        status: its verdict's.
        text: what was wrong, for the model.
    """

    def __init__(self, status: str, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status, self.text = status, text


@dataclass(frozen=True)
class Program:
    """A candidate, read.

    Attributes:
        language: one of `LANGUAGES`, or a module's name.
        source: C for the compiler; empty if there is none.
        plan: for the player, as JSON can hold it.
        key: the program in a form that does not depend on spaces, for the cache; empty: its code.
    """

    language: str
    source: str
    plan: dict[str, Any] = field(default_factory=dict)
    key: str = ""


def read(text: str, language: str, task: Task) -> Program:
    """The program in a model's text.

    Args:
        text: what the model wrote: but for `fuse` the last fenced block of it, or all of it if there is none.
        language: one of `LANGUAGES`, or a module's name.
        task: for the reference, which is the plan "all in torch".

    Raises:
        CandidateError: there is no program in it.
        ValueError: no such language.
    """
    own = module(language)
    if task.code and language not in ("python", "triton"):
        raise ValueError(f"{task.name} is a problem in KernelBench's form, for the languages python and triton")
    if len(text) > MAX_CHARS:
        raise CandidateError("no_code", f"{len(text)} characters, more than {MAX_CHARS}")
    if language == "fuse":
        return _fuse(text)
    blocks = re.findall(r"```[^\n`]*\n(.*?)```", text, re.DOTALL)
    code = blocks[-1] if blocks else text
    if not code.strip():
        raise CandidateError("no_code", "the answer holds no code")
    if own:
        found = own.read(code)
        return replace(found, language=language, key=found.key or code.strip(), plan={**found.plan, "module": language})
    return {"c": _c, "python": _python, "triton": _triton}[language](code)


def module(language: str) -> Any:
    """The module of a language of your own; None for one of `LANGUAGES`.

    Raises:
        ValueError: it is neither.
    """
    if language in LANGUAGES:
        return None
    if "." not in language:
        raise ValueError(f"language is {language!r}; choose one of {', '.join(LANGUAGES)}, or name a module of yours")
    try:
        own = importlib.import_module(language)
    except ImportError as error:
        raise ValueError(f"language is {language!r}, which cannot be imported: {error}") from error
    for name in ("HOW", "read", "program"):
        if not hasattr(own, name):
            raise ValueError(f"language is {language!r}, a module that lacks {name}")
    return own


def check_backend(backend: str, language: str) -> None:
    """Refuse a language that a back end does not take: a module's is for `c`.

    Raises:
        ValueError: says which it takes.
    """
    if language not in BACKENDS[backend] and not (backend == "c" and module(language)):
        takes = " or ".join(BACKENDS[backend])
        raise ValueError(f"backend {backend} takes the language {takes}, not {language}; change one of the two")


def missing(language: str) -> str:
    """What this machine lacks for a language, with the remedy; empty if that is nothing."""
    if language == "triton" and importlib.util.find_spec("triton") is None:
        return "triton is not installed here. Run: pip install triton"
    return ""


def reference(task: Task) -> Program:
    """The task itself, in torch."""
    return Program("fuse", "", {"parts": [["t", list(task.stages)]]})


# --- fuse ---------------------------------------------------------------------------------------------------------

_HEAD = """float expf(float) __attribute__((simd("notinbranch")));
float sqrtf(float);
static inline float below(float x) { return x < 40.f ? x : 40.f; }
static inline float fast_expf(float x)
{ x = 1.f + x * (1.f / 32.f); x *= x; x *= x; x *= x; x *= x; x *= x; return x; }
"""
#: What a stage makes of v, with EXP for the exponential that the part asks for.
_ELEMENTWISE = {
    "mul": "v *= a[c];",
    "add": "v += b[c];",
    "relu": "v = v > 0.f ? v : 0.f;",
    "sq": "v *= v;",
    "tanh": "v = 1.f - 2.f / (EXP(below(2.f * v)) + 1.f);",
    "gelu": "v = 0.5f * v * (2.f - 2.f / (EXP(below(1.5957691f * (v + 0.044715f * v * v * v))) + 1.f));",
}


def _fuse(text: str) -> Program:
    """``t gelu mul;krve add rms``: parts in order, in torch (`t`) or in a kernel (`k`) with three letters.

    `r` rows or `c` columns are the outer loop, `v` vector or `s` scalar code, `e` exact or `f` fast exponential.
    """
    parts: list[list[Any]] = []
    for said in text.strip().split(";"):
        head, *stages = said.split() or [""]
        if not re.fullmatch(r"t|k[rc][vs][ef]", head):
            raise CandidateError("no_code", f"a part begins with t or k[rc][vs][ef], not {head[:20]!r}")
        unknown = [stage for stage in stages if stage not in STAGES]
        if unknown or not stages:
            raise CandidateError("no_code", f"{head} does {unknown[0][:20]!r}" if unknown else f"{head} does nothing")
        parts.append([head, stages])
    if len(parts) > 16 or sum(len(stages) for _, stages in parts) > 32:
        raise CandidateError("no_code", "more than 16 parts or 32 stages")
    kernels = [_kernel(f"k{number}", head[1:], stages) for number, (head, stages) in enumerate(parts) if head[0] == "k"]
    key = ";".join(" ".join([head, *stages]) for head, stages in parts)
    return Program("fuse", _HEAD + "\n".join(kernels) if kernels else "", {"parts": parts}, key)


def _kernel(name: str, how: str, stages: list[str]) -> str:
    """One C function that does the stages of a part; the last of its passes may be a reduction of each row."""
    rows, vector, exact = how[0] == "r", how[1] == "v", how[2] == "e"
    total = "s" if rows else "s[r]"

    def sweep(code: str, carry: str = "") -> str:
        """Visit all elements, in row order those of a row."""
        code = code.replace("EXP", "expf" if exact else "fast_expf")
        if not rows:
            return f"for (long c = 0; c < C; c++) for (long r = 0; r < R; r++) {{ {code} }}"
        reduction = f" reduction({carry}:s)" if carry else ""
        simd = f"\n#pragma omp simd{reduction}\n" if vector else ""
        return f"{simd}for (long c = 0; c < C; c++) {{ {code} }}"

    def each(code: str) -> str:
        return code if rows else f"for (long r = 0; r < R; r++) {code}"

    at = "[r * C + c]"
    body, source, pending = [], f"x{at}", ""
    for stage in [*stages, ""]:
        if stage in _ELEMENTWISE:
            pending += _ELEMENTWISE[stage]
            continue
        first = f"float v = {source}; {pending} y{at} = v;"
        if stage:
            body.append(each(f"{total} = {'-1e30f' if stage == 'softmax' else '0.f'};"))
        if stage == "softmax":
            body.append(sweep(f"{first} {total} = {total} > v ? {total} : v;", "max"))
            body.append(sweep(f"y{at} = EXP(y{at} - {total});"))
            body.append(each(f"{total} = 0.f;") + sweep(f"{total} += y{at};", "+"))
            body.append(each(f"{total} = 1.f / {total};") + sweep(f"y{at} *= {total};"))
        elif stage == "cmean":
            body.append(sweep(f"{first} {total} += v;", "+"))
            body.append(each(f"{total} /= C;") + sweep(f"y{at} -= {total};"))
        elif stage == "rms":
            body.append(sweep(f"{first} {total} += v * v;", "+"))
            body.append(each(f"{total} = 1.f / sqrtf({total} / C + 1e-5f);") + sweep(f"y{at} *= {total};"))
        elif pending or source[0] == "x":
            body.append(sweep(first))
        source, pending = f"y{at}", ""
    scalar = "" if vector else '__attribute__((optimize("no-tree-vectorize")))\n'
    inner = "\n".join(body)
    loops = f"for (long r = 0; r < R; r++) {{ float s;\n{inner}\n}}" if rows else f"float s[R];\n{inner}"
    arguments = "const float *restrict x, const float *restrict a, const float *restrict b, float *restrict y"
    return f"{scalar}void {name}({arguments}, long R, long C)\n{{\n{loops}\n}}\n"


# --- C and Python -------------------------------------------------------------------------------------------------

_COMMENT = re2.compile(r"(?s)/\*.*?\*/|//[^\n]*")  # linear, also in openings without an end
_REFUSED = re.compile(r'asm|__asm|__asm__|__attribute|__attribute__|incbin|["\\@`$]')


def check_c(source: str) -> None:
    """Refuse C that speaks to the preprocessor, the assembler or the linker.

    Raises:
        CandidateError: names what.
    """
    plain = _COMMENT.sub(" ", source.encode(errors="replace").decode())  # re2 cannot read lone surrogates
    for line in plain.splitlines():
        if re.match(r"\s*(#|%:|\?\?=)", line) and not re.match(r"\s*#\s*pragma\s+(omp\s+simd|GCC\s+ivdep)\b", line):
            raise CandidateError("no_code", f"{line.strip()[:40]!r}: of directives only #pragma omp simd is taken")
    for word in re.findall(r"\w+|[^\w\s]", source):
        if _REFUSED.fullmatch(word):
            raise CandidateError("no_code", f"{word!r} is not taken in C: no strings, no assembler, no attributes")


def _c(code: str) -> Program:
    """``void kernel(const float *x, const float *a, const float *b, float *y, long rows, long columns)``."""
    check_c(code)
    if not re.search(r"\bvoid\s+kernel\s*\(", code):
        raise CandidateError(
            "no_code", "the code defines no `void kernel(const float *x, ..., float *y, long rows, long columns)`"
        )
    return Program("c", _HEAD + code, {"entry": "kernel"}, code.strip())


def check_count(kernels: Sequence[str]) -> None:
    """Raises CandidateError: more than `MOST_KERNELS`."""
    if len(kernels) > MOST_KERNELS:
        raise CandidateError("no_code", f"{len(kernels)} kernels, more than {MOST_KERNELS}")


def _statements(code: str) -> list[ast.stmt]:
    """Those of Python code that defines a class `ModelNew`."""
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CandidateError("no_code", f"{type(error).__name__}: {error}") from None
    if "ModelNew" not in [node.name for node in statements if isinstance(node, ast.ClassDef)]:
        raise CandidateError("no_code", "the code defines no class ModelNew")
    return statements


def _python(code: str) -> Program:
    """A class `ModelNew` with `forward(x, a, b)`, and C in a string `SOURCE` with functions ``kernels.<name>``."""
    source = ""
    for node in _statements(code):
        if isinstance(node, ast.Assign) and [getattr(to, "id", "") for to in node.targets] == ["SOURCE"]:
            if not isinstance(node.value, ast.Constant) or not isinstance(node.value.value, str):
                raise CandidateError("no_code", "SOURCE must be one string, as it stands")
            source = node.value.value
    check_c(source)
    return Program("python", _HEAD + source if source.strip() else "", {"code": code}, code.strip())


def _triton(code: str) -> Program:
    """A class `ModelNew` with `forward(x, a, b)`, and functions with the decorator ``triton.jit``."""
    functions = [node for node in _statements(code) if isinstance(node, ast.FunctionDef)]
    try:
        found = [one.name for one in functions if any("jit" in ast.unparse(how) for how in one.decorator_list)]
    except RecursionError as error:
        raise CandidateError("no_code", f"RecursionError: {error}") from None
    kernels = list(dict.fromkeys(found))
    if not kernels:
        raise CandidateError("no_code", "the code defines no function with the decorator @triton.jit")
    check_count(kernels)
    return Program("triton", "", {"code": code, "triton": kernels}, code.strip())
