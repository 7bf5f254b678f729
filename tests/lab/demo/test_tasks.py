# SPDX-License-Identifier: Apache-2.0
"""Which recipe gets which task, the overrides of each, references and plots."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import verl  # noqa: F401  # its plugins let Hydra find the recipes
from hydra import compose

from verl_ext import cli
from verl_ext.common.overrides import UsageError
from verl_ext.lab.demo import run, tasks
from verl_ext.lab.demo.assets import DemoAssets
from verl_ext.lab.demo.curve import draw, estimated, read_metrics
from verl_ext.lab.demo.recipes import LakeRecipe, SearchTeamRecipe, wide_lake_recipe
from verl_ext.rollout.environments.data import write_parquet


def assets_of(folder: Path, **changes: Any) -> DemoAssets:
    known: dict[str, Any] = {
        "folder": str(folder),
        "model_path": str(folder / "model"),
        "train_file": str(folder / "train.parquet"),
        "val_file": str(folder / "val.parquet"),
        "agent_loop": "verl_ext_multi_turn",
        "task": "chain_sum",
        "prompt_length": 64,
        "response_length": 8,
    }
    return DemoAssets(**{**known, **changes})


@pytest.mark.parametrize(
    ("recipes", "name", "task"),
    [
        (["trloo"], None, "sums"),
        (["kpo", "otb"], None, "sums"),
        (["hgpo"], None, "lake"),
        (["gigpo", "kpo"], None, "lake"),
        (["hgpo", "gigpo"], None, "lake"),
        (["dr_mas", "kpo"], None, "second_try"),
        (["dr_kernel"], None, "fuse"),
        (["grpo"], "lake", "lake"),
        (["grpo"], "second_try", "second_try"),
        (["dr_mas"], "search_team", "search_team"),
        (["dr_mas", "hgpo"], "lake", "lake"),
        (["hgpo"], "wide_lake", "wide_lake"),
        (["kpo"], "chain", "chain"),
        (["hgpo"], "chain_sum", "chain_sum"),
    ],
)
def test_the_recipe_says_which_task(recipes: list[str], name: str | None, task: str) -> None:
    assert tasks.choose(recipes, name).name == task


def test_recipes_of_two_tasks_need_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="dr_mas is shown on second_try, hgpo is shown on lake; .* --task"):
        tasks.choose(["dr_mas", "hgpo"])
    out = tmp_path / "run"
    assert cli.main(["demo", "--recipe", "dr_mas,hgpo", "--out", str(out)]) == 2
    assert "--task" in capsys.readouterr().err and not out.exists()


def test_the_command_line_knows_the_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in tasks.TASKS)


@pytest.mark.seconds
@pytest.mark.usefixtures("verl_configuration")
@pytest.mark.parametrize(
    ("task", "recipes", "loop"),
    [
        ("sums", ["trloo"], "verl_ext_multi_turn"),
        ("chain_sum", ["trloo"], "verl_ext_multi_turn"),
        ("lake", ["hgpo"], "verl_ext_step_wise"),
        ("lake", ["gigpo", "kpo"], "verl_ext_step_wise"),
        ("lake", ["grpo", "step_wise"], "verl_ext_step_wise"),
        ("second_try", ["dr_mas", "kpo"], "verl_ext_orchestra"),
        ("second_try", ["grpo"], "verl_ext_orchestra"),
        ("search_team", ["dr_mas"], "verl_ext_orchestra"),
        ("search_team", ["grpo"], "verl_ext_orchestra"),
        ("fuse", ["dr_kernel"], "verl_ext_kernels"),
        ("wide_lake", ["hgpo"], "verl_ext_step_wise"),
        ("chain", ["grpo", "kpo"], "single_turn_agent"),
        ("chain_ends", ["otb"], "single_turn_agent"),
        ("chain_tail", ["grpo", "dvp"], "single_turn_agent"),
    ],
)
def test_overrides_compose_and_pass_the_checks(task: str, recipes: list[str], loop: str, tmp_path: Path) -> None:
    from verl_ext.integration import checks
    from verl_ext.integration.parts.update import updates
    from verl_ext.rollout.environments.options import read_options
    from verl_ext.rollout.orchestra import settings

    one = tasks.TASKS[task]
    for _, name in one.files:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    words = tasks.overrides(one, recipes, assets_of(tmp_path, agent_loop=loop), tmp_path, 7, 5)
    config = compose("ppo_trainer", overrides=[word for word in words if not word.startswith("hydra.")])
    checks.check(config)  # of environment and team as well
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == loop
    assert config.trainer.total_training_steps == 7 and config.data.seed == 5
    assert config.trainer.device == "cpu"
    if task in ("sums", "chain_sum", "fuse") or task.startswith("chain"):
        assert updates.updates_per_batch(config) is None
        return
    assert updates.updates_per_batch(config) == 2
    if task in ("lake", "wide_lake"):
        options, recipe = read_options(config), LakeRecipe() if task == "lake" else wide_lake_recipe()
        assert options.history_length == recipe.history_length
        assert options.max_steps == recipe.max_steps and options.action_tag is None
    else:
        lineup = settings.check(config)
        assert lineup is not None and tuple(agent.name for agent in lineup.agents) == one.agents
        if task == "search_team":
            team = SearchTeamRecipe()
            assert {agent.name: agent.role for agent in lineup.agents} == team.roles
            assert [vars(example) for example in lineup.agents[1].examples] == [team.example]


def test_companions_are_named_once_and_the_cpu_last() -> None:
    assert tasks.recipe_list(tasks.LAKE, ["hgpo", "cpu"]) == ["hgpo", "step_wise", "cpu"]
    assert tasks.recipe_list(tasks.LAKE, ["step_wise", "grpo"]) == ["step_wise", "grpo", "cpu"]
    assert tasks.recipe_list(tasks.SECOND_TRY, ["dr_mas", "kpo"]) == ["dr_mas", "kpo", "cpu"]


def test_guessing_is_as_good_as_the_answers_are_few(tmp_path: Path) -> None:
    rows = [{"reward_model": {"style": "rule", "ground_truth": str(i % 4)}} for i in range(64)]
    for split in ("train", "val"):
        write_parquet(rows, tmp_path / f"{split}.parquet")
    assets = assets_of(tmp_path)
    assert tasks.guessing(assets, turns=1) == pytest.approx(1 / 4, abs=0.03)
    assert tasks.guessing(assets, turns=3) == pytest.approx(1 - (3 / 4) ** 3, abs=0.03)
    assert tasks.SECOND_TRY.chance(assets) == pytest.approx(1 / 4 + 3 / 16 * 0.1, abs=0.03)


def metrics(path: Path, reward: float, steps: int = 6, norms: bool = False) -> None:
    """A run's metrics as verl writes them: the solver's energy is nine times the reviser's.

    With `norms` also those of the agents' gradients: the reviser's is 1.5, but 12 in an update of the last step.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = [{"step": 0, "data": {"val-core/x/reward/mean@1": 0.25}}]
    for step in range(1, steps + 1):
        data = {
            "trajectory/reward/mean": reward * step / steps,
            "actor/grad_norm": 2.0 if step != 3 else 10.0,
            "timing_s/step": 1.0,
            "agent/solver/gradient_energy_share": 0.9,
            "agent/solver/score/mean": 0.5,
            "agent/reviser/gradient_energy_share": 0.1,
            "agent/reviser/score/mean": 0.05 if step > 1 else 0.0,
        }
        if norms:
            last = step == steps
            data |= {"agent/solver/grad_norm/mean": 1.0, "agent/solver/grad_norm/max": 1.25}
            data |= {"agent/reviser/grad_norm/mean": 6.75 if last else 1.5}
            data |= {"agent/reviser/grad_norm/max": 12.0 if last else 1.5}
        lines.append({"step": step, "data": data})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_points_know_the_agents(tmp_path: Path) -> None:
    metrics(tmp_path / "metrics.jsonl", 0.8)
    points = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(points["agent/solver/norm"][0]) and points["train_reward"][6] == pytest.approx(0.8)
    assert points["agent/solver/norm"][1] == pytest.approx(2.0 * math.sqrt(0.9))
    assert math.hypot(*(points[f"agent/{name}/norm"][2] for name in ("solver", "reviser"))) == pytest.approx(2.0)
    assert estimated(points, ["solver", "reviser"]) and not estimated(points, ["nobody"])
    metrics(tmp_path / "metrics.jsonl", 0.8, norms=True)
    points = read_metrics(tmp_path / "metrics.jsonl")
    assert [points[f"agent/{name}/norm"][6] for name in ("solver", "reviser")] == [1.0, 6.75]
    assert not estimated(points, ["solver", "reviser"])


