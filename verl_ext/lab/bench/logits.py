# SPDX-License-Identifier: Apache-2.0
"""One pass over the logits: time beside a plain log-softmax and gather, and memory beyond the gradient.

Ours computes log-probability, entropy, sum of squared probabilities, and mass, size and membership of the safe set at
the published rho; plain is ``torch.log_softmax(logits, -1).gather(-1, labels)``, and "/ same" is against plain torch
that computes the same in float32 (`plain_statistics`). Forward is without gradient, as in the pass for old
log-probabilities; forward and backward is from a gradient of every log-probability. Calls alternate on the
same tensors, and a ratio is the median over neighbouring calls. Times are CPU seconds of the one thread that computes,
so that other load on the machine does not count; with ``--threads`` above 1 wall-clock seconds, on a GPU its own clock.
The logits are larger than 32 MB, as those of a micro-batch are. Plain writes a result of that size, into fresh memory,
whose page faults can be most of its cost, so that the ratio depends on the machine: on the price of a fault, on huge
pages, on the second-level cache that the blocks of ours are cut for and on the width of its vectors. All of these are
printed and in the JSON, with ``warm_plain_share``: the time of plain into memory that it has touched before, as a share
of its usual time.

Extra memory is the growth of the highest resident memory of a process of its own over forward and backward, less the
gradient, as a fraction of the logits; on a GPU that of the allocator's peak. Traffic is the least that has to move
(logits read in forward; read again and the gradient written in backward) as a fraction of what a copy of the logits
moves in the same time.

Headline figures are of float32 logits on CPU and bfloat16 on a GPU, the worse of both vocabularies. Of bfloat16
logits plain is bfloat16 too, which keeps three digits of a log-probability; "/ exact" is against plain with the float32
result that ours has, ``torch.log_softmax(logits, -1, dtype=torch.float32)``.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from verl_ext.lab.bench._memory import fill_to_peak, peak
from verl_ext.lab.bench._shared import Parser, alternate, child, progress, ratio, rounded
from verl_ext.methods.dvp import PUBLISHED_RHO
from verl_ext.methods.logits.logits_pass import TokenStatistics, token_statistics
from verl_ext.methods.logits.logits_torch import BLOCK_ELEMENTS, BLOCK_ELEMENTS_MOST, cache_bytes

VOCABULARIES = (32_768, 152_064)
#: Bytes of the logits that are timed, and of those whose memory is measured.
TIMED, TIMED_QUICK, TIMED_CUDA = 80 << 20, 16 << 20, 2 << 30
MEASURED = 128 << 20
REPEATS, REPEATS_QUICK = 11, 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Figures(NamedTuple):
    """Of one variant at one vocabulary; times are medians in seconds."""

    name: str
    vocabulary: int
    forward: float
    forward_ratio: float
    forward_exact: float  #: ratio to plain with a float32 result
    forward_traffic: float
    both: float
    both_ratio: float
    both_exact: float
    both_traffic: float
    forward_same: float  #: ratio to plain torch that computes the same
    both_same: float


class Clock:
    """Seconds that a call takes, by the clock that suits the device."""

    def __init__(self, device: torch.device, threads: int):
        self.cuda = device.type == "cuda"
        self._now = time.thread_time if threads == 1 else time.perf_counter
        self.unit = "GPU time" if self.cuda else "CPU time" if threads == 1 else "wall-clock time"

    def __call__(self, function: Callable[[], Any]) -> float:
        if self.cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        begin = self._now()
        function()
        return self._now() - begin


def make_logits(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[rows, vocabulary] logits of a confident policy: noise, and one token far above it in each row."""
    logits = torch.empty(rows, vocabulary, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for start in range(0, rows, 64):
        block = logits[start : start + 64].normal_(generator=generator).mul_(2.0)
        block[:, 0] = 12.0
    return logits


def plain_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    rho: float = 0.0,
    entropy: bool = False,
    sum_pi_squared: bool = False,
) -> TokenStatistics:
    """What `token_statistics` returns, in plain torch on whole tensors with autograd."""
    z = logits.float() if temperature == 1.0 else logits.float() / temperature
    mass = size = in_set = spread = squares = None
    inside = torch.ones((), dtype=torch.bool, device=z.device)
    log_pi = torch.log_softmax(z, -1)
    if rho > 0:
        with torch.no_grad():
            inside = z >= z.amax(-1, keepdim=True) + math.log(rho)
            size, in_set = inside.sum(-1), inside.gather(-1, labels[:, None]).squeeze(-1)
            mass = torch.where(inside, log_pi.exp(), 0.0).sum(-1)
        log_pi = torch.log_softmax(z.masked_fill(~inside, -math.inf), -1)
    if entropy or sum_pi_squared:
        pi = log_pi.exp()
        if entropy:
            spread = -(pi * (log_pi.masked_fill(~inside, 0.0) if rho > 0 else log_pi)).sum(-1)
        if sum_pi_squared:
            squares = pi.detach().square().sum(-1)
    return TokenStatistics(log_pi.gather(-1, labels[:, None]).squeeze(-1), spread, squares, mass, size, in_set)


