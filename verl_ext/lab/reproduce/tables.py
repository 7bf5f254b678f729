# SPDX-License-Identifier: Apache-2.0
"""What stands in the table files ``recipe/<method>/<table>.yaml``: checked by pydantic, held by frozen dataclasses.

A table file begins with the line ``# verl-ext table``, which keeps it apart from the recipes beside it. It describes
one published experiment at two scales: ``full`` is the paper's, ``laptop`` a small experiment with the same structure
on the embedded CPU model. :mod:`verl_ext.lab.reproduce.catalogue` finds and reads them. Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, GetPydanticSchema, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from verl_ext.common.overrides import UsageError
from verl_ext.recipes import RecipeError, suggestion

CERTAINTIES = {
    "certain": "read in the paper's text, public code or a launch script",
    "abstract-or-blog": "stated by the authors in an abstract, README or blog",
    "secondary": "from third-party notes, reviews or reproduction logs",
    "unverified": "no usable source",
}
"""Where a published number or setting was read, from the best to the worst."""

SCALES = ("full", "laptop")
"""The two scales of a table."""

_DUMP = ("source", "score_key")

KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "last": (("keys",), ("window",)),
    "first": (("keys",), ("window",)),
    "mean": (("keys",), ()),
    "best": (("keys",), ("window",)),
    "spike": (("keys",), ()),
    "spikes": (("keys",), ("factor",)),
    "tokens": ((), ("tokens_key",)),
    "tokens_to": (("keys", "threshold"), ("window", "tokens_key")),
    "avg_at_k": (("k",), _DUMP),
    "pass_at_k": (("k",), _DUMP),
    "fast_at": (("p",), (*_DUMP, "speedup_key")),
}
"""Kinds of metrics, each with the options that it requires and those that it may have; what they compute is in
:mod:`verl_ext.lab.reproduce.metrics`."""


class TableError(RecipeError):
    """A table file cannot be read as one; the message names the file and the key."""


class UnknownTableError(TableError, UsageError):
    """No table, cell or scale has this name; the message lists the known ones."""


def _wrong(key: str, text: str) -> PydanticCustomError:
    """An error at a key of the mapping that is being checked."""
    return PydanticCustomError("table", "{text}", {"key": key, "text": text})


def _known(key: str, value: Any, names: Collection[str]) -> Any:
    if value not in names:
        raise _wrong(key, f"{value!r} is not known{suggestion(str(value), list(names))}")
    return value


def _only(content: Mapping[Any, Any], names: Sequence[str]) -> None:
    for key in content:
        if key not in names:
            raise _wrong(str(key), f"unknown key{suggestion(str(key), names)}")


def _different(values: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(values)) < len(values):
        raise PydanticCustomError("different", "Numbers should be different")
    return values


def _hydra_keys(overrides: dict[str, Any]) -> dict[str, Any]:
    for key in overrides:
        if not re.fullmatch(r"\+{0,2}[A-Za-z_][\w/@-]*(\.[\w/@-]+)*", key):
            raise _wrong("", f"{key!r} is not a dotted key of Hydra (which may begin with + or ++)")
    return overrides


# YAML has types of its own, so that nothing is turned into what is expected: 5.6 in quotes is no number.
Text = Annotated[str, Field(strict=True, min_length=1)]
Note = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Count = Annotated[int, Field(strict=True, ge=1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NotNegative = Annotated[Number, Field(ge=0)]
Certainty = Annotated[Text, AfterValidator(lambda value: _known("", value, CERTAINTIES))]
Texts = Annotated[tuple[Text, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
Overrides = Annotated[dict[str, Any], AfterValidator(_hydra_keys)]


class Options(TypedDict, total=False):
    """Options of a metric; `KINDS` says which kind has which."""

    keys: Texts
    window: Count
    factor: Annotated[Number, Field(ge=1)]
    tokens_key: Text
    threshold: Number
    k: Count
    p: NotNegative
    source: Text
    score_key: Text
    speedup_key: Text


class _Entry:
    """A mapping of a table file, and how it becomes the dataclass: its keys are the fields."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, content: Any) -> dict[str, Any]:
        if not isinstance(content, Mapping):
            raise PydanticCustomError("mapping", "a mapping is expected")
        content = cls._prepared(dict(content))
        _only(content, cls._fields())
        return content

    @classmethod
    def _fields(cls) -> list[str]:
        return [one.name for one in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @classmethod
    def _prepared(cls, content: dict[str, Any]) -> dict[str, Any]:
        """What the fields are made of, where that is not as it stands in the file."""
        return content


def _named(entries: Any) -> Any:
    """Entries by name, with the name in each."""
    if not isinstance(entries, Mapping):
        return entries
    found = {}
    for name, entry in entries.items():
        if isinstance(entry, Mapping) and "name" in entry:
            raise _wrong(f"{name}.name", "unknown key: the name is the key of the entry")
        found[str(name)] = {**entry, "name": str(name)} if isinstance(entry, Mapping) else entry
    return found


@dataclass(frozen=True)
class Cell(_Entry):
    """One row of a table: a method with its settings."""

    name: Text  # what ``--cell`` says
    label: Text  # for people
    recipe: Texts = ()  # value of ``+recipe=[...]``
    overrides: Overrides = field(default_factory=dict)  # Hydra key to value, beside the common ones of the scale
    note: Note = ""  # a sentence, possibly empty
    runnable: Flag = True  # False for a row that is only published (another model, a closed system)

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Cell:
        if not re.fullmatch(r"[A-Za-z0-9_]+", self.name):
            raise _wrong("", "the name of a cell is made of letters, digits and _")
        if self.runnable and not self.recipe:
            raise _wrong("recipe", "is missing")
        known = (info.context or {})["recipes"]
        for name in self.recipe:
            if name not in known:
                raise _wrong("recipe", f"unknown recipe {name!r}{suggestion(name, known)}")
        return self


@dataclass(frozen=True)
class MetricSpec(_Entry):
    """One column of a table."""

    name: Text  # key in the file
    label: Text  # for people
    kind: Text  # one of `KINDS`
    options: Annotated[
        Mapping[str, Any], GetPydanticSchema(lambda _, schema: schema(Options))
    ]  # of the kind; in the file they stand beside the others
    percent: Flag = False  # the value is a share and is shown as a percentage
    higher: Flag | None = True  # higher is better; None: neither is, the claim does not speak of it
    digits: Whole = 3  # after the point
    times: Number = 1.0  # factor from what is logged to what is shown, such as 10 where a reward of 10 is 100 points

    @classmethod
    def _prepared(cls, content: dict[str, Any]) -> dict[str, Any]:
        _known("kind", content.get("kind"), KINDS)
        required, optional = KINDS[content["kind"]]
        for key in required:
            if key not in content:
                raise _wrong(key, "is missing")
        _only(content, [*(name for name in cls._fields() if name != "options"), *required, *optional])
        options = {key: content.pop(key) for key in (*required, *optional) if key in content}
        return {"digits": 1 if content.get("percent") else 3, **content, "options": options}


@dataclass(frozen=True)
class Publication(_Entry):
    """A place of a paper, or about one, that numbers were read from: an entry of ``publications.yaml``."""

    name: Text  # what `source` of a published row says
    paper: Text
    section: Text  # where it stands there
    certainty: Certainty  # one of `CERTAINTIES`
    note: Note = ""  # a sentence


def _publication(name: Any, info: ValidationInfo) -> Any:
    known = (info.context or {})["publications"]
    return {**known[_known("", name, known)], "name": name}


@dataclass(frozen=True)
class Published(_Entry):
    """Numbers of the paper for one cell, read in one place."""

    cell: Text  # where they stand (of the full scale)
    source: Annotated[Publication, BeforeValidator(_publication)]  # in the file its name
    values: Annotated[dict[Text, Number], Field(min_length=1)]  # by metric, in its unit (in percent where it is)
    relative_to: Text | None = None  # cell that the values are differences to; None: the values themselves
    note: Note = ""  # a sentence, possibly empty
    ratio: Flag = False  # the values are changes in percent of that other cell's, not differences


@dataclass(frozen=True)
class PublishedNumber:
    """One number of a `Published` row."""

    cell: str
    metric: str
    value: float
    certainty: str
    relative_to: str | None
    note: str
    ratio: bool
    source: str  # name of the `Publication`
    section: str  # of it


@dataclass(frozen=True)
class Hardware(_Entry):
    """Machines of the full scale; `certainty` and `note` say where that is from."""

    nodes: Count
    gpus_per_node: Count
    gpu: Text
    certainty: Certainty = "certain"
    note: Note = ""


@dataclass(frozen=True)
class Estimate(_Entry):
    """Hours of one cell and seed; None where nobody says."""

    value: NotNegative | None = None
    certainty: Certainty = "certain"
    note: Note = ""


@dataclass(frozen=True)
class Needs(_Entry):
    """What a full run needs beside data and GPUs."""

    packages: Texts = ()  # names of Python distributions
    inputs: dict[Text, Text] = field(default_factory=dict)  # environment variable to what the user has to bring in it


@dataclass(frozen=True)
class Scale(_Entry):
    """The experiment at one scale."""

    name: Text  # one of `SCALES`
    cells: Annotated[dict[str, Cell], Field(min_length=1), BeforeValidator(_named)]  # by name, in the table's order
    # by name, in the table's order
    metrics: Annotated[dict[str, MetricSpec], Field(min_length=1), BeforeValidator(_named)]
    seeds: Annotated[tuple[Whole, ...], Field(min_length=1), AfterValidator(_different)]  # that the table is made of
    baseline: Text | None = None  # cell that differences are taken to; None: no differences
    # cell to a further cell that its differences are taken to, where the claim speaks of the two
    versus: dict[str, str] = field(default_factory=dict)
    overrides: Overrides = field(default_factory=dict)  # common to the cells
    claim: Note = ""  # what is tested, in a sentence
    steps: Count | None = None  # training steps; None: the overrides decide (epochs, for instance)
    task: Text | None = None  # of :mod:`verl_ext.lab.demo.tasks` (laptop)
    minutes: NotNegative | None = None  # of the whole table on two CPU cores, measured (laptop)
    data: dict[str, Texts] = field(default_factory=dict)  # names of data sets by ``train`` and ``val`` (full)
    models: Texts = ()  # hub names, the first is the one that is trained unless a cell says otherwise (full)
    needs: Needs = field(default_factory=Needs)  # further needs (full)
    hardware: Hardware | None = None  # GPUs (full)
    hours: Estimate | None = None  # of one cell and seed (full)

    @classmethod
    def _prepared(cls, content: dict[str, Any]) -> dict[str, Any]:
        full, laptop = ("models", "data", "hardware", "hours"), ("task", "steps", "claim")
        required, others = (full, ("task", "minutes")) if content["name"] == "full" else (laptop, (*full, "needs"))
        for key in required:
            if content.get(key) is None:
                raise _wrong(key, "is missing")
        _only(content, [name for name in cls._fields() if name not in others])
        return content

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Scale:
        if self.baseline is not None:
            _known("baseline", self.baseline, self.cells)
        for name, other in self.versus.items():
            _known(f"versus.{name}", name, self.cells)
            _known(f"versus.{name}", other, self.cells)
            if name == other:
                raise _wrong(f"versus.{name}", "is the cell itself")
        if self.task is not None:
            _known("task", self.task, (info.context or {})["tasks"])
        for split in self.data:
            _known(f"data.{split}", split, ("train", "val"))
        if not self.runnable:
            raise _wrong("cells", "none of them can be run")
        return self

    @property
    def runnable(self) -> list[str]:
        """Names of the cells that can be run."""
        return [name for name, cell in self.cells.items() if cell.runnable]

    @property
    def data_names(self) -> list[str]:
        """Data sets, training first, each once."""
        return list(dict.fromkeys(name for split in ("train", "val") for name in self.data.get(split, ())))


@dataclass(frozen=True)
class Table(_Entry):
    """One published experiment."""

    name: Text  # ``<method>/<table>``
    path: Path  # the file
    title: Text
    paper: Text
    claim: Text
    full: Scale  # the paper's scale
    laptop: Scale | None  # the small scale; None where another table's tests the same claim, or none does
    laptop_of: Text | None = None  # name of that other table, which the file has under ``laptop``
    published_in: Note = ""
    open: Texts = ()  # what paper and code leave open, a sentence each
    published: tuple[Published, ...] = ()  # numbers of the paper, by cell and place
    default: Flag = False  # whether the bare method name means this table

    @classmethod
    def _prepared(cls, content: dict[str, Any]) -> dict[str, Any]:
        laptop = content.get("laptop")
        if isinstance(laptop, str):
            content |= {"laptop": None, "laptop_of": laptop}
        elif not isinstance(laptop, Mapping) and (laptop is not None or "laptop" not in content):
            raise _wrong("laptop", f"a mapping or the name of a table is expected, not {laptop!r}")
        for name in SCALES:
            if isinstance(content.get(name), Mapping):
                content[name] = {**content[name], "name": name}
        return content

    @model_validator(mode="after")
    def _check(self) -> Table:
        for place, one in enumerate(self.published):
            key = f"published[{place}]"
            _known(f"{key}.cell", one.cell, self.full.cells)
            for metric in one.values:
                _known(f"{key}.values", metric, self.full.metrics)
            if one.relative_to is not None:
                _known(f"{key}.relative_to", one.relative_to, self.full.cells)
            if one.relative_to == one.cell:
                raise _wrong(f"{key}.relative_to", "is the cell itself")
            if one.ratio and one.relative_to is None:
                raise _wrong(f"{key}.ratio", "needs relative_to, the cell that the change in percent is measured from")
        return self

    @property
    def numbers(self) -> list[PublishedNumber]:
        """Every published number, in the order of the file."""
        return [
            PublishedNumber(
                one.cell,
                metric,
                value,
                one.source.certainty,
                one.relative_to,
                one.note,
                one.ratio,
                one.source.name,
                one.source.section,
            )
            for one in self.published
            for metric, value in one.values.items()
        ]

    @property
    def places(self) -> list[Publication]:
        """Where the numbers were read, each place once."""
        return list({one.source.name: one.source for one in self.published}.values())

    @property
    def method(self) -> str:
        """Name of the table's folder of recipes."""
        return self.name.split("/")[0]

    @property
    def folder(self) -> str:
        """Name of the table's folder among runs."""
        return self.name.replace("/", ".")
