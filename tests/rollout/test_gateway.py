# SPDX-License-Identifier: Apache-2.0
"""The gateway through verl's agent loop interface: real clients over HTTP, the engine's answers scripted."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest
from chat_server import Served
from hydra import compose, initialize_config_dir
from loops import QUESTION, REWARD, Scripted, columns_of, config_of, make_loop
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

from verl_ext.integration import checks
from verl_ext.integration.parts.advantage.train_agents import TrainAgents
from verl_ext.integration.settings.options import OptionError
from verl_ext.lab.bench import gateway as bench
from verl_ext.recipes import recipe_root, verl_config_dir
from verl_ext.rollout.gateway import server as server_module
from verl_ext.rollout.gateway import settings
from verl_ext.rollout.gateway.loop import AGENT_NAME
from verl_ext.rollout.orchestra import Outcome, agent, orchestra

pytestmark = pytest.mark.usefixtures("fresh_fates")


class Sampler:
    """Draws an answer from the whole vocabulary, control tokens included; the same prompt always gets the same."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **kwargs: Any) -> Any:
        seed = f"{prompt_ids} {sampling_params.get('seed')}".encode()
        drawn = [*hashlib.sha512(seed).digest(), *hashlib.sha512(seed + b"2").digest()]
        ids = [number * 7 % len(self.tokenizer) for number in drawn][: min(24, sampling_params["max_tokens"])]
        return TokenOutput(
            token_ids=ids,
            log_probs=[-number / 256 for number in drawn[: len(ids)]],
            extra_fields={"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7},
        )


Play = Callable[..., list[AgentLoopOutput]]


@pytest.fixture
def play(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Plays a trajectory of a function, or with `times` as many side by side."""
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    agents: dict[str, Any] = {}
    monkeypatch.setattr(settings, "load", agents.__getitem__)

    def run(
        played: Any,
        engine: Any = "12",
        *,
        loop: str = AGENT_NAME,
        now: dict[str, Any] | None = None,
        times: int = 1,
        rollout: dict[str, Any] | None = None,
        row: dict[str, Any] | None = None,
        **keys: Any,
    ) -> Any:
        if callable(played):
            agents["tests:agent"] = played
            keys["agent"] = "tests:agent"
        elif isinstance(played, list):
            keys["command"] = played
        node = {"orchestra": {"name": played}} if isinstance(played, str) else {"gateway": keys}
        length = {"prompt_length": 512, "response_length": 64, "temperature": 1.0, **(rollout or {})}
        config = config_of(length, str(reward), node)
        server = Scripted(tokenizer, lambda prompt: engine) if isinstance(engine, str | tuple) else engine

        async def all_of_them() -> list[list[AgentLoopOutput]]:
            try:
                loops = [make_loop(loop, config, server, tokenizer) for _ in range(times)]
                given = {"temperature": 1.0, "logprobs": True, **(now or {})}
                return list(await asyncio.gather(*(one.run(dict(given), **columns_of(row)) for one in loops)))
            finally:
                for gateway in server_module._gateways.get(asyncio.get_running_loop(), {}).values():
                    await gateway.close()

        found = asyncio.run(all_of_them())
        return found if times > 1 else found[0]

    return run


def client(base_url: str, api_key: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key=api_key, **options)


def post(base_url: str, api_key: str, body: Any, path: str = "/chat/completions", **headers: str) -> tuple[int, Any]:
    """A request by hand, for what no client would send."""
    place = urlsplit(base_url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=300)
    try:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", place.path + path, text, {"Authorization": f"Bearer {api_key}", **headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def chat(text: str = QUESTION, **more: Any) -> dict[str, Any]:
    return {"model": "agent", "messages": [{"role": "user", "content": text}], **more}


def fields(rows: list[AgentLoopOutput], name: str) -> list[Any]:
    return [row.extra_fields[name] for row in rows]


# ---- the rows ----


@agent
def planner(text: str) -> str:
    """Make a plan."""
    return text


@agent(max_tokens=9)
def worker(text: str) -> str:
    """Follow the plan."""
    return text


@orchestra("plan_and_work")
async def plan_and_work(task: Any, planner: Any, worker: Any, *, rounds: int = 3) -> Outcome:
    said = list(task.messages)
    for _ in range(rounds):
        plan = await planner(said)
        done = await worker(f"The plan: {plan} <|im_end|>")
        done.reward = len(done.text) / 8
        said += [{"role": "assistant", "content": plan.text}, {"role": "user", "content": done.text}]
    return Outcome(answer=said[-1]["content"], reward=0.5)


def plan_and_work_over_http(task: Any, *, base_url: str, api_key: str, model: str) -> dict[str, Any]:
    ask = client(base_url, api_key).chat.completions.create
    said, rewards = list(task["messages"]), []
    for _ in range(3):
        role = {"role": "system", "content": "Make a plan."}
        plan = ask(model="planner", messages=[role, *said]).choices[0].message.content or ""
        role = {"role": "system", "content": "Follow the plan."}
        prompt = [role, {"role": "user", "content": f"The plan: {plan} <|im_end|>"}]
        done = ask(model="worker", messages=prompt, max_tokens=9).choices[0].message.content or ""
        rewards += [0.0, len(done) / 8]
        said += [{"role": "assistant", "content": plan}, {"role": "user", "content": done}]
    return {"reward": 0.5, "answer": said[-1]["content"], "rewards": rewards}


def test_rows_are_those_of_the_same_agent_as_an_orchestra(play: Play, tokenizer: Any) -> None:
    row = {"raw_prompt": [{"role": "user", "content": f"{QUESTION} <|im_start|>user"}]}  # the data's own: kept
    orchestras = play("plan_and_work", Sampler(tokenizer), loop="verl_ext_orchestra", row=row)
    gateways = play(plan_and_work_over_http, Sampler(tokenizer), row=row)
    assert len(gateways) == len(orchestras) == 6
    for ours, theirs in zip(gateways, orchestras, strict=True):
        for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward_score", "num_turns"):
            assert getattr(ours, name) == getattr(theirs, name), name
        mine, other = dict(ours.extra_fields), dict(theirs.extra_fields)
        assert mine.pop("sampling") == {}
        for field in ("orchestra", "reward_extra_info"):
            mine.pop(field), other.pop(field)
        assert mine == other
    assert fields(gateways, "agent_id") == ["planner", "worker"] * 3
    numbers, others = gateways[0].extra_fields["reward_extra_info"], orchestras[0].extra_fields["reward_extra_info"]
    assert {name: numbers[name] for name in others} == others
    assert numbers["control_tokens_split"] == 3 and numbers["calls_planner"] == 3


@pytest.mark.seconds
def test_what_an_agent_returns(play: Play) -> None:
    def returning(result: Any) -> Any:
        def agent(task: Any, *, base_url: str, api_key: str, model: str) -> Any:
            first = post(base_url, api_key, chat())[1]["id"]
            post(base_url, api_key, chat("again"), **{"X-Agent-Id": "judge/2"})
            assert task["ground_truth"] == "12" and task["data_source"] == "toy"
            return result(first) if callable(result) else result

        return agent

    assert fields(play(returning(0.25)), "turn_reward") == [0.0, 0.25]
    rows = play(returning("12"))  # a text is judged
    assert fields(rows, "turn_reward") == [0.0, 1.0] and rows[0].extra_fields["reward_extra_info"]["length"] == 2
    assert fields(rows, "agent_id") == ["agent", "judge/2"]
    assert fields(play(returning({"rewards": [0.5, 1]})), "turn_reward") == [0.5, 1.0]
    rows = play(returning(lambda first: {"rewards": {first: 2.0}, "reward": 1.0, "info": {"steps": 3}}))
    assert fields(rows, "turn_reward") == [2.0, 1.0] and rows[0].extra_fields["reward_extra_info"]["steps"] == 3
    for wrong in (None, {}, {"score": 1}, {"info": {}}, {"rewards": [1]}, {"rewards": {"other": 1}}, object()):
        rows = play(returning(wrong))
        assert rows[-1].extra_fields["failure"] == "agent_error" and fields(rows, "turn_reward") == [0.0, 0.0]


# ---- OpenAI's protocol, by OpenAI's client ----


def test_openai_s_client_in_every_mode(play: Play, tokenizer: Any) -> None:
    seen: dict[str, Any] = {}

    async def agent(task: Any, *, base_url: str, api_key: str, model: str) -> float:
        one, many = client(base_url, api_key), openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        seen["models"] = [entry.id for entry in one.models.list()]
        messages = task["messages"]
        seen["plain"] = one.chat.completions.create(model=model, messages=messages, logprobs=True, seed=3)
        stream = one.chat.completions.create(
            model=model, messages=messages, seed=3, stream=True, stream_options={"include_usage": True}
        )
        seen["stream"] = list(stream)
        asked = [many.chat.completions.create(model=model, messages=messages, max_tokens=2) for _ in range(3)]
        seen["async"] = await asyncio.gather(*asked)
        events = await many.completions.create(model=model, prompt="say", stream=True)
        seen["text stream"] = [event async for event in events]
        seen["text"] = one.completions.create(model=model, prompt="say", logprobs=1)
        seen["ids"] = one.completions.create(model=model, prompt=[5, 6, 7])
        parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        one.chat.completions.create(model=model, messages=parts)
        return 1.0

    rows = play(agent, Sampler(tokenizer))
    assert len(rows) == 9 and seen["models"] == ["agent"]
    plain, choice = seen["plain"], seen["plain"].choices[0]
    assert choice.message.content == tokenizer.decode(rows[0].response_ids, skip_special_tokens=True)
    assert [token.logprob for token in choice.logprobs.content] == rows[0].response_logprobs
    assert plain.usage.prompt_tokens == len(rows[0].prompt_ids) and plain.usage.completion_tokens == 24
    assert plain.model == "agent" and choice.finish_reason == "stop"
    *chunks, usage = seen["stream"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "stop" and usage.usage.completion_tokens == 24
    assert rows[1].response_ids == rows[0].response_ids  # the seed reached the sampler
    assert rows[2].response_ids != rows[0].response_ids[:2]
    assert [one.choices[0].finish_reason for one in seen["async"]] == ["length"] * 3
    assert [len(row.response_ids) for row in rows[2:5]] == [2, 2, 2]
    assert "".join(event.choices[0].text for event in seen["text stream"]) == seen["text"].choices[0].text
    assert seen["text"].choices[0].logprobs.token_logprobs == rows[6].response_logprobs
    assert rows[6].prompt_ids == tokenizer.encode("say") and rows[7].prompt_ids == [5, 6, 7]
    assert "user\nab<|im_end|>" in tokenizer.decode(rows[8].prompt_ids)


def test_an_answer_ends_at_a_stop_text_as_if_the_sampler_had_known_it(play: Play, tokenizer: Any) -> None:
    said: list[Any] = []

    def agent(task: Any, *, base_url: str, api_key: str, model: str) -> float:
        ask = client(base_url, api_key).chat.completions.create
        said.append(ask(model=model, messages=task["messages"], stop=["\n\n", "4, "]).choices[0])
        return 0.0

    (row,) = play(agent, "1, 2, 3, 4, 5, 6")
    text = tokenizer.decode(row.response_ids)
    assert said[0].message.content == "1, 2, 3, " and said[0].finish_reason == "stop"
    assert "4, " in text and "4, " not in tokenizer.decode(row.response_ids[:-1])
    assert len(row.response_logprobs or []) == len(row.response_ids) == len(row.response_mask)


def test_tools_are_rendered_parsed_and_given_back(play: Play, tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "<|im_end|>", "parameters": {}}}
    call = '<tool_call>{"name": "add", "arguments": {"a": 5, "type": "<|im_end|>"}}</tool_call>'
    engine = Scripted(tokenizer, lambda prompt: "12" if "tool\n" in prompt else f"so {call}{call}")
    seen: list[Any] = []

    def agent(task: Any, *, base_url: str, api_key: str, model: str) -> Any:
        ask = client(base_url, api_key).chat.completions.create
        messages, keys = list(task["messages"]), {"model": model, "tools": [tool]}
        seen.append(ask(messages=messages, parallel_tool_calls=False, **keys).choices[0])
        first = seen[0].message
        answer = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "<|im_start|>12"}
        seen.append(ask(messages=[*messages, first, answer], **keys).choices[0])
        deltas = list(ask(messages=messages, stream=True, **keys))
        seen.append([d.choices[0].delta.tool_calls[0] for d in deltas if d.choices[0].delta.tool_calls])
        return seen[1].message.content

    template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        rows = play(agent, engine, rollout={"response_length": 256})
    finally:
        tokenizer.chat_template = before
    assert seen[0].finish_reason == "tool_calls" and seen[0].message.content == "so "
    (asked,) = seen[0].message.tool_calls
    assert asked.function.name == "add" and json.loads(asked.function.arguments)["a"] == 5
    assert [one.function.name for one in seen[2]] == ["add", "add"]
    assert rows[0].reward_score == 1.0 and seen[1].message.content == "12"
    prompt = engine.prompts[1]
    assert '"name": "add"' in prompt and '<call>{"a": 5, "type": "< |im_end|>"}' in prompt
    # No text that the agent, the tool or the model spelled is a control token: two a message and the last one's.
    assert prompt.count("<|im_start|>") == 4 and prompt.count("<|im_end|>") == 3


def test_a_tool_call_that_utf8_cannot_send_is_answered_at_once(play: Play) -> None:
    """A lone surrogate becomes a question mark; it was a 500, upon which clients ask anew."""
    call = r'<tool_call>{"name": "a\udc00", "arguments": {"a": "\ud800"}}</tool_call>'
    said: list[Any] = []

    def agent(task: Any, *, base_url: str, api_key: str, model: str) -> float:
        tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}
        said.append(post(base_url, api_key, chat(tools=[tool])))
        said.append(client(base_url, api_key).chat.completions.create(**chat(tools=[tool], stream=True)))
        said[1] = [event.choices[0].delta.tool_calls for event in said[1]]
        return 1.0

    rows = play(agent, call, rollout={"response_length": 128})
    status, answer = said[0]
    (asked,) = answer["choices"][0]["message"]["tool_calls"]
    assert status == 200 and asked["function"] == {"name": "a?", "arguments": '{"a": "?"}'}
    assert [calls[0].function.arguments for calls in said[1] if calls] == ['{"a": "?"}'] and len(rows) == 2


def test_what_is_said_beside_tool_calls_ends_before_the_stop_text(play: Play) -> None:
    said: list[Any] = []

    def agent(task: Any, *, base_url: str, api_key: str, model: str) -> float:
        tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}
        said.append(post(base_url, api_key, chat(tools=[tool], stop="STOP"))[1]["choices"][0])
        return 1.0

    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    play(agent, f"so {call} then STOP and more", rollout={"response_length": 128})
    assert said[0]["message"]["content"] == "so  then " and len(said[0]["message"]["tool_calls"]) == 1


def test_sampling_of_its_own_is_refused_ignored_or_recorded(play: Play, tokenizer: Any) -> None:
    answers: list[tuple[int, Any]] = []

    def agent(task: Any, *, base_url: str, api_key: str, model: str) -> float:
        for more in ({"temperature": 0.7}, {"temperature": 1, "n": 1}, {"tool_choice": "required"}, {"best_of": 4}):
            answers.append(post(base_url, api_key, chat(**more)))
        return 1.0

    engine = Scripted(tokenizer, lambda prompt: "12")
    rows = play(agent, engine)
    assert [status for status, _ in answers] == [400, 200, 400, 400] and len(rows) == 1
    assert "temperature is not the run's (1.0)" in answers[0][1]["error"]["message"]
    assert rows[0].extra_fields["reward_extra_info"]["requests_refused"] == 3
    for mode, statuses in (("ignore", [200, 200, 200, 200]), ("record", [200, 200, 400, 400])):
        answers.clear(), engine.requests.clear()
        rows = play(agent, engine, sampling=mode)
        assert [status for status, _ in answers] == statuses
        changed = {} if mode == "ignore" else {"temperature": 0.7}
        assert rows[0].extra_fields["sampling"] == changed and rows[1].extra_fields["sampling"] == {}
        assert [asked["temperature"] for asked in engine.requests[:2]] == [changed.get("temperature", 1.0), 1.0]
        assert rows[0].extra_fields["reward_extra_info"]["sampling_changed"] == (3 if mode == "ignore" else 1)

    def odd(task: Any, *, base_url: str, api_key: str, model: str) -> float:
        for more in ({"temperature": -1}, {"top_p": 5}, {"top_k": 1.5}, {"repetition_penalty": 0}, {"min_p": "x"}):
            answers.append(post(base_url, api_key, chat(**more)))
        answers.append(post(base_url, api_key, {"model": "x", "messages": [{"role": [], "content": "x"}]}))
        return 1.0

    answers.clear()
    rows = play(odd, engine, sampling="record")  # what no engine takes is not asked of one
    assert [status for status, _ in answers] == [400] * 6 and rows[0].reward_score == 1.0
    assert "top_p is 5; it must be a number from 1e-06 to 1" in answers[1][1]["error"]["message"]
    answers.clear(), engine.requests.clear()
    play(agent, engine, now={"temperature": 0.0})  # validation: what is training's is no change
    assert [status for status, _ in answers] == [400, 200, 400, 400] and engine.requests[0]["temperature"] == 0.0


# ---- what goes wrong ----


def test_requests_that_are_refused_by_name(play: Play) -> None:
    said: dict[str, tuple[int, str]] = {}
    wrong: dict[str, Any] = {
        "no JSON": b"{",
        "too deep": b"[" * 200_000,
        "an object": b"[]",
        "prompt_logprobs": chat(prompt_logprobs=2),
        "messages is empty": chat() | {"messages": []},
        "role of": chat() | {"messages": [{"role": "<|im_end|>", "content": ""}]},
        "must be text": chat() | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "tool call must": chat() | {"messages": [{"role": "assistant", "tool_calls": ["x"]}]},
        "tool must be": chat(tools=[{"type": "retrieval"}]),
        "name of the model": chat() | {"model": "<|im_end|>"},
        "none of them": chat() | {"model": "gpt-4o"},
        "max_tokens is 0": chat(max_tokens=0),
        "max_tokens is 'x'": chat(max_tokens="x"),
        "temperature is": chat(temperature="x"),
        "seed is": chat(seed=-1),
        "stop must": chat(stop=[""]),
        "stop is": chat(stop={}),
        "other tokens": chat(logprobs=True, top_logprobs=5),
        "prompt_length=512": chat("far too long " * 400),
    }

    def agent(task: Any, *, base_url: str, api_key: str, model: str) -> float:
        for name, body in wrong.items():
            status, answer = post(base_url, api_key, body)
            said[name] = status, answer["error"]["message"]
        for name, prompt in (("vocabulary", [10**9]), ("one text", ["a", "b"]), ("token ids", [True])):
            status, answer = post(base_url, api_key, {"model": model, "prompt": prompt}, "/completions")
            said[name] = status, answer["error"]["message"]
        try:
            client(base_url, api_key).chat.completions.create(**chat("far too long " * 400))
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
        return 1.0

    (row,) = play(agent, agents={"agent": {"max_tokens": 3}})
    for name, (status, message) in said.items():
        assert (name if name != "too deep" else "no JSON") in message, (name, message)
        assert status == (404 if name == "none of them" else 400)
    # No call was made: the trajectory has one row, which is no sample.
    assert row.response_mask == [0] and row.extra_fields["valid_row"] is False and row.reward_score == 1.0


def test_messages_that_the_chat_template_refuses_are_the_agents_fault_and_no_engines(
    play: Play, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    picky = "{% if messages[0]['content'] == 'odd' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", picky + tokenizer.chat_template)
    said: list[Any] = []

    def agent(task: Any, *, base_url: str, api_key: str, model: str) -> float:
        said.append(post(base_url, api_key, chat("odd")))
        return float(post(base_url, api_key, chat())[0] == 200)

    def naive(task: Any, *, base_url: str, api_key: str, model: str) -> float:
        client(base_url, api_key).chat.completions.create(**chat("odd"))
        return 1.0

    (row,) = play(agent)
    assert said[0][0] == 400 and "chat template can't take them: roles must alternate" in said[0][1]["error"]["message"]
    assert row.reward_score == 1.0 and row.extra_fields["failure"] == ""
    (row,) = play(naive)
    assert row.extra_fields["failure"] == "agent_error" and "must alternate" in row.extra_fields["failure_detail"]


@pytest.mark.seconds
def test_keys_live_as_long_as_their_trajectory(play: Play) -> None:
    doors: list[tuple[str, str]] = []
    late: list[int] = []

    def agent(task: Any, *, base_url: str, api_key: str, model: str) -> float:
        for number in range(200):
            assert post(base_url, f"sk-{number}", chat())[0] == 401
        assert post(base_url, "", b"x" * 100)[0] == 401
        assert post(base_url, "x", chat(), Authorization=api_key)[0] == 401  # without the word Bearer
        for url, key in doors:
            late.append(post(url.replace(urlsplit(url).netloc, urlsplit(base_url).netloc), key, chat())[0])
        doors.append((base_url, api_key))
        post(base_url, api_key, chat())
        return 1.0

    assert len(play(agent)) == len(play(agent)) == 1 and late == [401]
    assert len({key for _, key in doors}) == 2 and all(urlsplit(url).hostname == "127.0.0.1" for url, _ in doors)


@pytest.mark.seconds
def test_an_agent_that_is_hostile_or_broken_ends_its_own_trajectory_by_name(play: Play) -> None:
    def ends(work: Callable[[str, str], Any], engine: Any = "12", **keys: Any) -> list[AgentLoopOutput]:
        def agent(task: Any, *, base_url: str, api_key: str, model: str) -> Any:
            post(base_url, api_key, chat())
            return work(base_url, api_key)

        return play(agent, engine, **keys)

    def flood(url: str, key: str) -> float:
        return float(sum(post(url, key, chat())[0] == 401 for _ in range(10_000)) or 1)

    def invalid(url: str, key: str) -> float:
        while True:
            post(url, key, b"{")

    def huge(url: str, key: str) -> float:
        try:
            while post(url, key, chat("x" * 3000))[0] != 401:
                pass
        except OSError:  # cut
            pass
        return 1.0

    def hang(url: str, key: str) -> float:
        while post(url, key, chat())[0] != 401:
            pass
        return 1.0

    def crash(url: str, key: str) -> float:
        raise ZeroDivisionError("in the agent")

    def leave(url: str, key: str) -> float:
        raise SystemExit(3)

    def stopped(url: str, key: str) -> Any:
        async def wait() -> float:
            await asyncio.sleep(3600)  # cancelled, so that its thread ends with the test
            return 1.0

        return wait()

    def long(url: str, key: str) -> Any:
        return client(url, key).chat.completions.create(**chat("far too long " * 400)).id

    for work, reason, detail, keys in (
        (invalid, "max_calls", "max_calls=9", {"max_calls": 9}),
        (huge, "max_bytes", "max_bytes=9000", {"max_bytes": 9000}),
        (hang, "agent_timeout", "agent_timeout_s=0.2", {"agent_timeout_s": 0.2, "max_calls": 10**9}),
        (hang, "time_limit", "no end within 0.2", {"time_limit_s": 0.2, "max_calls": 10**9}),
        (stopped, "agent_timeout", "", {"agent_timeout_s": 0.2}),
        (crash, "agent_error", "ZeroDivisionError: in the agent", {}),
        (leave, "agent_error", "SystemExit: 3", {}),
        (long, "overlong_prompt", "prompt_length=512", {}),
    ):
        rows = ends(work, **keys)
        assert rows[-1].extra_fields["failure"] == reason, (reason, rows[-1].extra_fields["failure_detail"])
        assert detail in rows[-1].extra_fields["failure_detail"]
        assert {row.reward_score for row in rows} == {0.0}
        assert rows[0].extra_fields["reward_extra_info"][f"failure_{reason}"] == 1.0
    rows = ends(crash, on_failure="exclude")
    assert not rows[0].extra_fields["valid_row"] and rows[0].response_mask == [0] * len(rows[0].response_ids)
    rows = ends(flood, max_calls=20)
    assert len(rows) == 20 and rows[0].extra_fields["failure"] == "" and rows[-1].extra_fields["failure"] == "max_calls"


@pytest.mark.seconds
def test_a_body_that_does_not_come_and_an_answer_that_does_not(play: Play, tokenizer: Any) -> None:
    said: list[bytes] = []

    def slow(task: Any, *, base_url: str, api_key: str, model: str) -> str:
        place = urlsplit(base_url)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api_key}\r\n"
        with socket.create_connection((place.hostname, place.port), timeout=60) as connection:
            connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            said.append(connection.recv(4096).split(b"\r\n")[0])
        with socket.create_connection((place.hostname, place.port), timeout=60) as gone:
            gone.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        return agent(task, base_url=base_url, api_key=api_key, model=model)

    def agent(task: Any, *, base_url: str, api_key: str, model: str) -> str:
        return client(base_url, api_key).chat.completions.create(**chat()).choices[0].message.content or ""

    (row,) = play(slow, body_timeout_s=2.0)
    assert b"408" in said[0] and row.reward_score == 1.0
    (row,) = play(agent, (3600.0, "12"), call_timeout_s=0.1)
    assert row.extra_fields["failure"] == "call_timeout" and row.response_mask == [0]

    broken = Scripted(tokenizer, lambda prompt: ValueError("the engine is gone"))
    with pytest.raises(ValueError, match="the engine is gone"):
        play(agent, broken)


def counts(rows: list[AgentLoopOutput]) -> dict[str, float]:
    """What the gateway counts of a trajectory."""
    names = ("calls", "calls_lost", "retries", "calls_rewarded", "requests_refused", "failed")
    return {name: rows[0].extra_fields["reward_extra_info"][name] for name in names}


def late(tokenizer: Any, *delays: float) -> Scripted:
    """An engine that is so slow with its first answers, which it numbers; prompts with "long" get a long one."""
    answers = iter([*enumerate(delays), *((number, 0.0) for number in range(len(delays), 100))])

    def answer(prompt: str) -> tuple[float, str]:
        number, delay = next(answers)
        return delay, f"{number}" + " 7" * (60 if "long" in prompt else 0)

    return Scripted(tokenizer, answer)


def test_an_answer_that_came_too_late_is_lost_and_asking_again_is_a_retry(play: Play, tokenizer: Any) -> None:
    """OpenAI's client gives up after 0.5 s and asks again; the agent knows of one answer and rewards one call."""

    def agent(task: Any, *, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        asked = client(base_url, api_key, timeout=0.5, max_retries=3).chat.completions.create(**chat())
        assert asked.choices[0].message.content == "2"
        time.sleep(1.2)  # until the late answers are there
        return {"rewards": [0.5], "reward": 1.0}

    rows = play(agent, late(tokenizer, 1.5, 1.3))
    assert counts(rows) == {
        **{"calls": 3.0, "calls_lost": 2.0, "retries": 2.0, "calls_rewarded": 1.0},
        **{"requests_refused": 0.0, "failed": 0.0},
    }
    assert fields(rows, "valid_row") == [False, False, True] and fields(rows, "turn_reward") == [0.0, 0.0, 1.5]
    assert [sum(row.response_mask) for row in rows[:2]] == [0, 0] and sum(rows[2].response_mask)


def test_a_late_answer_takes_no_outcome_whatever_its_place(play: Play, tokenizer: Any) -> None:
    """The last request of the trajectory is one that its client has given up, answered or not when it ends."""

    def agent(wait: float) -> Callable[..., float]:
        def played(task: Any, *, base_url: str, api_key: str, model: str) -> float:
            one = client(base_url, api_key, max_retries=0)
            one.chat.completions.create(**chat())
            with pytest.raises(openai.APITimeoutError):
                one.with_options(timeout=0.3).chat.completions.create(**chat("again"))
            time.sleep(wait)
            return 1.0

        return played

    rows = play(agent(0.6), late(tokenizer, 0.0, 0.6))
    assert fields(rows, "valid_row") == [True, False] and fields(rows, "turn_reward") == [1.0, 0.0]
    assert (counts(rows)["calls"], counts(rows)["calls_lost"], counts(rows)["retries"]) == (2.0, 1.0, 0.0)
    rows = play(agent(0.0), late(tokenizer, 0.0, 60.0))
    assert fields(rows, "turn_reward") == [1.0] and counts(rows)["calls_lost"] == 1.0


@pytest.mark.parametrize("read", [0, 20])
def test_a_stream_that_is_closed_before_it_is_read_is_lost(play: Play, tokenizer: Any, read: int) -> None:
    def agent(task: Any, *, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        place, body = urlsplit(base_url), json.dumps(chat("long", stream=True))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api_key}\r\n"
        with socket.create_connection((place.hostname, place.port), timeout=60) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            connection.recv(1, socket.MSG_PEEK)  # it has been answered
            assert len(connection.recv(read)) == read
        with client(base_url, api_key).chat.completions.create(**chat("long", stream=True)) as stream:
            assert "".join(event.choices[0].delta.content or "" for event in stream).startswith("1 7")
        return {"rewards": [1.0]}

    rows = play(agent, late(tokenizer))
    assert fields(rows, "valid_row") == [False, True] and fields(rows, "turn_reward") == [0.0, 1.0]
    assert (counts(rows)["calls_lost"], counts(rows)["retries"]) == (1.0, 1.0)


def test_the_same_request_twice_is_two_samples_if_both_are_read(play: Play, tokenizer: Any) -> None:
    """At once, one after the other, on one connection or on two: nothing is lost and nothing repeated."""

    async def agent(task: Any, *, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as many:
            await asyncio.gather(*(many.chat.completions.create(**chat()) for _ in range(3)))
            await many.chat.completions.create(**chat())
        post(base_url, api_key, chat())
        return {"rewards": [1.0, 2.0, 3.0, 4.0, 5.0]}

    rows = play(agent, late(tokenizer, 0.1, 0.1))
    assert fields(rows, "valid_row") == [True] * 5
    assert counts(rows) == {
        **{"calls": 5.0, "calls_lost": 0.0, "retries": 0.0, "calls_rewarded": 5.0},
        **{"requests_refused": 0.0, "failed": 0.0},
    }


def test_two_ask_at_once_and_the_slower_answer_is_given_up(play: Play, tokenizer: Any) -> None:
    async def agent(task: Any, *, base_url: str, api_key: str, model: str) -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as many:
            asked = [asyncio.ensure_future(many.chat.completions.create(**chat())) for _ in range(2)]
            done, late = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for one in late:
                one.cancel()
            await asyncio.wait(late)
            await asyncio.sleep(1.0)
            return {"rewards": {one.result().id: 1.0 for one in done}}

    rows = play(agent, late(tokenizer, 0.8, 0.1))
    assert sorted(zip(fields(rows, "valid_row"), fields(rows, "turn_reward"), strict=True)) == [
        (False, 0.0),
        (True, 1.0),
    ]
    assert (counts(rows)["calls_lost"], counts(rows)["retries"]) == (1.0, 0.0)


def test_an_agent_that_fails_every_time_is_taken_for_a_mistake(play: Play) -> None:
    def agent(task: Any, *, base_url: str, api_key: str, model: str) -> float:
        raise KeyError("answer")

    with pytest.raises(RuntimeError, match="the agent 'tests:agent' failed in each of its first 20 .*KeyError"):
        play(agent, times=20)


@pytest.mark.seconds
def test_many_trajectories_side_by_side(play: Play, tokenizer: Any) -> None:
    """Agents that block, ``async`` ones too, hold up neither each other nor the server."""

    async def agent(task: Any, *, base_url: str, api_key: str, model: str) -> str:
        post(base_url, api_key, chat())
        return post(base_url, api_key, chat())[1]["choices"][0]["message"]["content"]

    found = play(agent, times=100)
    assert [len(rows) for rows in found] == [2] * 100 and {rows[0].reward_score for rows in found} == {1.0}


# ---- commands ----

PROGRAM = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.read())
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}).encode()
request = urllib.request.Request(url + "/chat/completions", body, {"Authorization": "Bearer " + key})
answer = json.loads(urllib.request.urlopen(request).read())
print("thinking")
print(json.dumps(answer["choices"][0]["message"]["content"]))
"""


def gone(pid: int) -> bool:
    """Whether a process ends, soon; one that nobody has waited for has ended."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.seconds
def test_a_command_of_another_python(play: Play, tmp_path: Path) -> None:
    def ends(program: str, **keys: Any) -> AgentLoopOutput:
        return play([sys.executable, "-S", "-c", program], **keys)[-1]

    assert ends(PROGRAM).reward_score == 1.0
    for program, reason, detail, keys in (
        (PROGRAM.replace("json.dumps(answer", "(answer"), "", "", {}),  # 12 is JSON: a reward
        ("print('all right')", "agent_error", "all right", {}),
        ("pass", "agent_error", "nothing", {}),
        ("import sys; sys.exit('it went wrong')", "agent_error", "code 1: it went wrong", {}),
        ("while True: print('x' * 10000)", "max_bytes", "max_bytes=100000", {"max_bytes": 100_000}),
    ):
        row = ends(program, **keys)
        assert row.extra_fields["failure"] == reason and detail in row.extra_fields["failure_detail"]
    daemon = "import subprocess; subprocess.Popen(['sleep', '20'], start_new_session=True)\nprint(0.5)"
    assert ends(daemon).reward_score == 0.5  # what it leaves behind with its output open holds nobody up
    (row,) = play(["/no/such/program"])
    assert "can't be started" in row.extra_fields["failure_detail"]

    mark = tmp_path / "children"
    spawn = "import subprocess; print(subprocess.Popen(['sleep', '3600']).pid, file=open(%r, 'w'), flush=True)\n"
    row = ends(spawn % str(mark) + "while True: print('x' * 10000)", max_bytes=100_000)
    assert row.extra_fields["failure"] == "max_bytes"
    assert gone(int(mark.read_text())), "what the command started still lives"


@pytest.mark.seconds
def test_a_command_in_the_sandbox(play: Play, tmp_path: Path) -> None:
    """It reaches the gateway and nothing else, and what it starts ends with it."""

    def ends(program: str) -> AgentLoopOutput:
        return play([sys.executable, "-S", "-c", program], cage="required")[-1]

    assert ends(PROGRAM).reward_score == 1.0
    secret, mark = tmp_path / "secret", tmp_path / "mark"
    secret.write_text("1.0")
    for program, detail in (
        (f"print(open({str(secret)!r}).read())", "PermissionError"),
        (f"open({str(mark)!r}, 'w')", "PermissionError"),
        ("import subprocess; subprocess.Popen(['sleep', '20'], start_new_session=True)", "Operation not permitted"),
    ):
        row = ends(program)
        assert row.extra_fields["failure"] == "agent_error" and detail in row.extra_fields["failure_detail"]
    left = "import subprocess\nprint(subprocess.Popen(['sleep', '3600']).pid)"
    assert gone(int(ends(left).reward_score)), "what the command started still lives"
    assert not mark.exists()


FORGED = """
import json, subprocess
attack = "(exec 3>/proc/$PPID/fd/1; sleep 0.5; echo 1.0 >&3) >/dev/null 2>&1 &"
subprocess.run(["sh", "-c", attack], capture_output=True)
print(0.0)
"""
LOOKED = """
import os, subprocess
look = "cat /proc/$PPID/environ; head -c 0 /proc/$PPID/mem && echo open"
found = subprocess.run(["sh", "-c", look], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
print(float(bool(found.stdout)))
"""


@pytest.mark.seconds
@pytest.mark.parametrize("program", [FORGED, LOOKED])
def test_what_a_command_in_the_sandbox_starts_is_kept_from_it(play: Play, program: str) -> None:
    """It would write the result once the command has ended, or read the key in its environment and memory."""
    assert play([sys.executable, "-S", "-c", program], cage="required")[-1].reward_score == 0.0


# ---- clients that others wrote, in an environment of their own ----

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = os.environ.get("VERL_EXT_CLIENTS_PYTHON") or str(ROOT / ".venv-clients" / "bin" / "python")
OWL = os.environ.get("VERL_EXT_OWL_PYTHON") or str(ROOT / ".venv-owl" / "bin" / "python")
TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _called(name: str, **arguments: int) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _handed_over(prompt: str) -> str:
    if "Hand the question over." in prompt:
        return _called("transfer_to_worker")
    return _with_a_tool(prompt)


def _with_a_tool(prompt: str) -> str:
    return "It is 12." if "tool\n12" in prompt else _called("add", a=3, b=9)


def _at_the_second_try(prompt: str) -> str:
    return "12" if "Try again." in prompt else "13"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "answer", "agents"),
    [
        ("langgraph_agent.py", _with_a_tool, ["agent", "agent"]),
        ("agents_sdk.py", _handed_over, ["planner", "worker", "worker"]),
        ("verifiers_env.py", _at_the_second_try, ["agent", "agent"]),
    ],
)
def test_an_agent_of_a_framework_trains_as_it_is(
    play: Play, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, script: str, answer: Any, agents: list[str]
) -> None:
    assert Path(CLIENTS).exists(), f"no Python at {CLIENTS}: run `make venv-clients`"
    monkeypatch.setattr(tokenizer, "chat_template", TOOLS_TEMPLATE)
    engine = Scripted(tokenizer, answer)
    command = [CLIENTS, str(ROOT / "examples" / "gateway" / "clients" / script)]
    rows = play(command, engine, rollout={"prompt_length": 2048, "response_length": 256})
    last = rows[-1].extra_fields
    assert not last["failure"], last["failure_detail"]
    assert [row.extra_fields["agent_id"] for row in rows] == agents
    assert rows[-1].reward_score == 1.0
    for row, prompt in zip(rows, engine.prompts, strict=True):
        assert tokenizer.decode(row.prompt_ids) == prompt
        assert tokenizer.decode(row.response_ids, skip_special_tokens=True) == answer(prompt)


