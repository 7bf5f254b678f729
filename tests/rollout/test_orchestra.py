# SPDX-License-Identifier: Apache-2.0
"""Orchestras through verl's agent loop interface: tokenizer, rewards, retriever real, the engine's answers scripted."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from chat_server import Served
from hydra import compose
from loops import QUESTION, REWARD, Scripted, columns_of, config_of, make_loop
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, ToolListWrap
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, FunctionTool, function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_ext.integration import checks
from verl_ext.integration.settings.endpoints import EndpointRefused
from verl_ext.integration.settings.endpoints import of as endpoints_of
from verl_ext.integration.settings.options import OptionError
from verl_ext.rollout.orchestra import Agent, OrchestraFailure, Outcome, agent, orchestra, together
from verl_ext.rollout.orchestra import loop as loop_module
from verl_ext.rollout.orchestra.agents import REASONS
from verl_ext.rollout.orchestra.settings import check
from verl_ext.rollout.shared import mcp_tools
from verl_ext.rollout.shared.plain_text import PlainText
from verl_ext.rollout.shared.rows import HOPELESS

pytestmark = pytest.mark.usefixtures("fresh_fates")


@pytest.fixture
def play(tokenizer: Any, tmp_path: Path) -> Callable[..., tuple[list[AgentLoopOutput], Scripted]]:
    """Plays one trajectory, the loop made as verl makes it."""
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)

    def run_one(
        name: str | None,
        answer: Callable[[str], Any],
        *,
        keys: dict[str, Any] | None = None,
        entry: dict[str, Any] | None = None,
        row: dict[str, Any] | None = None,
        prompt_length: int = 2048,
        response_length: int = 64,
        rollout: dict[str, Any] | None = None,
        tools: list[Any] | None = None,
        server: Any = None,
        reward_path: str = str(reward),
        models: dict[str, Any] | None = None,
        times: int = 1,
        algorithm: dict[str, Any] | None = None,
    ) -> tuple[list[AgentLoopOutput], Scripted]:
        limits = {"prompt_length": prompt_length, "response_length": response_length, **(rollout or {})}
        node = {**({"name": name} if name else {}), **(keys or {})}
        config = config_of(limits, reward_path, {"orchestra": node, "models": models or {}})
        config.algorithm = algorithm or {}
        engine = server or Scripted(tokenizer, answer)

        async def run() -> list[AgentLoopOutput]:
            rows: list[AgentLoopOutput] = []
            for _ in range(times):
                own = {"name": "x", **(entry or {}), "tools": ToolListWrap(tools or [])}
                made = make_loop(loop_module.AGENT_NAME, config, engine, tokenizer, **own)
                assert isinstance(made, loop_module.OrchestraLoop)
                rows += await made.run({"temperature": 1.0, "logprobs": True}, **columns_of(row))
            return rows

        return asyncio.run(run()), engine

    return run_one


def fields(rows: list[AgentLoopOutput], name: str) -> list[Any]:
    return [row.extra_fields[name] for row in rows]


def info(rows: list[AgentLoopOutput]) -> dict[str, float]:
    return rows[-1].extra_fields["reward_extra_info"]


# A team of this file.


@agent
def asker(text):
    """Ask for a number."""
    return text or None


@agent("teller", role="Tell a number.", max_tokens=4)
def read_number(text):
    return int(text)


@orchestra("test_pair")
async def pair(task, asker, teller, *, rounds: int = 1, ending: Literal["text", "number", "none", "outcome"] = "text"):
    """Ask, then tell."""
    for _ in range(rounds):
        question = await asker(task.messages)
        answer = await teller([*task.messages, {"role": "user", "content": question.text}])
        question.reward = 0.25
    if ending == "text":
        return answer.text
    if ending == "number":
        return 0.5
    return None if ending == "none" else Outcome(answer=answer.text, info={"rounds": rounds})


def by_role(**answers: Any) -> Callable[[str], Any]:
    """Answers by a word of the role prompt."""

    def answer(prompt: str) -> Any:
        for word, text in answers.items():
            if word.replace("_", " ") in prompt:
                return text
        raise AssertionError(prompt)

    return answer


PAIR = by_role(Ask="how much?", Tell="12")


def test_each_call_is_a_row(play: Any, tokenizer: Any) -> None:
    rows, server = play("test_pair", PAIR, keys={"options": {"rounds": 2}})
    assert fields(rows, "agent_id") == ["asker", "teller"] * 2
    assert fields(rows, "turn_reward") == [0.25, 0.0, 0.25, 1.0]
    assert [row.reward_score for row in rows] == [1.0] * 4
    assert fields(rows, "is_action_valid") == fields(rows, "valid_row") == [True] * 4
    assert fields(rows, "anchor_obs") == [QUESTION, "how much?"] * 2
    assert fields(rows, "failure") == [""] * 4
    assert fields(rows, "model") == ["policy"] * 4
    assert fields(rows, "max_global_steps") == [7] * 4
    for row, request in zip(rows, server.requests, strict=True):
        assert request["prompt_ids"] == row.prompt_ids
        assert row.response_mask == [1] * len(row.response_ids)
        assert row.response_logprobs == [-0.5] * len(row.response_ids)
    assert server.prompts[1] == (
        "<|im_start|>system\nTell a number.<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>user\nhow much?<|im_end|>\n<|im_start|>assistant\n"
    )
    # An agent's calls go to one server, where its prefix is cached; its own bound is passed on.
    assert len({request["request_id"] for request in server.requests}) == 2
    assert [request["max_tokens"] for request in server.requests] == [64, 4, 64, 4]
    assert tokenizer.decode(rows[1].response_ids) == "12<|im_end|>"


def test_numbers_for_validation(play: Any) -> None:
    rows, _ = play("test_pair", PAIR, keys={"options": {"rounds": 2}})
    numbers = info(rows)
    assert numbers["calls_asker"] == numbers["calls_teller"] == 2.0 and numbers["calls"] == 4.0
    assert numbers["score"] == 1.0 and numbers["length"] == 2.0 and "note" not in numbers
    assert {f"failure_{reason}" for reason in REASONS} <= set(numbers)
    assert all(type(value) is float for value in numbers.values())
    assert numbers["failed"] == 0.0


@pytest.mark.parametrize(
    ("ending", "outcome", "turns"),
    [
        ("text", 1.0, [0.25, 1.0]),
        ("number", 0.5, [0.25, 0.5]),
        ("none", 0.25, [0.25, 0.0]),
        ("outcome", 1.0, [0.25, 1.0]),
    ],
)
def test_what_an_orchestration_may_return(play: Any, ending: str, outcome: float, turns: list[float]) -> None:
    rows, _ = play("test_pair", PAIR, keys={"options": {"ending": ending}})
    assert [row.reward_score for row in rows] == [outcome] * 2
    assert fields(rows, "turn_reward") == turns
    assert info(rows).get("rounds") == (1.0 if ending == "outcome" else None)


def test_the_rows_become_columns_as_verl_makes_them(play: Any) -> None:
    rows, _ = play("test_pair", by_role(Ask="", Tell="12"))
    columns = list_of_dict_to_tensordict([row.as_dict() for row in rows])
    assert [sum(score.tolist()) for score in columns["rm_scores"].unbind()] == [1.0, 1.0]
    assert [mask.tolist() for mask in columns["response_mask"].unbind()][0] == [0]
    assert [len(column) for column in columns["rollout_log_probs"].unbind()] == [len(r.response_ids) for r in rows]


def test_unreadable_empty_and_endless_answers(play: Any, tokenizer: Any) -> None:
    rows, _ = play("test_pair", by_role(Ask="", Tell="twelve"))
    assert fields(rows, "is_action_valid") == [False, False]
    assert rows[0].response_mask == [0] and rows[0].response_logprobs == [0.0]  # no token, so no token to train on
    assert fields(rows, "valid_row") == [True, True]  # but a sample all the same
    assert info(rows)["failure_empty_response"] == 1.0 and info(rows)["invalid_teller"] == 1.0
    assert fields(rows, "failure") == ["", ""] and rows[0].reward_score == 0.0
    long = Scripted(tokenizer, by_role(Ask="?" * 640, Tell="1" * 640), end=False)
    rows, _ = play("test_pair", PAIR, server=long)
    assert [len(row.response_ids) for row in rows] == [64, 4]
    assert info(rows)["answers_cut"] == 2.0


@agent(ends=lambda text: text.index("DONE"))
def picky(text):
    """Pick."""
    return text.split()[2]


@orchestra("test_picky")
async def one_pick(task, picky):
    first = await picky("first")
    task.count("answered")
    return Outcome(reward=1.0, answer=(await picky(first.text)).text, info={"reward": 7.0, "kept": 2.0})


def test_a_function_of_the_agent_that_raises_on_a_models_text_keeps_the_row(play: Any) -> None:
    """Who writes what a reader chokes on has earned nothing, and is trained on it; its answer is no failure of an
    engine."""
    rows, _ = play("test_picky", lambda prompt: "a b c" if "first" in prompt else "a b")
    assert fields(rows, "agent_id") == ["picky", "picky"] and fields(rows, "is_action_valid") == [True, False]
    assert fields(rows, "valid_row") == [True, True] and [row.reward_score for row in rows] == [0.0, 0.0]
    assert fields(rows, "failure") == ["", "error"] and "IndexError" in rows[-1].extra_fields["failure_detail"]
    assert info(rows)["failure_error"] == 3.0  # both answers without an end, and the reader
    rows, _ = play("test_picky", lambda prompt: "a b c DONE d e")
    assert [row.reward_score for row in rows] == [1.0, 1.0]
    assert info(rows)["failure_error"] == 0.0  # `ends` may raise on what is no whole answer yet
    assert info(rows)["kept"] == 2.0 and "reward" not in info(rows)  # verl keeps the scores under that name


GUESSES = {"twelve": 12, "true": True, "half": np.float32(0.5), "many": 10**400, "nan": math.nan, "text": "3"}


@orchestra("test_guess")
async def guess(task, asker):
    return Outcome(reward=1.0, info={"guess": GUESSES.get((await asker("Guess.")).text)})


@pytest.mark.parametrize(("said", "number"), [("twelve", 12.0), ("true", 1.0), ("half", 0.5)])
def test_numbers_of_an_outcome(play: Any, said: str, number: float) -> None:
    rows, _ = play("test_guess", lambda prompt: said)
    assert info(rows)["guess"] == number and fields(rows, "failure") == [""] and rows[0].reward_score == 1.0


@pytest.mark.parametrize(
    ("said", "kind"), [("no idea", "NoneType"), ("many", "int"), ("nan", "float"), ("text", "str")]
)
def test_what_is_no_number_of_an_outcome_fails_its_trajectory_by_name(play: Any, said: str, kind: str) -> None:
    """The rollout was missing, and just where the model could not be read."""
    rows, _ = play("test_guess", lambda prompt: said)
    assert fields(rows, "failure") == ["error"] and rows[0].reward_score == 0.0
    assert f"its 'guess' ({kind}) is none" in fields(rows, "failure_detail")[0] and "guess" not in info(rows)


@orchestra("test_one_reward", lowest_reward=0.0)
async def one_reward(task, asker, teller, *, call: bool = True):
    if call:
        await asker("hello")
    return Outcome(rewards={"teller": 1.0})


def test_rewards_that_lack_an_agent_are_named(play: Any) -> None:
    rows, _ = play("test_one_reward", lambda prompt: "a word")
    assert fields(rows, "failure") == ["error"]
    assert (
        "no reward for the agent asker, which was called; it has some for: teller" in fields(rows, "failure_detail")[0]
    )
    (row,), _ = play("test_one_reward", lambda prompt: "a word", keys={"options": {"call": False}})
    assert row.extra_fields["agent_reward"] == 0.0 and row.extra_fields["valid_row"] is False  # nobody was called


@orchestra("test_undeclared_rewards")
async def undeclared(task, teller):
    await teller("hello")
    return Outcome(rewards={"teller": 1.0})


@orchestra("test_declared_rewards", lowest_reward=-1.0)
async def declared(task, teller, *, rewards: bool = True):
    await teller("hello")
    return Outcome(rewards={"teller": -3.0}) if rewards else 1.0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("test_undeclared_rewards", {}, "@orchestra('test_undeclared_rewards', lowest_reward=...)"),
        ("test_declared_rewards", {}, "the reward -3.0 of agent teller is below lowest_reward=-1.0"),
        ("test_declared_rewards", {"rewards": False}, "must return Outcome(rewards=...)"),
    ],
)
def test_rewards_of_agents_have_a_least_one(play: Any, name: str, options: dict[str, Any], message: str) -> None:
    rows, _ = play(name, lambda prompt: "a word", keys={"options": options})
    assert fields(rows, "failure") == ["error"] and message in fields(rows, "failure_detail")[0]


def test_a_message_that_cannot_fit_is_not_tokenised(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"raw_prompt": [{"role": "user", "content": "x" * 100_000}]}
    rows, server = play("test_pair", PAIR, row=row, keys={"overlong_prompt": "end"}, prompt_length=64)
    assert fields(rows, "failure") == ["overlong_prompt"] and not server.requests
    assert "of a length that rollout.prompt_length=64 tokens can't have" in rows[-1].extra_fields["failure_detail"]


# Concurrency.


@agent
def left(text):
    """Left."""
    return text


@agent
def right(text):
    """Right."""
    return text


@orchestra("test_gather")
async def gathered(task, left, right):
    first = await left("start")
    results = await asyncio.gather(left("slow one"), right("fast one"), left("middle one"))
    last = await right("end")
    return float([r.text for r in results] == ["slow one", "fast one", "middle one"] and bool(first and last))


@orchestra("test_branches")
async def branches(task, left, right):
    async def twice(who, pause):
        await asyncio.sleep(pause)
        await who(f"{pause} a")
        await who(f"{pause} b")

    await together(twice(left, 0.04), twice(right, 0.01))
    await asyncio.gather(quick(left, "0.03"), quick(right, "0.0"))
    return 1.0


async def quick(who, pause):
    await who(f"{pause} c")
    await who(f"{pause} d")


def echo(prompt: str) -> tuple[float, str]:
    said = prompt.split("user\n")[-1].split("<|im_end|>")[0]
    pause = {"slow one": 0.06, "middle one": 0.03}.get(said)
    return (float(said.split()[0]) if said[0].isdigit() else 0.0) if pause is None else pause, said


def test_rows_of_concurrent_calls_have_a_fixed_order(play: Any) -> None:
    rows, _ = play("test_gather", echo)
    assert rows[0].reward_score == 1.0
    assert fields(rows, "anchor_obs") == ["start", "slow one", "fast one", "middle one", "end"]
    assert fields(rows, "turn_reward") == [0.0, 0.0, 0.0, 0.0, 1.0]
    rows, server = play("test_branches", echo)
    order = ["0.04 a", "0.04 b", "0.01 a", "0.01 b", "0.03 c", "0.03 d", "0.0 c", "0.0 d"]
    assert fields(rows, "anchor_obs") == order
    asked = [prompt.split("user\n")[-1].split("<|im_end|>")[0] for prompt in server.prompts]
    assert asked != order  # they did run at the same time


# Faults.


never: list[str] = []
"""Prompts that reached the engine and get no answer in time."""


@orchestra("test_faulty")
async def faulty(task, left, right, *, how: str = "", times: int = 1):
    if how == "raise_first":
        raise KeyError("nothing yet")
    await left("a")
    if how == "raise":
        raise KeyError("the blackboard")
    if how == "exit":
        raise SystemExit("the blackboard")
    if how == "cancel":
        raise asyncio.CancelledError
    if how == "together":
        await together(left("b"), exits())
    if how == "hang":
        await asyncio.sleep(60)
    if how == "endless":
        while True:
            await left("again")
    if how == "gather":
        await asyncio.gather(right("never"), late())
    if how == "caught":
        try:
            await right("never")
        except OrchestraFailure as failure:
            task.count(failure)
    if how == "orphan":
        never.clear()
        asyncio.ensure_future(right("never"))
        while not never:
            await asyncio.sleep(0.01)
    if how == "sum":
        (await left("b")).reward = 3e38  # of its row with the outcome
        return 3e38
    return {
        "nan": math.nan,
        "square": -1e60,
        "digits": -(10**400),
        "reward_square": "square",
        "object": object(),
        "reply": None,
        "reward": "raise",
        "reward_exit": "exit",
        "text": "12",
    }.get(how, 1.0)


async def exits():
    raise KeyboardInterrupt


async def late():
    await asyncio.sleep(0.02)
    raise KeyError("one branch")


def stuck(prompt: str) -> Any:
    if "never" not in prompt:
        return "fine"
    never.append(prompt)
    return (60.0, "late")


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("how", "keys", "reason", "detail", "agents"),
    [
        ("raise", {}, "error", "KeyError: 'the blackboard'", ["left"]),
        ("exit", {}, "error", "the orchestration raised SystemExit: the blackboard", ["left"]),
        ("cancel", {}, "error", "the orchestration raised CancelledError", ["left"]),
        ("together", {}, "error", "a branch of the orchestration raised KeyboardInterrupt", ["left"]),
        ("hang", {"time_limit_s": 4.0}, "time_limit", "no end within 4.0 s", ["left"]),
        ("endless", {"max_calls": 5}, "max_calls", "max_calls=5", ["left"] * 5),
        ("gather", {}, "error", "KeyError: 'one branch'", ["left"]),
        ("nan", {}, "error", "reward nan", ["left"]),
        ("square", {}, "error", "the reward -1e+60; a reward must be finite, in float32 too", ["left"]),
        ("digits", {}, "error", "must be finite", ["left"]),
        ("sum", {}, "error", "the reward 6e+38; a reward must be finite", ["left"] * 2),
        ("reward_square", {}, "reward_error", "e+60 (no finite number in float32)", ["left"]),
        ("object", {}, "error", "return a reward", ["left"]),
        ("reward", {}, "reward_error", "ZeroDivisionError: in the reward", ["left"]),
        ("reward_exit", {}, "reward_error", "raised SystemExit: 3", ["left"]),
    ],
)
def test_a_failure_ends_its_own_trajectory(
    play: Any, how: str, keys: dict[str, Any], reason: str, detail: str, agents: list[str]
) -> None:
    rows, _ = play("test_faulty", stuck, keys={"options": {"how": how}, **keys})
    assert fields(rows, "agent_id") == agents
    assert fields(rows, "failure") == [""] * (len(rows) - 1) + [reason]
    assert detail in rows[-1].extra_fields["failure_detail"]
    assert rows[-1].extra_fields["failures"] == {reason: 1}
    list_of_dict_to_tensordict([row.as_dict() for row in rows])  # verl can store them
    assert info(rows)[f"failure_{reason}"] == 1.0 and info(rows)["failed"] == 1.0
    assert {row.reward_score for row in rows} == {0.0}
    assert fields(rows, "valid_row") == [True] * len(rows)
    rows, _ = play("test_faulty", stuck, keys={"options": {"how": how}, "on_failure": "exclude", **keys})
    assert fields(rows, "valid_row") == [False] * len(rows)
    assert rows[0].response_mask == [0] * len(rows[0].response_ids)


@orchestra("test_second_fails")
async def second_fails(task, left, *, failing: int = 1):
    said = (await left("go")).text
    if said == "fail":
        raise KeyError("the blackboard")
    return Outcome(reward=float(said), info={"acc": float(said) / 2, "steps": 3.0})


@pytest.mark.parametrize(
    ("metric", "answers", "acc"),
    [
        ("acc", ["fail"], [0.0]),  # the first that ends: DAPO's filter asks every trajectory for it
        ("acc", ["1", "-1", "fail"], [0.5, -0.5, -0.5]),
        (None, ["fail", "1", "fail"], [None, 0.5, 0.0]),
        ("reward", ["fail"], [None]),
    ],
)
def test_a_failed_trajectory_reports_its_scores_as_their_least(
    play: Any, metric: str | None, answers: list[str], acc: list[float | None]
) -> None:
    said = iter(answers)
    algorithm = {"filter_groups": {"enable": True, "metric": metric}}
    rows, _ = play("test_second_fails", lambda _: next(said), times=len(answers), algorithm=algorithm)
    assert [row.extra_fields["reward_extra_info"].get("acc") for row in rows] == acc
    assert ["steps" in row.extra_fields["reward_extra_info"] for row in rows] == [one != "fail" for one in answers]


@pytest.mark.parametrize("how", ["raise", "cancel", "gather", "nan", "endless", "reward"])
def test_what_failing_earns_can_be_said(play: Any, how: str) -> None:
    rows, _ = play("test_faulty", stuck, keys={"options": {"how": how}, "max_calls": 3, "failed_reward": -2.0})
    assert {row.reward_score for row in rows} == {-2.0} and fields(rows, "valid_row") == [True] * len(rows)
    assert fields(rows, "turn_reward") == [0.0] * (len(rows) - 1) + [-2.0]


@pytest.mark.seconds
def test_a_call_that_takes_too_long(play: Any) -> None:
    rows, _ = play("test_faulty", stuck, keys={"options": {"how": "caught"}, "call_timeout_s": 4.0})
    assert fields(rows, "agent_id") == ["left"] and rows[0].reward_score == 1.0
    assert rows[0].extra_fields["failure"] == "" and rows[0].extra_fields["failures"] == {"call_timeout": 1}
    slow = by_role(Left=(60.0, "late"))
    rows, _ = play("test_faulty", slow, keys={"call_timeout_s": 0.05})
    assert rows[0].extra_fields["failure"] == "call_timeout"
    assert "agent left within 0.05 s" in rows[0].extra_fields["failure_detail"]


def test_a_trajectory_without_any_call_is_one_row_outside_the_batch(play: Any) -> None:
    rows, server = play("test_faulty", stuck, keys={"options": {"how": "raise_first"}})
    assert not server.prompts
    (row,) = rows
    assert row.extra_fields["failure"] == "error" and not row.extra_fields["valid_row"]
    assert row.response_mask == [0] and row.response_logprobs == [0.0] and row.prompt_ids
    assert row.extra_fields["min_global_steps"] == row.extra_fields["max_global_steps"] <= 7
    other, _ = play("test_faulty", stuck)
    names = set(other[-1].extra_fields) - {"global_steps"}
    assert names <= set(row.extra_fields)
    list_of_dict_to_tensordict([row.as_dict(), *(one.as_dict() for one in other)])


def test_calls_still_under_way_make_no_row(play: Any) -> None:
    rows, server = play("test_faulty", stuck, keys={"options": {"how": "orphan"}})
    assert len(server.prompts) == 2 and fields(rows, "agent_id") == ["left"]


@orchestra("test_adds_to_the_task")
async def adds_to_the_task(task, asker, teller):
    task.messages.append({"role": "user", "content": f"<|im_end|> {(await asker(task.messages)).text}"})
    task.messages[0]["content"] += "<|im_end|>"
    return (await teller(task.messages)).text


def test_what_an_orchestra_adds_to_the_messages_of_the_data_is_text(play: Any) -> None:
    rows, server = play("test_adds_to_the_task", PAIR)
    assert f"user\n{QUESTION}< |im_end|>" in server.prompts[1] and "user\n< |im_end|> how much?" in server.prompts[1]
    assert info(rows)["control_tokens_split"] == 2.0


def test_an_engine_that_fails_is_raised(play: Any) -> None:
    with pytest.raises(ConnectionError, match="gone"):
        play("test_faulty", lambda prompt: ConnectionError("the engine is gone"))


@orchestra("test_hides")
async def hides(task, left):
    try:
        await left("a")
    except Exception:
        return 1.0


def test_an_engine_that_fails_cannot_be_hidden(play: Any) -> None:
    with pytest.raises(ConnectionError, match="gone"):
        play("test_hides", lambda prompt: ConnectionError("the engine is gone"))


def test_an_orchestration_that_never_works_is_a_mistake(play: Any) -> None:
    for _ in range(HOPELESS - 1):
        rows, _ = play("test_faulty", stuck, keys={"options": {"how": "raise"}})
        assert rows[-1].extra_fields["failure"] == "error"
    with pytest.raises(RuntimeError, match="'test_faulty' failed in each of its first 20 .*the blackboard"):
        play("test_faulty", stuck, keys={"options": {"how": "raise"}})


def test_now_and_then_is_no_mistake(play: Any) -> None:
    play("test_faulty", stuck)
    for _ in range(HOPELESS + 1):
        rows, _ = play("test_faulty", stuck, keys={"options": {"how": "raise"}})
    assert rows[-1].extra_fields["failure"] == "error"


# Prompts.


def test_overlong_prompts_lose_the_middle_of_the_longest_message(play: Any) -> None:
    words = " ".join(f"w{i}" for i in range(400))
    row = {"raw_prompt": [{"role": "user", "content": words}, {"role": "user", "content": "short end"}]}
    rows, server = play("test_pair", PAIR, row=row, prompt_length=200)
    assert [len(r.prompt_ids) <= 200 for r in rows] == [True, True]
    assert len(rows[0].prompt_ids) > 190  # as much as fits
    assert "Ask for a number." in server.prompts[0] and "short end" in server.prompts[0]
    assert "w0 w1" in server.prompts[0] and "w399" in server.prompts[0] and "[...]" in server.prompts[0]
    assert all(cut > 0 for cut in fields(rows, "prompt_tokens_cut"))
    assert info(rows)["prompts_cut"] == 2.0 and rows[-1].extra_fields["failure"] == ""


def test_overlong_prompts_may_end_the_trajectory(play: Any) -> None:
    row = {"raw_prompt": [{"role": "user", "content": "x" * 400}]}
    rows, _ = play("test_pair", PAIR, row=row, prompt_length=100, keys={"overlong_prompt": "end"})
    assert rows[-1].extra_fields["failure"] == "overlong_prompt"
    assert "more than rollout.prompt_length=100" in rows[-1].extra_fields["failure_detail"]
    rows, _ = play("test_pair", PAIR, row=row, prompt_length=8)  # the role alone does not fit
    assert rows[-1].extra_fields["failure"] == "overlong_prompt" and len(rows[0].prompt_ids) == 8


def test_roles_are_overridable_and_may_be_user_text(play: Any, tmp_path: Path) -> None:
    file = tmp_path / "role.txt"
    file.write_text("Tell it from a file.\n")
    agents = {"asker": {"role": "Ask loudly."}, "teller": {"role_file": str(file), "max_tokens": 2}}
    rows, server = play("test_pair", PAIR, keys={"agents": agents, "role_as": "user"})
    assert server.prompts[0] == (f"<|im_start|>user\nAsk loudly.\n\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    assert "user\nTell it from a file.\n\nWhat is" in server.prompts[1]
    assert server.requests[1]["max_tokens"] == 2


SHOWN = [{"user": "Tell a low number.", "assistant": "1"}, {"user": "Tell a high one.", "assistant": "99"}]


def turns(prompt: str) -> list[tuple[str, str]]:
    """Who says what in a prompt, without the begun answer."""
    return [(who, text) for who, _, text in (one.partition("\n") for one in prompt.split("<|im_start|>")[1:-1])]


@pytest.mark.parametrize("source", ["list", "json file", "yaml file", "file of the team"])
def test_examples_are_turns_between_role_and_messages(play: Any, tmp_path: Path, source: str) -> None:
    given: Any = SHOWN
    if source != "list":
        file = tmp_path / ("team.yaml" if "json" not in source else "team.json")
        held = {"teller": SHOWN, "asker": []} if source == "file of the team" else SHOWN
        file.write_text(json.dumps(held) if "json" in source else OmegaConf.to_yaml(OmegaConf.create(held)))
        given = str(file)
    row = {"raw_prompt": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": QUESTION}]}
    rows, server = play("test_pair", PAIR, keys={"agents": {"teller": {"examples": given}}}, row=row)
    end = "<|im_end|>\n"
    shown = [("user", "Tell a low number."), ("assistant", "1"), ("user", "Tell a high one."), ("assistant", "99")]
    assert turns(server.prompts[1]) == [
        (who, text + end)
        for who, text in [
            ("system", "Tell a number.\n\nBe kind."),  # one message: many chat templates refuse a second
            *shown,
            ("user", QUESTION),
            ("user", "how much?"),
        ]
    ]
    assert len(turns(server.prompts[0])) == 2  # the other agent has none
    assert fields(rows, "anchor_obs") == [QUESTION, "how much?"]
    _, server = play("test_pair", PAIR, keys={"agents": {"teller": {"examples": given}}, "role_as": "user"})
    assert turns(server.prompts[1])[0] == ("user", "Tell a number.\n\nTell a low number." + end)


@agent(role="Show.", examples=[{"user": "One?", "assistant": "1"}])
def shower(text):
    return int(text)


@orchestra("test_shown")
async def shown_team(task, shower):
    return (await shower(task.messages)).text


def test_examples_of_the_decorator(play: Any) -> None:
    _, server = play("test_shown", lambda prompt: "12")
    assert [text[:4] for _, text in turns(server.prompts[0])] == ["Show", "One?", "1<|i", "What"]
    _, server = play("test_shown", lambda prompt: "12", keys={"agents": {"shower": {"examples": []}}})
    assert len(turns(server.prompts[0])) == 2
    for examples, message in [
        ([{"user": "One?", "assistant": "one"}], "agent shower: the answer of example 1, 'one', can't be read"),
        ([{"user": "One?"}], "example 1 is .*give {user: ..., assistant: ...}"),
        ([{"user": "One?", "assistant": "1"}, {"user": "", "assistant": "1"}], "example 2: user is ''; give text"),
    ]:
        with pytest.raises(ValueError, match=message):
            agent("shower", role="Show.", examples=examples)(shower.read)
    with pytest.raises(ValueError, match=r"example 1, 'x', can't be read .*\(KeyError: 'x'\)"):
        agent("picker", role="Pick.", examples=[{"user": "Which?", "assistant": "x"}])({"y": 1}.__getitem__)


def test_examples_are_never_shortened(play: Any) -> None:
    words = " ".join(f"w{i}" for i in range(400))
    row = {"raw_prompt": [{"role": "user", "content": words}]}
    long = [{"user": f"{name} " * 20, "assistant": "1"} for name in ("uno", "due")]
    keys = {"agents": {"asker": {"examples": long}}}
    rows, server = play("test_pair", PAIR, row=row, prompt_length=400, keys=keys)
    assert 390 < len(rows[0].prompt_ids) <= 400
    first = server.prompts[0]
    assert all(f"{one['user']}<|im_end|>" in first for one in long) and "Ask for a number.<|im_end|>" in first
    assert "w0 w1" in first and "w399" in first and "[...]" in first
    plain, _ = play("test_pair", PAIR, row=row, prompt_length=400)
    cut, cut_plain = (fields(one, "prompt_tokens_cut")[0] for one in (rows, plain))
    assert cut > cut_plain > 0  # what the examples take is taken from the message
    rows, _ = play("test_pair", PAIR, row=row, prompt_length=120, keys=keys)
    assert rows[-1].extra_fields["failure"] == "overlong_prompt"
    assert "(role and 2 examples stay whole)" in rows[-1].extra_fields["failure_detail"]


def test_mistakes_in_a_file_of_examples_are_named(tmp_path: Path) -> None:
    def tried(text: str) -> None:
        file = tmp_path / "examples.yaml"
        file.write_text(text)
        agents = {"teller": {"examples": str(file)}}
        check(OmegaConf.create({"verl_ext": {"orchestra": {"name": "test_pair", "agents": agents}}}))

    with pytest.raises(OptionError, match="has no examples of teller. Did you mean 'tellr'.*It has: tellr"):
        tried("tellr: []")
    with pytest.raises(OptionError, match="examples.yaml is neither YAML nor JSON"):
        tried("[")
    with pytest.raises(OptionError, match="agents.teller.examples: example 1: assistant is True; give text"):
        tried("- {user: enough, assistant: yes}")  # YAML's true
    with pytest.raises(OptionError, match="examples are None; give a list"):
        tried("")


def test_request_names_of_a_deterministic_run(play: Any) -> None:
    _, server = play("test_pair", PAIR, rollout={"full_determinism": True}, row={"priority": 9})
    assert [r["request_id"] for r in server.requests] == ["det-9-2-asker-1", "det-9-2-teller-2"]


# Selection and configuration.


def test_the_column_and_the_loop_entry_choose_too(play: Any) -> None:
    rows, _ = play("test_pair", lambda prompt: "fine", row={"orchestra": "test_faulty"})
    assert fields(rows, "orchestra") == ["test_faulty"]
    rows, _ = play(None, PAIR, entry={"orchestra": "test_pair", "options": {"rounds": 3}})
    assert len(rows) == 6


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "test_pare"}, "no orchestra is called 'test_pare'. Did you mean 'test_pair'"),
        ({"nam": "x"}, "verl_ext.orchestra.nam is not an option of orchestra. Did you mean 'name'"),
        ({"name": "test_pair", "options": {"round": 2}}, "options.round is not an option .*Did you mean 'rounds'"),
        ({"name": "test_pair", "options": {"rounds": "2"}}, "options.rounds is '2'; give a whole number"),
        ({"name": "test_pair", "options": {"ending": "x"}}, "options.ending is 'x'; choose one of 'text'"),
        ({"name": "test_pair", "agents": {"askr": {}}}, "agents.askr: .*has no such agent. Did you mean 'asker'"),
        (
            {"name": "test_pair", "agents": {"asker": {"rol": "x"}}},
            "agents.asker.rol is not an option of agent. Did you mean 'role'",
        ),
        ({"name": "test_pair", "agents": {"asker": {"model": "gpt"}}}, "model 'gpt'; this run has policy"),
        ({"name": "test_pair", "agents": {"asker": {"role_file": "/none"}}}, "asker.role_file: .*No such file"),
        ({"name": "test_pair", "agents": {"asker": {"role": "a", "role_file": "b"}}}, "both role and role_file"),
        ({"name": "test_pair", "agents": {"asker": {"max_tokens": 0}}}, "asker.max_tokens is 0"),
        ({"name": "test_pair", "agents": {"asker": {"examples": "/none"}}}, "asker.examples: .*No such file"),
        ({"name": "test_pair", "agents": {"asker": {"examples": 3}}}, "asker.examples: examples are 3; give a list"),
        ({"name": "test_pair", "agents": {"asker": {"examples": [["a"]]}}}, r"asker.examples: example 1 is \['a'\]"),
        (
            {"name": "test_pair", "agents": {"teller": {"examples": [{"user": "a", "assistant": "b"}]}}},
            "teller.examples: agent teller: the answer of example 1, 'b', can't be read",
        ),
        ({"name": "test_pair", "call_timeout_s": 0}, "call_timeout_s is 0"),
        ({"name": "test_pair", "max_calls": 0}, "max_calls is 0"),
        ({"name": "test_pair", "on_failure": "ignore"}, "on_failure is 'ignore'; choose one of 'zero_reward'"),
        ({"name": "test_pair", "modules": ["no_such_module"]}, "names 'no_such_module', which can't be imported"),
        ({"name": "search", "retriever": {"kind": "bm26"}}, "retriever: kind is 'bm26'; choose one of bm25, http"),
        ({"name": "search", "retriever": {"kind": "http", "url": "x"}}, "orchestra.retriever.url is 'x'; it begins"),
        ({"name": "search", "retriever": {"kind": "bm25", "corpus": "no.jsonl"}}, "the corpus 'no.jsonl' is not there"),
    ],
)
def test_mistakes_in_the_configuration_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check(OmegaConf.create({"verl_ext": {"orchestra": keys}}))


@pytest.mark.usefixtures("verl_configuration")
def test_a_run_is_refused_before_it_starts() -> None:
    config = compose("ppo_trainer", overrides=["+recipe=dr_mas", "+verl_ext.orchestra.name=solver_verifyer"])
    with pytest.raises(OptionError, match="no orchestra is called 'solver_verifyer'. Did you mean 'solver_verifier'"):
        checks.check(config)


def test_a_right_configuration_passes() -> None:
    lineup = check(OmegaConf.create({"verl_ext": {"orchestra": {"name": "solver_verifier"}}}))
    assert lineup is not None and [one.name for one in lineup.agents] == ["solver", "verifier"]
    assert all(one.role and "  " not in one.role for one in lineup.agents)
    assert check(OmegaConf.create({"verl_ext": {}})) is None


def test_no_orchestra_named(play: Any) -> None:
    with pytest.raises(OptionError, match=r"which orchestra\? Set verl_ext.orchestra.name"):
        play(None, PAIR)


def test_mistakes_in_a_definition_are_named() -> None:
    async def nobody(task, stranger):
        return 1.0

    async def untyped(task, left, *, depth=1):
        return 1.0

    async def alone(task):
        return 1.0

    def plain(task, left):
        return 1.0

    with pytest.raises(ValueError, match="takes an agent 'stranger', which .* does not define above it"):
        orchestra("a")(nobody)
    with pytest.raises(TypeError, match="the option depth needs a type and a default"):
        orchestra("b")(untyped)
    with pytest.raises(TypeError, match="has no agent"):
        orchestra("c")(alone)
    with pytest.raises(TypeError, match="must be an `async def`"):
        orchestra("d")(plain)
    with pytest.raises(ValueError, match="'test_pair' is defined twice"):
        orchestra("test_pair")(gathered)
    with pytest.raises(ValueError, match="use an identifier"):
        Agent("my agent")
    with pytest.raises(TypeError, match="take it as a parameter of the orchestration"):
        left("hello")


# Tools.


@agent(tools=["test_add"])
def calculator(text):
    """Calculate."""
    return text


@orchestra("test_tools")
async def with_tools(task, calculator):
    return (await calculator(task.messages)).text


def test_an_agent_with_tools(play: Any) -> None:
    @function_tool("test_add")
    def add(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: one number.
            b: the other.
        """
        if a == 1:
            raise SystemExit("the tool ends the process")
        return str(a + b)

    try:
        call = '<tool_call>{"name": "test_add", "arguments": %s}</tool_call>'

        def answer(prompt: str) -> str:
            turn = prompt.count("<|im_start|>tool")
            return [call % '{"a": 3, "b": 9}', call % '{"a": 3}', "12"][turn]

        multi_turn = {"multi_turn": {"format": "hermes", "max_parallel_calls": 1, "max_tool_response_length": 256}}
        rows, server = play("test_tools", answer, rollout=multi_turn, response_length=128)
        assert [row.reward_score for row in rows] == [1.0] * 3
        assert fields(rows, "agent_id") == ["calculator"] * 3
        assert "<|im_start|>tool\n12<|im_end|>" in server.prompts[1]
        assert "Error: TypeError" in server.prompts[2] and info(rows)["failure_tool_error"] == 1.0
        again = call % '{"a": 1, "b": 1}'
        keys = {"max_tool_rounds": 2}
        rows, _ = play("test_tools", lambda prompt: again, keys=keys, rollout=multi_turn, response_length=128)
        assert len(rows) == 3 and info(rows)["failure_tool_error"] == 2.0
    finally:
        FUNCTION_TOOL_REGISTRY.pop("test_add")
    with pytest.raises(OptionError, match="has the tool 'test_add', which is not there"):
        play("test_tools", lambda prompt: "12")


