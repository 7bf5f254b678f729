# SPDX-License-Identifier: Apache-2.0
"""Several models: what a run of one team costs when its agents share one model, and when they have K.

Each run is the demo's command through verl's own trainer. All have the same team, so the turns of a step are the same,
and deal its agents out to K models, each starting from the demo's and learning next to nothing. The team has five
agents that answer one after the other (`--team five`), or is the demo's of two, of which the second answers only where
the first fails (`second_try`).

*Start* is from the command to the end of the first step, *step* the shortest of those after it: other work on the
machine only adds. With more rounds the runs take turns in alternating order, and the least of each figure counts. CPU
seconds are of all processes of the run, Ray's own too; memory is the peak of their proportional set sizes together.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas

from verl_ext.lab.bench._shared import Parser, progress, rounded
from verl_ext.rollout.orchestra import Agent, BoundAgent, Outcome, Task, orchestra

COSTS = "costs.jsonl"
GOALS = {"start_s": 1.3, "step_s": 1.25}
"""Of two models against one."""
TEAM = [Agent(name) for name in ("first", "second", "third", "fourth", "fifth")]


@orchestra("five", TEAM)
async def five(
    task: Task, first: BoundAgent, second: BoundAgent, third: BoundAgent, fourth: BoundAgent, fifth: BoundAgent
) -> Outcome:
    """Five answers to the question; the reward is the share of the right ones."""
    from verl_ext.rollout.reasoning_gym_task import ReasoningGymTask

    problem = ReasoningGymTask.from_extra_info(task.extra_info)
    said = [await one(task.messages) for one in (first, second, third, fourth, fifth)]
    right = [(await problem.judge_async(one.text)).solved for one in said]
    return Outcome(sum(right) / len(right), said[-1].text)


def demo_task(team: str) -> Any:
    """The demo's task for two agents, played by the team."""
    from verl_ext.lab.demo.tasks import SECOND_TRY

    if team == SECOND_TRY.name:
        return SECOND_TRY
    played = [f"+verl_ext.orchestra.name={team}", f"+verl_ext.orchestra.modules=[{__spec__.name}]"]
    settings = replace(SECOND_TRY.settings, samples=4)
    agents = tuple(one.name for one in TEAM)
    return replace(SECOND_TRY, settings=settings, agents=agents, overrides=(*played, "verl_ext.updates_per_batch=2"))


def dealt(agents: Sequence[str], models: int) -> list[str]:
    """Overrides that give each agent one of so many models in turn, the first `policy`."""
    further = [f"+verl_ext.models.model_{number}.trained=true" for number in range(1, models)]
    turns = [(agent, place % models) for place, agent in enumerate(agents)]
    return further + [
        f"+verl_ext.orchestra.agents.{agent}.model=model_{number}" for agent, number in turns if number > 0
    ]


def watch(run: Path, done: threading.Event) -> None:
    """Until `done`, write `COSTS` into the folder of a run that this process has started: a line a look."""
    import psutil

    from verl_ext.lab.report.logs import METRICS_FILE

    cpu: dict[psutil.Process, float] = {}  # of those that have ended, too
    began = time.monotonic()
    with (run / COSTS).open("w", encoding="utf-8") as file:
        for look in itertools.count():
            if done.wait(0.1):
                return
            memory, metrics = 0, run / METRICS_FILE
            for one in psutil.Process().children(recursive=True):
                try:
                    spent = one.cpu_times()
                    cpu[one] = spent.user + spent.system
                    sizes = one.memory_full_info() if look % 20 == 0 else None  # much more work than the rest
                except psutil.Error:  # it has ended
                    continue
                memory += getattr(sizes, "pss", sizes.rss) if sizes else 0
            steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            line = {"steps": steps, "s": time.monotonic() - began, "cpu_s": sum(cpu.values()), "memory": memory}
            file.write(json.dumps(line) + "\n")
            file.flush()


