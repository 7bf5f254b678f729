# SPDX-License-Identifier: Apache-2.0
"""The page of ``verl-ext report`` in a real headless browser."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from verl_ext import cli
from verl_ext.lab.report import compare

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import browser as headless  # noqa: E402

pytestmark = pytest.mark.slow

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&lt;\u2028"
STEPS, SEEDS = 20, 3
Steps = dict[int, dict[str, float | None]]


def write(path: Path, steps: Steps) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in steps.items()))


def history(offset: float, seed: int, last: int) -> Steps:
    steps: Steps = {0: {"val-core/task/reward/mean@1": offset}}
    for step in range(1, last + 1):
        steps[step] = {
            "critic/score/mean": offset + step / 10 + seed * 0.3,
            "actor/grad_norm": 10.0 ** ((step + seed) % 5 - 2),
            "actor/entropy": 1.0 - step * 0.1,  # below 0 in the end
            "perf/total_num_tokens": 1000.0 + 100 * seed,
            "timing_s/step": 30.0 * (1 + seed),
            HOSTILE: float(step),
        }
        if step % 5 == 0:
            steps[step]["val-core/task/reward/mean@1"] = offset + step / 20
    return steps


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups of three seeds, and a run alone: shorter, without tokens, with values that are not finite."""
    folder = tmp_path_factory.mktemp("runs")
    for cell, offset in (("alpha", 0.0), ("<b>beta", 1.0)):
        for seed in range(SEEDS):
            write(folder / cell / f"seed_{seed}" / "metrics.jsonl", history(offset, seed, STEPS - 8 * (seed == 2)))
    alone = history(0.5, 0, 10)
    for step, data in alone.items():
        data.pop("perf/total_num_tokens", None)
        if step in (4, 5):
            data["critic/score/mean"] = None
        if step == 7:
            data["actor/grad_norm"] = None
        data["only/here"] = 1.0
    write(folder / "single" / "metrics.jsonl", alone)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[headless.Browser]:
    with headless.running(Path(__file__).resolve().parents[3] / "build" / "browser") as running:
        yield running


@pytest.fixture
def opened(browser: headless.Browser, runs: Path, tmp_path: Path) -> headless.Page:
    target = tmp_path / "report.html"
    assert cli.main(["report", str(runs), "--out", str(target), "--title", f"Of {HOSTILE}"]) == 0
    page = browser.open(target.as_uri(), width=1300, height=2400)
    settle(page)
    return page


def settle(page: headless.Page) -> None:
    """Wait for the next drawing."""
    page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")


def panel(page: headless.Page, title: str, script: str) -> Any:
    """A value of an expression of `node`, the panel with this title, and of `chart`, uPlot's in it."""
    return page.run(
        f"(() => {{ const {{ figure: node, chart }} = panels.find(panel => panel.title === {json.dumps(title)});"
        f" return {script}; }})()"
    )


LINE, RAW = 1.8, 1.0
DOTS = "chart.series.flatMap((one, k) => one.class === 'named' ? one.points.filter(chart) : []).length"


def colours(page: headless.Page, title: str, width: float = LINE) -> list[str]:
    """Of the lines of this width."""
    lines = f"chart.series.filter(one => one.width === {width} && one.class === 'unnamed')"
    return [colour[:7] for colour in panel(page, title, f"{lines}.map(one => one.stroke())")]


def box(page: headless.Page, title: str) -> dict[str, float]:
    """Where the lines of a chart are drawn."""
    return panel(page, title, "JSON.parse(JSON.stringify(chart.over.getBoundingClientRect()))")


def move(page: headless.Page, x: float, y: float, kind: str = "mouseMoved", **more: Any) -> None:
    page.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
    settle(page)


