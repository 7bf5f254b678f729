# SPDX-License-Identifier: Apache-2.0
"""Run folders of the table otb/samples at laptop scale, as its runs leave them behind."""

from __future__ import annotations

import json
from pathlib import Path

from verl_ext.reproduce import runs
from verl_ext.reproduce.catalogue import find_table, scale_of
from verl_ext.reproduce.tables import Cell

OTB, LAPTOP = scale_of(find_table("otb"), "laptop")
CELL = LAPTOP.cells["otb_n4"]


def begin(out: Path, cell: Cell = CELL, seed: int = 0, steps: int | None = 2, extra: tuple[str, ...] = ()) -> Path:
    return runs.begin(OTB, LAPTOP, cell, seed, steps=steps, extra=extra, out=out)


def log(folder: Path, *steps: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            data = {"val-core/x/reward/mean@1": 0.1} if step == 0 else {"actor/grad_norm": 0.1, "timing_s/step": 1.0}
            data |= (
                {"trajectory/reward/mean": 0.5, "critic/score/mean": 0.5, "perf/total_num_tokens": 10} if step else {}
            )
            file.write(json.dumps({"step": step, "data": data}) + "\n")


def finish(out: Path, cell: Cell = CELL, seed: int = 0, steps: int = 2, extra: tuple[str, ...] = ()) -> Path:
    folder = begin(out, cell, seed, steps, extra)
    log(folder, *range(steps + 1))
    runs.end(folder, runs.COMPLETE, 0, 1.5)
    return folder