def machine(device: torch.device) -> dict[str, Any]:
    """What the ratio depends on: processor, caches, vector width, page state, block; and the warm share of plain."""
    caches = {f"l{level}_bytes": cache_bytes(index) for level, index in ((1, 0), (2, 2), (3, 3))}
    cpuinfo, pages = Path("/proc/cpuinfo"), Path("/sys/kernel/mm/transparent_hugepage/enabled")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    known = dict([part.strip() for part in line.split(":", 1)] for line in reversed(lines) if ":" in line)
    model = " ".join(
        [known.get("model name", platform.processor())]
        + [f"{word} {known[word]}" for word in ("cpu family", "model", "stepping") if word in known]
    )
    logits = torch.randn(64, 152_064)
    warm = torch.empty_like(logits)
    clock = Clock(torch.device("cpu"), torch.get_num_threads())
    fresh, again = alternate(
        clock,
        [lambda: torch.log_softmax(logits, -1), lambda: torch._log_softmax(logits, -1, False, out=warm)],
        5,
    )
    return {
        "cpu": model,
        **caches,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "huge_pages": pages.read_text().strip() if pages.exists() else "unknown",
        "block_elements": BLOCK_ELEMENTS_MOST if device.type == "cuda" else BLOCK_ELEMENTS,
        "warm_plain_share": statistics.median(again) / statistics.median(fresh),
    }


_EVERYTHING: dict[str, Any] = {"rho": PUBLISHED_RHO, "entropy": True, "sum_pi_squared": True}
#: Name, options of `token_statistics`, and whether the gradient of the entropy is taken; the headline's is the first.
VARIANTS: list[tuple[str, dict[str, Any], bool]] = [
    ("all statistics", _EVERYTHING, False),
    ("all statistics, temperature 0.7", {**_EVERYTHING, "temperature": 0.7}, False),
    ("all, gradient of the entropy", _EVERYTHING, True),
    ("entropy, squares, no pruning", {**_EVERYTHING, "rho": 0.0}, False),
    ("log-probability alone", {}, False),
]


