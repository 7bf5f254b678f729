# SPDX-License-Identifier: Apache-2.0
"""``verl-ext new-recipe``: a package of the user's own with a method, its recipe, a test and a README.

An entry point of the group ``verl_ext.methods`` names the method, and the recipe in the package's folder ``recipe/`` is
found by ``+recipe=NAME``; it has what every recipe of ours has beside its method.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

from verl_ext.common.overrides import UsageError
from verl_ext.recipes import METHODS_GROUP, compose, documented_keys, recipes

METHOD = '''"""NAME: what it is for, and where it is published.

r = outcome of the turn's trajectory
A = scale * (r - mean)          mean over the turns of the prompt
"""

from collections.abc import Mapping

import torch

from verl_ext.methods.groups import Column, Segments
from verl_ext.methods.options import GroupBy, Positive, checked
from verl_ext.methods.rows import Advantage, Rows, check_tokens


@checked
def NAME_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Column,
    *,
    valid_row: Column | None = None,  # turn fields that the method reads: traj_uid, agent_id, or any of your agent loop
    row_fields: Mapping[str, Column] | None = None,
    scale: Positive = 1.0,  # options, which are keys of algorithm.NAME with these types and defaults
    group_by: GroupBy = ("index",),
) -> Advantage:
    """Rewards against the mean of the prompt.

    Args:
        token_level_rewards: [B, T] float; its row sum is the outcome of the turn's trajectory.
        response_mask: [B, T] of 0 and 1.
        index: [B] prompt uid.
        valid_row: [B] bool; None means all True. Turns with False are no samples and get 0.
        row_fields: further columns for group_by.
        scale: factor of the advantages, above 0.
        group_by: turn fields that make a group.

    Returns:
        the same [B, T] float32 tensor as advantages and returns.
    """
    batch = check_tokens(token_level_rewards, response_mask)
    rows = Rows(batch, valid_row=valid_row, row_fields=row_fields, index=index)
    r = rows.scores(token_level_rewards)
    group = rows.keys(group_by)
    A = scale * Segments(group).deviation(r)
    return Advantage.of_rows(A, response_mask, rows, group)
'''

TEST = '''"""NAME: a case by hand, and the registered estimator."""

import pytest
import torch
from NAME.method import NAME_advantage
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl_ext.integration.names import register

REWARDS, MASK, INDEX = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 5.0]]), torch.ones(3, 2), ["a", "a", "b"]


def test_a_case_by_hand():
    advantages, returns = NAME_advantage(REWARDS, MASK, INDEX, scale=2.0)
    assert advantages.tolist() == [[1.0, 1.0], [-1.0, -1.0], [0.0, 0.0]] and returns is advantages


def test_it_is_registered_and_reads_its_options():
    register()  # in a run the recipe sees to it
    estimator = get_adv_estimator_fn("NAME")
    advantages, _ = estimator(REWARDS, MASK, INDEX, {"NAME": {"scale": 4.0}})
    assert advantages[:, 0].tolist() == [2.0, -2.0, 0.0]
    with pytest.raises(ValueError, match="algorithm.NAME.scale is 0; it must be greater than 0"):
        estimator(REWARDS, MASK, INDEX, {"NAME": {"scale": 0}})
'''

ALGORITHM = """defaults:
  - /recipe/_base
  - _self_

algorithm:
  # A mixture of the estimators below; one alone is that estimator, bit for bit.
  adv_estimator: mix
  mix: {NAME: 1.0}
  # Divide the weights by their sum.
  mix_normalize: true
  NAME:
    # Factor of the advantages.
    scale: 1.0
    # Turns that share these fields are compared.
    group_by: [index]
"""

PROJECT = f"""[build-system]
requires = ["setuptools>=77.0.3"]
build-backend = "setuptools.build_meta"

[project]
name = "NAME"
version = "0.1.0"
description = "The method NAME for verl_ext"
requires-python = ">=3.10"
dependencies = ["verl-ext"]

[project.entry-points."{METHODS_GROUP}"]
NAME = "NAME.method:NAME_advantage"

[tool.setuptools]
packages = ["NAME"]

[tool.setuptools.package-data]
NAME = ["recipe/*.yaml"]
"""

README = """# NAME

A method for [verl_ext](https://pypi.org/project/verl-ext/), run by verl's own trainer.

```bash
pip install -e .
pytest tests
verl-ext show NAME
python -m verl.trainer.main_ppo +recipe=NAME data.train_files=... actor_rollout_ref.model.path=...
```

- `NAME/method.py`: the formula. Turn fields and options are the parameters of its function.
- `NAME/recipe/NAME.yaml`: what `+recipe=NAME` sets; its defaults are those of the function.
- `pyproject.toml`: the entry point that registers the method.
"""


def new_recipe(name: str, out: Path) -> Path:
    """Write the package `name` into a folder of that name below `out`. Returns the folder. Raises UsageError: the name
    can't be one, is taken, or the folder exists."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UsageError(f"{name!r} is no name for a method: use lower-case letters, digits and _, such as my_method.")
    if name == "mix" or name in [recipe.name for recipe in recipes()]:
        raise UsageError(f"{name!r} is the name of a recipe already; choose another.")
    stated = [key.split(".") for keys in documented_keys(*(one.path for one in recipes())) for key in keys]
    if name in compose([])["algorithm"] or ["algorithm", name] in [key[:2] for key in stated]:
        raise UsageError(f"{name!r} is a key of the algorithm node already, algorithm.{name}; choose another.")
    if importlib.util.find_spec(name) is not None:
        raise UsageError(f"{name!r} is the name of a Python module that is installed; choose another.")
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    from verl_ext.integration.estimators import ESTIMATORS

    if name in {*ADV_ESTIMATOR_REGISTRY, *ESTIMATORS}:
        raise UsageError(f"{name!r} is the name of an estimator already; choose another.")
    folder = out / name
    if folder.exists():
        raise UsageError(f"{folder} exists already; choose another name or another --out.")
    header = f"# @package _global_\n# summary: what {name} does, in one line\n# paper: -\n# kind: estimator\n"
    files = {
        "pyproject.toml": PROJECT,
        "README.md": README,
        f"{name}/__init__.py": '"""The method NAME for verl_ext."""\n',
        f"{name}/method.py": METHOD,
        f"{name}/recipe/{name}.yaml": f"{header}\n{ALGORITHM}",
        f"tests/test_{name}.py": TEST,
    }
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text.replace("NAME", name), encoding="utf-8")
    return folder
