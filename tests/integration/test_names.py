# SPDX-License-Identifier: Apache-2.0
"""Names that we and others have in verl's registries: nobody's is replaced without a word."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import copies
import pytest
from hydra import compose
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

from verl_ext.integration import launch, losses, names, parts
from verl_ext.integration.compat.wraps import UnsupportedVerl
from verl_ext.integration.config import KPOPolicyLossConfig
from verl_ext.integration.parts.update.losses import Losses
from verl_ext.integration.settings.options import OptionError

pytestmark = pytest.mark.usefixtures("verl_configuration")

THEIRS = """
import verl
from verl.trainer.ppo import core_algos

@core_algos.register_adv_est("otb")
@core_algos.register_adv_est("gigpo")
@core_algos.register_adv_est("mix")
def theirs(*args, **kwargs): ...

@core_algos.register_policy_loss("kpo")
def their_loss(*args, **kwargs): ...

import verl.trainer.ppo.v1
assert core_algos.get_adv_estimator_fn("otb") is theirs and core_algos.get_policy_loss_fn("kpo") is their_loss
print("all theirs:", "trloo" not in core_algos.ADV_ESTIMATOR_REGISTRY)
"""


def theirs(*args: Any, **kwargs: Any) -> None:
    """An estimator or a loss of somebody else."""


def config(*overrides: str) -> Any:
    return compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.n=4", *overrides])


@pytest.mark.slow
def test_a_run_without_us_finds_no_name_taken(tmp_path: Path) -> None:
    """Public code registers `gigpo`; with us installed it raised where it was imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL_EXT_")}
    done = copies.python("-c", THEIRS, env=environment, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all theirs: True" in done.stdout


def test_a_run_of_theirs_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts.uses_verl_ext(config("algorithm.adv_estimator=otb"))
    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY, "otb", theirs)
    assert not parts.uses_verl_ext(config("algorithm.adv_estimator=otb"))


@pytest.mark.parametrize(
    ("registry", "name", "recipe"),
    [
        (ADV_ESTIMATOR_REGISTRY, "otb", "otb"),
        (ADV_ESTIMATOR_REGISTRY, "mix", "trloo"),
        (POLICY_LOSS_REGISTRY, "kpo", "[grpo,kpo]"),
    ],
)
def test_a_name_that_a_run_of_ours_asks_for_must_be_free(
    registry: Any, name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry, name, theirs)
    with pytest.raises(SystemExit, match=f"'{name}' is registered by .*test_names, and verl_ext has one of that name"):
        launch.LaunchCallback().on_run_start(config(f"+recipe={recipe}"))
    assert registry[name] is theirs


def test_a_name_that_a_run_of_ours_does_not_ask_for_may_be_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry, name in ((ADV_ESTIMATOR_REGISTRY, "gigpo"), (POLICY_LOSS_REGISTRY, "kpo")):
        monkeypatch.setitem(registry, name, theirs)
    launch.prepare(config("+recipe=trloo"))
    assert os.environ[names.VARIABLE] == "mix,trloo" and names.in_environment() == ["mix", "trloo"]
    assert ADV_ESTIMATOR_REGISTRY["gigpo"] is theirs


def test_our_estimator_without_a_recipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`otb` alone had its sums in bfloat16: the engine is prepared in runs of ours only."""
    monkeypatch.delitem(ADV_ESTIMATOR_REGISTRY, "otb")
    bare = config("algorithm.adv_estimator=otb")
    assert parts.uses_verl_ext(bare)
    with pytest.raises(OptionError, match=r"'otb' is one of verl_ext.*runs with a recipe only.* Add \+recipe=otb"):
        names.require(bare)


def test_a_worker_in_which_the_loss_is_another_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KPOPolicyLossConfig(loss_mode="kpo").loss_mode == "kpo"
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "kpo", theirs)
    with pytest.raises(OptionError, match="the policy loss 'kpo' is registered by"):
        KPOPolicyLossConfig(loss_mode="kpo")


def test_an_update_by_another_loss_ends_the_run() -> None:
    cfg = config("+recipe=[grpo,kpo]")
    (part,) = [part for part in parts.active(cfg, None) if isinstance(part, Losses)]
    part.after_update({"actor/pg_loss": 0.1, "actor/kpo/log_ratio_std": 0.0})
    part.after_update({})  # no row was left to train on
    with pytest.raises(UnsupportedVerl, match="another loss was in force than verl_ext's 'kpo'"):
        part.after_update({"actor/pg_loss": 0.1})


def test_every_loss_has_a_mark() -> None:
    assert set(names.MARKS) == set(losses.LOSSES)
