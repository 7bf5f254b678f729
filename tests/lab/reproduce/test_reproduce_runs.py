# SPDX-License-Identifier: Apache-2.0
"""Commands of cells, run folders, and `verl-ext reproduce` up to the start of the trainer."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from otb_runs import CELL, LAPTOP, OTB, begin, finish, log, run_of

from verl_ext.cli import main
from verl_ext.common.overrides import hydra_value
from verl_ext.lab.reproduce import command, needs, plan, ray_jobs, runs
from verl_ext.lab.reproduce import run as starting
from verl_ext.lab.reproduce.catalogue import find_table, scale_of
from verl_ext.lab.reproduce.run import INTERRUPTED
from verl_ext.lab.reproduce.run import run as run_here
from verl_ext.sandbox import check

# --- commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (None, "null"),
        (1e-6, "1e-06"),
        ("1e-6", "1e-6"),
        (["a", 1], "[a,1]"),
        ({"a": [1, "b c"]}, "{a:[1,'b c']}"),
        ("pkg://verl_ext.rewards.math", "pkg://verl_ext.rewards.math"),
        ("${oc.env:X}/a", "${oc.env:X}/a"),
        ("it's", r"'it\'s'"),
        ("a,b", "'a,b'"),
        ("", "''"),
        ("{a}", "'{a}'"),
    ],
)
def test_values_mean_the_same_on_hydras_command_line(value: Any, text: str) -> None:
    assert hydra_value(value) == text
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(f"key={text}").value()
    expected = 1e-6 if value == "1e-6" else value
    assert json.loads(json.dumps(parsed, default=str)) == expected


def test_overrides_of_a_cell_win_and_stand_once() -> None:
    assert plan.merged({"a.b": 1, "+c": 2}, {"c": 3}, {"++a.b": 4}) == {"++a.b": 4, "+c": 3}


def test_the_full_command_holds_cell_seed_place_and_data(tmp_path: Path) -> None:
    words = plan.full_words(OTB, OTB.full.cells["group_mean_n32"], 2, tmp_path, tmp_path / "data", steps=7)
    found = dict(word.split("=", 1) for word in words)
    assert words[0] == "+recipe=[grpo]" and len(found) == len(words)
    assert found["actor_rollout_ref.rollout.n"] == "32" and found["trainer.total_training_steps"] == "7"
    assert found["data.seed"] == found["actor_rollout_ref.rollout.seed"] == "2"
    assert found["data.train_files"] == f"[{tmp_path}/data/dapo_math.parquet]"
    assert found["trainer.max_actor_ckpt_to_keep"] == "2", "verl keeps all of them otherwise"
    assert found["trainer.resume_mode"] == "auto" and found["trainer.default_local_dir"].startswith(str(tmp_path))
    assert found["trainer.n_gpus_per_node"] == str(OTB.full.hardware and OTB.full.hardware.gpus_per_node)


def test_inputs_are_left_to_the_shell_in_print_and_filled_in_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"SERVER": "an address"}
    assert plan.expand("a=$SERVER/${SERVER}/$SERVERS", inputs, {"SERVER": "x"}) == "a=x/x/$SERVERS"
    assert plan.expand("a=$SERVER", inputs, {}) == "a=$SERVER" and plan.expand("a=$B", {}, {"B": "x"}) == "a=$B"
    word = 'a=$SERVER ${SERVER} ${oc.env:HOME} $OTHER "q" `b` \\n'
    done = subprocess.run(
        ["bash", "-c", f"printf %s {plan.shell_word(word, inputs)}"],
        env={"SERVER": "x y", "OTHER": "o"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == 'a=x y x y ${oc.env:HOME} $OTHER "q" `b` \\n'
    assert shlex.split(plan.shell_word("a=$SERVER b")) == ["a=$SERVER b"]


def test_settings_tell_configurations_apart_and_nothing_else(tmp_path: Path) -> None:
    for scale in (OTB.full, LAPTOP):
        cell = scale.cells["otb_n4"]
        settings = plan.settings(OTB, scale, cell)
        assert settings == plan.settings(OTB, scale, cell)
        assert not any(str(tmp_path.anchor) + "checkpoints" in value for value in settings.values())
        assert not {"data.seed", "trainer.total_training_steps", "trainer.experiment_name"} & set(settings)
        other = dataclasses.replace(cell, overrides={**cell.overrides, "actor_rollout_ref.rollout.n": 8})
        after = plan.settings(OTB, scale, other)
        assert plan.differences(settings, after) == ["actor_rollout_ref.rollout.n: was 4, is 8"]
        assert "recipe/otb.yaml" in settings
    assert plan.differences({"recipe/otb.yaml": "0"}, {"recipe/otb.yaml": "1", "b": "2"}) == [
        "b: was not set, is 2",
        "the file recipe/otb.yaml says something else",
    ]


def test_cost_in_words() -> None:
    cells = list(LAPTOP.cells.values())
    runs_of = f"{len(cells)} cells x {len(LAPTOP.seeds)} seeds"
    whole = plan.cost(dataclasses.replace(LAPTOP, minutes=30.0), cells, LAPTOP.seeds)
    assert whole == f"{runs_of}, {LAPTOP.steps} steps each; CPU only; about 30 minutes on 2 cores"
    short = plan.cost(dataclasses.replace(LAPTOP, minutes=30.0, steps=20), cells, LAPTOP.seeds, steps=2)
    assert short == f"{runs_of}, 2 steps each; CPU only; about 3 minutes on 2 cores"
    one = plan.cost(dataclasses.replace(LAPTOP, minutes=3.3 * len(cells) * len(LAPTOP.seeds)), cells[:1], (0,))
    assert one.startswith("1 cell x 1 seed,") and "about 4 minutes" in one
    mas = find_table("dr_mas").full
    assert "38 hours a cell and seed (abstract-or-blog" in plan.cost(mas, list(mas.cells.values()), mas.seeds)
    assert f"; {38 * 4 * len(mas.cells) * 3} GPU-hours in all" in plan.cost(mas, list(mas.cells.values()), (0, 1, 2))
    assert "not stated" in plan.cost(OTB.full, [OTB.full.cells["otb_n4"]], (0,))


# --- run folders --------------------------------------------------------------------------------------------------


def test_a_run_begins_goes_on_and_is_complete(tmp_path: Path) -> None:
    folder = begin(tmp_path)
    assert folder == tmp_path / "otb.samples" / "laptop" / "otb_n4" / "seed_0"
    record = json.loads((folder / "cell.json").read_text())
    assert (record["table"], record["scale"], record["cell"], record["seed"]) == ("otb/samples", "laptop", "otb_n4", 0)
    assert (record["state"], record["steps"], record["extra"]) == ("started", 2, [])
    assert {"verl_ext", "verl", "torch"} <= set(record["versions"])
    assert record["settings"] == plan.settings(OTB, LAPTOP, CELL)
    (run,) = runs.find_runs(tmp_path, OTB, LAPTOP)
    assert (run.cell, run.seed, run.record["state"], run.problems) == ("otb_n4", 0, runs.STARTED, [])
    log(folder, 0, 1)
    assert not run_of(tmp_path).examine()
    log(folder, 2)
    run_of(tmp_path).end(runs.COMPLETE, 0, 1.5)
    (run,) = runs.find_runs(tmp_path, OTB, LAPTOP)
    assert (
        run.record["state"] == runs.COMPLETE
        and runs.steps_of(run.path) == 2
        and run.problems == []
        and run.record["versions"] == record["versions"]
    )
    assert run_of(tmp_path).examine()
    assert run_of(tmp_path, steps=1).examine(), "a longer run is one of fewer steps as well"
    assert not run_of(tmp_path, steps=3).examine(), "more steps: it goes on"
    begin(tmp_path, steps=3)
    after = json.loads((folder / "cell.json").read_text())
    assert after["seconds"] == 1.5 and after["started"] == record["started"] and after["steps"] == 3


def test_a_run_remembers_all_versions_that_it_was_made_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, versions in enumerate(({"torch": "12.9"}, {"torch": "2.9"}, {"torch": "2.9", "ray": "2"})):
        monkeypatch.setattr(runs, "versions", lambda versions=versions: versions)
        log(begin(tmp_path), number)
    assert run_of(tmp_path).record["versions"] == {"torch": "2.9", "ray": "2"}  # nothing was begun at first
    monkeypatch.setattr(runs, "versions", lambda: {"torch": "12.9", "ray": "2"})
    begin(tmp_path)
    begin(tmp_path)
    assert run_of(tmp_path).record["versions"] == {"torch": "2.9, then 12.9", "ray": "2"}


def test_the_commit_is_part_of_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "verl_ext"
    shutil.copytree(Path(runs.__file__).parent, package / "lab" / "reproduce")
    monkeypatch.setattr(runs, "__file__", str(package / "lab" / "reproduce" / "runs.py"))

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True).stdout

    assert runs._commit() == ""
    git("init")
    (tmp_path / "theirs").write_text("a repository that ignores the package")
    (tmp_path / ".gitignore").write_text("verl_ext\n")
    git("add", "theirs")
    git("commit", "-m", "a")
    assert runs._commit() == ""
    git("add", "-f", "verl_ext")
    git("commit", "-m", "b")
    assert runs._commit() == git("log", "-1", "--format=%h").strip()
    (package / "lab" / "reproduce" / "run.py").write_text("")
    assert runs._commit().endswith(" and changes")


def test_a_short_run_is_not_the_whole_one(tmp_path: Path) -> None:
    finish(tmp_path)
    assert not run_of(tmp_path, steps=None).examine(), "the whole length is more than two steps"


def test_other_settings_in_the_folder_are_refused_by_name(tmp_path: Path) -> None:
    finish(tmp_path)
    other = dataclasses.replace(CELL, overrides={"actor_rollout_ref.rollout.n": 8})
    with pytest.raises(
        runs.RunError, match=r"rollout\.n: was 4, is 8\. Remedy: give another --out, or remove .*seed_0"
    ):
        begin(tmp_path, other)
    with pytest.raises(runs.RunError, match="overrides of the command line: were none, are trainer.save_freq=1"):
        begin(tmp_path, extra=("trainer.save_freq=1",))
    changed = dataclasses.replace(OTB, laptop=dataclasses.replace(LAPTOP, cells={**LAPTOP.cells, "otb_n4": other}))
    assert changed.laptop is not None
    (run,) = runs.find_runs(tmp_path, changed, changed.laptop)
    assert run.record["state"] == runs.COMPLETE and "was 4, is 8" in run.problems[0]


def test_a_folder_of_another_table_is_refused(tmp_path: Path) -> None:
    folder = finish(tmp_path)
    record = json.loads((folder / "cell.json").read_text())
    (folder / "cell.json").write_text(json.dumps({**record, "table": "kpo/math", "cell": "kpo"}))
    with pytest.raises(runs.RunError, match="says that this is kpo/math, laptop scale, cell kpo, seed 0"):
        begin(tmp_path)
    (run,) = runs.find_runs(tmp_path, OTB, LAPTOP)
    assert "says that this is kpo/math" in run.problems[0]


def test_a_folder_that_is_no_run_or_broken_is_refused(tmp_path: Path) -> None:
    folder = run_of(tmp_path).path
    folder.mkdir(parents=True)
    log(folder, 1)
    with pytest.raises(runs.RunError, match="metrics or checkpoints but no cell.json"):
        begin(tmp_path)
    (folder / "cell.json").write_text('{"table": ')
    with pytest.raises(runs.RunError, match="cell.json cannot be read"):
        begin(tmp_path)
    (run,) = runs.find_runs(tmp_path, OTB, LAPTOP)
    assert run.problems and not run.record and runs.steps_of(run.path) == 1
    assert runs.find_runs(tmp_path / "nowhere", OTB, LAPTOP) == []


def test_runs_come_in_the_tables_order(tmp_path: Path) -> None:
    for seed in (10, 2):
        for name in ("otb_n4", "group_mean_n32"):
            begin(tmp_path, LAPTOP.cells[name], seed)
    found = [(run.cell, run.seed) for run in runs.find_runs(tmp_path, OTB, LAPTOP)]
    assert found == [("group_mean_n32", 2), ("group_mean_n32", 10), ("otb_n4", 2), ("otb_n4", 10)]


def test_two_processes_cannot_run_one_folder(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from otb_runs import run_of\n"
        "with run_of(Path(sys.argv[1])).locked(): print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    try:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        with pytest.raises(runs.RunError, match="another process is running"):
            with run_of(tmp_path).locked():
                pass
    finally:
        child.kill()
        child.wait()
    with run_of(tmp_path).locked():
        pass


def test_all_cells_of_a_seed_come_before_the_next_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[runs.Run] = []
    monkeypatch.setattr("verl_ext.lab.reproduce.run.run", lambda found, **how: asked.extend(found) or 0)
    finish(tmp_path, seed=1)
    words = ("--cell", "otb_n4", "group_mean_n4", "--seeds", "0", "1", "--steps", "2", "--out", tmp_path)
    assert reproduce(capsys, "run", "otb", "--scale", "laptop", *words)[0] == 0
    assert [(run.cell, run.seed, run.examine()) for run in asked] == [
        ("group_mean_n4", 0, False), ("otb_n4", 0, False), ("group_mean_n4", 1, False), ("otb_n4", 1, True),
    ]  # fmt: skip


# --- the command --------------------------------------------------------------------------------------------------


def reproduce(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main(["reproduce", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.slow
def test_complete_runs_are_skipped_and_the_table_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in LAPTOP.runnable:
        finish(tmp_path, LAPTOP.cells[name])
    words = ("run", "otb", "--scale", "laptop", "--seeds", "0", "--steps", "2", "--out", tmp_path)
    code, out, err = reproduce(capsys, *words)
    assert code == 0, err
    assert out.count("complete in") == len(LAPTOP.runnable) and "Laptop scale: a test of the claim's direction" in out
    base = tmp_path / "otb.samples" / "laptop"
    for name in ("table.md", "table.csv", "table.json", "table.png"):
        assert (base / name).stat().st_size > 0 and str(base / name) in out
    assert reproduce(capsys, "collect", "otb", "--scale", "laptop", "--out", tmp_path)[0] == 0
    code, out, err = reproduce(capsys, *words, "trainer.save_freq=1")
    assert code == 1 and "overrides of the command line: were none, are trainer.save_freq=1" in err


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "otp", "--scale", "laptop"), "unknown table 'otp'; did you mean 'otb'"),
        (("run", "otb", "--scale", "small"), "unknown scale 'small'.*full, laptop"),
        (("run", "otb", "--scale", "laptop", "--cell", "otb_n32"), "unknown cell 'otb_n32'.*group_mean_n32"),
        (("run", "otb", "--scale", "laptop", "--cell", "otb_n4,opo"), "unknown cell 'opo'"),
        (("run", "otb", "--scale", "laptop", "--seeds", "-1"), "-1"),
        (("run", "otb", "--scale", "laptop", "--seeds", "a"), "'a' is not a seed: a whole number"),
        (("run", "otb", "--scale", "laptop", "--stepz=4"), "neither an option of `verl-ext reproduce run`"),
        (("run", "otb", "--scale", "laptop", "data.seed=3"), "'data.seed=3' would take the run out.*use --seeds"),
        (("run", "otb", "--scale", "laptop", "trainer.total_training_steps=3"), "use --steps"),
        (("run", "otb", "--scale", "laptop", "--seeds", "0", "+recipe=kpo"), "the recipes are the cell's"),
        (("run", "otb", "trainer.logger=[console]"), "add `file` to the list"),
        (("plan", "trloo", "--cell", "gpt5"), "'gpt5' is only published"),
        (("collect", "otb", "a=b"), "does not take a=b"),
        (("run", "otb", "--no-wait"), "give --submit ADDRESS"),
        (("list", "--all"), "does not take --all"),
        (("script", "nothing"), "unknown table 'nothing'"),
        (("prepare", "nothing"), "unknown table 'nothing'"),
    ],
)
def test_a_command_that_cannot_be_carried_out_says_why(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = reproduce(capsys, *words)
    assert code == 2 and re.search(said, err), err
    assert not (tmp_path / "runs").exists()


def test_the_full_scale_names_what_is_missing_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_EXT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("COLD_START_MODEL", raising=False)
    code, out, err = reproduce(capsys, "run", "trloo", "--cell", "trloo", "--seeds", "0", "--out", tmp_path / "runs")
    assert code == 1 and not (tmp_path / "runs").exists() and "main_ppo" not in out
    assert f"no data drkernel_rl, kernelbench_level1, kernelbench_level2, kernelbench_level3 in {tmp_path}" in err
    assert "verl-ext reproduce prepare trloo/kernelbench (without a network: --from FOLDER)" in err
    assert "COLD_START_MODEL is not set: export COLD_START_MODEL=..." in err
    assert "8 GPUs are needed, and 8 more for the judge of kernels; 2 are seen: run it where they are" in err


def test_data_that_was_changed_or_is_not_ours_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    cells = [OTB.full.cells["otb_n4"]]
    for name in OTB.full.data_names:
        Path(plan.data_file(name, tmp_path)).write_bytes(b"PAR1")

    def said(**more: Any) -> list[str]:
        found = needs.lacks(OTB, OTB.full, cells, data=tmp_path, environment={}, **more)
        return [lack.what for lack in found if "package" not in lack.what]

    assert said() == []
    assert said(sums=True) == [f"the data {name} cannot be used" for name in OTB.full.data_names]
    assert said(extra=["data.train_files=x", "data.val_files=x"], sums=True) == []
    assert said(extra=["trainer.n_gpus_per_node=16"]) == ["16 GPUs are needed; 8 are seen"]
    assert said(extra=["trainer.nnodes=2"]) == ["2 nodes with 8 GPUs each are needed"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert said() == ["8 GPUs are needed; 0 are seen"]
    on_a_cluster = needs.lacks(OTB, OTB.full, cells, data=tmp_path, environment={"RAY_ADDRESS": "x"})
    assert not any("GPU" in lack.what for lack in on_a_cluster)


@pytest.mark.seconds
def test_a_package_that_a_laptop_task_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    lake, lake_scale = scale_of(find_table("gigpo"), "laptop")
    monkeypatch.setattr(needs, "has_package", lambda name: name != "gymnasium")
    (lack,) = needs.lacks(lake, lake_scale, list(lake_scale.cells.values()))
    assert str(lack) == "the package gymnasium is not installed: pip install 'verl-ext[gymnasium]'"
    team, team_scale = scale_of(find_table("dr_mas/search"), "laptop")
    monkeypatch.setattr(needs, "has_package", lambda name: name != "bm25s")
    (lack,) = needs.lacks(team, team_scale, list(team_scale.cells.values()))
    assert str(lack) == "the package bm25s is not installed: pip install 'verl-ext[search]'"
    assert needs.lacks(OTB, LAPTOP, [CELL]) == []


def test_what_kernels_of_a_laptop_task_need(monkeypatch: pytest.MonkeyPatch) -> None:
    table, scale = scale_of(find_table("trloo/kernelbench_14b"), "laptop")
    assert scale.task == "fuse" and needs.lacks(table, scale, []) == []
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("verl_ext.sandbox.pool.landlock_version", lambda: 0)
    check.cache_clear()
    compiler, cage = needs.lacks(table, scale, [])
    assert str(compiler) == "there is no gcc with binutils: install both (Debian: apt install gcc)"
    assert "the sandbox has no cage here: verl_ext.sandbox.cage=required needs Landlock" in str(cage)
    assert needs.lacks(table, scale, [], ["++verl_ext.sandbox.cage=rlimits"]) == [compiler]
    check.cache_clear()


def test_packages_are_known_by_distribution_or_module() -> None:
    assert needs.has_package("pyyaml") and needs.has_package("yaml") and needs.has_package("hydra-core")
    assert not needs.has_package("no-such-package") and not needs.has_package("a/b")
    assert needs.packages(OTB, [OTB.full.cells["otb_n4"]])[0] == "vllm"


@pytest.mark.seconds
def test_list_and_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = reproduce(capsys, "list")
    assert code == 0 and "otb/samples  (alias otb)" in out and "abstract-or-blog" in out
    assert out.count("can run here") >= 6, "the laptop scales need nothing"
    code, out, _ = reproduce(capsys, "plan", "otb", "--cell", "otb_n4", "group_mean_n4", "--seeds", "0", "1")
    assert code == 0 and out.count("python -m verl.trainer.main_ppo") == 4
    assert "open:  - " in out and "abstract-or-blog" in out and "published: in " in out
    commands = out.split("\n\n")[2:]
    found = [shlex.split(command.split("\n", 1)[1].replace("\\\n", " "))[3:] for command in commands]
    folder = runs.Run(OTB, OTB.full, "otb_n4", 1, runs.DEFAULT_OUT).path
    assert plan.full_words(OTB, OTB.full.cells["otb_n4"], 1, folder) in found
    code, out, err = reproduce(capsys, "plan", "hgpo/webshop", "--scale", "laptop", "--cell", "hgpo", "--seeds", "0")
    assert code == 0 and "hgpo/webshop at laptop scale is hgpo/alfworld" in err
    assert "verl-ext demo --steps" in out and "not the paper's number" in out
    code, out, _ = reproduce(capsys, "script", "otb")
    assert code == 0 and out.startswith("#!/usr/bin/env bash")


@pytest.mark.seconds
def test_list_answers_at_once() -> None:
    """CPU time of the whole command, which other load does not change."""
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "verl_ext.cli", "reproduce", "list"], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5


# --- jobs ---------------------------------------------------------------------------------------------------------


def test_jobs_are_named_by_table_cell_and_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_EXT_HOME", "/a home")
    finish(tmp_path, seed=1, extra=("a=b c",))
    cells = [LAPTOP.cells["group_mean_n4"], CELL]
    found = [run_of(tmp_path, cell, seed, extra=("a=b c",)) for seed in (0, 1) for cell in cells]
    tasks = ray_jobs.tasks_of(found)
    assert "otb_n4, seed 1: complete in" in capsys.readouterr().out
    names = [(name, seed) for name, seed in (("group_mean_n4", 0), ("otb_n4", 0), ("group_mean_n4", 1))]
    assert [task.name for task in tasks] == [f"verl_ext.otb.samples.laptop.{name}.seed_{seed}" for name, seed in names]
    words = shlex.split(tasks[1].entrypoint)
    assert words[:4] == [sys.executable, "-m", "verl_ext.cli", "reproduce"] and words[-1] == "a=b c"
    assert " --cell otb_n4 --seeds 0 " in tasks[1].entrypoint and " --no-collect --steps 2 " in tasks[1].entrypoint
    (blind,) = ray_jobs.tasks_of(found[:1], check=False)
    assert " --no-check " in blind.entrypoint and "--no-check" not in tasks[0].entrypoint
    assert tasks[1].environment == {"VERL_EXT_HOME": "/a home"}
    assert tasks[1].progress is not None and tasks[1].progress() == "step 0/2"


@pytest.mark.seconds
def test_an_address_where_nothing_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("run", "otb", "--scale", "laptop", "--out", tmp_path, "--submit")
    code, _, err = reproduce(capsys, *words, "127.0.0.1:1")
    assert code == 1 and "give one such as http://127.0.0.1:8265" in err
    code, _, err = reproduce(capsys, *words, "http://127.0.0.1:1")
    assert code == 1 and "no Ray job server answers at http://127.0.0.1:1" in err


def test_other_overrides_are_refused_only_where_there_is_something_to_mix_with(tmp_path: Path) -> None:
    folder = begin(tmp_path, extra=("actor.lrr=1",))
    log(folder, 0)
    run_of(tmp_path).end(runs.FAILED, 1, 1.0)
    assert begin(tmp_path, extra=("actor.lr=1",)) == folder
    assert json.loads((folder / "cell.json").read_text())["extra"] == ["actor.lr=1"]
    (folder / "checkpoints" / "global_step_1").mkdir(parents=True)
    with pytest.raises(runs.RunError, match=r"were actor\.lr=1, are none"):
        begin(tmp_path)


def test_overrides_that_seeds_have_swallowed_are_overrides() -> None:
    args = argparse.Namespace(seeds=["0", "~actor.x", "1", "+a=b", "~c=d"], overrides=["e=f"])
    assert command._split(args, "seeds") == ["0", "1"]
    assert args.overrides == ["~actor.x", "+a=b", "~c=d", "e=f"]


def test_a_run_that_was_killed_after_its_last_step_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = begin(tmp_path)
    log(folder, 0, 1, 2)
    assert run_here([run_of(tmp_path)], collect=False) == 0
    assert "was at step 2, goes on" in capsys.readouterr().out
    (run,) = runs.find_runs(tmp_path, OTB, LAPTOP)
    assert run.record["state"] == runs.COMPLETE


def test_a_run_that_was_killed_before_it_logged_what_it_had_saved_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl saves a step before it logs it, and a resume of the last step trains nothing."""
    folder = begin(tmp_path)
    log(folder, 0, 1)
    (folder / "checkpoints").mkdir()
    saved = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    monkeypatch.setattr(starting, "_train", lambda run: 0)
    saved.write_text("1")
    assert run_here([run_of(tmp_path)], collect=False) == 1
    saved.write_text("2")
    assert run_here([run_of(tmp_path)], collect=False) == 0 and run_of(tmp_path).examine()


