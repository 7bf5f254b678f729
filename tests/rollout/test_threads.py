# SPDX-License-Identifier: Apache-2.0
"""Threads of their own for tokenising, decoding and judging."""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from loops import make_loop
from omegaconf import OmegaConf
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.workers.rollout.replica import TokenOutput

from verl_ext.integration.settings.options import OptionError
from verl_ext.lab.demo.model import train_tokenizer
from verl_ext.rewards.caged import load_dataset
from verl_ext.rollout import step_wise
from verl_ext.rollout.reasoning_gym_task import ReasoningGymTask
from verl_ext.rollout.shared import threads as module
from verl_ext.rollout.shared.rows import ModelCall
from verl_ext.rollout.shared.threads import HeldThreads, Threads, read_threads, threads
from verl_ext.rollout.shared.tools import Tools, ToolSettings


@pytest.mark.seconds
def test_slow_work_takes_no_time_from_what_waits_for_a_thread() -> None:
    """Both threads are held: thirty calls wait longer than their limit, which counts from their start."""
    pool, gate = Threads("judging", 2), threading.Event()

    async def run() -> list[Any]:
        held = [asyncio.create_task(pool.run(gate.wait, timeout_s=600.0)) for _ in range(2)]
        await asyncio.sleep(0)
        calls = [asyncio.create_task(pool.run(lambda: False, timeout_s=3.0)) for _ in range(30)]
        assert not (await asyncio.wait(calls, timeout=3.5))[0]
        gate.set()
        assert await asyncio.gather(*held) == [True] * 2
        return await asyncio.gather(*calls)

    assert asyncio.run(run()) == [False] * 30 and pool.lost == 0


def test_work_that_does_not_end_is_left_behind_and_others_go_on() -> None:
    pool, gate = Threads("judging", 2), threading.Event()

    async def run() -> None:
        hanging = [pool.run(gate.wait, timeout_s=0.05) for _ in range(4)]
        results = await asyncio.gather(*hanging, return_exceptions=True)
        assert all(isinstance(result, asyncio.TimeoutError) for result in results) and pool.lost == 4
        assert await asyncio.gather(*[pool.run(lambda: 7, timeout_s=60.0) for _ in range(8)]) == [7] * 8

    asyncio.run(run())
    gate.set()


def test_too_much_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LOST", 2)
    pool, gate = Threads("judging", 1), threading.Event()

    async def run() -> None:
        for _ in range(2):
            with pytest.raises(asyncio.TimeoutError):
                await pool.run(gate.wait, timeout_s=0.05)
        with pytest.raises(HeldThreads, match="2 threads for judging are held"):
            await pool.run(lambda: 7)
        gate.set()
        while pool.lost:
            await asyncio.sleep(0.01)
        assert await pool.run(lambda: 7) == 7

    asyncio.run(run())


def test_sizes_come_from_the_configuration() -> None:
    config = OmegaConf.create({"verl_ext": {"threads": {"judging": 3}}})
    assert [threads(config, kind).size for kind in ("tokenising", "decoding", "judging")] == [4, 2, 3]
    assert threads(config, "judging") is threads(config, "judging")
    for wrong, message in (({"judges": 3}, "judges is not an option"), ({"judging": 0}, "judging is 0")):
        with pytest.raises(OptionError, match=f"verl_ext.threads.{message}"):
            read_threads({"verl_ext": {"threads": wrong}})


class Nobodys(ThreadPoolExecutor):
    """Stands for the event loop's own threads."""

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the event loop's own threads are used")


def test_a_loop_leaves_the_event_loops_threads_alone() -> None:
    tokenizer = train_tokenizer(["<action>forward</action> place 1 Reach the end."] * 64)
    rollout = {"prompt_length": 256, "response_length": 32}
    environment = {"name": "environment_zoo:Async", "template": "compact"}
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": rollout}, "data": {}, "verl_ext": {"environment": environment}}
    )

    class Server:
        async def generate(self, **kwargs: Any) -> Any:
            ids = tokenizer.encode("<action>forward</action>", add_special_tokens=False)
            return TokenOutput(token_ids=ids, log_probs=None, extra_fields={})

    async def run() -> list[Any]:
        asyncio.get_running_loop().set_default_executor(Nobodys())
        row = {"raw_prompt": [{"role": "user", "content": "Play."}], "session_id": 0, "index": 0}
        return await make_loop(step_wise.AGENT_NAME, config, Server(), tokenizer).run({}, **row)

    assert len(asyncio.run(run())) == 3


def test_a_tool_that_hangs_keeps_no_thread_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has one here, in which verl's parser decodes. With too many that hang no other is begun."""
    monkeypatch.setattr(module, "MOST_LOST", 2)
    gate, seen, failed = threading.Event(), contextvars.ContextVar("seen", default=0), []

    def wait() -> str:
        return "the caller's" if gate.wait(60) and seen.get() else "none"

    parameters = {"type": "object", "properties": {}, "required": []}
    function = {"name": "wait", "description": "Wait.", "parameters": parameters}
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    tokenizer, given = train_tokenizer(["wait"] * 64), [FunctionTool("wait", wait, schema)]
    settings = ToolSettings(tool_timeout_s=0.2)
    tools = Tools({}, given, tokenizer, settings, "here", lambda: failed.append(1), Threads("tools", 1))
    row = ModelCall([1], tokenizer.encode('<tool_call>{"name": "wait", "arguments": {}}</tool_call>'), None)

    async def run() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        for _ in range(2):
            said = await asyncio.wait_for(tools.use("agent", ["wait"], row, []), 30)
            assert said[1]["content"].startswith("Error: TimeoutError")
        with pytest.raises(HeldThreads, match="2 threads for tools are held"):
            await tools.use("agent", ["wait"], row, [])
        gate.set()
        while tools.threads.lost:
            await asyncio.sleep(0.01)
        seen.set(1)  # as with verl's call, a function has the context of its caller
        assert (await tools.use("agent", ["wait"], row, []))[1]["content"] == "the caller's"

    try:
        asyncio.run(run())
    finally:
        gate.set()
    assert failed == [1, 1]


def test_so_does_a_verdict() -> None:
    config = json.dumps({"seed": 3, "size": 1})
    entry = load_dataset("chain_sum", config)[0]

    async def run() -> Any:
        asyncio.get_running_loop().set_default_executor(Nobodys())
        return await ReasoningGymTask("chain_sum", config, entry).judge_async(str(entry["answer"]))

    assert asyncio.run(run()).solved
