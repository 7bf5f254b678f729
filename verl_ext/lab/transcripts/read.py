# SPDX-License-Identifier: Apache-2.0
"""Read transcripts, choose among them, and show them as text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.common.overrides import Failure

OUTCOMES = ("success", "failure", "error")
FOLDER = "rollouts"
"""Where a run folder keeps its transcripts, by convention; the demo does."""


class TranscriptError(Failure):
    """There are no such transcripts. The message says what there is."""


@dataclass(frozen=True)
class Choice:
    """Which trajectories are wanted; None and empty mean any."""

    steps: tuple[int, int] | None = None  # first and last training step
    trajectory: str = ""  # id or its beginning; ``abc_2`` also means sample 2 of the prompt whose uid begins with abc
    agent: str = ""  # name of an agent that speaks in it
    outcome: str = ""  # one of `OUTCOMES`

    def wants(self, record: Mapping[str, Any]) -> bool:
        """Whether a record is chosen."""
        return (
            (self.steps is None or self.steps[0] <= record["step"] <= self.steps[1])
            and _named(str(record["trajectory"]), self.trajectory)
            and (not self.agent or self.agent in record["agents"])
            and (not self.outcome or self.outcome == record["outcome"])
        )


def _named(trajectory: str, wanted: str) -> bool:
    if trajectory.startswith(wanted):
        return True
    uid, _, session = wanted.rpartition("_")
    return bool(uid) and trajectory.startswith(uid) and trajectory.endswith(f"_{session}")


def step_files(run: str | Path) -> dict[int, Path]:
    """Files of transcripts by step, ascending: of a run (in its ``rollouts``), a folder of transcripts, or one file.
    Raises TranscriptError: there are none.
    """
    run = Path(run)
    candidates = [run] if run.is_file() else sorted([*(run / FOLDER).glob("*.jsonl"), *run.glob("*.jsonl")])
    files = {int(path.stem): path for path in candidates if path.stem.isdigit()}
    if not files:
        raise TranscriptError(
            f"no transcripts in {run}: neither {run}/{FOLDER}/<step>.jsonl nor {run}/<step>.jsonl is there. "
            f"A run writes them with verl_ext.rollouts_dir={run}/{FOLDER}."
        )
    return dict(sorted(files.items()))


def read(run: str | Path, choice: Choice) -> list[dict[str, Any]]:
    """The chosen trajectories, in order of step and prompt. Raises TranscriptError: nothing is chosen, or a file holds
    something else.
    """
    files = step_files(run)
    steps = choice.steps
    wanted = [step for step in files if steps is None or steps[0] <= step <= steps[1]]
    if steps is not None and not wanted:
        asked = str(steps[0]) if steps[0] == steps[1] else f"{steps[0]}-{steps[1]}"
        raise TranscriptError(f"no transcripts of step {asked}; there are steps {_ranges(files)}")
    records = [record for step in wanted for record in _lines(files[step])]
    # A whole id may be the beginning of others: that of sample 1 is, of sample 10.
    records = [record for record in records if str(record["trajectory"]) == choice.trajectory] or records
    chosen = [record for record in records if choice.wants(record)]
    if not chosen:
        raise TranscriptError(_nothing(choice, records))
    return chosen


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = [(number, line) for number, line in enumerate(file, start=1) if line.strip()]
    for number, line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == lines[-1][0]:
                return  # a run that is still writing, or was killed while it wrote
            raise TranscriptError(f"{path}, line {number} is not JSON") from None
        if not isinstance(record, dict) or not {"trajectory", "turns", "outcome", "agents"} <= record.keys():
            raise TranscriptError(
                f"{path}, line {number} is not a transcript of verl_ext (verl's own dump, trainer.rollout_data_dir, "
                "has the same file names). Name the folder that verl_ext.rollouts_dir names."
            )
        yield record


def _nothing(choice: Choice, records: Sequence[Mapping[str, Any]]) -> str:
    if not records:
        return "no trajectory in these steps: their files are empty, or hold the beginning of a line alone"
    agents = sorted({agent for record in records for agent in record["agents"]})
    if choice.agent and choice.agent not in agents:
        return f"no agent {choice.agent!r} in these steps; there {'are ' + ', '.join(agents) if agents else 'is none'}"
    if choice.trajectory and not any(_named(str(record["trajectory"]), choice.trajectory) for record in records):
        return f"no trajectory {choice.trajectory!r} in these steps; the first is {records[0]['trajectory']}"
    counts = {name: sum(record["outcome"] == name for record in records) for name in OUTCOMES}
    return "no trajectory is chosen; there are " + ", ".join(f"{count} with {name}" for name, count in counts.items())


def _ranges(steps: Collection[int]) -> str:
    """``1-3, 7`` for 1, 2, 3, 7."""
    firsts = [step for step in steps if step - 1 not in steps]
    lasts = [step for step in steps if step + 1 not in steps]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))


def new_part(turn: Mapping[str, Any], before: Mapping[str, Any] | None) -> tuple[bool, str]:
    """The prompt of a turn without what the turn before already shows. Returns ``(continued, text)``: whether the
    prompt begins with the earlier prompt and response, and the rest of it.
    """
    if before is not None:
        known = before["prompt"] + before["response"]
        if known and turn["prompt"].startswith(known):
            return True, turn["prompt"][len(known) :]
    return False, turn["prompt"]


def visible(text: Any) -> str:
    """A model's text for a terminal: control characters are spelled out, so that none of them acts."""
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _number(value: Any, sign: str = "-") -> str:
    """A number in four digits; what is not finite is written as a word."""
    return format(value, f"{sign}.4g") if isinstance(value, int | float) else visible(value)


