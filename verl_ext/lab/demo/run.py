# SPDX-License-Identifier: Apache-2.0
"""`verl-ext demo`: prepare a model and a task, train through verl's own trainer on this machine's CPU, draw the curve.

The task is the one that the recipes are made for (:mod:`verl_ext.lab.demo.tasks`), or the one named.

Nothing here is special to the demo but its defaults: the run is one `python -m verl.trainer.main_ppo +recipe=...`
command, which is printed and can be typed by hand.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas

from verl_ext.common.overrides import Failure
from verl_ext.lab.demo.assets import interrupted_by_sigterm
from verl_ext.lab.demo.curve import column, draw, merged_turns, read_metrics
from verl_ext.lab.demo.tasks import DemoTask, choose, overrides
from verl_ext.lab.report.logs import is_begun
from verl_ext.lab.whatif.command import last_batches

RECORD = "demo.json"
"""In a run's folder: the task, recipes, seed and overrides that it was begun with."""


def main(args: Any) -> int:
    """Run the demo.

    Args:
        args: parsed command line with ``recipe`` (list of names), ``task`` (a name, or None for the one that the
            recipes are made for), ``steps`` (int or None), ``seed`` (int), ``out`` (Path) and ``overrides`` (list of
            Hydra overrides, applied last).

    Returns:
        Exit code: 0, 130 after Ctrl-C, else that of the trainer.

    Raises:
        UsageError: the recipes are made for different tasks.
        Failure: the folder has a run that was begun with another task, recipes, seed or overrides.
    """
    recipes = [name for name in args.recipe if name != "cpu"]
    task = choose(recipes, args.task)
    steps = task.settings.steps if args.steps is None else args.steps
    out = Path(args.out).absolute()
    # Where Ray runs is no part of what is trained.
    words = [word for word in args.overrides if not word.lstrip("+").startswith("ray_kwargs.")]
    _note(out, {"task": task.name, "recipes": recipes, "seed": args.seed, "overrides": words})
    last = [f"verl_ext.record_dir={out / 'records'}", "verl_ext.record_steps=4"]
    return run_task(task, recipes, steps=steps, seed=args.seed, out=out, extra=[*last, *args.overrides])


def _note(out: Path, asked: Mapping[str, Any]) -> None:
    """Write `RECORD` into a run's folder. Raises Failure: a run was begun there that differs, by its own record, or by
    the summary of a finished one that was begun before there were records.
    """
    if is_begun(out):
        known = next((out / name for name in (RECORD, "summary.json") if (out / name).is_file()), None)
        before = json.loads(known.read_text(encoding="utf-8")) if known else {}
        if changed := [key for key in asked if key in before and before[key] != asked[key]]:
            said = "; ".join(f"{key}: was {_shown(before[key])}, is {_shown(asked[key])}" for key in changed)
            raise Failure(f"{out} was begun with another run ({said}). Give another --out, or remove that folder")
    out.mkdir(parents=True, exist_ok=True)
    (out / RECORD).write_text(json.dumps(asked, indent=2) + "\n", encoding="utf-8")


def _shown(value: Any) -> str:
    return (" ".join(value) or "none") if isinstance(value, list) else str(value)


def run_task(
    task: DemoTask, recipes: Sequence[str], *, steps: int, seed: int, out: Path, extra: Sequence[str] = ()
) -> int:
    """Prepare a task, train on it in a folder, and write the run's summary and curve there.

    Args:
        task: to train on.
        recipes: without the task's companions and ``cpu``.
        steps: training steps.
        seed: of model, data and training.
        out: folder of the run; a run that was interrupted there goes on from its checkpoint.
        extra: Hydra overrides, applied last.

    Returns:
        Exit code of the trainer; 130 after Ctrl-C.
    """
    started = time.time()
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    print(f"task {task.name}: {task.summary}", flush=True)

    assets = task.prepare(seed=seed)
    chance = task.chance(assets)
    prepared = time.time()
    code = start_trainer([*overrides(task, recipes, assets, out, steps, seed), *extra], out, steps)
    if code != 0:
        return code

    points = read_metrics(out / "metrics.jsonl")
    summary = summarize(points, recipes, seed, steps, task, chance)
    summary["seconds"] = {"prepare": round(prepared - started, 1), "train": round(time.time() - prepared, 1)}
    known = json.loads(json.dumps(summary), parse_constant=lambda name: None)  # JSON has no NaN
    (out / "summary.json").write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    draw(
        points,
        out / "reward.png",
        title=f"{' + '.join(recipes)} on the {task.name} task, seed {seed}",
        references=references(summary),
        agents=task.agents,
    )
    if others := last_batches(out):
        print(f"what other estimators would have done with the last batches (verl-ext whatif {shlex.quote(str(out))}):")
        print(others)
    if merged := merged_turns(points):
        print(merged)
    print(f"the rollouts: verl-ext rollouts {shlex.quote(str(out))} --html {shlex.quote(str(out / 'rollouts.html'))}")
    for name, one in summary["agents"].items():
        print(
            f"{name}: score of its turns {one['score_before']:.3f} before, {one['score_after']:.3f} after; "
            f"{one['energy_share_before']:.0%} of the gradient's energy before, {one['energy_share_after']:.0%} after"
        )
    validated = " -> ".join(
        f"{val:.3f}" for val in (summary["val_before"], summary["val_after"]) if not math.isnan(val)
    )
    print(
        f"reward a trajectory: {summary['reward_before']:.3f} before, {summary['reward_after']:.3f} after {steps} "
        f"steps (validation: {validated or 'none'}; a random policy: {chance:.3f}); see {out / 'reward.png'}"
    )
    return 0


