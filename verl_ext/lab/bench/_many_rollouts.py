# SPDX-License-Identifier: Apache-2.0
"""Many trajectories at once in one agent loop worker: what each costs, and what grows faster than their number.

verl's own `AgentLoopWorkerTQ` runs in this process, with its store (TransferQueue) and the plugin as in a run. A third
of the trajectories are answers to reasoning-gym's ``chain_sum``, judged by comparing, a third to its ``countdown``,
judged in the sandbox, both up to three turns; a third are episodes of Gymnasium's FrozenLake, up to six steps, in
processes of their own. All begin at the same time. Only the sampler is a stub: in the place of verl's client of the
rollout servers stands a sleep of `FIRST_TOKEN_S` and `TOKEN_S` for each token of lognormal lengths.

*Exponent.* The wall time of few trajectories is the sampler's, that of many this process's, so a line through wall
times says little. The cost is the processor time of this process (all its threads; sandbox, environments and store
have processes of their own): the exponent is the slope of its logarithm over that of the number of trajectories, by
least squares over all sizes. 1 is a constant cost each. Every size runs once, after a run that is not counted.

*Delay of the event loop.* How late a timer fires that is due at any time: a timer is set every `TICK_S`, and one that
is late by more stands for those that could not be set in between. Memory is the largest resident size above that
before the first size; "files" are open descriptors, "sampling" the calls that the sampler had at once, at most.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from verl_ext.lab.bench._shared import progress

FIRST_TOKEN_S, TOKEN_S = 0.1, 0.01
TICK_S = 0.005
GOAL_DELAY_MS, GOAL_EXPONENT = 50.0, 1.1
LONGEST = 192
QUESTIONS = 20
"""Different ones of each kind."""


def sizes(most: int) -> list[int]:
    """Numbers of trajectories from 100, or a third of `most` if that is fewer, to `most`, two in each power of ten."""
    first = max(1, min(100, most // 3))
    parts = max(1, round(2 * math.log10(most / first)))
    return sorted({round(first * (most / first) ** (part / parts)) for part in range(parts + 1)})


def exponent(points: Sequence[tuple[int, float]]) -> float | None:
    """The slope of a line through the logarithms of ``(trajectories, cost)``, by least squares; None of one point."""
    logs = [(math.log(count), math.log(cost)) for count, cost in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope if len(logs) > 1 else None


def delay_percentile(late: Sequence[float], share: float) -> float:
    """A percentile of the delay at any time, from the delays of timers that are set one after the other.

    Args:
        late: seconds, of each timer.
        share: in (0, 1].
    """
    every = sorted(delay - TICK_S * part for delay in late for part in range(max(1, math.ceil(delay / TICK_S))))
    return every[math.ceil(share * len(every)) - 1]


def look() -> tuple[int, int]:
    """Resident bytes and open descriptors of this process."""
    import psutil

    return psutil.Process().memory_info().rss, psutil.Process().num_fds()


async def watch(late: list[float], seen: list[tuple[int, int]]) -> None:
    """Until cancelled, set timers in the event loop, and look at this process four times a second."""
    looked = 0.0
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(TICK_S)
        now = time.perf_counter()
        late.append(max(0.0, now - begin - TICK_S))
        if now - looked > 0.25:
            looked = now
            seen.append(look())


@functools.cache
def kinds() -> list[list[dict[str, Any]]]:
    """Rows of the data of each kind; ``says`` is what the model may answer."""
    from verl_ext.lab.demo import data
    from verl_ext.rollout.environments.data import build_rows

    made = []
    for dataset in ("chain_sum", "countdown"):
        entries = data.generate(dataset, {}, QUESTIONS, seed=0, held_out=None)
        made.append(
            data.build_rows(entries, dataset, data.dataset_config({}, 0, 1), split="train", parser="last_number")
        )
        for row in made[-1]:
            right = row["reward_model"]["ground_truth"]
            row["says"] = [right, f"{right}0"]
    moves = [f"<action>{move}</action>" for move in ("right", "down", "left", "up")]
    lake = {"id": "FrozenLake-v1", "map_size": 4, "is_slippery": False}
    return [*made, [{**row, "says": moves} for row in build_rows("gymnasium", range(QUESTIONS), lake)]]


class Sampler:
    """Stands for verl's client of the rollout servers.

    Args:
        rows: of `kinds`; a trajectory's ``priority`` is the number of its row.
        tokenizer: of the model.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], tokenizer: Any) -> None:
        texts = {text for row in rows for text in row["says"]}
        ids = {text: tokenizer.encode(f"{text}\n", add_special_tokens=False) for text in [*texts, "because"]}
        self.says = [[ids[text] for text in row["says"]] for row in rows]
        self.filling = ids["because"][:1]
        self.calls = self.tokens = self.now = self.most = 0

    async def generate(self, *, prompt_ids: list[int], priority: int, **_: Any) -> Any:
        """One of the answers, each as likely, and more tokens after it, in the time that they take."""
        from verl.workers.rollout.replica import TokenOutput

        chance = random.Random(f"{priority}/{len(prompt_ids)}")
        said = chance.choice(self.says[priority])
        length = min(LONGEST, max(len(said), round(chance.lognormvariate(3.3, 0.9))))
        self.calls, self.tokens, self.now = self.calls + 1, self.tokens + length, self.now + 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(FIRST_TOKEN_S + TOKEN_S * length)
        self.now -= 1
        ids = said + self.filling * (length - len(said))
        steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), 0)
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * length, extra_fields=steps)


