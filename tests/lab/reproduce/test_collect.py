# SPDX-License-Identifier: Apache-2.0
"""From run folders to numbers: what is used, what is left out, and what is said about it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest

from verl_ext.lab.reproduce import collect as collecting
from verl_ext.lab.reproduce import render, runs
from verl_ext.lab.reproduce.catalogue import find_table, read_table
from verl_ext.lab.reproduce.collect import (
    AGENT_SPIKE,
    DIFFERENT,
    NO_SPREAD,
    NOT_REACHED,
    NOT_SHOWN,
    OPPOSITE,
    SHOWN,
    UNKNOWN,
    CollectError,
    Result,
    collect,
    verdict_of,
)
from verl_ext.lab.reproduce.metrics import MetricMissing, Run, evaluate
from verl_ext.lab.reproduce.noise import Interval
from verl_ext.lab.reproduce.tables import KINDS, MetricSpec, Table

TABLE = """\
# verl-ext table
title: Two ways
paper: arXiv 1234.56789
claim: B beats A.
published_in: abstract
published:
  - {cell: b, source: kernelbench, values: {avg: 60}}
  - {cell: b, source: gigpo_readme, values: {avg: 10}, relative_to: a}
  - {cell: b, source: hgpo, values: {tokens: -50}, relative_to: a, ratio: true}
  - {cell: other, source: hgpo_7b_unsure, values: {avg: 70}}
full:
  hardware: {nodes: 1, gpus_per_node: 8, gpu: H100}
  hours: {value: 1}
  seeds: [0, 1, 2]
  steps: 4
  models: [Qwen/Qwen3-4B]
  data: {train: [dapo_math], val: [math500, aime24]}
  baseline: a
  cells:
    a: {label: Way A, recipe: [grpo]}
    b: {label: Way B, recipe: [otb]}
    other: {label: Another model, runnable: false}
  metrics:
    avg: {label: "avg@2", kind: last, keys: ["val-core/*/acc/mean@2"], percent: true}
    tokens: {label: tokens, kind: tokens, higher: false, digits: 0}
laptop:
  claim: B learns more than A.
  task: chain_sum
  seeds: [0, 1, 2]
  steps: 4
  baseline: a
  cells:
    a: {label: Way A, recipe: [grpo]}
    b: {label: Way B, recipe: [otb]}
  metrics:
    reward: {label: reward, kind: last, keys: [trajectory/reward/mean], window: 2}
    tokens: {label: "tokens to 0.5", kind: tokens_to, keys: [trajectory/reward/mean], threshold: 0.5, higher: false}
