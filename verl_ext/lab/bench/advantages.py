# SPDX-License-Identifier: Apache-2.0
"""Estimators and losses: time and memory beside verl's own, on the same tensors in one run.

Every comparison calls ours and verl's in alternating order on the same tensors and takes the median of the ratios of
neighbouring calls. Times are CPU seconds of the process, all its threads, with one torch thread (verl's driver has one
core for advantages), so that the time of other processes does not count; with ``--threads`` above 1 they are wall-clock
seconds. The floor is the time to read each input once and to write outputs of the same size to fresh memory. Peak
memory is the growth of the resident memory of a process of its own over one call. Row counts are prompts x 8 samples.

``fraction_of_step`` is an estimator's time over that of a training step of as many tokens, at the worst shape: one
forward and backward pass of the smallest model that is trained here, a Llama with 2 layers, 64 hidden units and a
vocabulary of 32k, without old and reference log-probabilities, rollouts and optimiser.

Headline figures are the worst over the usual shapes; longer rows and rows with tool tokens are in the table.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from verl_ext.lab.bench._memory import GROUP, METHODS, Batch, make_batch
from verl_ext.lab.bench._shared import Parser, alternate, child, progress, ratio, rounded

HEADLINE = ((256, 512), (1024, 1024), (4096, 512))
LONG = ((256, 4096), (256, 8192))
QUICK_HEADLINE = ((256, 512), (1024, 512))
QUICK_LONG = ((64, 4096),)

#: Estimators, and all rejection rules together, by the beginning of their lines in the table.
ESTIMATORS = ("trloo", "dr_mas", "hgpo", "gigpo", "maxrl", "otb", "rejection")

#: Tokens that one comparison works through, and the bounds of its number of repetitions.
TOKENS = 12_000_000
REPEATS, REPEATS_QUICK = (11, 60), (3, 3)
#: Sizes of the growth measurement, as rows of GROWTH_LENGTH tokens: 1e5 to 1e8 tokens.
GROWTH_ROWS = (96, 976, 9_768, 97_656)
GROWTH_LENGTH = 1024
#: The divergence of `trm`: tokens, and the vocabulary of the model of the step.
EXACT_KL = ("exact_kl", 256, 32_768)
#: Sizes from which on the fixed working memory of a few megabytes is small beside a [B, T] tensor.
LARGE_TOKENS = 9_000_000


class Comparison(NamedTuple):
    """One line of the table; times in seconds."""

    name: str
    shape: tuple[int, int]
    ours: float
    theirs: float | None
    ratio: float | None  #: median of ours / theirs
    floor: float


class Clock:
    """CPU seconds of this process, or wall-clock seconds when torch uses more threads."""

    def __init__(self, threads: int):
        self.now = time.process_time if threads == 1 else time.perf_counter
        self.unit = "CPU time" if threads == 1 else "wall-clock time"

    def __call__(self, function: Callable[[], Any]) -> float:
        start = self.now()
        function()
        return self.now() - start


def compare(
    clock: Clock, ours: Callable[[], Any], theirs: Callable[[], Any] | None, repeats: int
) -> tuple[float, float | None, float | None]:
    """Median times of ours and theirs and the median of their ratios, in alternating order, after a warm-up."""
    times = alternate(clock, [ours] if theirs is None else [ours, theirs], repeats)
    if theirs is None:
        return statistics.median(times[0]), None, None
    return statistics.median(times[0]), statistics.median(times[1]), ratio(*times)


def stream(inputs: Sequence[torch.Tensor], outputs: int) -> None:
    """Read the inputs once and write `outputs` fresh tensors of float32 in the shape of the inputs."""
    written = [torch.empty(inputs[0].shape, dtype=torch.float32) for _ in range(outputs)]
    floats = [tensor for tensor in inputs if tensor.dtype == torch.float32]
    for target, source in zip(written, floats, strict=False):
        target.copy_(source)
    for target in written[len(floats) :]:
        target.zero_()
    for tensor in inputs:
        if not any(tensor is source for source in floats[:outputs]):
            view = tensor.detach().view(torch.float32).view(-1)
            torch.dot(view, view)  # a pass that only reads


def estimators(batch: Batch) -> dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[], None]]]:
    """Ours, verl's and the floor by name."""
    from verl.trainer.ppo import core_algos

    tokens = {"token_level_rewards": batch.rewards, "response_mask": batch.mask, "index": batch.index}
    energies = {"old_log_probs": batch.old_log_probs, "sum_pi_squared": batch.sum_pi_squared}
    rloo = functools.partial(core_algos.get_adv_estimator_fn("rloo_vectorized"), **tokens)
    tir = functools.partial(core_algos.get_adv_estimator_fn("tir_optimal_token_baseline"), **tokens, **energies)
    whole = (batch.rewards, batch.mask, batch.old_log_probs, batch.sum_pi_squared)
    return {
        "otb": (batch.otb, tir, lambda: stream(whole, 2)),
        "otb leave_one_out": (batch.otb_leave_one_out, tir, lambda: stream(whole, 2)),
        "trloo": (batch.trloo, rloo, lambda: stream((batch.mask,), 1)),
        "trloo token rewards": (
            lambda: batch.trloo(column=False),
            rloo,
            lambda: stream((batch.rewards, batch.mask), 1),
        ),
        "dr_mas": (batch.dr_mas, rloo, lambda: stream((batch.rewards, batch.mask), 1)),
        "maxrl": (batch.maxrl, rloo, lambda: stream((batch.rewards, batch.mask), 1)),
    }


