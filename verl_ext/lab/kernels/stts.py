# SPDX-License-Identifier: Apache-2.0
"""Sequential test-time scaling over recorded validation: Fast@p by turns, and what each rule keeps in the context.

verl writes the turns of its validation to ``trainer.validation_data_dir``. They are judged again here, each program
once. How the model goes on from a context is what a run shows: `options.Stts`, ``verl_ext.kernels.stts`` there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from verl_ext.methods.kernel_reward import stts_select
from verl_ext.rollout.kernels.judge import Judge, Verdict
from verl_ext.rollout.kernels.options import FAST, Rule
from verl_ext.rollout.kernels.tasks import Task

RULES: tuple[Rule, ...] = get_args(Rule)

Trajectory = tuple[Task, list[str]]
"""A task, and the answers to it in order of time."""


def read(dump: Path) -> list[Trajectory]:
    """The trajectories of a file of verl's ``trainer.validation_data_dir``.

    Raises:
        ValueError: it is none, or its rows are not about kernels.
        OSError: it cannot be read.
    """
    found: dict[str, dict[int, tuple[str, str]]] = {}
    for number, line in enumerate(dump.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
            trajectory, turn = str(row["uid"]).rsplit("_", 1)
            found.setdefault(trajectory, {})[int(turn)] = str(row["gts"]), str(row["output"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{dump}, line {number}: no turn of a validation ({type(error).__name__}: {error}). A run writes them "
                "with trainer.validation_data_dir=FOLDER, to FOLDER/<step>.jsonl."
            ) from error
    if not found:
        raise ValueError(f"{dump} holds no trajectory")
    played = [[turns[turn] for turn in sorted(turns)] for turns in found.values()]
    return [(Task.of(turns[0][0]), [answer for _, answer in turns]) for turns in played]


def scaling(trajectories: Sequence[Trajectory], judge: Judge, language: str, window: int) -> dict[str, Any]:
    """Judge the answers, and say what more turns have brought.

    Args:
        trajectories: tasks and answers.
        judge: of the answers.
        language: of the answers.
        window: turns that the rules keep.

    Returns:
        ``trajectories`` and ``judged`` (programs) as numbers; ``turns``: for each number of turns, Fast@p of the last
        and the best of so many, of all trajectories (one that ended earlier stays what it was); ``rules``: for each
        rule, Fast@p of the best turn that it keeps of the whole history, and the kept turns' mean ``reward``.
    """
    known: dict[tuple[Task, str], Verdict] = {}
    for task, answers in trajectories:
        for answer in answers:
            if (task, answer) not in known:
                known[task, answer] = judge.evaluate(task, answer, language)
    verdicts = [[known[task, answer] for answer in answers] for task, answers in trajectories]
    worth = [np.array([verdict.worth for verdict in history]) for history in verdicts]
    rewards = [np.array([verdict.reward() for verdict in history]) for history in verdicts]
    turns = [
        {
            "turns": count,
            **_fast("last", [history[:count][-1] for history in worth]),
            **_fast("best", [history[:count].max() for history in worth]),
        }
        for count in range(1, max(map(len, worth)) + 1)
    ]
    rules = {}
    for rule in RULES:
        kept = [stts_select(history, window, select=rule).astype(int) for history in rewards]
        best = [history[numbers].max() for history, numbers in zip(worth, kept, strict=True)]
        mean = np.mean([history[numbers].mean() for history, numbers in zip(rewards, kept, strict=True)])
        rules[rule] = {"reward": float(mean), **_fast("kept", best)}
    return {"trajectories": len(worth), "judged": len(known), "window": window, "turns": turns, "rules": rules}


def _fast(which: str, worth: Sequence[float]) -> dict[str, float]:
    return {f"fast_{p}_{which}": float(np.mean(np.asarray(worth) >= p)) for p in FAST}


def table(found: dict[str, Any]) -> Iterator[str]:
    """The lines that say it."""
    yield f"{found['trajectories']} trajectories, {found['judged']} programs judged; Fast@p in per cent"
    yield " ".join(["turns     ", *[f"{f'last {p}':>8} {f'best {p}':>8}" for p in FAST]])
    for row in found["turns"]:
        shares = [f"{row[f'fast_{p}_{which}']:8.1%}" for p in FAST for which in ("last", "best")]
        yield " ".join([f"{row['turns']:<10}", *shares])
    yield f"\nthe best of {found['window']} turns kept of the whole history, and their mean reward"
    for rule, row in found["rules"].items():
        yield " ".join(
            [f"{rule:<14}", *[f"{f'{p}:':>5} {row[f'fast_{p}_kept']:6.1%}" for p in FAST], f"{row['reward']:8.3f}"]
        )