def crosses(page: headless.Page, title: str, colour: str) -> int:
    """Pixels of this colour at the top of a chart, where values that are not finite are marked."""
    return panel(
        page,
        title,
        "(() => { const { left, top, width } = chart.bbox, drawn = chart.ctx.getImageData(left, top, width, 6).data;"
        f" const wanted = [1, 3, 5].map(at => parseInt('{colour}'.slice(at, at + 2), 16)); let count = 0;"
        " for (let k = 0; k < drawn.length; k += 4) count += wanted.every((one, j) => drawn[k + j] === one);"
        " return count; })()",
    )


def under_the_cursor(page: headless.Page) -> list[str]:
    """What is said of the lines of the chart that is pointed at."""
    rows = "[...document.querySelectorAll('.u-legend tr:not(.unnamed)')].filter(row => row.offsetParent)"
    return page.run(f"{rows}.map(row => [...row.cells].map(cell => cell.textContent).join(': '))")


def note(page: headless.Page, title: str) -> str:
    return panel(page, title, "node.querySelector('.note').textContent")


def slide(page: headless.Page, position: int) -> None:
    page.run(
        f"(() => {{ const node = document.getElementById('smooth'); node.value = {position};"
        " node.dispatchEvent(new Event('input')); })()"
    )
    settle(page)


def test_panels_show_groups_and_say_what_is_missing(opened: headless.Page) -> None:
    blue, orange, green = compare.COLOURS[:3]
    assert opened.texts("h2") == ["Reward", "Update"]
    assert opened.texts(".panel strong") == [
        "Training reward",
        "Validation: task, reward mean@1",
        "Gradient norm",
        "Entropy",
    ]
    assert opened.texts("#legend button") == ["<b>beta (3 runs)", "alpha (3 runs)", "single"]
    # A group is solid while all its seeds go on and dotted after; the single run has a gap at 4 and 5.
    dashes = panel(
        opened,
        "Training reward",
        "chart.series.map((one, k) => [one.width, one.stroke?.(), one.dash, chart.data[k].map(v => v ?? null)])"
        f".filter(one => one[0] === {LINE})"
        ".map(([width, colour, dash, values]) => [colour, dash, values.flatMap((v, k) => v === null ? [] : [k])])",
    )
    to_12, to_20 = list(range(12)), list(range(11, 20))
    assert dashes == [
        [blue, [], to_12],
        [blue, [1.5, 2.5], to_20],
        [orange, [], to_12],
        [orange, [1.5, 2.5], to_20],
        [green, [], [0, 1, 2, 5, 6, 7, 8, 9]],
    ]
    assert crosses(opened, "Training reward", green) > 10 and crosses(opened, "Training reward", blue) == 0
    assert note(opened, "Training reward") == "2 not finite (\u00d7)"
    # Validation is drawn as points: at 0, 5, 10, 15, 20 for the groups, and at 0, 5, 10 for the single run.
    assert panel(opened, "Validation: task, reward mean@1", DOTS) == 13
    assert panel(opened, "Gradient norm", "chart.bands.length") == 2
    assert opened.complaints() == []


@pytest.mark.parametrize("axis", ["step", "tokens", "time"])
@pytest.mark.parametrize("window", [1, 5])
def test_the_page_computes_what_the_pictures_show(opened: headless.Page, runs: Path, axis: str, window: int) -> None:
    loaded = compare.load([runs])
    chosen = {one.name: one for one in compare.axes(loaded)}[axis]
    opened.choose("#x", axis)
    for metric in ("critic/score/mean", "actor/grad_norm", "val-core/task/reward/mean@1"):
        drawn = opened.run(f"lines(data.metrics.indexOf({json.dumps(metric)}), {window})")
        expected = {}
        for group in compare.group_names(loaded):
            line = compare.group_line([run for run in loaded if run.group == group], metric, chosen, window)
            if len(line):
                expected[group] = list(line.itertuples())
        assert [line["name"] for line in drawn] == list(expected)
        assert ("single" in expected) == (axis != "tokens")
        for line in drawn:
            points = [point for point in line["points"] if point["v"] is not None and math.isfinite(point["v"])]
            for one, following in itertools.pairwise(line["points"]):
                assert one["x"] < following["x"] and one["step"] < following["step"]
            assert len(points) == len(expected[line["name"]])
            for got, want in zip(points, expected[line["name"]], strict=True):
                assert (got["step"], got["seeds"]) == (want.step, want.seeds)
                for name, value in (("x", want.x), ("v", want.mean), ("std", want.std), ("low", want.low)):
                    assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-9), (metric, name)
                assert got["high"] == pytest.approx(want.high, rel=1e-4)
    assert opened.complaints() == []