def compare_estimators(clock: Clock, shape: tuple[int, int], tools: bool, least: int, most: int) -> list[Comparison]:
    batch = make_batch(*shape, tools=tools)
    lines = []
    for name, (ours, theirs, floor) in estimators(batch).items():
        if tools and not name.startswith("otb"):
            continue  # tool tokens make no difference to a value a row
        tokens = shape[0] * shape[1]
        # verl's estimator takes far longer than the others.
        repeats = TOKENS // tokens // (3 if name.startswith("otb") else 1)
        repeats = max(least, min(most, repeats))
        timed = compare(clock, ours, theirs, repeats)
        lines.append(Comparison(name + (", tool tokens" if tools else ""), shape, *timed, _floor(clock, floor, least)))
    return lines


def _floor(clock: Clock, function: Callable[[], None], repeats: int) -> float:
    return compare(clock, function, None, repeats)[0]


def step_cases(
    prompts: int, trajectories: int, steps: int, length: int
) -> tuple[dict[str, Callable[[], Any]], Callable[[], None]]:
    """HGPO at K=2 and GiGPO on episodes of `steps` steps whose observations repeat within a prompt, and their floor."""
    from verl_ext.methods.gigpo import gigpo_advantage
    from verl_ext.methods.hgpo import hgpo_advantage

    rows = prompts * trajectories * steps
    random = np.random.default_rng(0)
    prompt, trajectory, step = (
        part.reshape(-1) for part in np.meshgrid(*map(np.arange, (prompts, trajectories, steps)), indexing="ij")
    )
    places = random.integers(0, 2 + step // 4)
    observation = [f"You are in room {places[row]} at depth {step[row]}." for row in range(rows)]
    batch = make_batch(rows, length)
    fields = {
        "traj_uid": np.array([f"{prompt[row]:032x}_{trajectory[row]}" for row in range(rows)], dtype=object),
        "turn_index": step,
        "anchor_obs": np.array(observation, dtype=object),
        "turn_reward": np.where(step == steps - 1, random.integers(0, 2, rows), 0).astype(np.float64),
        "is_action_valid": random.random(rows) > 0.1,
    }
    index = np.array([f"{p:032x}" for p in prompt], dtype=object)
    given = (batch.rewards, batch.mask, index)
    calls: dict[str, Callable[[], Any]] = {
        "hgpo, K=2": lambda: hgpo_advantage(*given, **fields, history_length=2),
        "gigpo": lambda: gigpo_advantage(*given, **fields),
    }
    return calls, lambda: stream((batch.mask,), 1)


def rejection_case(rows: int, length: int) -> tuple[Callable[[], Any], Callable[[], None]]:
    """All rejection rules on one batch, with their metrics and without the texts of turns, and their floor."""
    from verl_ext.integration.parts.update.rejection import RULES, positional
    from verl_ext.integration.parts.update.rejection_metrics import rule_metrics
    from verl_ext.methods.rejection import all_of

    batch = make_batch(rows, length)
    noise = 0.01 * torch.randn(rows, length, generator=torch.Generator().manual_seed(1))
    tokens = {"old_log_probs": batch.old_log_probs, "rollout_log_probs": batch.old_log_probs + noise}
    columns = {**tokens, "response_mask": batch.mask}
    fields = {"index": batch.index, "traj_uid": np.array([str(row) for row in range(rows)], dtype=object)}
    own: dict[str, dict[str, Any]] = {
        "ln_trm": {"epsilon": 0.0224, "delta": 0.001, "threshold": 0.05},
        "ser": {"threshold": 0.05},
        "simpletir": {**fields, "void": np.arange(rows) % 7 == 0},
        "variance_filter": {**fields, "rewards": batch.rewards.sum(-1).numpy()},
        "mrs": fields,
        "prs": {
            "correct": batch.rewards.sum(-1).numpy() > 0,
            "coverage": np.full(rows, 0.35),
            "draw": np.arange(rows),
        },
    }

    def call() -> None:
        found = {n: rule(*(columns[c] for c in positional(rule)), **own.get(n, {})) for n, rule in RULES.items()}
        all_of(batch.mask, list(found.values()))
        for name, one in found.items():
            rule_metrics(name, one, batch.mask, batch.rewards, tokens)

    return call, lambda: stream((*tokens.values(), batch.mask), 1)


def step_seconds_a_token(clock: Clock, rows: int = 4, length: int = 512) -> float:
    """Seconds a token of a training step: forward and backward of a small Llama, without anything else of a step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32_768, max_position_embeddings=length, **sizes, **heads))
    tokens = torch.randint(0, 32_768, (rows, length), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()

    return compare(clock, step, None, 3)[0] / tokens.numel()


def kpo_case(rows: int, length: int) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], None]]:
    """The loss `kpo` and verl's `vanilla`, forward and backward under one config, and their floor."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import FSDPActorConfig

    from verl_ext.integration.config import KPOPolicyLossConfig
    from verl_ext.integration.losses import kpo

    batch = make_batch(rows, length)
    generator = torch.Generator().manual_seed(1)
    log_prob = batch.old_log_probs + 0.05 * torch.randn(rows, length, generator=generator)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, length).contiguous()
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=GROUP,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=KPOPolicyLossConfig(loss_mode="kpo", kalman_q=1e-4),
    )
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=int(batch.mask.sum()), global_batch_size=rows, loss_scale_factor=None
    )

    def step(loss: Callable[..., Any]) -> None:
        current = log_prob.detach().requires_grad_()
        value, _ = loss(batch.old_log_probs, current, advantages, batch.mask, "token-mean", config)
        value.backward()

    inputs = (batch.old_log_probs, log_prob, advantages, batch.mask)
    vanilla = core_algos.get_policy_loss_fn("vanilla")
    return lambda: step(kpo), lambda: step(vanilla), lambda: stream(inputs, 1)


