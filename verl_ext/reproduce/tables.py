# SPDX-License-Identifier: Apache-2.0
"""The table files ``recipe/<method>/<table>.yaml``: found, read strictly, and handed on as frozen dataclasses.

A table file begins with the line ``# verl-ext table``, which keeps it apart from the recipes beside it. It describes
one published experiment at two scales: ``full`` is the paper's, ``laptop`` a small experiment with the same structure
on the embedded CPU model. What is wrong in a file is reported with the file and the key. Imports nothing heavy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.recipes import GROUP, TABLE_LINE, RecipeError, recipe_root, recipes, suggestion

CERTAINTIES = ("certain", "abstract-or-blog", "secondary", "unverified")
"""Where a published number or setting was read, from the best to the worst."""

SCALES = ("full", "laptop")
"""The two scales of a table."""

_DUMP = "source score_key"

KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    name: (tuple(required.split()), tuple(optional.split()))
    for name, required, optional in (
        ("last", "keys", "window"),
        ("first", "keys", "window"),
        ("mean", "keys", ""),
        ("best", "keys", "window"),
        ("spike", "keys", ""),
        ("spikes", "keys", "factor"),
        ("tokens", "", "tokens_key"),
        ("tokens_to", "keys threshold", "window tokens_key"),
        ("avg_at_k", "k", _DUMP),
        ("pass_at_k", "k", _DUMP),
        ("fast_at", "p", f"{_DUMP} speedup_key"),
    )
}
"""Kinds of metrics, each with the options that it requires and those that it may have; what they compute is in
:mod:`verl_ext.reproduce.collect`."""


class TableError(RecipeError):
    """A table file cannot be read as one; the message names the file and the key."""


class UnknownTableError(TableError):
    """No table, cell or scale has this name; the message lists the known ones."""


@dataclass(frozen=True)
class Cell:
    """One row of a table: a method with its settings.

    Attributes:
        name: what ``--cell`` says.
        label: for people.
        recipe: value of ``+recipe=[...]``.
        overrides: Hydra key to value, beside the common ones of the scale.
        note: a sentence, possibly empty.
        runnable: False for a row that is only published (another model, a closed system).
    """

    name: str
    label: str
    recipe: tuple[str, ...]
    overrides: Mapping[str, Any]
    note: str = ""
    runnable: bool = True


@dataclass(frozen=True)
class MetricSpec:
    """One column of a table.

    Attributes:
        name: key in the file.
        label: for people.
        kind: one of `KINDS`.
        options: of the kind.
        percent: the value is a share and is shown as a percentage.
        higher: higher is better; None: neither is, the claim does not speak of it.
        digits: after the point.
        times: factor from what is logged to what is shown, such as 10 where a reward of 10 is 100 points.
    """

    name: str
    label: str
    kind: str
    options: Mapping[str, Any]
    percent: bool = False
    higher: bool | None = True
    digits: int = 3
    times: float = 1.0


@dataclass(frozen=True)
class Published:
    """One number of the paper.

    Attributes:
        cell, metric: where it stands (of the full scale).
        value: in the metric's unit (in percent where the metric is).
        certainty: one of `CERTAINTIES`.
        relative_to: cell that the value is a difference to; None: the value itself.
        note: a sentence, possibly empty.
        ratio: the value is a change in percent of that other cell's, not a difference.
    """

    cell: str
    metric: str
    value: float
    certainty: str
    relative_to: str | None = None
    note: str = ""
    ratio: bool = False


@dataclass(frozen=True)
class Hardware:
    """Machines of the full scale; `certainty` and `note` say where that is from."""

    nodes: int
    gpus_per_node: int
    gpu: str
    certainty: str = "certain"
    note: str = ""


@dataclass(frozen=True)
class Estimate:
    """Hours of one cell and seed; None where nobody says."""

    value: float | None
    certainty: str = "certain"
    note: str = ""


@dataclass(frozen=True)
class Needs:
    """What a full run needs beside data and GPUs.

    Attributes:
        packages: names of Python distributions.
        inputs: environment variable to what the user has to bring in it.
    """

    packages: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """The experiment at one scale.

    Attributes:
        name: one of `SCALES`.
        cells: by name, in the table's order.
        metrics: by name, in the table's order.
        baseline: cell that differences are taken to; None: no differences.
        versus: cell to a further cell that its differences are taken to, where the claim speaks of the two.
        seeds: that the table is made of.
        steps: training steps; None: the overrides decide (epochs, for instance).
        task: of :mod:`verl_ext.demo.tasks` (laptop).
        overrides: common to the cells.
        data: names of data sets by ``train`` and ``val`` (full).
        models: hub names, the first is the one that is trained unless a cell says otherwise (full).
        needs: further needs (full).
        hardware: GPUs (full).
        hours: of one cell and seed (full).
        minutes: of the whole table on two CPU cores, measured (laptop).
        claim: what is tested, in a sentence.
    """

    name: str
    cells: Mapping[str, Cell]
    metrics: Mapping[str, MetricSpec]
    baseline: str | None
    versus: Mapping[str, str]
    seeds: tuple[int, ...]
    steps: int | None
    task: str | None
    overrides: Mapping[str, Any]
    data: Mapping[str, tuple[str, ...]]
    models: tuple[str, ...]
    needs: Needs
    hardware: Hardware | None
    hours: Estimate | None
    minutes: float | None
    claim: str

    @property
    def runnable(self) -> list[str]:
        """Names of the cells that can be run."""
        return [name for name, cell in self.cells.items() if cell.runnable]

    @property
    def data_names(self) -> list[str]:
        """Data sets, training first, each once."""
        return list(dict.fromkeys(name for split in ("train", "val") for name in self.data.get(split, ())))


@dataclass(frozen=True)
class Table:
    """One published experiment.

    Attributes:
        name: ``<method>/<table>``.
        method: name of the folder.
        title, paper, claim, published_in: texts.
        open: what paper and code leave open, a sentence each.
        published: numbers of the paper.
        full: the paper's scale.
        laptop: the small scale; None where another table's tests the same claim.
        laptop_of: name of that other table.
        default: whether the bare method name means this table.
        path: the file.
    """

    name: str
    method: str
    title: str
    paper: str
    claim: str
    published_in: str
    open: tuple[str, ...]
    published: tuple[Published, ...]
    full: Scale
    laptop: Scale | None
    laptop_of: str | None
    default: bool
    path: Path

    @property
    def folder(self) -> str:
        """Name of the table's folder among runs."""
        return self.name.replace("/", ".")