def test_hovering_shows_the_values_at_a_step(opened: headless.Page) -> None:
    place = box(opened, "Training reward")
    move(opened, x=place["x"] + place["width"] * 11 / 20 + 2, y=place["y"] + 90)
    # Step 11: 1.1, and 0.3 from seed to seed; the single run has ended at step 10, not near enough to be said.
    assert under_the_cursor(opened) == [
        "step: 11",
        "<b>beta: 2.4 \u00b1 0.3 (3 seeds)",
        "alpha: 1.4 \u00b1 0.3 (3 seeds)",
        "single: ",
    ]
    others = opened.run("panels.map(panel => panel.chart.cursor.left > 0)")
    assert others == [True] * 4  # the same place in all charts
    place = box(opened, "Validation: task, reward mean@1")
    move(opened, x=place["x"] + place["width"] * 10 / 20 + 4, y=place["y"] + 90)
    assert under_the_cursor(opened)[-1] == "single: 1"
    opened.choose("#x", "tokens")
    settle(opened)
    place = box(opened, "Training reward")
    move(opened, x=place["x"] + place["width"] * 11 / 20 - 3, y=place["y"] + 90)
    assert " tokens, step " in under_the_cursor(opened)[0]
    assert note(opened, "Gradient norm") == "no tokens logged by single"
    move(opened, x=5, y=5)
    assert under_the_cursor(opened) == []
    assert opened.complaints() == []


def drag(page: headless.Page, place: dict[str, float]) -> None:
    """From a quarter to the half of a chart."""
    left, right = (place["x"] + place["width"] * share for share in (0.25, 0.5))
    for kind, x in (("mouseMoved", left), ("mousePressed", left), ("mouseMoved", right), ("mouseReleased", right)):
        move(page, x, place["y"] + 60, kind, button="left", buttons=int(kind != "mouseReleased"), clickCount=1)


def test_what_is_dragged_over_is_enlarged_in_all_charts(opened: headless.Page, browser: headless.Browser) -> None:
    ranges = "panels.map(panel => [panel.chart.scales.x.min, panel.chart.scales.x.max])"
    assert opened.run(ranges) == [[0, STEPS]] * 4
    place = box(opened, "Gradient norm")
    middle = place["x"] + place["width"] * 0.4
    drag(opened, place)
    for low, high in opened.run(ranges):
        assert (low, high) == (pytest.approx(5, abs=0.2), pytest.approx(10, abs=0.2))
    # What is drawn later is enlarged like the others.
    opened.choose("#band", "none")
    settle(opened)
    assert opened.run(ranges)[0] == [pytest.approx(5, abs=0.2), pytest.approx(10, abs=0.2)]
    again = browser.open(opened.run("location.href"), width=1300, height=2400)
    settle(again)
    assert again.run(ranges) == [opened.run("zoom")] * 4
    again.run("void (location.hash = '#x=tokens')")  # other units
    again.until("state.x === 'tokens' && zoom === null")
    opened.choose("#x", "tokens")
    settle(opened)
    assert opened.run(ranges)[0][0] == 0
    opened.choose("#x", "step")
    settle(opened)
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            move(opened, middle, place["y"] + 60, kind, button="left", clickCount=count)
    assert opened.run(ranges) == [[0, STEPS]] * 4 and "from=" not in opened.run("location.hash")
    # Where nothing is drawn there is nothing to enlarge.
    opened.run("turn(() => true, false)")
    settle(opened)
    drag(opened, place)
    assert opened.run("zoom === null && !location.hash.includes('from=')")
    assert opened.complaints() == again.complaints() == []


