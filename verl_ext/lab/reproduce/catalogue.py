# SPDX-License-Identifier: Apache-2.0
"""The tables of this installation: their files found and read, their scales and cells by name. Imports nothing heavy.

``extends: <method>/<table>`` in a file takes everything from another table that the file does not say itself: mappings
are merged, all else is replaced, a `laptop` too. What is wrong in a file is reported with the file and the key.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from verl_ext.lab.reproduce.tables import SCALES, Cell, Scale, Table, TableError, UnknownTableError
from verl_ext.recipes import recipes, suggestion, table_paths

_TABLE = TypeAdapter(Table)


def tables() -> list[Table]:
    """Every table of this installation, sorted by name. Raises TableError: a file is wrong, two tables of a method are
    the default, or a `laptop` names no table that has one.
    """
    found = [read_table(path, name) for name, path in table_paths().items()]
    having = [one.name for one in found if one.laptop is not None]
    defaults: dict[str, str] = {}
    for table in found:
        if table.default and (other := defaults.setdefault(table.method, table.name)) != table.name:
            raise TableError(f"{table.path}: default: {other} is the default table of {table.method} already")
        if table.laptop_of is not None and table.laptop_of not in having:
            raise TableError(
                f"{table.path}: laptop: {table.laptop_of!r} is not a table with a laptop scale"
                f"{suggestion(table.laptop_of, having)}"
            )
    return found


@functools.cache
def publications() -> Mapping[str, Mapping[str, Any]]:
    """Where published numbers were read, ``publications.yaml``: paper, section and certainty by the name that a table's
    `source` says.
    """
    return load_yaml(Path(__file__).with_name("publications.yaml"))


def find_table(name: str) -> Table:
    """The table of this name; a bare method name means its default table. Raises UnknownTableError: there is none."""
    found = {table.name: table for table in tables()}
    if name in found:
        return found[name]
    own = [table for table in found.values() if table.method == name]
    if chosen := [table for table in own if table.default or len(own) == 1]:
        return chosen[0]
    if own:
        names = ", ".join(table.name for table in own)
        raise UnknownTableError(f"{name!r} has several tables and no default: say which of {names}")
    aliases = [table.method for table in found.values() if table.default]
    raise UnknownTableError(f"unknown table {name!r}{suggestion(name, [*found, *aliases])}")


def scale_of(table: Table, name: str) -> tuple[Table, Scale]:
    """A table's scale, and the table whose it is: another one where two tables share their laptop scale. Raises
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
    """The cells of these names in the table's order; None: all that can be run. Raises UnknownTableError: a name is not
    known, or its cell cannot be run.
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


def load_yaml(path: Path) -> Any:
    """A YAML file as plain containers; a key that stands twice is an error instead of the later one winning. Raises
    TableError: not YAML, or a key stands twice.
    """
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        """A safe loader that refuses repeated keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys: set[Any] = set()
            for place, _ in node.value:
                if (key := self.construct_object(place, deep=True)) in keys:
                    raise TableError(f"{path}: line {place.start_mark.line + 1}: the key {key!r} stands twice")
                keys.add(key)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError as error:
        raise TableError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


def _content(path: Path) -> Any:
    """Content of a table file, with that of the table which it extends."""
    content = load_yaml(path)
    if not isinstance(content, dict) or "extends" not in content:
        return content
    name = content.pop("extends")
    base = table_paths().get(name)
    if base is None or base == path:
        raise TableError(f"{path}: extends: {name!r} is no other table{suggestion(str(name), list(table_paths()))}")
    theirs = load_yaml(base)
    if "extends" in theirs:
        raise TableError(f"{path}: extends: {name} extends {theirs['extends']} itself; extend that one")
    own = {"laptop": content["laptop"]} if "laptop" in content else {}  # an experiment of its own, taken whole
    return {**_over(theirs, content), **own}


def _over(below: Any, above: Any) -> Any:
    """Two contents, the second winning; mappings are merged key by key."""
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{key: _over(below.get(key), value) for key, value in above.items()}}


def read_table(path: Path, name: str) -> Table:
    """Read one table file, of the table ``<method>/<table>``. Raises TableError: unknown or missing keys, wrong types,
    or names that are not there, with the file and the key.
    """
    from verl_ext.lab.demo.tasks import TASKS

    content = _content(path)
    if not isinstance(content, Mapping):
        raise TableError(f"{path}: the file: a mapping is expected, not {content!r:.60}")
    context = {"recipes": [recipe.name for recipe in recipes()], "tasks": list(TASKS), "publications": publications()}
    try:
        return _TABLE.validate_python({**content, "name": name, "path": path}, context=context)
    except ValidationError as error:
        raise TableError(f"{path}: {_said(error)}") from error


def _said(error: ValidationError) -> str:
    """The first of pydantic's errors as ``key: what is wrong, not value``, with the key as it stands in the file."""
    first = error.errors()[0]
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"] if part != "options"]
    key = first.get("ctx", {}).get("key", "")
    place = "".join([*parts, f".{key}" if key else ""]).lstrip(".")
    if first["type"] == "missing":
        return f"{place}: is missing"
    if first["type"] == "table":
        return f"{place}: {first['msg']}"
    value = repr(first["input"])
    text = first["msg"].replace("tuple", "list").replace("dictionary", "mapping")
    return f"{place}: {text} (it is {value if len(value) <= 60 else f'{value[:57]}...'})"