"""


@pytest.fixture
def table(tmp_path: Path) -> Table:
    path = tmp_path / "ways.yaml"
    path.write_text(TABLE, encoding="utf-8")
    return read_table(path, "otb/ways")


Make = Callable[..., Path]


@pytest.fixture
def make(table: Table, tmp_path: Path) -> Make:
    """Makes a run folder as `verl-ext reproduce run` leaves it, with the rewards given."""

    def run(
        cell: str,
        seed: int,
        rewards: Sequence[float | None] = (0.1, 0.2, 0.3, 0.4),
        *,
        scale: str = "laptop",
        state: str = runs.COMPLETE,
        steps: int | None = 4,
        more: Mapping[str, float] | None = None,
        extra: Sequence[str] = (),
        cut: int = 0,
    ) -> Path:
        part = table.full if scale == "full" else table.laptop
        assert part is not None
        made = runs.Run(table, part, cell, seed, tmp_path / "runs", steps, extra)
        made.begin()
        text = "".join(
            line(step, {"trajectory/reward/mean": reward, "perf/total_num_tokens": 100, **(more or {})})
            for step, reward in enumerate(rewards, start=1)
        )
        (made.path / "metrics.jsonl").write_text(text[: len(text) - cut], encoding="utf-8")
        if state != runs.STARTED:
            made.end(state, 0 if state == runs.COMPLETE else 1, 1.0)
        return made.path

    return run


def line(step: int, data: Mapping[str, Any]) -> str:
    return json.dumps({"step": step, "data": dict(data)}) + "\n"


def all_of(make: Make, **options: Any) -> None:
    for seed in range(3):
        make("a", seed, [0.1, 0.2, 0.3, 0.3 + 0.01 * seed], **options)
        make("b", seed, [0.2, 0.5, 0.7, 0.7 + 0.01 * (-seed % 3)], **options)


def only(result: Result, *words: str) -> str:
    """The one problem in which all the words stand."""
    found = [text for text in result.problems if all(word in text for word in words)]
    assert len(found) == 1, result.problems
    return found[0]


def values(result: Result, cell: str, metric: str = "reward") -> dict[int, float | None]:
    """By seed; None where there is no value."""
    own = result.values[(result.values["cell"] == cell) & (result.values["metric"] == metric)]
    return {seed: None if math.isnan(value) else value for seed, value in zip(own["seed"], own["value"], strict=True)}


def seeds(result: Result, cell: str) -> list[int]:
    return result.ends.loc[result.ends["cell"] == cell, "seed"].tolist()


def rewards(result: Result, cell: str, seed: int) -> dict[int, float]:
    own = result.curves[(result.curves["cell"] == cell) & (result.curves["seed"] == seed)]
    return own[own["what"].str.startswith("training reward")].set_index("step")["value"].to_dict()


# --- the plain case -----------------------------------------------------------------------------------------------


def test_values_means_differences_and_curves(table: Table, make: Make, tmp_path: Path) -> None:
    all_of(make)
    result = collect(table, "laptop", tmp_path / "runs")
    assert result.problems == []
    assert values(result, "b") == pytest.approx({0: 0.7, 1: 0.71, 2: 0.705})
    reward = result.summary.loc["b", "reward"]
    assert reward["mean"] == pytest.approx(0.705)
    assert reward["std"] == pytest.approx(0.005)
    assert reward["known"] == 3 and seeds(result, "b") == [0, 1, 2]
    assert rewards(result, "b", 1) == {1: 0.2, 2: 0.5, 3: 0.7, 4: 0.72}
    # `tokens` never reaches 0.5 in A: there is nothing to compare.
    (difference,) = result.differences.itertuples()
    assert (difference.cell, difference.baseline, difference.metric) == ("b", "a", "reward")
    assert difference.difference == pytest.approx(0.705 - 0.305)
    assert difference.verdict == SHOWN
    # Differences 0.4, 0.405 and 0.395: Student's 4.303 times 0.005 / sqrt(3).
    assert (difference.low, difference.high) == pytest.approx((0.4 - 0.01242, 0.4 + 0.01242), abs=1e-5)
    assert result.summary.loc["b", "tokens"]["mean"] == 200
    never = result.summary.loc["a", "tokens"]
    assert math.isnan(never["mean"]) and never["unreached"] == 3
    assert values(result, "a", "tokens") == {0: None, 1: None, 2: None}
    assert set(result.values.loc[result.values["value"].isna(), "reason"]) == {NOT_REACHED}
    assert result.beside.empty
    assert result.versions["verl_ext"] and result.dates is not None
    assert result.commands[0].startswith("verl-ext reproduce run otb/ways --scale laptop --out ")


@pytest.mark.parametrize(
    ("low", "high", "better", "verdict"),
    [
        (0.1, 0.2, True, SHOWN),
        (0.1, 0.2, False, OPPOSITE),
        (-0.2, -0.1, False, SHOWN),
        (-0.2, -0.1, True, OPPOSITE),
        (-0.1, 0.2, True, NOT_SHOWN),
        (0.0, 0.0, True, NOT_SHOWN),
        (-0.2, -0.1, None, DIFFERENT),
    ],
)
def test_verdict(low: float, high: float, better: bool | None, verdict: str) -> None:
    assert verdict_of(Interval((low + high) / 2, low, high, 2.0, 0.1), better) == verdict
    assert verdict_of(None, better) == UNKNOWN


def test_one_seed_has_no_noise(table: Table, make: Make, tmp_path: Path) -> None:
    make("a", 0)
    make("b", 0, [0.5, 0.6, 0.7, 0.8])
    result = collect(table, "laptop", tmp_path / "runs")
    (difference,) = result.differences.query("metric == 'reward'").itertuples()
    assert math.isnan(difference.low) and difference.verdict == UNKNOWN
    assert math.isnan(result.summary.loc["a", "reward"]["std"])
    assert only(result, "no complete run") == "a (seeds 1, 2), b (seeds 1, 2): no complete run"


def test_equal_differences_tell_nothing_of_their_noise(table: Table, make: Make, tmp_path: Path) -> None:
    for seed in range(3):
        make("a", seed, [0.3 + 0.1 * seed] * 4)
        make("b", seed, [0.5 + 0.1 * seed] * 4)
    (difference,) = collect(table, "laptop", tmp_path / "runs").differences.query("metric == 'reward'").itertuples()
    assert difference.difference == pytest.approx(0.2) and difference.verdict == NO_SPREAD
    assert all(map(math.isnan, (difference.low, difference.high, difference.detectable)))
    for seed in range(3):
        make("b", seed, [0.3 + 0.1 * seed] * 4)
    (difference,) = collect(table, "laptop", tmp_path / "runs").differences.query("metric == 'reward'").itertuples()
    assert difference.difference == 0 and difference.verdict == NOT_SHOWN


def test_full_scale_stands_beside_the_paper(table: Table, make: Make, tmp_path: Path) -> None:
    for seed in range(3):
        for cell, score in (("a", 0.50 + 0.01 * seed), ("b", 0.58 + 0.01 * (-seed % 3))):
            values = {"val-core/math500/acc/mean@2": score, "val-core/aime24/acc/mean@2": score - 0.21}
            make(cell, seed, scale="full", more=values)
    result = collect(table, "full", tmp_path / "runs")
    assert result.summary.loc["b", "avg"]["mean"] == pytest.approx(
        100 * (0.59 + 0.38) / 2
    )  # both sets, each the same, in percent
    value, relative, ratio, unknown = result.beside.itertuples()
    assert value.ours == pytest.approx(48.5) and value.gap == pytest.approx(-11.5)
    assert (value.verdict, relative.verdict) == ("outside the noise", "inside the noise")
    assert ratio.verdict == NO_SPREAD, "as many tokens with every seed"
    assert relative.ours == pytest.approx(8.0)
    assert ratio.ours == pytest.approx(0.0) and ratio.gap == pytest.approx(50.0)
    assert math.isnan(unknown.ours) and math.isnan(unknown.gap) and unknown.verdict == "no value of ours"
    # A row that is only published is missing nothing.
    assert result.problems == []
    # A change in percent and its interval are of the same pairs.
    frame = result.values[result.values["metric"] == "tokens"].drop(columns="value")
    ours = {("a", 0): 100.0, ("a", 1): 110.0, ("a", 2): 900.0, ("b", 0): 50.0, ("b", 1): 56.0}
    values = [ours.get((row.cell, row.seed), math.nan) for row in frame.itertuples()]
    change, interval = collecting._contrast(frame.assign(value=values), "b", "a", "tokens", True)
    assert change == pytest.approx(100 * (106 / 210 - 1)) and interval.low < change < interval.high


# --- what is not as it should be ----------------------------------------------------------------------------------


def test_no_runs_names_the_command(table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CollectError, match="Run: verl-ext reproduce run otb/ways --scale laptop"):
        collect(table, "laptop", tmp_path / "runs")
    assert render.main(table, "full", tmp_path / "runs") == 1
    said = capsys.readouterr()
    assert "verl-ext reproduce run otb/ways --scale full" in said.err and said.out == ""
    assert not (tmp_path / "runs").exists()


def test_no_runs_at_this_scale_points_to_the_other(table: Table, make: Make, tmp_path: Path) -> None:
    make("a", 0)
    with pytest.raises(CollectError, match="There are runs at laptop scale: --scale laptop"):
        collect(table, "full", tmp_path / "runs")


def test_incomplete_runs_are_listed_and_left_out(table: Table, make: Make, tmp_path: Path) -> None:
    all_of(make)
    make("b", 1, [9.0, 9.0], state=runs.STARTED)
    make("b", 2, [9.0, 9.0], state=runs.FAILED)
    make("a", 2, [], state=runs.STARTED)
    result = collect(table, "laptop", tmp_path / "runs")
    assert seeds(result, "b") == [0] and seeds(result, "a") == [0, 1]
    assert result.summary.loc["b", "reward"]["mean"] == pytest.approx(0.7)
    assert "started, at step 2 of 4" in only(result, "b/seed_1", "not complete")
    assert "failed, at step 2 of 4" in only(result, "b/seed_2", "not complete")
    assert only(result, "no step") == "a/seed_2: left out: no step is logged yet"
    assert only(result, "no complete run") == "a/seed_2, b (seeds 1, 2): no complete run"
    for folder in (tmp_path / "runs").glob("*/*/*/seed_0"):
        (folder / "cell.json").unlink()
    (tmp_path / "runs/otb.ways/laptop/a/seed_1/cell.json").unlink()
    with pytest.raises(CollectError) as caught:
        collect(table, "laptop", tmp_path / "runs")
    assert "b/seed_1: left out: not complete" in str(caught.value)
    assert "cell.json" in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("table", "kpo/math"), ("cell", "a"), ("seed", 7), ("scale", "full")])
def test_a_run_of_something_else_is_left_out(table: Table, make: Make, tmp_path: Path, key: str, value: Any) -> None:
    all_of(make)
    record = tmp_path / "runs/otb.ways/laptop/b/seed_2/cell.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), key: value}))
    result = collect(table, "laptop", tmp_path / "runs")
    assert seeds(result, "b") == [0, 1]
    assert str(value) in only(result, "b/seed_2", "cell.json says")


def test_a_cell_that_the_table_does_not_have(table: Table, make: Make, tmp_path: Path) -> None:
    all_of(make)
    base = tmp_path / "runs/otb.ways/laptop"
    (base / "a/seed_2").rename(base / "a/seed_9")
    (base / "b").rename(base / "old")
    result = collect(table, "laptop", tmp_path / "runs")
    assert only(result, "no such cell").startswith("old (seeds 0, 1, 2): left out")
    assert "seed 2, not otb/ways, laptop scale, cell a, seed 9" in only(result, "a/seed_9", "cell.json says")
    assert seeds(result, "b") == [] and seeds(result, "a") == [0, 1]


def test_other_settings_are_not_mixed(table: Table, make: Make, tmp_path: Path) -> None:
    all_of(make)
    record = tmp_path / "runs/otb.ways/laptop/b/seed_2/cell.json"
    data = json.loads(record.read_text())
    data["settings"]["algorithm.gamma"] = "0.5"
    record.write_text(json.dumps(data))
    result = collect(table, "laptop", tmp_path / "runs")
    assert seeds(result, "b") == [0, 1]
    assert "algorithm.gamma: was 0.5, is not set" in only(result, "b/seed_2", "algorithm.gamma")
    assert "b/seed_2" in only(result, "not those of the cell's other runs")


def test_runs_that_all_have_other_settings_are_used_and_it_is_said(table: Table, make: Make, tmp_path: Path) -> None:
    all_of(make)
    for record in (tmp_path / "runs").glob("*/*/*/*/cell.json"):
        data = json.loads(record.read_text())
        data["settings"]["algorithm.gamma"] = "0.5"
        record.write_text(json.dumps(data))
    result = collect(table, "laptop", tmp_path / "runs")
    assert seeds(result, "b") == [0, 1, 2]
    text = only(result, "algorithm.gamma: was 0.5, is not set")
    assert text.startswith("a (seeds 0, 1, 2), b (seeds 0, 1, 2): ")


def test_runs_with_different_other_settings_are_not_mixed(table: Table, make: Make, tmp_path: Path) -> None:
    """None has the table's settings: those like the run that was begun last are used."""
    all_of(make)
    for seed, (gamma, day) in enumerate((("0.5", 1), ("0.9", 3), ("0.9", 2))):
        record = tmp_path / f"runs/otb.ways/laptop/b/seed_{seed}/cell.json"
        data = json.loads(record.read_text())
        data["settings"]["algorithm.gamma"] = gamma
        record.write_text(json.dumps({**data, "started": f"2026-01-0{day}T00:00:00+0000"}))
    result = collect(table, "laptop", tmp_path / "runs")
    assert seeds(result, "b") == [1, 2] and seeds(result, "a") == [0, 1, 2]
    assert only(result, "not those of the cell's other runs").startswith("b/seed_0: ")