@agent(tools=["test_add"])
def boxer(text):
    """Box the sum."""
    return text if text.startswith("box ") else None


@orchestra("test_boxed_tools")
async def with_tools_and_a_form(task, boxer):
    return (await boxer(task.messages)).text.removeprefix("box ")


@pytest.mark.parametrize(
    ("texts", "valid"),
    [(["call", "box 12"], [True, True]), (["call", "12"], [True, False]), (["call"] * 2, [True, False])],
)
def test_a_tool_call_is_a_valid_action_of_an_agent_whose_answers_have_a_form(
    play: Any, added: BaseTool, texts: list[str], valid: list[bool]
) -> None:
    """Beyond the rounds a call is an answer, as any other text."""
    call = '<tool_call>{"name": "test_add", "arguments": {"a": 5, "b": 7}}</tool_call>'

    def answer(prompt: str) -> str:
        text = texts["<|im_start|>tool" in prompt]
        return call if text == "call" else text

    rollout = {"multi_turn": {"format": "hermes"}}
    keys = {"max_tool_rounds": 1}
    rows, _ = play("test_boxed_tools", answer, keys=keys, tools=[added], rollout=rollout, response_length=128)
    assert fields(rows, "is_action_valid") == valid and info(rows)["invalid_boxer"] == valid.count(False)