def test_summary_and_lines_of_the_plot(tmp_path: Path) -> None:
    metrics(tmp_path / "metrics.jsonl", 0.6)
    points = read_metrics(tmp_path / "metrics.jsonl")
    summary = run.summarize(points, ["dr_mas"], 1, 6, tasks.SECOND_TRY, 0.07)
    assert summary["reward_before"] == pytest.approx(0.2) and summary["reward_after"] == pytest.approx(0.5)
    assert summary["agents"]["reviser"]["score_before"] == pytest.approx(0.1 / 3)
    assert summary["agents"]["solver"]["energy_share_after"] == pytest.approx(0.9)
    assert run.references(summary) == {"random policy": 0.07, "warm start": 0.25}
    assert run.references({**summary, "val_before": math.nan}) == {"random policy": 0.07}
    assert run.summarize(points, ["trloo"], 1, 6, tasks.CHAIN_SUM, 0.0)["agents"] == {}


@pytest.mark.seconds
def test_plots_have_the_lines_and_the_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    metrics(tmp_path / "metrics.jsonl", 0.6)
    points = read_metrics(tmp_path / "metrics.jsonl")
    draw(points, tmp_path / "one.png", "one", references={"random policy": 0.07})
    draw(points, tmp_path / "team.png", "team", references={"random policy": 0.07}, agents=("solver", "reviser"))
    draw(read_metrics(tmp_path / "none"), tmp_path / "none.png", "none", agents=("solver",))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
    one, team, none = figures
    assert len(one.axes) == 1 and len(team.axes) == 3 and len(none.axes) == 3
    (line,) = [line for line in one.axes[0].lines if line.get_label() == "random policy (0.070)"]
    assert list(line.get_ydata()) == [0.07, 0.07]
    labels = [text.get_text() for text in team.axes[2].get_legend().get_texts()]
    assert labels == ["all turns", "solver", "reviser"]
    assert list(team.axes[2].lines[0].get_ydata()) == [2.0, 2.0, 10.0, 2.0, 2.0, 2.0]
    assert team.axes[2].get_ylabel() == "norm of the gradient (agents: estimate)"
    metrics(tmp_path / "metrics.jsonl", 0.6, norms=True)
    draw(read_metrics(tmp_path / "metrics.jsonl"), tmp_path / "known.png", "known", agents=("solver", "reviser"))
    known = figures[-1].axes[2]
    assert list(known.lines[2].get_ydata()) == [1.5] * 5 + [6.75]
    assert known.get_ylabel() == "norm of the gradient"
    monkeypatch.undo()
    pyplot.close("all")