def test_a_claim_about_two_other_cells(table: Table, make: Make, tmp_path: Path) -> None:
    all_of(make)
    assert table.laptop is not None
    three = replace(
        table, laptop=replace(table.laptop, baseline="b", versus={"a": "b", "b": "a"})
    )  # what is set against the baseline already is not there twice
    result = collect(three, "laptop", tmp_path / "runs")
    there, back = result.differences.itertuples()
    assert (there.cell, there.baseline, there.metric) == ("a", "b", "reward")
    assert (back.cell, back.baseline, back.metric) == ("b", "a", "reward")
    assert there.difference == -back.difference and (there.verdict, back.verdict) == (OPPOSITE, SHOWN)


def test_seeds_that_the_table_does_not_have_are_in_the_command(table: Table, make: Make, tmp_path: Path) -> None:
    make("a", 0)
    assert "--seeds" not in collect(table, "laptop", tmp_path / "runs").commands[0]
    make("a", 7)
    result = collect(table, "laptop", tmp_path / "runs")
    assert " --seeds 0 7" in result.commands[0]
    assert only(result, "a seed that the table does not have").startswith("a/seed_7: ")


def test_a_shorter_run_does_not_shorten_the_others(table: Table, make: Make, tmp_path: Path) -> None:
    all_of(make)
    make("b", 3, [0.9, 0.9], steps=2)
    result = collect(table, "laptop", tmp_path / "runs")
    assert only(result, "left out: it was to make another number of steps").startswith("b/seed_3: ")
    assert set(result.ends["step"]) == {4} and seeds(result, "b") == [0, 1, 2]


