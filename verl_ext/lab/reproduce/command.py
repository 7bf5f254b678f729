# SPDX-License-Identifier: Apache-2.0
"""``verl-ext reproduce``: list, plan, prepare, run, collect and script. Imports nothing heavy before it must."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_ext.common.overrides import OVERRIDE, UsageError, check_overrides, positive
from verl_ext.lab.reproduce import needs, plan, runs
from verl_ext.lab.reproduce.catalogue import find_cells, find_table, scale_of, tables
from verl_ext.lab.reproduce.tables import SCALES, Cell, Scale, Table, UnknownTableError

EPILOG = """\
TABLE is <method>/<table>, or the method alone for its default table.

  verl-ext reproduce list                       the tables, and what can run here
  verl-ext reproduce plan otb                   the exact commands of a table, and what it costs
  verl-ext reproduce run otb --scale laptop     run it on this machine's CPU, ending with the table
  verl-ext reproduce prepare otb --from FOLDER  the data sets of the full scale, from local files
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``verl-ext reproduce``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    table, scale, cells, out = (argparse.ArgumentParser(add_help=False) for _ in range(4))
    table.add_argument("table", metavar="TABLE", help="<method>/<table>, or a method for its default table")
    scale.add_argument("--scale", default="full", metavar="|".join(SCALES), help="default: %(default)s")
    # Of the form `--cell A B`, `--cell A --cell B` and `--cell A,B`; what is an override came after.
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    cells.add_argument("--cell", "--cells", metavar="C", help="default: all", **several)
    cells.add_argument("--seeds", "--seed", metavar="N", help="default: the table's", **several)
    cells.add_argument("--steps", type=positive, help="training steps (default: the table's)")
    out.add_argument("--out", type=Path, default=runs.DEFAULT_OUT, help="folder of all runs (default: %(default)s)")

    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="every table, its cells, and what can run here")
    whole = [table, scale, cells, out]
    actions.add_parser("plan", parents=whole, help="exact commands, cost and open questions of a table")

    one = actions.add_parser("prepare", parents=[table], help="bring the data sets of a table into verl's format")
    one.add_argument("--from", dest="source", type=Path, help="local folder (default: from the hub)")
    one.add_argument("--only", action="append", metavar="NAME", help="this data set alone")
    one.add_argument("--any-count", action="store_true", help="take another number of rows than the expected one")
    one.add_argument("--out", type=Path, help="folder to write (default: the cache, where run looks)")
    one.add_argument("--check", action="store_true", help="list KernelBench's problems that can be played here")
    one.add_argument(
        "--memory-mb", type=positive, default=1024, help="for --check: MiB that a player may allocate (default: 1024)"
    )

    one = actions.add_parser("run", parents=whole, help="run what is not complete, then collect")
    one.add_argument("--submit", metavar="ADDRESS", help="as Ray jobs: address of the cluster's dashboard")
    one.add_argument("--at-once", type=positive, default=1, help="jobs that may run at the same time (default: 1)")
    one.add_argument("--no-wait", action="store_true", help="submit all jobs now and return")
    one.add_argument("--no-collect", action="store_true", help="do not write the table afterwards")
    one.add_argument("--no-check", action="store_true", help="do not look first for GPUs, packages and data")
    one.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further Hydra overrides for verl's trainer")

    actions.add_parser("collect", parents=[table, scale, out], help="write the table from the runs that are complete")
    actions.add_parser("script", parents=[table], help="print the launch script of a table")


def run(args: argparse.Namespace) -> int:
    """Carry out ``verl-ext reproduce``. Returns 0; 1 for a failure; 2 for what cannot be carried out as written; 130
    after Ctrl-C.
    """
    if args.extras and args.action != "run":
        raise UsageError(f"`verl-ext reproduce {args.action}` does not take {' '.join(args.extras)} (see --help)")
    return _ACTIONS[args.action](args)


