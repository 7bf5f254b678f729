# SPDX-License-Identifier: Apache-2.0
"""The pages of README, docs, recipes and examples: links lead somewhere, commands are commands, Python is Python.

That what they teach runs is tested where it runs (`readme_code` in `tests/e2e/harness.py`), and that bash reads their
blocks in `test_scripts.py`.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import verl  # noqa: F401  (loads the plugin)
import yaml
from hydra import compose
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from verl_ext import cli, recipes
from verl_ext.integration import launch
from verl_ext.lab.bench import __file__ as bench_file

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(ROOT.glob("docs/*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, *sorted(ROOT.glob("recipe/*/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@functools.cache
def text_and_blocks(page: Path) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The page without its fenced blocks, and those: language and body."""
    text = page.read_text(encoding="utf-8")
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    assert text.count("\n```") % 2 == 0, "a block is not closed"
    return fenced.sub("", text), tuple(fenced.findall(text))


def blocks(language: str) -> list[tuple[str, str]]:
    return [(name(page), body) for page in PAGES for kind, body in text_and_blocks(page)[1] if kind == language]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.*)$", text_and_blocks(page)[0], re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


# Pages ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(re.sub(r"`[^`]*`", "", text_and_blocks(page)[0])):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: not there"
        assert target.is_relative_to(ROOT), f"{link}: not in the repository"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading; there are {sorted(anchors(target))}"


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 200
    assert [name(page) for page in DOCS if f"]({name(page)})" not in readme] == []


def test_tests_that_a_page_names_are_there() -> None:
    named = {(page, path) for page in PAGES for path in re.findall(r"\btests/[\w/]+\.py", page.read_text("utf-8"))}
    assert [f"{name(page)}: {path}" for page, path in named if not (ROOT / path).is_file()] == []
    assert len(named) > 20


def test_the_site_has_every_page() -> None:
    site = yaml.safe_load((ROOT / "docs" / "site.yml").read_text(encoding="utf-8"))
    listed = re.findall(r"[\w/-]+\.md", str(site["nav"]))
    assert len(listed) == len(set(listed))
    assert {name(page) for page in [*DOCS, ROOT / "README.md"]} <= set(listed)
    assert all((ROOT / page).is_file() for page in listed)


def test_the_keys_are_those_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "docs" / "build.py")
    assert spec is not None and spec.loader is not None
    build: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    page = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    assert page == build.keys(), "run `python docs/build.py`"