def probe(cases: Sequence[tuple[str, int, int]]) -> list[dict[str, Any]]:
    """Peak memory and time of single calls, each in a process of its own.

    Raises:
        RuntimeError: a process failed.
    """
    names = [f"{method}:{rows}x{length}" for method, rows, length in cases]
    return [json.loads(line) for line in child("_memory", *names).splitlines()]


def slope(tokens: Sequence[float], values: Sequence[float]) -> float:
    """Exponent p of values ~ tokens^p, by least squares in logarithms."""
    return float(np.polyfit(np.log(tokens), np.log(values), 1)[0])


HEADER = (
    f"{'':<32}{'shape':>11}{'ours ms':>10}{'verl ms':>10}{'ours/verl':>11}{'speed-up':>10}{'floor ms':>10}"
    f"{'x floor':>9}{'ns/token':>10}"
)


def _line(entry: Comparison) -> str:
    rows, length = entry.shape
    theirs, ratio, speedup = (f"{'-':>{width}}" for width in (10, 11, 10))
    if entry.theirs is not None and entry.ratio is not None:
        theirs, ratio, speedup = f"{entry.theirs * 1e3:>10.2f}", f"{entry.ratio:>11.3f}", f"{1 / entry.ratio:>9.1f}x"
    return (
        f"{entry.name:<32}{f'{rows}x{length}':>11}{entry.ours * 1e3:>10.2f}{theirs}{ratio}{speedup}"
        f"{entry.floor * 1e3:>10.2f}{entry.ours / entry.floor:>9.1f}{entry.ours * 1e9 / (rows * length):>10.2f}"
    )


