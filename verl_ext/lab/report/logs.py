# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run, read from what verl's loggers have written: ``file`` (jsonl), ``tensorboard`` or ``wandb`` offline.

What is cut short (a killed run leaves such a message) or damaged is said in `RunLog.problems`, and what is whole is
used. Nothing is sampled.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from google.protobuf.message import DecodeError

from verl_ext.common.overrides import Failure

if TYPE_CHECKING:
    import pandas

Source = Literal["jsonl", "tensorboard", "wandb"]

#: The name under which the package's own runs keep verl's jsonl.
METRICS_FILE = "metrics.jsonl"
_EVENTS = "*.tfevents.*"
_WANDB = "run-*.wandb"
#: Folders that a run's folder may hold and that have no metrics: not looked into.
_NOT_METRICS = ("checkpoints", "rollouts", "rows", "validation", "hydra", ".hydra", "files")


class LogError(Failure):
    """There are no metrics to read; the message says where they were looked for."""


class RecordError(ValueError):
    """A file that isn't what its name says, or that is damaged from some place on; the message says where."""


@dataclass(frozen=True)
class RunLog:
    """The metrics of one run."""

    path: Path  # what was read: a file, or a folder of event files
    source: Source  # of which logger it is
    # ``step`` (of training), ``metric``, ``value``, by step. A value that was not a finite number when it was logged
    # is NaN or infinite here; verl's ``file`` logger writes both as null, which is read as NaN.
    values: pandas.DataFrame
    problems: list[str] = field(default_factory=list)  # what could not be read or looks wrong, a sentence each
    name: str = ""  # verl's ``trainer.experiment_name`` if the log holds it (wandb)

    @cached_property
    def steps(self) -> dict[int, dict[str, float]]:
        """Values by metric, by step."""
        groups = self.values.groupby("step")
        return {step: dict(zip(own["metric"], own["value"], strict=True)) for step, own in groups}

    @cached_property
    def curves(self) -> dict[str, pandas.Series]:
        """Value by step of each metric, where it was logged; metrics in order of name."""
        groups = self.values.groupby("metric")
        return {name: own.set_index("step")["value"].rename(name) for name, own in groups}


def read_run(path: str | os.PathLike[str], *, anew: bool = False) -> RunLog:
    """The metrics of one run. Of several values of a metric in one step the later wins, as after a resume.

    Args:
        path: a jsonl of verl's ``file`` logger, an event file of tensorboard, a ``run-*.wandb`` file, or a folder with
            one of them, which is read from the first of these kinds that it has.
        anew: where the steps of a jsonl, or from an event file to the next, go back, what was logged from there on
            before belongs to an earlier run and is left out.

    Raises:
        LogError: nothing is there, nothing in it is a metric, or the folder holds several runs, which are named.
    """
    given = Path(path)
    found = find_runs(given)
    if len(found) > 1:
        names = ", ".join(str(run) for run in found[:5]) + (", ..." if len(found) > 5 else "")
        raise LogError(f"{given}: holds the metrics of {len(found)} runs; name one of them: {names}")
    return _read(found[0], anew)


def find_runs(path: str | os.PathLike[str]) -> list[Path]:
    """What to give to `read_run`, one entry a run, for all runs in a folder and below it, in order of name.

    A folder that holds metrics is one run (of several wandb files or several jsonl files in it, each is one); folders
    below it are looked into only where it holds none.

    Raises:
        LogError: the path does not exist, or holds no metrics of a known kind.
    """
    given = Path(path)
    if not given.exists() and not _kept(given).is_file():
        raise LogError(f"{given}: no such file or folder")
    if not given.is_dir():
        _kind(given)
        return [given]
    found = list(_below(given, set()))
    if not found:
        raise LogError(
            f"{given}: no metrics in it or below it: no {METRICS_FILE} or other jsonl of verl's file logger, no "
            f"{_EVENTS} of tensorboard, no {_WANDB} of wandb. Train with trainer.logger=[console,file] (or "
            "tensorboard, or wandb with WANDB_MODE=offline) and name its folder here."
        )
    return found


def _below(folder: Path, seen: set[Path]) -> Iterator[Path]:
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    if own := _own(folder):
        yield from own
        return
    # Links last: wandb keeps one to its latest run, whose own folder has the better name.
    for child in sorted(folder.iterdir(), key=lambda child: (child.is_symlink(), natural_order(child.name))):
        if child.is_dir() and child.name not in _NOT_METRICS:
            yield from _below(child, seen)


