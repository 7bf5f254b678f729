# SPDX-License-Identifier: Apache-2.0
"""Panels: which tasks of an environment a run plays, in which order, as a list with a fingerprint each.

``prepare`` writes ``<name>.panel.json`` beside the rows of an environment's data set, and the rows name the
fingerprints, which the environment's process checks: the same panel is the same tasks in the same order, whatever the
order of files and the number of workers. Where the environment is not installed, the list has seeds alone.
"""

from __future__ import annotations

import hashlib
import json
import random
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

AS_LONG = 16
"""Hex digits of a panel's digest that people see."""


def environment_rows(source: Any) -> tuple[list[dict[str, Any]], str]:
    """Rows of an environment's tasks, as the step-wise loop plays them, and why they have no fingerprints (empty: they
    do). `source` is a :class:`verl_ext.lab.reproduce.prepare.Source`.
    """
    from verl_ext.rollout.environments.data import build_rows
    from verl_ext.rollout.environments.panel import fingerprints
    from verl_ext.rollout.environments.protocol import EnvironmentFault, EnvironmentUnavailable

    rows: list[dict[str, Any]] = []
    for seed in source.draw["with"]:
        drawn = random.Random(seed).sample(range(source.draw["below"]), source.draw["count"])
        rows += build_rows(source.environment, drawn, source.kwargs)
    why, tasks = "", {}
    try:
        seeds = [row["extra_info"]["env_seed"] for row in rows]
        tasks = fingerprints(source.environment, source.kwargs, seeds)
    except (EnvironmentUnavailable, EnvironmentFault) as error:
        why = str(error)
    for number, row in enumerate(rows):
        row["data_source"] = source.data_source or row["data_source"]
        row["extra_info"] |= {"index": number, "task": tasks.get(row["extra_info"]["env_seed"], "")}
    return rows, why


def tasks_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tasks of rows, in their order; rows of no environment are left out."""
    found = [row["extra_info"] for row in rows if (row.get("extra_info") or {}).get("environment")]
    keys = ("environment", "environment_kwargs", "env_seed", "task")
    return [{key: one.get(key) or "" if key != "env_seed" else one[key] for key in keys} for one in found]


def digest(tasks: Sequence[Mapping[str, Any]]) -> str:
    """sha256 of a list of tasks, which says their order too, in hex."""
    return hashlib.sha256(json.dumps(list(tasks), sort_keys=True).encode()).hexdigest()


def write(name: str, rows: Sequence[Mapping[str, Any]], why: str, folder: Path) -> dict[str, Any]:
    """Write the panel of a data set beside it. Returns what its manifest says of it: digest, number of tasks, and why
    they have no fingerprints.
    """
    tasks = tasks_of(rows)
    about = {"digest": digest(tasks), "tasks": len(tasks), "without_fingerprints": why}
    text = json.dumps({"panel": name, **about, "list": tasks}, indent=1)
    (folder / f"{name}.panel.json").write_text(text + "\n", encoding="utf-8")
    return about


def of_command(path: Path) -> dict[str, str]:
    """Panels of the data that a run's ``command.txt`` names, by the file's name: how many tasks, and the digest's first
    digits. Data of no environment, and what cannot be read, has none.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = {}
    try:
        words = shlex.split(path.read_text(encoding="utf-8"), comments=True)
    except (OSError, ValueError):
        return {}
    for word in words:
        key, _, value = word.partition("=")
        if key.lstrip("+") in ("data.train_files", "data.val_files"):
            for file in map(Path, value.strip("[]'\"").replace("'", "").replace('"', "").split(",")):
                try:
                    tasks = tasks_of(pq.read_table(file, columns=["extra_info"]).to_pylist())
                except (OSError, pa.ArrowException, KeyError):
                    continue
                if tasks:
                    found[file.stem] = f"{len(tasks)} tasks, {digest(tasks)[:AS_LONG]}"
    return found