MCP = "verl_ext.orchestra.mcp"


@pytest.mark.seconds
def test_an_agent_with_tools_of_an_mcp_server(play: Any, sums: dict[str, Any]) -> None:
    """Its schema, its answer in the next prompt; its errors are the tool's; one that ended comes back."""
    call = '<tool_call>{"name": "add", "arguments": %s}</tool_call>'
    died = ['{"a": 13}'] if "command" in sums["sums"] else []
    asked = [*died, '{"a": 3, "b": 9}', '{"a": 7}', '{"what": 1}']

    def answer(prompt: str) -> str:
        turn = prompt.count("<|im_start|>tool")
        return call % asked[turn] if turn < len(asked) else "12"

    keys = {"mcp": sums, "agents": {"calculator": {"tools": ["add"]}}, "tool_timeout_s": 600}
    multi_turn = {"multi_turn": {"format": "hermes", "max_parallel_calls": 1, "max_tool_response_length": 256}}
    rows, server = play("test_tools", answer, keys=keys, rollout=multi_turn, response_length=128)
    assert [row.reward_score for row in rows] == [1.0] * (len(asked) + 1)
    shown = mcp_tools.tools(sums, MCP)["add"].tool_schema.function
    assert (shown.name, shown.description, shown.parameters.required) == ("add", "Add two numbers.", ["a"])
    assert {name: one.type for name, one in shown.parameters.properties.items()} == {
        "a": "integer",
        "b": ["integer", "null"],
    }
    assert "<|im_start|>tool\n12<|im_end|>" in server.prompts[len(died) + 1]
    assert "Error: RuntimeError: Error executing tool add" in server.prompts[len(died) + 2]
    assert info(rows)["failure_tool_error"] == len(died) + 2.0
    assert not died or "Error: " in server.prompts[1]
    mcp_tools.check(sums, MCP)


