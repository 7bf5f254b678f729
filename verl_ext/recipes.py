# SPDX-License-Identifier: Apache-2.0
"""Finding and describing the recipes: the YAML files behind ``+recipe=<name>``.

A recipe is a YAML file below ``recipe/`` whose first line is ``# @package _global_``. The comment lines that follow it,
up to the first blank line, are its header::

    # @package _global_
    # summary: one line that says what the recipe does
    # paper: arXiv 2602.05885 (Dr. Kernel)
    # kind: estimator
    # Any further line is the description.

Files and folders whose name begins with ``_`` are parts shared by recipes and are not listed. This module imports the
standard library alone at load time, since the plugin uses it in every process that imports Hydra.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from verl_ext.common.overrides import Failure, UsageError

GROUP = "recipe"
"""Hydra's config group, and so the name of the folder that holds the files."""

KINDS = ("estimator", "modifier", "loss", "rejection", "vocabulary", "schedule", "rollout", "platform", "baseline")
"""Values of a header's ``kind``, in the order in which recipes are listed."""

PACKAGE_LINE = "# @package _global_"

TABLE_LINE = "# verl-ext table"
"""First line of the files beside the recipes that describe paper tables (:mod:`verl_ext.lab.reproduce.tables`)."""

_HEADER_FIELD = re.compile(r"^(summary|paper|kind):\s*(.*)$")


class RecipeError(Failure):
    """A recipe cannot be found, read or composed."""


class UnknownRecipeError(RecipeError, UsageError):
    """No recipe has this name; the message lists the known ones."""


@dataclass(frozen=True)
class Recipe:
    """One recipe and what its header says.

    Attributes:
        name: the value of ``+recipe=``; with a ``/`` for a file in a subfolder.
        path: the YAML file.
        summary: one line.
        paper: where the method is published, or ``-``.
        kind: one of `KINDS`.
        description: the rest of the header, possibly empty.
    """

    name: str
    path: Path
    summary: str
    paper: str
    kind: str
    description: str = ""


@dataclass(frozen=True)
class Change:
    """One key of the composed configuration that a recipe sets.

    Attributes:
        key: dotted path, such as ``algorithm.adv_estimator``.
        old: verl's default, unresolved; `ABSENT` where verl has no such key.
        new: the value with the recipe; `ABSENT` where the recipe replaces a whole block that had the key.
        doc: the comment at the key in the recipe file, possibly empty.
    """

    key: str
    old: Any
    new: Any
    doc: str = ""

    @property
    def changed(self) -> bool:
        """Whether the recipe's value differs from verl's default."""
        return self.old is ABSENT or self.new is ABSENT or self.old != self.new or type(self.old) is not type(self.new)


@dataclass(frozen=True)
class Comparison:
    """What one or several recipes set against verl's defaults.

    Attributes:
        changes: one entry a leaf key, sorted as the recipe files state them, then by name.
        sections: comments of keys that hold other keys, such as ``algorithm.trloo``, by dotted path.
    """

    changes: tuple[Change, ...]
    sections: dict[str, str] = field(default_factory=dict)


ABSENT = object()
"""Stands for a key that does not exist, which is not the same as a key with the value null."""


def recipe_root() -> Path:
    """The folder that holds the folder ``recipe/``.

    In a wheel that is ``verl_ext/_recipes`` inside the package; in an editable install or a checkout it is the top of
    the checkout, so that an edited recipe takes effect at once.

    Raises:
        RecipeError: the installation has no recipes.
    """
    package = Path(__file__).resolve().parent
    for root in (package / "_recipes", package.parent):
        if (root / GROUP).is_dir():
            return root
    raise RecipeError(
        f"no folder {GROUP!r} in {package / '_recipes'} nor in {package.parent}: the installation of verl-ext is "
        "incomplete. Reinstall it with `pip install --force-reinstall --no-deps verl-ext`."
    )


METHODS_GROUP = "verl_ext.methods"
"""Entry points of packages that bring methods of their own: the estimator's name and the method's function."""


@functools.cache
def method_entry_points() -> tuple[EntryPoint, ...]:
    """The entry points of the group `METHODS_GROUP`, by name; nothing is imported."""
    return tuple(sorted(entry_points(group=METHODS_GROUP), key=lambda point: point.name))


def recipe_roots() -> list[Path]:
    """`recipe_root` and the packages with methods of their own that hold a folder ``recipe/``. Raises RecipeError: the
    installation has no recipes."""
    roots = [recipe_root()]
    for package in sorted({point.value.split(".")[0].split(":")[0] for point in method_entry_points()}):
        spec = importlib.util.find_spec(package)
        places = [Path(place) for place in (spec.submodule_search_locations or [] if spec else [])]
        roots += [place for place in places if (place / GROUP).is_dir()]
    return roots


def search_path_uris() -> list[str]:
    """The entries for Hydra's search path under which ``+recipe=<name>`` finds its file."""
    return [f"file://{root}" for root in recipe_roots()]


