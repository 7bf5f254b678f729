# SPDX-License-Identifier: Apache-2.0
"""Data sets of the paper tables as verl's parquet: found on the hub or in a folder, converted, counted, sealed.

``sources.yaml`` says for each data set where it comes from, how it must look, and how many rows it has. A prepared
data set is ``<folder>/<name>.parquet`` with ``<name>.manifest.json`` beside it (rows, sha256, where it came from).
The sum is checked when the data set is used again. Nothing is put in place before all has been read and counted.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from verl_ext.common.overrides import Failure
from verl_ext.lab.report.logs import natural_order
from verl_ext.lab.reproduce import panels, plan
from verl_ext.lab.reproduce.catalogue import load_yaml
from verl_ext.lab.reproduce.tables import Certainty, Table
from verl_ext.recipes import suggestion

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
    hub_folder: str | None = None
    files: tuple[str, ...] = ()  # further places below a local folder, which may be patterns
    columns: Mapping[str, str] = field(default_factory=dict)  # the kind's field to the record's column, or a.b within
    cut: str = ""  # ends a question of mathematics and is left out
    after: str = ""  # stands before a mathematical answer, a number
    skip: bool = False  # records without an answer are left out
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
    def places(self) -> list[str]:
        """Where a local folder may hold it, relative to the folder, in the order in which they are tried."""
        own = [f"{self.base}{ending}" for ending in (".parquet", ".jsonl", ".json", ".jsonl.gz", "/*.parquet")]
        return [*own, *self.files]

    @property
    def digest(self) -> str:
        """Of all that decides what is written."""
        said = [self.name, self.kind, self.config, self.split, dict(self.columns), self.environment, dict(self.kwargs)]
        said += [one for one in (self.cut, self.after) if one]
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


def read_file(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a parquet, jsonl, jsonl.gz or json file (a list, or the only list in an object), or a problem of
    KernelBench's checkout. Raises PrepareError: it cannot be read to its end; the message names file and place.
    """
    number = 0
    try:
        for number, record in enumerate(_raw_records(path), start=1):  # noqa: B007  (used after the loop)
            if not isinstance(record, dict):
                raise PrepareError(f"{path}, record {number}: an object is expected")
            yield record
    except PrepareError:
        raise
    except (OSError, EOFError, ValueError) as error:  # pyarrow's errors are ValueErrors or OSErrors
        raise PrepareError(
            f"{path} cannot be read beyond record {number} ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}). It may have been cut short: fetch it again."
        ) from error


def _raw_records(path: Path) -> Iterator[Any]:
    if path.suffix == ".py":  # level1/19_ReLU.py
        number, level = path.stem.partition("_")[0], path.parent.name.removeprefix("level")
        yield {"code": path.read_text("utf-8"), "level": int(level), "name": path.stem, "problem_id": int(number)}
        return
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as parquet:
            for batch in parquet.iter_batches():
                yield from batch.to_pylist()
        return
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        if path.suffix == ".json":
            content = json.load(file)
            lists = [one for one in content.values() if isinstance(one, list)] if isinstance(content, dict) else []
            yield from lists[0] if len(lists) == 1 else content if isinstance(content, list) else [None]
        else:
            yield from (json.loads(line) for line in file if line.strip())


def both_ways(table: str, source: Source) -> str:
    """How to get a data set, with and without a network, and which files a local folder may have."""
    command = f"verl-ext reproduce prepare {table} --only {source.name}"
    local = f"{command} --from FOLDER, where FOLDER holds one of: {', '.join(source.places)}."
    return f"Get it with {local}" if source.hub is None else f"With a network: {command}. Without: {local}"


def _value(record: Any, column: str) -> Any:
    """What lies at ``a.b`` or ``a.0`` in a record; None if nothing does, or an empty text."""
    for part in column.split("."):
        if isinstance(record, Mapping):
            record = record.get(part)
        else:
            there = isinstance(record, list) and part.isdecimal() and int(part) < len(record)
            record = record[int(part)] if there else None
    return None if isinstance(record, str) and not record.strip() else record


def _field(source: Source, record: Mapping[str, Any], field: str, number: int) -> Any:
    column = source.columns[field]
    if (value := _value(record, column)) is None:
        what = "no column" if column.partition(".")[0] not in record else "nothing in the column"
        raise PrepareError(
            f"{source.name}, record {number}: {what} {column!r} ({field}); the record has {', '.join(sorted(record))}"
        )
    return value