# --- finding ------------------------------------------------------------------------------------------------------


def table_paths() -> dict[str, Path]:
    """Table files of this installation by table name, sorted; the files are not read but for their first lines."""
    folder = recipe_root() / GROUP
    found = {}
    for path in sorted(folder.glob("*/*.yaml")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        with path.open(encoding="utf-8") as file:
            if file.readline().strip() == TABLE_LINE and not any(part[0] in "._" for part in name.split("/")):
                found[name] = path
    return found


def tables() -> list[Table]:
    """Every table of this installation, sorted by name.

    Raises:
        TableError: a file is wrong, two tables of a method are the default, or a `laptop` names no table that has one.
    """
    found = [read_table(path, name) for name, path in table_paths().items()]
    by_name = {table.name: table for table in found}
    defaults: dict[str, Table] = {}
    for table in found:
        if table.default:
            other = defaults.setdefault(table.method, table)
            if other is not table:
                raise TableError(f"{table.path}: default: {other.name} is the default table of {table.method} already")
        if table.laptop_of is not None and getattr(by_name.get(table.laptop_of), "laptop", None) is None:
            having = [one.name for one in found if one.laptop is not None]
            raise TableError(
                f"{table.path}: laptop: {table.laptop_of!r} is not a table with a laptop scale"
                f"{suggestion(table.laptop_of, having)}"
            )
    return found


def find_table(name: str) -> Table:
    """The table of this name; a bare method name means its default table.

    Raises:
        UnknownTableError: there is none; the message names the nearest and lists all.
        TableError: its file is wrong.
    """
    found = {table.name: table for table in tables()}
    if name in found:
        return found[name]
    own = [table for table in found.values() if table.method == name]
    for table in own:
        if table.default or len(own) == 1:
            return table
    if own:
        names = ", ".join(table.name for table in own)
        raise UnknownTableError(f"{name!r} has several tables and no default: say which of {names}")
    aliases = [table.method for table in found.values() if table.default]
    raise UnknownTableError(f"unknown table {name!r}{suggestion(name, [*found, *aliases])}")


def scale_of(table: Table, name: str) -> tuple[Table, Scale]:
    """A table's scale, and the table whose it is: another one where two tables share their laptop scale.

    Raises:
        UnknownTableError: no such scale.
    """
    if name not in SCALES:
        raise UnknownTableError(f"unknown scale {name!r}{suggestion(name, SCALES)}")
    if name == "full":
        return table, table.full
    if table.laptop_of is not None:
        table = find_table(table.laptop_of)
    if table.laptop is None:
        raise UnknownTableError(f"{table.name} has no laptop scale; use --scale full")
    return table, table.laptop


def find_cells(scale: Scale, names: Sequence[str] | None) -> list[Cell]:
    """The cells of these names in the table's order; None: all that can be run.

    Raises:
        UnknownTableError: a name is not known, or its cell cannot be run.
    """
    if not names:
        return [scale.cells[name] for name in scale.runnable]
    for name in names:
        if name not in scale.cells:
            raise UnknownTableError(f"unknown cell {name!r}{suggestion(name, list(scale.cells))}")
        if not scale.cells[name].runnable:
            raise UnknownTableError(
                f"cell {name!r} is only published and cannot be run. Cells to run: {', '.join(scale.runnable)}."
            )
    return [cell for name, cell in scale.cells.items() if name in names]


# --- reading ------------------------------------------------------------------------------------------------------

_KEY = re.compile(r"^\+{0,2}[A-Za-z_][\w/@-]*(\.[\w/@-]+)*$")
_MISSING = object()


class _Node:
    """A mapping of a table file that knows where it stands; every key is taken once, what is left is unknown."""

    def __init__(self, path: Path, place: str, value: Any) -> None:
        self.path, self.place = path, place
        if not isinstance(value, Mapping):
            raise self.error("", f"a mapping is expected, not {_said(value)}")
        self.rest = dict(value)
        self.known: list[str] = []

    def error(self, key: str, text: str) -> TableError:
        place = ".".join(part for part in (self.place, key) if part)
        return TableError(f"{self.path}: {place or 'the file'}: {text}")

    def take(self, key: str, check: Callable[[Any], bool], what: str, default: Any = _MISSING) -> Any:
        self.known.append(key)
        if key not in self.rest:
            if default is _MISSING:
                raise self.error(key, f"is missing ({what})")
            return default
        value = self.rest.pop(key)
        if value is None and default is None:
            return None
        if not check(value):
            raise self.error(key, f"{what} is expected, not {_said(value)}")
        return value

    def text(self, key: str, default: Any = _MISSING) -> Any:
        return self.take(key, lambda v: isinstance(v, str) and bool(v.strip() or default == ""), "a text", default)

    def flag(self, key: str, default: bool) -> bool:
        return self.take(key, lambda v: isinstance(v, bool), "true or false", default)

    def number(self, key: str, default: Any = _MISSING, least: float = -math.inf) -> Any:
        what = "a number" if least == -math.inf else f"a number of at least {least:g}"
        return self.take(key, lambda v: _is_number(v) and v >= least, what, default)

    def count(self, key: str, default: Any = _MISSING, least: int = 0) -> Any:
        return self.take(key, lambda v: _is_int(v) and v >= least, f"a whole number of at least {least}", default)

    def choice(self, key: str, known: Sequence[str], default: Any = _MISSING) -> Any:
        value = self.text(key, default)
        if value is not None and value not in known:
            raise self.error(key, f"{value!r} is not known{suggestion(value, list(known))}")
        return value

    def texts(self, key: str, default: Any = _MISSING) -> tuple[str, ...]:
        value = self.take(key, _is_texts, "a text or a list of texts", default)
        return (value,) if isinstance(value, str) else tuple(value)

    def node(self, key: str, default: Any = _MISSING) -> _Node:
        value = self.take(key, lambda v: isinstance(v, Mapping), "a mapping", default)
        return self.at(key, value)

    def at(self, key: str, value: Any) -> _Node:
        return _Node(self.path, ".".join(part for part in (self.place, key) if part), value)

    def done(self) -> None:
        for key in self.rest:
            raise self.error(str(key), f"unknown key{suggestion(str(key), self.known)}")


def _said(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_texts(value: Any) -> bool:
    values = [value] if isinstance(value, str) else value
    return isinstance(values, (list, tuple)) and all(isinstance(one, str) and one for one in values)


def load_yaml(path: Path) -> Any:
    """A YAML file as plain containers; a key that stands twice is an error instead of the later one winning.

    Raises:
        TableError: not YAML, or a key stands twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """A safe loader that refuses repeated keys."""

    def mapping(loader: Any, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                line = node.value[place][0].start_mark.line + 1
                raise TableError(f"{path}: line {line}: the key {key!r} stands twice")
        return {
            key: loader.construct_object(value, deep=True) for key, (_, value) in zip(keys, node.value, strict=True)
        }

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError as error:
        raise TableError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


def read_table(path: Path, name: str) -> Table:
    """Read one table file.

    Args:
        path: the file.
        name: ``<method>/<table>``.

    Raises:
        TableError: unknown or missing keys, wrong types, or names that are not there, with the file and the key.
    """
    top = _Node(path, "", load_yaml(path))
    full = _read_scale(top.node("full"), "full")
    laptop_value = top.take("laptop", lambda v: isinstance(v, (str, Mapping)), "a mapping or the name of a table")
    laptop, laptop_of = None, None
    if isinstance(laptop_value, str):
        laptop_of = laptop_value
    else:
        laptop = _read_scale(top.at("laptop", laptop_value), "laptop")
    entries = top.take("published", lambda v: isinstance(v, list), "a list", [])
    published = tuple(
        _read_published(top.at(f"published[{place}]", entry), full) for place, entry in enumerate(entries)
    )
    table = Table(
        name=name,
        method=name.split("/")[0],
        title=top.text("title"),
        paper=top.text("paper"),
        claim=top.text("claim"),
        published_in=top.text("published_in", ""),
        open=top.texts("open", ()),
        published=published,
        full=full,
        laptop=laptop,
        laptop_of=laptop_of,
        default=top.flag("default", False),
        path=path,
    )
    top.done()
    return table


def _read_published(node: _Node, scale: Scale) -> Published:
    published = Published(
        cell=node.choice("cell", list(scale.cells)),
        metric=node.choice("metric", list(scale.metrics)),
        value=float(node.number("value")),
        certainty=node.choice("certainty", CERTAINTIES),
        relative_to=node.choice("relative_to", list(scale.cells), None),
        note=node.text("note", ""),
        ratio=node.flag("ratio", False),
    )
    node.done()
    if published.relative_to == published.cell:
        raise node.error("relative_to", "is the cell itself")
    if published.ratio and published.relative_to is None:
        raise node.error("ratio", "needs relative_to, the cell that the change in percent is measured from")
    return published


def _read_scale(node: _Node, name: str) -> Scale:
    known_recipes = [recipe.name for recipe in recipes()]
    cells_node = node.node("cells")
    cells = {
        str(key): _read_cell(cells_node.at(str(key), value), str(key), known_recipes)
        for key, value in cells_node.rest.items()
    }
    metrics_node = node.node("metrics")
    metrics = {
        str(key): _read_metric(metrics_node.at(str(key), value), str(key)) for key, value in metrics_node.rest.items()
    }
    for key, found in (("cells", cells), ("metrics", metrics)):
        if not found:
            raise node.error(key, "at least one is expected")
    seeds = node.take(
        "seeds",
        lambda v: isinstance(v, list) and v != [] and all(_is_int(s) and s >= 0 for s in v) and len(set(v)) == len(v),
        "a list of different whole numbers of at least 0",
    )
    task, steps, minutes = None, None, None
    data: dict[str, tuple[str, ...]] = {}
    models: tuple[str, ...] = ()
    needs, hardware, hours = Needs(), None, None
    if name == "laptop":
        from verl_ext.demo.tasks import TASKS

        task = node.choice("task", list(TASKS))
        steps = node.count("steps", least=1)
        minutes = node.number("minutes", None, least=0)
    else:
        steps = node.count("steps", None, least=1)
        models = node.texts("models")
        data_node = node.node("data")
        data = {split: data_node.texts(split, ()) for split in ("train", "val")}
        data_node.done()
        needs_node = node.node("needs", {})
        inputs = needs_node.take(
            "inputs",
            lambda v: isinstance(v, Mapping) and all(isinstance(x, str) and x for pair in v.items() for x in pair),
            "a mapping from environment variable to what it holds",
            {},
        )
        needs = Needs(needs_node.texts("packages", ()), dict(inputs))
        needs_node.done()
        hardware = _read_hardware(node.node("hardware"))
        hours = _read_hours(node.node("hours"))
    scale = Scale(
        name=name,
        cells=cells,
        metrics=metrics,
        baseline=node.choice("baseline", list(cells), None),
        versus=_read_versus(node.node("versus", {}), list(cells)),
        seeds=tuple(seeds),
        steps=steps,
        task=task,
        overrides=_read_overrides(node),
        data=data,
        models=models,
        needs=needs,
        hardware=hardware,
        hours=hours,
        minutes=minutes,
        claim=node.text("claim", _MISSING if name == "laptop" else ""),
    )
    node.done()
    if not scale.runnable:
        raise node.error("cells", "none of them can be run")
    return scale


def _read_versus(node: _Node, cells: Sequence[str]) -> dict[str, str]:
    versus = {str(name): node.choice(name, cells) for name in list(node.rest)}
    for name, other in versus.items():
        if name not in cells:
            raise node.error(name, f"{name!r} is not known{suggestion(name, cells)}")
        if name == other:
            raise node.error(name, "is the cell itself")
    return versus


def _read_hardware(node: _Node) -> Hardware:
    hardware = Hardware(
        nodes=node.count("nodes", least=1),
        gpus_per_node=node.count("gpus_per_node", least=1),
        gpu=node.text("gpu"),
        certainty=node.choice("certainty", CERTAINTIES, "certain"),
        note=node.text("note", ""),
    )
    node.done()
    return hardware


def _read_hours(node: _Node) -> Estimate:
    hours = Estimate(
        value=node.number("value", None, least=0),
        certainty=node.choice("certainty", CERTAINTIES, "certain"),
        note=node.text("note", ""),
    )
    node.done()
    return hours


def _read_cell(node: _Node, name: str, known: Sequence[str]) -> Cell:
    runnable = node.flag("runnable", True)
    names = node.texts("recipe", _MISSING if runnable else ())
    for recipe in names:
        if recipe not in known:
            raise node.error("recipe", f"unknown recipe {recipe!r}{suggestion(recipe, known)}")
    cell = Cell(
        name=name,
        label=node.text("label"),
        recipe=names,
        overrides=_read_overrides(node),
        note=node.text("note", ""),
        runnable=runnable,
    )
    node.done()
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        raise node.error("", "the name of a cell is made of letters, digits and _")
    return cell


def _read_overrides(node: _Node) -> dict[str, Any]:
    overrides = node.take("overrides", lambda v: isinstance(v, Mapping), "a mapping", {})
    for key in overrides:
        if not isinstance(key, str) or not _KEY.match(key):
            raise node.error("overrides", f"{key!r} is not a dotted key of Hydra (which may begin with + or ++)")
    return dict(overrides)


def _read_metric(node: _Node, name: str) -> MetricSpec:
    kind = node.choice("kind", list(KINDS))
    required, optional = KINDS[kind]
    names = [*required, *optional]
    options: dict[str, Any] = {}
    for option in names:
        if option in node.rest or option in required:
            options[option] = _OPTIONS.get(option, _any_option)(node, option)
    percent = node.flag("percent", False)
    spec = MetricSpec(
        name=name,
        label=node.text("label"),
        kind=kind,
        options=options,
        percent=percent,
        higher=node.take("higher", lambda v: v is None or isinstance(v, bool), "true, false or null", True),
        digits=node.count("digits", 1 if percent else 3),
        times=float(node.number("times", 1.0)),
    )
    node.known += names
    node.done()
    return spec


def _any_option(node: _Node, key: str) -> Any:
    what = "a text, a number, or a list or mapping of them"
    return node.take(key, lambda v: isinstance(v, (str, int, float, list, Mapping)), what)


_OPTIONS: Mapping[str, Callable[[_Node, str], Any]] = {
    "keys": _Node.texts,
    "tokens_key": _Node.text,
    "window": lambda node, key: node.count(key, least=1),
    "k": lambda node, key: node.count(key, least=1),
    "factor": lambda node, key: node.number(key, least=1),
    "p": lambda node, key: node.number(key, least=0),
    "threshold": _Node.number,
}
