# SPDX-License-Identifier: Apache-2.0
"""Preparing data sets: from small local folders in every form, and everything that may be wrong with them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_ext.cli import main as cli
from verl_ext.lab.reproduce import needs, plan, prepare
from verl_ext.lab.reproduce.catalogue import find_table, tables
from verl_ext.lab.reproduce.prepare import PrepareError, Source, find_source
from verl_ext.rewards.arguments import references

AIME = [{"id": n, "problem": f"What is {n} + 1?", "answer": str(n + 1), "url": ""} for n in range(30)]


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    """Records in the form that the file's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([dict(record) for record in records]), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(records)))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def sized(name: str, rows: int) -> Source:
    """A data set with another expected number of rows, so that a test need not make thousands."""
    return dataclasses.replace(find_source(name), rows=rows)


# --- forms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        "aime24.parquet",
        "aime24.jsonl",
        "aime24.json",
        "aime24.jsonl.gz",
        "aime24/part-0.parquet",
        "aime_2024/data/train-00000-of-00001.parquet",
    ],
)
def test_every_form_gives_the_same_rows(place: str, tmp_path: Path) -> None:
    write(tmp_path / "raw" / place, AIME)
    manifest = prepare.prepare(find_source("aime24"), tmp_path / "out", local=tmp_path / "raw")
    assert manifest["rows"] == manifest["expected"] == 30
    assert manifest["origin"] == str(tmp_path / "raw" / place)
    path = Path(plan.data_file("aime24", tmp_path / "out"))
    assert manifest["sha256"] == prepare.digest_of(path)
    assert rows_of(path)[7] == {
        "data_source": "aime24",
        "prompt": [{"role": "user", "content": f"What is 7 + 1?\n\n{prepare.BOXED}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "8"},
        "extra_info": {"index": 7},
    }
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == ["aime24.manifest.json", "aime24.parquet"]


def test_an_object_with_one_list_and_several_parquet_files(tmp_path: Path) -> None:
    (tmp_path / "aime24.json").write_text(json.dumps({"version": "1", "data": AIME}))
    assert list(prepare.read_file(tmp_path / "aime24.json")) == AIME
    write(tmp_path / "two" / "aime24" / "a.parquet", AIME[:11])
    write(tmp_path / "two" / "aime24" / "b.parquet", AIME[11:])
    prepare.prepare(find_source("aime24"), tmp_path / "out", local=tmp_path / "two")
    assert [row["extra_info"]["index"] for row in rows_of(tmp_path / "out" / "aime24.parquet")] == list(range(30))


def test_a_plain_question_is_the_question_alone(tmp_path: Path) -> None:
    write(tmp_path / "aime24.jsonl", AIME)
    prepare.prepare(find_source("aime24.plain"), tmp_path / "out", local=tmp_path)
    row = rows_of(tmp_path / "out" / "aime24.plain.parquet")[0]
    assert row["prompt"][0]["content"] == "What is 0 + 1?"
    assert row["data_source"] == "aime24", "the metrics of both variants have the same name"


def test_answers_in_a_list(tmp_path: Path) -> None:
    write(tmp_path / "olympiad_bench.jsonl", [{"problem": "Both roots?", "answer": ["1", "$\\frac{1}{2}$"]}])
    prepare.prepare(sized("olympiad_bench", 1), tmp_path / "out", local=tmp_path)
    (row,) = rows_of(tmp_path / "out" / "olympiad_bench.parquet")
    assert row["reward_model"]["ground_truth"] == "1, $\\frac{1}{2}$"


def test_what_lies_deeper_in_a_record_and_what_belongs_to_no_question(tmp_path: Path) -> None:
    """The forms of the papers' own data: verl's rows with a request at the end, worked answers, records without one."""
    request = "\n\nLet's think step by step and output the final answer within \\boxed{}."
    asked = {"prompt": [{"role": "user", "content": f"1 + 1?{request}"}], "reward_model": {"ground_truth": "2"}}
    write(tmp_path / "dapo_filter.jsonl", [asked, {**asked, "prompt": [{"role": "user", "content": "3?"}]}])
    prepare.prepare(find_source("dapo_filter.plain"), tmp_path / "out", local=tmp_path)
    rows = rows_of(tmp_path / "out" / "dapo_filter.plain.parquet")
    assert [row["prompt"][0]["content"] for row in rows] == ["1 + 1?", "3?"]
    assert rows[0]["reward_model"]["ground_truth"] == "2"

    write(tmp_path / "gsm8k_train.jsonl", [{"question": "How many?", "answer": "First 10.\n#### 1,000"}])
    prepare.prepare(sized("gsm8k_train", 1), tmp_path / "out", local=tmp_path)
    (row,) = rows_of(tmp_path / "out" / "gsm8k_train.parquet")
    assert row["reward_model"]["ground_truth"] == "1000"

    both = [{"extra_info": {"question": "a?", "answer": ""}}, {"extra_info": {"question": "b?", "answer": "b"}}]
    write(tmp_path / "simplerl_math35.jsonl", both)
    prepare.prepare(find_source("simplerl_math35"), tmp_path / "out", local=tmp_path)
    (row,) = rows_of(tmp_path / "out" / "simplerl_math35.parquet")
    assert row["reward_model"]["ground_truth"] == "b" and row["extra_info"]["index"] == 1

    write(tmp_path / "dapo_filter.jsonl", [{**asked, "prompt": []}])
    said = fails(find_source("dapo_filter"), tmp_path / "out", tmp_path)
    assert "record 0: nothing in the column 'prompt.0.content' (question)" in said


def test_questions_with_several_accepted_answers(tmp_path: Path) -> None:
    write(tmp_path / "nq" / "test.jsonl", [{"id": "1", "question": "who", "golden_answers": ["A. B.", "B"]}])
    prepare.prepare(sized("nq", 1), tmp_path / "out", local=tmp_path)
    (row,) = rows_of(tmp_path / "out" / "nq.parquet")
    assert references(row["reward_model"]["ground_truth"]) == ["A. B.", "B"]
    assert row["prompt"] == [{"role": "user", "content": "who"}]


def test_kernels(tmp_path: Path) -> None:
    task = {
        "prompt": [{"role": "user", "content": "Write it."}],
        "reward_model": {"ground_truth": "class Model: ...", "style": "rule"},
        "extra_info": {"entry_point": "Model", "uuid": "u1", "index": "x"},
        "data_source": "elsewhere",
    }
    write(tmp_path / "drkernel-rl-data.parquet", [task])
    prepare.prepare(sized("drkernel_rl", 1), tmp_path / "out", local=tmp_path)
    (row,) = rows_of(tmp_path / "out" / "drkernel_rl.parquet")
    assert row["prompt"] == task["prompt"] and row["reward_model"] == task["reward_model"]
    assert row["extra_info"] == {"index": 0, "entry_point": "Model", "uuid": "u1"}
    code = {"code": "import torch", "level": 2, "name": "2_Add", "problem_id": 2}
    write(tmp_path / "kernelbench_level2.json", [code])
    prepare.prepare(sized("kernelbench_level2", 1), tmp_path / "out", local=tmp_path)
    (row,) = rows_of(tmp_path / "out" / "kernelbench_level2.parquet")
    assert row["data_source"] == "kernelbench_level2" and row["reward_model"]["ground_truth"] == "import torch"
    assert row["extra_info"] == {"index": 0, "level": 2, "name": "2_Add", "problem_id": 2}


@pytest.mark.parametrize("name", ["wiki-18.jsonl", "wiki-18.jsonl.gz"])
def test_corpus_for_the_retriever(name: str, tmp_path: Path) -> None:
    from verl_ext.rollout.passages import read_corpus

    write(tmp_path / name, [{"id": "7", "contents": '"Seven"\nA number.'}, {"id": "8", "contents": '"Eight"\nMore.'}])
    manifest = prepare.prepare(find_source("wiki18"), tmp_path / "out", local=tmp_path)
    assert (manifest["rows"], manifest["expected"]) == (2, None)
    passages = read_corpus(tmp_path / "out" / "wiki18.jsonl")
    assert [(one.id, one.title, one.text) for one in passages] == [
        ("7", "Seven", "A number."), ("8", "Eight", "More."),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["alfworld_train", "alfworld_in", "alfworld_out", "webshop_train", "webshop_test"])
def test_environments_need_nothing(name: str, tmp_path: Path) -> None:
    source = find_source(name)
    first = prepare.prepare(source, tmp_path / "a")
    again = prepare.prepare(source, tmp_path / "b")
    assert first["rows"] == source.rows and first["sha256"] == again["sha256"]
    rows = rows_of(tmp_path / "a" / f"{name}.parquet")
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
    assert {row["data_source"] for row in rows} == {source.data_source}
    assert {row["agent_name"] for row in rows} == {"verl_ext_step_wise"}
    assert json.loads(rows[0]["extra_info"]["environment_kwargs"]) == source.kwargs
    count = source.draw["count"]
    for start in range(0, len(rows), count):
        seeds = [row["extra_info"]["env_seed"] for row in rows[start : start + count]]
        assert len(set(seeds)) == count and max(seeds) < source.draw["below"]
    if name in ("alfworld_train", "webshop_train"):
        assert len(rows) == 160 * 16


def test_webshops_test_reward_is_the_score() -> None:
    """The metric multiplies the logged reward by 10: a reward of reward_scale 10 times a score of 1 is 100 points."""
    scale = find_table("hgpo/webshop").full
    assert find_source("webshop_test").kwargs["reward"] == "score"
    assert scale.overrides["verl_ext.environment.reward_scale"] * scale.metrics["score"].times == 100


def test_verl_can_put_a_tables_files_together(tmp_path: Path) -> None:
    """verl concatenates the files of a split, which fails where two have other columns or types."""
    import datasets

    write(tmp_path / "nq_train.jsonl", [{"question": "who", "golden_answers": ["A"]}])
    write(tmp_path / "hotpotqa_train.jsonl", [{"question": "is it", "golden_answers": ["yes", "y"], "metadata": {}}])
    for name in ("nq_train", "hotpotqa_train"):
        prepare.prepare(sized(name, 1), tmp_path / "out", local=tmp_path)
    for name in ("alfworld_in", "alfworld_out"):
        prepare.prepare(find_source(name), tmp_path / "out")
    for names, rows in ((("nq_train", "hotpotqa_train"), 2), (("alfworld_in", "alfworld_out"), 768)):
        files = [plan.data_file(name, tmp_path / "out") for name in names]
        parts = [datasets.load_dataset("parquet", data_files=one, cache_dir=str(tmp_path))["train"] for one in files]
        assert len(datasets.concatenate_datasets(parts)) == rows


def test_the_hubs_way_of_reading(tmp_path: Path) -> None:
    """The `datasets` library itself, on a folder instead of a hub's name."""
    write(tmp_path / "repository" / "train.jsonl", AIME)
    source = dataclasses.replace(find_source("aime25"), hub=str(tmp_path / "repository"))
    manifest = prepare.prepare(source, tmp_path / "out")
    assert manifest["rows"] == 30 and str(tmp_path / "repository") in manifest["origin"]


# --- what may be wrong --------------------------------------------------------------------------------------------


def fails(source: Source, folder: Path, local: Path | None, *, any_count: bool = False) -> str:
    """The message; nothing is left behind."""
    before = {path.name for path in folder.iterdir()} if folder.exists() else set()
    with pytest.raises(PrepareError) as caught:
        prepare.prepare(source, folder, local=local, table="dr_mas/math", any_count=any_count)
    assert ({path.name for path in folder.iterdir()} if folder.exists() else set()) == before
    return str(caught.value)


@pytest.mark.parametrize("rows", [29, 31, 0])
def test_another_number_of_rows(rows: int, tmp_path: Path) -> None:
    write(tmp_path / "aime24.jsonl", (AIME * 2)[:rows])
    message = fails(find_source("aime24"), tmp_path / "out", tmp_path)
    if rows:
        assert f"gives {rows} rows; 30 are expected (secondary)" in message and "--any-count" in message
        manifest = prepare.prepare(find_source("aime24"), tmp_path / "out", local=tmp_path, any_count=True)
        assert (manifest["rows"], manifest["expected"]) == (rows, 30)
    else:
        assert "holds no record" in message


@pytest.mark.parametrize("place", ["aime24.parquet", "aime24.jsonl", "aime24.json", "aime24.jsonl.gz"])
def test_a_file_that_is_cut_short(place: str, tmp_path: Path) -> None:
    path = write(tmp_path / place, AIME)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    message = fails(find_source("aime24"), tmp_path / "out", tmp_path, any_count=True)
    assert place in message and "cut short" in message


def test_a_record_of_another_form(tmp_path: Path) -> None:
    write(tmp_path / "kernelbench_level1.jsonl", [{"code": "c", "level": "one", "name": "n", "problem_id": 1}])
    message = fails(find_source("kernelbench_level1"), tmp_path / "out", tmp_path)
    assert "kernelbench_level1, record 0: not of the expected form" in message
    write(tmp_path / "drkernel_rl.jsonl", [{"prompt": "p", "reward_model": "none", "extra_info": {}}])
    message = fails(find_source("drkernel_rl"), tmp_path / "out", tmp_path)
    assert "drkernel_rl, record 0: not of the expected form" in message


def test_a_record_without_a_column(tmp_path: Path) -> None:
    write(tmp_path / "aime24.jsonl", [*AIME[:3], {"problem": "?", "solution": "4"}])
    message = fails(find_source("aime24"), tmp_path / "out", tmp_path)
    assert "aime24, record 3: no column 'answer' (answer); the record has problem, solution" in message
    write(tmp_path / "aime24.jsonl", [{"problem": " ", "answer": "4"}])
    assert "nothing in the column 'problem'" in fails(find_source("aime24"), tmp_path / "out", tmp_path)
    (tmp_path / "aime24.jsonl").write_text("[1]\n")
    assert "record 1: an object is expected" in fails(find_source("aime24"), tmp_path / "out", tmp_path)


def test_a_missing_data_set_says_both_ways(tmp_path: Path) -> None:
    message = fails(find_source("minerva_math.plain"), tmp_path / "out", tmp_path)
    assert message.startswith(f"minerva_math.plain (Minerva mathematics) is not in {tmp_path}. With a network: ")
    assert "minerva_math.parquet" in message and "simplerl-minerva-math/data/test-" in message
    assert "With a network: verl-ext reproduce prepare dr_mas/math --only minerva_math.plain." in message
    assert "--from FOLDER" in message
    assert f"is not in {tmp_path / 'none'}." in fails(find_source("aime24"), tmp_path / "out", tmp_path / "none")
    assert "not fetched from a hub. Get it with" in fails(find_source("wiki18"), tmp_path / "out", None)


@pytest.mark.seconds
def test_no_network(tmp_path: Path) -> None:
    """A whole process that may not use the network; what needs none is prepared all the same."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "VERL_EXT_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "verl_ext.cli", "reproduce", "prepare", "dr_mas/search", "--only", "bamboogle"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "bamboogle (Bamboogle, test): the hub's RUC-NLPIR/FlashRAG_datasets (configuration bamboogle, split test) " \
        "cannot be fetched" in done.stderr  # fmt: skip
    assert "Without: verl-ext reproduce prepare dr_mas/search --only bamboogle --from FOLDER" in done.stderr
    assert "0 of 1 data sets are ready; missing: bamboogle" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "data").glob("*"))


def test_what_was_prepared_is_checked_when_it_is_used_again(tmp_path: Path) -> None:
    write(tmp_path / "aime24.jsonl", AIME)
    source, out = find_source("aime24"), tmp_path / "out"
    assert prepare.verify("aime24", out) is None
    manifest = prepare.prepare(source, out, local=tmp_path)
    (tmp_path / "aime24.jsonl").unlink()
    assert prepare.prepare(source, out, local=tmp_path) == prepare.verify("aime24", out) == manifest
    path, beside = prepare.target_of(source, out), prepare.manifest_of(source, out)
    good = path.read_bytes()

    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert "is not what was prepared (its sha256 differs" in fails(source, out, tmp_path)
    assert f"Delete {path} and aime24.manifest.json, then prepare it again." in fails(source, out, tmp_path)
    path.write_bytes(good)
    beside.write_text(json.dumps({**manifest, "definition": "0"}))
    assert "prepared by another definition" in fails(source, out, tmp_path)
    beside.write_text("{")
    assert "cannot be read as a manifest" in fails(source, out, tmp_path)
    beside.unlink()
    assert f"{beside} is missing" in fails(source, out, tmp_path)
    path.unlink()
    assert prepare.verify("aime24", out) is None


def test_the_definition_covers_what_decides_the_rows() -> None:
    source = find_source("aime24")
    changes: list[dict[str, Any]] = [
        {"name": "aime24.plain"},
        {"split": "test"},
        {"columns": {"question": "problem", "answer": "solution"}},
        {"draw": {"count": 1}},
    ]
    assert len({source.digest, *(dataclasses.replace(source, **change).digest for change in changes)}) == 5
    assert dataclasses.replace(source, title="other", note="other").digest == source.digest


# --- the list of sources and the command --------------------------------------------------------------------------

COLUMNS = {
    "math": ("question", "answer"),
    "qa": ("question", "answers"),
    "kernel_task": ("messages", "reward_model", "extra_info"),
    "kernel_code": ("code", "level", "name", "number"),
    "corpus": ("text",),
    "environment": (),
}


def test_every_source_is_used_and_told() -> None:
    used = {name.removesuffix(prepare.PLAIN) for table in tables() for name in table.full.data_names}
    for name in prepare.source_names():
        source = find_source(name)
        assert name in used or source.tables, f"no table has {name}"
        assert source.title and (source.rows is None or source.rows > 0)
        assert source.hub is None or source.split, f"{name}: a hub's data set needs a split"
        assert source.kind == "environment" or source.files
        assert set(COLUMNS[source.kind]) <= source.columns.keys()
    with pytest.raises(PrepareError, match=r"unknown data set 'aime_24'; did you mean 'aime24'\?"):
        find_source("aime_24")
    with pytest.raises(PrepareError, match="unknown data set 'nq.plain'"):
        find_source("nq.plain")


@pytest.mark.slow
def test_the_command_prepares_what_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VERL_EXT_HOME", str(tmp_path / "home"))
    for name in ("aime24", "aime25"):
        write(tmp_path / f"{name}.jsonl", AIME)
    assert cli(["reproduce", "prepare", "otb", "--from", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert f"aime24: 30 rows in {tmp_path}/home/data/aime24.parquet, from {tmp_path}/aime24.jsonl" in said.out
    assert "license not known" in said.out
    assert "2 of 3 data sets are ready; missing: dapo_math" in said.err
    lacking = [str(one) for one in needs.lacks(find_table("otb"), find_table("otb").full, [])]
    assert any("no data dapo_math in" in one and "verl-ext reproduce prepare otb/samples" in one for one in lacking)

    write(tmp_path / "dapo_math.jsonl", [{"prompt": "1 + 1?", "solution": "2"}])
    assert cli(["reproduce", "prepare", "otb", "--from", str(tmp_path)]) == 1
    assert "gives 1 rows; 17398 are expected" in capsys.readouterr().err
    assert cli(["reproduce", "prepare", "otb", "--from", str(tmp_path), "--any-count"]) == 0
    said = capsys.readouterr()
    assert "dapo_math: 1 rows (17398 expected)" in said.out and "aime24.parquet, checked" in said.out
    assert not [one for one in needs.lacks(find_table("otb"), find_table("otb").full, []) if "data" in str(one)]


@pytest.mark.seconds
def test_the_command_takes_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--out", str(tmp_path)]
    assert cli(["reproduce", "prepare", "hgpo", "--only", "alfworld_in", "--only", "alfworld_out", *where]) == 0
    assert len(list(tmp_path.glob("*.parquet"))) == 2
    assert cli(["reproduce", "prepare", "hgpo", "--only", "alfword_in", *where]) == 1
    assert "'alfword_in' is not a data set of hgpo/alfworld; did you mean 'alfworld_in'?" in capsys.readouterr().err
    assert cli(["reproduce", "prepare", "hgpo", "--from", str(tmp_path / "raw"), *where]) == 1
    assert f"--from {tmp_path / 'raw'}: there is no such folder" in capsys.readouterr().err
    write(tmp_path / "raw" / "wiki-18.jsonl", [{"id": 1, "contents": "x"}])
    assert (
        cli(["reproduce", "prepare", "dr_mas/search", "--only", "wiki18", "--from", str(tmp_path / "raw"), *where]) == 0
    )
    assert (tmp_path / "wiki18.jsonl").is_file()


@pytest.mark.seconds
def test_problems_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x * {number}
def get_inputs():
    return [torch.rand({number}, 1 << {number})]
def get_init_inputs():
    return []
"""
    folder = tmp_path / "KernelBench" / "level1"
    folder.mkdir(parents=True)
    for number in (2, 10, 40):
        (folder / f"{number}_Scale.py").write_text(code.format(number=number))
    monkeypatch.setattr(prepare, "find_source", lambda name: sized(name, 3))
    one, out = "kernelbench_level1", tmp_path / "out"
    assert prepare.main(find_table("trloo/kernelbench"), tmp_path, [one], out, False, memory_mb=64) == 0
    rows = rows_of(out / f"{one}.parquet")
    assert [row["extra_info"]["name"] for row in rows] == ["2_Scale", "10_Scale", "40_Scale"]
    assert rows[1]["extra_info"] == {"index": 1, "level": 1, "name": "10_Scale", "problem_id": 10}
    assert rows[1]["reward_model"]["ground_truth"] == code.format(number=10)
    said = capsys.readouterr().out
    assert f"{one}: 3 rows in" in said and f"{one}: 2 of 3 problems can be played here with memory_mb=64" in said
    assert "kernelbench-1-2: can be played here, about 0 MiB" in said
    assert "kernelbench-1-40 needs about 671088640 MiB in a player" in said