async def play(worker: Any, count: int) -> dict[str, Any]:
    """One size: `count` trajectories, begun at once, as verl's trainer gives them to a worker.

    Raises:
        RuntimeError: trajectories failed.
    """
    from verl.utils import tensordict_utils as tu

    from verl_ext.integration.compat import data_plane

    numbers, names = list(range(count)), [f"{count}-{number}" for number in range(count)]
    rows = [kinds()[number % 3][number // 3 % QUESTIONS] for number in numbers]
    worker.llm_client = sampler = Sampler(rows, worker.tokenizer)
    columns: dict[str, Any] = {key: [row[key] for row in rows] for key in ("agent_name", "extra_info")}
    columns |= {"raw_prompt": [row["prompt"] for row in rows], "uid": names, "index": numbers, "priority": numbers}
    late, seen = list[float](), [look()]
    worked, begin = time.process_time(), time.perf_counter()
    watching = asyncio.create_task(watch(late, seen))
    await worker.generate_sequences(tu.get_tensordict(columns, {"global_steps": 0}))
    while worker.background_tasks:
        await asyncio.wait(worker.background_tasks)
    watching.cancel()
    seconds, work = time.perf_counter() - begin, time.process_time() - worked
    tags = await asyncio.to_thread(data_plane.tags, "train")
    ended = sum(tags.get(name, {}).get("status") == "finished" for name in names)
    await asyncio.to_thread(data_plane.clear, "train", list(tags))
    if ended < count:
        raise RuntimeError(f"{count - ended} of {count} trajectories failed; the log says why")
    return {
        "trajectories": count,
        "ended": ended,
        "sequences": len(tags) - count,
        "calls": sampler.calls,
        "tokens": sampler.tokens,
        "most_at_sampler": sampler.most,
        "seconds": seconds,
        "cpu_ms_each": 1e3 * work / count,
        **{f"delay_p{share}_ms": 1e3 * delay_percentile(late, share / 100) for share in (50, 99, 100)},
        "memory": max(memory for memory, _ in seen),
        "descriptors": max(descriptors for _, descriptors in seen),
        "descriptors_after": look()[1],
    }


async def measure(config: Any, most: int) -> dict[str, Any]:
    """All sizes."""
    from verl.trainer.ppo.v1 import AgentLoopWorkerTQ

    worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class(config, None)
    await play(worker, min(most, 30))
    memory, descriptors = look()
    found = []
    for count in sizes(most):
        progress(f"{count} trajectories")
        one = await play(worker, count)
        found.append({**one, "kib_each": (one.pop("memory") - memory) / 1024 / count})
    costs = [(one["trajectories"], one["trajectories"] * one["cpu_ms_each"]) for one in found]
    return {"sizes": found, "exponent": exponent(costs), "descriptors_before": descriptors}


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{'':>6}{'seconds':>9}{'a second':>9}{'CPU ms':>8}{'KiB':>7}{'delay p50':>11}{'p99':>7}{'max':>7}", end="")
    print(f"{'files':>7}{'sampling':>9}")
    for one in found["sizes"]:
        count, delays = one["trajectories"], [one[f"delay_p{share}_ms"] for share in (50, 99, 100)]
        print(f"{count:>6}{one['seconds']:>9.1f}{count / one['seconds']:>9.1f}{one['cpu_ms_each']:>8.1f}", end="")
        print(f"{one['kib_each']:>7.0f}{delays[0]:>11.1f}{delays[1]:>7.0f}{delays[2]:>7.0f}", end="")
        print(f"{one['descriptors']:>7}{one['most_at_sampler']:>9}")
    worst = max(one["delay_p99_ms"] for one in found["sizes"])
    power = "unknown" if found["exponent"] is None else f"{found['exponent']:.2f}"
    print(
        f"\nexponent of processor time {power} (goal: at most {GOAL_EXPONENT}), loop delay p99 {worst:.0f} ms", end=""
    )
    print(f" (goal: below {GOAL_DELAY_MS:g})")


def main(config: Any, most: int, start_ray: Callable[[Any], None]) -> dict[str, Any]:
    """Start Ray and verl's store, run all sizes, end what was started.

    Args:
        config: verl's configuration of a run; changed.
        most: trajectories of the largest size.
        start_ray: given the configuration.
    """
    import ray
    from omegaconf import OmegaConf

    from verl_ext.integration.compat import data_plane

    OmegaConf.set_struct(config, False)
    rollout = {"n": 1, "prompt_length": 1024, "response_length": LONGEST, "custom": {"multi_turn": {"max_turns": 3}}}
    OmegaConf.update(config, "actor_rollout_ref.rollout", rollout)
    OmegaConf.update(config, "verl_ext.environment", {"max_steps": 6, "template": "compact"})
    OmegaConf.update(config, "transfer_queue.backend.SimpleStorage.num_data_storage_units", 1)
    OmegaConf.resolve(config)
    start_ray(config)
    try:
        data_plane.start(config)
        return asyncio.run(measure(config, most))
    finally:
        data_plane.stop()
        ray.shutdown()