def test_cells_of_different_lengths_and_steps_without_metrics_are_said(
    table: Table, make: Make, tmp_path: Path
) -> None:
    for seed in range(2):
        make("a", seed, scale="full", steps=None)
        folder = make("b", seed, [0.1, 0.2], scale="full", steps=2)
    text = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(text[1])
    assert table.full is not None
    result = collect(replace(table, full=replace(table.full, steps=None)), "full", tmp_path / "runs")
    assert only(result, "cells were to make different numbers of steps (a the whole length, b 2)")
    assert only(result, "no metrics of 1 of its 2 steps, the first is step 1").startswith("b/seed_1: ")


def test_further_overrides_and_steps_are_said(table: Table, make: Make, tmp_path: Path) -> None:
    all_of(make, extra=["algorithm.gamma=0.5"], steps=3)
    result = collect(table, "laptop", tmp_path / "runs")
    text = only(result, "further overrides", "algorithm.gamma=0.5")
    assert text.startswith("a (seeds 0, 1, 2), b (seeds 0, 1, 2): ")
    assert "the table has 4" in only(result, "a run of 3 steps")
    assert result.commands[0].endswith("--steps 3 algorithm.gamma=0.5")
    make("b", 3, steps=3)
    mixed = collect(table, "laptop", tmp_path / "runs")
    assert only(mixed, "not all runs have the same further overrides")
    assert "algorithm.gamma" not in mixed.commands[0]


