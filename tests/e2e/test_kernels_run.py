# SPDX-License-Identifier: Apache-2.0
"""Kernels through verl's real trainer: a small model that half knows the language, the pool, the recipe dr_kernel."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from harness import CHAT_TEMPLATE, Lab, eventually, processes, small_llama, steps_logged
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_ext.lab.kernels.command import arguments, run
from verl_ext.lab.kernels.stts import read
from verl_ext.methods.kernel_reward import kernel_reward
from verl_ext.rollout.kernels.judge import STATUSES
from verl_ext.rollout.kernels.tasks import STAGES, training

CHAINS = [task.stages for task in training()[:4]]


def answers(chain: tuple[str, ...]) -> list[str]:
    """What the model has seen: fused, half fused, all in torch, and a stage too few."""
    whole = " ".join(chain)
    half = f"t {chain[0]} ; krve {' '.join(chain[1:])}"
    return [f"krve {whole}", half, f"t {whole}", f"krve {' '.join(chain[1:])}"]


def make_model(folder: Path) -> Path:
    words = ["[UNK]", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "user", "assistant", ";", "t", "krve", *STAGES]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="[UNK]",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    model = small_llama(tokenizer)
    rng, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        rows = []
        for _ in range(16):
            chain = rng.choice(CHAINS)
            chat = [{"role": "user", "content": " ".join(chain)}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            answer = tokenizer.encode(rng.choice(answers(chain)) + " <|im_end|>", add_special_tokens=False)
            rows.append((prompt, answer))
        length = max(len(prompt + answer) for prompt, answer in rows)
        ids = torch.full((len(rows), length), int(tokenizer.pad_token_id))
        labels = torch.full_like(ids, -100)
        for row, (prompt, answer) in enumerate(rows):
            ids[row, : len(prompt + answer)] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : len(prompt + answer)] = torch.tensor(answer)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    assert loss.item() < 1.0  # an answer's first words are a matter of chance, the others are not
    return folder


def make_data(folder: Path) -> Path:
    import argparse

    parser = argparse.ArgumentParser()
    arguments(parser)
    assert run(parser.parse_args(["data", "--out", str(folder)])) == 0
    path = folder / "four.parquet"
    pq.write_table(pa.Table.from_pylist(pq.read_table(folder / "train.parquet").to_pylist()[:4]), path)
    return path


@pytest.mark.e2e
def test_dr_kernel_trains_on_what_the_judge_says(copied_lab: Lab, tmp_path: Path) -> None:
    data, model = make_data(tmp_path / "data"), make_model(tmp_path / "model")
    rollouts = tmp_path / "rollouts"
    verdicts = tmp_path / "verdicts"
    overrides = [
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"actor_rollout_ref.model.path={model}",
        "reward.custom_reward_function.path=null",  # the kernels are judged
        "data.max_prompt_length=160",
        "data.max_response_length=16",
        "algorithm.mrs.lower=0.1",
        "algorithm.mrs.upper=10",
        "verl_ext.kernels.pairs=3",
        "verl_ext.kernels.max_pairs=3",
        "verl_ext.kernels.looks=10",
        f"verl_ext.rollouts_dir={rollouts}",
        "trainer.val_before_train=true",
        "verl_ext.kernels.stts={iterations: 3, turns: 2, window: 1}",
        f"trainer.validation_data_dir={tmp_path / 'validation'}",
        f"verl_ext.kernels.cache_dir={verdicts}",
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.save_freq=1",
        "trainer.total_training_steps=5",
    ]
    killed = copied_lab.run("dr_kernel", "[dr_kernel,cpu]", overrides, kill_when=lambda run: steps_logged(run) >= 2)
    # Ray ends what the launcher has started a moment later, and its agents after a minute.
    agents = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
    assert eventually(lambda: set(processes(killed.folder)) <= agents), processes(killed.folder)
    saved = int((killed.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert killed.code == -signal.SIGKILL and 1 <= saved < 5
    # verl saves a step before it logs it, and may be killed in between.
    early = sorted(killed.metrics)
    assert early == list(range(max(early) + 1)) and saved - max(early) in (0, 1)
    result = copied_lab.run("dr_kernel", "[dr_kernel,cpu]", overrides).check()
    assert f"setting global step to {saved}" in result.log
    keys = [json.loads(line)["key"] for line in next(verdicts.iterdir()).read_text().split("\n") if line]
    assert len(keys) == len(set(keys)) > 8, "each program once, over both runs"
    metrics = result.metrics
    assert sorted(metrics) == [0, 1, 2, 3, 4, 5]  # a resume validates first, and logs that at the step it found
    judged = [row for step in (1, 2) for row in result.rows(step)]
    assert len(judged) == 2 * 4 * 4 * 3  # steps, prompts, rollouts, turns
    assert all(metrics[step]["rollout/sequences"] == 16 for step in (1, 2, 3, 4, 5))  # merged, before and after
    assert {row["turn_index"] for row in judged} == {0, 1, 2}
    assert {row["kernel_status"] for row in judged} <= set(STATUSES) - {"infra"}
    right = [row for row in judged if row["correct"]]
    assert right and any(row["kernel_status"] == "wrong" for row in judged)
    for row in judged:
        out = row["decoy"] or not row["correct"]
        (worth,) = kernel_reward([row["correct"]], [row["speedup"]], [row["coverage"]], penalised=[out])
        assert row["turn_reward"] == pytest.approx(worth)
        assert row["kept"] or row["correct"], "PRS and a wide window leave out right kernels alone"
        # Right kernels of less coverage than the threshold are not trained on, those beyond threshold + factor are.
        if row["correct"] and row["coverage"] < 0.3:
            assert not row["kept"]
        if row["coverage"] > 0.4:
            assert row["kept"]
    # TRLOO's baseline is of all samples of prompt and turn, rejected ones too: returns without the others' mean.
    groups: dict[tuple[str, int], list[float]] = {}
    story = {(row["traj_uid"], row["turn_index"]): row["turn_reward"] for row in judged}
    for row in judged:
        value = sum(story[row["traj_uid"], turn] for turn in range(row["turn_index"], 3))
        groups.setdefault((row["index"], row["turn_index"]), []).append(value)
        row["value"] = value
    for row in judged:
        group = groups[row["index"], row["turn_index"]]
        if row["kept"]:
            expected = (row["value"] - np.mean(group)) * len(group) / (len(group) - 1)
            assert row["advantage"] == pytest.approx(expected, abs=1e-4)
    for step in {1, 2} & {*early, *range(saved + 1, 6)}:
        assert 0 <= metrics[step]["rejection/prs/kept_share"] <= 1
        assert metrics[step]["rollout/failed_trajectories"] == 0
        assert np.isfinite(metrics[step]["actor/grad_norm"])
    validation = {name.rsplit("/", 2)[-2] for name in metrics[0] if name.startswith("val-")}
    assert {"acc", "speedup_last", "speedup_best", "fast_1.2_best"} <= validation
    assert metrics[0]["val-aux/kernels/fuse/turns/mean@1"] == 4  # two of the first iteration, one of each other
    assert len(read(tmp_path / "validation" / "0.jsonl")) == 4
    told = [json.loads(line) for line in (rollouts / "1.jsonl").read_bytes().splitlines()]
    assert len(told) == 16
