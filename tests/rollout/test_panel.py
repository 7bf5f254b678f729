# SPDX-License-Identifier: Apache-2.0
"""Panels of tasks: the same ones in the same order under any number of workers and any order of files."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_ext.lab.reproduce import panels
from verl_ext.lab.reproduce.collect import Notes, _panels
from verl_ext.lab.reproduce.prepare import Source, find_source
from verl_ext.rollout.environments.panel import fingerprints, task_of_row
from verl_ext.rollout.environments.protocol import EnvironmentUnavailable
from verl_ext.rollout.environments.runner import open_session

LAKE = {"id": "FrozenLake-v1", "map_size": 8, "is_slippery": False, "view": "local"}
COUNT = {"textworld": 2, "gymnasium": 8}  # a game of TextWorld is compiled
PLAYED = {"textworld": {"rooms": 2, "objects": 2, "quest_length": 1}, "gymnasium": LAKE}


def source(environment: str, kwargs: dict[str, Any], count: int = 8) -> Source:
    draw = {"count": count, "below": 50, "with": [3]}
    return dataclasses.replace(
        find_source("alfworld_in"), environment=environment, kwargs=kwargs, draw=draw, data_source=""
    )


def play(rows: list[dict[str, Any]], workers: int) -> list[str]:
    """The first observations of rows, in their order, by so many workers, each with its share and an event loop."""

    async def one(row: dict[str, Any]) -> str:
        extra = row["extra_info"]
        kwargs = json.loads(extra["environment_kwargs"])
        limits: dict[str, Any] = {"reset_timeout_s": 300, "step_timeout_s": 300, "processes": 4}
        session = open_session(extra["environment"], kwargs, **limits)
        try:
            return (await session.reset(extra["env_seed"], task_of_row(row))).text
        finally:
            await session.close()

    async def share(own: list[dict[str, Any]]) -> list[str]:
        return list(await asyncio.gather(*map(one, own)))

    size = -(-len(rows) // workers)
    shares = [rows[start : start + size] for start in range(0, len(rows), size)]
    with ThreadPoolExecutor(len(shares)) as pool:
        return [text for own in pool.map(lambda own: asyncio.run(share(own)), shares) for text in own]


@pytest.mark.parametrize(
    "environment",
    [pytest.param("textworld", marks=pytest.mark.slow), pytest.param("gymnasium", marks=pytest.mark.seconds)],
)
def test_one_two_and_eight_workers_play_the_same_tasks_in_the_same_order(
    environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_EXT_HOME", str(tmp_path / "first"))
    rows, why = panels.environment_rows(source(environment, PLAYED[environment], count=COUNT[environment]))
    tasks = [task_of_row(row) for row in rows]
    assert not why and len(set(tasks)) == len(rows), "the lake's first view is the same on many maps; its map is not"
    texts = play(rows, 1)
    assert play(rows, 2) == play(rows, 8) == texts
    # On a machine where games are made in another order, the seeds are the same tasks.
    monkeypatch.setenv("VERL_EXT_HOME", str(tmp_path / "second"))
    seeds = [row["extra_info"]["env_seed"] for row in rows]
    again = fingerprints(environment, PLAYED[environment], reversed(seeds))
    assert [again[seed] for seed in seeds] == tasks


@pytest.mark.seconds
def test_a_row_whose_task_is_another_one_ends_the_run_by_name() -> None:
    rows, _ = panels.environment_rows(source("gymnasium", LAKE, count=2))
    seed, (task, other) = rows[0]["extra_info"]["env_seed"], map(task_of_row, rows)
    wrong = {**rows[0], "extra_info": {**rows[0]["extra_info"], "task": other}}
    with pytest.raises(EnvironmentUnavailable, match=f"seed {seed} is task {task} here, .* says {other}"):
        play([wrong], 1)


def fake_alfworld(monkeypatch: pytest.MonkeyPatch, folder: Path, order: int) -> None:
    """ALFWorld's interface over a folder of games that are found in another order each time."""

    class Games:
        def __init__(self, config: Any, train_eval: str) -> None:
            found = [str(path) for path in folder.rglob("*.tw-pddl")]
            random.Random(order).shuffle(found)
            self.game_files = found

        def init_env(self, batch_size: int) -> Any:
            (file,) = self.game_files
            text = f"-= Welcome =-\nYour task is to: {Path(file).parent.name}"
            infos = {"admissible_commands": [["look", "help"]]}
            return SimpleNamespace(reset=lambda: ([text], infos), close=lambda: None)

    for name in ("alfworld", "alfworld.agents", "alfworld.agents.environment"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["alfworld.agents.environment"].get_environment = lambda name: Games  # type: ignore[attr-defined]


def test_shuffled_files_of_alfworld_are_the_same_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_ext.rollout.environments.shipped import alfworld_env

    split = alfworld_env.SPLITS["eval_in_distribution"]
    panel = []
    for order in (0, 1, 2):
        home = tmp_path / f"machine_{order}"
        for number in random.Random(order).sample(range(12), 12):
            game = home / split / f"pick-{number}" / "game.tw-pddl"
            game.parent.mkdir(parents=True)
            game.write_text(f"game {number}")
        alfworld_env.games.cache_clear()
        fake_alfworld(monkeypatch, home, order)
        monkeypatch.setenv("ALFWORLD_DATA", str(home))
        rows, why = panels.environment_rows(source("alfworld", {"split": "eval_in_distribution"}))
        assert not why
        panel.append(panels.digest(panels.tasks_of(rows)))
    assert len(set(panel)) == 1
    # A game that is missing, or another edition of one, is another panel.
    (home / split / "pick-0" / "game.tw-pddl").write_text("another edition")
    rows, _ = panels.environment_rows(source("alfworld", {"split": "eval_in_distribution"}, count=12))
    first = [task_of_row(row) for row in rows]
    (home / split / "pick-0" / "game.tw-pddl").unlink()
    alfworld_env.games.cache_clear()
    rows, _ = panels.environment_rows(source("alfworld", {"split": "eval_in_distribution"}, count=12))
    assert [task_of_row(row) for row in rows] != first
    alfworld_env.games.cache_clear()


def test_a_table_says_which_panel_it_is_of(tmp_path: Path) -> None:
    rows, why = panels.environment_rows(find_source("webshop_test"))
    assert "needs the package 'web_agent_site'" in why, "the list has seeds alone, and says why"
    about = panels.write("webshop_test", rows, why, tmp_path)
    written = json.loads((tmp_path / "webshop_test.panel.json").read_text())
    assert about["tasks"] == len(written["list"]) == 384 and written["digest"] == about["digest"]
    assert about["digest"] != panels.digest(written["list"][::-1]), "the order is part of a panel"

    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "webshop_test.parquet")
    pq.write_table(pa.Table.from_pylist([{"extra_info": {"index": 0}}]), tmp_path / "sums.parquet")
    command = tmp_path / "command.txt"
    command.write_text(f"python -m verl 'data.val_files=[{tmp_path}/webshop_test.parquet,{tmp_path}/sums.parquet]'\n")
    found = panels.of_command(command)
    assert found == {"webshop_test": f"384 tasks, {about['digest'][:16]}"}

    notes = Notes()
    runs: Any = [
        SimpleNamespace(cell=cell, seed=seed, record={"panels": {"train": panel}})
        for cell, seed, panel in (("a", 0, "x"), ("b", 0, "x"), ("a", 1, "y"), ("b", 1, "z"))
    ]
    assert _panels(runs[:2], notes) == {"train": "x"} and not notes.texts()
    assert _panels(runs, notes) == {"train": "seed 0: x; seed 1: y"}
    assert any("other tasks (z) than in another cell (y)" in text for text in notes.texts())