def test_a_file_cut_short_is_used_as_far_as_it_is_whole(table: Table, make: Make, tmp_path: Path) -> None:
    all_of(make)
    make("b", 1, [0.2, 0.5, 0.7, 0.7], cut=10)
    result = collect(table, "laptop", tmp_path / "runs")
    assert "b/seed_1: metrics.jsonl: line 4 is cut short" in only(result, "b/seed_1", "cut short")
    assert "step 3 of 4" in only(result, "b/seed_1", "its metrics end")
    # Everything is compared at the last step that all have.
    assert set(result.ends["step"]) == {3}
    assert result.summary.loc["a", "reward"]["mean"] == pytest.approx(0.25)
    assert "b/seed_1 at 3, a/seed_0 at 4" in only(result, "different steps")
    assert "up to step 3" in only(result, "different steps")


def test_a_file_cut_before_its_half_would_spoil_the_others(table: Table, make: Make, tmp_path: Path) -> None:
    all_of(make)
    make("b", 1, [0.2, 0.5, 0.7, 0.7], cut=220)
    result = collect(table, "laptop", tmp_path / "runs")
    assert "step 1 of 4" in only(result, "b/seed_1", "before the half")
    assert seeds(result, "b") == [0, 2] and set(result.ends["step"]) == {4}


def test_steps_that_go_back_belong_to_the_later_run(table: Table, make: Make, tmp_path: Path) -> None:
    all_of(make)
    folder = make("b", 1, [0.2, 0.5, 0.7, 0.7])
    path = folder / "metrics.jsonl"
    earlier = "".join(line(step, {"trajectory/reward/mean": 9.0, "old/key": 1.0}) for step in range(8))
    path.write_text(earlier + path.read_text(), encoding="utf-8")
    result = collect(table, "laptop", tmp_path / "runs")
    assert "from 7 to 1" in only(result, "b/seed_1", "go back")
    # Step 0 of the earlier run is all that is left of it; its steps 5 to 7 are not.
    assert rewards(result, "b", 1) == {0: 9.0, 1: 0.2, 2: 0.5, 3: 0.7, 4: 0.7}


