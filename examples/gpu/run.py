#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stages of a first run on a GPU, the most telling first, each a process with a limit of its own.

    python examples/gpu/run.py --out runs/gpu                       all stages, on one GPU
    python examples/gpu/run.py --out runs/gpu --only a b            these
    python examples/gpu/run.py --out runs/try --device cpu --tiny   a rehearsal without a GPU: every stage's code runs

A stage writes OUT/<stage>.json as it goes, with what it has so far; OUT/run.json says how each one ended. A stage that
hangs is killed at its limit and loses itself only. Where an engine makes no first step, the embedded engine generates
on the machine's processors while FSDP trains on the GPU, and later stages begin with it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import models  # noqa: E402
import stages  # noqa: E402
import trainer  # noqa: E402


@dataclass(frozen=True)
class Stage:
    title: str
    function: Callable[[stages.Settings, stages.Record], None]
    limit_s: int


STAGES = {
    "a": Stage("the demo's task: trloo, 28 steps", stages.demo, 210),
    "b": Stage("a step at 0.5B: generation, old log-probabilities, update, peak memory", stages.table, 200),
    "c": Stage("16 turns: merged, and a sequence a call", stages.merged_turns, 180),
    "d": Stage("killed and resumed", stages.resume, 150),
    "e": Stage("two models on one GPU", stages.two_models, 120),
    "f": Stage("make test-gpu", stages.gpu_tests, 150),
    "g": Stage("the demo's task with the other engine", stages.other_engine, 180),
    "h": Stage("the pass over the logits: bandwidth, tiles, verl's fused losses", stages.logits, 120),
}


def save(path: Path, content: Any) -> None:
    """Replace a JSON file at once, so that what is copied from it is whole at any moment."""
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(aside, path)


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processors": os.cpu_count(),
    }
    if device == "cuda" and torch.cuda.is_available():
        memory = round(torch.cuda.mem_get_info()[1] / 2**30, 1)
        found |= {"gpu": torch.cuda.get_device_name(), "memory_gib": memory, "cuda": torch.version.cuda}
    return found


def one(args: argparse.Namespace) -> int:
    """A stage, in this process."""
    stage, folder = STAGES[args.stage], args.out / args.stage
    folder.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{args.stage}.json"
    record = stages.Record({"title": stage.title}, lambda content: save(path, content))
    record.put(machine=machine(args.device))
    limit = args.limit or stage.limit_s
    stage.function(
        stages.Settings(
            args.out / args.stage, args.device, args.engine, args.tiny, limit, tuple(args.words), args.check
        ),
        record,
    )
    return 0


def drive(args: argparse.Namespace) -> int:
    """All stages, one after another."""
    args.out.mkdir(parents=True, exist_ok=True)
    started, engine, ended = time.monotonic(), args.engine, {}
    before = models.read_json(args.out / "run.json").get("stages", {})
    for name in args.only or STAGES:
        stage = STAGES[name]
        limit = args.limit or stage.limit_s
        if args.budget:
            limit = int(min(limit, args.budget - (time.monotonic() - started)))
        if args.budget and limit < 15:
            ended[name] = {"ended": "not begun: no time was left"}
            continue
        begun = time.monotonic()
        (args.out / f"{name}.json").unlink(missing_ok=True)
        words = [
            "--out",
            str(args.out),
            "--device",
            args.device,
            "--engine",
            engine,
            "--stage",
            name,
            "--limit",
            str(limit),
        ]
        words += (["--tiny"] if args.tiny else []) + (["--words", *args.words] if args.words else [])
        print(f"{name}: {stage.title}, {engine}, at most {limit} s", flush=True)
        mark = f"stage-{os.getpid()}-{name}"
        (args.out / name).mkdir(exist_ok=True)
        with (args.out / name / "stage.txt").open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, __file__, *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, trainer.STAGE_MARK: mark},
            )
            try:
                said = f"code {child.wait(limit + 5)}"
            except subprocess.TimeoutExpired:
                said = f"killed after {limit} s"
        trainer.end(f"{trainer.STAGE_MARK}={mark}")
        child.wait()
        found = models.read_json(args.out / f"{name}.json")
        engine = found.get("go_on_with", engine)
        ended[name] = {"ended": said, "seconds": round(time.monotonic() - begun, 1), "result": found.get("result")}
        save(args.out / "run.json", {"device": args.device, "tiny": args.tiny, "stages": before | ended})
        print(f"   {said}, {ended[name]['seconds']} s: {found.get('result', 'nothing')}", flush=True)
    save(args.out / "run.json", {"device": args.device, "tiny": args.tiny, "stages": before | ended})
    return 0 if all(entry["ended"] == "code 0" for entry in ended.values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=lambda text: Path(text).absolute(), required=True)
    parser.add_argument("--only", nargs="+", choices=STAGES, help="stages, in this order (default: all)")
    parser.add_argument(
        "--engine", choices=("sglang", "vllm", "embedded"), default="sglang", help="default: %(default)s"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="models of two layers and two steps, for a rehearsal")
    parser.add_argument("--budget", type=float, help="seconds for all stages")
    parser.add_argument("--limit", type=int, help="seconds for each stage, instead of its own")
    parser.add_argument("--words", nargs="*", default=[], help="Hydra overrides of every run, applied last")
    parser.add_argument("--check", action="store_true", help="only have every run's configuration checked")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cpu":
        args.engine = "embedded"
    if args.check:
        return max(one(argparse.Namespace(**{**vars(args), "stage": name})) for name in args.only or STAGES)
    return one(args) if args.stage else drive(args)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise SystemExit(main())