@pytest.mark.seconds
def test_an_mcp_server_that_says_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And ended."""
    monkeypatch.setattr(mcp_tools, "START_S", 5.0)
    said = tmp_path / "pid"
    with pytest.raises(OptionError, match="mcp.one: .*: no answer in 5 s"):
        mcp_tools.check({"one": {"command": ["sh", "-c", f"echo $$ > {said}; exec sleep 600"]}}, MCP)
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.read_text()), 0)


@pytest.mark.seconds
def test_mcp_servers_that_cannot_be_used_are_refused() -> None:
    for node, words in (
        ({"one": {}}, "mcp.one.*give either command or url"),
        ({"one": {"command": ["true"], "url": "http://127.0.0.1:9"}}, "give either command or url"),
        ({"one": {"comand": ["true"]}}, "comand"),
        ({"one": {"command": ["/no/such/server"]}}, "mcp.one: .*no/such/server"),
        ({"one": {"command": ["true"]}}, "mcp.one: .*true"),
        ({"one": {"url": "http://127.0.0.1:9/mcp"}}, "mcp.one: http://127.0.0.1:9/mcp"),
    ):
        with pytest.raises(OptionError, match=words):
            mcp_tools.check(node, MCP)
    file = str(Path(__file__).with_name("mcp_server.py"))
    twice = {name: {"command": [sys.executable, file]} for name in ("one", "two")}
    with pytest.raises(OptionError, match="one and two both have a tool 'add'"):
        mcp_tools.check(twice, MCP)


class Counting(BaseTool):
    """A tool of verl's with a life of its own."""

    living = 0

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        type(self).living += 1
        return "one", ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return ToolResponse(text=str(parameters["a"] + parameters["b"])), 0.0, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        type(self).living -= 1


