# SPDX-License-Identifier: Apache-2.0
"""Environments: what they may return, how they are run and ended, and the shipped adapters played for real."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from verl_ext.rollout.environments import (
    BUILT_IN,
    EnvironmentFault,
    EnvironmentUnavailable,
    Observation,
    folders,
    load,
    runner,
)
from verl_ext.rollout.environments import data as data_module
from verl_ext.rollout.environments.options import EnvironmentOptions, check_environment, of_row, read_options
from verl_ext.rollout.environments.protocol import Step, from_wire, reset_result, step_result, to_wire
from verl_ext.rollout.environments.shipped import textworld_env
from verl_ext.rollout.environments.shipped.gymnasium_env import plain_text
from verl_ext.rollout.environments.templates import FOLDER, TemplateError, load_template, parse_template

sys.path.insert(0, str(Path(__file__).parent))  # the hosts get this process's path
ZOO = "environment_zoo"


@pytest.fixture(autouse=True, scope="module")
def _no_host_is_left() -> Iterator[None]:
    yield
    runner.end_all()


def session(name: str, reset_s: float = 60.0, step_s: float = 60.0, processes: int = 64, **kwargs: Any) -> Any:
    where = name if name in BUILT_IN else f"{ZOO}:{name}"
    return runner.open_session(where, kwargs, reset_timeout_s=reset_s, step_timeout_s=step_s, processes=processes)


async def play(made: Any, seed: int, choose: Callable[[Observation], str], most: int = 50) -> list[Any]:
    """The first observation and all steps of an episode."""
    try:
        seen = await made.reset(seed)
        story: list[Any] = [seen]
        for _ in range(most):
            step = await made.step(choose(seen))
            story.append(step)
            seen = step.observation
            if step.done:
                break
        return story
    finally:
        await made.close()


def walk(name: str, seed: int = 0, choose: Callable[[Observation], str] | None = None, **kwargs: Any) -> list[Any]:
    return asyncio.run(play(session(name, **kwargs), seed, choose or (lambda seen: "forward")))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pid: int, seconds: float = 120.0) -> bool:
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.parametrize("name", ["Corridor", "Reused", "Gymnastic", "Async"])
def test_an_episode(name: str) -> None:
    story = walk(name)
    assert story[0] == Observation("place 0", ("forward", "back"), "Reach the end.")
    assert [step.observation.text for step in story[1:]] == ["place 1", "place 2", "place 3"]
    assert [step.reward for step in story[1:]] == [0.0, 0.0, 1.0]
    assert [step.done for step in story[1:]] == [False, False, True]
    assert walk(name, seed=1)[0].text == "place 1"


def test_it_runs_in_a_process_of_its_own_that_ends_with_the_trajectory() -> None:
    pid = walk("Corridor")[1].info["pid"]
    assert pid != os.getpid() and gone(pid)


def test_it_imports_what_this_process_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = "__editable__.somebodys_package.finder.__path_hook__"  # no path; its finder looks for it by name
    monkeypatch.setattr(sys, "path", ["", *sys.path, hook])
    path = json.loads(walk("Importing")[0].text)
    assert path[0] == os.getcwd() and hook in path


def test_a_process_is_reused_only_by_an_environment_that_says_so() -> None:
    async def twice(name: str) -> list[int]:
        stories = [await play(session(name), 0, lambda seen: "forward") for _ in range(2)]
        return [story[1].info["pid"] for story in stories]

    first, second = asyncio.run(twice("Reused"))
    assert first == second
    first, second = asyncio.run(twice("Corridor"))
    assert first != second


def test_what_a_killed_run_has_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.end_all()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / f"{folders.PREFIX}left"
    (left / "7").mkdir(parents=True)
    walk("Reused")
    assert not left.exists()
    (used,) = tmp_path.iterdir()
    walk("Corridor")  # another host: the first one's folder is locked
    assert used.exists() and len(list(tmp_path.iterdir())) == 2
    runner.end_all()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_start_has_removed_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its making and its lock it looks like one that a killed run has left."""
    make = tempfile.mkdtemp
    lost = iter((True, True, False))

    def made(prefix: str) -> str:
        folder = make(prefix=prefix, dir=tmp_path)
        if next(lost):
            os.rmdir(folder)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    folder, lock = folders.locked_folder()
    assert os.path.samestat(os.stat(folder), os.fstat(lock)) and next(lost, None) is None
    os.close(lock)


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder of this process and of the hosts that it starts."""
    runner.end_all()
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder
    runner.end_all()


@pytest.mark.parametrize("name", ["Scribe", "ReusedScribe"])
def test_what_an_episode_writes_is_there_for_no_other(name: str, run_folder: Path) -> None:
    async def twice() -> list[Any]:
        return [(await play(session(name), 0, lambda seen: "left", most=2))[1:] for _ in range(2)]

    for first, second in asyncio.run(twice()):
        assert first.info["files"] == [] and second.info["files"] == ["left"]
        assert first.info["made_in"] == str(run_folder) and first.info["folder"] != str(run_folder)
    assert not list(run_folder.iterdir())
    runner.end_all()
    assert not Path(first.info["folder"]).exists()


def test_so_it_is_with_one_that_is_killed(run_folder: Path) -> None:
    async def killed() -> Path:
        made = session("Scribe")
        await made.reset(0)
        folder = Path((await made.step("left")).info["folder"])
        assert (folder / "left").exists()
        with pytest.raises(EnvironmentFault, match="environment_died"):
            await made.step("die")
        await made.close()
        return folder

    folder, until = asyncio.run(killed()), time.monotonic() + 120
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not folder.exists() and folder.parent.exists()
    assert not list(run_folder.iterdir())


FAULTS = {
    "raise": ("environment_error", r"ZeroDivisionError: the world is gone \(environment_zoo.py:\d+\)"),
    "hang": ("environment_timeout", "did not end within 0.4 s"),
    "die": ("environment_died", "its process ended"),
    "nan": ("environment_garbage", "the reward nan"),
    "square": ("environment_garbage", r"the reward -1e\+60; expected a finite number, in float32 too"),
    "text": ("environment_garbage", r"{'x': 1} as its observation"),
    "reward": ("environment_garbage", "the reward 'a lot'"),
    "done": ("environment_garbage", "done='no'"),
    "info": ("environment_garbage", "info of step"),
    "short": ("environment_garbage", r"expected \(observation, reward, done, info\)"),
    "none": ("environment_garbage", "step returned None"),
    "actions": ("environment_garbage", "3 as an action"),
    "anchor": ("environment_garbage", "anchor of step"),
    "noop": ("environment_garbage", "noop_reward is nan; expected a finite number"),
    "huge": ("environment_garbage", "more than 16777216 characters"),
}


@pytest.mark.parametrize("how", FAULTS)
def test_a_step_that_breaks_is_a_fault_with_a_reason(how: str) -> None:
    with pytest.raises(EnvironmentFault, match=FAULTS[how][1]) as caught:
        walk("Broken", how=how, step_s=0.4 if how == "hang" else 60.0)
    assert caught.value.reason == FAULTS[how][0]


@pytest.mark.parametrize("when", ["make", "reset"])
@pytest.mark.parametrize("how", ["raise", "hang", "die"])
def test_so_is_a_beginning_that_breaks(when: str, how: str) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        walk("Broken", how=how, when=when, reset_s=0.4 if how == "hang" else 60.0)
    assert caught.value.reason == FAULTS[how][0]


@pytest.mark.parametrize("how", ["raise", "hang", "nan"])
def test_so_is_a_coroutine_that_breaks(how: str) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        walk("Async", how=how, step_s=0.2 if how == "hang" else 60.0)
    assert caught.value.reason == FAULTS[how][0]


@pytest.mark.seconds
def test_one_that_hangs_is_killed_and_nobody_waits_for_it() -> None:
    async def both() -> tuple[list[Any], list[int]]:
        hanging = [session("Broken", how="hang", step_s=600.0) for _ in range(4)]
        tasks = [asyncio.create_task(play(made, 0, lambda seen: "forward")) for made in hanging]
        while not all(made.connection and made.connection.pid for made in hanging):
            await asyncio.sleep(0.01)
        pids = [made.connection.pid for made in hanging]
        stories = await asyncio.gather(*[play(session("Corridor"), 0, lambda seen: "forward") for _ in range(8)])
        assert not any(task.done() for task in tasks)  # the others have not waited
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        late = [session("Broken", how="hang", step_s=1.0) for _ in range(4)]
        results = await asyncio.gather(
            *[play(made, 0, lambda seen: "forward") for made in late], return_exceptions=True
        )
        assert {type(result) for result in results} == {EnvironmentFault}
        return stories, pids

    stories, pids = asyncio.run(both())
    assert all(len(story) == 4 for story in stories)
    assert all(gone(pid) for pid in pids)


@pytest.mark.seconds
def test_one_that_will_not_close_is_ended() -> None:
    pid = walk("Stubborn")[1].info["pid"]
    assert gone(pid)


def test_a_trajectory_that_is_cancelled_takes_its_process_with_it() -> None:
    async def cancelled() -> int:
        made = session("Broken", how="hang", step_s=60.0)
        task = asyncio.create_task(play(made, 0, lambda seen: "forward"))
        while not (made.connection and made.connection.pid and not made.healthy):
            await asyncio.sleep(0.01)
        pid = made.connection.pid
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pid

    assert gone(asyncio.run(cancelled()))


def test_no_more_processes_than_asked_for() -> None:
    async def crowd() -> int:
        most = 0
        made = [session("Corridor", processes=2) for _ in range(6)]
        tasks = [asyncio.create_task(play(one, 0, lambda seen: "forward")) for one in made]
        while not all(task.done() for task in tasks):
            most = max(most, sum(one.places is not None for one in made))
            await asyncio.sleep(0.001)
        assert all(len(task.result()) == 4 for task in tasks)
        return most

    assert 1 <= asyncio.run(crowd()) <= 2


def test_a_host_that_dies_is_no_fault_of_its_trajectories() -> None:
    """No action did that: the rollout is lost, and not one whose player has broken his world."""

    async def go() -> None:
        made = session("Corridor")
        try:
            await made.reset(0)
            process = runner._hosts[f"{ZOO}:Corridor"].process
            assert process is not None
            process.kill()
            process.wait()
            with pytest.raises(EnvironmentUnavailable, match="its host process ended during step"):
                await made.step("forward")
        finally:
            await made.close()

    asyncio.run(go())


def test_a_host_that_is_killed_is_started_again() -> None:
    walk("Corridor")
    host = runner._hosts[f"{ZOO}:Corridor"]
    assert host.process is not None
    first = host.process
    first.kill()
    first.wait()
    assert len(walk("Corridor")) == 4
    assert host.process is not first


def test_environments_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    import subprocess

    script = tmp_path / "worker.py"
    script.write_text(
        "import asyncio, sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from verl_ext.rollout.environments.runner import open_session, _hosts\n"
        "async def main():\n"
        "    made = open_session('environment_zoo:Broken', {'how': 'hang'}, reset_timeout_s=60, step_timeout_s=60,"
        " processes=1)\n"
        "    await made.reset(0)\n"
        "    await made.step('forward')\n"
        "    print(made.connection.pid, _hosts['environment_zoo:Broken'].process.pid, flush=True)\n"
        "    await made.step('forward')\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        child, host = map(int, worker.stdout.readline().split())
        assert alive(child) and alive(host)
        worker.kill()
    assert gone(child) and gone(host)


def test_the_process_that_forks_them_is_small() -> None:
    import subprocess

    code = (
        "import sys; from verl_ext.rollout.environments import host, load; load('gymnasium'); load('textworld'); "
        "print([m for m in ('torch', 'verl', 'ray', 'omegaconf', 'gymnasium', 'textworld') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gymnasum", "environment 'gymnasum' is not known. Did you mean 'gymnasium'?"),
        ("no_such_module:X", "cannot be imported: No module named 'no_such_module'"),
        (f"{ZOO}:Nothing", "has no attribute 'Nothing'"),
        (f"{ZOO}:Half", "has no method 'reset'"),
        (f"{ZOO}:time", "expected a class"),
        (f"{ZOO}:Needy", "needs the package 'no_such_package_anywhere': pip install it"),
        ("alfworld", "needs the package 'alfworld': pip install alfworld, then run `alfworld-download`"),
        ("webshop", "needs the package 'web_agent_site': put a checkout of WebShop"),
    ],
)
def test_what_cannot_be_played_says_why(name: str, message: str) -> None:
    with pytest.raises(EnvironmentUnavailable) as caught:
        load(name)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("Corridor", {"width": 3}, "does not take the arguments {'width': 3}"),
        ("Unpreparable", {}, "cannot be loaded: FileNotFoundError: no games here"),
        ("gymnasium", {"id": "NoSuchGame-v0"}, "gymnasium.make('NoSuchGame-v0', {'render_mode': 'ansi'}) failed"),
        ("gymnasium", {"id": "FrozenLake-v1", "slippery": True}, "failed"),
        ("gymnasium", {"id": "FrozenLake-v1", "actions": ["left"]}, "has 4 actions; name them in order"),
        ("gymnasium", {"id": "FrozenLake-v1", "view": "none"}, "view='none'; use one of"),
        ("gymnasium", {"id": "Taxi-v4", "map_size": 4}, "map_size and view are for FrozenLake"),
        ("gymnasium", {"id": "Taxi-v4", "describe": "no.such:thing"}, "neither 'ansi' nor an import path"),
    ],
)
def test_settings_that_no_trajectory_could_use_end_the_run(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentUnavailable) as caught:
        walk(name, **kwargs)
    assert message in str(caught.value)


def test_numpy_values_are_plain_values() -> None:
    seen = Observation("x", anchor=np.arange(3), noop_reward=np.float32(-1.0))  # type: ignore[arg-type]
    step = step_result((seen, np.float32(0.5), np.bool_(True), {"n": np.int64(3)}))
    assert step == Step(Observation("x", anchor=[0, 1, 2], noop_reward=-1.0), 0.5, True, {"n": 3})
    assert from_wire(json.loads(json.dumps(to_wire(step)))) == step
    assert reset_result(Observation("x", actions=map(str, [1, 2]))).actions == ("1", "2")  # read once
    with pytest.raises(EnvironmentFault, match="expected a finite number"):
        step_result(("x", 10**400, False, {}))
    five = step_result(("x", 1, False, np.True_, {}))
    assert five.done and five.info == {"truncated": True}
    assert step_result(("x", 1, False, {})).observation.anchor_obs == "x"
    assert step.observation.anchor_obs == [0, 1, 2]
    assert reset_result(("x", {})) == Observation("x")


def optimal_lake(text: str) -> list[str]:
    """The shortest way on a FrozenLake map as it is shown."""
    grid = [line.split() for line in text.splitlines()]
    size = len(grid)
    start = next((r, c) for r in range(size) for c in range(size) if grid[r][c] == "P")
    moves = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    ways: dict[tuple[int, int], list[str]] = {start: []}
    queue = [start]
    for r, c in queue:
        if grid[r][c] == "G":
            return ways[r, c]
        for name, (dr, dc) in moves.items():
            there = (r + dr, c + dc)
            if 0 <= there[0] < size and 0 <= there[1] < size and grid[there[0]][there[1]] != "H" and there not in ways:
                ways[there] = [*ways[r, c], name]
                queue.append(there)
    raise AssertionError(f"no way: {text}")


def test_frozen_lake_has_a_map_a_seed_and_can_be_won() -> None:
    made = {"id": "FrozenLake-v1", "map_size": 4, "is_slippery": False}
    maps = set()
    for seed in range(4):
        ways: list[list[str]] = []

        def choose(seen: Observation, ways: list[list[str]] = ways) -> str:
            ways[:] = ways or [optimal_lake(seen.text)]
            return ways[0].pop(0)

        story = walk("gymnasium", seed=seed, choose=choose, **made)
        assert story[0].actions == ("left", "down", "right", "up") and "goal G" in story[0].task
        assert story[0] == walk("gymnasium", seed=seed, choose=lambda seen: "up", **made)[0]
        assert story[-1].reward == 1.0 and story[-1].done and story[-1].info["success"]
        assert all(not step.info["success"] and step.reward == 0.0 for step in story[1:-1])
        maps.add(story[0].text)
    assert len(maps) > 1


def test_frozen_lake_views() -> None:
    made = {"id": "FrozenLake-v1", "is_slippery": False, "most": 1}
    del made["most"]
    right = ["right"]
    local = walk("gymnasium", choose=lambda seen: "right", view="local", **made)
    assert local[0].text == "on S; left: edge, down: F, right: F, up: edge"
    assert local[1].observation.text == "on F; left: S, down: H, right: F, up: edge"
    place = walk("gymnasium", choose=lambda seen: "right", view="position", **made)
    assert [place[0].text, place[1].observation.text] == ["row 0, column 0", "row 0, column 1"]
    ansi = walk("gymnasium", choose=lambda seen: right[0], describe="ansi", **made)
    assert ansi[0].text.splitlines()[0] == "[S]FFF"
    assert ansi[1].observation.text.splitlines()[0] == "S[F]FF"  # without the line that names the last action


@pytest.mark.parametrize(
    ("made", "first"),
    [
        ({"id": "CliffWalking-v1"}, "row 3 of 0 to 3, column 0 of 0 to 11"),
        ({"id": "Taxi-v4"}, "taxi at row"),
        ({"id": "Blackjack-v1"}, "your sum"),
        ({"id": "Taxi-v4", "describe": "ansi"}, "+---------+"),
    ],
)
def test_toy_text_games_are_told_and_seeded(made: dict[str, Any], first: str) -> None:
    def story() -> list[Any]:
        choices = random.Random(5)
        return asyncio.run(
            play(session("gymnasium", **made), 11, lambda seen: choices.choice(seen.actions or ()), most=8)
        )

    once, again = story(), story()
    assert once == again
    assert once[0].text.startswith(first)
    assert all(isinstance(step.reward, float) and "\x1b" not in step.observation.text for step in once[1:])


def test_cliff_walking_success_is_reaching_the_goal() -> None:
    way = ["up", *["right"] * 11, "down"]
    story = walk("gymnasium", id="CliffWalking-v1", choose=lambda seen: way.pop(0))
    assert story[-1].done and story[-1].info["success"] and not any(s.info["success"] for s in story[1:-1])


def test_a_highlighted_place_is_put_in_brackets() -> None:
    assert plain_text("  (Right)\nS\x1b[41mF\x1b[0mF\nHFG\n") == "S[F]F\nHFG"
    assert plain_text("|\x1b[34;1mR\x1b[0m: |\n|Y:\x1b[43m \x1b[0m|\n  (South)\n") == "|[R]: |\n|Y:[ ]|"


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of games for the module's tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("VERL_EXT_HOME", str(folder))
        yield folder / "textworld"


@pytest.mark.slow
def test_textworld_makes_a_game_a_seed_that_can_be_won(games: Path) -> None:
    made = load("textworld")(rooms=1, objects=3, quest_length=1)
    first = reset_result(made.reset(1))
    files = {path: path.stat().st_mtime_ns for path in games.glob("*/game.z8")}
    assert len(files) == 1 and reset_result(made.reset(1)) == first
    assert {path: path.stat().st_mtime_ns for path in games.glob("*/game.z8")} == files
    assert first.task and first.actions and "look" in first.actions
    assert first.text.startswith("-= ") and not any(mark in first.text for mark in ("$$", "\n>", "0/1"))
    unknown = step_result(made.step("dance with the door"))
    assert not unknown.done and unknown.reward == 0.0 and unknown.observation.actions == first.actions
    # The same look reads the same, however many moves were made.
    assert step_result(made.step("look")).observation.text == step_result(made.step("look")).observation.text
    won = [s for s in (try_command(made, command) for command in first.actions) if s.info["won"]]
    assert won and won[0].reward == 1.0 and won[0].done
    made.close()


def try_command(made: Any, command: str) -> Step:
    made.reset(1)
    return step_result(made.step(command))


@pytest.mark.slow
def test_textworld_in_processes_plays_one_game(games: Path) -> None:
    async def together() -> list[list[Any]]:
        made = [session("textworld", reset_s=60.0, rooms=1, objects=3, quest_length=1) for _ in range(3)]
        return await asyncio.gather(*[play(one, 2, lambda seen: "look", most=2) for one in made])

    before = set(games.glob("*/game.z8"))
    stories = asyncio.run(together())
    assert stories[0] == stories[1] == stories[2]
    assert len(set(games.glob("*/game.z8")) - before) == 1


@pytest.mark.slow
def test_textworld_saves_for_no_other(games: Path, run_folder: Path) -> None:
    def told(*commands: str) -> list[str]:
        left = list(commands)
        made = session("textworld", rooms=2, objects=3, quest_length=1)
        story = asyncio.run(play(made, 2, lambda seen: left.pop(0), most=len(commands)))
        return [step.observation.text for step in story[1:]]

    assert told("inventory", "save", "restore")[2] != (failed := told("restore")[0])
    assert told("restore")[0] == failed and not list(run_folder.iterdir())


def test_textworld_text_has_no_picture_and_no_count_of_moves() -> None:
    told = "\n   ___  \n  |  $$\\  >$$ \n\nWelcome!\n\n-= Den =-\nA den.\n\n\n\n>      -= Den =-0/3"
    assert textworld_env.readable(told) == "Welcome!\n\n-= Den =-\nA den."


class Shop:
    """The interface of WebShop's text environment, with three goals and one page."""

    def __init__(self, **kwargs: Any) -> None:
        self.server = types.SimpleNamespace(goals=["red shoe", "blue hat", "green bag"], user_sessions={})
        self.page = "start"

    def reset(self, session: int) -> tuple[str, None]:
        self.server.user_sessions.setdefault(str(session), {"goal": self.server.goals[session], "asked": 0})
        self.session, self.page = str(session), "start"
        self.instruction_text = f"Instruction: Find me a {self.server.goals[session]}"
        return f"{self.instruction_text} [SEP] Search", None

    def get_available_actions(self) -> dict[str, Any]:
        if self.page == "start":
            return {"has_search_bar": True, "clickables": ["search"]}
        return {"has_search_bar": False, "clickables": ["back to search", "buy now"]}

    def step(self, action: str) -> tuple[str, float, bool, None]:
        self.server.user_sessions[self.session]["asked"] += 1
        if action == "click[buy now]":
            return "Thank you", 0.5 if self.page == "other" else 1.0, True, None
        if action.startswith("search["):
            self.page = "found" if self.server.user_sessions[self.session]["goal"] in action else "other"
        return f"{self.page} [SEP] {self.server.user_sessions[self.session]['asked']}", 0.0, False, None

    def close(self) -> None:
        self.page = "closed"


