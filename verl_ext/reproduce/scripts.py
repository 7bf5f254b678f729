# SPDX-License-Identifier: Apache-2.0
"""``verl-ext reproduce script``: the launch script of a table's full scale, made from the table file.

A script is what `verl-ext reproduce plan` prints, for a person to read from top to bottom, copy and change: the common
settings once, then what each cell says. The words come from :func:`verl_ext.reproduce.plan.full_words`, so that a
script, `plan` and `run` say the same. Imports nothing heavy.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from verl_ext.reproduce import needs, plan
from verl_ext.reproduce.tables import Cell, Table

VARIABLES = ("CELL", "SEED", "RUN", "DATA")
"""Shell variables that a script sets and its words use."""


def file_name(table: Table) -> str:
    """Name of a table's script."""
    return f"{table.name.replace('/', '_')}.sh"


def cell_words(table: Table, cell: Cell) -> list[str]:
    """Hydra overrides of a cell with the script's variables in place of seed, folders and the cell's name."""
    words = plan.full_words(table, cell, "$SEED", "$RUN", "$DATA")
    named = plan.experiment(table, table.full, cell, "$SEED")
    general = named.replace(f".{cell.name}.", ".$CELL.")
    return [
        f"trainer.experiment_name={general}" if word == f"trainer.experiment_name={named}" else word for word in words
    ]


def script(table: Table) -> str:
    """The launch script of a table's full scale."""
    scale = table.full
    cells = [scale.cells[name] for name in scale.runnable]
    variables = [*VARIABLES, *scale.needs.inputs]
    of_cell = {cell.name: cell_words(table, cell) for cell in cells}
    common = [word for word in of_cell[cells[0].name] if all(word in words for words in of_cell.values())]

    lines = ["#!/usr/bin/env bash", *_header(table, cells), "set -euo pipefail", ""]
    names = "|".join(cell.name for cell in cells)
    lines += [
        f"usage='usage: bash {file_name(table)} CELL [SEED] [KEY=VALUE...]   CELL is {names}'",
        'CELL=${1:?"$usage"}',
        "SEED=${2:-0}",
        "shift $(($# < 2 ? $# : 2))",
        "",
    ]
    if scale.needs.inputs:
        lines.append("# What you have to bring.")
        for name, text in scale.needs.inputs.items():
            lines += [*_comment(f"{name}: {text}"), f': "${{{name}:?}}"', f"export {name}"]
        lines.append("")
    lines += [
        f"# Prepared data (verl-ext reproduce prepare {table.name}) and the folder of this run.",
        "DATA=${DATA:-${VERL_EXT_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/verl_ext}/data}",
        f"RUN=${{OUT:-$PWD/runs/scripts}}/{table.folder}/full/$CELL/seed_$SEED",
        'export VERL_FILE_LOGGER_PATH="$RUN/metrics.jsonl"',
        "",
        "# What the cells differ in.",
        'case "$CELL" in',
    ]
    for cell in cells:
        lines.append(f"{cell.name})")
        lines += [f"    {text}" for text in _comment(f"{cell.label}{f': {cell.note}' if cell.note else ''}")]
        own = [plan.shell_word(word, variables) for word in of_cell[cell.name] if word not in common]
        lines += ["    cell=(", *(f"        {word}" for word in own), "    )", "    ;;"]
    lines += ["*)", '    echo "$usage" >&2', "    exit 2", "    ;;", "esac", "", 'mkdir -p "$RUN"']
    lines.append('python -m verl.trainer.main_ppo "${cell[@]}" \\')
    lines += [f"    {plan.shell_word(word, variables)} \\" for word in common]
    lines.append('    "$@"')
    return "\n".join(lines) + "\n"


def _comment(text: str, width: int = 118) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, width - 2, break_on_hyphens=False, break_long_words=False)]


def _header(table: Table, cells: Sequence[Cell]) -> list[str]:
    scale = table.full
    lines = [
        *_comment(f"{table.title} ({table.paper}), at the paper's scale, with verl's vLLM rollout."),
        *_comment(
            f"Made from recipe/{table.name}.yaml by `verl-ext reproduce script {table.name} > {file_name(table)}`, "
            "to be changed at will."
        ),
        "#",
        *_comment(f"bash {file_name(table)} CELL [SEED] [KEY=VALUE...]"),
        *_comment(
            f"One cell and seed; `verl-ext reproduce run {table.name} --cell CELL --seeds SEED` makes the same run and "
            "keeps the record from which `collect` makes the table. The same command goes on with a killed run."
        ),
        "#",
        *_comment(f"Claim: {table.claim}"),
        *_comment(f"Cost: {plan.cost(scale, cells, scale.seeds)}."),
        *_comment(f"Packages: {', '.join(needs.packages(table, cells))}."),
    ]
    if table.open:
        lines += ["# Left open by what was read:"]
        for sentence in table.open:
            wrapped = textwrap.wrap(sentence, 112, break_on_hyphens=False, break_long_words=False)
            lines += [f"# {'- ' if number == 0 else '  '}{line}" for number, line in enumerate(wrapped)]
    return lines