def compare_variants(
    clock: Clock,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
    size: int,
    repeats: int,
    headline_alone: bool = False,
) -> list[Figures]:
    """Variants of ours against plain at one vocabulary, on `size` bytes of logits; the headline's is the first."""
    rows = size // (vocabulary * dtype.itemsize)
    logits = make_logits(rows, vocabulary, dtype, device)
    labels = torch.randint(0, vocabulary, (rows,), device=device, generator=torch.Generator(device).manual_seed(1))
    labels[::2] = 0
    weight = torch.randn(rows, device=device)
    variable = logits.detach().requires_grad_()
    fresh = torch.empty_like(logits)

    def plain(x: torch.Tensor, result: torch.dtype) -> torch.Tensor:
        return torch.log_softmax(x, -1, dtype=result).gather(-1, labels[:, None]).squeeze(-1)

    @torch.no_grad()
    def plain_forward(result: torch.dtype) -> None:
        plain(logits, result)

    def plain_both(result: torch.dtype) -> None:
        variable.grad = None
        plain(variable, result).backward(weight.to(result))

    results = [dtype] if dtype == torch.float32 else [dtype, torch.float32]
    copy = statistics.median(alternate(clock, [lambda: fresh.copy_(logits)], repeats)[0])
    bandwidth = 2 * logits.nbytes / copy
    figures = []
    for name, options, with_entropy in VARIANTS[: 1 if headline_alone else None]:

        def forward(of: Any, options: dict[str, Any] = options) -> TokenStatistics:
            with torch.no_grad():
                return of(logits, labels, **options)

        def both(of: Any, options: dict[str, Any] = options, with_entropy: bool = with_entropy) -> None:
            variable.grad = None
            found = of(variable, labels, **options)
            outputs = [found.log_probs] + ([found.entropy] if with_entropy and found.entropy is not None else [])
            torch.autograd.backward(outputs, [weight] * len(outputs))

        ours, same, *theirs = alternate(
            clock,
            [
                *(partial(forward, of) for of in (token_statistics, plain_statistics)),
                *(partial(plain_forward, result) for result in results),
            ],
            repeats,
        )
        ours_both, same_both, *theirs_both = alternate(
            clock,
            [
                *(partial(both, of) for of in (token_statistics, plain_statistics)),
                *(partial(plain_both, result) for result in results),
            ],
            repeats,
        )
        median, median_both = statistics.median(ours), statistics.median(ours_both)
        figures.append(
            Figures(
                name,
                vocabulary,
                median,
                ratio(ours, theirs[0]),
                ratio(ours, theirs[-1]),
                logits.nbytes / median / bandwidth,
                median_both,
                ratio(ours_both, theirs_both[0]),
                ratio(ours_both, theirs_both[-1]),
                3 * logits.nbytes / median_both / bandwidth,
                ratio(ours, same),
                ratio(ours_both, same_both),
            )
        )
    return figures