def _texts(source: Source, record: Mapping[str, Any], field: str, number: int) -> list[str]:
    """Texts of a column that holds one or several."""
    value = _field(source, record, field, number)
    found = [str(one).strip() for one in (value if isinstance(value, list | tuple) else [value])]
    if not any(found):
        raise PrepareError(f"{source.name}, record {number}: no answer in {source.columns[field]!r}")
    return [one for one in found if one]


def _row(source: Source, record: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A record as a row of verl's."""

    def of(field: str) -> Any:
        return _field(source, record, field, number)

    extra: dict[str, Any] = {}
    reward: dict[str, Any] = {"style": "rule"}
    ability = source.kind if source.kind in ("math", "qa") else "kernel"
    if source.kind == "math":
        question = str(of("question")).strip().removesuffix(source.cut).strip()
        prompt: Any = question + ("" if source.name.endswith(PLAIN) else f"\n\n{BOXED}")
        answers = _texts(source, record, "answer", number)
        if source.after:
            answers = [answer.rpartition(source.after)[2].replace(",", "") for answer in answers]
        reward["ground_truth"] = ", ".join(answers)
    elif source.kind == "qa":
        prompt = str(of("question")).strip()
        reward["ground_truth"] = {"target": _texts(source, record, "answers", number)}
    elif source.kind == "kernel_task":
        # It is in verl's form already: the loop that plays it reads its own fields.
        prompt, reward = of("messages"), dict(of("reward_model"))
        given = dict(record.get(source.columns["extra_info"]) or {})
        extra = {key: one for key, one in given.items() if key != "index"}
    else:
        prompt = reward["ground_truth"] = str(of("code"))
        extra = {"level": int(of("level")), "name": str(of("name")).strip(), "problem_id": int(of("number"))}
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
    return {
        "data_source": source.data_source or source.base,
        "prompt": messages,
        "ability": ability,
        "reward_model": reward,
        "extra_info": {"index": number, **extra},
    }


def prepare(
    source: Source, folder: Path, *, local: Path | None = None, table: str = "TABLE", any_count: bool = False
) -> dict[str, Any]:
    """Prepare a data set in `folder`, unless it is there, from the folder `local` (None: the hub).

    `table` is for messages; `any_count` takes another number of rows than the expected one. Returns the manifest: name,
    rows, expected, certainty (of that number), sha256, definition, origin, license.

    Raises:
        PrepareError: it is not to be had, cannot be read, lacks a column, or has another number of rows; or what was
            prepared earlier has been changed.
    """
    if (found := verify(source.name, folder)) is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    path, panel = target_of(source, folder), None
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if source.kind == "environment":
            origin = f"seeds of {source.environment}"
            rows, why = panels.environment_rows(source)
            count, panel = _write_rows(rows, work), panels.write(source.name, rows, why, folder)
        else:
            records, origin = _records(source, local, table)
            write = _write_corpus if source.kind == "corpus" else _write_records
            count = write(source, records, work)
        if not count:
            raise PrepareError(f"{source.name}: {origin} holds no record")
        if source.rows is not None and count != source.rows and not any_count:
            raise PrepareError(
                f"{source.name}: {origin} gives {count} rows; {source.rows} are expected ({source.certainty}). It may "
                "be cut short or another edition. To take it as it is, add --any-count."
            )
        about = {"name": source.name, "rows": count, "expected": source.rows, "certainty": source.certainty}
        about |= {"sha256": digest_of(work), "definition": source.digest, "origin": origin, "license": source.license}
        about |= {"panel": panel} if panel else {}
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)
    manifest_of(source, folder).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return about


def _records(source: Source, local: Path | None, table: str) -> tuple[Iterable[dict[str, Any]], str]:
    """Records of a data set, and where they come from."""
    if local is not None:
        # KernelBench's problems by their numbers, other files by their names.
        found = (filter(Path.is_file, local.glob(place)) for place in source.places)
        files = next(filter(None, (sorted(own, key=lambda file: natural_order(str(file))) for own in found)), [])
        if not files:
            raise PrepareError(f"{source.name} ({source.title}) is not in {local}. {both_ways(table, source)}")
        return (record for path in files for record in read_file(path)), ", ".join(map(str, files))
    if source.hub is None:
        raise PrepareError(f"{source.name} ({source.title}) is not fetched from a hub. {both_ways(table, source)}")
    import datasets

    hub = f"{source.hub} ({f'configuration {source.config}, ' if source.config else ''}split {source.split})"
    try:
        return datasets.load_dataset(source.hub, source.config, data_dir=source.hub_folder, split=source.split), hub
    except Exception as error:  # its many errors (no network, no such data set, gated) mean the same here
        said = " ".join(str(error).split())[:200]
        raise PrepareError(
            f"{source.name} ({source.title}): the hub's {hub} cannot be fetched "
            f"({type(error).__name__}: {said}). {both_ways(table, source)}"
        ) from error