@functools.cache
def texts_of_the_code() -> str:
    """Every text in the package, those of an f-string with `...` for what is put in, one a line."""
    found = []
    for path in (ROOT / "verl_ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "..." for p in node.values))
    return "\n".join(found)


@pytest.mark.seconds
def test_the_messages_of_the_questions_are_in_the_code() -> None:
    asked = re.findall(r"^### `(.*?)`$", (ROOT / "docs" / "faq.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(asked) >= 15
    missing = []
    for message in asked:
        pattern = ".*?".join(re.escape(part.strip()) for part in message.split("..."))
        if not re.search(pattern, texts_of_the_code()):
            missing.append(message)
    assert missing == []


# Python --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_compiles_and_its_imports_are_there(page: str, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("verl", "verl_ext")):
            module = importlib.import_module(node.module)
            assert [one.name for one in node.names if not hasattr(module, one.name)] == []


# Commands ------------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, str]]:
    """Page and line of every command in README, docs and recipes; examples have whole scripts."""
    for page, body in blocks("bash"):
        if page.startswith("examples/"):
            continue
        for line in body.replace("\\\n", " ").splitlines():
            words = line.partition(" #")[0].strip()
            if words and not words.startswith("#"):
                yield page, " ".join(words.split())


COMMANDS = list(dict.fromkeys(commands()))


def of(*beginnings: str) -> list[pytest.ParameterSet]:
    """The commands with such a first word or words, without settings of the environment before them."""
    found = []
    for page, line in COMMANDS:
        bare = re.sub(r"^(\w+=\S*\s+)+", "", line)
        if bare.startswith(beginnings):
            found.append(pytest.param(bare, id=f"{page}: {bare[:60]}"))
    return found


KNOWN = (
    "verl-ext ",
    "python -m ",
    "python ",
    "bash ",
    "make ",
    "pip ",
    "uv pip ",
    "python3.11 -m venv ",
    "git ",
    "cd ",
)


def test_every_command_is_of_a_kind_that_is_checked() -> None:
    assert len(COMMANDS) > 40
    known = {values for kind in KNOWN for values in (param.values[0] for param in of(kind))}
    odd = [line for _, line in COMMANDS if re.sub(r"^(\w+=\S*\s+)+", "", line) not in known]
    assert odd == []


@pytest.mark.parametrize("line", of("verl-ext "))
def test_verl_ext_knows_the_command(line: str) -> None:
    words = [word for word in shlex.split(line.partition(" > ")[0])[1:] if word != "..."]
    chosen = cli.build_parser(words[0])
    args, extras = chosen.parse_known_args(words)
    assert all("=" in word and not word.startswith("-") for word in extras), f"not understood: {extras}"
    for recipe in getattr(args, "recipe", None) or []:
        for one in recipe.split(","):
            if one.islower():
                recipes.find_recipe(one)
    if args.command == "bench":
        names = [path.stem for path in Path(bench_file).parent.glob("*.py")]
        assert args.benchmark in names


def composed(line: str) -> DictConfig:
    words = [word for word in shlex.split(line)[3:] if word not in ("...", '"$@"')]
    return compose("ppo_trainer", overrides=[re.sub(r"=\.\.\.$", "=x", word) for word in words])


@pytest.mark.seconds
@pytest.mark.parametrize("line", of("python -m verl.trainer.main_ppo"))
def test_a_run_composes(line: str, verl_configuration: None) -> None:
    config = composed(line)
    assert config.verl_ext is not None


@pytest.mark.filterwarnings("ignore:Disabled critic")
def test_the_complete_command_for_a_gpu_is_valid(verl_configuration: None, capsys: pytest.CaptureFixture[str]) -> None:
    bodies = [body for kind, body in text_and_blocks(ROOT / "README.md")[1] if kind == "bash" and "name=vllm" in body]
    (line,) = [one for one in "".join(bodies).replace("\\\n", " ").splitlines() if "main_ppo" in one]
    assert "..." not in line
    config = composed(line)
    launch.prepare(config)
    OmegaConf.resolve(config)
    validate_config(config, need_reference_policy(config), need_critic(config))
    assert "checks passed" in capsys.readouterr().out
    assert config.trainer.device == "cuda" and config.trainer.n_gpus_per_node == 1


MODULES = [param for param in of("python -m ") if "verl.trainer.main_ppo" not in param.values[0]]


@pytest.mark.parametrize("line", MODULES)
def test_a_module_has_the_options_it_is_given(line: str) -> None:
    module, *words = shlex.split(line)[2:]
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == []


@pytest.mark.parametrize("line", of("make "))
def test_make_has_the_target(line: str) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert shlex.split(line)[1] in targets


@pytest.mark.parametrize("line", [*of("bash "), *of("python ")])
def test_the_file_that_is_run_is_there(line: str) -> None:
    file = shlex.split(line)[1]
    if file not in ("-m", "-c", "-"):
        assert (ROOT / file).is_file()


@pytest.mark.parametrize("line", [*of("pip install"), *of("uv pip install")])
def test_the_extras_exist(line: str) -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for extras in re.findall(r"\[([\w,-]+)\]", line):
        for extra in extras.split(","):
            assert f'"{extra}": ' in setup, extra


def test_paths_of_modules_in_settings_lead_somewhere() -> None:
    folders = (ROOT / name for name in ("verl_ext", "recipe", "examples", "docs", "tests"))
    files = [path for folder in folders for kind in ("py", "yaml", "md", "sh") for path in folder.rglob(f"*.{kind}")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    named = {path for text in texts for path in re.findall(r"pkg://(verl_ext(?:\.\w+)+)", text)}
    assert "verl_ext.rewards.math" in named
    assert [path for path in named if importlib.util.find_spec(path) is None] == []