def _chosen(args: argparse.Namespace) -> tuple[Table, Scale]:
    """The table and scale of a command; says so if the scale is another table's."""
    asked = find_table(args.table)
    table, scale = scale_of(asked, args.scale)
    if table is not asked:
        print(f"{asked.name} at {scale.name} scale is {table.name}, which tests the same claim.", file=sys.stderr)
    return table, scale


def _split(args: argparse.Namespace, name: str) -> list[str]:
    """Values of ``--cell`` or ``--seeds``; overrides that they swallowed go back where they belong."""
    values = getattr(args, name)
    if hasattr(args, "overrides"):
        args.overrides = [*filter(OVERRIDE.match, values), *args.overrides]
        values = [value for value in values if not OVERRIDE.match(value)]
    return [part for value in values for part in value.split(",") if part]


def _seeds(args: argparse.Namespace, scale: Scale) -> list[int]:
    words = _split(args, "seeds")
    for word in words:
        if not word.isdecimal():
            raise UnknownTableError(f"{word!r} is not a seed: a whole number of at least 0, such as {scale.seeds[0]}")
    return list(dict.fromkeys(map(int, words))) or list(scale.seeds)


#: Overrides that a run of a table cannot have, and what to do instead.
_FIXED = {
    "recipe": "the recipes are the cell's",
    "data.seed": "use --seeds",
    "actor_rollout_ref.rollout.seed": "use --seeds",
    "trainer.total_training_steps": "use --steps",
    "trainer.default_local_dir": "use --out",
    "trainer.validation_data_dir": "use --out",
    "hydra.run.dir": "use --out",
}


def _overrides(args: argparse.Namespace) -> list[str]:
    words = [*args.overrides, *args.extras]
    check_overrides(words, f"reproduce {args.action}")
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        if key in _FIXED:
            raise UsageError(f"{word!r} would take the run out of its table: {_FIXED[key]}")
        if key == "trainer.logger" and "file" not in value:
            raise UsageError(f"{word!r}: the table is collected from verl's file logger; add `file` to the list")
    return words


def _list(args: argparse.Namespace) -> int:
    text = plan.template("list.txt.jinja").render(
        tables=tables(),
        data=plan.data_home(),
        gpus=needs.gpus(),
        cores=os.cpu_count(),
        find_cells=find_cells,
        cost=plan.cost,
        lacks=needs.lacks,
        number=plan.number,
        wrapped=_wrapped,
    )
    print(text, end="")
    return 0


