# SPDX-License-Identifier: Apache-2.0
"""OpenEnv: a real server of its package in an environment of its own, and servers that break, played by our adapter."""

from __future__ import annotations

import gc
import io
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from test_step_wise import _no_host_is_left, act, fields, info, play, play_many, tokenizer  # noqa: F401
from websockets.sync.server import serve

from verl_ext import cli
from verl_ext.rollout.environments import EnvironmentFault, EnvironmentUnavailable
from verl_ext.rollout.environments.protocol import FAULTS, step_result
from verl_ext.rollout.environments.shipped.openenv_env import OpenEnvEnvironment

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = os.environ.get("VERL_EXT_CLIENTS_PYTHON") or str(ROOT / ".venv-clients" / "bin" / "python")
# Takes no seed, two fields and one session at a time; raises, hangs and ends its server on request.
ODD = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import uvicorn
from guess import *

class Move(Action):
    go: str
    far: int = 1

class Place(Observation):
    at: int
    success: bool = False

class Odd(Environment):
    def reset(self):
        self.at = 0
        return Place(at=0)

    def step(self, action):
        if action.go == "raise":
            raise ValueError("it broke")
        if action.go == "die":
            os._exit(1)
        if action.go == "hang":
            time.sleep(60)
        self.at += action.far
        return Place(at=self.at, success=self.at == 3, reward=True if self.at == 3 else None, done=self.at >= 3)

    @property
    def state(self):
        return State()

uvicorn.run(create_fastapi_app(Odd, Move, Place), host="127.0.0.1", port=int(os.environ["PORT"]), log_level="warning")
"""


@contextmanager
def server(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server of OpenEnv on a free port: its address and its process."""
    assert Path(CLIENTS).exists(), f"no Python at {CLIENTS}: run `make venv-clients`"
    port = free_port()
    process = subprocess.Popen([CLIENTS, *arguments], env={**os.environ, "PORT": str(port)})
    try:
        until = time.monotonic() + 300
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None and time.monotonic() < until, "the server does not start"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def guess() -> Iterator[str]:
    with server(str(ROOT / "examples" / "openenv" / "guess.py")) as (url, _):
        yield url


@pytest.fixture(scope="module")
def odd() -> Iterator[str]:
    with server("-c", ODD, str(ROOT / "examples" / "openenv")) as (url, _):
        yield url


def searched(played: OpenEnvEnvironment, seed: int) -> list[int]:
    """The guesses that find the number of a seed."""
    assert played.reset(seed).text == "text: Guess my number, from 1 to 20."
    low, high, guesses = 1, 20, []
    while True:
        guesses.append((low + high) // 2)
        step = step_result(played.step(str(guesses[-1])))
        if step.done:
            assert step.reward == 1.0
            return guesses
        assert step.reward == 0.0
        low, high = (guesses[-1] + 1, high) if "larger" in step.observation.text else (low, guesses[-1] - 1)


@pytest.mark.slow
def test_a_real_server_is_played_and_the_same_seed_gives_the_same_episode(guess: str) -> None:
    played, beside = (OpenEnvEnvironment(guess, action_key="guess") for _ in range(2))
    beside.reset(1)
    found = [searched(played, seed) for seed in (1, 2, 3, 1)]
    assert found[0] == found[3] and found[0] != found[1]
    assert searched(beside, 1) == found[0], "another session is another object"
    played.reset(1)
    taken = step_result(played.step("I guess ten"))
    assert "guess: Input should be a valid integer" in taken.observation.text and not taken.done
    shown = OpenEnvEnvironment(guess, "guess", observation_key="text")
    assert shown.reset(1).text == "Guess my number, from 1 to 20."
    for one in (played, beside, shown):
        one.close()


@pytest.mark.slow
def test_names_of_fields_that_the_server_does_not_have_end_the_run(guess: str) -> None:
    played = OpenEnvEnvironment(guess)
    played.reset(0)
    with pytest.raises(EnvironmentUnavailable, match="action_key='message' is no whole action.*guess: Field required"):
        played.step("10")
    with pytest.raises(EnvironmentUnavailable, match="observation_key='told': .* shows text"):
        OpenEnvEnvironment(guess, "guess", observation_key="told").reset(0)


@pytest.mark.slow
def test_actions_as_json_one_session_at_a_time_and_an_environment_that_raises(odd: str) -> None:
    played = OpenEnvEnvironment(odd, action_key=None)
    assert played.reset(5).text == "at: 0\nsuccess: false"
    for wrong in ("north", "[1]", "{}", '{"go": "north", "far": "x"}', '{"go": "north", "fly": 1}', "[" * 5000):
        assert "The action is not taken" in step_result(played.step(wrong)).observation.text
    assert step_result(played.step('{"go": "north"}')).info == {"success": False}
    with pytest.raises(EnvironmentFault, match="CAPACITY_REACHED: Server at capacity"):
        OpenEnvEnvironment(odd, wait_s=0.3).reset(0)
    threading.Timer(0.5, played.close).start()
    waiting = OpenEnvEnvironment(odd, action_key="go")
    waiting.reset(0)
    with pytest.raises(EnvironmentFault, match="environment_error: .*it broke"):
        waiting.step("raise")
    steps = [step_result(waiting.step("north")) for _ in range(3)]
    assert [step.done for step in steps] == [False, False, True] and steps[-1].reward == 1.0
    assert steps[-1].info == {"success": True}
    waiting.close()


def world(url: str, **kwargs: Any) -> dict[str, Any]:
    return {"name": "openenv", "kwargs": {"base_url": url, **kwargs}}


@pytest.mark.slow
def test_trajectories_are_sessions(guess: str, tokenizer: Any) -> None:  # noqa: F811
    rows = [{"extra_info": {"env_seed": seed}} for seed in (1, 2, 1)]
    texts = [act(str(number)) for number in range(1, 21)]
    found, _ = play_many(tokenizer, texts, rows, environment=world(guess, action_key="guess"))
    assert all(isinstance(trajectory, list) for trajectory in found), found
    assert fields(found[0], "observation") == fields(found[2], "observation")
    assert fields(found[0], "anchor_obs")[0] == "text: Guess my number, from 1 to 20."
    for trajectory in found:
        assert info(trajectory)["success"] == float(sum(fields(trajectory, "turn_reward")) > 0)
        assert fields(trajectory, "stop_reason")[-1] == "done" and len(trajectory) <= 8


@pytest.mark.slow
def test_a_server_that_hangs_ends_the_trajectory_and_one_that_is_gone_the_run(odd: str, tokenizer: Any) -> None:  # noqa: F811
    hangs = {**world(odd, action_key="go"), "step_timeout_s": 1.0, "failed_trajectories": "mask"}
    rows, _ = play(tokenizer, [act("north"), act("hang")], environment=hangs)
    assert fields(rows, "stop_reason")[-1] == "environment_timeout"
    with server("-c", ODD, str(ROOT / "examples" / "openenv")) as (url, process):
        played = OpenEnvEnvironment(url, action_key="go")
        played.reset(0)
        with pytest.raises(EnvironmentFault, match="environment_died: .* ended the session at step"):
            played.step("die")
        assert process.wait(60) == 1
        with pytest.raises(
            EnvironmentUnavailable, match="no OpenEnv server answers at .*base_url='http.*Start it there"
        ):
            play(tokenizer, [act("north")], environment=world(url, action_key="go"))


@pytest.mark.slow
def test_an_episode_in_the_terminal(
    guess: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("20\n1\n"))
    assert cli.main(["play", "openenv", "--kwargs", json.dumps({"base_url": guess, "action_key": "guess"})]) == 0
    out = capsys.readouterr().out
    assert "Guess my number" in out and "action '20'  reward" in out
    gc.collect()
    assert not caplog.records, "its process has ended before the event loop"


# Servers that are none ------------------------------------------------------------------------------------------------

SEEN = '{"type": "observation", "data": {"observation": {"a": 1}, "reward": %s, "done": false}}'


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ("no JSON", "environment_garbage: .* answered reset wrongly"),
        ("[]", "environment_garbage"),
        ("[" * 100_000, "environment_garbage"),
        ('{"data": {"observation": 3}}', "environment_garbage"),
        ('{"data": {"observation": {}, "reward": "much"}}', "environment_garbage"),
        ('{"data": {}}', "environment_error: .* says no observation"),
        (
            '{"data": {"code": "FACTORY_ERROR", "message": "no disk"}}',
            "environment_error: .* says FACTORY_ERROR: no disk",
        ),
        ("x" * (17 << 20), "environment_died: .* ended the session at reset"),
        (None, "environment_died"),
    ],
)
def test_a_server_that_answers_garbage_ends_its_trajectory(says: str | None, message: str) -> None:
    with answering(lambda number: says) as url, pytest.raises(EnvironmentFault, match=message) as caught:
        OpenEnvEnvironment(url).reset(0)
    assert caught.value.reason in FAULTS


