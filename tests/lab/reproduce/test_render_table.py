# SPDX-License-Identifier: Apache-2.0
"""A collected table as Markdown, CSV, JSON and a picture."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas
import pytest

from verl_ext.lab.reproduce import render, runs
from verl_ext.lab.reproduce.catalogue import read_table
from verl_ext.lab.reproduce.collect import NOT_REACHED, collect, summarised
from verl_ext.lab.reproduce.tables import CERTAINTIES, MetricSpec, Table

TABLE = """\
# verl-ext table
title: Two ways | one choice
paper: arXiv 1234.56789
claim: B beats A.
published_in: abstract
open: [Nobody says which data.]
published:
  - {cell: b, source: kernelbench, values: {avg: 60.25}}
  - {cell: b, source: gigpo_readme, values: {avg: 10}, relative_to: a, note: a note}
  - {cell: b, source: hgpo, values: {tokens: -50}, relative_to: a, ratio: true}
  - {cell: other, source: hgpo_7b_unsure, values: {avg: 70}}
full:
  hardware: {nodes: 1, gpus_per_node: 8, gpu: H100}
  hours: {value: 1}
  seeds: [0, 1, 2]
  steps: 6
  models: [Qwen/Qwen3-4B]
  data: {train: [dapo_math], val: [math500]}
  baseline: a
  cells:
    a: {label: Way A, recipe: [grpo], note: as released}
    b: {label: "B|C", recipe: [otb]}
    other: {label: Another model, runnable: false}
  metrics:
    avg: {label: "avg@2", kind: last, keys: ["val-core/*/acc/mean@2"], percent: true}
    tokens: {label: tokens, kind: tokens, higher: false, digits: 0}
    kl: {label: KL, kind: last, keys: [actor/ppo_kl], higher: false}
    norm: {label: gradient norm, kind: mean, keys: [actor/grad_norm], higher: null}
laptop:
  claim: B learns more than A.
  task: chain_sum
  seeds: [0, 1, 2]
  steps: 6
  baseline: a
  cells:
    a: {label: Way A, recipe: [grpo]}
    b: {label: "B|C", recipe: [otb]}
  metrics:
    reward: {label: reward, kind: last, keys: [trajectory/reward/mean]}
    norm: {label: gradient norm, kind: mean, keys: [actor/grad_norm], higher: null}
    to: {label: tokens to 0.5, kind: tokens_to, keys: [trajectory/reward/mean], threshold: 0.5, digits: 0,
         higher: false}
