# SPDX-License-Identifier: Apache-2.0
"""Parquet files of a reasoning-gym task, in the columns that verl's dataset and the multi-turn loop read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext.lab.demo.assets import AGENT_LOOP
from verl_ext.rewards.caged import load_dataset
from verl_ext.rollout.environments.data import write_parquet

#: One question in so many is kept for validation.
HELD_OUT = 8


def dataset_config(config: Mapping[str, Any], seed: int, size: int) -> str:
    """A dataset's configuration as JSON, in a fixed order."""
    return json.dumps({**config, "seed": seed, "size": size}, sort_keys=True)


def is_held_out(question: str) -> bool:
    """Whether a question belongs to validation: decided by its text alone, so repeated questions stay on one side."""
    return zlib.crc32(question.encode()) % HELD_OUT == 0


def generate(
    dataset: str, config: Mapping[str, Any], count: int, *, seed: int, held_out: bool | None
) -> list[dict[str, Any]]:
    """Generate entries of one side of the split, in the dataset's own frequencies (questions may repeat).

    Args:
        dataset: reasoning-gym's name.
        config: its configuration without ``seed`` and ``size``.
        count: entries wanted.
        seed: of the generator.
        held_out: True for validation questions, False for the others, None for all.

    Returns:
        Entries with ``question``, ``answer``, ``metadata``.

    Raises:
        ValueError: the dataset has too few questions on that side of the split.
    """
    size = max(64, 4 * count * (HELD_OUT if held_out else 2))
    source = load_dataset(dataset, dataset_config(config, seed, size))
    entries: list[dict[str, Any]] = []
    for index in range(size):
        if len(entries) == count:
            return entries
        entry = source[index]
        if held_out is None or is_held_out(entry["question"]) == held_out:
            entries.append(entry)
    if len(entries) == count:
        return entries
    side = "validation" if held_out else "training"
    raise ValueError(f"{dataset} with {dict(config)} gave only {len(entries)} of {count} {side} questions")


def build_rows(
    entries: Sequence[Mapping[str, Any]], dataset: str, config_json: str, *, split: str, parser: str = "strict"
) -> list[dict[str, Any]]:
    """Dataset rows of entries.

    Args:
        entries: what :func:`generate` returned.
        dataset: reasoning-gym's name.
        config_json: the dataset's configuration, a JSON object; the verifier is built from it.
        split: ``train`` or ``val``.
        parser: how an answer is read from a text.

    Returns:
        Rows with ``data_source``, ``agent_name``, ``prompt`` (chat messages), ``ability``, ``reward_model``
        (``style``, ``ground_truth``) and ``extra_info`` (``index``, ``split``, ``dataset``, ``config_json``,
        ``entry_json``, ``parser``).

    Raises:
        ValueError: an entry can't be written as JSON and read back unchanged in its answer.
    """
    rows = []
    for index, entry in enumerate(entries):
        try:
            entry_json = json.dumps(dict(entry), sort_keys=True)
        except TypeError as e:
            raise ValueError(f"entries of {dataset} hold something that JSON can't: {e}") from e
        rows.append(
            {
                "data_source": f"reasoning_gym/{dataset}",
                "agent_name": AGENT_LOOP,
                "prompt": [{"role": "user", "content": entry["question"]}],
                "ability": "reasoning",
                "reward_model": {"style": "rule", "ground_truth": str(entry["answer"])},
                "extra_info": {
                    "index": index,
                    "split": split,
                    "dataset": dataset,
                    "config_json": config_json,
                    "entry_json": entry_json,
                    "parser": parser,
                },
            }
        )
    return rows


def write_task(
    folder: Path,
    dataset: str,
    config: Mapping[str, Any],
    *,
    train_size: int,
    val_size: int,
    seed: int,
    parser: str = "strict",
    split: bool = True,
) -> None:
    """Write ``train.parquet`` and ``val.parquet`` of a task into a folder; with `split`, of questions kept apart."""
    for name, count, held_out in (("train", train_size, False), ("val", val_size, True)):
        # Different seeds: reasoning-gym's entry i of seed s is entry i - 1 of seed s + 1.
        split_seed = 1_000_003 * (2 * seed + held_out) + 17
        entries = generate(dataset, config, count, seed=split_seed, held_out=held_out if split else None)
        config_json = dataset_config(config, split_seed, max(count, 1))
        write_parquet(build_rows(entries, dataset, config_json, split=name, parser=parser), folder / f"{name}.parquet")
