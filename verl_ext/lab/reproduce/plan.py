# SPDX-License-Identifier: Apache-2.0
"""From a cell of a table to the command of verl's trainer, and what that command needs. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_ext.common.cache import home
from verl_ext.common.overrides import hydra_value
from verl_ext.lab.reproduce.catalogue import load_yaml
from verl_ext.lab.reproduce.tables import Cell, Scale, Table
from verl_ext.recipes import find_recipe

LAPTOP = "Laptop scale: a test of the claim's direction, not the paper's number."
"""Stands over everything at that scale."""
_LOG = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH"
"""The process that writes the metrics may be on another node, which does not have the launcher's environment."""
_RUN_LOCAL = (
    "data.seed",
    "actor_rollout_ref.rollout.seed",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "trainer.validation_data_dir",
    "verl_ext.rows_dir",
    "hydra.run.dir",
    _LOG,
)
"""Keys that a run gets from its place and seed, so that they cannot tell two configurations apart."""


def data_home() -> Path:
    """Folder of the prepared data sets: ``data`` in the package's cache (:func:`verl_ext.common.cache.home`)."""
    return home() / "data"


def data_file(source: str, folder: Path | str | None = None) -> str:
    """The parquet file of a data set in a folder (default: :func:`data_home`), which may be a text with variables."""
    return f"{data_home() if folder is None else folder}/{source}.parquet"


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of several mappings, a later one winning; ``+key`` and ``++key`` are the same as ``key``. A key keeps
    its first place, and the spelling with the most ``+``.
    """
    found: dict[str, tuple[str, Any]] = {}
    for key, value in (pair for part in parts for pair in part.items()):
        name = key.lstrip("+")
        found[name] = (max(key, found.get(name, (key,))[0], key=len), value)
    return dict(found.values())


def words(*overrides: Mapping[str, Any]) -> list[str]:
    """``key=value`` for each of the overrides, which are `merged`."""
    return [f"{key}={hydra_value(value)}" for key, value in merged(*overrides).items()]


def full_words(
    table: Table,
    cell: Cell,
    seed: int | str,
    folder: Path | str,
    data: Path | str | None = None,
    steps: int | None = None,
) -> list[str]:
    """The Hydra overrides of a full-scale cell, in the order in which a person would read them: `run`, `plan` and the
    launch scripts take them from here. `seed`, the run's `folder` and that of prepared `data` (default:
    :func:`data_home`) may be texts with shell variables; `steps` are in place of the table's.
    """
    scale, hardware = table.full, table.full.hardware
    assert hardware is not None  # the loader demands it of a full scale
    steps = scale.steps if steps is None else steps
    files = {split: [data_file(name, data) for name in names] for split, names in sorted(scale.data.items())}
    overrides = words(
        {f"data.{split}_files": paths for split, paths in files.items() if paths},
        {"actor_rollout_ref.model.path": scale.models[0]},
        # verl keeps every checkpoint of a run, terabytes with optimizer states; a table may say another number.
        {"trainer.max_actor_ckpt_to_keep": 2},
        scale.overrides,
        cell.overrides,
        {
            "data.seed": seed,
            "actor_rollout_ref.rollout.seed": seed,
            "trainer.nnodes": hardware.nodes,
            "trainer.n_gpus_per_node": hardware.gpus_per_node,
            "trainer.logger": ["console", "file"],
            "trainer.project_name": "verl_ext",
            "trainer.experiment_name": experiment(table, scale, cell, seed),
            "trainer.resume_mode": "auto",
            "trainer.default_local_dir": f"{folder}/checkpoints",
            # Null in a cell whose models have other tokenizers: verl would write all answers with one.
            "trainer.validation_data_dir": cell.overrides.get("trainer.validation_data_dir", f"{folder}/validation"),
            "hydra.run.dir": f"{folder}/hydra",
            **({} if steps is None else {"trainer.total_training_steps": steps}),
        },
    )
    return [f"+recipe=[{','.join(cell.recipe)}]", *overrides, f"+{_LOG}={hydra_value(f'{folder}/metrics.jsonl')}"]


def experiment(table: Table, scale: Scale, cell: Cell, seed: int | str) -> str:
    """Name of a run for loggers and job servers; the same for the same table, scale, cell and seed."""
    return f"{table.folder}.{scale.name}.{cell.name}.seed_{seed}"


def laptop_overrides(table: Table, cell: Cell, seed: int, folder: Path) -> list[str]:
    """What a laptop-scale cell says beside the demo's own overrides."""
    scale = table.laptop
    assert scale is not None
    common = {
        "trainer.experiment_name": experiment(table, scale, cell, seed),
        "trainer.validation_data_dir": f"{folder}/validation",
        f"+{_LOG}": f"{folder}/metrics.jsonl",
    }
    return words(common, scale.overrides, cell.overrides)


