# SPDX-License-Identifier: Apache-2.0
"""Turns: what the old-log-prob pass and the update of a trajectory cost, merged into one sequence or one a call.

Trajectories of T turns have 24 tokens of a prompt, then 8 of the model and 16 of an environment a turn, so that the
context grows with each turn. The same turns are stored in both ways and go through verl's own engine on the CPU, in one
process: the old log-probabilities, then forward, backward and one step of the optimiser, in micro-batches of equal
tokens. There are as many turns for each T, in fewer and longer trajectories. Times are CPU seconds of the process a
trajectory, memory is what the passes add to it at most; the exponent is the slope of log time over log T.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from verl_ext.lab.bench._memory import fill_to_peak, peak
from verl_ext.lab.bench._shared import Parser, child, progress, rounded
from verl_ext.lab.bench.step import ENVIRONMENT, make_engine

PROMPT, ANSWER, BETWEEN = 24, 8, 16
VOCABULARY = 512
GOALS = {"tokens": 1.02, 16: 1 / 5, 64: 1 / 15, "exponent": 1.2}
"""Tokens over the final context; time merged over a sequence a call at 16 and 64 turns; exponent of the time merged."""


def trajectory(turns: int, seed: int) -> list[Any]:
    """The outputs of a loop, one a turn."""
    import torch
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    length = PROMPT + turns * (ANSWER + BETWEEN)
    ids = torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    outputs = []
    for turn in range(turns):
        start = PROMPT + turn * (ANSWER + BETWEEN)
        outputs.append(
            AgentLoopOutput(
                prompt_ids=ids[:start],
                response_ids=ids[start : start + ANSWER],
                response_mask=[1] * ANSWER,
                metrics=AgentLoopMetrics(),
                extra_fields={"turn_reward": 0.0},
            )
        )
    return outputs


def batch(outputs: Sequence[Any], tokens: int) -> Any:
    """Sequences as the trainer sends them, in micro-batches of at most so many tokens."""
    import torch
    from verl.utils import tensordict_utils as tu

    rows: list[dict[str, Any]] = []
    for output in outputs:
        prompt, response, mask = (
            torch.tensor(x) for x in (output.prompt_ids, output.response_ids, output.response_mask)
        )
        rows.append(
            {
                "prompts": prompt,
                "responses": response,
                "input_ids": torch.cat([prompt, response]),
                "position_ids": torch.arange(len(prompt) + len(response)),
                "response_mask": mask,
                "loss_mask": mask.clone(),
                "old_log_probs": torch.full((len(response),), -6.2),
                "advantages": torch.sin(response.float()),
            }
        )
    columns = {
        name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged) for name in rows[0]
    }
    told = {
        "temperature": 1.0,
        "global_batch_size": len(rows),
        "use_remove_padding": False,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": tokens,
        "calculate_entropy": False,
        "global_token_num": [len(row["input_ids"]) for row in rows],
    }
    return tu.get_tensordict(columns, non_tensor_dict=told)


def measure(counts: Sequence[int], total: int) -> list[dict[str, Any]]:
    """For each number of turns, tokens, seconds and memory a trajectory, merged and a sequence a call."""
    import torch
    import verl  # noqa: F401  (loads the plugin, which extends the engines)
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    from verl_ext.rollout.shared.merge import merge

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    loss = partial(ppo_loss, config=FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1))
    longest = PROMPT + max(counts) * (ANSWER + BETWEEN)

    def passes(engine: Any, outputs: Sequence[Any]) -> tuple[float, int]:
        old, new = batch(outputs, 2 * longest), batch(outputs, 2 * longest)
        ballast = fill_to_peak()
        before, start = peak(), time.process_time()
        with engine.eval_mode():
            engine.infer_batch(old, loss_function=None)
        with engine.train_mode():
            engine.train_batch(new, loss_function=loss)
        seconds, grown = time.process_time() - start, peak() - before
        del ballast
        return seconds, grown

    found = []
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(folder, VOCABULARY, longest)
        torch.set_num_threads(1)
        passes(engine, trajectory(2, 0))
        for turns in counts:
            several = [trajectory(turns, seed) for seed in range(max(1, total // turns))]
            stored = {
                "merged": [one for outputs in several for one in merge(outputs)],
                "a sequence a call": [one for outputs in several for one in outputs],
            }
            context = len(several[0][-1].prompt_ids) + ANSWER
            for name, outputs in stored.items():
                seconds, grown = passes(engine, outputs)
                tokens = sum(len(one.prompt_ids) + len(one.response_ids) for one in outputs)
                each = {"tokens": tokens / len(several), "seconds": seconds / len(several), "mib": grown / 2**20}
                found.append({"turns": turns, "stored": name, "context": context, **each})
                print(f"{turns} turns, {name}: {seconds:.1f} s", file=sys.stderr, flush=True)
    torch.distributed.destroy_process_group()
    return found


def summarise(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of merged to a sequence a call by number of turns, tokens over the final context, and the exponents."""
    by = {name: [one for one in found if one["stored"] == name] for name in ("merged", "a sequence a call")}
    pairs = list(zip(*by.values(), strict=True))
    out: dict[str, Any] = {
        "cases": list(found),
        "time_ratio": {one["turns"]: one["seconds"] / other["seconds"] for one, other in pairs},
        "token_ratio": {one["turns"]: one["tokens"] / other["tokens"] for one, other in pairs},
        "tokens_over_context": max(one["tokens"] / one["context"] for one in by["merged"]),
    }
    if len(pairs) > 1:
        for name, cases in by.items():
            x, y = ([math.log(one[what]) for one in cases] for what in ("turns", "seconds"))
            out[f"exponent of {name}"] = statistics.linear_regression(x, y).slope
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print a table, and with ``--json`` one JSON object in the last line."""
    parser = Parser("turns", __doc__)
    parser.add_argument("--turns", default="4,16,64", help="turns of a trajectory (default: %(default)s)")
    parser.number("total", 64, "turns of a batch, at least one trajectory")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parsed(argv)
    counts = [int(word) if word.isdigit() else 0 for word in options.turns.split(",")]
    if min(counts) < 1:
        parser.error(f"--turns {options.turns}: give whole numbers of at least 1, such as 4,16,64")
    if options.child:
        print("\n" + json.dumps(measure(counts, options.total)))
        return 0
    progress(f"{options.turns} turns, merged and a sequence a call")
    try:
        arguments = ("--child", *(sys.argv[1:] if argv is None else argv))
        said = child("turns", *arguments, environment={**os.environ, **ENVIRONMENT})
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    found = summarise(json.loads(said.splitlines()[-1]))
    print("a trajectory: tokens, CPU seconds of the old-log-prob pass and the update; MiB of a batch\n")
    print(f"{'turns':>5}  {'stored':<13}{'tokens':>9}{'seconds':>9}{'MiB':>8}")
    for one in found["cases"]:
        print(f"{one['turns']:>5}  {one['stored']:<13}{one['tokens']:>9.0f}{one['seconds']:>9.2f}{one['mib']:>8.0f}")
    print()
    for turns, value in found["time_ratio"].items():
        goal = f" (goal: at most {GOALS[turns]:.3f})" if turns in GOALS else ""
        tokens = found["token_ratio"][turns]
        print(f"{turns} turns: merged takes {value:.3f} of the time{goal}, {tokens:.3f} of the tokens")
    print(f"tokens over the final context: {found['tokens_over_context']:.3f} (goal: at most {GOALS['tokens']})")
    for name in ("merged", "a sequence a call"):
        if f"exponent of {name}" in found:
            goal = f" (goal: at most {GOALS['exponent']})" if name == "merged" else ""
            print(f"time grows with the turns to the power of {found[f'exponent of {name}']:.2f}, {name}{goal}")
    if options.json:
        print(json.dumps(rounded(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
