# SPDX-License-Identifier: Apache-2.0
"""Rollouts: trajectories that advance on their own against a barrier after every turn, on a real rollout server.

Both schedules make the same calls: seeded numbers of turns and seeded response lengths, a prompt that grows by the
response and an observation each turn, and verl's own client, load balancer and server between caller and engine. In
lock step all trajectories wait until the last one has its answer; on their own, each goes on at once, as the agent
loops of verl and of verl_ext do. The runs alternate, after one of each that is not counted; the figure is the median of
the ratios of their wall-clock times.

What bounds the gain is what the engine's time goes into, which is measured too: a part for each call (remote calls,
prefill), and for each decoding step ``fixed + per_row * rows``. Were it all fixed, the wall time would go as the number
of steps; calls and tokens are the same for both schedules, so in what they cost nothing can be gained.

With many trajectories, or ``--engine stub``, another thing is measured: `verl_ext.lab.bench._many_rollouts`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl_ext.lab.bench import _many_rollouts
from verl_ext.lab.bench._shared import Parser

ENGINES = ("embedded", "vllm", "stub")
MANY = 1000
GOAL = 2 / 3
OBSERVATION_TOKENS, PROMPT_TOKENS = 8, 32
MAX_TURNS, LONGEST = 6, 192
COST_TOKENS = (16, 80)
"""Lengths of the responses whose difference in time is the cost of decoding."""


class Cost(NamedTuple):
    """Seconds of a decoding step, ``fixed + per_row * rows``, and of a call, where many are made at once."""

    fixed: float
    per_row: float
    call: float = 0.0


def plan(trajectories: int, seed: int) -> list[tuple[int, ...]]:
    """Trajectories of 1 to `MAX_TURNS` turns; response lengths with the long tail that they have in training.

    Args:
        trajectories: how many.
        seed: of the draw.
    """
    chance = random.Random(seed)
    return [
        tuple(min(LONGEST, max(4, round(chance.lognormvariate(3.3, 0.9)))) for _ in range(chance.randint(1, MAX_TURNS)))
        for _ in range(trajectories)
    ]


def steps(calls: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Decoding steps of the two schedules, on their own and in lock step, if all rows decode together."""
    return max(map(sum, calls)), sum(max(turn) for turn in itertools.zip_longest(*calls, fillvalue=0))


def fit(points: Sequence[tuple[int, float]]) -> Cost:
    """Least squares of the seconds of a step over its rows; neither part is negative."""
    rows, seconds = zip(*points, strict=True)
    slope = max(0.0, statistics.linear_regression(rows, seconds).slope)
    return Cost(fixed=max(0.0, statistics.fmean(seconds) - slope * statistics.fmean(rows)), per_row=slope)


def expected_ratio(calls: Sequence[tuple[int, ...]], cost: Cost) -> float:
    """Ratio of the wall times if calls and decoding steps were all that takes time."""
    same = cost.per_row * sum(map(sum, calls)) + cost.call * sum(map(len, calls))
    alone, lock_step = (cost.fixed * count + same for count in steps(calls))
    return alone / lock_step


# ---- the engine ----------------------------------------------------------------------------------------------------


def make_model(folder: Path, vocabulary: int = 256) -> Path:
    """An untrained Llama of the demo's size: 2 layers, width 64."""
    import torch

    from verl_ext.lab.demo import model

    codec = model.Codec(
        model.train_tokenizer([f"What is {i} times {i + 7}?" for i in range(200)], vocab_size=vocabulary)
    )
    torch.manual_seed(0)
    made = model.make_model(codec, hidden_size=64, layers=2, heads=2, init_std=0.02, max_tokens=2048)
    made.save_pretrained(folder)
    codec.tokenizer.save_pretrained(folder)
    return folder