def references(summary: Mapping[str, Any]) -> dict[str, float]:
    """Lines that every plot has: the random policy's reward, and the warm-started model's where it was validated."""
    lines = {"random policy": summary["reward_random"], "warm start": summary["val_before"]}
    return {name: height for name, height in lines.items() if math.isfinite(height)}


def start_trainer(words: Sequence[str], out: Path, steps: int | None) -> int:
    """Run verl's trainer in a folder: writes ``command.txt``, ``log.txt``, ``metrics.jsonl`` and ``config.yaml``.

    Args:
        words: Hydra overrides.
        out: folder of the run, an absolute path.
        steps: training steps, for the line of progress; None: not known.

    Returns:
        The trainer's exit code; 130 after Ctrl-C.
    """
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    environment = {"VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl")}
    shown = f"VERL_FILE_LOGGER_PATH={shlex.quote(str(out / 'metrics.jsonl'))} {shlex.join(['python', *command[1:]])}"
    (out / "command.txt").write_text(shown + "\n", encoding="utf-8")
    print(f"\n{shown}\n", flush=True)
    code = train(command, environment, out, steps)
    composed = out / "hydra" / ".hydra" / "config.yaml"
    if composed.exists():
        shutil.copyfile(composed, out / "config.yaml")
    return code


def train(command: Sequence[str], environment: Mapping[str, str], out: Path, steps: int | None) -> int:
    """Run verl's trainer as a child process, its output in ``<out>/log.txt``, with a line of progress.

    Ctrl-C reaches the child as well; it is given time to shut Ray down.

    Returns:
        The child's exit code; 130 after Ctrl-C.
    """
    log_path = out / "log.txt"
    with log_path.open("ab") as log, interrupted_by_sigterm():
        child = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        progress = Progress(out / "metrics.jsonl", steps)
        try:
            while child.poll() is None:
                progress.show()
                time.sleep(0.5)
        except KeyboardInterrupt:
            print("\nstopping; the last checkpoint is kept, the same command resumes from it", flush=True)
            _stop(child)
            return 130
        except BaseException:
            _stop(child)
            raise
        progress.show(last=True)
    if child.returncode != 0:
        tail = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
        print("\n".join(tail))
        print(f"\nverl's trainer ended with code {child.returncode}; the whole log is in {log_path}", flush=True)
    return child.returncode


def _end_with_parent() -> None:
    """Have the trainer end if this process is killed outright: two trainers must never share a run folder.

    And have it hear an interrupt: a shell starts background jobs with SIGINT ignored, which children inherit.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Interrupt the trainer as Ctrl-C would, then wait for it; kill its session if it does not end."""
    if child.poll() is None:
        os.kill(child.pid, signal.SIGINT)
        try:
            child.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


class Progress:
    """One line that is rewritten on a terminal, and a line every few steps elsewhere."""

    def __init__(self, metrics_path: Path, steps: int | None) -> None:
        self.path, self.steps = metrics_path, steps
        self.started = time.time()
        self.shown = ""
        self.first: tuple[int, float] | None = None

    def show(self, last: bool = False) -> None:
        points = read_metrics(self.path)
        done = points["train_reward"].dropna()
        waited = time.time() - self.started
        if done.empty:
            text = "starting Ray and verl's workers" if points.empty else "first validation done"
        else:
            step = int(done.index[-1])
            if self.first is None:
                self.first = (step, time.time())
            rate = (time.time() - self.first[1]) / max(step - self.first[0], 1) if step > self.first[0] else 0.0
            left, of = "", ""
            if self.steps is not None:
                of = f"/{self.steps}"
                left = f", about {rate * (self.steps - step):.0f} s left" if rate and not last else ""
            text = f"step {step}{of}  reward {done.iloc[-1]:.3f}{left}"
        if sys.stdout.isatty():
            print(f"\r\033[K{waited:5.0f} s  {text}", end="\n" if last else "", flush=True)
        elif text.split(",")[0] != self.shown:
            self.shown = text.split(",")[0]
            print(f"{waited:5.0f} s  {text}", flush=True)


def summarize(
    points: pandas.DataFrame, recipes: Sequence[str], seed: int, steps: int, task: DemoTask, chance: float
) -> dict[str, Any]:
    """Reward before and after: means over the first and the last five steps, and the first and last validation.

    Args:
        points: of the run, by :func:`verl_ext.lab.demo.curve.read_metrics`.
        recipes, seed, steps: of the run, written as they are.
        task: its name and agents.
        chance: mean reward of a random policy.
    """
    done = points[points["train_reward"].notna()]
    width = max(1, min(5, len(done) // 2))

    def ends(name: str, metric: str) -> dict[str, float]:
        values = column(done, metric)
        return {f"{name}_before": float(values[:width].mean()), f"{name}_after": float(values[-width:].mean())}

    val = points["val_reward"].dropna().tolist() or [math.nan]
    seconds, difference = column(points, "timing_s/step"), column(points, "training/rollout_probs_diff_max")
    return {
        "task": task.name,
        "recipes": list(recipes),
        "seed": seed,
        "steps": steps,
        "reward_random": chance,
        **ends("reward", "train_reward"),
        "val_before": val[0],
        "val_after": val[-1] if len(val) > 1 else math.nan,
        "agents": {
            name: ends("score", f"agent/{name}/score/mean")
            | ends("energy_share", f"agent/{name}/gradient_energy_share")
            for name in task.agents
        },
        "step_seconds_median": float(seconds.median()) if seconds.notna().any() else None,
        "rollout_vs_trainer_prob_diff_max": float(difference.max()) if difference.notna().any() else None,
    }