@pytest.fixture
def added() -> BaseTool:
    number = {"type": "number", "description": "a number"}
    function = {
        "name": "test_add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]},
    }
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    return Counting({}, schema)


def test_an_agent_with_a_tool_of_verls_configuration(play: Any, added: BaseTool) -> None:
    call = '<tool_call>{"name": "test_add", "arguments": {"a": 5, "b": 7}}</tool_call>'
    rows, _ = play(
        "test_tools",
        lambda prompt: "12" if "tool\n12" in prompt else call,
        tools=[added],
        rollout={"multi_turn": {"format": "hermes"}},
        response_length=128,
    )
    assert len(rows) == 2 and rows[-1].reward_score == 1.0 and Counting.living == 0


def uses(play: Any, tool: Any, **options: Any) -> tuple[list[AgentLoopOutput], str]:
    """A call of `tool` by the calculator, and what it reads of the answer."""
    call = '<tool_call>{"name": "test_add", "arguments": {"a": 5, "b": 7}}</tool_call>'
    multi_turn = {"format": "hermes", **options.pop("multi_turn", {})}
    rows, server = play(
        "test_tools",
        lambda prompt: "12" if "<|im_start|>tool" in prompt else call,
        tools=[tool],
        rollout={"multi_turn": multi_turn},
        response_length=128,
        **options,
    )
    return rows, server.prompts[1].split("<|im_start|>tool\n")[1].split("<|im_end|>")[0]


