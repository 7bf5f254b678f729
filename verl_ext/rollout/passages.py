# SPDX-License-Identifier: Apache-2.0
"""The passages that a retriever finds: what one is, how a corpus is read, and a corpus mapped into memory."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Passage:
    """A passage of the corpus.

    Attributes:
        id: its identifier in the corpus.
        title: may be empty.
        text: its text.
        score: the retriever's score; NaN where it gives none.
    """

    id: str
    title: str
    text: str
    score: float = math.nan


def as_text(passages: Sequence[Passage]) -> str:
    """Passages as a model reads them: ``Doc 1 (Title: ...) text``, one a line."""
    return "\n".join(f"Doc {i} (Title: {p.title}) {p.text}" for i, p in enumerate(passages, start=1))


class MappedPassages:
    """Passages in a file that is mapped into memory; each is read when it is asked for.

    Args:
        folder: where `write` has put them.
    """

    FORMAT = 1

    def __init__(self, folder: Path) -> None:
        self._ends = np.load(folder / "passages.npy", mmap_mode="r")
        with (folder / "passages.jsonl").open("rb") as file:
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @staticmethod
    def write(folder: Path, passages: Sequence[Passage]) -> None:
        """Write passages for this class to read."""
        lines = [json.dumps([p.id, p.title, p.text]).encode() for p in passages]
        (folder / "passages.jsonl").write_bytes(b"".join(lines))
        np.save(folder / "passages.npy", np.cumsum([0, *map(len, lines)], dtype=np.int64))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> Passage:
        return Passage(*json.loads(self._text[self._ends[number] : self._ends[number + 1]]))


def read_corpus(path: str | Path) -> list[Passage]:
    """Passages of a ``.jsonl`` or ``.parquet`` file.

    Raises:
        ValueError: a passage has no text, or the file holds none; the message names file and line.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        import pandas

        records = pandas.read_parquet(path).to_dict("records")
    else:
        records = []
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        records.append(json.loads(line))
                    except json.JSONDecodeError as error:
                        raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    passages = []
    for number, record in enumerate(records, start=1):
        try:
            passages.append(passage_of(record, default_id=str(number - 1)))
        except ValueError as error:
            raise ValueError(f"{path}, passage {number}: {error}") from error
    if not passages:
        raise ValueError(f"{path} holds no passage")
    return passages


def passage_of(record: Any, default_id: str = "", score: float = math.nan) -> Passage:
    """A passage of ``{id, title, text}`` or Search-R1's ``{id, contents}``."""
    if not isinstance(record, Mapping):
        raise ValueError(f"expected an object with text, not {record!r:.80}")
    title, text = record.get("title"), record.get("text")
    if text is None:
        contents = record.get("contents")
        if not isinstance(contents, str):
            raise ValueError(f"neither text nor contents in {sorted(map(str, record))}")
        first, _, rest = contents.partition("\n")
        title, text = (title or first.strip().strip('"'), rest) if rest else (title or "", contents)
    return Passage(str(record.get("id", default_id)), str(title or ""), str(text), score)