def test_webshop_adapter_on_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    site, envs = types.ModuleType("web_agent_site"), types.ModuleType("web_agent_site.envs")
    site.__spec__ = importlib_spec("web_agent_site")
    envs.WebAgentTextEnv = Shop  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "web_agent_site", site)
    monkeypatch.setitem(sys.modules, "web_agent_site.envs", envs)
    shop = load("webshop")(first_goal=1)
    for seed in (1, 3, 1):  # two goals are left, and a goal that comes back begins anew
        first = reset_result(shop.reset(seed))
        assert first.task == "Find me a green bag" and first.actions == ("search[<your query>]",)
        found = step_result(shop.step("search[green bag]"))
        assert found.observation.text == "found [SEP] 1"
        assert found.observation.actions == ("click[back to search]", "click[buy now]")
    bought = step_result(shop.step("click[buy now]"))
    assert bought.done and bought.reward == 1.0 and bought.info == {"won": True, "score": 1.0}
    partly = load("webshop")(reward="score")
    partly.reset(0)
    partly.step("search[hats]")
    assert step_result(partly.step("click[buy now]")).reward == 0.5
    for wrong in ({"reward": "all"}, {"observation_mode": "image"}, {"first_goal": 3}):
        with pytest.raises(EnvironmentUnavailable, match=next(iter(wrong))):
            load("webshop")(**wrong)