def _own(folder: Path) -> list[Path]:
    """The runs whose metrics lie in this folder itself."""
    metrics = folder / METRICS_FILE
    if metrics.is_file() or _kept(metrics).is_file():
        return [metrics]
    # A file that a fresh run has moved aside (name.1.jsonl) is an earlier run of the same name, not this one.
    jsonl = sorted(file for file in folder.glob("*.jsonl") if "." not in file.stem)
    if jsonl := list(filter(_is_verl_jsonl, jsonl)):
        return jsonl
    if any(folder.glob(_EVENTS)):
        return [folder]
    return sorted(folder.glob(_WANDB))


def _kept(file: Path) -> Path:
    """The copy that a resume makes before it writes the file anew; it stays only if that is interrupted."""
    return file.with_name(file.name + ".keep")


def natural_order(name: str) -> list[Any]:
    """A key that sorts seed_10 after seed_9."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def _is_verl_jsonl(path: Path) -> bool:
    with path.open("rb") as file:
        return _line(file.readline()) is not None


def _kind(path: Path) -> Source:
    if path.suffix == ".wandb":
        return "wandb"
    if ".tfevents." in path.name:
        return "tensorboard"
    if path.suffix in (".jsonl", ".json", ".keep"):
        return "jsonl"
    raise LogError(
        f"{path}: neither a jsonl of verl's file logger, nor an event file of tensorboard (*.tfevents.*), nor a file "
        "of wandb (*.wandb)"
    )


def _read(path: Path, anew: bool) -> RunLog:
    """Read one entry of `find_runs`."""
    import pandas

    rows: list[tuple[int, str, Any]] = []
    problems: list[str] = []
    source: Source = "tensorboard" if path.is_dir() else _kind(path)
    # The time of the start is in the name of an event file: later ones are resumes and win.
    files = sorted(path.glob(_EVENTS), key=lambda file: natural_order(file.name)) if path.is_dir() else [path]
    try:
        if source == "jsonl":
            for file in filter(Path.is_file, (_kept(path), path)):
                rows += _jsonl_rows(file, problems, anew)
        else:
            last = -1
            for file in files:
                own: list[tuple[int, str, Any]] = []
                _read_records(file, _wandb_values if source == "wandb" else _tensorboard_values, own, problems)
                # A resume validates first, at the step that it goes on from: training says where a file begins.
                begins = min((step for step, name, _ in own if not name.startswith("val-")), default=math.inf)
                if begins <= last:
                    problems.append(f"{file}: {_back(last, int(begins), anew)}")
                    if anew:  # a run that begins at step 1 goes on from nothing
                        rows = [row for row in rows if begins > 1 and row[0] < begins]
                rows += own
                last = max((step for step, _, _ in own), default=last)
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from error
    numbers = [(step, name, number) for step, name, value in rows if (number := _number(value)) is not None]
    if not numbers:
        raise LogError(" ".join([f"{path}: not one metric in it.", *problems]))
    values = pandas.DataFrame(numbers, columns=["step", "metric", "value"])
    values = values.drop_duplicates(["step", "metric"], keep="last").sort_values("step", kind="stable")
    return RunLog(path, source, values, problems, _wandb_name(path) if source == "wandb" else "")


def _read_records(file: Path, values: Callable[[Path], Iterator[Any]], rows: list[Any], problems: list[str]) -> None:
    try:
        for value in values(file):
            rows.append(value)
    except RecordError as error:
        problems.append(str(error))
    except (DecodeError, ValueError) as error:
        problems.append(f"{file}: holds a message that cannot be read ({error}); what stands before it is used")


def _tensorboard_values(path: Path) -> Iterator[tuple[int, str, float]]:
    """(step, tag, value) of each scalar in an event file, in the order of writing, by tensorboard's record reader (it
    checks each record's sum). Raises RecordError: at a record that is cut short or damaged, after the values before it.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT
    from tensorboard.compat.tensorflow_stub import errors, pywrap_tensorflow
    from tensorboard.util.tensor_util import make_ndarray

    # The reader below tensorboard's EventFileLoader, which is silent about what it cannot read.
    reader = pywrap_tensorflow.PyRecordReader_New(str(path))
    for number in itertools.count(1):
        try:
            reader.GetNext()
        except errors.OutOfRangeError:
            return
        except errors.DataLossError as error:
            if "truncated" in str(error):
                raise RecordError(f"{path}: cut short in record {number}; what stands before it is used") from None
            raise RecordError(f"{path}: record {number} is damaged, or this is not an event file") from None
        event = Event.FromString(reader.record())
        for value in event.summary.value:
            if value.HasField("simple_value"):
                yield event.step, value.tag, value.simple_value
            elif value.tensor.dtype in (DT_FLOAT, DT_DOUBLE) and (array := make_ndarray(value.tensor)).size == 1:
                yield event.step, value.tag, array.item()