def _workforce(prompt: str) -> str:
    """What OWL's team says to two look-ups and a difference; workers call a tool and give its answer."""
    if "decompose the following task" in prompt:
        parts = "How many live in Ayton?", "How many live in Beeham?", "Subtract."
        return "<tasks>" + "".join(f"<task>{part}</task>" for part in parts) + "</tasks>"
    if "assign multiple tasks" in prompt:
        found = {"0.1": ("search", []), "0.2": ("search", []), "0.3": ("calculator", ["0.1", "0.2"])}
        assigned = [{"task_id": key, "assignee_id": who, "dependencies": of} for key, (who, of) in found.items()]
        return json.dumps({"assignments": assigned})
    if "evaluate its quality" in prompt:
        return json.dumps({"quality_score": 90, "reasoning": "", "issues": [], "recovery_strategy": None})
    place = next(
        (name for name in ("Ayton", "Beeham") if f"live in {name}?\n====" in prompt.partition("parent task")[0]), ""
    )
    if "tool\n" in prompt:
        told = prompt.rpartition("tool\n")[2]
        number = told.partition("population of ")[2].partition(".")[0] if place else told.partition("<|im_end|>")[0]
        return json.dumps({"content": number.strip(), "failed": False})
    if place:
        return f'<tool_call>{{"name": "search", "arguments": {{"query": "{place}"}}}}</tool_call>'
    return '<tool_call>{"name": "calculator", "arguments": {"expression": "30500 - 12100"}}</tool_call>'


