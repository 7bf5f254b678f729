# SPDX-License-Identifier: Apache-2.0
"""``verl-ext rollouts RUN``: transcripts as text, or as one HTML page."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

from verl_ext.common.overrides import positive
from verl_ext.lab.transcripts import page
from verl_ext.lab.transcripts.read import OUTCOMES, Choice, TranscriptError, as_text, listing, read, step_files

PAGE_LIMIT, LIST_LIMIT = 1000, 50


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``verl-ext rollouts``."""
    parser.add_argument(
        "run", type=Path, help="folder of a run (with rollouts/ in it), a folder of transcripts, or one file"
    )
    parser.add_argument(
        "--step", type=_steps, metavar="N[-M]", help="training step or steps (text: the last; page: all)"
    )
    parser.add_argument(
        "--trajectory", default="", metavar="ID", help="its id or the beginning of it, as the list shows it"
    )
    parser.add_argument("--agent", default="", help="only trajectories in which this agent speaks")
    parser.add_argument("--outcome", choices=OUTCOMES, default="", help="only trajectories that ended so")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one HTML page, to open from disk")
    parser.add_argument(
        "--full", action="store_true", help="text: repeat in each prompt what earlier turns already show"
    )
    parser.add_argument(
        "--limit",
        type=positive,
        metavar="N",
        help=f"at most so many trajectories, the last ones (default: {LIST_LIMIT} in the list, {PAGE_LIMIT} on a page)",
    )


def run(args: argparse.Namespace) -> int:
    """Show the transcripts that the command line names. Raises TranscriptError: there are none."""
    choice = Choice(steps=args.step, trajectory=args.trajectory, agent=args.agent, outcome=args.outcome)
    if args.html is not None:
        if args.html.suffix.lower() not in (".html", ".htm"):
            raise TranscriptError(f"--html {args.html}: name a file that ends in .html")
        text, shown, found = _page(args, choice)
        args.html.parent.mkdir(parents=True, exist_ok=True)
        args.html.write_text(text, encoding="utf-8")
        print(f"{args.html}: {shown} trajectories, {len(text.encode()) / 1e6:.1f} MB{_note(shown, found)}")
        return 0
    if choice.steps is None and not choice.trajectory:
        last = max(step_files(args.run))
        choice = dataclasses.replace(choice, steps=(last, last))
    records = read(args.run, choice)
    chosen = records[-(args.limit or LIST_LIMIT) :]
    if len(records) == 1 or (args.trajectory and len({record["trajectory"] for record in records}) == 1):
        print("\n\n".join(as_text(record, full=args.full) for record in chosen))
        return 0
    print(listing(chosen) + _note(len(chosen), len(records)))
    print("\nOne of them: --trajectory ID. All in a browser: --html FILE.html")
    return 0


def _page(args: argparse.Namespace, choice: Choice) -> tuple[str, int, int]:
    """The page of the transcripts as they are now, how many it shows, and of how many."""
    records = read(args.run, choice)
    chosen = records[-(args.limit or PAGE_LIMIT) :]
    return page.render(chosen, f"Rollouts of {args.run.resolve().name}"), len(chosen), len(records)


def _note(shown: int, found: int) -> str:
    return f"\nthe last {shown} of {found} trajectories; --limit {found} shows all" if shown < found else ""


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a step (7) or a range of steps (3-7)")
    return int(match[1]), int(match[2] or match[1])
