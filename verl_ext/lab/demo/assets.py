# SPDX-License-Identifier: Apache-2.0
"""Where prepared models and tasks are kept, and how they get there: built aside, then renamed into place.

Imports nothing heavy, so that a cached result is found at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.common.cache import home
from verl_ext.lab.demo.recipes import (
    FORMAT,
    ChainRecipe,
    FuseRecipe,
    LakeRecipe,
    SearchTeamRecipe,
    SmolLM2Recipe,
    WarmupRecipe,
)

Progress = Callable[[str], None]
Build = Callable[..., dict[str, Any]]
"""Given an empty folder, a recipe, a seed and what to call with lines of progress, fills the folder (``model/``,
``data/``) and returns what the manifest says beside the recipe (``task``, ``prompt_length``, ``response_length``,
``measured`` and, if it is not `AGENT_LOOP`, ``agent_loop``)."""

#: Written last into a folder: its presence says that the folder is complete.
MANIFEST = "assets.json"
AGENT_LOOP = "verl_ext_multi_turn"


@dataclass(frozen=True)
class DemoAssets:
    """A prepared model with its task."""

    folder: str  # where all of it is
    model_path: str  # Hugging Face model folder (weights, tokenizer, generation config)
    train_file: str  # parquet file for ``data.train_files``
    val_file: str  # parquet file for ``data.val_files``
    agent_loop: str  # ``actor_rollout_ref.rollout.agent.default_agent_loop`` (the rows carry it as well)
    task: str  # name for people
    prompt_length: int  # tokens that suffice for the longest conversation
    response_length: int  # and for one turn's answer
    measured: dict[str, Any] = field(default_factory=dict)  # while preparing, e.g. the success rate after the warm-up
    cached: bool = False  # it was there already


def say(line: str) -> None:
    """Default progress: one line on stderr, so that stdout stays for results."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the progress bars of transformers, which would stand between our own lines."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end what is within as Ctrl-C does, so that it is cleaned up."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # where Python lets nobody listen to signals
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def recipe_key(recipe: Mapping[str, Any]) -> str:
    """Name of the cache folder of a recipe: 12 hex digits of the SHA-256 of its JSON."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def prepare(
    kind: str,
    recipe: WarmupRecipe | LakeRecipe | FuseRecipe | SearchTeamRecipe | ChainRecipe | SmolLM2Recipe,
    build: Build,
    out: str | Path | None = None,
    *,
    cache_dir: str | Path | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
) -> DemoAssets:
    """Have `build` fill a folder with a model and its task, unless it is there already.

    Args:
        kind: name of the folder in the cache, and for people.
        recipe, seed: what is built; the folder's name in the cache follows from them.
        out, cache_dir, force, progress: as in :mod:`verl_ext.lab.demo.prepare`.

    Raises:
        FileExistsError: ``out`` exists and holds something else: what was not made here, or, without `force`, what was
            made of another recipe or seed.
    """
    tell = progress or say
    described = {"kind": kind, "format": FORMAT, "seed": seed, **asdict(recipe)}
    root = Path(cache_dir).expanduser() if cache_dir is not None else home()
    folder = Path(out).expanduser() if out is not None else root / kind / recipe_key(described)
    folder = folder.absolute()
    found = _read(folder, described)
    if found is not None and not force:
        return found
    if out is not None or not (folder / MANIFEST).is_file():
        _spare(folder, described, force)

    folder.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    # Beside its final place, so that the rename stays within one file system.
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    with interrupted_by_sigterm():
        try:
            work.chmod(0o755)
            with quiet_transformers():
                described_assets = build(work, recipe, seed, tell)
            seconds = time.perf_counter() - started
            manifest = {"recipe": described, "seconds": seconds, "files": _files(work), **described_assets}
            (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            if out is not None:
                _spare(folder, described, force)  # what has come there in the meantime
            _put_in_place(work, folder, described, force)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    made = _read(folder, described)
    if made is None:
        raise RuntimeError(f"{folder} was replaced by another process with a different recipe; run again")
    tell(f"{kind}: ready in {folder} ({seconds:.1f} s)")
    return DemoAssets(**{**asdict(made), "cached": False})


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def _spare(folder: Path, described: Mapping[str, Any], force: bool) -> None:
    """Raises FileExistsError: a folder holds what may not be replaced by what is `described`: files that no manifest of
    ours names, or, without `force`, anything else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        before = manifest["recipe"]
    except (OSError, ValueError, KeyError, TypeError):
        said = f"{folder} exists and was not made by `verl-ext prepare`; name another folder or empty it"
        raise FileExistsError(said) from None
    after = json.loads(json.dumps(described))
    if before != after and not force:
        changed = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
        keys = ["kind"] if "kind" in changed else changed
        said = "; ".join(f"{key} is {before.get(key)}, not {after.get(key)}" for key in keys)
        raise FileExistsError(f"{folder} holds another model and task ({said}): name another folder, or give --force")
    # Manifests from before they named files: what every build makes.
    known = {MANIFEST, *manifest.get("files", ())}
    foreign = [
        name
        for name in _files(folder)
        if name not in known and ("files" in manifest or name.split("/")[0] not in ("model", "data"))
    ]
    if foreign and (force or before != after):
        said = f"{folder} holds files that were not made by `verl-ext prepare`: {', '.join(foreign[:5])}"
        raise FileExistsError(f"{said}{', ...' if len(foreign) > 5 else ''}; move them, or name another folder")


def _put_in_place(work: Path, folder: Path, described: dict[str, Any], force: bool) -> None:
    old: Path | None = None
    if folder.exists():
        if not force and _read(folder, described) is not None:
            return  # another process was quicker with the same recipe; its result is as good
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
        os.replace(folder, old)  # an empty folder may be replaced
    try:
        os.replace(work, folder)
    except OSError:
        if _read(folder, described) is None:  # not just another process that was quicker
            raise
    finally:
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)


def _read(folder: Path, described: dict[str, Any]) -> DemoAssets | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    if manifest.get("recipe") != json.loads(json.dumps(described)):
        return None
    return DemoAssets(
        folder=str(folder),
        model_path=str(folder / "model"),
        train_file=str(folder / "data" / "train.parquet"),
        val_file=str(folder / "data" / "val.parquet"),
        agent_loop=manifest.get("agent_loop", AGENT_LOOP),
        task=manifest["task"],
        prompt_length=manifest["prompt_length"],
        response_length=manifest["response_length"],
        measured=manifest["measured"],
        cached=True,
    )