def configure(engine: str, model: Path, rows: int) -> Any:
    """verl's configuration for one server of the engine on this machine's CPU, checked and completed as in a run."""
    import verl  # noqa: F401  (loads the plugin, as in a run)
    from omegaconf import OmegaConf

    from verl_ext import recipes
    from verl_ext.integration import launch

    rollout = "actor_rollout_ref.rollout"
    composed = recipes.compose(
        ["grpo", "cpu"],
        [
            f"actor_rollout_ref.model.path={model}",
            f"{rollout}.name={engine}",
            f"{rollout}.nnodes=1",
            f"{rollout}.n_gpus_per_node=1",
            f"{rollout}.load_format=auto",
            f"{rollout}.prompt_length={PROMPT_TOKENS + MAX_TURNS * (LONGEST + OBSERVATION_TOKENS)}",
            f"{rollout}.response_length={LONGEST}",
            f"{rollout}.max_num_seqs={rows}",
            f"data.train_files={model}",
            f"data.val_files={model}",
        ],
    )
    del composed["hydra"]
    config = OmegaConf.create(composed)
    launch.prepare(config)
    return config


def start_ray(config: Any) -> None:
    """Start Ray as verl does."""
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    settings = OmegaConf.merge({"runtime_env": get_ppo_ray_runtime_env(config)}, config.ray_kwargs.ray_init)
    ray.init(**OmegaConf.to_container(settings), log_to_driver=False)


def start(config: Any) -> Any:
    """Start Ray and the rollout server as verl does; returns verl's `LLMServerManager`."""
    from verl.workers.rollout.llm_server import LLMServerManager

    start_ray(config)
    return LLMServerManager.create(config=config)