def importlib_spec(name: str) -> Any:
    from importlib.machinery import ModuleSpec

    return ModuleSpec(name, None)


def test_alfworld_without_its_data_says_what_to_run(tmp_path: Path) -> None:
    from verl_ext.rollout.environments.shipped.alfworld_env import AlfworldEnvironment

    with pytest.raises(EnvironmentUnavailable, match="Run `alfworld-download`, or set ALFWORLD_DATA"):
        AlfworldEnvironment.preload(data=str(tmp_path))
    for wrong in ({"split": "test"}, {"task_types": [7]}):
        with pytest.raises(EnvironmentUnavailable, match=next(iter(wrong))):
            AlfworldEnvironment(**wrong)


CONFIG = {"algorithm": {"adv_estimator": "mix", "mix": {"hgpo": 1.0}, "hgpo": {"history_length": 4}}}


def configured(environment: dict[str, Any] | None, **algorithm: Any) -> dict[str, Any]:
    base = {**CONFIG["algorithm"], **algorithm}
    return {"algorithm": base, "verl_ext": {} if environment is None else {"environment": environment}}


def test_the_history_of_prompt_and_groups_is_one_key() -> None:
    assert read_options(configured({})).history_length == 4
    assert read_options(configured({"history_length": 4})).history_length == 4
    assert read_options(configured({}, mix={"hgpo": 0.0, "trloo": 1.0})).history_length == 2
    assert read_options(configured({"history_length": 7}, mix={"gigpo": 1.0})).history_length == 7
    assert read_options(configured({}, adv_estimator="hgpo", hgpo={})).history_length == 2
    with pytest.raises(ValueError) as caught:
        read_options(configured({"history_length": 2}))
    assert "verl_ext.environment.history_length=2" in str(caught.value)
    assert "algorithm.hgpo.history_length=4" in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"max_step": 3}, "verl_ext.environment.max_step is not an option of environment. Did you mean 'max_steps'?"),
        ({"max_steps": 0}, "verl_ext.environment.max_steps is 0; it must be at least 1"),
        ({"max_steps": 2.5}, "verl_ext.environment.max_steps is 2.5; give a whole number"),
        ({"kwargs": 3}, "verl_ext.environment.kwargs is 3; give keys and values"),
        ({"step_timeout_s": 0}, "step_timeout_s is 0; it must be greater than 0"),
        ({"failed_reward": 1.0}, "failed_reward is 1.0; it must be at most 0"),
        ({"invalid_action": "skip"}, "choose one of 'noop', 'pass'"),
        ({"action_tag": "<a>"}, "give a bare name such as action"),
        ({"history_length": -1}, "history_length is -1"),
        ({"name": "gymnasum"}, "verl_ext.environment.name: environment 'gymnasum' is not known"),
        ({"name": "webshop"}, "verl_ext.environment.name: environment 'webshop' needs the package"),
        ({"template": "nice"}, "verl_ext.environment.template: no prompt template 'nice'"),
    ],
)
def test_a_wrong_setting_is_named_before_the_run(environment: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_environment(configured(environment))
    assert message in str(caught.value)


def test_a_right_setting_passes() -> None:
    check_environment(configured({"name": "gymnasium", "kwargs": {"id": "FrozenLake-v1"}}))
    check_environment(configured(None))
    check_environment({"algorithm": {}})


def test_what_a_row_says_wins() -> None:
    options = EnvironmentOptions(name="gymnasium", kwargs={"id": "Taxi-v4", "a": 1})
    assert of_row(options, {"index": 5}) == ("gymnasium", {"id": "Taxi-v4", "a": 1}, 5)
    info = {"index": 3, "env_seed": 9, "environment": "textworld", "environment_kwargs": '{"a": 2}'}
    assert of_row(options, {"index": 5, "extra_info": info}) == ("textworld", {"id": "Taxi-v4", "a": 2}, 9)
    for row, message in (
        ({"extra_info": {"environment_kwargs": "{"}, "index": 1}, "is not JSON"),
        ({"extra_info": {"environment_kwargs": "[1]"}, "index": 1}, "no JSON object"),
        ({}, "seed is None; put a whole number in extra_info.env_seed"),
        ({"index": "a"}, "seed is 'a'"),
    ):
        with pytest.raises(ValueError, match=message):
            of_row(options, row)
    with pytest.raises(ValueError, match="names no environment: set verl_ext.environment.name"):
        of_row(EnvironmentOptions(), {"index": 1})


def test_shipped_templates_can_be_used() -> None:
    names = sorted(path.stem for path in FOLDER.glob("*.txt"))
    assert names == ["alfworld", "compact", "default", "webshop"]
    for name in names:
        template = load_template(name)
        said = template.messages(
            task="TASK",
            prompt="PROMPT",
            observation="SEEN",
            actions=("a", "b"),
            history=[(2, "OLD", "DID")],
            step=3,
            max_steps=9,
        )
        assert [message["role"] for message in said] == ["user"]
        assert all(word in said[0]["content"] for word in ("SEEN", "a, b", "OLD", "DID"))
        first = template.messages(
            task="", prompt="PROMPT", observation="{SEEN}", actions=None, history=[], step=1, max_steps=9
        )
        assert "{SEEN}" in first[0]["content"] and "any text" in first[0]["content"]
        assert name == "compact" or "PROMPT" in first[0]["content"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "line 1: text before the first section line"),
        ("=== first\n{task}\n=== frist\n", "line 3: unknown section 'frist'; known: system, first, later, next, pair"),
        ("=== first\nx\n=== first\ny", "line 3: a second section 'first'"),
        ("=== first\n{goal}", "section first: {goal} is not known there; known: task, prompt"),
        ("=== first\nx\n=== pair\n{step}", "section pair: {step} is not known there; known: observation"),
        ("=== first\n{oops", "double a brace that is meant as text"),
        ("=== pair\nx", "has no section 'first'"),
    ],
)
def test_a_wrong_template_is_named(text: str, message: str) -> None:
    with pytest.raises(TemplateError) as caught:
        parse_template(text, "mine.txt")
    assert message in str(caught.value) and "mine.txt" in str(caught.value)


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("=== system\nBe {{brave}}.\n=== first\n{task} {observation} {step}/{max_steps}\n")
    said = load_template(str(path)).messages(
        task="T", prompt="P", observation="O", actions=None, history=[(1, "A", "B")], step=2, max_steps=3
    )
    assert said == [{"role": "system", "content": "Be {brave}."}, {"role": "user", "content": "T O 2/3"}]


def test_prompts_of_an_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data" / "train.parquet"
    data_module.main(
        ["--environment", "gymnasium", "--kwargs", '{"id": "Taxi-v4"}', "--seeds", "4:7", "--out", str(path)]
    )
    assert "3 prompts for gymnasium" in capsys.readouterr().out
    rows = pq.read_table(path).to_pylist()
    assert [row["extra_info"]["env_seed"] for row in rows] == [4, 5, 6]
    assert {row["agent_name"] for row in rows} == {"verl_ext_step_wise"}
    assert of_row(EnvironmentOptions(), rows[1]) == ("gymnasium", {"id": "Taxi-v4"}, 5)
    for wrong in (["--seeds", "x"], ["--seeds", "3:3"], ["--seeds", "2", "--kwargs", "{"]):
        with pytest.raises(SystemExit):
            data_module.main(["--environment", "gymnasium", "--out", str(path), *wrong])
    assert "seeds '3:3' are none" in capsys.readouterr().err
    with pytest.raises(ValueError, match="each seed once"):
        data_module.build_rows("gymnasium", [1, 1])
    with pytest.raises(EnvironmentUnavailable, match="not known"):
        data_module.build_rows("gym", [1])
