# SPDX-License-Identifier: Apache-2.0
"""``verl-ext kernels``: one verdict, what this machine can judge, the tricks that it must not pay, and its speed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.common.overrides import Failure, UsageError, positive
from verl_ext.rollout.kernels.languages import BACKENDS, LANGUAGES, check_backend, missing, module
from verl_ext.sandbox import CageError

if TYPE_CHECKING:
    from verl_ext.rollout.kernels.tasks import Task


PROBLEM = "or a problem in KernelBench's form: FILE.py, or FILE.parquet:NAME of `reproduce prepare`"
JUDGE = ("pairs", "max_pairs", "looks")
"""The judge's options that `bench` takes."""
NAMES = f"{', '.join(LANGUAGES)}, or a module"


def _language(name: str) -> str:
    try:
        module(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    one = actions.add_parser("evaluate", help="compile, check and time what a model wrote")
    one.add_argument("file", type=Path, help="the answer; - reads it from the standard input")
    one.add_argument(
        "--task", required=True, help=f"fuse-0 to fuse-23, fuse-val-0 to fuse-val-7, a chain of stages, {PROBLEM}"
    )
    one.add_argument(
        "--memory-mb", type=positive, default=1024, help="that a player may allocate (default: %(default)s)"
    )
    one.add_argument(
        "--language", type=_language, default="fuse", help=f"of the answer: {NAMES} (default: %(default)s)"
    )
    one.add_argument("--backend", choices=BACKENDS, help="for triton: triton_interpret (default), or triton, a GPU")
    one.add_argument("--json", action="store_true", help="the verdict as JSON")
    one.set_defaults(do=_evaluate)
    what = actions.add_parser("tasks", help="list the tasks")
    what.set_defaults(do=_tasks)
    tricks = actions.add_parser("hacks", help="play the corpus of tricks and of honest kernels against this judge")
    tricks.set_defaults(do=_hacks)
    speed = actions.add_parser("bench", help="evaluations a second, steadiness, and coverage against known shares")
    for name, default, text in (
        ("workers", max((os.cpu_count() or 2) - 1, 1), "of the pool"),
        ("submitted", 64, "different programs, all at once"),
        ("cached", 1000, "times that a known program is asked for"),
        ("programs", 60, "random ones, judged twice for the correlation of their ranks"),
        ("repeats", 20, "of the fixed candidate; a quarter of it of honest kernels and known shares"),
    ):
        speed.add_argument(f"--{name}", type=positive, default=default, help=f"{text} (default: %(default)s)")
    for name in JUDGE:
        speed.add_argument(f"--{name.replace('_', '-')}", type=positive, help="of the judge (default: its own)")
    speed.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    speed.set_defaults(do=_bench)
    data = actions.add_parser("data", help="write train.parquet and val.parquet of the task fuse")
    data.add_argument("--out", type=Path, required=True, help="folder to write")
    data.add_argument("--language", type=_language, default="fuse", help=f"asked for: {NAMES} (default: %(default)s)")
    data.set_defaults(do=_data)
    scaling = actions.add_parser("stts", help="Fast@p of validation by turns, and what each rule of STTS would keep")
    scaling.add_argument("dump", type=Path, help="<step>.jsonl of trainer.validation_data_dir")
    scaling.add_argument(
        "--language", type=_language, default="fuse", help=f"of the answers: {NAMES} (default: %(default)s)"
    )
    scaling.add_argument("--window", type=positive, default=4, help="turns that are kept (default: %(default)s)")
    scaling.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    scaling.set_defaults(do=_stts)
    health = actions.add_parser("doctor", help="what judging needs, what of it is here, and the remedy")
    health.set_defaults(do=_doctor)


def run(args: argparse.Namespace) -> int:
    """Carry out an action."""
    from verl_ext.rollout.kernels.seat import Infrastructure

    act: Callable[[argparse.Namespace], int] = args.do
    try:
        return act(args)
    except (CageError, Infrastructure) as error:
        raise Failure(str(error)) from error


def _task(said: str) -> Task:
    """By name, by chain, or a problem in a file."""
    from verl_ext.rollout.kernels import problems
    from verl_ext.rollout.kernels.tasks import Task

    path, _, name = said.partition(":")
    if not path.endswith((".py", ".parquet")):
        return Task.of(said)
    found = problems.read(Path(path))
    chosen = [task for task in found if name in ("", task.name)]
    if len(chosen) != 1:
        raise ValueError(f"{path} holds {', '.join(task.name for task in found)}; say one of them: {path}:NAME")
    return chosen[0]


def _evaluate(args: argparse.Namespace) -> int:
    from verl_ext.rollout.kernels.feedback import scrub
    from verl_ext.rollout.kernels.judge import Judge
    from verl_ext.rollout.kernels.options import JudgeOptions

    try:
        task = _task(args.task)
        text = sys.stdin.read() if str(args.file) == "-" else args.file.read_text(encoding="utf-8")
        if args.backend:
            check_backend(args.backend, args.language)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    with Judge(JudgeOptions(args.language, args.backend or "c", memory_mb=args.memory_mb)) as judge:
        try:
            verdict = judge.evaluate(task, text, args.language)
        except ValueError as error:
            raise UsageError(str(error)) from error
    reward = verdict.reward()
    if args.json:
        print(json.dumps({**dataclasses.asdict(verdict), "correct": verdict.correct, "reward": reward}))
        return 0
    print(f"task      {task.name}" if task.code else f"task      {task.name}: {task.text}")
    print(f"status    {verdict.status}{', a decoy' if verdict.decoy else ''}")
    if verdict.error:
        print(f"error     {scrub(verdict.error)}")
    if verdict.speedup:
        print(f"speedup   {verdict.speedup:.2f}, 95 % interval {verdict.low:.2f} to {verdict.high:.2f}, ", end="")
        print(f"{verdict.pairs} pairs ({verdict.candidate_us:.0f} us against {verdict.reference_us:.0f} us)")
        print(f"coverage  {verdict.coverage:.2f}")
        for place, share in verdict.profile.items():
            print(f"          {share:4.0%} {place}")
    print(f"reward    {reward:.3f}")
    return 0


def _stts(args: argparse.Namespace) -> int:
    from verl_ext.lab.kernels import stts
    from verl_ext.rollout.kernels.judge import Judge
    from verl_ext.rollout.kernels.options import JudgeOptions

    try:
        trajectories = stts.read(args.dump)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    with Judge(JudgeOptions(args.language)) as judge:
        found = stts.scaling(trajectories, judge, args.language, args.window)
    for line in stts.table(found):
        print(line)
    if args.json:
        print(json.dumps(found))
    return 0


def _tasks(args: argparse.Namespace) -> int:
    from verl_ext.rollout.kernels.tasks import held_out, training

    for task in (*training(), *held_out()):
        print(f"{task.name:<11} {task.text}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    import torch

    from verl_ext.rollout.kernels import compiler, coverage
    from verl_ext.rollout.kernels.judge import Judge
    from verl_ext.rollout.kernels.players.cuda import Cuda
    from verl_ext.rollout.kernels.tasks import training
    from verl_ext.sandbox import check

    well = True

    def told(what: str, good: str, remedy: str) -> None:
        nonlocal well
        well &= bool(good)
        print(f"{what:<10} {good or f'missing: {remedy}'}")

    told("compiler", compiler.version(), "install gcc with binutils (Debian: apt install gcc)")
    refused = coverage.works()
    way = "by the kernel's clock" if coverage.may_sample(os.getpid()) else "by ptrace, which takes longer"
    told("coverage", "" if refused else way, refused)
    try:
        layers = ", ".join(check("required"))
    except CageError as error:
        layers, refused = "", str(error)
    told("cage", layers, refused)
    print("backends   c: gcc, this machine's processor")
    print(f"           triton_interpret: what is right, no speed; {missing('triton') or 'Triton is installed'}")
    print(f"           triton: {Cuda().lacks() or torch.cuda.get_device_name()}")
    if well:
        task = training()[0]
        with Judge() as judge:
            right = judge.evaluate(task, f"krve {task.text}")
            wrong = judge.evaluate(task, f"krve {' '.join(reversed(task.stages))}")
        told("a kernel", "judged right" if right.correct and not right.decoy else "", f"{right.status}: {right.error}")
        told("a mistake", "judged wrong" if wrong.status == "wrong" else "", f"{wrong.status}: {wrong.error}")
    return 0 if well else 1


def _hacks(args: argparse.Namespace) -> int:
    from verl_ext.lab.kernels.hacks import HACKS, HONEST
    from verl_ext.rollout.kernels.judge import Judge
    from verl_ext.rollout.kernels.tasks import Task

    paid = refused = 0
    with Judge() as judge:
        for hack in (*HACKS, *HONEST):
            if lacks := missing(hack.language):
                print(f"{'-':<9} {hack.name:<26} {lacks}")
                continue
            verdict = judge.evaluate(Task.of(hack.task), hack.text, hack.language)
            got = hack.paid(verdict)
            paid += got and hack in HACKS
            refused += not got and hack in HONEST
            said = f"{verdict.status}{', a decoy' if verdict.decoy else ''}"
            speed = f"x{verdict.speedup:.2f}, coverage {verdict.coverage:.2f}" if verdict.correct else ""
            kind = f"against {hack.defence}" if hack in HACKS else "honest"
            print(f"{'PAID' if got else 'not paid':<9} {hack.name:<26} {kind:<34} {said:<16} {speed}", flush=True)
    tricks, honest = (sum(not missing(hack.language) for hack in played) for played in (HACKS, HONEST))
    print(f"{paid} of {tricks} tricks were paid, {honest - refused} of {honest} honest kernels")
    return 1 if paid or refused else 0


def _bench(args: argparse.Namespace) -> int:
    from verl_ext.lab.kernels import bench
    from verl_ext.rollout.kernels.options import JudgeOptions

    if args.repeats < 2 or args.programs < 2:
        raise UsageError("--repeats and --programs must be at least 2: there is no spread of one value")
    try:
        options = JudgeOptions(**{name: value for name in JUDGE if (value := getattr(args, name)) is not None})
    except ValueError as error:
        raise UsageError(str(error)) from error
    found = bench.measure(options, args.workers, args.submitted, args.cached, args.programs, args.repeats)
    for line in bench.table(found):
        print(line)
    if args.json:
        print(json.dumps(found))
    return 0


def _data(args: argparse.Namespace) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from verl_ext.rollout.kernels.feedback import prompt
    from verl_ext.rollout.kernels.tasks import held_out, training

    args.out.mkdir(parents=True, exist_ok=True)
    for split, tasks in (("train", training()), ("val", held_out())):
        rows = [
            {
                "data_source": f"kernels/{args.language}",
                "agent_name": "verl_ext_kernels",
                "prompt": [
                    {
                        "role": "user",
                        "content": task.text if args.language == "fuse" else prompt(task, args.language),
                    }
                ],
                "ability": "kernels",
                "reward_model": {"style": "rule", "ground_truth": task.text},
                "extra_info": {"index": index, "task": task.name},
            }
            for index, task in enumerate(tasks)
        ]
        pq.write_table(pa.Table.from_pylist(rows), args.out / f"{split}.parquet")
        print(args.out / f"{split}.parquet")
    return 0