def recipes_in(argument: str) -> list[str]:
    """Recipes that a command line argument names: ``+recipe=cpu``, ``+recipe=[trloo,cpu]`` and ``+recipe@_global_=cpu``
    do, others don't."""
    key, _, value = argument.partition("=")
    if key.lstrip("+").partition("@")[0] != GROUP:
        return []
    return [name.strip(" '\"") for name in value.strip("[]").split(",") if name.strip(" '\"")]


def recipes() -> list[Recipe]:
    """Every recipe of this installation and of packages with methods, ordered by kind and then by name. Raises
    RecipeError: a recipe's header lacks a field or names an unknown kind."""
    found = []
    folders = [root / GROUP for root in recipe_roots()]
    for path, folder in ((path, root) for root in folders for path in sorted(root.rglob("*.yaml"))):
        name = path.relative_to(folder).with_suffix("").as_posix()
        if any(part.startswith(("_", ".")) for part in name.split("/")):
            continue
        text = path.read_text(encoding="utf-8")
        if text.split("\n", 1)[0].strip() == PACKAGE_LINE:
            found.append(_read_header(name, path, text))
    return sorted(found, key=lambda recipe: (KINDS.index(recipe.kind), recipe.name))


def find_recipe(name: str) -> Recipe:
    """The recipe of this name. Raises UnknownRecipeError: there is none; the message names the nearest and lists
    all."""
    known = {recipe.name: recipe for recipe in recipes()}
    if name not in known:
        if is_table(name):
            raise UnknownRecipeError(table_message(name))
        raise UnknownRecipeError(f"unknown recipe {name!r}{suggestion(name, list(known))}")
    return known[name]


def is_table(name: str) -> bool:
    """Whether ``recipe/<name>.yaml`` is the table of a paper and not a recipe."""
    return name in table_paths()


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


def table_message(name: str) -> str:
    """What to say to somebody who asks for a table as if it were a recipe."""
    return (
        f"{name!r} is the table of a paper, not a recipe: see `verl-ext reproduce plan {name}` and "
        f"`verl-ext reproduce run {name}`; the recipe is {name.split('/')[0]!r}."
    )


def suggestion(name: str, known: Sequence[str]) -> str:
    """The tail of an error message about an unknown name: the nearest known one, then all of them."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Known: {', '.join(sorted(known)) or 'none'}."


def _header_lines(text: str) -> list[str]:
    """The comment block at the top of a file, including the package line."""
    lines = []
    for line in text.split("\n"):
        if not line.startswith("#"):
            break
        lines.append(line)
    return lines


def _read_header(name: str, path: Path, text: str) -> Recipe:
    fields: dict[str, str] = {}
    description: list[str] = []
    last = ""
    for line in _header_lines(text)[1:]:
        body = line[1:].rstrip()
        match = _HEADER_FIELD.match(body.strip())
        if match and not description:
            last = match.group(1)
            fields[last] = match.group(2).strip()
        elif last and not description and body.startswith("   "):
            fields[last] += " " + body.strip()  # a line indented below a field continues it
        else:
            description.append(body.strip())
    for key in ("summary", "paper", "kind"):
        if not fields.get(key):
            raise RecipeError(
                f"recipe {name!r} ({path}): the header lacks a line `# {key}: ...` below {PACKAGE_LINE!r}."
            )
    if fields["kind"] not in KINDS:
        raise RecipeError(
            f"recipe {name!r} ({path}): the header says kind {fields['kind']!r}; use one of {', '.join(KINDS)}."
        )
    return Recipe(name, path, fields["summary"], fields["paper"], fields["kind"], "\n".join(description).strip())


def documented_keys(*paths: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Keys that recipe files state, with the comment at each: the block right above it, or at the line's end.

    Returns:
        Two mappings from dotted key to comment (empty where there is none): the leaves, in the file's order, and the
        keys that hold other keys. Files named in the recipe's own ``defaults`` list are included first.
    """
    leaves: dict[str, str] = {}
    sections: dict[str, str] = {}
    for file in (file for path in paths for file in _with_defaults(path, set())):
        for key, is_leaf, doc in _walk(file):
            target = leaves if is_leaf else sections
            target[key] = doc or target.get(key, "")
    return leaves, sections


def _with_defaults(path: Path, seen: set[Path]) -> Iterator[Path]:
    """The recipe files that ``path`` includes through its ``defaults`` list, then ``path`` itself."""
    import yaml

    if path in seen:
        return
    seen.add(path)
    content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    folder = recipe_root() / GROUP
    for entry in content.get("defaults", []) if isinstance(content, dict) else []:
        for name in _default_names(entry):
            for file in (path.parent / f"{name}.yaml", folder / f"{name}.yaml"):
                if file.is_file():
                    yield from _with_defaults(file, seen)
                    break
    yield path


