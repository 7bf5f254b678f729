# SPDX-License-Identifier: Apache-2.0
"""Readers of verl's logs, on files that verl's own `Tracking` writes with tensorboard and wandb."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import copies
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.summary.writer.record_writer import RecordWriter

from verl_ext.lab.pages.html_page import page
from verl_ext.lab.report import compare
from verl_ext.lab.report.data import page_data
from verl_ext.lab.report.logs import LogError, RunLog, find_runs, read_run

STEPS = 12

WRITER = """
import sys
import numpy as np
from verl.utils.tracking import Tracking

tracking = Tracking("project", "an experiment", ["file", "tensorboard", "wandb"], config={"trainer": {}})
for step in range(int(sys.argv[1])):
    metrics = {"actor/grad_norm": step * 0.37 - 1.0, "perf/total_num_tokens": 1000 + step, "np": np.float32(0.1) * step}
    metrics.update({"nan": float("nan"), "inf": float("inf"), "minus": float("-inf"), "flag": True})
    # One record of wandb is longer than a block of its file.
    metrics.update({f"long/{'x' * 300}/{number}": step * number for number in range(150)})
    if step % 5 == 0:
        metrics["val-core/task/reward/mean@4"] = step / 10
    tracking.log(metrics, step=step)
tracking.finish()
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the logs of one run: ``metrics.jsonl``, ``events/`` and ``wandb/``."""
    folder = tmp_path_factory.mktemp("logs")
    environment = {
        **os.environ,
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
        "TENSORBOARD_DIR": str(folder / "events"),
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "VERL_USE_EXTERNAL_MODULES": "",
    }
    done = copies.python("-c", WRITER, STEPS, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def source_of(folder: Path, source: str) -> Path:
    return {"jsonl": folder, "tensorboard": folder / "events", "wandb": folder / "wandb"}[source]


@pytest.mark.seconds
@pytest.mark.parametrize("source", ["jsonl", "tensorboard", "wandb"])
def test_a_run_reads_the_same_from_each_logger(written: Path, source: str) -> None:
    run = read_run(source_of(written, source))
    assert run.source == source and run.problems == [] and list(run.steps) == list(range(STEPS))
    assert run.name == ("an experiment" if source == "wandb" else "")
    for step, values in run.steps.items():
        assert values["actor/grad_norm"] == pytest.approx(step * 0.37 - 1.0, rel=1e-6)
        assert values["perf/total_num_tokens"] == 1000 + step and values["flag"] == 1.0
        assert values["np"] == pytest.approx(0.1 * step, rel=1e-6)
        assert all(values[f"long/{'x' * 300}/{number}"] == step * number for number in range(150))
        assert math.isnan(values["nan"])
        # verl's file logger writes null for all three.
        infinite = [values["inf"], values["minus"]]
        assert infinite == [math.inf, -math.inf] if source != "jsonl" else all(map(math.isnan, infinite))
    assert run.curves["val-core/task/reward/mean@4"].to_dict() == pytest.approx({0: 0.0, 5: 0.5, 10: 1.0})
    assert len(run.curves) == 158


@pytest.mark.parametrize("source", ["jsonl", "tensorboard", "wandb"])
def test_a_file_cut_short_is_read_as_far_as_it_goes(written: Path, source: str, tmp_path: Path) -> None:
    whole = read_run(source_of(written, source))
    file = whole.path if whole.path.is_file() else next(whole.path.iterdir())
    content = file.read_bytes()
    copy = tmp_path / file.name
    for cut in (len(content) - 2, len(content) - 5, len(content) * 2 // 3, len(content) // 2 + 7):
        copy.write_bytes(content[:cut])
        run = read_run(copy)
        assert len(run.problems) == 1 and "cut short" in run.problems[0] and str(copy) in run.problems[0]
        assert 5 <= len(run.steps) <= STEPS
        for step, values in list(run.steps.items())[:-1]:
            assert values == pytest.approx(whole.steps[step], nan_ok=True)
        last = max(run.steps)
        assert last + 1 == len(run.steps)
        assert run.steps[last].items() <= whole.steps[last].items() or source == "jsonl" or "nan" in run.steps[last]


@pytest.mark.parametrize("source", ["tensorboard", "wandb"])
def test_a_damaged_file_is_read_as_far_as_it_is_sound(written: Path, source: str, tmp_path: Path) -> None:
    whole = read_run(source_of(written, source))
    file = whole.path if whole.path.is_file() else next(whole.path.iterdir())
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = bytes(400)
    (tmp_path / file.name).write_bytes(content)
    run = read_run(tmp_path)
    assert len(run.problems) == 1 and ("damaged" in run.problems[0] or "cannot be read" in run.problems[0])
    assert run.steps[0] == pytest.approx(whole.steps[0], nan_ok=True) and 3 <= len(run.steps) < STEPS


@pytest.mark.seconds
def test_any_byte_of_an_event_file_may_be_wrong(written: Path, tmp_path: Path) -> None:
    content = next((written / "events").iterdir()).read_bytes()[:500]
    copy = tmp_path / "x.tfevents.1"
    copy.write_bytes(content)
    sound, unreadable = read_run(copy).steps, 0
    for position in range(len(content)):
        for byte in (0x08, 0x12):
            if content[position] == byte:
                continue
            copy.write_bytes(content[:position] + bytes([byte]) + content[position + 1 :])
            try:
                run = read_run(copy)
            except LogError as error:
                assert "damaged" in str(error)
                continue
            # Each record has a sum of its own: what is read is right, and the rest is told of.
            unreadable += 1
            assert len(run.problems) == 1 and ("damaged" in run.problems[0] or "cut short" in run.problems[0])
            for step, values in run.steps.items():
                assert values == pytest.approx({name: sound[step][name] for name in values}, rel=0, abs=0, nan_ok=True)
    assert len(sound[0]) >= 3 and unreadable > 10


def test_a_sound_record_that_holds_no_message_is_told_of(tmp_path: Path) -> None:
    event = Event(step=3, summary=Summary(value=[Summary.Value(tag="a", simple_value=2.0)]))
    with (tmp_path / "x.tfevents.1").open("wb") as file:
        for record in (event.SerializeToString(), b"\xff\xff", event.SerializeToString()):
            RecordWriter(file).write(record)
    run = read_run(tmp_path)
    assert run.steps == {3: {"a": 2.0}} and len(run.problems) == 1 and "cannot be read" in run.problems[0]


def test_what_is_no_log_is_said(tmp_path: Path) -> None:
    for name, content, words in (
        ("run-a.wandb", b"not wandb", "does not begin like a wandb file"),
        ("run-b.wandb", b"", "does not begin like a wandb file"),
        ("x.tfevents.1", b"not events" * 9, "not an event file"),
        ("x.tfevents.2", b"", "not one metric"),
        ("metrics.jsonl", b"[1]\nnull\n", "2 lines are not"),
        ("notes.txt", b"text", "neither a jsonl"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(LogError, match=words) as caught:
            read_run(tmp_path / name)
        assert name in str(caught.value)
    with pytest.raises(LogError, match="no such file or folder"):
        read_run(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LogError, match=r"no metrics in it or below it.*trainer\.logger"):
        read_run(tmp_path / "empty")


@pytest.mark.seconds
def test_runs_of_all_loggers_beside_each_other(written: Path, tmp_path: Path) -> None:
    runs = compare.load([written, written / "events", written / "wandb"])
    assert [run.log.source for run in runs] == ["jsonl", "tensorboard", "wandb"]
    assert [run.name for run in runs] == [written.name, f"{written.name}/events", "an experiment"]
    sections = compare.sections(runs)
    assert [panel.metric for panel in sections[0].panels] == ["val-core/task/reward/mean@4"]
    html = page("verl_ext.lab.report", title="three", data=page_data(runs, sections, title="three"))
    text = html.split('id="data">')[1].split("</script>")[0]
    infinite = json.loads(text)["metrics"].index("inf")
    values = [series[str(infinite)]["v"][0] for series in json.loads(text)["series"]]
    assert values == [None, "Infinity", "Infinity"]


def lines(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def entry(step: int, **data: object) -> dict[str, object]:
    return {"step": step, "data": data}


def test_jsonl_with_lines_of_another_kind(tmp_path: Path) -> None:
    path = lines(tmp_path / "metrics.jsonl", entry(0, a=1), {"other": 1}, entry(1, a=2, text="x", list=[1], none=None))
    with path.open("a") as file:
        file.write('\n{"step": true, "data": {}}\n{"step": 2, "data": {"a"')
    run = read_run(path)
    assert list(run.steps) == [0, 1] and run.steps[0] == {"a": 1.0}
    assert set(run.steps[1]) == {"a", "none"} and math.isnan(run.steps[1]["none"])
    assert ["line 6 is cut short" in run.problems[0], "2 lines are not" in run.problems[1]] == [True, True]
    assert "line 2, 5" in run.problems[1]


def test_the_later_value_of_a_step_wins_and_steps_that_go_back_are_said(tmp_path: Path) -> None:
    records = [entry(1, a=1, b=1), entry(1, a=2), entry(2, a=3), entry(1, a=9), entry(3, a=4)]
    path = lines(tmp_path / "metrics.jsonl", *records)
    run = read_run(path)
    assert run.steps == {1: {"a": 9.0, "b": 1.0}, 2: {"a": 3.0}, 3: {"a": 4.0}}
    assert len(run.problems) == 1 and "from 2 to 1 in line 4" in run.problems[0]
    # Or a step back is a run anew: what was logged from there on is an earlier one's.
    run = read_run(path, anew=True)
    assert run.steps == {1: {"a": 9.0}, 3: {"a": 4.0}} and "only what is before step 1 is used" in run.problems[0]
    records = [entry(1, x=1), entry(2, x=2), entry(3, x=3), entry(2, x=20), entry(2, y=5)]
    run = read_run(lines(path, *records), anew=True)
    assert run.steps == {1: {"x": 1.0}, 2: {"x": 20.0, "y": 5.0}} and "from 3 to 2 in line 4" in run.problems[0]
    assert read_run(lines(path, *records[:3]), anew=True).problems == []


def test_runs_are_found_in_folders(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for seed in (0, 10, 9):
        lines(root / "cell" / f"seed_{seed}" / "metrics.jsonl", entry(1, a=seed))
        lines(root / "cell" / f"seed_{seed}" / "rollouts" / "1.jsonl", entry(1, a=5))
    lines(root / "project" / "one.jsonl", entry(1, a=1))
    lines(root / "project" / "two.jsonl", entry(1, a=2))
    lines(root / "project" / "two.1.jsonl", entry(1, a=3))  # moved aside by a later run
    lines(root / "project" / "rows.jsonl", {"uid": "x"})  # something else
    (root / "cell" / "latest").symlink_to("seed_10")
    (root / "cell" / "round").symlink_to(".")
    names = [str(path.relative_to(root)) for path in find_runs(root)]
    assert names == [
        *(f"cell/seed_{seed}/metrics.jsonl" for seed in (0, 9, 10)),
        "project/one.jsonl",
        "project/two.jsonl",
    ]
    with pytest.raises(LogError, match=r"holds the metrics of 3 runs; name one of them: .*seed_0.*seed_9"):
        read_run(root / "cell")
    run = read_run(root / "cell" / "seed_9")
    assert isinstance(run, RunLog) and run.steps == {1: {"a": 9.0}}
    assert run.path == root / "cell" / "seed_9" / "metrics.jsonl"


def test_an_interrupted_resume_is_whole(tmp_path: Path) -> None:
    """A resume copies the lines aside before it writes them anew; both files are there if it is killed between."""
    lines(tmp_path / "metrics.jsonl.keep", entry(1, a=1), entry(2, a=2))
    assert list(read_run(tmp_path).steps) == list(read_run(find_runs(tmp_path)[0]).steps) == [1, 2]
    lines(tmp_path / "metrics.jsonl", entry(1, a=1))
    run = read_run(tmp_path / "metrics.jsonl")
    assert list(run.steps) == [1, 2] and run.problems == []


def test_event_files_of_a_resume_and_tensors(tmp_path: Path) -> None:
    """A folder of tensorboard with the files of two starts; scalars as values and as tensors, beside a text."""
    for start, offset in ((3, 0.0), (1, 100.0)):
        writer = EventFileWriter(str(tmp_path), filename_suffix=f".{int(offset)}")
        for step in range(start, start + 3):
            tensor = TensorProto(dtype=1, float_val=[step + offset])
            double = TensorProto(dtype=2, tensor_content=struct.pack("<d", step - 0.5))
            text = TensorProto(dtype=7, string_val=[b"words"])
            values = [
                Summary.Value(tag="plain", simple_value=step + offset),
                Summary.Value(tag="tensor", tensor=tensor),
                Summary.Value(tag="double", tensor=double),
                Summary.Value(tag="text", tensor=text),
            ]
            writer.add_event(Event(wall_time=1.0, step=step, summary=Summary(value=values)))
        writer.close()
    run = read_run(tmp_path)
    assert run.path == tmp_path and list(run.steps) == [1, 2, 3, 4, 5]
    (problem,) = run.problems
    assert "steps go back from 5 to 1: two runs of one name? The later value wins" in problem
    assert [run.steps[step]["plain"] for step in run.steps] == [101.0, 102.0, 103.0, 4.0, 5.0]
    for step, values in run.steps.items():
        assert set(values) == {"plain", "tensor", "double"}
        assert values["tensor"] == values["plain"] and values["double"] == step - 0.5


def test_event_files_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    """tensorboard's files of a run, of another one of its name, and of the other's resume, which validates first."""
    for number, (name, steps) in enumerate((("old", range(6)), ("new", range(4)), ("resumed", range(3, 6)))):
        writer = EventFileWriter(str(tmp_path), filename_suffix=f".{number}")
        for step in steps:
            validates = step == steps[0]
            values = [Summary.Value(tag=f"val-core/{name}" if validates else name, simple_value=step)]
            writer.add_event(Event(wall_time=1.0, step=step, summary=Summary(value=values)))
        writer.close()
    mixed, own = read_run(tmp_path), read_run(tmp_path, anew=True)
    assert [one.rpartition(": steps")[2] for one in mixed.problems] == [
        " go back from 5 to 1: two runs of one name? The later value wins"
    ]
    assert "Of the earlier one only what is before step 1 is used" in own.problems[0] and "old" in mixed.curves
    assert {name: list(curve) for name, curve in own.curves.items()} == {
        "val-core/new": [0], "new": [1, 2, 3], "val-core/resumed": [3], "resumed": [4, 5],
    }  # fmt: skip
