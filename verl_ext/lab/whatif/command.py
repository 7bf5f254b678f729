# SPDX-License-Identifier: Apache-2.0
"""``verl-ext whatif RUN``: what other estimators would have done with the recorded batches of a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from verl_ext.common.overrides import count, positive


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``verl-ext whatif``."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run that had verl_ext.record_dir (with records/ in it), a folder of records, or one file",
    )
    parser.add_argument("--estimators", default="", metavar="NAME[,NAME]", help="registered names (default: all)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="algorithm.KEY=VALUE",
        help="an option of an estimator, in place of the run's; may be repeated",
    )
    parser.add_argument(
        "--group",
        type=positive,
        metavar="N",
        help="trajectories a prompt in the smaller groups that are drawn (default: half of those recorded, 2 at least)",
    )
    parser.add_argument(
        "--draws", type=count, default=256, help="how often they are drawn; 0: never (default: %(default)s)"
    )
    parser.add_argument("--html", type=Path, default=Path("whatif.html"), metavar="FILE", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="the last line is the numbers, as JSON")


def run(args: argparse.Namespace) -> int:
    """Compare, print, and write the page.

    Raises Failure: there is no record, a name is not registered, or nothing can be compared.
    """
    from verl_ext.common.overrides import Failure
    from verl_ext.integration.columns import BatchError
    from verl_ext.lab.whatif import show
    from verl_ext.lab.whatif.compare import compare
    from verl_ext.lab.whatif.records import find, read

    records = [read(path, args.set) for path in find(args.runs)]
    names = [name.strip() for name in args.estimators.split(",") if name.strip()]
    try:
        comparison = compare(records, names, draws=args.draws, group=args.group or 0)
    except BatchError as error:
        raise Failure(str(error)) from error
    print(show.text(comparison))
    args.html.parent.mkdir(parents=True, exist_ok=True)
    args.html.write_text(show.html_page(comparison), encoding="utf-8")
    print(f"\nthe same as a page: {args.html}")
    if args.json:
        print(json.dumps(show.plain(comparison)))
    return 0


def last_batches(run: Path) -> str:
    """What the estimators of the recipes, GRPO and RLOO make of the last batches of a run, in a few lines; "" if none
    are recorded."""
    from verl_ext.integration.columns import BatchError
    from verl_ext.integration.estimators import OURS
    from verl_ext.lab.whatif import show
    from verl_ext.lab.whatif.compare import compare
    from verl_ext.lab.whatif.records import RecordError, find, read

    try:
        comparison = compare([read(one) for one in find([run])], [*(one.name for one in OURS), "grpo", "rloo"], draws=0)
    except (RecordError, BatchError):
        return ""  # the user has turned the record off, or has a batch of his own making
    return show.brief(comparison)