def test_runs_that_fail_are_named_and_the_rest_is_run_and_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer that ends after a step, and one that ends at once, which the others would do as well."""
    trainer = tmp_path / "python"
    line = json.dumps({"step": 1, "data": {"actor/loss": 1.0}}).replace('"', '\\"')
    trainer.write_text(f'#!/bin/sh\necho "{line}" > "$VERL_FILE_LOGGER_PATH"\nexit 3\n', encoding="utf-8")
    trainer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(trainer))
    first, second = ([runs.Run(OTB, OTB.full, "otb_n4", seed, tmp_path / out) for seed in (0, 1)] for out in "ab")
    assert run_here(first, check=False) == 3
    said = capsys.readouterr()
    assert "failed: otb_n4, seed 0; otb_n4, seed 1; the same command tries them again" in said.err
    assert "no complete run of otb/samples at full scale" in said.err and "[2/2]" in said.out
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert run_here(second, check=False) == 1
    said = capsys.readouterr()
    assert "it ended before its first step: the other runs are not tried" in said.err and "[2/2]" not in said.out
    assert "failed: otb_n4, seed 0; the same" in said.err


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    code, _, err = reproduce(capsys, "prepare", "hgpo", "--out", tmp_path / "file")
    assert code == 1 and str(tmp_path / "file") in err


def test_nothing_is_run_when_a_folder_is_refused(tmp_path: Path) -> None:
    folder = finish(tmp_path, seed=1)
    record = json.loads((folder / "cell.json").read_text())
    (folder / "cell.json").write_text(json.dumps({**record, "seed": 7}))
    with pytest.raises(runs.RunError, match="seed 7"):
        run_here([run_of(tmp_path, seed=seed) for seed in (0, 1)])
    assert not run_of(tmp_path).path.exists()
    assert INTERRUPTED == 130


@pytest.mark.slow
def test_the_full_scale_starts_verls_trainer_with_the_planned_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer itself: it ends at once, since a value is wrong, and the run says so and can be given again."""
    extra = "algorithm.otb.baseline=nonsense"
    words = ("run", "otb", "--cell", "otb_n4", "--seeds", "3", "--out", tmp_path, "--no-check", "--no-collect", extra)
    code, out, _ = reproduce(capsys, *words)
    folder = runs.Run(OTB, OTB.full, "otb_n4", 3, tmp_path).path
    assert code == 1 and "algorithm.otb.baseline" in out and f"the whole log is in {folder / 'log.txt'}" in out
    written = shlex.split((folder / "command.txt").read_text())
    assert written[0] == f"VERL_FILE_LOGGER_PATH={folder / 'metrics.jsonl'}"
    planned = plan.full_words(OTB, OTB.full.cells["otb_n4"], 3, folder)
    assert written[1:] == ["python", "-m", "verl.trainer.main_ppo", *planned, extra]
    record = json.loads((folder / "cell.json").read_text())
    assert (record["state"], record["extra"]) == ("failed", [extra])
    code, out, _ = reproduce(capsys, *words)
    assert code == 1 and "begins in" in out, "a run that failed is tried again"