def template(name: str) -> Any:
    """A text of ``assets``, as a jinja2 template."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("verl_ext.lab.reproduce", "assets"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    ).get_template(name)


def settings(table: Table, scale: Scale, cell: Cell) -> dict[str, str]:
    """All that decides what a cell computes, by key: its recipes and what is in them, overrides, data and task; neither
    seed nor number of steps nor any path. Two runs with equal settings belong to one cell.
    """
    found, names = {"recipe": ",".join(cell.recipe)}, list(cell.recipe)
    if scale.name == "laptop":
        from verl_ext.lab.demo.tasks import TASKS, recipe_list

        task = TASKS[str(scale.task)]
        found["task"] = task.name
        found |= {f"task.{key}": hydra_value(value) for key, value in asdict(task.settings).items() if key != "steps"}
        names = recipe_list(task, cell.recipe)
        overrides = [*task.overrides, *words(scale.overrides, cell.overrides)]
    else:
        overrides = full_words(table, cell, 0, "", "")[1:]
    found |= {key.lstrip("+"): value for key, _, value in (word.partition("=") for word in overrides)}
    for name in names:
        content = json.dumps(load_yaml(find_recipe(name).path), sort_keys=True)  # without the file's comments
        found[f"recipe/{name}.yaml"] = hashlib.sha256(content.encode()).hexdigest()[:12]
    hidden = {*_RUN_LOCAL, *(() if scale.steps is None else ("trainer.total_training_steps",))}
    return {key: value for key, value in found.items() if key not in hidden}


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What changed from one :func:`settings` to another, a text a key."""
    return [
        f"the file {key} says something else"
        if key.startswith("recipe/") and key in before and key in after
        else f"{key}: was {before.get(key, 'not set')}, is {after.get(key, 'not set')}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]


def number(count: int, what: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def judge_gpus(scale: Scale, said: Mapping[str, str] | None = None) -> int:
    """GPUs beside the trainer's that the judge of kernels holds, one a worker; `said` are overrides of the user's."""
    found = {key.lstrip("+"): value for key, value in {**scale.overrides, **(said or {})}.items()}
    return int(found.get("verl_ext.kernels.workers", 1)) if found.get("verl_ext.kernels.backend") == "triton" else 0


def cost(scale: Scale, cells: Sequence[Cell], seeds: Sequence[int], steps: int | None = None) -> str:
    """The cost of cells and seeds in words; with another number of steps than the table's, if it is given."""
    runs = f"{number(len(cells), 'cell')} x {number(len(seeds), 'seed')}"
    if scale.name == "laptop":
        steps = steps or scale.steps
        assert steps is not None and scale.steps is not None  # the loader demands them of a laptop scale
        runs = f"{runs}, {number(steps, 'step')} each; CPU only"
        if scale.minutes is None:
            return f"{runs}; the time was not measured"
        share = len(cells) * len(seeds) / (len(scale.runnable) * len(scale.seeds)) * steps / scale.steps
        return f"{runs}; about {number(math.ceil(scale.minutes * share), 'minute')} on 2 cores"
    hardware, hours = scale.hardware, scale.hours
    assert hardware is not None and hours is not None
    gpus = f"{number(hardware.gpus_per_node, 'GPU')} ({hardware.gpu}; {hardware.certainty})"
    machines = f"{number(hardware.nodes, 'node')} with {gpus}"
    if judge := judge_gpus(scale):
        machines += f" and {number(judge, 'GPU')} more for the judge"
    if hours.value is None:
        return f"{runs} on {machines}; hours of a cell: {hours.note or 'not stated'}"
    whole = hours.value * hardware.nodes * hardware.gpus_per_node * len(cells) * len(seeds)
    return (
        f"{runs} on {machines}; {hours.value:g} hours a cell and seed ({hours.certainty}"
        f"{f'; {hours.note}' if hours.note else ''}); {whole:g} GPU-hours in all"
        f"{'' if steps in (None, scale.steps) else f', for the whole length and not for {steps} steps'}"
    )


def expand(override: str, inputs: Iterable[str], environment: Mapping[str, str]) -> str:
    """An override with the table's inputs (``$NAME`` or ``${NAME}``) replaced by their values in the environment."""
    known = {name: environment[name] for name in inputs if name in environment}
    return string.Template(override).safe_substitute(known)


def shell_word(word: str, variables: Iterable[str] = ()) -> str:
    """A word as a shell reads it: the given variables are left to the shell, all else stands for itself."""
    either = "|".join(map(re.escape, variables)) or "(?!)"
    parts = re.split(rf"(\$(?:(?:{either})\b|\{{(?:{either})\}}))", word)  # every second one is a variable
    if len(parts) == 1:
        return shlex.quote(word)
    parts[::2] = [re.sub(r'([$`"\\])', r"\\\1", part) for part in parts[::2]]
    return f'"{"".join(parts)}"'


def shown(command: Sequence[str], variables: Collection[str] = ()) -> str:
    """A command as a person would type it, a word a line after the first three; `variables` are left to the shell."""
    return " \\\n    ".join([" ".join(command[:3]), *(shell_word(word, variables) for word in command[3:])])
