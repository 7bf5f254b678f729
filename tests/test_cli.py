# SPDX-License-Identifier: Apache-2.0
"""``verl-ext`` list, show and its answers to what it cannot do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext import __version__, cli, recipes
from verl_ext.common import overrides
from verl_ext.lab import bench
from verl_ext.recipes import ABSENT, KINDS, RecipeError

HEADER = "# @package _global_\n# summary: {0}\n# paper: arXiv 1234.56789 (Some)\n# kind: {1}\n"


@pytest.fixture
def own_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe folder of the test's own, in a path with a space and a quote; returns the folder."""
    folder = tmp_path / "it's a root" / "recipe"
    folder.mkdir(parents=True)
    monkeypatch.setattr(recipes, "recipe_root", lambda: folder.parent)
    return folder


def write(folder: Path, name: str, body: str, summary: str = "does it", kind: str = "estimator") -> None:
    (folder / f"{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(HEADER.format(summary, kind) + body, encoding="utf-8")


@pytest.fixture(scope="module")
def comparisons() -> dict[str, recipes.Comparison]:
    return {recipe.name: recipes.compare([recipe.name]) for recipe in recipes.recipes()}


@pytest.mark.seconds
def test_every_shipped_recipe_has_a_header_and_composes(comparisons: dict[str, recipes.Comparison]) -> None:
    shipped = recipes.recipes()
    assert {"trloo", "cpu"} <= {recipe.name for recipe in shipped}
    for recipe in shipped:
        assert recipe.kind in KINDS
        assert len(recipe.summary) <= 120
        assert "\n" not in recipe.summary
        assert any(change.changed for change in comparisons[recipe.name].changes), recipe.name


def test_every_option_of_ours_is_documented(comparisons: dict[str, recipes.Comparison]) -> None:
    # Options of ours live below `algorithm.` and `verl_ext.`; weights of a mixture go by the estimators' names.
    bare = []
    for name, comparison in comparisons.items():
        for change in comparison.changes:
            parents = [change.key.rsplit(".", cut)[0] for cut in range(1, change.key.count(".") + 1)]
            ours = change.key.startswith(("algorithm.", "verl_ext")) and not change.key.startswith("algorithm.mix.")
            documented = change.doc or any(parent in comparison.sections for parent in parents)
            if change.old is ABSENT and ours and not documented:
                bare.append(f"{name}: {change.key}")
    assert bare == []


def test_list_prints_each_recipe_once_with_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    for recipe in recipes.recipes():
        (line,) = [line for line in out.splitlines() if line.split(" ")[0] == recipe.name]
        assert recipe.summary in line
        assert recipe.paper in line
        assert recipe.kind in line


def test_show_prints_old_and_new_with_the_comment(own_recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = """# It has a description.

algorithm:
  # Which estimator
  # is used.
  adv_estimator: mine
  gamma: 1.0  # the default of verl too
  # Options of mine.
  mine: {strength: 0.5, "odd": [a, b]}
trainer:
  total_epochs: 7  # few
"""
    write(own_recipes, "mine", body)
    assert cli.main(["show", "mine"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    at = lines.index("algorithm.adv_estimator: gae -> mine")
    assert lines[at + 1] == "  # Which estimator is used."
    at = lines.index("[algorithm.mine]")
    assert lines[at + 1 : at + 4] == [
        "  # Options of mine.",
        "algorithm.mine.strength: (none) -> 0.5",
        'algorithm.mine.odd: (none) -> ["a", "b"]',
    ]
    at = lines.index("trainer.total_epochs: 30 -> 7")
    assert lines[at + 1] == "  # few"
    assert "algorithm.gamma" not in out
    assert "It has a description." not in out
    assert "changed keys: 4" in out

    assert cli.main(["show", "mine", "--full"]) == 0
    out = capsys.readouterr().out
    assert "It has a description." in out
    assert "algorithm.gamma: 1.0\n  # the default of verl too" in out


@pytest.mark.seconds
def test_show_merges_several_recipes_later_one_wins(own_recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(own_recipes, "one", "algorithm:\n  mix: {one: 0.5}  # first\n  gamma: 0.5  # from one\n")
    write(own_recipes, "two", "algorithm:\n  mix: {two: 0.25}\n  gamma: 0.75  # from two\n")
    assert cli.main(["show", "one,two"]) == 0
    out = capsys.readouterr().out
    assert "algorithm.mix.one: (none) -> 0.5" in out
    assert "algorithm.mix.two: (none) -> 0.25" in out
    assert "algorithm.gamma: 1.0 -> 0.75\n  # from two" in out


def test_show_follows_shared_parts_and_states_only_its_own_hydra_keys(own_recipes: Path) -> None:
    (own_recipes / "_base.yaml").write_text(
        "# @package _global_\nalgorithm:\n  # From the base.\n  lam: 0.5\n", encoding="utf-8"
    )
    body = "defaults:\n  - _base\n  - _self_\nhydra:\n  job:\n    # Named so.\n    name: mine\n"
    write(own_recipes, "mine", body)
    found = {change.key: change for change in recipes.compare(["mine"]).changes}
    assert set(found) == {"algorithm.lam", "hydra.job.name"}
    assert found["algorithm.lam"].doc == "From the base."
    assert (found["algorithm.lam"].old, found["algorithm.lam"].new) == (1.0, 0.5)
    assert found["hydra.job.name"].new == "mine"
    assert [recipe.name for recipe in recipes.recipes()] == ["mine"]


def test_a_recipe_elsewhere_shares_what_every_recipe_brings(tmp_path: Path) -> None:
    """The block with the launch check stands once, and a folder of a user's own may name it too."""
    import verl  # noqa: F401  (our folder comes to Hydra's search path)
    from hydra import compose, initialize_config_module

    (tmp_path / "recipe").mkdir()
    write(tmp_path / "recipe", "mine", "defaults:\n  - /recipe/_base\n  - _self_\nalgorithm: {gamma: 0.5}\n")
    with initialize_config_module("verl.trainer.config", version_base=None):
        words = [f"hydra.searchpath=['file://{tmp_path}']", "+recipe=[trloo,mine,kpo]"]
        found = compose("ppo_trainer", overrides=words, return_hydra_config=True)
    assert found.hydra.callbacks.verl_ext._target_ == "verl_ext.integration.launch.LaunchCallback"
    assert found.algorithm.gamma == 0.5 and found.verl_ext.rows_dir is None and "kpo" in found.verl_ext.losses
    for recipe in recipes.recipes():
        text = recipe.path.read_text(encoding="utf-8")
        assert "  - /recipe/_base\n" in text and "LaunchCallback" not in text, recipe.name


def test_show_tells_a_missing_key_from_null(own_recipes: Path) -> None:
    write(own_recipes, "mine", "algorithm:\n  brand_new: null\n  kl_ctrl: {type: null}\n")
    found = {change.key: change for change in recipes.compare(["mine"]).changes}
    assert found["algorithm.brand_new"].old is ABSENT
    assert found["algorithm.brand_new"].changed
    assert found["algorithm.kl_ctrl.type"].old == "fixed"
    assert found["algorithm.kl_ctrl.type"].new is None


def test_recipe_in_a_subfolder_has_a_slash_in_its_name(own_recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(own_recipes, "paper/table2", "algorithm:\n  gamma: 0.25\n")
    (own_recipes / "paper" / "matrix.yaml").write_text("runs: [1, 2]\n", encoding="utf-8")
    assert [recipe.name for recipe in recipes.recipes()] == ["paper/table2"]
    assert cli.main(["show", "paper/table2"]) == 0
    assert "algorithm.gamma: 1.0 -> 0.25" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["show", "trlo"], ["demo", "--recipe", "trlo"], ["show", "cpu,trlo"]])
def test_unknown_recipe_names_the_nearest_and_lists_all(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert "unknown recipe 'trlo'; did you mean 'trloo'?" in err
    assert "cpu" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ("# @package _global_\n# summary: s\n# kind: loss\n", "# paper: ..."),
        ("# @package _global_\n# summary: s\n# paper: -\n# kind: magic\n", "kind 'magic'"),
    ],
)
def test_bad_header_is_named(own_recipes: Path, header: str, complaint: str) -> None:
    (own_recipes / "bad.yaml").write_text(header, encoding="utf-8")
    with pytest.raises(RecipeError, match="bad") as caught:
        recipes.recipes()
    assert complaint in str(caught.value)


def test_recipe_that_hydra_refuses_is_a_message_not_a_traceback(
    own_recipes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(own_recipes, "bad", "defaults:\n  - /actor: no_such_file\n")
    assert cli.main(["show", "bad"]) == 1
    assert "no_such_file" in capsys.readouterr().err


def test_header_continuation_and_description(own_recipes: Path) -> None:
    text = (
        "# @package _global_\n# summary: first\n#   half\n# paper: -\n# kind: loss\n# More.\n#\n# And more.\n\na: 1\n"
    )
    (own_recipes / "long.yaml").write_text(text, encoding="utf-8")
    (recipe,) = recipes.recipes()
    assert recipe.summary == "first half"
    assert recipe.description == "More.\n\nAnd more."


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--steps", "0"],
        ["demo", "--steps", "three"],
        ["demo", "--seed", "-1"],
        ["prepare", "gpt5"],
        ["nonsense"],
        ["list", "--nonsense"],
        [],
    ],
)
def test_wrong_arguments_exit_with_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: verl-ext" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["--stepz", "--stepz=3", "learning-rate", "a b=1"])
def test_demo_refuses_what_is_no_override(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", argument]) == 2
    assert f"{argument!r} is neither an option" in capsys.readouterr().err


@pytest.mark.parametrize(
    "override", ["a.b=1", "+a.b=1", "++a.b=[x,y]", "~a.b", "~a=1", "actor@x.y=z", "a=", "a='b c=d'"]
)
def test_demo_knows_hydra_overrides(override: str) -> None:
    assert overrides.OVERRIDE.match(override)


def test_names_may_come_with_commas_and_brackets_each_once() -> None:
    assert cli._split(["trloo, cpu", "[a,trloo]", ""]) == ["trloo", "cpu", "a"]


def test_bench_lists_its_modules_and_refuses_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(bench.summary(module) for module in bench.available())
    assert cli.main(["bench", "logit"]) == 2
    assert "did you mean 'logits'?" in capsys.readouterr().err


def test_command_as_a_process_answers_without_heavy_imports() -> None:
    code = "import sys\nfrom verl_ext import cli\ntry:\n    cli.main(['--help'])\nfinally:\n    "
    code += "print('\\n' + __import__('json').dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    for command in ("list", "show", "prepare", "demo", "bench"):
        assert f"\n    {command} " in done.stdout
    assert not {"torch", "ray", "verl", "hydra", "yaml"} & set(json.loads(done.stdout.splitlines()[-1]))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == f"verl-ext {__version__}"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["new-recipe", "zz", "--out", "/proc/x"], 1, "verl-ext new-recipe: [Errno "),
        (["prepare", "lake", "--out", "own"], 1, "verl-ext prepare: {own} exists and was not made by"),
        (["prepare", "sums", "--rows", "5", "5"], 2, "--rows is an option of `prepare reasoning_gym`"),
        (["prepare", "sums", "--dataset", "chain_sum"], 2, "--dataset is an option of `prepare reasoning_gym`"),
        (["prepare", "reasoning_gym", "--dataset", "chain_sum", "--out", "x", "--force"], 2, "leave out --force"),
    ],
)
def test_what_cannot_be_carried_out_is_a_line_and_no_traceback(
    arguments: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.txt").touch()
    assert cli.main(arguments) == code
    assert said.format(own=tmp_path / "own") in capsys.readouterr().err and not (tmp_path / "x").exists()