def test_a_folder_keeps_to_the_run_that_it_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`verl-ext demo --recipe otb` after `make demo`: both write runs/demo."""
    started: list[str] = []
    monkeypatch.setattr(run, "run_task", lambda task, recipes, **more: started.append(f"{task.name} {recipes}") or 0)
    out = tmp_path / "demo"
    demo = ["demo", "--out", str(out)]
    mistyped = ["--recipe", "otb", "actor.lr=1"]
    assert cli.main([*demo, *mistyped]) == 0, "it has ended before a step: nothing to mix with"
    assert cli.main([*demo, "a.b=1"]) == 0
    metrics(out / "metrics.jsonl", 0.6)
    assert cli.main([*demo, "a.b=1"]) == cli.main([*demo, "--steps", "3", "a.b=1"]) == 0
    assert len(started) == 4
    for words, said in (
        (["--recipe", "otb", "a.b=1"], "(recipes: was trloo, is otb)"),
        (["--seed", "1", "a.b=1"], "(seed: was 0, is 1)"),
        (["--task", "lake"], "(task: was sums, is lake; overrides: was a.b=1, is none)"),
    ):
        assert cli.main([*demo, *words]) == 1
        assert f"{out} was begun with another run {said}. Give another --out" in capsys.readouterr().err
    # Begun before there were records: by the summary, or unknown.
    (out / "demo.json").unlink()
    (out / "summary.json").write_text(json.dumps({"task": "sums", "recipes": ["kpo"], "seed": 0}), encoding="utf-8")
    assert cli.main(demo) == 1 and "recipes: was kpo, is trloo" in capsys.readouterr().err
    (out / "summary.json").unlink()
    assert cli.main(demo) == 0
    (out / "metrics.jsonl").unlink()
    (out / "checkpoints" / "global_step_1").mkdir(parents=True)
    assert cli.main([*demo, "--seed", "1"]) == 1
    assert len(started) == 5
