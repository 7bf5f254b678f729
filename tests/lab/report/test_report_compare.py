# SPDX-License-Identifier: Apache-2.0
"""Groups, axes, panels, lines, thinning and pictures of ``verl-ext report``."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import matplotlib.image
import pandas
import pytest
from matplotlib import pyplot

from verl_ext import cli
from verl_ext.lab.report import compare
from verl_ext.lab.report.data import page_data
from verl_ext.lab.report.logs import LogError
from verl_ext.lab.report.pictures import write_pictures


def write(path: Path, steps: dict[int, dict[str, float | None]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in steps.items()))
    return path


def plain(*values: float, metric: str = "critic/score/mean") -> dict[int, dict[str, float | None]]:
    return {step: {metric: value} for step, value in enumerate(values, 1)}


def names(runs: list[compare.Run]) -> list[tuple[str, str, int | None]]:
    return [(run.name, run.group, run.seed) for run in runs]


def test_runs_that_differ_in_their_seed_are_a_group(tmp_path: Path) -> None:
    for cell in ("b", "a"):
        for seed in (10, 2):
            write(tmp_path / "x" / cell / f"seed_{seed}" / "metrics.jsonl", plain(1.0))
    write(tmp_path / "y" / "noise0.1_seed7" / "metrics.jsonl", plain(1.0))
    write(tmp_path / "y" / "noise0.2" / "metrics.jsonl", plain(1.0))
    runs = compare.load([tmp_path])
    assert names(runs) == [
        ("x/a/seed_2", "x/a", 2),
        ("x/a/seed_10", "x/a", 10),
        ("x/b/seed_2", "x/b", 2),
        ("x/b/seed_10", "x/b", 10),
        ("y/noise0.1_seed7", "y/noise0.1", 7),
        ("y/noise0.2", "y/noise0.2", None),
    ]
    assert compare.group_names(runs) == ["x/a", "x/b", "y/noise0.1", "y/noise0.2"]
    # What all share is left out, but not the name of the one group.
    assert names(compare.load([tmp_path / "x" / "a"])) == [("a/seed_2", "a", 2), ("a/seed_10", "a", 10)]
    assert names(compare.load([tmp_path / "x" / "a" / "seed_2"])) == [("a/seed_2", "a", 2)]
    # A run that is named twice is there once; the order of the command line holds.
    twice = compare.load([tmp_path / "x" / "b", tmp_path / "x"])
    assert compare.group_names(twice) == ["b", "a"] and len(twice) == 4
    alone = compare.load([tmp_path / "x"], by_seed=False)
    assert len(compare.group_names(alone)) == 4
    chosen = compare.load([tmp_path / "x"], {"tens": "*/seed_10", "rest": str(tmp_path / "x" / "*")})
    assert {run.name: run.group for run in chosen} == {
        "a/seed_2": "rest",
        "a/seed_10": "tens",
        "b/seed_2": "rest",
        "b/seed_10": "tens",
    }
    assert compare.group_names(chosen) == ["rest", "tens"]
    with pytest.raises(LogError, match=r"--group none=nothing\*: fits no run; the runs are a/seed_2"):
        compare.load([tmp_path / "x"], {"none": "nothing*"})


def test_names_of_files_and_of_folders_that_all_have(tmp_path: Path) -> None:
    for name in ("one_seed1", "one_seed2", "two.5"):
        write(tmp_path / "files" / f"{name.replace('.', '-')}.jsonl", plain(1.0))
        write(tmp_path / "deep" / name / "logs" / "metrics.jsonl", plain(1.0))
    assert names(compare.load([tmp_path / "files"])) == [
        ("one_seed1", "one", 1),
        ("one_seed2", "one", 2),
        ("two-5", "two-5", None),
    ]
    assert [run.name for run in compare.load([tmp_path / "deep"])] == ["one_seed1", "one_seed2", "two.5"]


def line_of(runs: list[compare.Run], axis: compare.Axis, window: int = 1) -> list[Any]:
    return list(compare.group_line(runs, "m", axis, window).itertuples())


def test_lines_are_means_over_seeds_after_smoothing(tmp_path: Path) -> None:
    first = {step: {"m": float(step**2), "perf/total_num_tokens": 10.0 * step} for step in range(1, 7)}
    second: dict[int, dict[str, float | None]] = {
        step: {"m": 3.0 * step, "perf/total_num_tokens": 10.0} for step in range(1, 5)
    }
    second[2]["m"] = None
    write(tmp_path / "g" / "seed_0" / "metrics.jsonl", {0: {"val": 1.0}, **first})
    write(tmp_path / "g" / "seed_1" / "metrics.jsonl", second)
    runs = compare.load([tmp_path])
    axes = {axis.name: axis for axis in compare.axes(runs)}
    assert list(axes) == ["step", "tokens"]
    line = line_of(runs, axes["step"])
    assert [(point.step, point.x, point.seeds) for point in line] == [
        (1, 1.0, 2),
        (2, 2.0, 1),
        (3, 3.0, 2),
        (4, 4.0, 2),
        (5, 5.0, 1),
        (6, 6.0, 1),
    ]
    assert [point.mean for point in line] == [2.0, 4.0, 9.0, 14.0, 25.0, 36.0]
    assert line[0].std == pytest.approx(statistics.stdev([1.0, 3.0])) and (line[0].low, line[0].high) == (1.0, 3.0)
    assert line[1].std == 0.0
    # Window 3: seed 0 at step 4 is the mean of 4, 9, 16; seed 1 that of 9, 12, for its value at 2 is none.
    wide = line_of(runs, axes["step"], 3)
    assert wide[3].mean == pytest.approx((29 / 3 + 21 / 2) / 2) and wide[1].mean == pytest.approx((2.5 + 3.0) / 2)
    tokens = line_of(runs, axes["tokens"])
    assert [point.x for point in tokens] == [10.0, 25.0, 45.0, 70.0, 120.0, 180.0]
    alone = compare.smoothed(pandas.Series({1: math.nan, 2: math.inf, 9: 4.0}), 3)
    assert alone[9] == 4.0 and alone[[1, 2]].isna().all()


def test_panels_follow_what_was_logged(tmp_path: Path) -> None:
    team: dict[int, dict[str, float | None]] = {
        1: {
            "trajectory/reward/mean": 1.0,
            "critic/score/mean": 0.5,
            "actor/grad_norm": 2.0,
            "agent/solver/gradient_energy_share": 0.75,
            "agent/judge/gradient_energy_share": 0.25,
            "agent/solver/score/mean": 0.1,
            "mix/otb/share": 0.5,
            "mix/otb/rms": 1.5,
            "mix/correlation/otb-trloo": 0.1,
            "rollout_corr/kl": 0.1,
            "rollout_corr/chi2_token": 0.2,
            "mismatch/p_0.1_0.5/mean": 0.1,
            "val-core/a/b/acc/mean@8": 0.3,
            "timing_s/step": 100.0,
        },
        2: {"timing_s/step": 200.0},
    }
    write(tmp_path / "team" / "metrics.jsonl", team)
    write(tmp_path / "other" / "metrics.jsonl", plain(1.0, 2.0))
    runs = compare.load([tmp_path])
    sections = {section.title: section for section in compare.sections(runs, ["mix/*", "timing_s/step"])}
    found = {title: [panel.metric for panel in section.panels] for title, section in sections.items()}
    assert found == {
        "Chosen": ["mix/correlation/otb-trloo", "mix/otb/rms", "mix/otb/share", "timing_s/step"],
        "Reward": ["critic/score/mean", "val-core/a/b/acc/mean@8"],  # the reward that both have logged
        "Update": ["actor/grad_norm"],
        "Sampler and trainer": ["rollout_corr/kl", "mismatch/p_0.1_0.5/mean", "rollout_corr/chi2_token"],
        "Agents": [
            "agent/solver/score/mean",
            "agent/judge/gradient_energy_share",
            "agent/solver/gradient_energy_share",
            "agent/judge/grad_norm_estimate",
            "agent/solver/grad_norm_estimate",
        ],
        "Components of the mix": ["mix/otb/share", "mix/correlation/otb-trloo", "mix/otb/rms"],
    }
    assert sections["Sampler and trainer"].main == 1 and sections["Agents"].main == 5
    assert sections["Reward"].panels[1].title == "Validation: a/b, acc mean@8"
    values = next(run for run in runs if run.name == "team").log.steps[1]
    assert values["agent/judge/grad_norm_estimate"] == 1.0
    assert values["agent/solver/grad_norm_estimate"] == pytest.approx(2.0 * math.sqrt(0.75))
    time = compare.axes(runs)[-1]
    assert "minutes" in time.label
    assert compare.positions(runs[0] if runs[0].name == "team" else runs[1], time).to_dict() == {1: 100 / 60, 2: 5.0}
    with pytest.raises(LogError, match="--metric actor/grad_nrm: no run has such a metric; near it: actor/grad_norm"):
        compare.sections(runs, ["actor/grad_nrm"])


def test_measured_norms_of_agents_stand_in_place_of_estimates(tmp_path: Path) -> None:
    step: dict[str, float | None] = {"actor/grad_norm": 2.0}
    for agent, share in (("solver", 0.75), ("judge", 0.25)):
        step |= {f"agent/{agent}/gradient_energy_share": share, f"agent/{agent}/turns": 4.0}
        step |= {f"agent/{agent}/grad_norm/mean": share, f"agent/{agent}/grad_norm/max": 2 * share}
    write(tmp_path / "metrics.jsonl", {1: step})
    runs = compare.load([tmp_path])
    agents = compare.sections(runs)[-1]
    assert [panel.metric for panel in agents.panels] == [
        f"agent/{agent}/{what}"
        for what in ("gradient_energy_share", "grad_norm/mean", "grad_norm/max", "turns")
        for agent in ("judge", "solver")
    ]
    assert agents.title == "Agents" and agents.main == 6
    assert agents.panels[2].title == "judge: gradient norm of its turns"
    write(tmp_path / "metrics.jsonl", {1: {name: value for name, value in step.items() if "/judge/" not in name}})
    assert compare.sections(compare.load([tmp_path]))[-1].main == 0  # a lone agent is the run


def test_the_agents_of_a_run_with_several_models_are_named_with_theirs(tmp_path: Path) -> None:
    both: dict[str, float | None] = {f"agent/{agent}/score/mean": 1.0 for agent in ("solver", "judge")}
    write(tmp_path / "shared" / "metrics.jsonl", {1: both})
    assert compare.sections(compare.load([tmp_path]))[-1].note == ""
    # The second has the name of before.
    own: dict[str, float | None] = {"model/policy/agent/solver/sequences": 2.0, "model/small/agent/judge/rows": 1.0}
    for seed in (0, 1):
        write(tmp_path / "apart" / f"seed_{seed}" / "metrics.jsonl", {1: both | own | {"model/small/sequences": 1.0}})
    runs = compare.load([tmp_path])
    agents = page_data(runs, compare.sections(runs), title="t")["sections"][-1]
    assert agents["title"] == "Agents"
    assert agents["note"] == "Models of the agents. apart: judge on small, solver on policy"


def test_long_series_are_thinned_and_keep_their_spikes(tmp_path: Path) -> None:
    steps: dict[int, dict[str, float | None]] = {step: {"m": 1.0 + step / 1000} for step in range(1, 1001)}
    steps[500]["m"], steps[700]["m"] = 1e6, None
    for step in range(0, 1001, 50):
        steps.setdefault(step, {})["val"] = float(step)
    write(tmp_path / "a" / "metrics.jsonl", steps)
    write(tmp_path / "b" / "metrics.jsonl", dict(list(steps.items())[:400]))
    runs = compare.load([tmp_path])
    data = page_data(runs, compare.sections(runs), title="t", budget=480)  # 120 values each, 40 buckets
    assert data["metrics"] == ["m", "val"] and data["width"] == 26
    long, rare = data["series"][0]["0"], data["series"][0]["1"]
    assert len(long["v"]) == 39 and max(long["hi"]) == 1_000_000 and min(long["lo"]) == 1.001
    where = [data["runs"][0]["x"]["step"][position] for position in long["i"]]
    assert where[0] == 12.5 and where[1] == 38.5
    assert long["v"][1] == pytest.approx(sum(1 + step / 1000 for step in range(26, 52)) / 26, rel=1e-4)
    assert [where[position] for position in long["bad"]] == [26 * (700 // 26) + 12.5]
    # What is logged rarely keeps each value at its own step.
    assert rare["v"] == list(range(0, 1001, 50)) and "lo" not in rare
    assert [data["runs"][0]["x"]["step"][position] for position in rare["i"]] == list(range(0, 1001, 50))
    # The shorter run is in the same buckets.
    shorter = data["series"][1]["0"]
    assert [data["runs"][1]["x"]["step"][position] for position in shorter["i"]] == where[: len(shorter["i"])]
    assert shorter["v"][:10] == long["v"][:10]
    whole = page_data(runs, compare.sections(runs), title="t")
    assert whole["width"] == 1 and len(whole["series"][0]["0"]["v"]) == 1000


def test_the_line_of_seeds_of_different_speed_goes_on_from_step_to_step(tmp_path: Path) -> None:
    for seed, (seconds, steps) in enumerate(((30.0, range(1, 7)), (60.0, range(1, 4)), (90.0, range(3, 6)))):
        values: dict[int, dict[str, float | None]] = {
            step: {"m": None if (seed, step) == (1, 2) else 1.0, "timing_s/step": seconds} for step in steps
        }
        write(tmp_path / f"seed_{seed}" / "metrics.jsonl", values)
    runs = compare.load([tmp_path])
    step, time = compare.axes(runs)
    line = compare.group_line(runs, "m", time)
    assert list(line["seeds"]) == [2, 1, 3, 2, 2, 1]
    assert list(line["x"].diff().fillna(line["x"])) == pytest.approx([0.75, 0.75, 1, 1, 1, 0.5])  # minutes
    assert list(compare.group_line(runs, "m", step)["x"]) == [1, 2, 3, 4, 5, 6]
    assert compare.group_line(runs, "absent", time).empty


@pytest.mark.seconds
def test_command_writes_a_page_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cell, offset in (("$x_{1}$", 0.0), ("_b", 1.0)):
        for seed in (0, 1):
            values = {
                step: {"critic/score/mean": offset + seed + step, "a b/c": step, "a_b/c": None, "val-core/x": 1.0}
                for step in range(1, 6)
            }
            write(tmp_path / "runs" / cell / f"seed_{seed}" / "metrics.jsonl", values)
    with (tmp_path / "runs" / "_b" / "seed_1" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "da')
    arguments = ["report", str(tmp_path / "runs"), "--out", str(tmp_path / "out" / "r.html")]
    arguments += ["--png", str(tmp_path / "png"), "--smooth", "2", "--metric", "a?b/c"]
    assert cli.main(arguments) == 0
    told = capsys.readouterr().out
    assert "4 runs in 2 groups, 4 metrics" in told and "_b/seed_1: " in told and "line 6 is cut short" in told
    assert "<title>Runs: $x_{1}$, _b</title>" in (tmp_path / "out" / "r.html").read_text()
    pictures = {path.name: matplotlib.image.imread(path) for path in (tmp_path / "png").iterdir()}
    assert set(pictures) == {"overview.png", "critic_score_mean.png", "a_b_c.png", "a_b_c_2.png", "val-core_x.png"}
    for name, colour in (("critic_score_mean.png", compare.COLOURS[0]), ("overview.png", compare.COLOURS[1])):
        wanted = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        assert (abs(pictures[name][..., :3] - wanted).max(axis=-1) < 0.01).sum() > 100, name


def test_pictures_have_a_gap_where_a_value_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    values = {step: {"critic/score/mean": None if step == 3 else float(step)} for step in range(1, 6)}
    for step in (2, 4):
        values[step]["val-core/x"] = 1.0
    write(tmp_path / "metrics.jsonl", values)
    runs = compare.load([tmp_path])
    write_pictures(runs, compare.sections(runs), tmp_path / "png")
    monkeypatch.undo()
    _, reward, validation = [figure.axes[0].lines[0] for figure in figures]
    assert list(reward.get_xdata())[:2] == [1, 2] and math.isnan(reward.get_ydata()[2])
    assert len(reward.get_ydata()) == 5
    # What is logged now and then is no gap.
    assert list(validation.get_xdata()) == [2, 4]
    pyplot.close("all")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["absent"], 1, "absent: no such file or folder"),
        (["runs", "--metric", "unknown"], 1, "--metric unknown: no run has such a metric"),
        (["runs", "--group", "x=none"], 1, "--group x=none: fits no run"),
        (["runs", "--group", "none"], 2, "is not NAME=PATTERN"),
        (["runs", "--smooth", "0"], 2, "not a whole number of at least 1"),
        (["runs", "--out", "report.pdf"], 2, "ends in .html"),
    ],
)
def test_command_line_that_cannot_be_carried_out(
    arguments: list[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs" / "metrics.jsonl", plain(1.0))
    try:
        got = cli.main(["report", *arguments])
    except SystemExit as stop:
        got = int(str(stop.code))
    assert got == code and words in capsys.readouterr().err and not list(tmp_path.glob("*.html"))
