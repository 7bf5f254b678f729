# SPDX-License-Identifier: Apache-2.0
"""Table files: found, read strictly, kept apart from the recipes."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import copies
import pytest
import yaml

from verl_ext.lab.reproduce.catalogue import find_cells, find_table, read_table, scale_of, tables
from verl_ext.lab.reproduce.tables import KINDS, TableError, UnknownTableError
from verl_ext.recipes import TABLE_LINE, UnknownRecipeError, compose, find_recipe, recipe_root, recipes, table_paths

METHODS = ("dr_mas", "trloo", "hgpo", "kpo", "otb", "dvp")


@pytest.mark.seconds
def test_every_method_has_a_default_table_whose_laptop_scale_can_be_run() -> None:
    found = tables()
    assert [table.name for table in found] == sorted(table_paths())
    for method in METHODS:
        table = find_table(method)
        assert table.method == method and table.default and table.name.startswith(f"{method}/")
        owner, laptop = scale_of(table, "laptop")
        assert owner is table and laptop.baseline in laptop.cells and len(laptop.runnable) >= 2
        assert laptop.steps and laptop.claim and laptop.metrics
    assert {table.method for table in found} >= set(METHODS)
    for table in found:
        assert table.full.hardware is not None and table.full.models and table.full.data["train"]
        for number in table.numbers:
            assert number.metric in table.full.metrics and number.cell in table.full.cells


@pytest.mark.seconds
def test_a_shared_laptop_scale_is_the_other_tables() -> None:
    owner, scale = scale_of(find_table("hgpo/webshop"), "laptop")
    assert owner.name == "hgpo/alfworld" and scale is owner.laptop


@pytest.mark.seconds
def test_a_laptop_scale_is_not_mixed_with_that_of_the_table_below() -> None:
    table = find_table("dr_mas/normalisation")
    assert table.laptop is not None and list(table.laptop.cells) == ["global", "agent_mean", "agent_std", "dr_mas"]
    assert table.full.runnable == ["grpo", "dr_mas", "agent_mean", "agent_std"]
    assert "searcher" not in table.laptop.metrics and table.laptop.versus == {
        "agent_mean": "dr_mas",
        "agent_std": "dr_mas",
    }
    assert find_table("dr_mas/search_3b").laptop_of == "dr_mas/search"


def test_tables_are_no_recipes() -> None:
    assert not {recipe.name for recipe in recipes()} & set(table_paths())
    with pytest.raises(UnknownRecipeError, match="verl-ext reproduce run dr_mas/math"):
        find_recipe("dr_mas/math")
    with pytest.raises(UnknownRecipeError, match="is the table of a paper, not a recipe"):
        compose(["trloo", "otb/samples"])


@pytest.mark.slow
def test_verls_trainer_refuses_a_table_as_recipe() -> None:
    """Hydra itself would merge the table into the configuration, and the run would train without a recipe."""
    done = copies.python("-m", "verl.trainer.main_ppo", "+recipe=[grpo,otb/samples]", timeout=240)
    assert done.returncode != 0
    assert "verl-ext reproduce plan otb/samples" in done.stderr, done.stderr[-2000:]


@pytest.mark.seconds
def test_unknown_names_list_the_known() -> None:
    with pytest.raises(UnknownTableError, match="did you mean 'otb/samples'.*dvp/stability"):
        find_table("otb/sample")
    with pytest.raises(UnknownTableError, match="Known: .*trloo/kernelbench"):
        find_table("nothing_like_it")
    table = find_table("otb")
    with pytest.raises(UnknownTableError, match="unknown scale 'desktop'.*full, laptop"):
        scale_of(table, "desktop")
    scale = scale_of(table, "laptop")[1]
    with pytest.raises(UnknownTableError, match="unknown cell 'otb_n5'; did you mean 'otb_n4'"):
        find_cells(scale, ["otb_n5"])
    assert [cell.name for cell in find_cells(scale, ["otb_n4", "group_mean_n4"])] == ["group_mean_n4", "otb_n4"]
    kernels = find_table("trloo").full
    with pytest.raises(UnknownTableError, match="'gpt5' is only published"):
        find_cells(kernels, ["gpt5"])
    assert "gpt5" not in [cell.name for cell in find_cells(kernels, None)]


def test_light_to_read() -> None:
    """`list` must answer at once: neither torch nor numpy nor Ray is imported for it."""
    code = (
        "import sys; from verl_ext.lab.reproduce import command, needs; "
        "from verl_ext.lab.reproduce.catalogue import tables; "
        "[needs.lacks(t, t.full, list(t.full.cells.values())) for t in tables()]; "
        "print([m for m in ('torch', 'numpy', 'ray', 'verl', 'hydra', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


# --- what is wrong with a file ------------------------------------------------------------------------------------

VALID = yaml.safe_load(f"""
title: A title
paper: arXiv 0000.00000
claim: it is better
published_in: table 1
open: [one thing]
published:
  - {{cell: otb, source: gigpo_readme, values: {{score: 5.6}}, relative_to: grpo}}