@pytest.mark.parametrize(
    ("returned", "text", "failures"),
    [
        ((ToolResponse(text="found it"), 0.5, {"hits": 1}), "found it", 0.0),
        ({"right": True}, '{"right": true}', 0.0),
        (ToolResponse(), "", 0.0),
        (ToolResponse(image=["pixels"]), "Error: ValueError: the tool returned an image", 1.0),
    ],
)
def test_what_a_function_returns_is_read_as_verl_reads_it(
    play: Any, added: BaseTool, returned: Any, text: str, failures: float
) -> None:
    rows, shown = uses(play, FunctionTool("test_add", lambda a, b: returned, added.tool_schema))
    assert shown.startswith(text) and bool(shown) == bool(text)
    assert info(rows)["failure_tool_error"] == failures


def test_the_end_of_a_turn_is_no_part_of_what_a_tool_call_said(
    play: Any, added: BaseTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    message = PlainText.message

    def noted(self: PlainText, one: Any) -> Any:
        seen.append(dict(one))
        return message(self, one)

    monkeypatch.setattr(PlainText, "message", noted)
    rows, _ = uses(play, added)
    said = [one["content"] for one in seen if one["role"] == "assistant"]
    assert said == [""] and info(rows)["control_tokens_split"] == 0.0


def test_a_tool_that_is_a_function_has_threads_of_its_own(play: Any, added: BaseTool) -> None:
    tool = FunctionTool("test_add", lambda a, b: threading.current_thread().name, added.tool_schema)
    assert uses(play, tool)[1].startswith("verl_ext-tools")


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ({"tool_response_truncate_side": "left"}, "(truncated)...efgh"),
        ({"tool_response_truncate_side": "right"}, "abcd...(truncated)"),
        ({}, "ab...(truncated)...gh"),
    ],
)
def test_a_long_answer_of_a_tool_is_cut_as_verl_cuts_it(
    play: Any, added: BaseTool, side: dict[str, str], text: str
) -> None:
    tool = FunctionTool("test_add", lambda a, b: "abcdefgh", added.tool_schema)
    assert uses(play, tool, multi_turn={"max_tool_response_length": 4, **side})[1] == text


def test_a_tool_call_of_many_levels_is_text_and_loses_no_rollout(play: Any, added: BaseTool) -> None:
    """The model reads the tool's error and goes on."""
    deep = f'<tool_call>{{"name": "test_add", "arguments": {"[" * 600}{"]" * 600}}}</tool_call>'
    rows, server = play(
        "test_tools",
        lambda prompt: "12" if "<|im_start|>tool" in prompt else deep,
        tools=[added],
        rollout={"multi_turn": {"format": "hermes"}},
        prompt_length=4096,
        response_length=2048,
    )
    assert "tool\nError: " in server.prompts[1] and info(rows)["failure_tool_error"] == 1.0
    assert [row.reward_score for row in rows] == [1.0, 1.0]


def test_a_prompt_that_the_chat_template_refuses_ends_its_own_trajectory(
    play: Any, added: BaseTool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    picky = "{% for m in messages %}{% if 'Error' in m.content %}{{ 1 / 0 }}{% endif %}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", picky + tokenizer.chat_template)
    rows, _ = play(
        "test_tools",
        lambda prompt: '<tool_call>{"name": "test_add", "arguments": [5, 7]}</tool_call>',
        tools=[added],
        rollout={"multi_turn": {"format": "hermes"}},
        response_length=128,
    )
    (row,) = rows
    assert row.extra_fields["failure"] == "error" and row.reward_score == 0.0 and set(row.response_mask) == {1}
    assert row.extra_fields["failure_detail"].startswith("no prompt can be made for agent calculator: ")


