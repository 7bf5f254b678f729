# SPDX-License-Identifier: Apache-2.0
"""The package as a user gets it: wheel, sdist and editable install carry the recipes and nothing named ``recipe``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from verl_ext.recipes import recipe_root, recipes, table_paths

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE", "Makefile")
FOLDERS = ("verl_ext", "hydra_plugins", "recipe", "requirements", "tests", "examples", "docs", ".ci")

pytestmark = pytest.mark.slow

_PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
if sys.argv[2] == "site":
    import site
    site.addsitedir(sys.argv[1])
import importlib.util
import verl_ext.recipes as r
folder = r.recipe_root() / "recipe"
files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.yaml"))
print(json.dumps({
    "root": str(r.recipe_root()), "uri": r.search_path_uris()[0], "files": files,
    "names": [x.name for x in r.recipes()], "tables": list(r.table_paths()),
    "module": importlib.util.find_spec("recipe") is not None,
}))
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_checkout(target: Path) -> Path:
    """A copy of the repository's sources, since a build writes next to them."""
    target.mkdir(parents=True)
    for name in SOURCES:
        if (REPOSITORY / name).exists():
            shutil.copy2(REPOSITORY / name, target / name)
    for name in FOLDERS:
        if (REPOSITORY / name).exists():
            shutil.copytree(REPOSITORY / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "_recipes"))
    return target


def install(wheel: Path, target: Path) -> Path:
    # pip itself runs from this environment; --target keeps the installation out of it.
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel)
    return target


def probe(target: Path, mode: str = "path") -> dict:
    """What ``verl_ext.recipes`` finds with only the standard library and ``target`` on the path."""
    return json.loads(run(sys.executable, "-I", "-S", "-c", _PROBE, target, mode, cwd=target.parent))


def expected_files() -> list[str]:
    folder = REPOSITORY / "recipe"
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))


def expected_names() -> list[str]:
    return [recipe.name for recipe in recipes()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An sdist, the wheel built from that sdist, and the wheel built from the checkout."""
    base = tmp_path_factory.mktemp("build")
    checkout = copy_checkout(base / "check out")  # a space in the path is not unusual
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", base / "by-sdist", checkout)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", base / "direct", checkout)
    (sdist,) = (base / "by-sdist").glob("*.tar.gz")
    (from_sdist,) = (base / "by-sdist").glob("*.whl")
    (direct,) = (base / "direct").glob("*.whl")
    return {"checkout": checkout, "sdist": sdist, "from_sdist": from_sdist, "direct": direct}


def test_checkout_uses_its_own_recipe_folder() -> None:
    assert recipe_root() == REPOSITORY
    assert {"trloo", "cpu"} <= set(expected_names())


@pytest.mark.parametrize("source", ["from_sdist", "direct"])
def test_wheel_carries_the_recipes(built: dict[str, Path], source: str, tmp_path: Path) -> None:
    found = probe(install(built[source], tmp_path / "site"))
    assert found["files"] == expected_files()
    assert found["names"] == expected_names()
    assert found["tables"] == list(table_paths()) and "otb/samples" in found["tables"]
    for name in ("sources.yaml", "publications.yaml"):
        assert (tmp_path / "site" / "verl_ext" / "lab" / "reproduce" / name).is_file()
    assert Path(found["root"]) == tmp_path / "site" / "verl_ext" / "_recipes"
    assert found["uri"] == f"file://{found['root']}"
    assert not found["module"], "the wheel installs an importable package named `recipe`"


def test_wheels_from_sdist_and_checkout_have_the_same_files(built: dict[str, Path]) -> None:
    names = [set(zipfile.ZipFile(built[source]).namelist()) for source in ("from_sdist", "direct")]
    assert names[0] == names[1]
    templates = {path.name for path in (REPOSITORY / "verl_ext" / "rollout" / "prompts").glob("*.txt")}
    assert {f"verl_ext/rollout/prompts/{name}" for name in templates} <= names[0] and "default.txt" in templates
    assets = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "verl_ext").rglob("assets/*")}
    assert assets <= names[0] and {"verl_ext/assets/shell.html", "verl_ext/lab/report/assets/page.js"} <= assets
    tops = {name.split("/")[0] for name in names[0]}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"verl_ext", "hydra_plugins"}
    assert {name for name in names[0] if name.startswith("hydra_plugins")} == {"hydra_plugins/verl_ext/__init__.py"}


def test_wheel_metadata(built: dict[str, Path]) -> None:
    archive = zipfile.ZipFile(built["direct"])
    texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "verl-ext = verl_ext.cli:main" in texts["entry_points.txt"]
    assert "[verl.plugins]\nverl_ext = verl_ext.plugin" in texts["entry_points.txt"]
    assert "Requires-Dist: verl<0.10,>=0.9.1" in texts["METADATA"]
    assert "Apache License" in texts["LICENSE"]


@pytest.mark.parametrize("mode", ["lenient", "strict", "compat"])
def test_editable_install_reads_the_checkout(mode: str, tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path / "checkout")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    hook = f"from setuptools import build_meta as b; b.build_editable({str(wheels)!r}, {{'editable_mode': {mode!r}}})"
    run(sys.executable, "-c", hook, cwd=checkout)
    (wheel,) = wheels.glob("*.whl")
    target = install(wheel, tmp_path / "site")
    found = probe(target, "site")
    assert Path(found["root"]) == checkout
    assert found["names"] == expected_names()
    if mode != "compat":  # compat puts the whole checkout on the path, as `setup.py develop` did
        assert not found["module"]
    header = "# @package _global_\n# summary: one added later\n# paper: -\n# kind: baseline\n"
    (checkout / "recipe" / "added_later.yaml").write_text(header, encoding="utf-8")
    assert "added_later" in probe(target, "site")["names"]


def test_deleted_recipe_leaves_the_next_wheel(tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path / "checkout")
    extra = checkout / "recipe" / "short_lived.yaml"
    extra.write_text("# @package _global_\n# summary: s\n# paper: -\n# kind: loss\n", encoding="utf-8")
    listed = []
    for _ in range(2):
        run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "dist", checkout)
        (wheel,) = (tmp_path / "dist").glob("*.whl")
        listed.append("verl_ext/_recipes/recipe/short_lived.yaml" in zipfile.ZipFile(wheel).namelist())
        if extra.exists():
            extra.unlink()
    assert listed == [True, False]


def test_import_of_the_package_is_light() -> None:
    code = "import sys, verl_ext, verl_ext.cli, verl_ext.recipes; print(json.dumps(sorted(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", f"import json; {code}"], env=environment, capture_output=True, text=True, check=True
    )
    heavy = {"torch", "ray", "verl", "transformers", "hydra", "omegaconf", "numpy", "yaml"}
    assert not heavy & set(json.loads(done.stdout))
