# SPDX-License-Identifier: Apache-2.0
"""Samples of a validation, from the files that verl writes below ``trainer.validation_data_dir``.

A dump has a line for each output: ``input`` and ``output`` (texts), ``gts`` (the row's ground truth), ``score``, the
numbers that the reward function returns beside it, and ``uid`` (``<task>_<sample>_<output>``). It does not say from
which data set a task is, unless the reward function returns ``data_source``; otherwise the prepared data sets tell: by
the ground truth, and where several have the same by the question, which stands in the input.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_ext.reproduce import plan


class DumpMissing(ValueError):
    """There is no dump to use, or it does not say what is asked; the message says what is missing."""


@dataclass(frozen=True)
class Sample:
    """One sample of a task.

    Attributes:
        task: tells tasks apart.
        fields: of its last output, without the texts.
    """

    task: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Dump:
    """A validation.

    Attributes:
        path: the file.
        samples: in the order of the file.
        problems: what is not whole.
    """

    path: Path
    samples: tuple[Sample, ...]
    problems: tuple[str, ...]


def last_dump(folder: Path, limit: int) -> Path:
    """The dump of the last validation up to a step.

    Args:
        folder: verl's ``trainer.validation_data_dir``, with a ``<step>.jsonl`` for each validation.
        limit: last step that counts.

    Raises:
        DumpMissing: there is none.
    """
    files = {int(path.stem): path for path in folder.glob("*.jsonl") if path.stem.isdecimal()}
    steps = [step for step in files if step <= limit]
    if not steps:
        raise DumpMissing(
            f"no validation dump of a step up to {limit} in {folder.name}/ (trainer.validation_data_dir writes them)"
        )
    return files[max(steps)]


def read_dump(path: Path) -> Dump:
    """Read a dump; a line that is not whole is left out and said.

    Raises:
        DumpMissing: there is no sample in it.
    """
    return _read(path, _stamp(path))


Stamp = tuple[int, int]


def _stamp(path: Path) -> Stamp:
    """Changes when the file does."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=64)
def _read(path: Path, stamp: Stamp) -> Dump:
    # Many metrics are read from one dump; its texts, which are nearly all of it, are not kept.
    broken = 0
    samples: dict[str, tuple[int, Sample]] = {}
    for number, record in enumerate(_records(path)):
        if record is None:
            broken += 1
            continue
        task, sample, output = _identity(record, number)
        if sample not in samples or output > samples[sample][0]:
            fields = {key: value for key, value in record.items() if key not in ("input", "output", "gts")}
            samples[sample] = (output, Sample(task, fields))
    if not samples:
        raise DumpMissing(f"{path.parent.name}/{path.name} has no sample")
    name = f"{path.parent.name}/{path.name}"
    problems = (f"{name}: {broken} of its lines are not whole; the others are used",) if broken else ()
    return Dump(path, tuple(sample for _, sample in samples.values()), problems)


def _records(path: Path) -> list[dict[str, Any] | None]:
    out: list[dict[str, Any] | None] = []
    for line in path.read_bytes().split(b"\n"):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            out.append(record if isinstance(record, dict) else None)
    return out


def _identity(record: Mapping[str, Any], number: int) -> tuple[str, str, int]:
    """Task, sample and output of a record.

    A record without a uid of that form is a sample of its own, of the task that its input text says.
    """
    parts = str(record.get("uid", "")).rsplit("_", 2)
    if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
        return parts[0], f"{parts[0]}_{parts[1]}", int(parts[2])
    return str(record.get("input", "")), f"line {number}", 0


# --- data sources -------------------------------------------------------------------------------------------------


def sources_of(dump: Dump, sets: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Which task is from which data source.

    Args:
        dump: of a validation.
        sets: names of the data sets that were validated on.

    Returns:
        Data source by task, and problems: tasks that are in none of the data sets are left out.

    Raises:
        DumpMissing: it cannot be told; the message says why.
    """
    said = {sample.task: str(sample.fields["data_source"]) for sample in dump.samples if "data_source" in sample.fields}
    if said:
        return said, []
    files = [Path(plan.data_file(name)) for name in sets]
    missing = [name for name, file in zip(sets, files, strict=True) if not file.exists()]
    if missing:
        raise DumpMissing(
            f"data sources cannot be told: the dump does not say them (the reward function may return data_source), "
            f"and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not prepared here"
        )
    return _placed(dump.path, _stamp(dump.path), tuple((file, _stamp(file)) for file in files))


@lru_cache(maxsize=64)
def _placed(path: Path, stamp: Stamp, files: tuple[tuple[Path, Stamp], ...]) -> tuple[dict[str, str], list[str]]:
    known: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for file, own_stamp in files:
        for truth, question, source in _questions(file, own_stamp):
            known[truth].append((question, source))
    inputs: dict[str, list[str]] = defaultdict(list)
    truths: dict[str, str] = {}
    seen: dict[str, str] = {}
    for number, record in enumerate(_records(path)):
        if record is not None:
            task, sample, _ = _identity(record, number)
            # All outputs of a task's first sample: not every agent of a team is shown the question.
            if seen.setdefault(task, sample) == sample:
                inputs[task].append(str(record.get("input", "")))
                truths[task] = _key(record.get("gts"))
    placed: dict[str, str] = {}
    twins: dict[tuple[str, ...], int] = defaultdict(int)
    for task, texts in inputs.items():
        own = known.get(truths[task], [])
        if len({source for _, source in own}) > 1:
            own = [(question, source) for question, source in own if any(question in text for text in texts)]
            longest = max((len(question) for question, _ in own), default=0)
            own = [(question, source) for question, source in own if len(question) == longest]
        found = sorted({source for _, source in own})
        if found:
            # A question that stands in several data sets is a task of each of them.
            place = (truths[task], *found)
            placed[task] = found[twins[place] % len(found)]
            twins[place] += 1
    problems = []
    if len(placed) < len(inputs):
        text = f"{len(inputs) - len(placed)} of {len(inputs)} tasks are in none of the prepared data sets: left out"
        problems.append(f"{path.parent.name}/{path.name}: {text}")
    return placed, problems


@lru_cache(maxsize=32)
def _questions(file: Path, stamp: Stamp) -> list[tuple[str, str, str]]:
    """Ground truth, last message of the prompt and data source of every row of a prepared data set."""
    from pyarrow import parquet

    rows = parquet.read_table(file, columns=["prompt", "data_source", "reward_model"]).to_pylist()
    return [
        (
            _key((row["reward_model"] or {}).get("ground_truth")),
            str(row["prompt"][-1]["content"]).strip() if row["prompt"] else "",
            str(row["data_source"]),
        )
        for row in rows
    ]


def _key(truth: Any) -> str:
    return json.dumps(truth, sort_keys=True, default=str)