class Seeing(Counting):
    """A tool that says what it is told of its row and its conversation."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        self.truth = kwargs["create_kwargs"].get("truth")
        return await super().create()

    async def execute(self, instance_id: str, parameters: dict[str, Any], *, agent_data: Any, **kwargs: Any) -> Any:
        seen = agent_data.extra_fields["seen"] = agent_data.extra_fields.get("seen", 0) + 1
        roles = [message["role"] for message in agent_data.messages]
        return ToolResponse(text=f"{self.truth} {seen} {' '.join(roles)}"), 0.0, {}


@orchestra("test_tools_twice")
async def with_tools_twice(task, calculator):
    await calculator(task.messages)
    return (await calculator(task.messages)).text


@pytest.mark.parametrize(("column", "truth"), [({"test_add": {"create_kwargs": {"truth": "12"}}}, "12"), ({}, "None")])
def test_a_tool_learns_of_its_row_and_its_conversation(
    play: Any, added: BaseTool, column: dict[str, Any], truth: str
) -> None:
    call = '<tool_call>{"name": "test_add", "arguments": {}}</tool_call>'
    _, server = play(
        "test_tools_twice",
        lambda prompt: "12" if "<|im_start|>tool" in prompt else call,
        tools=[Seeing({}, added.tool_schema)],
        rollout={"multi_turn": {"format": "hermes"}},
        row={"tools_kwargs": column},
        response_length=128,
    )
    for seen, prompt in enumerate(server.prompts[1::2], start=1):
        assert f"tool\n{truth} {seen} user assistant<" in prompt


# The teams of the package.


def solutions(*texts: str, verdicts: tuple[str, ...]) -> Callable[[str], str]:
    left_over = {"solve": list(texts), "check": list(verdicts)}
    return lambda prompt: left_over["check" if "You check" in prompt else "solve"].pop(0)


@pytest.mark.parametrize(
    ("texts", "verdicts", "keys", "agents", "reward"),
    [
        (["12"], ["<verdict>approve</verdict>"], {}, "sv", 1.0),
        (["11", "12"], ["no: <verdict>reject</verdict>"], {}, "svs", 1.0),
        (["12", "13"], ["hm"], {}, "svs", 0.0),
        (["12"], ["hm"], {"unparsable_verdict": "approve"}, "sv", 1.0),
        (["12"], [], {"max_loops": 1}, "s", 1.0),
        (["1", "2", "12"], ["<verdict>Reject</verdict>"] * 2, {"max_loops": 3}, "svsvs", 1.0),
    ],
)
def test_solver_verifier(
    play: Any, texts: list[str], verdicts: list[str], keys: dict[str, Any], agents: str, reward: float
) -> None:
    rows, server = play("solver_verifier", solutions(*texts, verdicts=tuple(verdicts)), keys={"options": keys})
    assert [name[0] for name in fields(rows, "agent_id")] == list(agents)
    assert rows[-1].reward_score == reward
    checked = [row.extra_fields["is_action_valid"] for row in rows if row.extra_fields["agent_id"] == "verifier"]
    assert checked == ["verdict" in verdict for verdict in verdicts]
    assert info(rows)["solutions"] == len(texts)
    assert info(rows)["approved"] == float(len(verdicts) == len(texts))
    if agents == "svs":
        assert f"The verifier objects:\n{verdicts[0]}" in server.prompts[2] and texts[0] in server.prompts[2]


def test_solver_verifier_with_the_math_reward(play: Any) -> None:
    answer = solutions(r"So \boxed{\frac{24}{2}}.", verdicts=("<verdict>approve</verdict>",))
    rows, _ = play("solver_verifier", answer, reward_path="pkg://verl_ext.rewards.math")
    assert rows[-1].reward_score == 1.0 and info(rows)["parsed"] == 1.0
    assert fields(rows, "is_action_valid") == [True, True]


CORPUS = [
    {"id": "1", "title": "Bogota", "text": "Bogota has a population of 7674366."},
    {"id": "2", "title": "Paris", "text": "Paris has a population of 2138551."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in CORPUS))
    return {"kind": "bm25", "corpus": str(path), "cache_dir": str(tmp_path / "cache")}


def search_team(query: str = "<search>population of Bogota</search>") -> Callable[[str], str]:
    def answer(prompt: str) -> str:
        if "You decide" in prompt:
            return f"<verify>{'yes' if '7674366' in prompt else 'no'}</verify>"
        if "You search" in prompt:
            return query
        return "<answer>7674366</answer>" if "7674366" in prompt else "<answer>unknown</answer>"

    return answer


QUERY_ROW = {
    "raw_prompt": [{"role": "user", "content": "What is the population of Bogota?"}],
    "reward_model": {"ground_truth": ["7674366"]},
}
QA = "pkg://verl_ext.rewards.qa"


def test_search_team(play: Any, corpus: dict[str, Any]) -> None:
    rows, server = play("search", search_team(), keys={"retriever": corpus}, row=QUERY_ROW, reward_path=QA)
    assert fields(rows, "agent_id") == ["verifier", "searcher", "verifier", "answerer"]
    assert rows[-1].reward_score == 1.0 and rows[-1].extra_fields["answer"] == "7674366"
    assert "Doc 1 (Title: Bogota) Bogota has a population" in server.prompts[2]
    told = info(rows)
    assert all(told[name] == 1.0 for name in ("searches", "searches_found", "searched_first", "answer_retrieved"))
    assert told["answered"] == 1.0


def test_search_team_tells_searching_from_reading(play: Any, corpus: dict[str, Any]) -> None:
    def told(query: str, **row: Any) -> dict[str, float]:
        answers = search_team(query)
        rows, _ = play("search", answers, keys=keys, row={**QUERY_ROW, **row}, reward_path=QA)
        return info(rows)

    keys = {"retriever": corpus, "options": {"max_steps": 2}}
    both = told("<search>population of Paris</search>")  # "population" finds the other city too
    assert both["searches_found"] == both["searched_first"] == both["answer_retrieved"] == 1.0
    keys["options"] = {"max_steps": 2, "top_k": 1}
    wrong = told("<search>Paris</search>")
    assert wrong["searches_found"] == 1.0 and wrong["answer_retrieved"] == wrong["acc"] == 0.0
    unreadable = told("population of Bogota")
    assert unreadable["searched_first"] == unreadable["searches"] == unreadable["answer_retrieved"] == 0.0
    part = told("<search>Bogota</search>", reward_model={"ground_truth": ["767436"]})
    assert part["answer_retrieved"] == 0.0  # a part of a word is not the word
    keys["options"] = {"max_steps": 1}
    assert told("<search>Bogota</search>")["searched_first"] == 0.0  # closed book: only the answerer is called


def test_search_team_at_its_last_step(play: Any, corpus: dict[str, Any]) -> None:
    keys = {"retriever": corpus, "options": {"max_steps": 3}}
    for query, searches in (("no tags", 0.0), ("<search>zzz</search>", 2.0)):
        rows, server = play("search", search_team(query), keys=keys, row=QUERY_ROW, reward_path=QA)
        assert fields(rows, "agent_id") == ["verifier", "searcher"] * 2 + ["answerer"]
        assert rows[-1].reward_score == 0.0 and info(rows)["searches"] == searches
        assert info(rows)["searches_found"] == 0.0
    rows, _ = play("search", lambda prompt: "neither", keys=keys, row=QUERY_ROW, reward_path=QA)
    assert fields(rows, "is_action_valid") == [False] * 5 and info(rows)["answered"] == 0.0


def test_search_team_without_its_retriever(play: Any) -> None:
    down = {"kind": "http", "url": "http://127.0.0.1:9/retrieve", "retries": 0, "timeout_s": 2.0}
    keys = {"retriever": down, "options": {"max_steps": 2}}
    rows, server = play("search", search_team(), keys=keys, row=QUERY_ROW, reward_path=QA)
    assert fields(rows, "agent_id") == ["verifier", "searcher", "answerer"]
    assert rows[-1].extra_fields["failure"] == "" and rows[-1].extra_fields["failures"] == {"retriever_error": 1}
    assert "The search failed." in server.prompts[2] and info(rows)["failure_retriever_error"] == 1.0
    keys["options"]["on_retriever_failure"] = "end"
    rows, _ = play("search", search_team(), keys=keys, row=QUERY_ROW, reward_path=QA)
    assert fields(rows, "agent_id") == ["verifier", "searcher"]
    assert rows[-1].extra_fields["failure"] == "retriever_error"
    rows, _ = play("search", search_team(), row=QUERY_ROW, reward_path=QA)
    assert "no retriever is configured" in rows[-1].extra_fields["failure_detail"]


def planners(plan: str) -> Callable[[str], Any]:
    def answer(prompt: str) -> Any:
        if "You plan" in prompt:
            return plan
        if "You do one part" in prompt:
            part = prompt.split("Your part: ")[1].split("<|im_end|>")[0]
            return (60.0, "late") if part == "never" else (0.03 if part == "3" else 0.0, f"got {part}")
        return "12" if "got 3" in prompt and "got 9" in prompt else "?"

    return answer


def test_planner_worker(play: Any) -> None:
    plan = "<subtask>3</subtask> <subtask>9</subtask><subtask>left out</subtask>"
    rows, server = play("planner_worker", planners(plan), keys={"options": {"max_workers": 2}})
    assert fields(rows, "agent_id") == ["planner", "worker", "worker", "aggregator"]
    assert [part.split()[-1] for part in fields(rows, "anchor_obs")[1:3]] == ["3", "9"]
    assert rows[-1].reward_score == 1.0 and info(rows)["parts"] == 2.0
    rows, _ = play("planner_worker", planners(plan), keys={"options": {"aggregate": False}})
    assert fields(rows, "agent_id") == ["planner"] + ["worker"] * 3
    assert rows[-1].extra_fields["answer"] == "got 3\n\ngot 9\n\ngot left out"


@pytest.mark.seconds
def test_planner_worker_without_a_plan_or_a_worker(play: Any) -> None:
    rows, _ = play("planner_worker", planners("no parts"))
    assert fields(rows, "agent_id") == ["planner", "worker", "aggregator"]
    assert fields(rows, "is_action_valid") == [False, True, True]
    rows, _ = play("planner_worker", planners("no parts"), keys={"options": {"unparsable_plan": "end"}})
    assert fields(rows, "agent_id") == ["planner"] and rows[0].reward_score == 0.0
    plan = "<subtask>never</subtask><subtask>9</subtask>"
    rows, server = play("planner_worker", planners(plan), keys={"call_timeout_s": 4.0})
    assert fields(rows, "agent_id") == ["planner", "worker", "aggregator"]
    assert "(no result: call_timeout)" in server.prompts[-1]
    assert info(rows)["parts_failed"] == 1.0 and rows[-1].extra_fields["failures"] == {"call_timeout": 1}


MATH = str(Path(loop_module.__file__).parents[2] / "rewards" / "math.py")


def reasoner(*turns: str) -> Callable[[str], Any]:
    return lambda prompt: turns[prompt.count("```output")]


def test_python_runs_in_the_sandbox_and_its_output_is_read(play: Any, tokenizer: Any) -> None:
    text = "Let me see.\n```python\nprint(3 + 9)\n```"
    rows, server = play(
        "python",
        reasoner(f"{text}\n```output\n13\n``` so \\boxed{{13}}", "```py\n1/0\n```", "It is \\boxed{12}."),
        reward_path=MATH,
        response_length=256,
    )
    assert [row.reward_score for row in rows] == [1.0] * 3 and fields(rows, "turn_reward") == [0.0, 0.0, 1.0]
    assert "```output\n12\n```" in server.prompts[1] and "13" not in server.prompts[1]
    assert "ZeroDivisionError" in server.prompts[2]
    # What the model has made up after its program is no part of the row.
    assert tokenizer.decode(rows[0].response_ids) == text and len(rows[0].response_logprobs) == len(
        rows[0].response_ids
    )
    assert rows[2].response_ids[-1] == tokenizer.eos_token_id and fields(rows, "is_action_valid") == [True] * 3
    said = info(rows)
    assert (said["programs"], said["programs_failed"], said["answered"], said["void"]) == (2.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("turns", "keys", "numbers"),
    [
        (["no idea"], {}, (0.0, 0.0, 1.0)),
        (["```python\nwhile True: pass\n```", "unsure"], {"options": {"timeout_s": 0.2}}, (1.0, 1.0, 1.0)),
        (["```python\nprint(12)\n```"] * 2, {"options": {"max_turns": 2}}, (1.0, 0.0, 0.0)),
        (["```python\nimport os; os.kill(os.getppid(), 9)\n```", "..."], {}, (1.0, 1.0, 1.0)),
    ],
)
def test_python_without_an_answer_earns_nothing(
    play: Any, turns: list[str], keys: dict[str, Any], numbers: tuple[float, ...]
) -> None:
    rows, _ = play("python", reasoner(*turns), keys=keys, reward_path=MATH, response_length=256)
    assert len(rows) == len(turns) and {row.reward_score for row in rows} == {0.0}
    said = info(rows)
    assert (said["programs"], said["programs_failed"], said["void"]) == numbers and said["answered"] == 0.0
    assert rows[-1].extra_fields["failure"] == ""


@pytest.mark.parametrize(("said", "outcome"), [("I give up.", -1.0), ("Answer: 12", 0.0)])
@pytest.mark.parametrize(
    ("name", "options"),
    [("python", {}), ("search", {"max_steps": 1}), ("planner_worker", {"unparsable_plan": "end"})],
)
def test_no_answer_earns_no_more_than_a_wrong_one(
    play: Any, name: str, options: dict[str, Any], said: str, outcome: float
) -> None:
    """verl's own reward gives a wrong answer -1 here; what is right, but in another form, still earns nothing."""
    row = {"data_source": "math_dapo", "extra_info": {}}
    rows, _ = play(name, lambda prompt: said, keys={"options": options}, row=row, reward_path="")
    assert [one.reward_score for one in rows] == [outcome] and fields(rows, "turn_reward") == [outcome]
    assert fields(rows, "is_action_valid") == [False] and fields(rows, "failure") == [""]


