# SPDX-License-Identifier: Apache-2.0
"""``verl-ext report RUN...``: one HTML page, and pictures, that compare runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from verl_ext.common.overrides import positive

OUT = Path("report.html")
"""Where the page goes if nothing else is said."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``verl-ext report``."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run, or with runs below it, or a file: verl's jsonl (trainer.logger=file), tensorboard's "
        "event files, or wandb's offline folder",
    )
    parser.add_argument("--out", type=_page, metavar="FILE", help=f"default: {OUT}")
    parser.add_argument("--png", type=Path, metavar="FOLDER", help="also write a PNG of each panel")
    parser.add_argument(
        "--smooth", type=positive, default=1, metavar="N", help="mean of the last N steps (default: 1, none)"
    )
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        type=_group,
        metavar="NAME=PATTERN",
        help="runs whose name or path fits the pattern (with * and ?) are seeds of one group; may be repeated "
        "(default: runs that differ in seed_<number> alone)",
    )
    parser.add_argument("--no-groups", action="store_true", help="each run is a line of its own")
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="a metric, or a pattern with *, to show first; may be repeated",
    )
    parser.add_argument("--title", help="of the page (default: the names of the groups)")


def run(args: argparse.Namespace) -> int:
    """Write what the command line asks for. Raises LogError: no run has metrics, or a group or metric fits nothing."""
    text, runs, sections, left_out = _made(args)
    out = OUT if args.out is None else args.out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(text.encode("utf-8", "backslashreplace"))
    metrics = len({name for one in runs for name in one.log.curves})
    groups, size = len({one.group for one in runs}), out.stat().st_size / 1e6
    print(f"{out}: {len(runs)} runs in {groups} groups, {metrics} metrics, {size:.1f} MB")
    problems = [f"{one.name}: {problem}" for one in runs for problem in one.log.problems]
    for problem in [*(f"left out: {problem}" for problem in left_out), *problems]:
        print(problem)
    if args.png is not None:
        from verl_ext.lab.report.pictures import write_pictures

        written = write_pictures(runs, sections, args.png, smooth=args.smooth)
        print(f"{args.png}: {len(written)} pictures")
    return 0


def _made(args: argparse.Namespace) -> tuple[str, list[Any], Any, list[str]]:
    """The page of the runs as they are now; the runs, the sections, and what was left out."""
    from verl_ext.lab.pages.html_page import page
    from verl_ext.lab.report import compare
    from verl_ext.lab.report.data import page_data

    left_out: list[str] = []
    runs = compare.load(args.runs, dict(args.group), by_seed=not args.no_groups, left_out=left_out)
    sections = compare.sections(runs, args.metric)
    names = compare.group_names(runs)
    title = args.title or "Runs: " + ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    data = page_data(runs, sections, title=title, smooth=args.smooth, left_out=left_out)
    return page("verl_ext.lab.report", title=title, data=data, charts=True), runs, sections, left_out


def _page(text: str) -> Path:
    if Path(text).suffix.lower() not in (".html", ".htm"):
        raise argparse.ArgumentTypeError(f"{text!r}: name a file that ends in .html")
    return Path(text)


def _group(text: str) -> tuple[str, str]:
    name, sign, pattern = text.partition("=")
    if not (name and sign and pattern):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATTERN, such as grpo=*/grpo/*")
    return name, pattern