def test_a_reward_that_is_no_number_ends_its_trajectory() -> None:
    with answering(lambda number: SEEN % ("NaN" if number else "null")) as url:
        played = OpenEnvEnvironment(url)
        assert played.reset(0).text == "a: 1"
        with pytest.raises(EnvironmentFault, match="finite"):
            step_result(played.step("x"))
        played.close()


def test_metadata_are_not_shown_unless_they_are_asked_for() -> None:
    """Servers of openenv 0.10 put them into the observation, and an environment its secrets into them."""
    said = '{"data": {"observation": {"a": 1, "metadata": {"answer": 42}}, "reward": null, "done": false}}'
    with answering(lambda number: said) as url:
        for key, shown in ((None, "a: 1"), ("a", "1"), ("metadata", '{"answer": 42}')):
            played = OpenEnvEnvironment(url, observation_key=key)
            assert played.reset(0).text == shown
            assert step_result(played.step("x")).observation.text == shown
            played.close()


@contextmanager
def answering(says: Callable[[int], str | None]) -> Iterator[str]:
    """A WebSocket server that answers message `number` of a connection; None: it ends the connection."""

    def handle(connection: Any) -> None:
        for number, _ in enumerate(connection):
            text = says(number)
            if text is None:
                return
            connection.send(text)

    with serve(handle, "127.0.0.1", 0) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.socket.getsockname()[1]}/"
        finally:
            made.shutdown()
            thread.join()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1", "http://no.such.host.invalid"])
def test_an_address_without_a_server_ends_the_run_by_name(url: str, tokenizer: Any) -> None:  # noqa: F811
    with pytest.raises(EnvironmentUnavailable, match=f"base_url='{url}'.*Start it there, or correct the address"):
        play(tokenizer, [act("x")], environment=world(url))


def test_a_misspelt_argument_is_named(tokenizer: Any) -> None:  # noqa: F811
    with pytest.raises(EnvironmentUnavailable, match="does not take the arguments .*'acton_key'"):
        play(tokenizer, [act("x")], environment=world("http://127.0.0.1:9", acton_key="guess"))
    with pytest.raises(EnvironmentUnavailable, match="missing a required argument: 'base_url'"):
        play(tokenizer, [act("x")], environment={"name": "openenv"})


def test_the_list_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["environments"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("openenv")]
    assert line.split()[1] == "yes" and "server" in line