"""


@pytest.fixture
def table(tmp_path: Path) -> Table:
    path = tmp_path / "ways.yaml"
    path.write_text(TABLE, encoding="utf-8")
    return read_table(path, "otb/ways")


def make(table: Table, scale: str, out: Path, seeds: int = 3) -> None:
    """Runs of both cells: B is better by far, with half of the tokens and an equal norm of the gradient. What a seed
    adds is another in B.
    """
    part = table.full if scale == "full" else table.laptop
    assert part is not None
    for cell, level, tokens in (("a", 0.3, 200), ("b", 0.6, 100)):
        for seed in range(seeds):
            more = 0.01 * (-seed % 3 if cell == "b" else seed)
            run = runs.Run(table, part, cell, seed, out, 6)
            run.begin()
            with (run.path / "metrics.jsonl").open("w", encoding="utf-8") as file:
                for step in range(1, 7):
                    data = {
                        "trajectory/reward/mean": level * step / 6 + more,
                        "val-core/math500/acc/mean@2": level * step / 6 + more,
                        "perf/total_num_tokens": tokens,
                        "actor/grad_norm": 1.0 + 0.1 * seed,
                        "actor/ppo_kl": level * 1e-7,
                        **{f"agent/{name}/score/mean": 0.5 for name in ("solver", "verifier")},
                    }
                    file.write(json.dumps({"step": step, "data": data}) + "\n")
            run.end(runs.COMPLETE, 0, 1.0)


def rows(page: str, heading: str = "# ") -> list[list[str]]:
    """The first table after a heading."""
    lines = page[page.index(heading) :].splitlines()
    start = next(place for place, text in enumerate(lines) if text.startswith("|"))
    found = []
    for text in lines[start:]:
        if not text.startswith("|"):
            break
        found.append([field.strip() for field in re.split(r"(?<!\\)\|", text)[1:-1]])
    assert len({len(row) for row in found}) == 1  # a table with a column too many is not one
    return [found[0], *found[2:]]


def test_laptop_page(table: Table, tmp_path: Path) -> None:
    make(table, "laptop", tmp_path)
    page = render.markdown(collect(table, "laptop", tmp_path))
    assert "**Laptop scale: a test of the claim's direction, not the paper's number.**" in page
    assert "Claim (arXiv 1234.56789): B beats A." in page and "Tested here: B learns more than A." in page
    head, first, second = rows(page)
    assert head == ["", "reward ↑", "gradient norm", "tokens to 0.5 ↓", "seeds"]
    assert first == ["Way A (baseline)", "0.310 ± 0.010", "1.100 ± 0.100", "not reached (3 of 3)", "3"]
    assert second == ["B\\|C", "0.610 ± 0.010", "1.100 ± 0.100", "500 ± 0", "3"]
    _, reward, norm = rows(page, "## Difference to Way A")
    assert reward == [
        "B\\|C", "reward ↑", "+0.300", "[+0.275, +0.325]", "0.031", "shown: better, outside the noise",
    ]  # fmt: skip
    # A metric of which the claim does not speak gets no verdict on the claim.
    assert norm[2] == "+0.000" and norm[5] == "inside the noise (no direction is better)"
    head, *papers = rows(page, "## The paper's numbers")
    assert head == ["", "certainty", "avg@2 (%) ↑", "change of tokens (%) ↓", "note"]
    assert papers[0] == ["B\\|C", "certain", "60.25", "", ""]
    assert papers[1] == ["B\\|C less Way A", "abstract-or-blog", "+10.0", "", "a note"]
    assert papers[2] == ["B\\|C against Way A", "secondary", "", "-50.0", ""]
    assert "not compared" in page and "## Beside the paper" not in page
    for mark in CERTAINTIES:
        assert f"*{mark}*: " in page
    assert rows(page, "## Agents")[1] == ["Way A", "solver", "0.500 ± 0.000"]
    assert "seeds 0, 1, 2; steps used: 6" in page and "versions: verl_ext " in page
    assert f"verl-ext reproduce run otb/ways --scale laptop --out {tmp_path}" in page


def test_full_page(table: Table, tmp_path: Path) -> None:
    make(table, "full", tmp_path)
    page = render.markdown(collect(table, "full", tmp_path))
    assert "Laptop" not in page and "**Full scale: the paper's setting, as far as it is known.**" in page
    head, *cells = rows(page)
    assert head == ["", "avg@2 (%) ↑", "tokens ↓", "KL ↓", "gradient norm", "seeds"]
    # A row that is only published has no numbers of ours; small numbers are not rounded to 0.
    assert [row[0] for row in cells] == ["Way A (baseline)", "B\\|C"]
    assert cells[1] == ["B\\|C", "61.0 ± 1.0", "600 ± 0", "6.0e-08 ± 0.0e+00", "1.100 ± 0.100", "3"]
    difference = {row[1]: row for row in rows(page, "## Difference to Way A")[1:]}
    assert difference["avg@2 (%) ↑"][5] == "shown: better, outside the noise"
    assert difference["tokens ↓"][2:] == ["-600", "-", "-", "no spread among the seeds: noise unknown"]
    assert difference["KL ↓"][2] == "+3.0e-08" and difference["KL ↓"][5].startswith("no spread")
    head, value, relative, ratio = rows(page, "## Beside the paper")
    assert head == ["", "metric", "paper", "certainty", "ours", "ours less paper", "verdict", "note"]
    assert value[2:7] == ["60.25", "certain", "61.0", "+0.8", "inside the noise"]
    assert relative[:7] == [
        "B\\|C less Way A", "avg@2 (%) ↑", "+10.0", "abstract-or-blog", "+30.0", "+20.0", "outside the noise",
    ]  # fmt: skip
    assert ratio[:7] == [
        "B\\|C against Way A", "change of tokens (%) ↓", "-50.0", "secondary", "-50.0", "+0.0",
        "no spread among the seeds: noise unknown",
    ]  # fmt: skip
    assert rows(page, "Published only:") == [["", "certainty", "avg@2 (%) ↑"], ["Another model", "unverified", "70.0"]]
    assert "- Nobody says which data." in page and "- Way A: as released" in page
    assert "model: Qwen/Qwen3-4B" in page


def test_one_seed_is_said(table: Table, tmp_path: Path) -> None:
    make(table, "full", tmp_path, seeds=1)
    page = render.markdown(collect(table, "full", tmp_path))
    assert rows(page)[1][1] == "30.0" and "With one seed there is no deviation." in page
    assert {row[5] for row in rows(page, "## Difference to Way A")[1:]} == {"one seed: noise unknown"}
    assert rows(page, "## Beside the paper")[1][6] == "one seed: noise unknown"
    assert "a (seeds 1, 2), b (seeds 1, 2): no complete run" in page


SPEC = MetricSpec("m", "m", "last", {}, digits=2)


def test_numbers_as_text() -> None:
    assert render.number(1234.567, SPEC) == "1,234.57"
    assert render.number(0.5, SPEC, sign=True) == "+0.50"
    assert render.number(0.0, SPEC) == "0.00"
    assert render.number(0.001, SPEC) == "1.0e-03"
    assert render.number(0.001, SPEC, size=3.0) == "0.00"
    assert render.number(None, SPEC) == "-"
    for values, reasons, text in (
        ([0.5, math.nan], ["", "gone"], "0.50 (1 of 2 seeds)"),
        ([math.nan], ["gone"], "-"),
        ([4.0, math.nan], ["", NOT_REACHED], "not reached (1 of 2)"),
    ):
        frame = pandas.DataFrame({"cell": "a", "value": values, "reason": reasons})
        assert render.summary_text(summarised(frame, ["cell"]).loc["a"], SPEC) == text
    wide = SimpleNamespace(difference=-0.001, low=-0.3, high=0.3, detectable=0.4)
    assert render.difference_texts(wide, SPEC) == ["-0.00", "[-0.30, +0.30]", "0.40"]
    alone = SimpleNamespace(difference=-0.5, low=math.nan, high=math.nan, detectable=math.nan)
    assert render.difference_texts(alone, SPEC) == ["-0.50", "-", "-"]


def test_csv_has_every_number_in_full(table: Table, tmp_path: Path) -> None:
    make(table, "full", tmp_path)
    result = collect(table, "full", tmp_path)
    lines = list(csv.DictReader(io.StringIO(render.csv_text(result))))
    assert len(lines) == 3 * 4 + 1  # B's avg is published twice
    avg = [line for line in lines if (line["cell"], line["metric"]) == ("b", "avg")]
    assert [line["certainty"] for line in avg] == ["certain", "abstract-or-blog"]
    assert float(avg[0]["mean"]) == result.summary.loc["b", "avg"]["mean"]
    own = result.values.query("cell == 'b' and metric == 'avg'")
    assert avg[0]["values"] == " ".join(f"{s}:{v}" for s, v in zip(own["seed"], own["value"], strict=True))
    assert avg[0]["label"] == "B|C" and avg[0]["verdict"] == "shown: better, outside the noise"
    assert float(avg[1]["paper"]) == 10 and avg[1]["paper_relative_to"] == "a"
    assert float(avg[0]["low"]) <= float(avg[0]["difference"]) <= float(avg[0]["high"])
    other = next(line for line in lines if line["cell"] == "other" and line["metric"] == "avg")
    assert other["mean"] == "" and float(other["paper"]) == 70 and other["certainty"] == "unverified"


def test_a_cell_against_several(table: Table, tmp_path: Path) -> None:
    assert table.laptop is not None
    cells = {**table.laptop.cells, "c": replace(table.laptop.cells["b"], name="c", label="Way C")}
    more = replace(table, laptop=replace(table.laptop, cells=cells, versus={"c": "b"}))
    assert more.laptop is not None
    make(more, "laptop", tmp_path)
    for seed in range(3):
        run = runs.Run(more, more.laptop, "c", seed, tmp_path, 6)
        run.begin()
        source = tmp_path / f"otb.ways/laptop/b/seed_{seed}/metrics.jsonl"
        (run.path / "metrics.jsonl").write_bytes(source.read_bytes())
        run.end(runs.COMPLETE, 0, 1.0)
    result = collect(more, "laptop", tmp_path)
    page = render.markdown(result)
    assert [row[:2] for row in rows(page, "## Difference to Way A")[1:]] == [
        ["B\\|C", "reward ↑"], ["B\\|C", "gradient norm"], ["Way C", "reward ↑"], ["Way C", "gradient norm"],
    ]  # fmt: skip
    against = rows(page, "## Difference to B|C")
    assert [row[0] for row in against[1:]] == ["Way C"] * 3 and against[1][2] == "+0.000"
    assert "one side has no value: B|C in tokens to 0.5; Way C in tokens to 0.5." in page
    lines = list(csv.DictReader(io.StringIO(render.csv_text(result))))
    own = [line for line in lines if (line["cell"], line["metric"]) == ("c", "reward")]
    assert [line["baseline"] for line in own] == ["a", "b"] and float(own[1]["difference"]) == 0


def test_json_is_strict_and_complete(table: Table, tmp_path: Path) -> None:
    make(table, "laptop", tmp_path)
    result = collect(table, "laptop", tmp_path)
    data = json.loads(json.dumps(render.plain(result), allow_nan=False))
    assert data["caption"] == render.LAPTOP and data["scale"] == "laptop" and data["beside"] == []
    never = [row for row in data["values"] if (row["cell"], row["metric"]) == ("a", "to")]
    assert [(row["seed"], row["value"], row["reason"]) for row in never] == [(k, None, "not reached") for k in range(3)]
    (one,) = [row for row in data["summary"] if (row["cell"], row["metric"]) == ("a", "to")]
    assert one == {
        "cell": "a", "metric": "to", "mean": None, "std": None, "known": 0, "runs": 3, "unreached": 3,
    }  # fmt: skip
    assert [one["certainty"] for one in data["published"]] == list(CERTAINTIES)
    assert [(one["cell"], one["metric"]) for one in data["differences"]] == [("b", "reward"), ("b", "norm")]
    assert {(row["cell"], row["step"]) for row in data["steps"]} == {("a", 6), ("b", 6)}
    assert data["commands"] == list(result.commands)


@pytest.mark.seconds
def test_files_and_printed_table(table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from matplotlib import image

    for scale in ("laptop", "full"):
        make(table, scale, tmp_path)
        assert render.main(table, scale, tmp_path) == 0
        folder = tmp_path / "otb.ways" / scale
        said = capsys.readouterr().out
        assert (folder / "table.md").read_text(encoding="utf-8") in said
        for name in render.NAMES:
            assert str(folder / name) in said
        picture = image.imread(folder / "table.png")
        assert picture.shape[0] > 300 and picture.shape[1] > 600
        # Both cells' colours are on it.
        for colour in render.COLOURS[:2]:
            wanted = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
            assert (abs(picture[..., :3] - wanted).max(-1) < 0.02).sum() > 100


@pytest.mark.seconds
def test_text_of_the_picture(table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    texts: dict[str, list[str]] = {}
    for scale in ("laptop", "full"):
        make(table, scale, tmp_path)
        result = collect(table, scale, tmp_path)
        if scale == "laptop":
            # A table may have no baseline.
            result = replace(result, scale=replace(result.scale, baseline=None), differences=result.differences[:0])
        drawn = []
        with monkeypatch.context() as patch:
            patch.setattr(pyplot, "close", drawn.append)
            render.draw(result, tmp_path / "t.png")
        figure = drawn[0]
        parts = [figure._suptitle.get_text(), figure._supxlabel.get_text()]
        for axis in figure.axes:
            parts += [axis.get_title(), *(text.get_text() for text in axis.get_yticklabels() + axis.texts)]
        texts[scale] = parts
        pyplot.close(figure)
    # The picture of a small experiment is never taken for the paper's.
    assert texts["laptop"][0].startswith("Task chain_sum, with a model made for it: sums of two")
    assert render.LAPTOP in texts["laptop"][0] and "paper" not in texts["laptop"][1]
    assert "not reached (3 of 3)" in texts["laptop"] and "reward ↑" in texts["laptop"]
    assert "Full scale" in texts["full"][0] and "the paper's number" in texts["full"][1]
    # A row that is only published is drawn beside ours.
    assert "Another model" in texts["full"]


def test_bands_over_seeds() -> None:
    """Each seed's curve is smoothed by itself; a step that one seed has not is the others'."""
    from matplotlib.figure import Figure

    axis = Figure().add_subplot()

    def draw(label: str, width: int, *by_seed: dict[int, float]) -> None:
        rows = [(seed, step, value) for seed, curve in enumerate(by_seed) for step, value in curve.items()]
        own = pandas.DataFrame(rows, columns=["seed", "step", "value"])
        render._draw_curve(axis, own, width, color="black", label=label)

    draw("a", 1, {2: 1.0, 1: 0.0}, {1: 1.0, 2: 1.0, 3: 4.0}, {})
    draw("b", 2, {1: 0.0, 2: 1.0})
    one, two = axis.lines
    assert list(one.get_xdata()) == [1, 2, 3] and list(one.get_ydata()) == [0.5, 1.0, 4.0]
    assert list(two.get_ydata()) == [0.0, 0.5]
    corners = {tuple(corner) for corner in axis.collections[0].get_paths()[0].vertices.tolist()}
    assert {(1.0, 0.0), (1.0, 1.0), (3.0, 4.0)} <= corners
