# SPDX-License-Identifier: Apache-2.0
"""What a scale of a table needs and this machine lacks, with the command that brings it. Imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from verl_ext.lab.reproduce import plan
from verl_ext.lab.reproduce.tables import Cell, Scale, Table

#: Import name or distribution of a package to what installs it, where that is not its own name.
_INSTALL = {
    "vllm": "'verl-ext[vllm]'",
    "sglang": "'verl-ext[sglang]'",
    "math-verify": "'verl-ext[math]'",
    "gymnasium": "'verl-ext[gymnasium]'",
    "textworld": "'verl-ext[textworld]'",
    "bm25s": "'verl-ext[search]'",
}


class Lack(NamedTuple):
    """Something that is missing."""

    what: str  # a few words
    remedy: str  # a command or what to do, a sentence

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def gpus() -> int:
    """GPUs that a process of this machine may use, counted without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name for name in visible.split(",") if name.strip()]
        return len(names) if names != ["-1"] else 0
    nvidia = len(list(Path("/dev").glob("nvidia[0-9]*")))
    # A node of the kernel's topology is a CPU where its gpu_id is 0.
    amd = [path.read_text().strip() for path in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")]
    return nvidia + sum(name != "0" for name in amd)


def has_package(name: str) -> bool:
    """Whether a package is installed, by the name of its distribution or of its module."""
    try:
        importlib.metadata.distribution(name.replace("_", "-"))
        return True
    except importlib.metadata.PackageNotFoundError:
        module = name.replace("-", "_")
        return module.isidentifier() and importlib.util.find_spec(module) is not None


def packages(table: Table, cells: Sequence[Cell]) -> list[str]:
    """Packages that full-scale cells need: the table's, and the rollout engine's."""
    key = "actor_rollout_ref.rollout.name"
    engines = {plan.merged(table.full.overrides, cell.overrides).get(key) for cell in cells}
    found = [*(name for name in ("vllm", "sglang") if name in engines), *table.full.needs.packages]
    return list(dict.fromkeys(name.lower().replace("_", "-") for name in found))


def lacks(
    table: Table,
    scale: Scale,
    cells: Sequence[Cell],
    extra: Sequence[str] = (),
    data: Path | None = None,
    environment: Mapping[str, str] | None = None,
    sums: bool = False,
) -> list[Lack]:
    """What is missing on this machine to run cells; empty if they can be run.

    A data file or number of GPUs that the user's overrides `extra` say is not asked for. `data` is the folder of the
    prepared data (default: :func:`verl_ext.lab.reproduce.plan.data_home`), whose checksums are compared with `sums`.
    """
    environment = os.environ if environment is None else environment
    found = [] if has_package("verl") else [Lack("verl is not installed", "pip install 'verl>=0.9.1,<0.10'")]
    laptop = scale.name == "laptop"
    of_task = {"lake": ["gymnasium"], "wide_lake": ["gymnasium"], "search_team": ["bm25s"]}.get(scale.task or "", [])
    for name in of_task if laptop else packages(table, cells):
        if not has_package(name):
            found.append(Lack(f"the package {name} is not installed", f"pip install {_INSTALL.get(name, name)}"))
    said = {word.partition("=")[0].lstrip("+"): word.partition("=")[2] for word in extra}
    if laptop:
        return [*found, *(_of_kernels(said) if scale.task == "fuse" else ())]
    for variable, text in scale.needs.inputs.items():
        if not environment.get(variable):
            found.append(Lack(f"the environment variable {variable} is not set", f"export {variable}=... ({text})"))
    splits = [split for split in ("train", "val") if f"data.{split}_files" not in said]
    names = list(dict.fromkeys(name for split in splits for name in scale.data.get(split, ())))
    folder = plan.data_home() if data is None else data
    absent = [name for name in names if not Path(plan.data_file(name, folder)).is_file()]
    if absent:
        command = f"verl-ext reproduce prepare {table.name} (without a network: --from FOLDER)"
        found.append(Lack(f"no data {', '.join(absent)} in {folder}", command))
    if sums:
        from verl_ext.lab.reproduce.prepare import PrepareError, verify

        for name in names:
            try:
                if name not in absent:
                    verify(name, folder)
            except PrepareError as error:
                found.append(Lack(f"the data {name} cannot be used", str(error)))
    hardware = scale.hardware
    if hardware is not None and not environment.get("RAY_ADDRESS"):
        each, nodes = (
            int(text) if (text := said.get(f"trainer.{key}", "")).isdecimal() else own
            for key, own in (("n_gpus_per_node", hardware.gpus_per_node), ("nnodes", hardware.nodes))
        )
        seen, send, judge = gpus(), "--submit http://HEAD:8265", plan.judge_gpus(scale, said)
        more = f", and {judge} more for the judge of kernels" if judge else ""
        if nodes > 1:
            what = f"{nodes} nodes with {each} GPUs each are needed{more}"
            found.append(Lack(what, f"start a Ray cluster on them and give {send}"))
        elif seen < each + judge:
            what = f"{each} GPUs are needed{more}; {seen} are seen"
            small = ", or try --scale laptop" if table.laptop or table.laptop_of else ""
            found.append(Lack(what, f"run it where they are, or send it there with {send}{small}"))
    return found


def _of_kernels(said: Mapping[str, str]) -> list[Lack]:
    """What the task `fuse` needs, on which programs of a model are compiled and run."""
    from verl_ext.sandbox import CageError, check

    found = []
    if shutil.which("gcc") is None or shutil.which("nm") is None:
        found.append(Lack("there is no gcc with binutils", "install both (Debian: apt install gcc)"))
    try:
        check(said.get("verl_ext.sandbox.cage", "required"))
    except (CageError, ValueError) as error:
        found.append(Lack("the sandbox has no cage here", str(error)))
    return found
