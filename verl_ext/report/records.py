# SPDX-License-Identifier: Apache-2.0
"""Records of tensorboard's event files and wandb's offline files, read without either library.

Both are streams of protocol buffer messages in a frame of their own:

* an event file frames each message with its length (uint64), the masked crc32c of the length, and a crc of the data,
  which is not checked (in Python that would take longer than all the rest);
* a wandb file is a LevelDB log: blocks of 32 KiB with chunks of (crc32, length, kind), where a message that does not
  fit in a block goes on in the next.

A run that is killed leaves a message cut short: what stands before it is whole and is used. Nothing is sampled: every
value in the file is read. The formats are those of tensorboard 2 (``Event``, ``Summary``) and of wandb's ``Record``;
the tests write both with the libraries themselves.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WANDB_HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
_BLOCK, _HEAD = 32768, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_DTYPES = {1: ("f", 5), 2: ("d", 6)}  # of a tensor: float and double, with the fields of their values
_MAX_RECORD = 1 << 31


class RecordError(ValueError):
    """A file that isn't what its name says, or that is damaged from some place on; the message says where."""


def tensorboard_values(path: Path) -> Iterator[tuple[int, str, float]]:
    """(step, tag, value) of each scalar in an event file, in the order of writing.

    Raises:
        RecordError: at a record that is cut short or damaged, after the values before it.
    """
    for message in _event_messages(path.read_bytes(), path):
        try:
            found = _scalars(message, path)
        except (TypeError, AttributeError, struct.error):  # a field is not of the kind that belongs there
            raise _unreadable(path) from None
        yield from found


def _scalars(event: bytes, path: Path) -> list[tuple[int, str, float]]:
    step, summaries, found = 0, [], []
    for field, value in _fields(event, path):
        if field == 2:
            step = _signed(value)
        elif field == 5:
            summaries.append(value)
    for summary in summaries:
        for field, value in _fields(summary, path):
            if field == 1 and (scalar := _scalar(value, path)) is not None:
                found.append((step, *scalar))
    return found


def wandb_values(path: Path) -> Iterator[tuple[int, str, Any]]:
    """(step, key, value) of the history in a ``run-*.wandb`` file; a nested key's parts are joined with dots.

    Raises:
        RecordError: at a record that is cut short or damaged, after the values before it.
    """
    content = path.read_bytes()
    for message in _log_messages(content, path):
        for field, history in _fields(message, path):
            if field != 2:
                continue
            step: int | None = None
            values: dict[str, Any] = {}
            for part, value in _fields(history, path):
                if part == 2:
                    step = next((_signed(number) for name, number in _fields(value, path) if name == 1), 0)
                elif part == 1:
                    key, read = _history_item(value, path)
                    values[key] = read
            # Later versions write the step as a value among the others.
            number = values.get("_step", step)
            if isinstance(number, int):
                for key, read in values.items():
                    if not key.startswith("_"):
                        yield number, key, read


def wandb_name(path: Path) -> str:
    """The display name of the run in a ``run-*.wandb`` file, verl's ``trainer.experiment_name``; empty if unknown."""
    try:
        for message in _log_messages(path.read_bytes(), path):
            for field, run in _fields(message, path):
                if field == 17:
                    return next((text.decode("utf-8", "replace") for part, text in _fields(run, path) if part == 8), "")
    except RecordError:
        pass  # said by wandb_values
    return ""


def _event_messages(content: bytes, path: Path) -> Iterator[bytes]:
    position = 0
    while position < len(content):
        if position + 12 > len(content):
            raise _cut(path, position)
        head = content[position : position + 8]
        (length,) = struct.unpack("<Q", head)
        (crc,) = struct.unpack_from("<I", content, position + 8)
        if length > _MAX_RECORD or crc != _masked_crc32c(head):
            raise RecordError(f"{path}: no event record at byte {position}: not an event file, or damaged there")
        if position + 16 + length > len(content):
            raise _cut(path, position)
        yield content[position + 12 : position + 12 + length]
        position += 16 + length


def _log_messages(content: bytes, path: Path) -> Iterator[bytes]:
    if content[:_HEAD] != _WANDB_HEADER:
        raise RecordError(f"{path}: does not begin like a wandb file")
    position = _HEAD
    whole: bytes | None = None
    while position < len(content):
        room = _BLOCK - position % _BLOCK
        if room < _HEAD:
            position += room
            continue
        if position + _HEAD > len(content):
            raise _cut(path, position)
        crc, length, kind = struct.unpack_from("<IHB", content, position)
        start = position
        position += _HEAD + length
        if position > len(content):
            raise _cut(path, start)
        data = content[start + _HEAD : position]
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
            raise RecordError(f"{path}: damaged at byte {start}")
        if kind == _FULL:
            yield data
        elif kind == _FIRST:
            whole = data
        elif whole is None:
            raise RecordError(f"{path}: damaged at byte {start}")
        elif kind == _MIDDLE:
            whole += data
        else:
            yield whole + data
            whole = None
    if whole is not None:
        raise _cut(path, len(content))


def _cut(path: Path, position: int) -> RecordError:
    return RecordError(f"{path}: cut short at byte {position}; what stands before it is used")


def _fields(message: bytes, path: Path) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message's fields: int for a varint, else the bytes."""
    position = 0
    try:
        while position < len(message):
            key, position = _varint(message, position)
            kind = key & 7
            if kind == 0:
                value, position = _varint(message, position)
                yield key >> 3, value
                continue
            if kind == 2:
                length, position = _varint(message, position)
            else:
                length = {1: 8, 5: 4}[kind]
            if position + length > len(message):
                raise IndexError
            yield key >> 3, message[position : position + length]
            position += length
    except (IndexError, KeyError):
        raise _unreadable(path) from None


def _unreadable(path: Path) -> RecordError:
    return RecordError(f"{path}: holds a message that cannot be read; what stands before it is used")


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 127) << shift
        position += 1
        if byte < 128:
            return value, position
        shift += 7


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _scalar(value: bytes, path: Path) -> tuple[str, float] | None:
    """(tag, value) of a summary's value; None if it holds no scalar (a histogram, a text, an image)."""
    tag, number = "", None
    for field, part in _fields(value, path):
        if field == 1:
            tag = part.decode("utf-8", "replace")
        elif field == 2:
            (number,) = struct.unpack("<f", part)
        elif field == 8:
            number = _one_number(part, path)
    return None if number is None else (tag, number)


def _one_number(tensor: bytes, path: Path) -> float | None:
    fields = dict(_fields(tensor, path))
    if fields.get(1) not in _DTYPES:
        return None
    letter, field = _DTYPES[fields[1]]
    data = fields.get(4) or fields.get(field, b"")
    return struct.unpack(f"<{letter}", data)[0] if len(data) == struct.calcsize(letter) else None


def _history_item(item: bytes, path: Path) -> tuple[str, Any]:
    keys, text = [], b"null"
    for field, value in _fields(item, path):
        if field in (1, 2):
            keys.append(value.decode("utf-8", "replace"))
        elif field == 16:
            text = value
    try:
        return ".".join(keys), json.loads(text)
    except ValueError:
        return ".".join(keys), None


def _crc32c_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC32C = _crc32c_table()


def _masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 255] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
