# SPDX-License-Identifier: Apache-2.0
"""Run by test_logits_pass.py in its own process: compiles the kernels for compute capability 9.0, without a GPU."""

from __future__ import annotations

import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from verl_ext.methods.logits import logits_triton

TENSORS = {
    "offsets": "i64", "labels": "i64", "slots": "i64", "temperatures": "fp32", "sums": "fp32", "largest": "fp32",
    "constants": "fp32", "slopes": "fp32", "at_labels": "fp32",
}  # fmt: skip


def ptx(kernel: Any, dtype: str, **constants: Any) -> str:
    """The kernel's machine code as text, for aligned logits of that dtype."""
    known = {"stride": 1, "BLOCK": logits_triton.BLOCK, "ALIGNED": True, "SCALED": False, **constants}
    signature = {}
    for name in kernel.arg_names:
        if name in known:
            signature[name] = "constexpr"
        elif name in ("logits", "gradient"):
            signature[name] = f"*{dtype}"
        elif name in TENSORS:
            signature[name] = f"*{TENSORS[name]}"
        else:
            signature[name] = "fp32" if name == "log_rho" else "i32"
    place = kernel.arg_names.index
    divisible = {(place(n),): [["tt.divisibility", 16]] for n in signature if signature[n][0] == "*"}
    divisible[(place("vocabulary"),)] = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel, signature, constexprs={(place(n),): v for n, v in known.items() if n in signature}, attrs=divisible
    )
    target = GPUTarget("cuda", 90, 32)
    text = triton.compile(source, target=target, options={"num_warps": logits_triton.WARPS}).asm["ptx"]
    assert ".local" not in text, f"{kernel.__name__} keeps something outside the registers"
    return text


def main(dtype: str) -> None:
    everything = {"ENTROPY": True, "SQUARES": True, "STAGES": logits_triton.STAGES}
    loops = []
    for pruned in (False, True):
        text = ptx(logits_triton._forward, dtype, PRUNED=pruned, **everything)
        copies = re.findall(r"cp\.async\.cg\.shared\.global.*?, (0x\w+|\d+)", text)
        assert copies and {int(size, 0) for size in copies} == {16}, f"loads of {set(copies)} bytes"
        loops.append(text.count("cp.async.wait_group"))
    assert 0 < loops[0] < loops[1], loops
    text = ptx(logits_triton._backward, dtype, PRUNED=True, SLOPE=True)
    assert re.search(r"ld\.global\.v4\.b32", text) and re.search(r"st\.global\.v4\.b32", text)
    print("3 kernels")


if __name__ == "__main__":
    main(sys.argv[1])
