# SPDX-License-Identifier: Apache-2.0
"""Samples of a validation, from the files below ``trainer.validation_data_dir``.

verl's dump ``<step>.jsonl`` has a line for each output: ``input`` and ``output`` (texts), ``gts`` (the row's ground
truth), ``score``, the numbers that the reward function returns beside it, and ``uid`` (``<task>_<sample>_<output>``).
Beside it the package writes ``<step>.tasks.json``: the data source of each task that was validated, also of one that
lost all of its samples (:mod:`verl_ext.integration.parts.recovery.missing`).
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import pandas


class MetricMissing(ValueError):
    """A run has no value of a metric; the message says why."""


def last_dump(folder: Path, limit: int) -> Path:
    """The last validation's dump up to step `limit` in ``trainer.validation_data_dir``. Raises MetricMissing: none."""
    steps = [int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdecimal() and int(path.stem) <= limit]
    if not steps:
        what = f"no validation dump of a step up to {limit} in {folder.name}/"
        raise MetricMissing(f"{what} (trainer.validation_data_dir writes them)")
    return folder / f"{max(steps)}.jsonl"


def read_dump(path: Path) -> tuple[pandas.DataFrame, list[str]]:
    """Samples of a dump, each by its last output, and what is odd, a sentence each. A sample is a row, in the order of
    the file: ``task``, which tells tasks apart, its ``source`` (NaN if it is not known), and the fields of the dump
    without its texts. A task that lost all of its samples is a row without any. Raises MetricMissing: there is none.
    """
    tasks = path.with_suffix(".tasks.json")
    states = (one.stat() for one in (path, tasks) if one.exists())
    return _samples(path, tasks, tuple((state.st_mtime_ns, state.st_size) for state in states))


# Many metrics are read from one dump; its texts, which are nearly all of it, are not kept.
@lru_cache(maxsize=64)
def _samples(path: Path, tasks: Path, changed: tuple[tuple[int, int], ...]) -> tuple[pandas.DataFrame, list[str]]:
    whole, broken = [], 0
    for line in filter(bytes.strip, path.read_bytes().split(b"\n")):
        try:
            whole.append({**json.loads(line)})
        except (ValueError, TypeError):
            broken += 1
    if not whole:
        raise MetricMissing(f"{path.parent.name}/{path.name} has no sample")
    frame = pandas.DataFrame(whole)
    # A record without a uid of that form is a sample of its own, of the task that its input text says.
    texts = frame.reindex(columns=["uid", "input"]).astype(object).fillna("").astype(str)
    uid = texts["uid"].str.extract(r"^(?P<task>.*)_(?P<sample>\d+)_(?P<turn>\d+)$")
    lines = pandas.Series([f"line {number}" for number in frame.index])
    uid = uid.fillna({"task": texts["input"], "sample": lines, "turn": "0"}).astype({"turn": int})
    last = uid.groupby(["task", "sample"], sort=False)["turn"].idxmax()
    samples = frame.assign(task=uid["task"]).loc[last].drop(columns=["input", "output", "gts"], errors="ignore")
    problems = [f"{broken} of its lines are not whole; the others are used"] if broken else []
    sources = json.loads(tasks.read_text(encoding="utf-8")) if tasks.exists() else {}
    if sources and not set(samples["task"]) <= set(sources):
        problems.append(f"{tasks.name} is of another validation (a run was killed between the two): not used")
        sources = {}
    if lost := [task for task in sources if task not in set(samples["task"])]:
        problems.append(f"{len(lost)} of {len(sources)} tasks have lost all of their samples and count as failed")
        samples = pandas.concat([samples, pandas.DataFrame({"task": lost})], ignore_index=True)
    samples["source"] = samples["task"].map(sources)
    return samples, [f"{path.parent.name}/{path.name}: {text}" for text in problems]