full:
  hardware: {{nodes: 1, gpus_per_node: 8, gpu: 80 GB, certainty: unverified, note: not stated}}
  hours: {{value: null, certainty: unverified, note: not stated}}
  seeds: [0, 1]
  models: [some/model]
  data: {{train: [a_set], val: [b_set]}}
  needs: {{packages: [vllm], inputs: {{A_SERVER: its address}}}}
  baseline: grpo
  overrides: {{data.train_batch_size: 32, +verl_ext.orchestra.name: team}}
  cells:
    grpo: {{label: GRPO, recipe: [grpo]}}
    otb: {{label: OTB, recipe: [otb], overrides: {{actor_rollout_ref.rollout.n: 4}}}}
    other: {{label: another model, runnable: false}}
  metrics:
    score: {{label: avg@16, kind: last, keys: ["val-core/*/mean@16"], percent: true}}
laptop:
  claim: the same
  task: {"chain_sum"}
  steps: 2
  seeds: [0]
  baseline: grpo
  cells:
    grpo: {{label: GRPO, recipe: grpo}}
    otb: {{label: OTB, recipe: [otb]}}
  metrics:
    tokens: {{label: tokens, kind: tokens_to, keys: [trajectory/reward/mean], threshold: 0.5, higher: false}}
""")


def write(path: Path, content: Any) -> Path:
    path.write_text(f"{TABLE_LINE}\n{yaml.safe_dump(content, sort_keys=False)}", encoding="utf-8")
    return path


def test_a_valid_file_is_read_whole(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "t.yaml", VALID), "otb/t")
    assert table.laptop is not None and table.full.hours is not None and table.full.hardware is not None
    assert (table.name, table.method, table.folder, table.default) == ("otb/t", "otb", "otb.t", False)
    assert table.full.needs.inputs == {"A_SERVER": "its address"} and table.full.steps is None
    assert table.full.hours.value is None and table.full.hardware.gpus_per_node == 8
    assert table.full.runnable == ["grpo", "otb"] and list(table.full.cells) == ["grpo", "otb", "other"]
    assert table.laptop.cells["grpo"].recipe == ("grpo",) and table.laptop.minutes is None
    assert table.full.metrics["score"].digits == 1 and table.laptop.metrics["tokens"].digits == 3
    assert table.laptop.metrics["tokens"].options == {"keys": ("trajectory/reward/mean",), "threshold": 0.5}
    (number,) = table.numbers
    assert (number.metric, number.value, number.relative_to) == ("score", 5.6, "grpo")
    assert (number.certainty, number.section) == ("abstract-or-blog", "README of langfengQ/verl-agent")


def _set(*path: str | int, to: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = to

    return change


def _drop(*path: str | int) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set("titel", to="x"), r"titel: unknown key; did you mean 'title'"),
        (_drop("claim"), r"claim: is missing$"),
        (_set("paper", to=["x"]), r"paper: Input should be a valid string \(it is \['x'\]\)"),
        (_set("published", 0, "cell", to="opo"), r"published\[0\].cell: 'opo' is not known.*Known: grpo, otb, other"),
        (_set("published", 0, "values", to={"avg": 1}), r"published\[0\].values: 'avg' is not known"),
        (_set("published", 0, "values", to={}), r"published\[0\].values: .*at least 1 item"),
        (_drop("published", 0, "source"), r"published\[0\].source: is missing"),
        (_set("published", 0, "source", to="gigpo"), r"published\[0\].source: 'gigpo' is not known.*gigpo_readme"),
        (
            _set("published", 0, "values", "score", to="5.6"),
            r"published\[0\].values.score: Input should be a valid number \(it is '5.6'\)",
        ),
        (_set("published", 0, "relative_to", to="otb"), r"relative_to: is the cell itself"),
        (_set("full", "seeds", to=[0, 0]), r"full.seeds: Numbers should be different \(it is \[0, 0\]\)"),
        (_set("full", "seeds", to=3), r"full.seeds: Input should be a valid list \(it is 3\)"),
        (_set("full", "baseline", to="gspo"), r"full.baseline: 'gspo' is not known"),
        (_set("full", "versus", to={"otb": "gspo"}), r"full.versus.otb: 'gspo' is not known"),
        (_set("full", "versus", to={"gspo": "otb"}), r"full.versus.gspo: 'gspo' is not known.*Known: grpo, otb"),
        (_set("full", "versus", to={"otb": "otb"}), r"full.versus.otb: is the cell itself"),
        (
            _set("full", "hardware", "gpus_per_node", to=True),
            r"full.hardware.gpus_per_node: .* valid integer \(it is True\)",
        ),
        (_set("full", "data", "test", to=["x"]), r"full.data.test: 'test' is not known.*train, val"),
        (_set("full", "task", to="lake"), r"full.task: unknown key"),
        (
            _set("full", "needs", "inputs", to={"A": 1}),
            r"full.needs.inputs.A: Input should be a valid string \(it is 1\)",
        ),
        (_set("full", "overrides", "a b", to=1), r"full.overrides: 'a b' is not a dotted key of Hydra"),
        (_set("full", "cells", "otb", "recipe", to=["otbb"]), r"full.cells.otb.recipe: unknown recipe 'otbb'.*'otb'"),
        (_drop("full", "cells", "otb", "recipe"), r"full.cells.otb.recipe: is missing"),
        (_set("full", "cells", "a-b", to={"label": "x", "recipe": ["otb"]}), r"cells.a-b: the name of a cell"),
        (_set("full", "cells", to={}), r"full.cells: .*at least 1 item"),
        (_set("full", "cells", "otb", "name", to="x"), r"full.cells.otb.name: unknown key"),
        (_set("full", "cells", to={"other": {"label": "x", "runnable": False}}), r"none of them can be run|not known"),
        (_set("full", "metrics", "score", "kind", to="lasts"), r"full.metrics.score.kind: .*did you mean 'last'"),
        (_set("full", "metrics", "score", "widow", to=2), r"metrics.score.widow: unknown key; did you mean 'window'"),
        (_drop("full", "metrics", "score", "keys"), r"metrics.score.keys: is missing"),
        (_drop("laptop", "metrics", "tokens", "threshold"), r"laptop.metrics.tokens.threshold: is missing"),
        (_set("full", "metrics", "score", "window", to="5"), r"metrics.score.window: .* integer \(it is '5'\)"),
        (_set("laptop", "task", to="chian"), r"laptop.task: 'chian' is not known.*chain_sum"),
        (_set("laptop", "steps", to=0), r"laptop.steps: .*greater than or equal to 1 \(it is 0\)"),
        (_drop("laptop", "claim"), r"laptop.claim: is missing"),
        (_set("laptop", to=3), r"laptop: a mapping or the name of a table is expected, not 3"),
        (_set("full", to=[]), r"full: a mapping is expected"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_key(tmp_path: Path, change: Callable[[Any], None], said: str) -> None:
    content = copy.deepcopy(VALID)
    change(content)
    path = write(tmp_path / "t.yaml", content)
    with pytest.raises(TableError, match=f"{path.name}: .*{said}"):
        read_table(path, "otb/t")


def test_repeated_keys_and_broken_yaml_are_refused(tmp_path: Path) -> None:
    text = write(tmp_path / "t.yaml", VALID).read_text()
    twice = tmp_path / "twice.yaml"
    twice.write_text(text.replace("paper:", "title: again\npaper:", 1))
    with pytest.raises(TableError, match="line 3: the key 'title' stands twice"):
        read_table(twice, "otb/twice")
    twice.write_text("a: [1")
    with pytest.raises(TableError, match="twice.yaml: not valid YAML"):
        read_table(twice, "otb/twice")
    twice.write_text("- a")
    with pytest.raises(TableError, match="the file: a mapping is expected"):
        read_table(twice, "otb/twice")


def test_a_table_extends_another(tmp_path: Path) -> None:
    """Mappings are merged, all else is replaced; what is wrong is said of the file that extends."""
    base = find_table("hgpo/alfworld")
    path = write(
        tmp_path / "t.yaml",
        {
            "extends": base.name,
            "title": "larger",
            "default": False,
            "published": [],
            "laptop": base.name,
            "full": {"models": ["a/b"], "hardware": {"gpus_per_node": 64}, "overrides": {"trainer.test_freq": 7}},
        },
    )
    table = read_table(path, "hgpo/t")
    assert (table.title, table.claim, table.published) == ("larger", base.claim, ())
    assert table.full.models == ("a/b",) and table.full.cells == base.full.cells
    assert table.full.overrides == {**base.full.overrides, "trainer.test_freq": 7}
    assert list(table.full.overrides) == list(base.full.overrides), "the order is that of the table below"
    assert table.full.hardware is not None and base.full.hardware is not None
    assert (table.full.hardware.gpus_per_node, table.full.hardware.gpu) == (64, base.full.hardware.gpu)
    for name, said in (
        ("hgpo/alfwrld", "t.yaml: extends: 'hgpo/alfwrld' is no other table; did you mean 'hgpo/alfworld'"),
        ("hgpo/alfworld_7b", "t.yaml: extends: hgpo/alfworld_7b extends hgpo/alfworld itself"),
    ):
        with pytest.raises(TableError, match=said):
            read_table(write(path, {"extends": name}), "hgpo/t")
    with pytest.raises(TableError, match="t.yaml: full.seeds: Input should be a valid list"):
        read_table(write(path, {"extends": base.name, "full": {"seeds": 3}}), "hgpo/t")


def test_kinds_have_no_option_in_common_with_the_general_ones() -> None:
    general = {"label", "percent", "higher", "digits", "kind"}
    for required, optional in KINDS.values():
        assert not general & {*required, *optional} and not set(required) & set(optional)


def test_the_files_lie_where_the_recipes_are() -> None:
    root = recipe_root() / "recipe"
    for name, path in table_paths().items():
        assert path == root / f"{name}.yaml"
        assert path.read_text(encoding="utf-8").startswith(f"{TABLE_LINE}\n")