def _wrapped(first: str, text: str, later: str | None = None) -> str:
    later = " " * len(first) if later is None else later
    return textwrap.fill(
        text, 118, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def _plan(args: argparse.Namespace) -> int:
    table, scale = _chosen(args)
    cells, seeds = find_cells(scale, _split(args, "cell")), _seeds(args, scale)
    again = ["--scale", scale.name]
    again += ["--cell", *(cell.name for cell in cells)] if args.cell else []
    again += ["--seeds", *map(str, seeds)] if args.seeds else []
    again += ["--steps", str(args.steps)] if args.steps else []
    again += ["--out", str(args.out)] if args.out != runs.DEFAULT_OUT else []
    effect = 0.0
    if len(seeds) > 1:
        from verl_ext.lab.reproduce.noise import detectable

        effect = detectable(len(seeds) ** -0.5, len(seeds) - 1)
    text = plan.template("plan.txt.jinja").render(
        table=table,
        scale=scale,
        seeds=seeds,
        laptop=plan.LAPTOP,
        cost=plan.cost(scale, cells, seeds, args.steps),
        effect=effect,
        lacks=needs.lacks(table, scale, cells),
        again=shlex.join(["verl-ext", "reproduce", "run", table.name, *again]),
        commands=[
            (cell, seed, _command(table, scale, cell, seed, args.steps, args.out.absolute()))
            for cell, seed in itertools.product(cells, seeds)
        ],
        wrapped=_wrapped,
    )
    print(text, end="")
    return 0


def _command(table: Table, scale: Scale, cell: Cell, seed: int, steps: int | None, out: Path) -> str:
    folder = runs.Run(table, scale, cell.name, seed, out).path
    if scale.name == "full":
        words = plan.full_words(table, cell, seed, folder, steps=steps)
        return plan.shown(["python", "-m", "verl.trainer.main_ppo", *words], scale.needs.inputs)
    # The demo makes the model and the data first, and prints verl's own command as it starts it.
    where = ["--steps", str(steps or scale.steps), "--seed", str(seed), "--out", str(folder)]
    what = ["--task", str(scale.task), "--recipe", ",".join(cell.recipe)]
    words = plan.words(scale.overrides, cell.overrides)
    return shlex.join(["verl-ext", "demo", *where, *what, *words])


def _prepare(args: argparse.Namespace) -> int:
    from verl_ext.lab.reproduce import prepare

    memory_mb = args.memory_mb if args.check else 0
    return prepare.main(find_table(args.table), args.source, args.only, args.out, args.any_count, memory_mb)


def _run(args: argparse.Namespace) -> int:
    from verl_ext.lab.reproduce import ray_jobs, run

    table, scale = _chosen(args)
    cells, seeds = find_cells(scale, _split(args, "cell")), _seeds(args, scale)
    # All cells of a seed before the next seed: an interrupted table has fewer seeds.
    extra = _overrides(args)
    if scale.name == "laptop":
        print(plan.LAPTOP, flush=True)
    steps = scale.steps if args.steps is None else args.steps
    found = [
        runs.Run(table, scale, cell.name, seed, args.out, steps, extra)
        for seed, cell in itertools.product(seeds, cells)
    ]
    how: dict[str, Any] = {"check": not args.no_check, "collect": not args.no_collect}
    if args.submit is not None:
        jobs = ray_jobs.RayJobs(args.submit)
        return ray_jobs.main(found, jobs, wait=not args.no_wait, at_once=args.at_once, **how)
    if args.no_wait or args.at_once != 1:
        raise UsageError("--at-once and --no-wait are for jobs: give --submit ADDRESS as well")
    return run.run(found, **how)


def _collect(args: argparse.Namespace) -> int:
    from verl_ext.lab.reproduce import render

    table, scale = _chosen(args)
    return render.main(table, scale.name, args.out)


def _script(args: argparse.Namespace) -> int:
    print(script(find_table(args.table)), end="")
    return 0


def script_name(table: Table) -> str:
    """Name that a table's launch script says of itself."""
    return f"{table.name.replace('/', '_')}.sh"


def script(table: Table) -> str:
    """The launch script of a table's full scale, for a person to read from top to bottom, copy and change: the common
    settings once, then what each cell says. Its words come from :func:`verl_ext.lab.reproduce.plan.full_words`, as
    those of `plan` and `run`.
    """
    scale = table.full
    cells = [scale.cells[name] for name in scale.runnable]
    named = ((cell.name, replace(cell, name="$CELL")) for cell in cells)
    of_cell = {name: plan.full_words(table, cell, "$SEED", "$RUN", "$DATA") for name, cell in named}
    return plan.template("script.sh.jinja").render(
        table=table,
        file=script_name(table),
        cells=cells,
        inputs=scale.needs.inputs,
        cost=plan.cost(scale, cells, scale.seeds),
        packages=", ".join(needs.packages(table, cells)),
        of_cell=of_cell,
        common=[word for word in of_cell[cells[0].name] if all(word in words for words in of_cell.values())],
        quoted=lambda word: plan.shell_word(word, ["CELL", "SEED", "RUN", "DATA", *scale.needs.inputs]),
        comment=lambda text, first="# ", later="# ": _wrapped(first, text, later),
    )


_ACTIONS = {"list": _list, "plan": _plan, "prepare": _prepare, "run": _run, "collect": _collect, "script": _script}