def compare_calls(clock: Clock, quick: bool) -> list[Comparison]:
    """Measures a call of each method, prints a line for each, and returns them."""
    headline, long = (QUICK_HEADLINE, QUICK_LONG) if quick else (HEADLINE, LONG)
    least, most = REPEATS_QUICK if quick else REPEATS
    lines: list[Comparison] = []

    def show(entries: Sequence[Comparison]) -> None:
        for entry in entries:
            lines.append(entry)
            print(_line(entry), flush=True)

    for shape in (*headline, *long):
        for tools in (False, True):
            progress(f"estimators at {shape[0]}x{shape[1]}{', tool tokens' if tools else ''}")
            show(compare_estimators(clock, shape, tools, least, most))
    # The figures of these two are at one published size each, with --quick too.
    progress("hgpo: 16 prompts x 8 trajectories x 50 steps, 512 tokens, K=2")
    calls, floor = step_cases(16, 8, 50, 512)
    for name, call in calls.items():
        show([Comparison(name, (6400, 512), *compare(clock, call, None, least), _floor(clock, floor, least))])
    progress("all rejection rules together: 1e6 tokens")
    call, floor = rejection_case(1954, 512)
    show([Comparison("rejection", (1954, 512), *compare(clock, call, None, least), _floor(clock, floor, least))])
    progress("losses, forward and backward")
    ours, theirs, floor = kpo_case(256, 4096)
    kpo = compare(clock, ours, theirs, least)
    show([Comparison("kpo against vanilla", (256, 4096), *kpo, _floor(clock, floor, least))])
    return lines


def measure_growth(quick: bool, step_seconds: float) -> dict[str, float]:
    """Time and memory of a call against the number of tokens, printed; the figures that are reported of them.

    Raises:
        RuntimeError: a process that measures has failed.
    """
    rows = GROWTH_ROWS[:-1] if quick else GROWTH_ROWS
    grown = ("otb", "trloo")
    cases = [(method, count, GROWTH_LENGTH) for method in grown for count in rows]
    cases += [
        (method, rows[-1 if quick else -2], GROWTH_LENGTH) for method in METHODS if method not in (*grown, "exact_kl")
    ]
    progress(f"growth and memory, up to {rows[-1] * GROWTH_LENGTH:.0e} tokens")
    probes, (exact,) = probe(cases), probe([EXACT_KL])
    print(
        f"\nOne call in a process of its own. Memory in units of one [B, T] float32 tensor, "
        f"beyond the outputs: a fixed part of a few MB and what grows\n"
        f"{'':<24}{'tokens':>11}{'seconds':>10}{'ns/token':>10}{'peak MB':>10}{'outputs':>9}{'extra':>9}"
    )
    for (method, _, _), found in zip(cases, probes, strict=True):
        print(
            f"{method:<24}{found['tokens']:>11}{found['seconds']:>10.4f}"
            f"{found['seconds'] * 1e9 / found['tokens']:>10.2f}{found['bytes'] / 2**20:>10.1f}"
            f"{METHODS[method][1]:>9}{found['extra']:>9.2f}"
        )
    of_exact = exact["seconds"] / EXACT_KL[1] / step_seconds
    print(f"trm, divergence=exact: {of_exact:.2f} of a step, {exact['bytes'] / 2**20:.0f} MB beside the logits")
    exponents = {}
    for method in grown:
        of_method = [found for case, found in zip(cases, probes, strict=True) if case[0] == method]
        tokens = [found["tokens"] for found in of_method]
        exponents[method] = {kind: slope(tokens, [found[kind] for found in of_method]) for kind in ("seconds", "bytes")}
        print(
            f"{method}: time ~ tokens^{exponents[method]['seconds']:.2f}, "
            f"memory ~ tokens^{exponents[method]['bytes']:.2f}"
        )
    return {
        "exact_kl_fraction_of_step": of_exact,
        "exact_kl_bytes": float(exact["bytes"]),
        "growth_exponent": max(found["seconds"] for found in exponents.values()),
        "memory_exponent": max(found["bytes"] for found in exponents.values()),
        "max_extra_bt_tensors": max(found["extra"] for found in probes if found["tokens"] >= LARGE_TOKENS),
    }


