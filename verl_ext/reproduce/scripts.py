# SPDX-License-Identifier: Apache-2.0
"""``verl-ext reproduce script``: the launch script of a table's full scale, made from the table file.

A script is what `verl-ext reproduce plan` prints, for a person to read from top to bottom, copy and change: the common
settings once, then what each cell says. The words come from :func:`verl_ext.reproduce.plan.full_words`, so that a
script, `plan` and `run` say the same. Its text is ``assets/script.sh.jinja``. Imports nothing heavy.
"""

from __future__ import annotations

import textwrap

from verl_ext.reproduce import needs, plan
from verl_ext.reproduce.tables import Cell, Table

VARIABLES = ("CELL", "SEED", "RUN", "DATA")
"""Shell variables that a script sets and its words use."""


def file_name(table: Table) -> str:
    """Name of a table's script."""
    return f"{table.name.replace('/', '_')}.sh"


def cell_words(table: Table, cell: Cell) -> list[str]:
    """Hydra overrides of a cell with the script's variables in place of seed, folders and the cell's name."""
    name = f"trainer.experiment_name={plan.experiment(table, table.full, cell, '$SEED')}"
    words = plan.full_words(table, cell, "$SEED", "$RUN", "$DATA")
    return [word.replace(f".{cell.name}.", ".$CELL.") if word == name else word for word in words]


def script(table: Table) -> str:
    """The launch script of a table's full scale."""
    scale = table.full
    cells = [scale.cells[name] for name in scale.runnable]
    of_cell = {cell.name: cell_words(table, cell) for cell in cells}
    return plan.template("script.sh.jinja").render(
        table=table,
        file=file_name(table),
        cells=cells,
        inputs=scale.needs.inputs,
        cost=plan.cost(scale, cells, scale.seeds),
        packages=", ".join(needs.packages(table, cells)),
        of_cell=of_cell,
        common=[word for word in of_cell[cells[0].name] if all(word in words for words in of_cell.values())],
        quoted=lambda word: plan.shell_word(word, [*VARIABLES, *scale.needs.inputs]),
        comment=_comment,
    )


def _comment(text: str, first: str = "# ", later: str = "# ") -> str:
    return textwrap.fill(text, 118, initial_indent=first, subsequent_indent=later, break_on_hyphens=False,
                         break_long_words=False)  # fmt: skip