def test_a_run_of_another_logger_is_read(table: Table, make: Make, tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    all_of(make)
    folder = tmp_path / "runs/otb.ways/laptop/b/seed_1"
    (folder / "metrics.jsonl").unlink()
    writer = SummaryWriter(str(folder))
    for step, reward in enumerate([0.2, 0.5, 0.75, 0.75], start=1):
        writer.add_scalar("trajectory/reward/mean", reward, step)
        writer.add_scalar("perf/total_num_tokens", 100, step)
    writer.close()
    result = collect(table, "laptop", tmp_path / "runs")
    assert values(result, "b")[1] == pytest.approx(0.75)
    assert result.problems == []


def test_a_metric_that_is_not_logged_names_the_nearest(table: Table, make: Make, tmp_path: Path) -> None:
    for seed in range(3):
        make("a", seed)
        folder = make("b", seed)
        path = folder / "metrics.jsonl"
        path.write_text(path.read_text().replace("trajectory/reward/mean", "trajectory/rewards/mean"))
    result = collect(table, "laptop", tmp_path / "runs")
    text = only(result, "no value of reward")
    assert text.startswith("b (seeds 0, 1, 2): ") and "near are trajectory/rewards/mean" in text
    assert result.summary.loc["b", "reward"]["known"] == 0 and result.differences.empty


def test_values_that_are_no_numbers(table: Table, make: Make, tmp_path: Path) -> None:
    all_of(make)
    make("b", 1, [0.2, 0.5, 0.7, math.nan])
    make("b", 2, [math.nan, 0.5, 0.7, 0.7])
    result = collect(table, "laptop", tmp_path / "runs")
    assert values(result, "b") == {0: pytest.approx(0.7), 1: None, 2: pytest.approx(0.7)}
    assert result.summary.loc["b", "reward"]["known"] == 2 and seeds(result, "b") == [0, 1, 2]
    assert "not a finite number at step 4" in only(result, "b/seed_1", "no value of reward")
    assert "not a finite number at step 1" in only(result, "b/seed_2", "left out there")


@pytest.mark.seconds
def test_a_table_whose_laptop_scale_is_another_s(tmp_path: Path) -> None:
    with pytest.raises(CollectError, match=r"no complete run of hgpo/alfworld at laptop scale"):
        collect(find_table("gigpo/webshop"), "laptop", tmp_path)


# --- kinds of metrics ---------------------------------------------------------------------------------------------


def spec(kind: str, higher: bool = True, **options: Any) -> MetricSpec:
    return MetricSpec("m", "M", kind, options, higher=higher)


def run_of(tmp_path: Path, curves: Mapping[str, Sequence[float]]) -> Run:
    """A run with curves from step 1 on."""
    series = {
        key: pandas.Series(own, index=range(1, len(own) + 1), name=key, dtype=float) for key, own in curves.items()
    }
    return Run("a", 0, tmp_path, series)


def test_every_kind_of_a_table_file_has_an_evaluation(tmp_path: Path) -> None:
    dump(tmp_path, 1, samples("t", [1], speedup=2.0))
    options = {"keys": ("x",), "threshold": 1.0, "p": 1.0, "k": 1, "tokens_key": "x"}
    run = run_of(tmp_path, {"x": [1.0]})
    found = {kind: evaluate(spec(kind, **options), run) for kind in KINDS}
    assert found == {kind: 0.0 if kind == "spikes" else 1.0 for kind in KINDS}


def test_kinds_on_curves(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        {
            "val/x/acc": [1.0, 2.0, 6.0, 4.0],
            "val/y/acc": [3.0, 2.0, 0.0, 2.0],
            "actor/grad_norm": [1.0, 1.0, 1.0, 8.0],
            "perf/total_num_tokens": [10.0, 20.0, 30.0, 40.0],
            "tokens[all]": [1.0, 1.0, 1.0, 1.0],
        },
    )
    both = ("val/*/acc",)
    for one, expected in (
        (spec("last", keys=both), 3.0),
        (spec("last", keys=("val/x/acc",), window=2), 5.0),
        (spec("last", keys=("actor/grad_norm",), window=10), 11 / 4),
        (spec("first", keys=both), 2.0),
        (spec("first", keys=("val/x/acc", "val/*/acc"), window=3), (3.0 + 5 / 3) / 2),
        (spec("mean", keys=("val/x/acc",)), 13 / 4),
        (spec("best", keys=both), (6.0 + 3.0) / 2),
        (spec("best", keys=both, higher=False), (1.0 + 0.0) / 2),
        (spec("best", keys=("val/x/acc",), window=2), 5.0),
        (spec("spike", keys=("actor/grad_norm",)), 8.0),
        (spec("spikes", keys=("actor/grad_norm",)), 1.0),
        (spec("spikes", keys=("actor/grad_norm",), factor=9.0), 0.0),
        (spec("tokens"), 100.0),
        (spec("tokens", tokens_key="tokens[all]"), 4.0),
        # The mean of both keys is 2, 2, 3, 3. Fewer tokens are better, and yet the score has to rise to 3.
        (spec("tokens_to", keys=both, threshold=3.0, higher=False), 60.0),
        (spec("tokens_to", keys=both, threshold=2.5, window=2, higher=False), 60.0),
        (spec("tokens_to", keys=both, threshold=3.5), None),
    ):
        value = evaluate(one, run)
        assert value == (None if expected is None else pytest.approx(expected)), one
    for one, words in (
        (spec("last", keys=("val/z/acc",)), "no metric 'val/z/acc' is logged; near are val/"),
        (spec("mean", keys=("nothing/*",)), "no metric 'nothing/*' is logged"),
        (spec("tokens", tokens_key="perf/tokens"), "no metric 'perf/tokens' is logged"),
    ):
        with pytest.raises(MetricMissing) as caught:
            evaluate(one, run)
        assert words in str(caught.value)


def test_kinds_on_curves_with_gaps(tmp_path: Path) -> None:
    nan = math.nan
    run = run_of(tmp_path, {"x": [1.0, nan, 5.0], "n": [1.0, 1.0, math.inf], "z": [0.0, 0.0, 1.0], "none": [nan] * 3})
    said: list[str] = []
    assert evaluate(spec("mean", keys=("x",)), run, said.append) == 3.0
    assert said == ["x is not a finite number at step 2: left out there"]
    assert evaluate(spec("spikes", keys=("n",)), run) == 1.0
    for one, words in (
        (spec("last", keys=("x",), window=2), "x is not a finite number at step 2"),
        (spec("spike", keys=("z",)), "median of z is 0"),
        (spec("best", keys=("none",)), "at any step"),
        (spec("tokens", tokens_key="x"), "x is not known at step 2"),
    ):
        with pytest.raises(MetricMissing) as caught:
            evaluate(one, run)
        assert words in str(caught.value)


def dump(folder: Path, step: int, records: Sequence[Mapping[str, Any]], tail: str = "") -> None:
    """A validation dump as verl writes it."""
    path = folder / "validation" / f"{step}.jsonl"
    path.parent.mkdir(exist_ok=True)
    common = {"input": "?", "output": "!", "gts": "1", "step": step}
    path.write_text("".join(json.dumps({**common, **one}) + "\n" for one in records) + tail, encoding="utf-8")


def samples(task: str, correct: Sequence[float], **more: Any) -> list[dict[str, Any]]:
    return [{"uid": f"{task}_{n}_0", "acc": one, "score": one, **more} for n, one in enumerate(correct)]


def test_kinds_on_validation_dumps(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"x": [1.0] * 5})
    dump(tmp_path, 5, samples("u_1", [1, 0, 0, 0]) + samples("u_2", [1, 1, 1, 0]))
    dump(tmp_path, 10, samples("u_1", [0, 0, 0, 0]))  # after the step that counts
    assert evaluate(spec("avg_at_k", k=4), run) == 0.5
    assert evaluate(spec("avg_at_k"), run) == 0.5
    assert evaluate(spec("pass_at_k", k=1), run) == pytest.approx(0.5)
    assert evaluate(spec("pass_at_k", k=2), run) == pytest.approx((0.5 + 1.0) / 2)
    said: list[str] = []
    assert evaluate(spec("pass_at_k", k=5), run, said.append) == 1.0
    assert said == ["M: 2 tasks have fewer than 5 samples; those missing count as failed"]
    with pytest.raises(MetricMissing, match="no field 'exact'; it has acc, score"):
        evaluate(spec("avg_at_k", score_key="exact"), run)
    # Tasks weigh the same, however many samples they have: means of 1/2 and 1; a mean over samples would be 4/6.
    dump(tmp_path, 5, samples("u_1", [1, 0, 1, 0]) + samples("u_2", [1, 1]))
    assert evaluate(spec("avg_at_k", k=2), run) == 0.75
    early = run_of(tmp_path, {"x": [1.0] * 4})
    with pytest.raises(
        MetricMissing, match=r"no validation dump of a step up to 4 in validation/.*validation_data_dir"
    ):
        evaluate(spec("avg_at_k"), early)


