# SPDX-License-Identifier: Apache-2.0
"""Run folders of the table otb/samples at laptop scale, as its runs leave them behind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from verl_ext.lab.reproduce.catalogue import find_table, scale_of
from verl_ext.lab.reproduce.runs import COMPLETE, Run
from verl_ext.lab.reproduce.tables import Cell

OTB, LAPTOP = scale_of(find_table("otb"), "laptop")
CELL = LAPTOP.cells["otb_n4"]


def run_of(out: Path, cell: Cell = CELL, seed: int = 0, steps: int | None = 2, extra: tuple[str, ...] = ()) -> Run:
    scale = dataclasses.replace(LAPTOP, cells={**LAPTOP.cells, cell.name: cell})
    return Run(OTB, scale, cell.name, seed, out, steps, extra)


def begin(out: Path, *args: Any, **more: Any) -> Path:
    run = run_of(out, *args, **more)
    run.begin()
    return run.path


def log(folder: Path, *steps: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            data = {"val-core/x/reward/mean@1": 0.1} if step == 0 else {"actor/grad_norm": 0.1, "timing_s/step": 1.0}
            data |= (
                {"trajectory/reward/mean": 0.5, "critic/score/mean": 0.5, "perf/total_num_tokens": 10} if step else {}
            )
            file.write(json.dumps({"step": step, "data": data}) + "\n")


def finish(out: Path, cell: Cell = CELL, seed: int = 0, steps: int = 2, extra: tuple[str, ...] = ()) -> Path:
    run = run_of(out, cell, seed, steps, extra)
    run.begin()
    log(run.path, *range(steps + 1))
    run.end(COMPLETE, 0, 1.5)
    return run.path
