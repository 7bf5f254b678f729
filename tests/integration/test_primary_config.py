# SPDX-License-Identifier: Apache-2.0
"""A recipe beside a config file of the user's own: his settings stand, and what cannot be both is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from verl_ext.integration.settings import primary
from verl_ext.integration.settings.options import OptionError

MINE = """
hydra: {searchpath: [pkg://verl.trainer.config]}
defaults: DEFAULTS
verl_ext: {updates_per_batch: 4, train_agents: [planner], max_missing_share: 0.5, rows_dir: rows}
algorithm: {gamma: 0.9, trloo: {batch_std: true}}
actor_rollout_ref: {rollout: {n: 4}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(tmp_path), version_base=None):
        yield tmp_path


def composed(folder: Path, *words: str, text: str = MINE, defaults: str = "[ppo_trainer, _self_]") -> Any:
    (folder / "mine.yaml").write_text(text.replace("DEFAULTS", defaults))
    return compose("mine", overrides=list(words), return_hydra_config=True)


def test_what_the_users_file_says_stands_beside_a_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it was replaced by the recipe's defaults, without a word."""
    mapping = "critic.model.override_config=${actor_rollout_ref.rollout.engine_kwargs}"  # stays as it is written
    words = ("algorithm.trloo.baseline=mean", "verl_ext.rows_dir=there", mapping)
    config = composed(folder, "+recipe=[trloo,length_lr]", *words)
    assert config.verl_ext.updates_per_batch is None and config.algorithm.gamma == 1.0
    primary.keep_users(config, config.hydra)
    node = config.verl_ext
    assert (node.updates_per_batch, node.train_agents, node.max_missing_share) == (4, ["planner"], 0.5)
    assert node.rows_dir == "there" and node.rollouts_freq == 1  # the command line; the recipe's default
    assert config.algorithm.gamma == 0.9 and config.algorithm.mix == {"trloo": 1.0}
    assert (config.algorithm.trloo.batch_std, config.algorithm.trloo.baseline) == (True, "mean")
    assert config.trainer.length_lr.enable and config.actor_rollout_ref.rollout.n == 4
    said = capsys.readouterr().out
    assert "the config mine stands before +recipe=[trloo,length_lr]" in said and "gamma=0.9 (recipe: 1.0)" in said


def test_a_file_that_names_recipes_in_its_defaults_says_the_same(folder: Path) -> None:
    """The documented form for config files."""
    config = composed(folder, defaults="[ppo_trainer, recipe: [trloo, length_lr], _self_]")
    asked = composed(folder, "+recipe=[trloo,length_lr]")
    for one in (config, asked):
        primary.keep_users(one, one.hydra)
    assert all(config[key] == asked[key] for key in {*config, *asked} - {"hydra"})
    assert config.verl_ext.updates_per_batch == 4 and config.algorithm.adv_estimator == "mix"


@pytest.mark.parametrize(
    ("own", "recipe", "said"),
    [
        ("algorithm: {adv_estimator: grpo}", "trloo", r"algorithm\.adv_estimator \(grpo / mix\)"),
        ("actor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}}}", "kpo", r"loss_mode \(gspo / kpo\)"),
        ("algorithm: {rejection: {mrs: false}}", "mrs", r"algorithm\.rejection\.mrs \(False / True\)"),
        ("trainer: {device: cuda}", "cpu", r"trainer\.device \(cuda / cpu\)"),
    ],
)
def test_what_makes_a_recipe_itself_is_refused_by_name(folder: Path, own: str, recipe: str, said: str) -> None:
    text = f"hydra: {{searchpath: [pkg://verl.trainer.config]}}\ndefaults: [ppo_trainer, _self_]\n{own}\n"
    config = composed(folder, f"+recipe@_global_=[{recipe}]", text=text)
    with pytest.raises(OptionError, match=rf"config mine and \+recipe@_global_=.* both set .*{said}, without"):
        primary.keep_users(config, config.hydra)


def test_verls_own_config_is_no_users_file() -> None:
    from hydra import initialize_config_module

    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["+recipe=hgpo"], return_hydra_config=True)
        before = config.copy()
        primary.keep_users(config, config.hydra)
        assert config == before and config.algorithm.gamma == 0.95
