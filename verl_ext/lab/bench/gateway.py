# SPDX-License-Identifier: Apache-2.0
"""Gateway: what a call over HTTP costs beside the same call of an orchestra, with an engine that answers at once.

The agent is a function that makes its calls one after the other over one connection, by Python's own HTTP client; the
orchestra makes the same calls. Both go through verl's agent loop interface, a real tokenizer and to outputs. Rounds of
both alternate, after one of each that is not counted; the figure is the median difference a call, by the clock and in
time of processors, the client's included. Then so many trajectories at once that a worker is full, of which the failed
ones are counted.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from verl_ext.lab.bench._shared import Parser

GOAL_MS = 3.0
QUESTION = "What is 12 + 30?"


def ask(task: Any, *, base_url: str, api_key: str, model: str) -> float:
    """The agent: ``extra_info.calls`` calls."""
    place = urlsplit(base_url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    body = json.dumps({"model": model, "messages": task["messages"]})
    for _ in range(task["extra_info"]["calls"]):
        connection.request("POST", f"{place.path}/chat/completions", body, {"Authorization": f"Bearer {api_key}"})
        json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]
    connection.close()
    return 1.0


def _orchestra() -> str:
    """Registers the same agent as an orchestra, and returns its name."""
    from verl_ext.rollout.orchestra import Agent, orchestra

    name = "bench_ask"

    @orchestra(name, [Agent("agent")])
    async def bench_ask(task: Any, agent: Any) -> float:
        for _ in range(task.extra_info["calls"]):
            await agent(task.messages)
        return 1.0

    return name


class Engine:
    """Stands for verl's client of the rollout servers: eight tokens at once."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    async def generate(self, **request: Any) -> Any:
        """The same answer to every request."""
        from verl.workers.rollout.replica import TokenOutput

        return TokenOutput(token_ids=self.ids, log_probs=[-0.5] * len(self.ids))


def configure(calls: int) -> Any:
    """As much of verl's configuration as the loops read."""
    from omegaconf import OmegaConf

    gateway = {
        "agent": f"{__name__ if __name__ != '__main__' else 'verl_ext.lab.bench.gateway'}:ask",
        "max_calls": calls,
    }
    rollout = {"prompt_length": 256, "response_length": 16, "temperature": 1.0}
    node = {"gateway": gateway, "orchestra": {"name": _orchestra(), "max_calls": calls}}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}, "verl_ext": node})


def make_loop(name: str, config: Any, server: Any, tokenizer: Any, /, **more: Any) -> Any:
    """The agent loop registered as `name`, made as verl makes it, for one trajectory.

    Args:
        name: the data column ``agent_name``.
        config: verl's config as far as the loop reads it.
        server: stands for the rollout engine.
        tokenizer: of the model.
        **more: keys of the entry of an agent loop config, and further arguments of the loop.
    """
    import hydra
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, _agent_loop_registry
    from verl.utils.dataset.rl_dataset import RLHFDataset

    return hydra.utils.instantiate(
        config=_agent_loop_registry[name],
        trainer_config=DictConfigWrap(config),
        server_manager=server,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        **{"hf_model_type": "llama", **more},
    )


async def play(loop: str, config: Any, tokenizer: Any, trajectories: int, calls: int) -> tuple[float, float, int]:
    """Seconds for so many trajectories side by side, on the clock and of processors, and how many of them failed."""
    engine = Engine(tokenizer.encode(QUESTION)[:8])
    made = [make_loop(loop, config, engine, tokenizer) for _ in range(trajectories)]
    row = {"raw_prompt": [{"role": "user", "content": QUESTION}], "extra_info": {"calls": calls}}
    started, worked = time.perf_counter(), time.process_time()
    played = await asyncio.gather(*(one.run({"temperature": 1.0, "logprobs": True}, **row) for one in made))
    seconds, work = time.perf_counter() - started, time.process_time() - worked
    return seconds, work, sum(len(rows) != calls or bool(rows[-1].extra_fields["failure"]) for rows in played)


async def measure(calls: int, rounds: int, trajectories: int) -> dict[str, Any]:
    """The figures of the benchmark."""
    from verl_ext.lab.demo.model import train_tokenizer
    from verl_ext.rollout.gateway.server import gateway

    tokenizer, config = train_tokenizer([QUESTION] * 64), configure(calls)
    of: dict[str, list[tuple[float, float, int]]] = {"verl_ext_gateway": [], "verl_ext_orchestra": []}
    for _ in range(rounds + 1):
        for loop, took in of.items():
            took.append(await play(loop, config, tokenizer, 1, calls))

    def milliseconds(loop: str, which: int) -> list[float]:
        return [1e3 * took[which] / calls for took in of[loop][1:]]

    over, under = (milliseconds(loop, 0) for loop in of)
    over_cpu, under_cpu = (milliseconds(loop, 1) for loop in of)
    full, _, failed = await play("verl_ext_gateway", config, tokenizer, trajectories, min(2, calls))
    await gateway("127.0.0.1").close()
    return {
        "gateway_ms": statistics.median(over),
        "orchestra_ms": statistics.median(under),
        "overhead_ms": statistics.median(a - b for a, b in zip(over, under, strict=True)),
        "overhead_cpu_ms": statistics.median(a - b for a, b in zip(over_cpu, under_cpu, strict=True)),
        "trajectories": trajectories,
        "trajectories_failed": failed,
        "calls_a_second": trajectories * min(2, calls) / full,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and, with ``--json``, one JSON object on the last line. Returns the exit code."""
    parser = Parser("gateway", __doc__)
    parser.number("calls", 200, "of a trajectory")
    parser.number("rounds", 9, "of each")
    parser.number("trajectories", 1000, "at once")
    args = parser.parsed(argv)
    import verl  # noqa: F401  (loads the plugin, which registers the loops)

    found = asyncio.run(measure(args.calls, args.rounds, args.trajectories))
    print(f"a call, of {args.calls} one after the other, median of {args.rounds} rounds, milliseconds")
    print(f"  over the gateway {found['gateway_ms']:.2f}, in an orchestra {found['orchestra_ms']:.2f}")
    print(
        f"  more, round by round {found['overhead_ms']:.2f} (goal: at most {GOAL_MS:g}), of processors "
        f"{found['overhead_cpu_ms']:.2f}"
    )
    print(
        f"{args.trajectories} trajectories at once: {found['trajectories_failed']} failed, "
        f"{found['calls_a_second']:.0f} calls a second"
    )
    if args.json:
        print(json.dumps(found))
    return int(found["trajectories_failed"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
