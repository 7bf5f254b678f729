# SPDX-License-Identifier: Apache-2.0
"""``verl-ext rollouts RUN``: transcripts as text, or as one HTML page."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

from verl_ext.overrides import positive
from verl_ext.transcripts import page
from verl_ext.transcripts.read import OUTCOMES, Choice, TranscriptError, as_text, listing, read, step_files

PAGE_LIMIT, LIST_LIMIT = 1000, 50


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``verl-ext rollouts``."""
    parser.add_argument(
        "run", type=Path, help="folder of a run (with rollouts/ in it), a folder of transcripts, or one file"
    )
    parser.add_argument(
        "--step", type=_steps, default=None, metavar="N[-M]", help="training step or steps (text: the last; page: all)"
    )
    parser.add_argument(
        "--trajectory", default="", metavar="ID", help="its id or the beginning of it, as the list shows it"
    )
    parser.add_argument("--agent", default="", help="only trajectories in which this agent speaks")
    parser.add_argument("--outcome", choices=OUTCOMES, default="", help="only trajectories that ended so")
    parser.add_argument(
        "--html", type=Path, default=None, metavar="FILE", help="write one HTML page, to open from disk"
    )
    parser.add_argument(
        "--full", action="store_true", help="text: repeat in each prompt what earlier turns already show"
    )
    parser.add_argument(
        "--limit",
        type=positive,
        default=None,
        metavar="N",
        help=f"at most so many trajectories, the last ones (default: {LIST_LIMIT} in the list, {PAGE_LIMIT} on a page)",
    )


def run(args: argparse.Namespace) -> int:
    """Show the transcripts that the command line names.

    Raises:
        TranscriptError: there are none.
    """
    choice = Choice(steps=args.step, trajectory=args.trajectory, agent=args.agent, outcome=args.outcome)
    if args.html is None and choice.steps is None and not choice.trajectory:
        last = max(step_files(args.run))
        choice = dataclasses.replace(choice, steps=(last, last))
    records = read(args.run, choice)
    limit = args.limit or (LIST_LIMIT if args.html is None else PAGE_LIMIT)
    chosen = records[-limit:]
    note = f"the last {len(chosen)} of {len(records)} trajectories; --limit {len(records)} shows all"
    if args.html is not None:
        if args.html.suffix.lower() not in (".html", ".htm"):
            raise TranscriptError(f"--html {args.html}: name a file that ends in .html")
        args.html.parent.mkdir(parents=True, exist_ok=True)
        text = page.render(chosen, f"Rollouts of {args.run.resolve().name}")
        args.html.write_text(text, encoding="utf-8")
        print(f"{args.html}: {len(chosen)} trajectories, {len(text.encode()) / 1e6:.1f} MB")
        if len(chosen) < len(records):
            print(note)
        return 0
    if len(records) == 1 or (args.trajectory and len({record["trajectory"] for record in records}) == 1):
        print("\n\n".join(as_text(record, full=args.full) for record in chosen))
        return 0
    print(listing(chosen))
    if len(chosen) < len(records):
        print(note)
    print("\nOne of them: --trajectory ID. All in a browser: --html FILE.html")
    return 0


def _steps(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a step (7) or a range of steps (3-7)")
    return int(match[1]), int(match[2] or match[1])
