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
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas

from verl_ext.reproduce import plan

Stamp = tuple[int, int]


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
    """Samples of a dump, each by its last output, and what is not whole and left out, a sentence each. A sample is a
    row, in the order of the file: ``task``, which tells tasks apart, and the fields of the dump without its texts.
    Raises MetricMissing: there is none.
    """
    return _samples(path, _stamp(path))


def sources_of(path: Path, sets: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Data source by task of a dump, by the data sets (`sets`) that were validated on, and a sentence on the tasks that
    are in none of them, which are left out. Raises MetricMissing: it cannot be told.
    """
    samples, _ = read_dump(path)
    if "data_source" in samples:
        known = samples.dropna(subset="data_source")
        return dict(zip(known["task"], known["data_source"].astype(str), strict=True)), []
    files = [Path(plan.data_file(name)) for name in sets]
    missing = [name for name, file in zip(sets, files, strict=True) if not file.exists()]
    if missing:
        raise MetricMissing(
            f"data sources cannot be told: the dump does not say them (the reward function may return data_source), "
            f"and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not prepared here"
        )
    return _placed(path, _stamp(path), tuple((file, _stamp(file)) for file in files))


def _stamp(path: Path) -> Stamp:
    """Changes when the file does."""
    return path.stat().st_mtime_ns, path.stat().st_size


def _outputs(path: Path) -> tuple[pandas.DataFrame, int]:
    """A row an output, with ``task``, ``sample`` and ``turn`` of its uid; and the number of lines that are not whole. A
    record without a uid of that form is a sample of its own, of the task that its input text says.
    """
    whole, broken = [], 0
    for line in filter(bytes.strip, path.read_bytes().split(b"\n")):
        try:
            whole.append({**json.loads(line)})
        except (ValueError, TypeError):
            broken += 1
    if not whole:
        raise MetricMissing(f"{path.parent.name}/{path.name} has no sample")
    frame = pandas.DataFrame(whole)
    texts = frame.reindex(columns=["uid", "input"]).astype(object).fillna("").astype(str)
    uid = texts["uid"].str.extract(r"^(?P<task>.*)_(?P<sample>\d+)_(?P<turn>\d+)$")
    lines = pandas.Series([f"line {number}" for number in frame.index])
    uid = uid.fillna({"task": texts["input"], "sample": lines, "turn": "0"}).astype({"turn": int})
    return frame.assign(**uid, input=texts["input"]), broken


# Many metrics are read from one dump; its texts, which are nearly all of it, are not kept.
@lru_cache(maxsize=64)
def _samples(path: Path, stamp: Stamp) -> tuple[pandas.DataFrame, list[str]]:
    outputs, broken = _outputs(path)
    last = outputs.groupby(["task", "sample"], sort=False)["turn"].idxmax()
    samples = outputs.loc[last].drop(columns=["turn", "sample", "input", "output", "gts"], errors="ignore")
    problem = f"{path.parent.name}/{path.name}: {broken} of its lines are not whole; the others are used"
    return samples, [problem] if broken else []


@lru_cache(maxsize=64)
def _placed(path: Path, stamp: Stamp, files: tuple[tuple[Path, Stamp], ...]) -> tuple[dict[str, str], list[str]]:
    known = pandas.concat([_questions(*file) for file in files]).groupby("truth")
    outputs, _ = _outputs(path)
    # All outputs of a task's first sample: not every agent of a team is shown the question.
    outputs = outputs[outputs["sample"] == outputs.groupby("task")["sample"].transform("first")]
    tasks = outputs.groupby("task", sort=False)
    placed: dict[str, str] = {}
    twins: dict[tuple[str, ...], int] = defaultdict(int)
    for task, own in tasks:
        truth = _key(own["gts"].iloc[-1] if "gts" in own else None)
        if truth not in known.groups:
            continue
        rows = known.get_group(truth)
        if rows["source"].nunique() > 1:
            rows = rows[[any(question in text for text in own["input"]) for question in rows["question"]]]
            rows = rows[rows["question"].str.len() == rows["question"].str.len().max()]
        if len(found := sorted(set(rows["source"]))):
            # A question that stands in several data sets is a task of each of them.
            place = (truth, *found)
            placed[task] = found[twins[place] % len(found)]
            twins[place] += 1
    problem = f"{len(tasks) - len(placed)} of {len(tasks)} tasks are in none of the prepared data sets: left out"
    return placed, [f"{path.parent.name}/{path.name}: {problem}"] if len(placed) < len(tasks) else []


@lru_cache(maxsize=32)
def _questions(file: Path, stamp: Stamp) -> pandas.DataFrame:
    """``truth``, ``question`` (the prompt's last message) and ``source`` of every row of a prepared data set."""
    from pyarrow import parquet

    rows = parquet.read_table(file, columns=["prompt", "data_source", "reward_model"]).to_pylist()
    return pandas.DataFrame(
        {
            "truth": [_key((row["reward_model"] or {}).get("ground_truth")) for row in rows],
            "question": [str(row["prompt"][-1]["content"]).strip() if row["prompt"] else "" for row in rows],
            "source": [str(row["data_source"]) for row in rows],
        }
    )


def _key(truth: Any) -> str:
    return json.dumps(truth, sort_keys=True, default=str)