def _write_records(source: Source, records: Iterable[Mapping[str, Any]], path: Path) -> int:
    rows = []
    for number, record in enumerate(records):
        if source.skip and _value(record, source.columns["answer"]) is None:
            continue
        try:
            rows.append(_row(source, record, number))
        except PrepareError:
            raise
        except (TypeError, ValueError) as error:  # a text where a number or an object is meant
            raise PrepareError(f"{source.name}, record {number}: not of the expected form ({error})") from error
    return _write_rows(rows, path)


def _write_rows(rows: list[dict[str, Any]], path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if rows:
        try:
            pq.write_table(pa.Table.from_pylist(rows), path)
        except pa.ArrowException as error:
            raise PrepareError(f"the records do not have the same form: {error}") from error
    return len(rows)


def _write_corpus(source: Source, records: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Passages as the BM25 retriever reads them, line by line: a corpus does not fit into memory twice."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for count, record in enumerate(records, start=1):  # noqa: B007  (used after the loop)
            passage = {"id": str(record.get("id", count - 1))}
            if record.get("title"):
                passage["title"] = str(record["title"])
            key = "text" if record.get("text") else source.columns["text"]
            passage[key] = str(record["text"] if key == "text" else _field(source, record, "text", count - 1))
            file.write(json.dumps(passage, ensure_ascii=False) + "\n")
    return count


def names_of(table: Table, only: Sequence[str] | None = None) -> list[str]:
    """Data sets of a table, or those of them that are named (and a corpus that the table may want). Raises
    PrepareError: a name is not among them.
    """
    own = table.full.data_names
    known = [*own, *(name for name in source_names() if table.name in find_source(name).tables)]
    for name in only or ():
        if name not in known:
            raise PrepareError(f"{name!r} is not a data set of {table.name}{suggestion(name, known)}")
    return list(only or own)


def check(source: Source, folder: Path, memory_mb: int) -> None:
    """Say of each problem of a prepared data set whether it can be played on this machine, and why not."""
    from verl_ext.rollout.kernels import problems

    tasks, fit = problems.read(target_of(source, folder)), 0
    for task, needs, refused in problems.check(tasks, memory_mb):
        fit += not refused
        print(f"  {refused or f'{task.name}: can be played here, about {needs >> 20} MiB'}", flush=True)
    print(f"{source.name}: {fit} of {len(tasks)} problems can be played here with memory_mb={memory_mb}")


def main(
    table: Table, source: Path | None, only: Sequence[str] | None, out: Path | None, any_count: bool, memory_mb: int = 0
) -> int:
    """Prepare the data sets of a table (those in `only`) from the folder `source` (None: the hub) in `out` (None:
    :func:`verl_ext.lab.reproduce.plan.data_home`), and say what was done; `memory_mb` (0: not) asks for `check` of
    KernelBench's problems. Returns 0, or 1 if a data set is missing or wrong; the others are prepared all the same.
    """
    folder, failed = out or plan.data_home(), []
    names = names_of(table, only)
    if source is not None and not source.is_dir():
        raise PrepareError(f"--from {source}: there is no such folder")
    for name in names:
        try:
            one = find_source(name)
            there = manifest_of(one, folder).exists()
            manifest = prepare(one, folder, local=source, table=table.name, any_count=any_count)
        except PrepareError as error:
            failed.append(name)
            print(f"verl-ext reproduce: {error}", file=sys.stderr)
            continue
        expected = "" if one.rows in (None, manifest["rows"]) else f" ({one.rows} expected)"
        how = "checked" if there else f"from {manifest['origin']}"
        rights = f"; license {manifest['license'] or 'not known'}" if one.kind != "environment" else ""
        print(f"{name}: {manifest['rows']} rows{expected} in {target_of(one, folder)}, {how}{rights}", flush=True)
        if panel := manifest.get("panel"):
            print(f"  panel {panel['digest'][: panels.AS_LONG]} in {name}.panel.json", flush=True)
            if panel["without_fingerprints"]:
                print(f"  its tasks have seeds, and no fingerprints to check: {panel['without_fingerprints']}")
        if one.note and not there:
            print(f"  {one.note.strip()}")
        if memory_mb and one.kind == "kernel_code":
            check(one, folder, memory_mb)
    if failed:
        done = len(names) - len(failed)
        print(f"{done} of {len(names)} data sets are ready; missing: {', '.join(failed)}", file=sys.stderr)
        return 1
    return 0