def figures(run: Path) -> dict[str, float]:
    """What a run has cost, from its `COSTS` and metrics."""
    from verl_ext.lab.report.logs import read_run

    looks = pandas.read_json(run / COSTS, lines=True)
    ends = looks[looks["steps"] > 0].groupby("steps").first()  # the first look after each step
    curves = read_run(run).curves
    turns = sum(curve for name, curve in curves.items() if name.startswith("agent/") and name.endswith("/turns"))
    return {
        "start_s": float(ends["s"].iloc[0]),
        "start_cpu_s": float(ends["cpu_s"].iloc[0]),
        "step_s": float(curves["timing_s/step"].iloc[1:].min()),
        "step_cpu_s": float(ends["cpu_s"].diff().min()),
        "turns": float(turns.iloc[1:].mean()),
        "memory_gib": float(looks["memory"].max() / 2**30),
    }


def compare(found: dict[int, dict[str, float]]) -> dict[str, Any]:
    """The figures by number of models, their ratios to the first, and the slope of a line through them: a model's."""
    first, *others = found
    names = [name for name in found[first] if name != "turns"]
    return {
        "models": found,
        "ratio": {count: {name: found[count][name] / found[first][name] for name in found[first]} for count in others},
        "a_model": {
            name: statistics.linear_regression(list(found), [one[name] for one in found.values()]).slope
            for name in names
            if others
        },
    }


def table(compared: dict[str, Any]) -> str:
    """`compare` to read."""
    runs = pandas.DataFrame(compared["models"]).T.rename_axis("models")
    lines = [runs.to_string(float_format="%.2f")]
    if compared["ratio"]:
        first = runs.index[0]
        ratios = pandas.DataFrame(compared["ratio"]).T.rename_axis(f"over {first}")
        each = ", ".join(f"{name} {value:.2f}" for name, value in compared["a_model"].items())
        goals = ", ".join(f"{name} {value:g}" for name, value in GOALS.items())
        lines += ["", ratios.to_string(float_format="%.2f"), "", f"a further model: {each}"]
        lines += [f"goals for 2 over 1, at most: {goals}"]
    return "\n".join(lines)


def _measure(task: Any, models: int, steps: int, out: Path, overrides: Sequence[str]) -> int:
    """Run a team with so many models in a folder; the trainer's exit code."""
    from verl_ext.lab.demo.run import start_trainer
    from verl_ext.lab.demo.tasks import overrides as settings

    out.mkdir(parents=True, exist_ok=True)
    words = settings(task, ["dr_mas"], task.prepare(seed=0), out, steps, 0)
    words += ["trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=-1"]
    words += ["actor_rollout_ref.actor.optim.lr=1e-12"]  # what is learned would change the rollouts
    words += dealt(task.agents, models)
    done = threading.Event()
    watching = threading.Thread(target=watch, args=(out, done))
    watching.start()
    try:
        return start_trainer([*words, *overrides], out, steps)
    finally:
        done.set()
        watching.join()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print a table, and with ``--json`` one JSON object in the last line."""
    parser = Parser("models", __doc__)
    parser.add_argument("--models", default="1,2,3,5", help="numbers of models, a run each (default: %(default)s)")
    parser.add_argument("--team", choices=("five", "second_try"), default="five", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=6, help="steps a run, at least 2 (default: %(default)s)")
    parser.number("rounds", 1, "runs of each number")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_models"), help="default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides of every run")
    options = parser.parsed(argv)
    task = demo_task(options.team)
    words = options.models.split(",")
    known = [str(count) for count in range(1, len(task.agents) + 1)]
    if unknown := [word for word in words if word not in known]:
        parser.error(f"--models {unknown[0]}: the team {options.team} has {len(known)} agents; name 1 to {known[-1]}")
    if options.steps < 2:
        parser.error(f"--steps {options.steps} must be at least 2: the first is part of the start")
    runs: dict[int, list[dict[str, float]]] = {int(word): [] for word in words}
    for turn in range(options.rounds):
        for count in reversed(runs) if turn % 2 else runs:
            progress(f"round {turn + 1}: {count} models")
            run = options.out.absolute() / f"round_{turn + 1}" / f"models_{count}"
            if code := _measure(task, count, options.steps, run, options.overrides):
                return code
            runs[count].append(figures(run))
    compared = compare({count: pandas.DataFrame(own).min().to_dict() for count, own in runs.items()})
    print(f"\n{options.team}, {options.steps} steps a run, {options.rounds} rounds\n\n{table(compared)}")
    if options.json:
        print(json.dumps(rounded(compared)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