def headline_figures(lines: Sequence[Comparison], quick: bool) -> dict[str, float]:
    """Ratios to verl's functions at the worst of the shapes."""
    headline, long = (QUICK_HEADLINE, QUICK_LONG) if quick else (HEADLINE, LONG)

    def ratios(name: str, shapes: Sequence[tuple[int, int]]) -> list[float]:
        return [line.ratio for line in lines if line.name == name and line.shape in shapes and line.ratio is not None]

    return {
        "otb_speedup_vs_verl": 1 / max(ratios("otb", headline)),
        "otb_speedup_vs_verl_long_rows": 1 / max(ratios("otb", long)),
        "otb_speedup_vs_verl_tool_tokens": 1 / max(ratios("otb, tool tokens", headline)),
        "otb_leave_one_out_speedup_vs_verl": 1 / max(ratios("otb leave_one_out", headline)),
        "trloo_vs_rloo_vectorized": max(ratios("trloo", headline)),
        "trloo_token_rewards_vs_rloo_vectorized": max(ratios("trloo token rewards", headline)),
        "dr_mas_vs_rloo_vectorized": max(ratios("dr_mas", headline)),
        "trloo_vs_rloo_vectorized_long_rows": max(ratios("trloo", long)),
        "dr_mas_vs_rloo_vectorized_long_rows": max(ratios("dr_mas", long)),
        "hgpo_6400x512_seconds": next(line.ours for line in lines if line.name == "hgpo, K=2"),
        "kpo_vs_vanilla": max(ratios("kpo against vanilla", [(256, 4096)])),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables and, with ``--json``, one JSON object on the last line. Returns the exit code."""
    parser = Parser("advantages", __doc__, whole=True)
    parser.add_argument(
        "--quick", action="store_true", help="smaller shapes, fewer calls, growth to 1e7 tokens; for a check"
    )
    parser.number("threads", 1, "torch threads")
    args = parser.parsed(argv)
    torch.set_num_threads(args.threads)
    clock = Clock(args.threads)

    print(f"torch {torch.__version__}, threads: {args.threads}, {clock.unit}, groups of {GROUP} rows\n{HEADER}")
    lines = compare_calls(clock, args.quick)
    progress("a training step")
    of_step = step_seconds_a_token(clock)
    fractions = {
        name: max(line.ours / math.prod(line.shape) for line in lines if line.name.startswith(name)) / of_step
        for name in ESTIMATORS
    }
    print(f"\nA training step takes {of_step * 1e6:.1f} us a token. Fractions of it, at the worst shape:")
    print(", ".join(f"{name} {fraction:.5f}" for name, fraction in fractions.items()))

    try:
        grown = measure_growth(args.quick, of_step)
    except RuntimeError as error:
        print(f"verl-ext bench advantages: {error}", file=sys.stderr)
        return 1
    figures = headline_figures(lines, args.quick) | grown
    worst = {key: value for key, value in figures.items() if not math.isfinite(value)}
    if worst:
        print(f"verl-ext bench advantages: not finite: {worst}", file=sys.stderr)
        return 1
    if args.json:
        found_all = {**figures, "fraction_of_step": fractions, "threads": args.threads, "quick": args.quick}
        print(json.dumps(rounded(found_all)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