class Caller:
    """Makes the calls of trajectories; contents differ from run to run, so that no cache of prompts helps the second.

    Args:
        client: verl's client of the rollout servers.
        vocabulary: token ids of prompts and observations are below it.
    """

    def __init__(self, client: Any, vocabulary: int) -> None:
        self.client, self.vocabulary = client, vocabulary
        self.runs = 0

    async def answer(self, prompt: list[int], length: int, name: str) -> list[int]:
        """A response of exactly `length` tokens.

        Raises:
            RuntimeError: the server gave another number of tokens.
        """
        params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": length, "ignore_eos": True}
        output = await self.client.generate(request_id=name, prompt_ids=prompt, sampling_params=params)
        if len(output.token_ids) != length:
            raise RuntimeError(f"asked for {length} tokens, the rollout server gave {len(output.token_ids)}")
        return list(output.token_ids)

    def _words(self, chance: random.Random, count: int) -> list[int]:
        return [chance.randrange(self.vocabulary) for _ in range(count)]

    async def run(self, calls: Sequence[tuple[int, ...]], lock_step: bool) -> float:
        """Seconds of all trajectories."""
        self.runs += 1
        chances = [random.Random(f"{self.runs}/{number}") for number in range(len(calls))]
        prompts = [self._words(chance, PROMPT_TOKENS) for chance in chances]

        async def one(number: int, turn: int) -> None:
            response = await self.answer(prompts[number], calls[number][turn], f"{self.runs}-{number}")
            prompts[number] = prompts[number] + response + self._words(chances[number], OBSERVATION_TOKENS)

        async def alone(number: int) -> None:
            for turn in range(len(calls[number])):
                await one(number, turn)

        begin = time.perf_counter()
        if lock_step:
            for turn in range(MAX_TURNS):
                live = [number for number, call in enumerate(calls) if turn < len(call)]
                await asyncio.gather(*(one(number, turn) for number in live))
        else:
            await asyncio.gather(*(alone(number) for number in range(len(calls))))
        return time.perf_counter() - begin

    async def cost(self, most: int, repeats: int) -> Cost:
        """What steps and calls cost, from batches of equal responses of two lengths."""
        sizes = sorted({max(1, most // 8), max(1, most // 4), max(1, most // 2), most})
        best = {(rows, length): float("inf") for rows in sizes for length in COST_TOKENS}
        for _ in range(repeats):
            for rows, length in best:
                seconds = await self.run([(length,)] * rows, lock_step=True)
                best[rows, length] = min(best[rows, length], seconds)
        short, long = COST_TOKENS
        step = {rows: max(0.0, best[rows, long] - best[rows, short]) / (long - short) for rows in sizes}
        cost = fit(list(step.items())) if len(sizes) > 1 else Cost(step[most], 0.0)
        return cost._replace(call=max(0.0, best[most, short] - short * step[most]) / most)


async def measure(caller: Caller, calls: Sequence[tuple[int, ...]], pairs: int) -> dict[str, Any]:
    """Both schedules, alternating, after one of each that is not counted; and the cost of a step."""
    for lock_step in (False, True):
        await caller.run(calls, lock_step)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(pairs):
        for lock_step in (False, True) if pair % 2 == 0 else (True, False):
            seconds[lock_step].append(await caller.run(calls, lock_step))
    cost = await caller.cost(len(calls), repeats=min(pairs, 3))
    tokens = sum(map(sum, calls))
    alone, together = steps(calls)
    return {
        "wall_vs_lock_step": statistics.median(a / b for a, b in zip(seconds[False], seconds[True], strict=True)),
        "goal": round(GOAL, 3),
        "seconds": statistics.median(seconds[False]),
        "lock_step_seconds": statistics.median(seconds[True]),
        "trajectories": len(calls),
        "calls": sum(map(len, calls)),
        "tokens": tokens,
        "steps_vs_lock_step": alone / together,
        "rows_per_step": tokens / alone,
        "lock_step_rows_per_step": tokens / together,
        "step_fixed_ms": 1e3 * cost.fixed,
        "step_per_row_ms": 1e3 * cost.per_row,
        "call_ms": 1e3 * cost.call,
        "expected_from_costs": expected_ratio(calls, cost),
        "pairs": pairs,
    }


async def control(replica: Any, rollout: Any, weights: Any, parked: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds, sorted, until the server answers each kind of control while generate calls wait at its closed gate.

    Args:
        replica: verl's, of the embedded engine.
        rollout: its trainer-side end, which sends the weights.
        weights: state dict of the model.
        parked: generate calls that wait; more than the server's places queue in front of it.
        rounds: times that each kind is asked for.
    """
    server = replica.servers[0]
    params = {"temperature": 1.0, "max_tokens": 1}
    taken: dict[str, list[float]] = {}

    async def timed(kind: str, call: Any) -> None:
        begin = time.perf_counter()
        await call
        taken.setdefault(kind, []).append(1e3 * (time.perf_counter() - begin))

    for round_ in range(rounds):
        if round_ % 10 == 0:  # "resume" lets them go
            await server.abort_all_requests.remote()
            calls = [replica.server_handle.generate.remote([1, 2, 3], params, f"{round_}-{i}") for i in range(parked)]
            while (await server.health.remote())["parked"] < min(parked, replica.max_concurrency):
                await asyncio.sleep(0.05)
        await timed("health", server.health.remote())
        await timed("abort one", server.abort_request.remote("nobody"))
        await timed("abort all", server.abort_all_requests.remote())
        await timed("weights", rollout.update_weights(iter(weights.items()), global_steps=round_))
        if round_ % 10 == 9 or round_ == rounds - 1:
            await timed("resume", server.resume_generation.remote())
            await asyncio.gather(*calls)
    return {kind: sorted(times) for kind, times in taken.items()}


def show_control(taken: dict[str, list[float]], parked: int) -> None:
    """Print the table."""
    print(f"milliseconds until control is answered, {parked} generate calls parked\n")
    print(f"{'':10}{'times':>6}{'p50':>8}{'p99':>8}{'max':>8}")
    for kind, times in taken.items():
        at = [times[math.ceil(share * len(times)) - 1] for share in (0.5, 0.99)]
        print(f"{kind:10}{len(times):>6}{at[0]:>8.1f}{at[1]:>8.1f}{times[-1]:>8.1f}")


def show(found: dict[str, Any], engine: str) -> None:
    """Print the table."""
    print(
        f"{found['trajectories']} trajectories, {found['calls']} calls, {found['tokens']} tokens on the {engine} "
        f"engine, median of {found['pairs']} pairs\n"
    )
    print(f"{'':14}{'seconds':>9}{'rows a step':>13}{'tokens/s':>10}")
    for name, prefix in (("on their own", ""), ("in lock step", "lock_step_")):
        seconds, rows = found[f"{prefix}seconds"], found[f"{prefix}rows_per_step"]
        print(f"{name:14}{seconds:>9.2f}{rows:>13.1f}{found['tokens'] / seconds:>10.0f}")
    print(f"\nwall time against lock step: {found['wall_vs_lock_step']:.2f} (goal {GOAL:.2f})")
    print(
        f"a decoding step costs {found['step_fixed_ms']:.2f} ms and {found['step_per_row_ms']:.3f} ms a row, a call "
        f"{found['call_ms']:.2f} ms. From these alone: {found['expected_from_costs']:.2f}\n(were the fixed part all: "
        f"{found['steps_vs_lock_step']:.2f}, the ratio of the numbers of steps; were it nothing: 1.00)"
    )


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; see the module's text."""
    parser = Parser("rollouts", __doc__)
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        help="rollout.name; or stub: what trajectories cost in one agent loop worker, from 100 at once to all of them, "
        f"with a stub in the place of the sampler (default: embedded, and stub from {MANY} trajectories on)",
    )
    parser.add_argument("--model", type=Path, default=None, help="a model's folder (default: a small one made here)")
    parser.number("trajectories", 64, "rollouts of the batch")
    parser.number("pairs", 5, "measured runs of each schedule")
    parser.add_argument("--seed", type=int, default=0, help="of turns and response lengths (default: %(default)s)")
    parser.add_argument("--parked", type=int, default=0, help="how fast control is answered while so many calls wait")
    parser.add_argument("--quick", action="store_true", help="16 trajectories, one pair: to see that it runs")
    args = parser.parsed(argv)
    if args.quick:
        args.trajectories, args.pairs = min(args.trajectories, 16), 1
    args.engine = args.engine or ("stub" if args.trajectories >= MANY and not args.parked else "embedded")
    if args.parked and args.engine != "embedded":
        parser.error("--parked measures the embedded engine only")
    if args.engine == "vllm":
        from importlib.util import find_spec

        if find_spec("vllm") is None:
            print("verl-ext bench rollouts: --engine vllm needs vLLM, which is not installed here", file=sys.stderr)
            return 1
    with tempfile.TemporaryDirectory(prefix="bench_rollouts") as folder:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        found = _measured(args, args.model.resolve() if args.model else make_model(Path(folder) / "model"))
    if args.engine == "stub":
        _many_rollouts.show(found)
    elif args.parked:
        show_control(found, args.parked)
    else:
        show(found, args.engine)
    if args.json:
        print(json.dumps({"engine": args.engine, "quick": args.quick, "seed": args.seed, **found}))
    return 0


def _measured(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    if args.engine == "stub":
        os.environ["VERL_EXT_STRICT"] = "1"  # as in the processes of a run: the plugin attaches all that it has
        return _many_rollouts.main(configure("embedded", model, 8), args.trajectories, start_ray)
    config = configure(args.engine, model, max(args.trajectories, 8))
    import ray
    from transformers import AutoTokenizer

    manager = start(config)
    try:
        if args.parked:
            from transformers import AutoModelForCausalLM

            from verl_ext.cpu.engine.replica import EmbeddedRollout

            (replica,) = manager.rollout_replicas
            rollout = EmbeddedRollout(replica.config, replica.model_config, None, replica_rank=0)
            weights = AutoModelForCausalLM.from_pretrained(str(model)).state_dict()
            return asyncio.run(control(replica, rollout, weights, args.parked, rounds=100))
        vocabulary = len(AutoTokenizer.from_pretrained(str(model)))
        caller = Caller(manager.get_client(), vocabulary)
        return asyncio.run(measure(caller, plan(args.trajectories, args.seed), args.pairs))
    finally:
        ray.shutdown()