def test_a_sample_of_several_outputs_counts_once(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"x": [1.0]})
    rows: list[dict[str, Any]] = [
        {"uid": "t_0_0", "acc": 1.0},
        {"uid": "t_0_1", "acc": 1.0},
        {"uid": "t_0_2", "acc": 1.0},
        {"uid": "t_1_0", "acc": 0.0},
        {"uid": "t_10_0", "acc": None},
    ]
    dump(tmp_path, 1, rows, tail='{"uid": "t_11_0", "ac')
    said: list[str] = []
    assert evaluate(spec("avg_at_k"), run, said.append) == pytest.approx(1 / 3)
    assert said == ["validation/1.jsonl: 1 of its lines are not whole; the others are used"]


def test_a_dump_without_uids_is_grouped_by_the_prompt(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"x": [1.0]})
    dump(tmp_path, 1, [{"input": text, "score": score} for text, score in (("a", 1), ("a", 0), ("b", 0), ("b", 0))])
    assert evaluate(spec("pass_at_k", k=2), run) == 0.5


def tasks(folder: Path, step: int, **sources: str) -> None:
    """What the package writes beside a dump."""
    (folder / "validation" / f"{step}.tasks.json").write_text(json.dumps(sources), encoding="utf-8")


def test_sources_of_a_dump_weigh_the_same(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"x": [1.0]})
    dump(tmp_path, 1, [one for task in "abcde" for one in samples(task, [float(task not in "cd")])])
    assert evaluate(spec("avg_at_k"), run) == pytest.approx(0.6)
    with pytest.raises(MetricMissing, match=r"data sources are not known: .* writes 1\.tasks\.json"):
        evaluate(spec("avg_at_k", source=("*",)), run)
    tasks(tmp_path, 1, a="big", b="big", c="big", d="big", e="small")
    assert evaluate(spec("avg_at_k", source=("*",)), run) == 0.75
    assert evaluate(spec("avg_at_k", source=("big",)), run) == 0.5
    assert evaluate(spec("avg_at_k"), run) == pytest.approx(0.6)
    with pytest.raises(MetricMissing, match="no sample of data source 'bih' is in the validation dump; near are big"):
        evaluate(spec("avg_at_k", source=("bih",)), run)


