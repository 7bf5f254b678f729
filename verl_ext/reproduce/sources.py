# SPDX-License-Identifier: Apache-2.0
"""The data sets of the paper tables (``sources.yaml``), and whether one is prepared and as it was written."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from verl_ext.overrides import Failure
from verl_ext.recipes import suggestion
from verl_ext.reproduce import plan
from verl_ext.reproduce.catalogue import load_yaml
from verl_ext.reproduce.tables import Certainty

PLAIN = ".plain"
"""Ending of a mathematics data set's name: the question alone."""

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
"""Stands below every question of a mathematics data set that is not plain."""


class PrepareError(Failure):
    """A data set cannot be prepared or used; the message names it and says what to do."""


@dataclass(frozen=True)
class Source:
    """An entry of ``sources.yaml``."""

    name: str  # as tables say it, :data:`PLAIN` included
    title: str  # for people
    kind: Literal["math", "qa", "kernel_task", "kernel_code", "environment", "corpus"]  # how a record becomes a row
    certainty: Certainty  # of `rows`
    rows: int | None = None  # to be written; None: not known
    # Arguments of ``datasets.load_dataset``; without `hub` a hub has it not.
    hub: str | None = None
    config: str | None = None
    split: str | None = None
    files: tuple[str, ...] = ()  # further places below a local folder, which may be patterns
    columns: Mapping[str, str] = field(default_factory=dict)  # the kind's field to the record's column
    license: str | None = None  # as stated by the data set's page; None: not known
    note: str = ""  # a sentence
    tables: tuple[str, ...] = ()  # that may want it though their runs do not read it (a corpus)
    # Of an environment's tasks.
    environment: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    data_source: str = ""
    draw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """The name without :data:`PLAIN`."""
        return self.name.removesuffix(PLAIN)

    @property
    def digest(self) -> str:
        """Of all that decides what is written."""
        said = [self.name, self.kind, self.config, self.split, dict(self.columns), self.environment, dict(self.kwargs)]
        text = json.dumps([*said, self.data_source, dict(self.draw), BOXED], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_SOURCE = TypeAdapter(Source)


@functools.cache
def _entries() -> Mapping[str, Mapping[str, Any]]:
    content = load_yaml(Path(__file__).with_name("sources.yaml"))
    whole = {name: {**content.get(one.pop("extends", None), {}), **one} for name, one in content.items()}
    for one in whole.values():
        one["files"] = [file.format_map(one) for file in one.get("files", ())]
    return whole


def source_names() -> list[str]:
    """Names of all data sets, without the plain variants."""
    return list(_entries())


def find_source(name: str) -> Source:
    """The data set of this name. Raises PrepareError: there is none."""
    entry = _entries().get(name.removesuffix(PLAIN))
    if entry is None or (name.endswith(PLAIN) and entry["kind"] != "math"):
        raise PrepareError(f"unknown data set {name!r}{suggestion(name, source_names())}")
    return _SOURCE.validate_python({**entry, "name": name})


def target_of(source: Source, folder: Path) -> Path:
    """The file that a data set is prepared in."""
    return folder / f"{source.name}.jsonl" if source.kind == "corpus" else Path(plan.data_file(source.name, folder))


def manifest_of(source: Source, folder: Path) -> Path:
    """The manifest beside it."""
    return folder / f"{source.name}.manifest.json"


def digest_of(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(name: str, folder: Path) -> dict[str, Any] | None:
    """The manifest of a prepared data set whose file is as it was written; None if it is not prepared. Raises
    PrepareError: the file or its manifest is missing, was changed, or was made by another definition.
    """
    source = find_source(name)
    path, manifest_path = target_of(source, folder), manifest_of(source, folder)
    missing = [one for one in (path, manifest_path) if not one.exists()]
    if len(missing) == 2:
        return None
    again = f"Delete {path} and {manifest_path.name}, then prepare it again."
    if missing:
        raise PrepareError(f"{name}: {missing[0]} is missing beside its other half. {again}")
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        expected, definition = manifest["sha256"], manifest["definition"]
    except (ValueError, KeyError, TypeError) as error:
        raise PrepareError(f"{name}: {manifest_path} cannot be read as a manifest. {again}") from error
    if digest_of(path) != expected:
        raise PrepareError(f"{name}: {path} is not what was prepared (its sha256 differs from the manifest's). {again}")
    if definition != source.digest:
        raise PrepareError(f"{name}: {path} was prepared by another definition of the data set. {again}")
    return manifest
