# SPDX-License-Identifier: Apache-2.0
"""Makes `keys.md`, the reference of every key, and the site of README, docs, recipes and examples.

python docs/build.py            # write docs/keys.md from recipes and dataclasses
python docs/build.py --site     # the same, then build/site, where the packages of requirements/docs.txt are
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from verl_ext.cpu.engine.options import EmbeddedOptions
from verl_ext.integration.settings import model_options
from verl_ext.integration.settings.endpoints import Endpoint
from verl_ext.recipes import documented_keys, leaves_of, recipe_root, recipes
from verl_ext.rollout.gateway.settings import Named
from verl_ext.rollout.multi_turn import OPTIONS_KEY, MultiTurnOptions
from verl_ext.rollout.orchestra.settings import AgentSettings, OrchestraSettings
from verl_ext.rollout.retrieval import Bm25Options, HttpOptions
from verl_ext.rollout.shared.threads import ThreadOptions

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
#: Keys that no recipe states, by where they stand; the dataclass refuses others.
DATACLASSES: dict[str, type] = {
    OPTIONS_KEY: MultiTurnOptions,
    "verl_ext.orchestra": OrchestraSettings,
    "verl_ext.orchestra.agents.<name>": AgentSettings,
    "verl_ext.gateway.agents.<name>": Named,
    "verl_ext.models.<name>.endpoint": Endpoint,
    "verl_ext.threads": ThreadOptions,
    "actor_rollout_ref.rollout.engine_kwargs.embedded": EmbeddedOptions,
}
RETRIEVER = "verl_ext.orchestra.retriever"
#: Its kinds, each with keys of its own.
RETRIEVERS: dict[str, type] = {"bm25": Bm25Options, "http": HttpOptions}
HEAD = """# Keys

Made by `python docs/build.py` from the recipes and from the code that reads the keys; a test holds it to them. A
recipe's keys need no `+`; the others each need one unless a recipe names their node. `verl-ext show NAME` prints a
recipe's keys beside verl's defaults.
"""


def cell(text: str) -> str:
    """Text for a cell of a table: a docstring's marks become Markdown's, and what is no code is no HTML either."""
    text = re.sub(r":\w+:`", "`", " ".join(text.split())).replace("``", "`").replace("|", "\\|")
    return "`".join(part if n % 2 else part.replace("<", "&lt;") for n, part in enumerate(text.split("`")))


def table(rows: list[tuple[str, Any, str]]) -> list[str]:
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, default, doc in rows:
        value = "`" + json.dumps(default, ensure_ascii=False, default=str).replace("|", "\\|") + "`"
        lines.append(f"| `{key}` | {'needed' if default is dataclasses.MISSING else value} | {cell(doc)} |")
    return [*lines, ""]


def recipe_rows(path: Path) -> list[tuple[str, Any, str]]:
    """Keys that the file itself states, with value and comment, in its order."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    content.pop("defaults", None)
    docs, sections = documented_keys(path)
    rows = []
    for key, value in leaves_of(content):
        above = [key.rsplit(".", cut)[0] for cut in range(1, key.count(".") + 1)]
        rows.append((key, value, docs.get(key) or next((sections[one] for one in above if sections.get(one)), "")))
    return rows


def attributes(cls: type) -> dict[str, str]:
    """What the docstring of a dataclass says of each of its fields."""
    text = inspect.cleandoc(cls.__doc__ or "")
    body = re.split(r"^(?:Attributes|Args):\n", text, flags=re.MULTILINE)[1]
    body = re.split(r"^\S", body, maxsplit=1, flags=re.MULTILINE)[0]
    found: dict[str, str] = {}
    for block in re.split(r"^    (?=\w)", body, flags=re.MULTILINE)[1:]:
        names, _, doc = block.partition(":")
        found.update(dict.fromkeys(re.split(r",\s*", names), doc))
    return found


def dataclass_rows(where: str, cls: type) -> list[tuple[str, Any, str]]:
    docs = {name: doc for base in cls.__mro__[-2::-1] for name, doc in attributes(base).items()}
    rows = []
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name not in cls.__annotations__):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        rows.append((f"{where}.{field.name}", default, docs[field.name]))
    return rows


def model_rows() -> list[tuple[str, Any, str]]:
    """Keys of runs with several models; the sections of a model's node are verl's and have no dataclass of ours."""
    where = f"{model_options.KEY}.<name>"
    scale = "own: each model's loss is divided by its own sequences or tokens; joint: by nothing, with `token-sum`."
    sections = {name: f"actor_rollout_ref.{name}" for name in model_options.SECTIONS} | {model_options.CRITIC: "critic"}
    own = [row for row in dataclass_rows(where, model_options.Model) if row[0].rpartition(".")[2] in model_options.OWN]
    return [
        (model_options.SCALE, model_options.loss_scale({}), scale),
        *((f"{where}.{name}", {}, f"what differs from the run's `{base}`.") for name, base in sections.items()),
        *own,
    ]


def keys() -> str:
    """The page."""
    folder = recipe_root() / "recipe"
    lines = [HEAD, "## Every recipe", "", *table(recipe_rows(folder / "_base.yaml"))]
    for recipe in recipes():
        if recipe.path.is_relative_to(folder):  # not those of other packages
            lines += [f"## Recipe {recipe.name}", "", f"{recipe.summary[0].upper()}{recipe.summary[1:]}.", ""]
            lines += table(recipe_rows(recipe.path))
    for where, cls in DATACLASSES.items():
        lines += [f"## `{where}`", "", *table(dataclass_rows(where, cls))]
    for kind, cls in RETRIEVERS.items():
        lines += [f"## `{RETRIEVER}` with `kind: {kind}`", "", *table(dataclass_rows(RETRIEVER, cls))]
    lines += ["## Several models", "", *table(model_rows())]
    return "\n".join(lines).rstrip("\n") + "\n"


def site() -> int:
    """Build the site of a copy in which the pages lie as they do here: links between them are those of the tree."""
    source = ROOT / "build" / "pages"
    shutil.rmtree(source, ignore_errors=True)
    for name in ("docs", "recipe", "examples", "verl_ext"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "_recipes"))
    for path in [*ROOT.glob("*.md"), ROOT / "LICENSE"]:
        shutil.copy2(path, source)
    settings = yaml.safe_load((DOCS / "site.yml").read_text(encoding="utf-8"))
    methods = sorted(path.parent.name for path in ROOT.glob("recipe/*/README.md"))
    (place,) = [place for place in settings["nav"] if "Methods" in place]
    place["Methods"] = [{method: f"recipe/{method}/README.md"} for method in methods]
    (ROOT / "build" / "site.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", ROOT / "build" / "site.yml"]
    return subprocess.call(command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", action="store_true", help="build the site as well")
    args = parser.parse_args()
    (DOCS / "keys.md").write_text(keys(), encoding="utf-8")
    return site() if args.site else 0


if __name__ == "__main__":
    sys.exit(main())