def test_a_task_that_lost_all_of_its_samples_has_failed(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"x": [1.0]})
    dump(tmp_path, 1, [*samples("a", [1, 1], speedup=2.0), *samples("b", [1, 1], speedup=2.0)])
    tasks(tmp_path, 1, a="s", b="s", c="s", d="t")
    for kind, more in (("avg_at_k", {"k": 2}), ("pass_at_k", {"k": 2}), ("fast_at", {"p": 1})):
        said: list[str] = []
        assert evaluate(spec(kind, **more), run, said.append) == 0.5
        assert said[0] == "validation/1.jsonl: 2 of 4 tasks have lost all of their samples and count as failed"
        assert evaluate(spec(kind, source=("s",), **more), run) == pytest.approx(2 / 3)
        assert evaluate(spec(kind, source=("*",), **more), run) == pytest.approx((2 / 3 + 0) / 2)
    # Of a validation whose dump was not written any more.
    tasks(tmp_path, 1, x="s", y="s")
    said = []
    assert evaluate(spec("avg_at_k"), run, said.append) == 1.0
    assert said == [
        "validation/1.jsonl: 1.tasks.json is of another validation (a run was killed between the two): not used"
    ]


def test_fast_at_of_a_dump(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"x": [1.0]})
    rows: list[dict[str, Any]] = [
        {"uid": "a_0_0", "right": True, "speedup": 1.2},
        {"uid": "a_1_0", "right": True, "speedup": 0.9},
        {"uid": "b_0_0", "right": False, "speedup": 3.0},
        {"uid": "b_1_0", "right": True, "speedup": None},
    ]
    dump(tmp_path, 1, rows)
    assert evaluate(spec("fast_at", p=1.2, score_key="right"), run) == 0.25
    assert evaluate(spec("fast_at", p=0, score_key="right"), run) == 0.5
    with pytest.raises(MetricMissing, match="no field 'gain'"):
        evaluate(spec("fast_at", p=1, score_key="right", speedup_key="gain"), run)


def test_agents_and_levels_stand_beside_the_table(table: Table, make: Make, tmp_path: Path) -> None:
    lone = {"agent/one/score/mean": 0.5}
    team = {
        "agent/one/score/mean": 0.5,
        "agent/two/score/mean": 0.25,
        "agent/two/gradient_energy_share": 0.1,
        "agent/two/grad_norm/mean": 0.5,
        "agent/two/grad_norm/max": 2.0,
        "hgpo/level_1/usable_share": 0.75,
    }
    for seed in range(2):
        make("a", seed, more=lone)
        make("b", seed, more=team)
    result = collect(table, "laptop", tmp_path / "runs")
    figures = result.figures.set_index(["what", "cell", "owner", "figure", "seed"])["value"].sort_index()
    assert set(result.figures["cell"]) == {"b"}, "a lone agent is the run"
    two = figures["agent", "b", "two"]
    assert two["grad_norm/mean", 0] == 0.5 and two[AGENT_SPIKE, 0] == 4.0
    assert AGENT_SPIKE not in figures["agent", "b", "one"]
    assert two["score/mean", 1] == 0.25 and two["gradient_energy_share"].to_dict() == {0: 0.1, 1: 0.1}
    assert figures["level", "b", "hgpo level 1", "usable_share", 0] == 0.75