def test_labels_of_the_axes_tell_their_marks_apart(browser: headless.Browser, tmp_path: Path) -> None:
    steps: Steps = {}
    for step in range(1, 101):
        steps[step] = {"critic/score/mean": 61.2341 + 0.0003 * math.sin(step), "actor/grad_norm": 2.0**step}
        steps[step] |= {"response_length/mean": 12341 + 8 * math.sin(step / 5), "perf/total_num_tokens": 1.2e7}
    write(tmp_path / "metrics.jsonl", steps)
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    for hash in ("", "#from=12&to=14", "#x=tokens", "#x=tokens&from=1.19e9&to=1.193e9", "#log=1"):
        page = browser.open((tmp_path / "page.html").as_uri() + hash, width=1300, height=1000)
        settle(page)
        axes = page.run("panels.flatMap(panel => panel.chart.axes.map(axis => [axis._splits, axis._values]))")
        assert len(axes) == 6
        for places, texts in axes:
            said = [(at, text) for at, text in zip(places, texts, strict=True) if text]
            assert 1 < len(said) == len({text for _, text in said}), texts
            for at, text in said:
                number = float(text.strip("kMGT")) * {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1)
                assert number == pytest.approx(at, rel=1e-9, abs=1e-9)
        if hash == "":
            assert axes[0][1] == [str(step) for step in axes[0][0]]
        # No label is wider than its place.
        assert all(
            page.run(
                "panels.map(p => p.chart.axes[1]._size >= 10 + 5 * Math.max(...p.chart.axes[1]._values"
                ".map(text => (text || '').length)))"
            )
        )
        assert page.complaints() == []


def test_steps_that_add_nothing_to_the_axis_are_all_drawn(browser: headless.Browser, tmp_path: Path) -> None:
    steps: Steps = {step: {"critic/score/mean": float(step)} for step in range(1, 21)}
    for step in range(11, 21):
        steps[step]["perf/total_num_tokens"] = 1000.0
    write(tmp_path / "a" / "metrics.jsonl", steps)
    every: Steps = {step: {"critic/score/mean": 0.0, "perf/total_num_tokens": 900.0} for step in range(1, 21)}
    write(tmp_path / "b" / "metrics.jsonl", every)
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    page = browser.open((tmp_path / "page.html").as_uri() + "#x=tokens", width=1300, height=1000)
    settle(page)
    assert panel(page, "Training reward", "chart.data[1].filter(v => v != null)") == list(range(1, 21))
    assert page.complaints() == []


def test_the_axes_are_readable_in_another_colour_scheme(opened: headless.Page) -> None:
    drawn = "chart.ctx.canvas.toDataURL()"
    before = panel(opened, "Gradient norm", drawn)
    seen = []
    for scheme in ("dark", "light"):
        opened.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        settle(opened)
        settle(opened)
        seen.append(panel(opened, "Gradient norm", drawn))
    assert seen[0] != before == seen[1]
    assert opened.complaints() == []


