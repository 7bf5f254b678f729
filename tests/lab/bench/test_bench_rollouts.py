# SPDX-License-Identifier: Apache-2.0
"""The benchmark of rollouts: both schedules make the same calls, the bound is computed right, and it runs."""

from __future__ import annotations

import asyncio
import json
import os
from types import SimpleNamespace
from typing import Any

import copies
import pytest

from verl_ext import cli
from verl_ext.cpu.platform import fork_worker
from verl_ext.lab.bench import rollouts
from verl_ext.lab.bench.rollouts import Cost


def test_plan_is_seeded_and_within_its_bounds() -> None:
    calls = rollouts.plan(200, seed=3)
    assert calls == rollouts.plan(200, seed=3) != rollouts.plan(200, seed=4)
    lengths = [length for call in calls for length in call]
    assert min(lengths) >= 4 and max(lengths) == rollouts.LONGEST
    assert {len(call) for call in calls} == set(range(1, rollouts.MAX_TURNS + 1))


def test_steps_and_the_bound_by_hand() -> None:
    calls = [(10, 1), (1, 10), (5,)]
    assert rollouts.steps(calls) == (11, 20)  # the longest trajectory; 10 and then 10
    assert rollouts.expected_ratio(calls, Cost(fixed=1.0, per_row=0.0)) == pytest.approx(11 / 20)
    assert rollouts.expected_ratio(calls, Cost(fixed=0.0, per_row=1.0)) == 1.0
    cost = Cost(fixed=1.0, per_row=1.0, call=2.0)  # 27 tokens, 5 calls
    assert rollouts.expected_ratio(calls, cost) == pytest.approx((11 + 27 + 10) / (20 + 27 + 10))


def test_fit_finds_the_two_costs_and_keeps_them_positive() -> None:
    cost = rollouts.fit([(rows, 3e-3 + 2e-4 * rows) for rows in (1, 4, 16, 64)])
    assert cost.fixed == pytest.approx(3e-3) and cost.per_row == pytest.approx(2e-4)
    assert rollouts.fit([(1, 2e-3), (64, 1e-3)]).per_row == 0.0
    assert rollouts.fit([(1, 0.0), (10, 1.0), (64, 6.5)]).fixed == 0.0


class Client:
    """A rollout server of the test: a token a tick, all requests at once; it records who waited for whom."""

    def __init__(self) -> None:
        self.tick = 0
        self.calls: list[tuple[str, int, int, int]] = []
        self.waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def generate(self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        length, begun = sampling_params["max_tokens"], self.tick
        done = asyncio.get_running_loop().create_future()
        self.waiting.append((begun + length, done))
        await done
        self.calls.append((request_id.split("-")[1], len(prompt_ids), length, begun))
        return SimpleNamespace(token_ids=[7] * length)

    async def serve(self) -> None:
        while True:
            for _ in range(20):  # let those who were answered go on
                await asyncio.sleep(0)
            if not self.waiting:
                continue
            self.tick = min(end for end, _ in self.waiting)
            for _, future in [pair for pair in self.waiting if pair[0] <= self.tick]:
                future.set_result(None)
            self.waiting = [pair for pair in self.waiting if pair[0] > self.tick]


@pytest.mark.parametrize("seed", range(3))
def test_both_schedules_make_the_same_calls_in_as_many_steps_as_computed(seed: int) -> None:
    calls = rollouts.plan(12, seed)

    async def ticks(lock_step: bool) -> tuple[int, list[tuple[str, int, int]]]:
        client = Client()
        server = asyncio.create_task(client.serve())
        await rollouts.Caller(client, 50).run(calls, lock_step)
        server.cancel()
        return client.tick, sorted(call[:3] for call in client.calls)

    (alone, own), (together, lock) = asyncio.run(ticks(False)), asyncio.run(ticks(True))
    assert (alone, together) == rollouts.steps(calls) and own == lock
    assert len(own) == sum(len(call) for call in calls)
    first = [call for call in own if call[0] == "0"]  # prompts grow by the response and an observation
    prompts = sorted(prompt for _, prompt, _ in first)
    expected, at = [], rollouts.PROMPT_TOKENS
    for length in calls[0]:
        expected.append(at)
        at += length + rollouts.OBSERVATION_TOKENS
    assert prompts == expected


def test_costs_are_told_apart() -> None:
    """A clock of the test: 5 ms a call, made one after the other, and 2 ms a step with half a ms a row."""

    class Timed(rollouts.Caller):
        async def run(self, calls: Any, lock_step: bool) -> float:
            (length,) = calls[0]
            return 5e-3 * len(calls) + length * (2e-3 + 5e-4 * len(calls))

    cost = asyncio.run(Timed(None, 10).cost(64, repeats=1))
    assert tuple(cost) == pytest.approx((2e-3, 5e-4, 5e-3))


def test_a_server_that_gives_other_lengths_is_refused() -> None:
    class Short:
        async def generate(self, **_: Any) -> Any:
            return SimpleNamespace(token_ids=[1, 2])

    with pytest.raises(RuntimeError, match="asked for 5 tokens, the rollout server gave 2"):
        asyncio.run(rollouts.Caller(Short(), 10).run([(5,)], lock_step=False))


def test_what_cannot_be_measured_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "rollouts", "--pairs", "0"])
    assert "--pairs 0 must be at least 1" in capsys.readouterr().err


@pytest.mark.e2e
def test_benchmark_runs_on_the_embedded_engine() -> None:
    command = ["-m", "verl_ext.cli", "bench", "rollouts", "--quick", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", fork_worker.FROM: copies.imports()}
    done = copies.python(*command, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["trajectories"] == 16 and found["calls"] == 72 and found["quick"] is True
    assert 0.3 < found["steps_vs_lock_step"] < 0.6
    assert "in lock step" in done.stdout and "a decoding step costs" in done.stdout