# Models that somebody else serves.


TOLD = {"agents": {"teller": {"model": "strong"}}}


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def serve(*answers: tuple[int, Any]) -> Served:
        made.append(Served(*answers))
        return made[-1]

    yield serve
    for one in made:
        one.close()


@pytest.mark.seconds
def test_an_agent_with_an_endpoint_plays_and_makes_no_row(
    play: Any, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRONG_KEY", "sk-secret")
    strong = served((500, {}), (200, "12"))
    models = strong.models(api_key_env="STRONG_KEY", request={"temperature": 0.5, "seed": 3})
    rows, server = play("test_pair", PAIR, keys={"options": {"rounds": 2}, **TOLD}, models=models)
    assert fields(rows, "agent_id") == ["asker"] * 2 and fields(rows, "model") == ["policy"] * 2
    assert fields(rows, "turn_reward") == [0.25, 1.25]
    assert [row.reward_score for row in rows] == [1.0] * 2 and len(server.requests) == 2
    said = info(rows)
    assert (said["calls"], said["calls_asker"], said["calls_teller"], said["invalid_teller"]) == (4.0, 2.0, 2.0, 0.0)
    assert len(strong.asked) == 3, "the first answer, a 500, was asked for again"
    assert strong.keys == ["Bearer sk-secret"] * 3
    assert strong.asked[-1] == {
        "path": "/v1/chat/completions",
        "model": "big",
        "max_tokens": 4,
        "temperature": 0.5,
        "seed": 3,
        "messages": [
            {"role": "system", "content": "Tell a number."},
            {"role": "user", "content": QUESTION},
            {"role": "user", "content": "how much?"},
        ],
    }


@pytest.mark.parametrize(
    "answer",
    [(400, {"error": {"message": "too long"}}), (500, {}), (200, {"choices": []}), (200, {"choices": 3}), (200, [])],
)
def test_an_endpoint_that_fails_is_a_failure_by_name(play: Any, served: Any, answer: tuple[int, Any]) -> None:
    rows, _ = play("test_pair", PAIR, keys=TOLD, models=served(answer).models(retries=0))
    assert fields(rows, "agent_id") == ["asker"] and rows[0].reward_score == 0.0
    assert fields(rows, "failure") == ["endpoint_error"] and fields(rows, "turn_reward") == [0.0]
    assert info(rows)["failure_endpoint_error"] == 1.0 and info(rows)["calls_teller"] == 0.0


def test_an_endpoint_that_refuses_ends_the_rollout_and_keeps_the_key(
    play: Any, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRONG_KEY", "sk-secret")
    models = served((401, {"error": {"message": "the key sk-secret is unknown"}})).models(api_key_env="STRONG_KEY")
    with pytest.raises(EndpointRefused, match="refuses big: .*the key ... is unknown"):
        play("test_pair", PAIR, keys=TOLD, models=models)
    monkeypatch.delenv("STRONG_KEY")
    with pytest.raises(EndpointRefused, match="variable STRONG_KEY is empty or not set"):
        play("test_pair", PAIR, keys=TOLD, models=models)


@pytest.mark.seconds
def test_an_endpoint_that_says_nothing_in_time(play: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        models = {"strong": {"endpoint": {"url": url, "model": "big", "retries": 0}}}
        rows, _ = play("test_pair", PAIR, keys={**TOLD, "call_timeout_s": 1.0}, models=models)
        assert fields(rows, "failure") == ["call_timeout"]
        models["strong"]["endpoint"]["timeout_s"] = 0.5
        rows, _ = play("test_pair", PAIR, keys=TOLD, models=models)
        assert fields(rows, "failure") == ["endpoint_error"]


async def rewards_the_teller(task, asker, teller):
    """The reward is on an answer that is no row."""
    await asker(task.messages)
    (await teller(task.messages)).reward = 1.0
    return 0.5


orchestra("test_rewards_the_teller")(rewards_the_teller)


async def asks_outside_alone(task, asker, teller):
    """No call is of the run's model."""
    return (await teller(task.messages)).text


orchestra("test_asks_outside_alone")(asks_outside_alone)


def test_what_an_orchestration_may_not_do_with_an_endpoint(play: Any, served: Any) -> None:
    models = served((200, "12")).models()
    rows, _ = play("test_rewards_the_teller", PAIR, keys=TOLD, models=models)
    assert fields(rows, "failure") == ["error"] and rows[0].reward_score == 0.0
    assert "rewarded agent teller, whose model is not of this run" in fields(rows, "failure_detail")[0]
    rows, server = play("test_asks_outside_alone", PAIR, keys=TOLD, models=models)
    assert fields(rows, "agent_id") == ["asker"] and rows[0].response_mask == [0] and not server.requests
    assert info(rows)["calls_teller"] == 1.0


def test_an_endpoint_may_be_written_with_interpolations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAR_URL", "https://far/v1")
    node = {"endpoint": {"url": "${oc.env:FAR_URL}", "model": "big"}}
    found = endpoints_of(OmegaConf.create({"verl_ext": {"models": {"strong": node, "small": {"trained": True}}}}))
    assert {name: (one.url, one.model) for name, one in found.items()} == {"strong": ("https://far/v1", "big")}


@pytest.mark.parametrize(
    ("keys", "endpoint", "message"),
    [
        (TOLD, {"url": "host/v1"}, r"strong\.endpoint\.url is 'host/v1'; it begins with http"),
        (TOLD, {"url": None}, r"strong\.endpoint\.url is None; give a name"),
        (TOLD, {"model": ""}, r"strong\.endpoint\.model is empty; give the model's name there"),
        (TOLD, {"modle": "x"}, r"strong\.endpoint\.modle is not an option of endpoint\. Did you mean 'model'"),
        (TOLD, {"retries": -1}, r"strong\.endpoint\.retries is -1"),
        (TOLD, {"request": 3}, r"strong\.endpoint\.request is 3; give keys and values"),
        ({}, {}, r"models\.strong: no agent of the orchestra test_pair asks for this model"),
        (
            {"agents": {"asker": {"model": "strong"}, "teller": {"model": "strong"}}},
            {},
            "every agent of test_pair has an endpoint; there is nothing to train",
        ),
        (
            {"agents": {"teller": {"model": "strong", "tools": ["x"]}}},
            {},
            r"teller\.model=strong: an agent whose model is an endpoint calls no tools",
        ),
    ],
)
def test_mistakes_with_an_endpoint_are_named(keys: dict[str, Any], endpoint: dict[str, Any], message: str) -> None:
    node = {"endpoint": {"url": "http://host/v1", "model": "big", **endpoint}}
    config = {"verl_ext": {"orchestra": {"name": "test_pair", **keys}, "models": {"strong": node}}}
    with pytest.raises(OptionError, match=message):
        check(OmegaConf.create(config))