def test_legend_smoothing_bands_and_log_are_kept_in_the_address(
    opened: headless.Page, browser: headless.Browser, tmp_path: Path
) -> None:
    blue, orange, green = compare.COLOURS[:3]
    opened.click("#legend button", 0)
    settle(opened)
    assert set(colours(opened, "Training reward")) == {orange, green}
    assert opened.run("[...document.querySelectorAll('#runs input')].filter(box => !box.checked).length") == 3
    slide(opened, 70)
    window = int(opened.texts("#window")[0].split()[0])
    assert window == round(10 ** (70 / 100)) and orange in colours(opened, "Training reward", RAW)
    opened.choose("#band", "runs")
    settle(opened)
    assert colours(opened, "Training reward").count(orange) == 3
    assert panel(opened, "Training reward", "chart.bands.length") == 0
    opened.choose("#band", "range")
    panel(opened, "Gradient norm", "node.querySelector('button.log').click()")
    settle(opened)
    ticks = panel(opened, "Gradient norm", "chart.axes[1]._values.filter(text => text !== null).map(Number)")
    assert len(ticks) >= 3 and all(b / a >= 1.9 for a, b in zip(ticks, ticks[1:], strict=False))
    panel(opened, "Entropy", "node.querySelector('button.log').click()")
    slide(opened, 0)
    # Those of alpha from step 10 to 20, and of the single run at step 10.
    assert "12 values are not above 0" in note(opened, "Entropy")
    assert panel(opened, "Entropy", "chart.data.flat().every(value => value == null || Number.isFinite(value))")
    address = opened.run("location.href")
    # By name: a number would be another run's once there are more of them.
    off = "new URLSearchParams(location.hash.slice(1)).getAll('off')"
    assert opened.run(off) == opened.run("data.runs.slice(0, 3).map(run => run.name)")
    again = browser.open(address, width=1300, height=2400)
    settle(again)
    for title in ("Training reward", "Gradient norm", "Entropy"):
        same = "chart.ctx.canvas.toDataURL() + node.querySelector('.note').textContent"
        assert panel(again, title, same) == panel(opened, title, same)
    assert again.run("[state.band, state.smooth, [...state.off], [...state.flip]]") == [
        "range",
        1,
        [0, 1, 2],
        ["actor/grad_norm", "actor/entropy"],
    ]
    opened.run("document.querySelectorAll('#legend button')[2].dispatchEvent(new MouseEvent('dblclick'))")
    settle(opened)
    assert set(colours(opened, "Training reward")) == {green}
    opened.run("document.querySelectorAll('#legend button')[2].dispatchEvent(new MouseEvent('dblclick'))")
    settle(opened)
    assert set(colours(opened, "Training reward")) == {blue, orange, green}
    opened.click("#log")
    settle(opened)
    assert opened.run("[...document.querySelectorAll('button.log[aria-pressed=true]')].length") == 4
    assert opened.complaints() == again.complaints() == []


def test_any_metric_can_be_chosen_and_names_are_text(
    opened: headless.Page, browser: headless.Browser, tmp_path: Path
) -> None:
    title = opened.run("document.title")
    assert title == f"Of {HOSTILE}" and opened.run("document.querySelector('h1').textContent") == title
    opened.click("#picker summary")
    assert len(opened.texts("#list label")) == 8
    opened.type("#search", "SCRIPT owned")
    opened.until("[...document.querySelectorAll('#list label')].filter(node => node.offsetParent).length === 1")
    opened.run("[...document.querySelectorAll('#list label')].find(node => node.offsetParent).firstChild.click()")
    settle(opened)
    assert (
        opened.texts("h2")[0] == "Chosen"
        and opened.run("document.querySelector('.panel strong').textContent") == HOSTILE
    )
    assert len(colours(opened, HOSTILE)) == 5
    opened.run("document.querySelectorAll('#list input')[data.metrics.indexOf('only/here')].click()")
    settle(opened)
    assert note(opened, "only/here") == "not logged by <b>beta, alpha"
    again = browser.open(opened.run("location.href"), width=1300, height=1600)
    settle(again)
    assert again.run("[...document.querySelectorAll('.panel strong')].slice(0, 2).map(node => node.textContent)") == [
        HOSTILE,
        "only/here",
    ]
    opened.click("button.remove", 0)
    settle(opened)
    assert opened.texts(".panel strong")[0] == "only/here"
    assert opened.run("document.querySelectorAll('img, b, main script').length") == 0
    assert opened.requests() == [(tmp_path / "report.html").as_uri()]
    assert opened.complaints() == again.complaints() == []
    opened.run("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/a.png'}))")
    opened.until("true")
    assert any("Content Security Policy" in text for text in opened.complaints())


