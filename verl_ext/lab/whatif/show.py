# SPDX-License-Identifier: Apache-2.0
"""A comparison as text and as one HTML page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import pandas

from verl_ext.integration.mix import component_names
from verl_ext.lab.pages.html_page import page
from verl_ext.lab.whatif.compare import Comparison

ABOUT = """std, max |A|: of A over model tokens. zero turns: share of turns with |A| below 1e-6 of the largest.
eff. turns: how many carry the update (Kish). with ...: correlation over model tokens with the run's own estimator.
scale: how much of the return is in A, against the leave-one-out mean's; what a learning rate makes up for.
noise: second moment of the gradient in the logits at equal scale, against the leave-one-out mean's (1; less is better).
variance, company, cosine: of smaller groups drawn from these: the gradient's variance at equal scale against the
leave-one-out mean's, the share of A that is the luck of who else was drawn, and agreement with the whole groups'
leave-one-out mean."""
ESTIMATORS = "Estimators"
CORRELATION = "Correlation over model tokens"


def run_of(comparison: Comparison) -> str:
    """The estimator under which the turns were recorded, or the reference where the runs had different ones."""
    names = {name if len(found) == 1 else "mix" for found in _recorded(comparison) for name in found}
    return names.pop() if len(names) == 1 else comparison.reference


def _recorded(comparison: Comparison) -> list[tuple[str, ...]]:
    """The estimators of each run, each once."""
    return list(dict.fromkeys(tuple(component_names(one.algorithm)) for one in comparison.records))


def table(comparison: Comparison) -> pandas.DataFrame:
    """The numbers of each estimator, a row each, in the order of the comparison."""
    rows, own = {}, run_of(comparison)
    for name, one in comparison.estimators.items():
        rows[name] = {
            "std": one["std"],
            "max |A|": one["max_abs"],
            "zero turns": one["zero_turn_share"],
            "eff. turns": one["effective_turns"],
            **({f"with {own}": comparison.correlation[own][name]} if own in comparison.correlation else {}),
            "scale": one["scale"],
            "noise": one["noise"],
            **(one["resampled"] or {}),
        }
    return pandas.DataFrame.from_dict(rows, orient="index", dtype=float)


def shares(comparison: Comparison, what: str) -> pandas.DataFrame:
    """Shares of |A|, a row an estimator and a column an agent or turn; empty where there is but one."""
    found = pandas.DataFrame({name: one[what] for name, one in comparison.estimators.items()}, dtype=float).T
    return found if found.shape[1] > 1 else pandas.DataFrame()


def headline(comparison: Comparison) -> list[str]:
    """What was compared."""
    records = comparison.records
    rows = sum(len(one.keys) for one in records)
    prompts = sum(len({key.rsplit("_", 2)[0] for key in one.keys}) for one in records)
    steps = ", ".join(str(step) for step in sorted({one.step for one in records}))
    tokens = sum(int(one.tokens["response_mask"].sum()) for one in records)
    own = ", ".join(" + ".join(names) for names in _recorded(comparison))
    lines = [
        f"{rows} turns of {prompts} prompts, {tokens} model tokens (step {steps}), recorded under {own}",
        f"compared with the leave-one-out mean ({comparison.reference})",
    ]
    if comparison.group:
        lines.append(f"smaller groups: {comparison.group} trajectories a prompt")
    if single := sum(int((one.size == 1).sum()) for one in comparison.rows):
        lines.append(f"scale and noise leave out {single} turns without another of their prompt and turn_index")
    if not comparison.energies:
        lines.append("no sum_pi_squared was recorded: every token counts alike")
    return lines


def _parts(comparison: Comparison) -> list[tuple[str, pandas.DataFrame]]:
    parts = [(ESTIMATORS, table(comparison))]
    parts += [(f"Share of |A| by {what[:-1]}", shares(comparison, what)) for what in ("agents", "turns")]
    correlation = pandas.DataFrame.from_dict(comparison.correlation, orient="index", dtype=float)
    return [(title, one) for title, one in [*parts, (CORRELATION, correlation)] if not one.empty]


def text(comparison: Comparison) -> str:
    """For a terminal."""
    lines = headline(comparison)
    for title, one in _parts(comparison):
        # With more estimators the correlation with the run's own says enough; the page has all of them.
        if title != CORRELATION or len(one) <= 8:
            lines += ["", title, _frame(one)]
    lines += ["", ABOUT]
    if comparison.refused:
        lines += ["", "Not on these turns:", *(f"  {name}: {why}" for name, why in comparison.refused.items())]
    return "\n".join(lines)


def brief(comparison: Comparison) -> str:
    """The columns that say most, for the end of a demo."""
    columns = [f"with {run_of(comparison)}", "zero turns", "eff. turns", "std", "noise"]
    found = table(comparison)
    return _frame(found[[column for column in columns if column in found]])


def html_page(comparison: Comparison) -> str:
    """One page that needs nothing else."""

    number = "{:.3g}".format

    def paragraphs(lines: Sequence[str]) -> str:
        return "".join(f"<p>{html.escape(line)}</p>" for line in lines)

    tables = "".join(
        f"<h2>{html.escape(title)}</h2>{one.to_html(na_rep='-', float_format=number, border=0, classes=kind)}"
        for title, one, kind in [(t, one, "sort" if t == ESTIMATORS else "heat") for t, one in _parts(comparison)]
    ).replace(' style="text-align: right;"', "")  # pandas's own, which the page's policy does not let in
    refused = [f"{name}: {why}" for name, why in comparison.refused.items()]
    return page(
        "verl_ext.lab.whatif",
        title="What other estimators would have done",
        data={},
        body=paragraphs(headline(comparison)) + tables,
        about=paragraphs([ABOUT]),
        refused=("<h2>Not on these turns</h2>" if refused else "") + paragraphs(refused),
    )


def plain(comparison: Comparison) -> dict[str, Any]:
    """For JSON."""
    return {
        "estimators": comparison.estimators,
        "correlation": comparison.correlation,
        "reference": comparison.reference,
        "group": comparison.group,
        "refused": comparison.refused,
    }


def _frame(found: pandas.DataFrame) -> str:
    return found.to_string(na_rep="-", float_format="{:.3g}".format, line_width=10_000)
