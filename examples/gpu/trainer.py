# SPDX-License-Identifier: Apache-2.0
"""One run of verl's trainer within a stage: its command, what is read of it while it goes, and its end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: In the environment of every process of a run, and of a stage, so that all of them are found at its end.
MARK, STAGE_MARK = "VERL_EXT_GPU_RUN", "VERL_EXT_GPU_STAGE"

#: What is kept of a step's metrics: of several models, whose names come second, the largest.
METRICS = {
    "reward": "trajectory/reward/mean",
    "score": "critic/score/mean",
    "gen_s": "timing_s/gen",
    "old_log_prob_s": "timing_s/old_log_prob",
    "update_s": "timing_s/update_actor",
    "weights_s": "timing_s/update_weights",
    "step_s": "timing_s/step",
    "peak_gb": "actor/perf/max_memory_allocated_gb",
    "grad_norm": "actor/grad_norm",
    "prob_diff_max": "training/rollout_probs_diff_max",
    "prob_diff_mean": "training/rollout_probs_diff_mean",
    "probs_correlation": "training/rollout_actor_probs_pearson_corr",
    "trajectories": "rollout/trajectories",
    "failed": "rollout/failed_trajectories",
    "turns": "trajectory/turns/mean",
    "sequences": "rollout/sequences",
    "tokens": "global_seqlen/mean",
    "tokens_by_call": "rollout/tokens_by_call",
}


@dataclass
class Run:
    """What a run of the trainer has said."""

    command: str
    engine: str
    ended: str = "runs"
    seconds: float = 0.0
    first_step_s: float | None = None  #: from the command to the end of the first training step
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)  #: last lines of the log of a run that failed

    def column(self, name: str) -> list[float]:
        return [step[name] for _, step in sorted(self.steps.items()) if name in step]


def read_steps(path: Path) -> dict[int, dict[str, float]]:
    """The kept metrics of every training step in verl's file of metrics; a line that is still written is left."""
    steps: dict[int, dict[str, float]] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        kept = {short: found for short, key in METRICS.items() if (found := of(entry["data"], key)) is not None}
        if entry["step"] > 0 and "update_s" in kept:
            steps[entry["step"]] = kept
    return steps


def of(data: dict[str, float], key: str) -> float | None:
    """A metric, or the largest of those of several models; None where a step has none."""
    if key in data:
        return data[key]
    first, _, rest = key.partition("/")
    models = (name for name in data if name.startswith(f"{first}/") and name.split("/", 2)[2:] == [rest])
    return max((data[name] for name in models), default=None)


def marked(mark: str) -> list[int]:
    """Processes with this mark, NAME=value, in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it has ended, or is somebody else's
            continue
    return [pid for pid in found if pid != os.getpid()]


def end(mark: str) -> None:
    """Kill what is left of a run or of a stage."""
    for _ in range(20):
        left = marked(mark)
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.2)


def train(
    words: Sequence[str],
    folder: Path,
    engine: str,
    *,
    limit_s: float,
    first_step_s: float,
    tell: Callable[[Run], Any],
    kill_after: int | None = None,
    environment: dict[str, str] | None = None,
) -> Run:
    """Run the trainer in a folder until it ends, or until its time is over.

    Args:
        words: Hydra overrides.
        folder: of the run: ``log.txt``, ``metrics.jsonl``; a run that was there goes on.
        engine: for the record.
        limit_s: seconds for all of it.
        first_step_s: seconds until the first step has ended.
        tell: called with the run when it has something new.
        kill_after: kill all of it at once when this step has ended.
        environment: variables beside this process's own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark, metrics = uuid.uuid4().hex, folder / "metrics.jsonl"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    run = Run(shlex.join(["python", *command[1:]]), engine)
    (folder / "command.txt").write_text(run.command + "\n", encoding="utf-8")
    known = set(read_steps(metrics))
    started = time.monotonic()
    with (folder / "log.txt").open("ab") as log:
        child = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {}), MARK: mark, "VERL_FILE_LOGGER_PATH": str(metrics)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while run.ended == "runs":
            code = child.poll()
            steps = {step: kept for step, kept in read_steps(metrics).items() if step not in known}
            run.seconds = round(time.monotonic() - started, 1)
            if len(steps) > len(run.steps):
                run.first_step_s = run.first_step_s or run.seconds
                run.steps = steps
                tell(run)
            if kill_after is not None and kill_after in steps:
                run.ended = f"killed after step {kill_after}"
            elif code is not None:
                run.ended = "well" if code == 0 else f"code {code}"
            elif run.seconds > limit_s:
                run.ended = f"not done in {limit_s:.0f} s"
            elif not steps and run.seconds > first_step_s:
                run.ended = f"no step in {first_step_s:.0f} s"
            else:
                time.sleep(0.25)
    finally:
        end(f"{MARK}={mark}")
        child.wait()
    if run.ended not in ("well", f"killed after step {kill_after}"):
        lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        run.said = [line[-400:] for line in lines[-40:]]
    tell(run)
    return run