def _default_names(entry: Any) -> list[str]:
    """File names, relative to a recipe's folder or to ``recipe/``, that one entry of a ``defaults`` list may mean."""
    if isinstance(entry, str):
        return [] if entry == "_self_" else [entry.split("@")[0].removeprefix(f"/{GROUP}/")]
    if isinstance(entry, dict):
        names: list[str] = []
        for group, value in entry.items():
            if str(group).split("@")[0].removeprefix("override ").strip("/") == GROUP:
                names += [str(name) for name in (value if isinstance(value, list) else [value])]
        return names
    return []


def _walk(path: Path) -> Iterator[tuple[str, bool, str]]:
    import yaml

    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    header = len(_header_lines(text))
    root = yaml.compose(text, Loader=yaml.SafeLoader)

    def visit(node: Any, prefix: str, parent_row: int) -> Iterator[tuple[str, bool, str]]:
        for key_node, value_node in node.value:
            key = f"{prefix}{key_node.value}"
            if key == "defaults":
                continue
            row = key_node.start_mark.line
            # The comment at `a: {b: 1}` is the comment of a.
            doc = "" if row == parent_row else _comment_at(lines, header, key_node, value_node)
            nested = isinstance(value_node, yaml.MappingNode) and bool(value_node.value)
            yield key, not nested, doc
            if nested:
                yield from visit(value_node, f"{key}.", row)

    if isinstance(root, yaml.MappingNode):
        yield from visit(root, "", -1)


def _comment_at(lines: list[str], header: int, key_node: Any, value_node: Any) -> str:
    """The comment that belongs to one key: the unbroken block above it, else what follows it on its line."""
    row = key_node.start_mark.line
    block: list[str] = []
    above = row - 1
    while above >= header and lines[above].lstrip().startswith("#"):
        block.insert(0, lines[above].strip().lstrip("#").strip())
        above -= 1
    if block:
        return "\n".join(block)
    end = value_node.end_mark if value_node.start_mark.line == value_node.end_mark.line == row else key_node.end_mark
    tail = lines[row][end.column :].lstrip(" :")
    return tail.lstrip("#").strip() if tail.startswith("#") else ""


def verl_config_dir() -> Path:
    """The folder of the installed verl that holds ``ppo_trainer.yaml``, found without importing verl. Raises
    RecipeError: verl is not installed."""
    spec = importlib.util.find_spec("verl")
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location) / "trainer" / "config"
        if (folder / "ppo_trainer.yaml").is_file():
            return folder
    raise RecipeError("verl's configuration is not found: install it with `pip install 'verl>=0.9.1,<0.10'`.")


def compose(names: Sequence[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """verl's ``ppo_trainer`` configuration with the given recipes, as plain containers, interpolations unresolved.

    Args:
        names: recipes in the order of ``+recipe=[...]``; none gives verl's defaults.
        overrides: further Hydra overrides.

    Raises:
        UnknownRecipeError: a name is not known.
        RecipeError: Hydra cannot compose the result; the message is Hydra's.
    """
    for name in names:
        find_recipe(name)
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    quoted = [uri.replace("\\", "\\\\").replace("'", "\\'") for uri in search_path_uris()]
    arguments = ["hydra.searchpath=[" + ",".join(f"'{uri}'" for uri in quoted) + "]"]
    if names:
        arguments.append(f"+{GROUP}=[{','.join(names)}]")
    try:
        with initialize_config_dir(version_base=None, config_dir=str(verl_config_dir())):
            config = hydra_compose("ppo_trainer", overrides=[*arguments, *overrides], return_hydra_config=True)
            return OmegaConf.to_container(config, resolve=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise RecipeError(f"{'+'.join(names) or 'verl defaults'}: {error}") from error


def compare(names: Sequence[str]) -> Comparison:
    """What the recipes set against verl's defaults, key by key, with the comment at each key.

    Keys that a recipe states at verl's own default are included, with `Change.changed` false. Of Hydra's own settings
    (``hydra.*``) only those that a recipe states are compared, since the rest differs between any two runs.

    Raises:
        UnknownRecipeError: a name is not known.
        RecipeError: Hydra cannot compose the result.
    """
    leaves, sections = documented_keys(*(find_recipe(name).path for name in names))
    before, after = dict(leaves_of(_without_recipes())), dict(leaves_of(compose(names)))
    order = {key: place for place, key in enumerate(leaves)}
    keys = sorted({*before, *after}, key=lambda key: (order.get(key, len(order)), key))
    changes = []
    for key in keys:
        change = Change(key, before.get(key, ABSENT), after.get(key, ABSENT), leaves.get(key, ""))
        if key in order or (change.changed and not key.startswith("hydra.")):
            changes.append(change)
    return Comparison(tuple(changes), {key: doc for key, doc in sections.items() if doc})


@functools.cache
def _without_recipes() -> dict[str, Any]:
    return compose([])


def leaves_of(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts by dotted key; an empty dict and a list are leaves."""
    if isinstance(node, dict) and (node or not prefix):
        for key, value in node.items():
            yield from leaves_of(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node