def test_sections_unfold_and_what_is_below_is_drawn_on_the_way(browser: headless.Browser, tmp_path: Path) -> None:
    steps: Steps = {}
    for step in range(1, 4):
        steps[step] = {f"agent/{name}/score/mean": step / 3 for name in ("solver", "judge")}
        steps[step] |= {f"agent/{name}/turns": 8.0 for name in ("solver", "judge")}
        steps[step] |= {"mix/otb/share": 0.25, "mix/trloo/share": 0.75, "critic/score/mean": 1.0}
        steps[step] |= {f"mismatch/p_{number}/mean": number for number in range(30)}
    write(tmp_path / "run" / "metrics.jsonl", steps)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "dat')
    empty = tmp_path / "begun" / "metrics.jsonl"
    write(empty, {})
    assert cli.main(["report", str(tmp_path / "run"), str(empty.parent), "--out", str(tmp_path / "page.html")]) == 0
    page = browser.open((tmp_path / "page.html").as_uri(), width=500, height=700)
    settle(page)
    assert [text.split("\n")[0] for text in page.texts("h2")] == [
        "Reward",
        "Sampler and trainer",
        "Agents",
        "Components of the mix",
    ]
    assert page.texts(".panel strong") == [
        "Training reward",
        "judge: mean score of its turns",
        "solver: mean score of its turns",
        "mix/otb/share",
        "mix/trloo/share",
    ]
    assert page.texts("h2 button") == ["30 more", "2 more"]
    page.click("h2 button", 0)
    settle(page)
    assert len(page.texts(".panel")) == 35
    # Far below, and as high as it will be.
    assert panel(page, "mix/trloo/share", "chart === undefined && node.querySelector('.plot').clientHeight === 220")
    page.run("window.scrollTo(0, document.body.scrollHeight)")
    page.until("window.scrollY > 1000")
    settle(page)
    settle(page)
    assert len(colours(page, "mix/trloo/share")) == 1
    # Nothing is wider than a small window, and the damaged log is told of.
    assert page.run("document.documentElement.scrollWidth <= 500")
    assert (
        page.texts("#problems")[0].startswith(f"Left out: {empty}: not one metric in it.\nNot all of one run")
        and "line 4 is cut short" in page.texts("#runs td.problems")[0]
    )
    assert page.complaints() == []


def test_many_long_runs_make_a_page_of_bounded_size(browser: headless.Browser, tmp_path: Path) -> None:
    """10 runs of 1000 steps with 200 metrics."""
    for run in range(10):
        steps: Steps = {
            step: {f"group{k % 7}/metric_{k}": math.sin(step / (k + 1)) * (run + 1.2345678) for k in range(199)}
            for step in range(1, 1001)
        }
        for step in steps:
            steps[step]["critic/score/mean"] = step / 1000 + run / 10
        steps[437]["critic/score/mean"] = 50.0
        write(tmp_path / "runs" / f"c{run // 5}" / f"seed_{run % 5}" / "metrics.jsonl", steps)
    target = tmp_path / "page.html"
    assert cli.main(["report", str(tmp_path / "runs"), "--out", str(target)]) == 0
    assert target.stat().st_size < 16e6
    page = browser.open(target.as_uri(), width=1300, height=900)
    settle(page)
    assert len(colours(page, "Training reward")) == 2
    page.choose("#band", "range")
    settle(page)
    # The spike of one step is inside the band.
    assert page.run("Math.max(...lines(data.metrics.indexOf('critic/score/mean'), 1)[0].points.map(p => p.high))") == 50
    assert panel(page, "Training reward", DOTS) == 0
    assert "thinned out to the mean of" in page.texts("#about")[0]
    page.screenshot(tmp_path / "page.png")
    shot = matplotlib.image.imread(tmp_path / "page.png")[..., :3]
    for colour in compare.COLOURS[:2]:
        wanted = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        assert (abs(shot - wanted).max(axis=-1) < 0.01).sum() > 100
    assert page.complaints() == []
