# SPDX-License-Identifier: Apache-2.0
"""Every laptop-scale cell composes with verl's configuration and passes the checks of our launcher."""

from __future__ import annotations

from pathlib import Path

import pytest
import verl  # noqa: F401  (loads the plugin)
import verl.trainer.ppo.core_algos  # noqa: F401  (registers the estimators)
from hydra import compose
from omegaconf import OmegaConf

from verl_ext.integration import checks
from verl_ext.lab.demo.assets import DemoAssets
from verl_ext.lab.demo.tasks import TASKS, overrides, recipe_list
from verl_ext.lab.reproduce import plan
from verl_ext.lab.reproduce.catalogue import tables
from verl_ext.lab.reproduce.tables import Cell, Table

CELLS = [
    pytest.param(table, cell, id=f"{table.name}-{cell.name}")
    for table in tables()
    if table.laptop is not None
    for cell in table.laptop.cells.values()
]


@pytest.mark.seconds
@pytest.mark.usefixtures("verl_configuration")
@pytest.mark.parametrize(("table", "cell"), CELLS)
def test_a_laptop_cell_is_a_valid_run(table: Table, cell: Cell, tmp_path: Path) -> None:
    scale = table.laptop
    assert scale is not None and scale.steps is not None
    task = TASKS[str(scale.task)]
    for _, name in task.files:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assets = DemoAssets(
        str(tmp_path), "/m/model", "/m/train.parquet", "/m/val.parquet", "verl_ext_multi_turn", "t", 256, 32
    )
    words = overrides(task, cell.recipe, assets, tmp_path, scale.steps, 1)
    words = [*words, *plan.laptop_overrides(table, cell, 1, tmp_path)]
    # hydra.* belongs to Hydra's own command line.
    config = compose("ppo_trainer", overrides=[word for word in words if not word.startswith("hydra.")])
    checks.check(config)
    assert words[0] == f"+recipe=[{','.join(recipe_list(task, cell.recipe))}]"
    assert config.trainer.experiment_name == f"{table.folder}.laptop.{cell.name}.seed_1"
    assert config.trainer.validation_data_dir == f"{tmp_path}/validation"
    assert config.trainer.total_training_steps == scale.steps and config.data.seed == 1
    path = config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH
    assert path == f"{tmp_path}/metrics.jsonl"
    for key, value in plan.merged(scale.overrides, cell.overrides).items():
        assert OmegaConf.select(config, key.lstrip("+")) == value, key
