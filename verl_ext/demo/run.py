# SPDX-License-Identifier: Apache-2.0
"""`verl-ext demo`: prepare a model and a task, train through verl's own trainer on this machine's CPU, draw the curve.

Nothing here is special to the demo but its defaults: the run is one `python -m verl.trainer.main_ppo +recipe=...`
command, which is printed and can be typed by hand.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.demo.curve import Point, draw, read_metrics

DEFAULT_STEPS = 60


@dataclass(frozen=True)
class Settings:
    """What the demo trains with, beside its recipes.

    Attributes:
        prompts: prompts a step.
        samples: rollouts a prompt.
        learning_rate: of AdamW.
        val_every: steps between two validations.
        save_every: steps between two checkpoints.
    """

    prompts: int = 16
    samples: int = 4
    learning_rate: float = 3e-4
    val_every: int = 10
    save_every: int = 10


def overrides(recipes: Sequence[str], assets: Any, out: Path, steps: int, seed: int, settings: Settings) -> list[str]:
    """The Hydra overrides of the run, in the order in which a person would read them."""
    return [
        f"+recipe=[{','.join([*recipes, 'cpu'])}]",
        f"data.train_files={assets.train_file}",
        f"data.val_files={assets.val_file}",
        f"actor_rollout_ref.model.path={assets.model_path}",
        f"data.train_batch_size={settings.prompts}",
        f"data.seed={seed}",
        f"data.max_prompt_length={assets.prompt_length}",
        f"data.max_response_length={assets.response_length}",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={assets.agent_loop}",
        f"actor_rollout_ref.rollout.n={settings.samples}",
        f"actor_rollout_ref.rollout.seed={seed}",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={settings.prompts}",
        f"actor_rollout_ref.actor.optim.lr={settings.learning_rate}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={settings.val_every}",
        f"trainer.save_freq={settings.save_every}",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.project_name=verl_ext",
        f"trainer.experiment_name=demo_{'_'.join(recipes)}",
        f"trainer.default_local_dir={out / 'checkpoints'}",
        f"trainer.rollout_data_dir={out / 'rollouts'}",
        f"verl_ext.rows_dir={out / 'rows'}",
        f"hydra.run.dir={out / 'hydra'}",
    ]


def main(args: Any) -> int:
    """Run the demo.

    Args:
        args: parsed command line with ``recipe`` (list of names), ``steps`` (int or None), ``seed`` (int), ``out``
            (Path) and ``overrides`` (list of Hydra overrides, applied last).

    Returns:
        Exit code: 0, 130 after Ctrl-C, else that of the trainer.
    """
    started = time.time()
    out = Path(args.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    steps = args.steps or DEFAULT_STEPS
    recipes = [name for name in args.recipe if name != "cpu"]

    from verl_ext.demo import prepare_demo

    assets = prepare_demo(seed=args.seed)
    prepared = time.time()
    words = [*overrides(recipes, assets, out, steps, args.seed, Settings()), *args.overrides]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    metrics_path = out / "metrics.jsonl"
    environment = {"VERL_FILE_LOGGER_PATH": str(metrics_path)}
    shown = " ".join([f"{key}={shlex.quote(value)}" for key, value in environment.items()] + [_short(command)])
    (out / "command.txt").write_text(shown + "\n", encoding="utf-8")
    print(f"\n{shown}\n", flush=True)

    code = train(command, environment, out, steps)
    composed = out / "hydra" / ".hydra" / "config.yaml"
    if composed.exists():
        shutil.copyfile(composed, out / "config.yaml")
    if code != 0:
        return code

    points = read_metrics(metrics_path)
    summary = summarize(points, recipes, args.seed, steps)
    summary["seconds"] = {"prepare": round(prepared - started, 1), "train": round(time.time() - prepared, 1)}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    draw(points, out / "reward.png", title=f"{' + '.join(recipes)} on the {assets.task} task, seed {args.seed}")
    print(
        f"reward a trajectory: {summary['reward_before']:.3f} before, {summary['reward_after']:.3f} after {steps} "
        f"steps (validation: {summary['val_before']:.3f} -> {summary['val_after']:.3f}); see {out / 'reward.png'}"
    )
    return 0


def _short(command: Sequence[str]) -> str:
    """The command as a person would type it."""
    return " ".join(["python", *(shlex.quote(word) for word in command[1:])])


def train(command: Sequence[str], environment: Mapping[str, str], out: Path, steps: int) -> int:
    """Run verl's trainer as a child process, its output in ``<out>/log.txt``, with a line of progress.

    Ctrl-C reaches the child as well; it is given time to shut Ray down.

    Returns:
        The child's exit code; 130 after Ctrl-C.
    """
    log_path = out / "log.txt"
    with log_path.open("ab") as log:
        child = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        previous = signal.signal(signal.SIGTERM, _as_interrupt)
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
        finally:
            signal.signal(signal.SIGTERM, previous)
        progress.show(last=True)
    if child.returncode != 0:
        tail = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
        print("\n".join(tail))
        print(f"\nverl's trainer ended with code {child.returncode}; the whole log is in {log_path}", flush=True)
    return child.returncode


def _as_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


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

    def __init__(self, metrics_path: Path, steps: int) -> None:
        self.path, self.steps = metrics_path, steps
        self.started = time.time()
        self.shown = ""
        self.first: tuple[int, float] | None = None

    def show(self, last: bool = False) -> None:
        points = read_metrics(self.path)
        done = [point for point in points if point.train_reward is not None]
        waited = time.time() - self.started
        if not done:
            text = "starting Ray and verl's workers" if not points else "first validation done"
        else:
            step = done[-1].step
            if self.first is None:
                self.first = (step, time.time())
            rate = (time.time() - self.first[1]) / max(step - self.first[0], 1) if step > self.first[0] else 0.0
            left = f", about {rate * (self.steps - step):.0f} s left" if rate and not last else ""
            text = f"step {step}/{self.steps}  reward {done[-1].train_reward:.3f}{left}"
        if sys.stdout.isatty():
            print(f"\r\033[K{waited:5.0f} s  {text}", end="\n" if last else "", flush=True)
        elif text.split(",")[0] != self.shown:
            self.shown = text.split(",")[0]
            print(f"{waited:5.0f} s  {text}", flush=True)


def summarize(points: Sequence[Point], recipes: Sequence[str], seed: int, steps: int) -> dict[str, Any]:
    """Reward before and after: means over the first and the last five steps, and the first and last validation."""
    train = [point.train_reward for point in points if point.train_reward is not None]
    val = [point.val_reward for point in points if point.val_reward is not None]
    width = max(1, min(5, len(train) // 2))
    return {
        "recipes": list(recipes),
        "seed": seed,
        "steps": steps,
        "reward_before": statistics.fmean(train[:width]) if train else float("nan"),
        "reward_after": statistics.fmean(train[-width:]) if train else float("nan"),
        "val_before": val[0] if val else float("nan"),
        "val_after": val[-1] if val else float("nan"),
        "step_seconds_median": _median([point.step_seconds for point in points]),
        "rollout_vs_trainer_prob_diff_max": max(
            (point.prob_diff for point in points if point.prob_diff is not None), default=None
        ),
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