def short(trajectory: str) -> str:
    """An id that fits a line, and by which `Choice` finds the trajectory."""
    uid, _, session = trajectory.rpartition("_")
    return f"{uid[:8]}_{session}" if uid else trajectory[:12]


def listing(records: Sequence[Mapping[str, Any]]) -> str:
    """One line a trajectory."""
    rows = [("STEP", "TRAJECTORY", "OUTCOME", "REWARD", "TURNS", "AGENTS", "LAST RESPONSE")]
    for record in records:
        agents = ",".join(visible(name) for name in record["agents"])
        last = textwrap.shorten(visible(record["turns"][-1]["response"]), 60, placeholder=" ...")
        outcome = record["outcome"] + (f" ({visible(record['failure'])})" if record["failure"] else "")
        cells = (str(record["step"]), short(record["trajectory"]), outcome, _number(record["reward"]))
        rows.append((*cells, str(len(record["turns"])), agents, last))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def as_text(record: Mapping[str, Any], full: bool = False) -> str:
    """One trajectory to read; `full` repeats in each prompt what the turns before already show."""
    agents = f", agents {', '.join(visible(name) for name in record['agents'])}" if record["agents"] else ""
    ended = visible(record["failure"] or record["stop_reason"])
    lines = [
        f"step {record['step']}, trajectory {record['trajectory']}",
        f"{record['outcome']}, reward {_number(record['reward'])}, {len(record['turns'])} turns{agents}"
        + (f", ended by {ended}" if ended else ""),
    ]
    if record["info"]:
        lines.append(", ".join(f"{visible(name)} {_number(value)}" for name, value in record["info"].items()))
    before = None
    for turn in record["turns"]:
        lines += ["", _turn_heading(turn)]
        if "observation" in turn:
            lines += _block("observation", turn["observation"])
        continued, prompt = (False, turn["prompt"]) if full else new_part(turn, before)
        lines += _block("prompt, continued" if continued else "prompt", prompt)
        lines += _block("response", turn["response"])
        if "action" in turn:
            lines += _block("action", turn["action"])
        if turn["more"]:
            said = {name: _number(of) if isinstance(of, float) else visible(of) for name, of in turn["more"].items()}
            lines.append("  " + ", ".join(f"{visible(name)}={value}" for name, value in said.items()))
        before = turn
    return "\n".join(lines)


def _turn_heading(turn: Mapping[str, Any]) -> str:
    reward = "" if turn["reward"] is None else f", reward {_number(turn['reward'])}"
    return (
        f"--- turn {turn['turn']}{', ' + visible(turn['agent']) if turn['agent'] else ''}"
        f"{reward}, advantage {_number(turn['advantage'], '+')}"
        f", {turn['prompt_tokens']} + {turn['response_tokens']} tokens"
        f"{'' if turn['valid'] else ', INVALID ACTION'}{'' if turn['counted'] else ', not counted'}"
    )


def _block(name: str, text: Any) -> list[str]:
    return [f"  {name}:", *(f"    | {line}" for line in visible(text).split("\n"))]
