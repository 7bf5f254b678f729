# SPDX-License-Identifier: Apache-2.0
"""C into a library that lies in memory alone: gcc, with limits, on text that can include nothing (`languages`)."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from verl_ext.rollout.kernels.languages import PATIENCE, CandidateError, check_count

FLAGS = (
    "-x cpp-output -O2 -ftree-vectorize -fvect-cost-model=dynamic -march=native -mprefer-vector-width=256 -ffast-math "
    "-fopenmp-simd -fmax-errors=5 -shared -fPIC -w"
).split()
#: What a kernel may call: mathematics and memory.
ALLOWED = re.compile(
    r"(_ZGV\w+|mem(cpy|set|move|cmp)|\w*(exp|log|sqrt|pow|sin|cos|tanh|tan|erf|abs|floor|ceil|fmod)\w*)"
)
_WEAK = ("__cxa_finalize", "__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable")


@dataclass(frozen=True)
class Library:
    """A compiled library.

    Attributes:
        descriptor: of the sealed memory that holds it; to be closed.
        kernels: names of its functions that can be called from outside.
        functions: where its code begins, function by function, in ascending order: (offset in the file, name).
    """

    descriptor: int
    kernels: tuple[str, ...]
    functions: tuple[tuple[int, str], ...]

    def close(self) -> None:
        """Let go of the memory."""
        os.close(self.descriptor)


def version() -> str:
    """The compiler's first line about itself; empty if there is none."""
    if shutil.which("gcc") is None or shutil.which("nm") is None:
        return ""
    return subprocess.run(["gcc", "--version"], capture_output=True, text=True).stdout.partition("\n")[0]


#: Seconds of processor time, KiB of memory, blocks of a file and of a core; then the compiler in the shell's place. One
#: limit a command: dash, which is Debian's sh, takes no more.
_LIMITED = 'ulimit -t "$0" && ulimit -v 2097152 && ulimit -f 32768 && ulimit -c 0 && exec gcc "$@"'


def build(source: str, compile_s: int, name: str) -> Library:
    """Compile.

    Args:
        source: C that `languages.check_c` took or that was made here.
        compile_s: seconds of processor time, and `PATIENCE` times as many on the clock.
        name: of the memory, by which the library is known in a process's map.

    Raises:
        CandidateError: status ``compile_error`` or ``compile_timeout``.
    """
    with tempfile.TemporaryDirectory(prefix="verl_ext_kernels_") as folder:
        text, made = Path(folder, "kernel.i"), Path(folder, "kernel.so")
        text.write_text(source, encoding="utf-8", errors="replace")  # a lone surrogate is the compiler's to refuse
        command = ["/bin/sh", "-c", _LIMITED, str(compile_s), *FLAGS, "-o", made.name, text.name, "-lmvec", "-lm"]
        environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C", "TMPDIR": folder}
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PATIENCE * compile_s,
            )
        except subprocess.TimeoutExpired:
            raise CandidateError("compile_timeout", f"not compiled in {PATIENCE * compile_s} s") from None
        message = done.stderr[:4000].decode(errors="replace").replace(folder, "")
        if done.returncode or not made.exists():
            slow = "killed" in message.lower() or "cpu time limit" in message.lower()
            raise CandidateError(
                "compile_timeout" if slow else "compile_error", message[:2000] or f"gcc: code {done.returncode}"
            )
        symbols = subprocess.run(["nm", made], capture_output=True, text=True, check=True, env=environment).stdout
        content = made.read_bytes()
    kernels, functions = [], []
    for line in symbols.splitlines():
        *address, kind, symbol = line.split()
        symbol = symbol.partition("@")[0]
        if not address and symbol not in _WEAK and not ALLOWED.fullmatch(symbol):
            raise CandidateError("compile_error", f"{symbol}: kernels may call mathematics and memcpy only")
        if address and kind in "tT":
            functions.append((int(address[0], 16), symbol))
        if kind == "T" and not symbol.startswith("_"):
            kernels.append(symbol)
    check_count(kernels)
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, content)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return Library(descriptor, tuple(kernels), tuple(sorted(functions)))