@pytest.mark.slow
def test_the_workforce_of_owl_solves_a_task(
    play: Play, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Path(OWL).exists(), f"no Python at {OWL}: run `make venv-clients`"
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "owl"))
    monkeypatch.setenv("VERL_EXT_HOME", str(tmp_path))
    corpus = tmp_path / "corpus.jsonl"
    told = [("Ayton", 30500), ("Beeham", 12100), ("Ceeton", 5)]
    lines = [{"id": name, "title": name, "text": f"{name} has a population of {people}."} for name, people in told]
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("OWL_TOOLS", importlib.import_module("tools").serve(str(corpus)))
    monkeypatch.setattr(tokenizer, "chat_template", TOOLS_TEMPLATE)
    question = "How many more people live in Ayton than in Beeham?"
    rows = play(
        [OWL, str(ROOT / "examples" / "owl" / "workforce.py"), "retry", "replan"],
        Scripted(tokenizer, _workforce),
        row={"raw_prompt": [{"role": "user", "content": question}], "reward_model": {"ground_truth": "18400"}},
        rollout={"prompt_length": 16384, "response_length": 512},
    )
    last = rows[-1].extra_fields
    assert not last["failure"], last["failure_detail"]
    assert rows[-1].reward_score == 1.0
    # A plan, its assignment, three workers that call a tool and answer, and the planner's word on each result.
    agents = fields(rows, "agent_id")
    assert Counter(agents) == {"planner": 4, "coordinator": 1, "worker": 6}
    assert agents[:2] == ["planner", "coordinator"] and agents[-1] == "planner"
    part = TrainAgents(OmegaConf.create({"verl_ext": {"train_agents": ["planner"]}}))
    active: Any = SimpleNamespace(
        columns={"valid_row": np.ones(len(rows), dtype=bool)},
        extra_fields=[row.extra_fields for row in rows],
        tags=[{}] * len(rows),
    )
    part.on_batch(None, active, {})
    assert active.columns["valid_row"].tolist() == [agent == "planner" for agent in agents]
    assert part.metrics == {"rollout/turns_of_other_agents": 7}


