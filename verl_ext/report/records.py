# SPDX-License-Identifier: Apache-2.0
"""Values in tensorboard's event files and wandb's offline files, by these libraries' own parts.

Event files: tensorboard's record reader, which checks each record's sum. A wandb file is a LevelDB log of ``Record``
messages: blocks of 32 KiB with chunks of (crc32, length, kind), where a message that does not fit in a block goes on
in the next. wandb has its reader in a binary; the frames are read here, the messages by wandb's own classes.

A run that is killed leaves a message cut short: what stands before it is whole and is used. Nothing is sampled.
"""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WANDB_HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
_BLOCK, _HEAD = 32768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class RecordError(ValueError):
    """A file that isn't what its name says, or that is damaged from some place on; the message says where."""


def tensorboard_values(path: Path) -> Iterator[tuple[int, str, float]]:
    """(step, tag, value) of each scalar in an event file, in the order of writing. Raises RecordError: at a record that
    is cut short or damaged, after the values before it.
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


def wandb_values(path: Path) -> Iterator[tuple[int, str, Any]]:
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


def wandb_name(path: Path) -> str:
    """The display name of the run in a ``run-*.wandb`` file, verl's ``trainer.experiment_name``; empty if unknown."""
    try:
        return next((record.run.display_name for record in _wandb_records(path) if record.HasField("run")), "")
    except RecordError:
        return ""  # said by wandb_values


def _wandb_records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    if content[:_HEAD] != _WANDB_HEADER:
        raise RecordError(f"{path}: does not begin like a wandb file")
    position = _HEAD
    whole: bytes | None = None
    while position < len(content):
        room = _BLOCK - position % _BLOCK
        if room < _HEAD:
            position += room
            continue
        start, position = position, position + _HEAD
        crc, length, kind = struct.unpack_from("<IHB", content, start) if position <= len(content) else (0, room, 0)
        position += length
        if position > len(content):
            raise RecordError(f"{path}: cut short at byte {start}; what stands before it is used")
        data = content[start + _HEAD : position]
        fits = kind in (_FULL, _FIRST) if whole is None else kind in (_MIDDLE, _LAST)
        if not fits or zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
            raise RecordError(f"{path}: damaged at byte {start}")
        whole = (whole or b"") + data
        if kind in (_FULL, _LAST):
            yield Record.FromString(whole)
            whole = None
    if whole is not None:
        raise RecordError(f"{path}: cut short at byte {len(content)}; what stands before it is used")
