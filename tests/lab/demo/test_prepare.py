# SPDX-License-Identifier: Apache-2.0
"""Preparing the demo: the real thing with a much shorter warm-up."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_ext.common.cache import home
from verl_ext.lab.demo.assets import MANIFEST, DemoAssets
from verl_ext.lab.demo.data import generate, is_held_out
from verl_ext.lab.demo.prepare import prepare_demo, prepare_lake
from verl_ext.lab.demo.recipes import WarmupRecipe
from verl_ext.rollout.reasoning_gym_task import ReasoningGymTask

SHORT = WarmupRecipe(
    train_size=48,
    val_size=16,
    hidden_size=32,
    layers=1,
    heads=1,
    batch_size=16,
    skill_steps=4,
    habit_steps=2,
    max_habit_steps=4,
    success_range=(0.0, 1.0),
    valid_target=0.0,
    eval_size=8,
    eval_every=2,
)


def digests(assets: DemoAssets) -> dict[str, str]:
    """SHA-256 of every file but the manifest, which holds a time."""
    root = Path(assets.folder)
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> DemoAssets:
    return prepare_demo(cache_dir=tmp_path_factory.mktemp("cache"), seed=3, recipe=SHORT, progress=lambda line: None)


@pytest.mark.seconds
def test_second_call_is_answered_from_the_cache(assets: DemoAssets) -> None:
    cache = Path(assets.folder).parent.parent
    lines: list[str] = []
    again = prepare_demo(cache_dir=cache, seed=3, recipe=SHORT, progress=lines.append)
    assert again.cached and not assets.cached
    assert not lines
    assert again.model_path == assets.model_path


@pytest.mark.seconds
def test_same_seed_same_files_other_seed_other_files(assets: DemoAssets, tmp_path: Path) -> None:
    again = prepare_demo(cache_dir=tmp_path, seed=3, recipe=SHORT, progress=lambda line: None)
    assert digests(again) == digests(assets)
    other = prepare_demo(cache_dir=tmp_path, seed=4, recipe=SHORT, progress=lambda line: None)
    assert other.folder != again.folder
    changed = {name for name, digest in digests(other).items() if digest != digests(again).get(name)}
    assert {"model/model.safetensors", "data/train.parquet", "data/val.parquet"} <= changed


@pytest.mark.seconds
def test_force_makes_it_again_and_leaves_nothing_behind(tmp_path: Path) -> None:
    first = prepare_demo(cache_dir=tmp_path, recipe=SHORT, progress=lambda line: None)
    marker = Path(first.folder) / "data" / "marker"
    marker.touch()
    second = prepare_demo(cache_dir=tmp_path, recipe=SHORT, force=True, progress=lambda line: None)
    assert not second.cached and second.folder == first.folder and not marker.exists()
    assert [path.name for path in Path(first.folder).parent.iterdir()] == [Path(first.folder).name]


def test_out_takes_an_own_folder_and_spares_a_foreign_one(tmp_path: Path) -> None:
    made = prepare_demo(tmp_path / "mine", recipe=SHORT, progress=lambda line: None)
    assert made.model_path == str(tmp_path / "mine" / "model")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("do not lose me")
    with pytest.raises(FileExistsError, match="was not made by"):
        prepare_demo(foreign, recipe=SHORT, force=True, progress=lambda line: None)
    assert (foreign / "thesis.txt").exists()


def test_out_is_replaced_with_force_alone_and_never_what_it_did_not_make(tmp_path: Path) -> None:
    quiet: Any = {"progress": lambda line: None}
    out = tmp_path / "sums"
    own = prepare_demo(out, recipe=SHORT, **quiet)
    notes = out / "data" / "notes.txt"
    notes.write_text("do not lose me")
    before = digests(own)
    with pytest.raises(FileExistsError, match=r"\(seed is 0, not 1\): name another folder, or give --force"):
        prepare_demo(out, recipe=SHORT, seed=1, **quiet)
    with pytest.raises(FileExistsError, match=r"\(kind is demo, not lake\)"):
        prepare_lake(out, **quiet)
    for seed in (0, 1):
        with pytest.raises(FileExistsError, match=r"not made by `verl-ext prepare`: data/notes.txt; move them"):
            prepare_demo(out, recipe=SHORT, seed=seed, force=True, **quiet)
    assert digests(own) == before and prepare_demo(out, recipe=SHORT, **quiet).cached
    notes.unlink()
    assert not prepare_demo(out, recipe=SHORT, seed=1, force=True, **quiet).cached
    # A manifest from before it named files: what every build makes may be replaced.
    manifest = json.loads((out / MANIFEST).read_text())
    del manifest["files"]
    (out / MANIFEST).write_text(json.dumps(manifest))
    (out / "thesis.txt").write_text("do not lose me either")
    with pytest.raises(FileExistsError, match=r": thesis\.txt; move"):
        prepare_demo(out, recipe=SHORT, force=True, **quiet)
    (out / "thesis.txt").unlink()
    prepare_demo(out, recipe=SHORT, force=True, **quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["sums"]


def test_a_terminated_preparation_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom verl_ext.lab.demo.assets import prepare\n"
        "from verl_ext.lab.demo.recipes import LakeRecipe\n"
        "def build(folder, recipe, seed, tell):\n    (folder / 'half').touch()\n    print('builds', flush=True)\n"
        "    time.sleep(600)\n"
        "prepare('lake', LakeRecipe(), build, cache_dir=sys.argv[1])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "builds\n"
        assert len(list((tmp_path / "lake").iterdir())) == 1
        process.terminate()
    assert process.returncode != 0 and list((tmp_path / "lake").iterdir()) == []


def test_failed_warm_up_says_so_and_caches_nothing(tmp_path: Path) -> None:
    hopeless = dataclasses.replace(SHORT, success_range=(0.99, 1.0))
    with pytest.raises(RuntimeError, match="first-turn success of .* wanted 0.99 to 1.0"):
        prepare_demo(cache_dir=tmp_path, recipe=hopeless, progress=lambda line: None)
    assert not any((tmp_path / "demo").iterdir())


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("VERL_EXT_HOME", raising=False)
    assert home() == tmp_path / "xdg" / "verl_ext"
    monkeypatch.setenv("VERL_EXT_HOME", str(tmp_path / "own"))
    assert home() == tmp_path / "own"


def test_model_folder_loads_as_verl_loads_it(assets: DemoAssets) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.model_path)
    model = AutoModelForCausalLM.from_pretrained(assets.model_path)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.config.model_type == "llama"  # verl forces another tokenizer on qwen2
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == end == model.config.eos_token_id
    assert model.generation_config.eos_token_id == end
    assert tokenizer.pad_token_id == model.config.pad_token_id != end


def test_tokenizer(assets: DemoAssets) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.model_path)
    for text in [*"0123456789", "\n", "-"]:
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text
    assert len(tokenizer.encode("-407", add_special_tokens=False)) == 4
    for text in ("State the final answer: 3 + 4 - 5 =", "ünïcode ✓ and\n\nblank  lines ", "Too low.", "-12"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    messages = [
        {"role": "user", "content": "3 + 4 ="},
        {"role": "assistant", "content": "8"},
        {"role": "user", "content": "Too high."},
    ]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\n3 + 4 =<|im_end|>\n<|im_start|>assistant\n8<|im_end|>\n"
        "<|im_start|>user\nToo high.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_warm_up_and_chat_template_write_the_same_tokens(assets: DemoAssets) -> None:
    from verl_ext.lab.demo.model import Codec

    tokenizer = AutoTokenizer.from_pretrained(assets.model_path)
    codec = Codec(tokenizer)
    question = "State the final answer to the following arithmetic problem: 3 - 4 ="
    pieces = [*codec.user(question), *codec.answer("-2"), *codec.feedback("Too high."), *codec.answer("-1")]
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "-2"},
        {"role": "user", "content": "Too high."},
        {"role": "assistant", "content": "-1"},
    ]
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert whole[: len(pieces)] == pieces
    assert tokenizer.decode(whole[len(pieces) :]) == "\n"


def test_parquet_has_the_columns_that_verl_and_the_loop_read(assets: DemoAssets) -> None:
    for path, size, split in ((assets.train_file, 48, "train"), (assets.val_file, 16, "val")):
        rows = pq.read_table(path).to_pylist()
        assert len(rows) == size
        for index, row in enumerate(rows):
            assert set(row) == {"data_source", "agent_name", "prompt", "ability", "reward_model", "extra_info"}
            assert row["data_source"] == "reasoning_gym/chain_sum"
            assert row["agent_name"] == assets.agent_loop
            assert [message["role"] for message in row["prompt"]] == ["user"]
            assert row["extra_info"]["index"] == index and row["extra_info"]["split"] == split
            task = ReasoningGymTask.from_extra_info(row["extra_info"])
            assert task.question == row["prompt"][0]["content"]
            assert task.judge(row["reward_model"]["ground_truth"]).solved


def test_no_question_is_on_both_sides(assets: DemoAssets) -> None:
    def questions(path: str) -> set[str]:
        return {row["prompt"][0]["content"] for row in pq.read_table(path).to_pylist()}

    train, val = questions(assets.train_file), questions(assets.val_file)
    assert train and val and not train & val
    assert all(is_held_out(question) for question in val)
    assert len(train) > 24  # not one question over and over


def test_too_few_questions_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_ext.lab.demo.data.is_held_out", lambda question: question.endswith(" 3 - 5 ="))
    with pytest.raises(ValueError, match=r"chain_sum .* gave only \d+ of 64 validation questions"):
        generate("chain_sum", SHORT.config, 64, seed=0, held_out=True)
    assert len(generate("chain_sum", SHORT.config, 64, seed=0, held_out=False)) == 64


def test_lengths_suffice_for_the_longest_conversation(assets: DemoAssets) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets.model_path)
    for row in pq.read_table(assets.train_file).to_pylist():
        messages = row["prompt"]
        for _ in range(2):
            messages = [
                *messages,
                {"role": "assistant", "content": "-123456"},
                {"role": "user", "content": "Not a number."},
            ]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert len(ids) <= assets.prompt_length


def test_manifest_tells_how_it_was_made(assets: DemoAssets) -> None:
    manifest = json.loads((Path(assets.folder) / MANIFEST).read_text())
    assert manifest["recipe"]["seed"] == 3
    assert set(assets.measured) >= {"first_turn_success", "success", "valid_answers", "steps"}