def _wandb_values(path: Path) -> Iterator[tuple[int, str, Any]]:
    """(step, key, value) of the history in a ``run-*.wandb`` file; a nested key's parts are joined with dots. Raises
    RecordError: at a record that is cut short or damaged, after the values before it.
    """
    for record in _wandb_records(path):
        items = record.history.item
        values = {item.key or ".".join(item.nested_key): json.loads(item.value_json or "null") for item in items}
        # Later versions write the step as a value among the others.
        step = values.get("_step", record.history.step.num if record.history.HasField("step") else None)
        if isinstance(step, int):
            for key, value in values.items():
                if not key.startswith("_"):
                    yield step, key, value


def _wandb_name(path: Path) -> str:
    """The display name of the run in a ``run-*.wandb`` file, verl's ``trainer.experiment_name``; empty if unknown."""
    try:
        return next((record.run.display_name for record in _wandb_records(path) if record.HasField("run")), "")
    except RecordError:
        return ""  # said by _wandb_values


def _wandb_records(path: Path) -> Iterator[Any]:
    """The ``Record`` messages of a wandb file, which is a LevelDB log: blocks of 32 KiB with chunks of (crc32, length,
    kind), where a message that does not fit in a block goes on in the next. wandb has its reader in a binary; the
    frames are read here, the messages by wandb's own classes.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    block, head = 32768, 7
    full, first, middle, last = 1, 2, 3, 4
    content = path.read_bytes()
    if content[:head] != struct.pack("<4sHB", b":W&B", 0xBEE1, 0):
        raise RecordError(f"{path}: does not begin like a wandb file")
    position = head
    whole: bytes | None = None
    while position < len(content):
        room = block - position % block
        if room < head:
            position += room
            continue
        start, position = position, position + head
        crc, length, kind = struct.unpack_from("<IHB", content, start) if position <= len(content) else (0, room, 0)
        position += length
        if position > len(content):
            raise RecordError(f"{path}: cut short at byte {start}; what stands before it is used")
        data = content[start + head : position]
        fits = kind in (full, first) if whole is None else kind in (middle, last)
        if not fits or zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
            raise RecordError(f"{path}: damaged at byte {start}")
        whole = (whole or b"") + data
        if kind in (full, last):
            yield Record.FromString(whole)
            whole = None
    if whole is not None:
        raise RecordError(f"{path}: cut short at byte {len(content)}; what stands before it is used")


def _jsonl_rows(file: Path, problems: list[str], anew: bool) -> list[tuple[int, str, Any]]:
    lines = file.read_bytes().split(b"\n")
    rows: list[tuple[int, str, Any]] = []
    bad: list[int] = []
    last, back = -1, ""
    for number, line in enumerate(lines, 1):
        record = _line(line)
        if record is None:
            if line.strip() and number == len(lines):
                problems.append(f"{file}: line {number} is cut short; the {number - 1} before it are used")
            elif line.strip():
                bad.append(number)
            continue
        step, data = record
        if step < last:
            back = _back(last, step, anew, f" in line {number}")
            rows = [row for row in rows if row[0] < step or not anew]
        last = step
        rows += [(step, name, value) for name, value in data.items()]
    if bad:
        which = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        what = f'{len(bad)} lines are not {{"step": ..., "data": {{...}}}}'
        problems.append(f"{file}: {what} (line {which}); the others are used")
    if back:
        problems.append(f"{file}: {back}")
    return rows


def _back(last: int, step: int, anew: bool, where: str = "") -> str:
    used = f"Of the earlier one only what is before step {step} is used" if anew else "The later value wins"
    return f"steps go back from {last} to {step}{where}: two runs of one name? {used}"


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(step, metrics) of the lines of verl's jsonl, as they stand there.

    A line that is still being written, or that is none of verl's, is left out. There are none if there is no file.
    """
    lines = path.read_bytes().splitlines() if path.exists() else []
    return (record for record in map(_line, lines) if record is not None)


def is_begun(folder: Path) -> bool:
    """Whether a run has left something in its folder that the next start goes on from or adds to: a step of training in
    verl's jsonl, or a checkpoint.
    """
    checkpoints = folder / "checkpoints"
    return any(step > 0 for step, _ in read_lines(folder / METRICS_FILE)) or (
        checkpoints.is_dir() and any(checkpoints.iterdir())
    )


def _line(line: bytes) -> tuple[int, dict[str, Any]] | None:
    try:
        record = json.loads(line)
        step, data = record["step"], record["data"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(step, int) or isinstance(step, bool) or not isinstance(data, dict):
        return None
    return step, data


def _number(value: Any) -> float | None:
    """The value as a float; None for what is no number (a text, a list)."""
    if value is None:
        return math.nan
    if isinstance(value, str):
        # wandb writes what JSON cannot as text.
        return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
    return float(value) if isinstance(value, bool | int | float) else None
