# SPDX-License-Identifier: Apache-2.0
"""Write transcripts: tokens are decoded and written in a thread, beside the training."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

#: What an agent loop says of a turn that stands elsewhere in the record, or is the engine's own.
_NOT_SHOWN = frozenset(
    ("turn_reward", "agent_id", "anchor_obs", "is_action_valid", "valid_row", "action", "failure", "stop_reason")
    + ("global_steps", "min_global_steps", "max_global_steps", "reward_extra_info")
)
Decode = Callable[[list[list[int]]], list[str]]


def outcome_of(failure: str, success: float | None, reward: float) -> str:
    """How a trajectory ended: ``error`` with a `failure` (environment died, retriever down, ...), else ``success`` from
    one half on of what the agent loop says (``success`` or ``acc`` of ``reward_extra_info``), or, where that is None,
    with a reward above 0; else ``failure``.
    """
    if failure:
        return "error"
    return "success" if (success >= 0.5 if success is not None else reward > 0) else "failure"


def trajectories(
    step: int,
    keys: Sequence[str],
    columns: Mapping[str, Any],
    extra_fields: Sequence[Mapping[str, Any]],
    score: np.ndarray,
    advantage: np.ndarray,
    padding: Sequence[bool],
) -> list[dict[str, Any]]:
    """The records of a batch, without text.

    Args:
        step: training step.
        keys: [B] storage keys, ``{uid}_{session}_{index}``.
        columns: turn fields by name, each of length B; ``traj_uid``, ``turn_index``, ``valid_row``, ``is_action_valid``
            and, if known, ``turn_reward`` and ``agent_id``.
        extra_fields: [B] what the agent loop says of each turn.
        score: [B] float, sum of the turn's token-level rewards.
        advantage: [B] float, mean over the turn's model tokens.
        padding: [B] bool; these turns are left out.

    Returns:
        One record a trajectory, in order of prompt and trajectory. A turn holds, under ``row``, its position in the
        batch, which `TranscriptWriter` replaces by the text.
    """
    turns: dict[str, list[int]] = {}
    for row in range(len(keys)):
        if not padding[row]:
            turns.setdefault(str(columns["traj_uid"][row]), []).append(row)
    records = []
    for trajectory in sorted(turns, key=_in_order):
        rows = sorted(turns[trajectory], key=lambda row: int(columns["turn_index"][row]))
        last = extra_fields[rows[-1]]
        known = "turn_reward" in columns
        rewards = [float(columns["turn_reward"][row]) if known else None for row in rows]
        total = sum(reward for reward in rewards if reward is not None) if known else float(score[rows[-1]])
        failure = next((str(extra_fields[row]["failure"]) for row in rows if extra_fields[row].get("failure")), "")
        info = {name: value for name, value in (last.get("reward_extra_info") or {}).items() if _is_number(value)}
        success = next((float(info[name]) for name in ("success", "acc") if name in info), None)
        agents = [str(columns["agent_id"][row]) if "agent_id" in columns else "" for row in rows]
        records.append(
            {
                "step": step,
                "trajectory": trajectory,
                "prompt_uid": trajectory.rsplit("_", 1)[0],
                "outcome": outcome_of(failure, success, total),
                "reward": total,
                "score": float(score[rows[-1]]),
                "agents": list(dict.fromkeys(name for name in agents if name)),
                "failure": failure,
                "stop_reason": str(last.get("stop_reason") or ""),
                "info": info,
                "turns": [
                    _turn(row, columns, extra_fields[row], agent, reward, float(advantage[row]))
                    for row, agent, reward in zip(rows, agents, rewards, strict=True)
                ],
            }
        )
    return records


def _in_order(trajectory: str) -> tuple[str, int, str]:
    uid, _, session = trajectory.rpartition("_")
    return uid, int(session) if session.isdigit() else 0, session


def _turn(
    row: int, columns: Mapping[str, Any], extra: Mapping[str, Any], agent: str, reward: float | None, advantage: float
) -> dict[str, Any]:
    turn: dict[str, Any] = {
        "row": row,
        "turn": int(columns["turn_index"][row]),
        "agent": agent,
        "reward": reward,
        "valid": bool(columns["is_action_valid"][row]),
        "counted": bool(columns["valid_row"][row]),
        "advantage": advantage,
        "more": {
            name: value
            for name, value in extra.items()
            if name not in _NOT_SHOWN and (isinstance(value, str) or _is_number(value)) and value != ""
        },
    }
    for name, field in (("action", "action"), ("observation", "anchor_obs")):
        if extra.get(field) is not None:
            turn[name] = extra[field]
    return turn


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | np.integer | np.floating)


class TranscriptWriter:
    """Writes the transcripts of a run to ``<folder>/<step>.jsonl``.

    `decode` gives the texts of several lists of token ids, as ``tokenizer.batch_decode``; `others`, by name, those of
    models that have a tokenizer of their own.
    """

    def __init__(self, folder: str | Path, decode: Decode, others: Mapping[str, Decode] | None = None) -> None:
        self.folder = Path(folder)
        self.decode, self.others = decode, others or {}
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transcripts")
        self._pending: list[Future[None]] = []

    def add(
        self,
        records: Sequence[dict[str, Any]],
        prompts: Sequence[Any],
        responses: Sequence[Any],
        start: bool,
        models: Sequence[str] | None = None,
    ) -> None:
        """Have the records of one batch, of `trajectories`, written soon.

        Args:
            prompts, responses: [B] token ids of each turn: one-dimensional tensors or lists.
            start: True for the first batch of its step, which replaces a file left by a run that was killed.
            models: [B] whose tokens they are; None: all of the model that `decode` is of.
        """
        while len(self._pending) >= 2:  # steps that wait to be written, before the trainer waits for them
            self._take(self._pending.pop(0))
        self._pending.append(self._executor.submit(self._write, records, prompts, responses, start, models))

    def close(self) -> None:
        """Wait until all is written."""
        for future in self._pending:
            self._take(future)
        self._pending.clear()
        self._executor.shutdown()

    def _take(self, future: Future[None]) -> None:
        """Transcripts are for reading: a full disk is said, and does not end the training."""
        try:
            future.result()
        except Exception:
            logger.exception("transcripts could not be written to %s (verl_ext.rollouts_dir)", self.folder)

    def _write(
        self,
        records: Sequence[dict[str, Any]],
        prompts: Sequence[Any],
        responses: Sequence[Any],
        start: bool,
        models: Sequence[str] | None,
    ) -> None:
        rows_of: dict[str, list[int]] = {}
        for row in [turn["row"] for record in records for turn in record["turns"]]:
            rows_of.setdefault("" if models is None else models[row], []).append(row)
        texts: dict[int, tuple[str, str]] = {}
        for name, rows in rows_of.items():
            decode = self.others.get(name, self.decode)
            asked, answered = (decode([_ids(column[row]) for row in rows]) for column in (prompts, responses))
            texts.update(zip(rows, zip(asked, answered, strict=True), strict=True))
        for record in records:
            for turn in record["turns"]:
                row = turn.pop("row")
                turn["prompt"], turn["response"] = texts[row]
                turn["prompt_tokens"], turn["response_tokens"] = len(prompts[row]), len(responses[row])
        if records:
            write_records(self.folder, records, start)


def write_records(folder: str | Path, records: Iterable[Mapping[str, Any]], start: bool) -> None:
    """Append complete records, which are of one step, to ``<folder>/<step>.jsonl``; with `start`, in place of it."""
    found = list(records)
    write_lines(folder, found[0]["step"], found, start)


def write_lines(folder: str | Path, step: int, records: Iterable[Mapping[str, Any]], start: bool) -> None:
    """Append records, one a line, to ``<folder>/<step>.jsonl``; with `start`, in place of what a killed run left."""
    path = Path(folder) / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    # A lone surrogate cannot be encoded; a model's bytes can hold anything.
    with path.open("w" if start else "a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(_json(record), ensure_ascii=False) + "\n" for record in records)


def _ids(tokens: Any) -> list[int]:
    return tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)


def _json(value: Any) -> Any:
    """The value in JSON's own types: no NaN, numpy numbers as numbers, anything else as its text."""
    if isinstance(value, Mapping):
        return {str(name): _json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json(part) for part in value]
    if hasattr(value, "tolist") and not isinstance(value, str):
        return _json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