@pytest.mark.seconds
def test_the_file_of_the_example_plays_here_and_against_any_server(play: Play, tokenizer: Any) -> None:
    path = ROOT / "examples" / "gateway" / "agent.py"
    solve = runpy.run_path(str(path))["solve"]
    rows = play(solve, Scripted(tokenizer, lambda prompt: "12" if "Wrong." in prompt else "13"))
    assert [row.reward_score for row in rows] == [1.0, 1.0]
    served = Served((200, "13"), (200, "12"))
    try:
        url = served.models()["strong"]["endpoint"]["url"]
        said = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "k", "OPENAI_MODEL": "big"}
        task = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "ground_truth": "12"})
        out = subprocess.run([sys.executable, path], input=task, env=said, capture_output=True, text=True, check=True)
    finally:
        served.close()
    assert out.stdout == "1.0\n" and [len(asked["messages"]) for asked in served.asked] == [1, 3]


# ---- settings ----


@pytest.mark.seconds
def test_settings_are_checked_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def agent(task, *, base_url, api_key, model):\n    return 1.0\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)

    def config(*overrides: str) -> Any:
        with initialize_config_dir(version_base=None, config_dir=str(verl_config_dir())):
            path = f"hydra.searchpath=[file://{recipe_root()}]"
            made = compose("ppo_trainer", ["+recipe=[trloo,gateway]", "algorithm.adv_estimator=mix", path, *overrides])
        checks.complete(made)
        checks.check(made)
        return made

    made = config("verl_ext.gateway.agent='mine.py:agent'")
    assert made.verl_ext.gateway.agent == f"{tmp_path}/mine.py:agent"
    assert made.actor_rollout_ref.rollout.agent.default_agent_loop == AGENT_NAME
    config("verl_ext.gateway.command=[python,agent.py]", "+verl_ext.gateway.agents={planner:{max_tokens:4},judge:{}}")
    embedded = ("actor_rollout_ref.rollout.name=embedded", "actor_rollout_ref.actor.use_dynamic_bsz=true")
    two = ("verl_ext.gateway.agent='mine.py:agent'", "+verl_ext.models.small.model.path=x")
    made = config(*two, "+verl_ext.gateway.agents={planner:{model:small},worker:{}}", *embedded)
    assert [settings.read(made).named(name).model for name in ("planner", "worker")] == ["small", "policy"]
    with pytest.raises(OptionError, match=r"models\.small: no agent of verl_ext\.gateway\.agents asks for it"):
        config(*two, *embedded)
    far = [f"+verl_ext.models.far.endpoint.{key}" for key in ("url=http://x/v1", "model=y")]
    with pytest.raises(OptionError, match=r"models\.far: .* An agent asks endpoints itself"):
        config(two[0], *far, *embedded)
    caged = ("verl_ext.gateway.command=[python]", "verl_ext.gateway.cage=required")
    with pytest.raises(OptionError, match="readable names /no/such/file"):
        config(*caged, "verl_ext.gateway.readable=[/no/such/file]")
    with pytest.raises(OptionError, match=r"gateway\.sampling=record lets .* with dvp\.rho=0\.1 the sampler prunes"):
        config(two[0], "verl_ext.gateway.sampling=record", "++dvp.rho=0.1")
    for override, message in {
        "verl_ext.gateway.agent=null": "none is",
        "verl_ext.gateway.command=[python]": "both are set",
        "verl_ext.gateway.agent=mine": "pkg.module:function",
        "verl_ext.gateway.agent=no.such.module:agent": "can't be loaded",
        "verl_ext.gateway.agent='mine.py:number'": "no function",
        "verl_ext.gateway.max_calls=0": "max_calls is 0",
        "verl_ext.gateway.call_timeout_s=0": "call_timeout_s is 0",
        "verl_ext.gateway.sampling=other": "sampling is 'other'",
        "verl_ext.gateway.cage=required": "cage=required is for a command",
        "verl_ext.gateway.readable=[/tmp]": "readable is for a command in a cage",
        "verl_ext.gateway.memory_mb=512": "memory_mb is for a command in a cage",
        "+verl_ext.gateway.agents={planner:{model:frozen}}": "agents.planner.model is 'frozen'; this run serves policy",
        "+verl_ext.gateway.agents={planner:{tokens:3}}": "agents.planner is",
        "+verl_ext.gateway.agents={planner:{max_tokens:0}}": "max_tokens is 0",
        "verl_ext.gateway.agent_id='a b'": "'a b'",
        "+verl_ext.gateway.timeout=3": "gateway.timeout is not an option",
    }.items():
        with pytest.raises(OptionError, match=message):
            config("verl_ext.gateway.agent='mine.py:agent'", override)


def test_the_benchmark_plays_both_and_says_what_a_call_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--calls", "3", "--rounds", "2", "--trajectories", "8", "--json"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["trajectories"] == 8 and found["trajectories_failed"] == 0
    assert found["gateway_ms"] > 0 and found["orchestra_ms"] > 0 and found["calls_a_second"] > 0
    with pytest.raises(SystemExit):
        bench.main(["--calls", "0"])