def extra_memory(vocabulary: int, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes beyond logits and gradient at the peak of forward and backward, in this process."""
    options: dict[str, Any] = {"rho": PUBLISHED_RHO, "entropy": True, "sum_pi_squared": True}

    def step(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        found = token_statistics(x, torch.arange(rows, device=device), **options)
        torch.autograd.backward([found.log_probs, found.entropy], [torch.ones(rows, device=device)] * 2)
        assert x.grad is not None
        return x.grad

    step(make_logits(2, 64, dtype, device).requires_grad_())  # imports, and tables that are kept
    rows = MEASURED // (vocabulary * dtype.itemsize)
    logits = make_logits(rows, vocabulary, dtype, device).requires_grad_()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
        gradient = step(logits)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - gradient.nbytes
    ballast = fill_to_peak()
    before = peak()
    gradient = step(logits)
    grown = peak() - before - gradient.nbytes
    del ballast
    return grown


def measure_memory(vocabulary: int, dtype: str, device: str, threads: int) -> float:
    """Extra memory of one case, measured in a process of its own, as a fraction of the logits.

    Raises:
        RuntimeError: the process failed.
    """
    case = ["--device", device, "--threads", str(threads), "--measure-memory", f"{vocabulary}:{dtype}"]
    row = vocabulary * DTYPES[dtype].itemsize
    return float(child("logits", *case)) / (MEASURED // row * row)


HEADER = (
    f"{'':<34}{'vocabulary':>11}{'forward ms':>12}{'/ same':>9}{'/ plain':>9}{'/ exact':>9}{'traffic':>9}"
    f"{'fwd+bwd ms':>12}{'/ same':>9}{'/ plain':>9}{'/ exact':>9}{'traffic':>9}"
)


def _line(entry: Figures) -> str:
    return (
        f"{entry.name:<34}{entry.vocabulary:>11}{entry.forward * 1e3:>12.2f}"
        f"{entry.forward_same:>9.3f}{entry.forward_ratio:>9.3f}"
        f"{entry.forward_exact:>9.3f}{entry.forward_traffic:>9.0%}{entry.both * 1e3:>12.2f}"
        f"{entry.both_same:>9.3f}{entry.both_ratio:>9.3f}"
        f"{entry.both_exact:>9.3f}{entry.both_traffic:>9.0%}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables and, with ``--json``, one JSON object on the last line. Returns the exit code."""
    parser = Parser("logits", __doc__, whole=True)
    parser.add_argument("--quick", action="store_true", help="the headline alone, fewer rows and calls; for a check")
    parser.number("threads", 1, "torch threads")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--measure-memory", metavar="V:DTYPE", help=argparse.SUPPRESS)
    args = parser.parsed(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device on this machine; use --device cpu")
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    if args.measure_memory:
        vocabulary, dtype = args.measure_memory.split(":")
        print(extra_memory(int(vocabulary), DTYPES[dtype], device))
        return 0

    clock = Clock(device, args.threads)
    where = torch.cuda.get_device_name() if clock.cuda else f"threads: {args.threads}"
    size = TIMED_CUDA if clock.cuda else TIMED_QUICK if args.quick else TIMED
    repeats = REPEATS_QUICK if args.quick else REPEATS
    # The dtype of the headline comes first.
    dtypes = ("bfloat16", "float32") if clock.cuda else ("float32", "bfloat16")
    print(f"torch {torch.__version__}, {where}, {clock.unit}, rho {PUBLISHED_RHO:.3e}")
    on = machine(device)
    print(
        ", ".join(f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in on.items())
    )
    details: dict[str, dict[str, Any]] = {}
    for dtype in dtypes:
        print(f"\n{dtype} logits, {size >> 20} MB of them\n{HEADER}")
        for vocabulary in VOCABULARIES:
            progress(f"{dtype}, vocabulary {vocabulary}")
            found = compare_variants(clock, vocabulary, DTYPES[dtype], device, size, repeats, args.quick)
            for entry in found:
                print(_line(entry), flush=True)
            try:
                fraction = measure_memory(vocabulary, dtype, args.device, args.threads)
            except RuntimeError as error:
                print(f"verl-ext bench logits: {error}", file=sys.stderr)
                return 1
            print(f"{'extra memory / logits':<34}{vocabulary:>11}{fraction:>12.3f}", flush=True)
            details[f"{dtype}_{vocabulary}"] = {
                "forward_ratio": found[0].forward_ratio,
                "forward_backward_ratio": found[0].both_ratio,
                "forward_same_ratio": found[0].forward_same,
                "forward_backward_same_ratio": found[0].both_same,
                "forward_exact_ratio": found[0].forward_exact,
                "forward_backward_exact_ratio": found[0].both_exact,
                "forward_of_copy_bandwidth": found[0].forward_traffic,
                "forward_backward_of_copy_bandwidth": found[0].both_traffic,
                "extra_memory_fraction": fraction,
                "variants": {
                    entry.name: {
                        "forward_ratio": entry.forward_ratio,
                        "forward_backward_ratio": entry.both_ratio,
                        "forward_same_ratio": entry.forward_same,
                        "forward_backward_same_ratio": entry.both_same,
                    }
                    for entry in found[1:]
                },
            }
    headline = [details[f"{dtypes[0]}_{vocabulary}"] for vocabulary in VOCABULARIES]
    ratios = ("forward_ratio", "forward_backward_ratio", "forward_same_ratio", "forward_backward_same_ratio")
    figures = {
        **{name: max(entry[name] for entry in headline) for name in ratios},
        "extra_memory_fraction": max(entry["extra_memory_fraction"] for entry in details.values()),
        "copy_bandwidth_fraction": min(
            min(entry["forward_of_copy_bandwidth"], entry["forward_backward_of_copy_bandwidth"]) for entry in headline
        ),
    }
    if not all(math.isfinite(value) for value in figures.values()):
        print(f"verl-ext bench logits: not finite: {figures}", file=sys.stderr)
        return 1
    if args.json:
        found_all = {**figures, "dtype": dtypes[0], "device": args.device, "threads": args.threads, "quick": args.quick}
        print(json.dumps(rounded({**found_all, "machine": on, "details": details})))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
