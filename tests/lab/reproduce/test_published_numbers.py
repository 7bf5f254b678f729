# SPDX-License-Identifier: Apache-2.0
"""The tables' published numbers against a transcription of their own, typed from the sources as they stand there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

import pytest

from verl_ext.lab.reproduce.catalogue import publications, tables
from verl_ext.lab.reproduce.tables import PublishedNumber, Table

TABLES = tables()

#: A number: table, cell, metric, value, and the cell that it is a change to (or None).
Number = tuple[str, str, str, float, str | None]


def grid(table: str, cells: Sequence[str], metrics: Sequence[str], text: str) -> set[Number]:
    """Numbers of lines of cells ``a/b | a/b``: a line has its first metric, or a metric of its own in front."""
    found: set[Number] = set()
    for line, cell in zip(filter(None, map(str.strip, text.splitlines())), cells, strict=True):
        values = re.split(r"[/,|]", line)
        found |= {
            (table, cell, metric, float(value), None)
            for metric, value in zip(metrics, values, strict=False)
            if value.strip() != "-"
        }
    return found


TEAMS = ("single", "grpo_shared", "dr_mas_shared", "grpo", "dr_mas")

#: Dr. MAS, mathematics, avg@16/pass@16: for 4B, then 8B, one agent GRPO, shared GRPO and Dr. MAS, separate ones.
MATHEMATICS = {
    "aime24": "38.8/63.3 39.3/64.0 39.3/63.3 42.7/73.3 46.9/80.0  36.0/67.3 42.7/66.7 54.8/80.0 42.9/70.0 44.6/73.3",
    "aime25": "33.1/56.7 31.4/53.3 38.1/63.3 35.6/63.3 38.1/66.7  32.7/50 31.4/53.3 39.4/70 31.8/53.3 41.5/56.7",
    "amc23": "83.5/95 85.6/95 87.3/95 83.5/95 89.5/97.5  87/95 87.3/95 88.9/97.5 86.1/95 87.5/95",
    "math500": "89.0/94.2 89.5/96.2 90.5/96.0 89.6/95.0 92.4/97.0  89.9/94.8 89.6/96.2 91.3/96.0 90.5/96.6 90.7/96.2",
    "minerva": "37.9/49.6 37.5/50.0 40.9/53.3 37.5/50.7 39.0/51.5  36.0/46.7 37.5/50 39.9/49.6 39.2/50.7 40.9/54.0",
    "olympiad": "53.3/66.5 57.6/65.6 58.2/68.6 56.3/68.9 60.9/73.6  57.9/67.5 58.2/71.4 59.3/72.4 58.2/67.6 59.0/70.2",
    "avg16": "55.9/70.9 56.8/70.7 59.0/73.2 57.5/74.4 61.1/77.7  56.6/70.2 57.8/72.1 62.3/77.6 58.1/72.2 60.7/74.2",
}
#: Its search, averages of 3B and 7B, then the seven sets at 7B with separate weights, GRPO and Dr. MAS.
SEARCH = {
    "dr_mas/search_3b": "32.5/42.8 34.8/52.9 36.7/53.8 34.5/46.7 36.9/53.0",
    "dr_mas/search": "42.1/55.6 41.5/57.0 42.5/57.7 28.0/40.5 43.8/58.3",
}
QUESTIONS = {
    "nq": "27.1/39.0 47.7/59.5",
    "triviaqa": "53.1/64.4 63.4/72.7",
    "popqa": "20.7/27.9 46.7/57.8",
    "hotpotqa": "24.4/36.2 44.0/57.5",
    "wiki2": "30.3/51.2 45.4/68.1",
    "musique": "8.3/18.1 19.4/34.9",
    "bamboogle": "31.9/46.4 39.8/57.6",
}


def pairs(text: str) -> list[tuple[float, ...]]:
    return [tuple(map(float, one.split("/"))) for one in text.split()]


def dr_mas_math() -> set[Number]:
    found: set[Number] = set()
    for name, text in MATHEMATICS.items():
        second = "pass16" if name == "avg16" else f"pass16_{name}"
        for place, (first, other) in enumerate(pairs(text)):
            table, cell = ("dr_mas/math", "dr_mas/math_8b")[place // 5], TEAMS[place % 5]
            found |= {(table, cell, name, first, None), (table, cell, second, other, None)}
    return found


def dr_mas_search() -> set[Number]:
    found: set[Number] = set()
    for table, text in SEARCH.items():
        for cell, (first, other) in zip(TEAMS, pairs(text), strict=True):
            found |= {(table, cell, "avg16", first, None), (table, cell, "pass16", other, None)}
    for name, text in QUESTIONS.items():
        for cell, (first, other) in zip(("grpo", "dr_mas"), pairs(text), strict=True):
            found |= {
                ("dr_mas/search", cell, name, first, None),
                ("dr_mas/search", cell, f"pass16_{name}", other, None),
            }
    return found


#: KernelBench by level, per cent at a speedup of 1, 1.2, 1.5 and 2, by the cells of the two tables that have the row.
KERNELBENCH = {
    ("gpt5",): "19.5/16.5/12.5/11 46.7/28.6/13.1/3 21/12/4/2",
    ("claude",): "15.5/13.5/11/8.5 50/26.7/9.2/1.8 21/11/5/4",
    ("autotriton",): "4.5/3.6/2.8/2.1 30.6/9.2/2.6/.5 7.5/0/0/0",
    ("deepseek",): "7.5/5.5/4.5/4 11/6.5/2.5/.5 2/1/0/0",
    ("glm",): "19.4/17.2/13.1/10.4 30/20.5/8.5/3.5 5/2/2/2",
    ("qwen3_8b",): "5.8/4.8/4.1/3.4 13/5.6/2/1.1 5.7/.2/0/0",
    ("qwen3_32b",): "6.1/4.9/4.3/4 14/9.4/2.4/.2 3.5/0/0/0",
    ("qwen3_coder",): "6/5.2/5.1/3.8 12.6/5/1.5/.3 7/1/0/0",
    ("cold_start_8b",): "7.5/6.6/5/4.3 8.8/5.6/1.8/.4 .5/0/0/0",
    ("trloo",): "15.9/12.8/10.9/8.4 46/20/5/1.5 10.8/1/0/0",
    ("trloo_14b", "trloo"): "20.3/16.9/13.2/11.6 49.2/25.6/7.4/2.1 8.8/1.2/.2/0",
    ("stts_last", "stts_last"): "24.1/18.8/15.3/12.8 59.8/31.6/9.6/3 17.1/3/.2/0",
    ("stts_best", "stts_best"): "39.3/25.1/20.4/17.6 80.9/47.8/23.6/12.5 29.8/7.3/.5/0",
}
COMPILE = {
    ("gpt5_compile",): "18.6/8/6.5/5.5 22.1/3.6/1.5/1 14/4/3/1",
    ("claude_compile",): "10/2.2/2/1.8 20.5/3/0/0 12/3.5/.5/0",
    ("trloo_compile",): "16/3/1.5/8.4 20.6/.8/0/0 7.2/2.3/0/0",
    ("trloo_14b_compile", "trloo_compile"): "17.8/5/3.3/2.5 23.5/1.9/0/0 9.2/3/0/0",
}


def kernelbench(rows: dict[tuple[str, ...], str]) -> set[Number]:
    return {
        (table, cell, f"fast_{name}_level{level}", value, None)
        for cells, text in rows.items()
        for table, cell in zip(("trloo/kernelbench", "trloo/kernelbench_14b"), cells, strict=False)
        for level, values in enumerate(pairs(text), start=1)
        for name, value in zip(("1", "1_2", "1_5", "2"), values, strict=True)
    }


KPO_METRICS = [f"{what}_{data}" for data in ("aime24", "aime25", "math500") for what in ("avg16", "pass16")]
PEAKS = ("aime25", "aime24", "amc23", "math500")
TIR = ("aime24", "aime25", "math500", "olympiad_bench", "amc23", "hmmt25")

#: The one list of sources: the mark of each, and the numbers that stand there.
SOURCES: dict[str, tuple[str, set[Number]]] = {
    "dr_mas_math": ("certain", dr_mas_math()),
    "dr_mas_search": ("certain", dr_mas_search()),
    "dr_mas_normalisation": (
        "certain",
        grid(
            "dr_mas/normalisation",
            ("grpo", "agent_mean", "agent_std", "dr_mas"),
            ("avg16", "pass16"),
            "28.0/40.5\n 39.1/53.5\n 42.9/57.6\n 43.8/58.3",
        ),
    ),
    "kernelbench": ("certain", kernelbench(KERNELBENCH)),
    "kernelbench_compile": ("certain", kernelbench(COMPILE)),
    "hgpo": (
        "secondary",
        grid(
            "hgpo/alfworld",
            ("grpo", "gigpo_k2", "gigpo_k4", "hgpo_k2", "hgpo_k4"),
            ("in_dist", "out_dist"),
            "72.8/70.1\n 90.16/84.76\n 93.29/91.53\n 92.77/90.16\n 94.85/92.12",
        )
        | grid("hgpo/webshop", ("gigpo_k4", "hgpo_k4"), ("score", "success"), "86.80/73.24\n 90.64/78.12"),
    ),
    "hgpo_7b": (
        "secondary",
        grid("hgpo/alfworld_7b", ("gigpo_k2", "hgpo_k2", "hgpo_k4"), ("in_dist",), "93.29\n 95.44\n 95.96"),
    ),
    "hgpo_7b_unsure": (
        "unverified",
        grid(
            "hgpo/alfworld_7b",
            ("grpo", "gigpo_k4", "gigpo_k4", "hgpo_k4", "hgpo_k4"),
            ("in_dist", "out_dist"),
            "78.64/-\n 95.43/92.79\n 95.63/95.18\n -/93.75\n -/94.87",
        )
        | grid(
            "hgpo/webshop_7b",
            ("gigpo_k2", "hgpo_k2", "gigpo_k4", "hgpo_k4"),
            ("score", "success"),
            "88.93/77.60\n 88.96/78.51\n 88.44/72.50\n 90.49/79.29",
        ),
    ),
    "gigpo_readme": (
        "abstract-or-blog",
        grid(
            "gigpo/alfworld",
            ("gigpo", "gigpo_7b", "gigpo_vl_3b", "gigpo_search_3b", "gigpo_search_7b"),
            ("in_dist",),
            "86.7\n 90.8\n 81.0\n 42.1\n 47.2",
        )
        | grid("gigpo/webshop", ("gigpo", "gigpo_7b"), ("success",), "67.4\n 75.2"),
    ),
    "kpo": (
        "secondary",
        grid(
            "kpo/math",
            ("grpo", "gspo", "gmpo", "kpo"),
            KPO_METRICS,
            """27.29/53.33 | 23.12/43.33 | 85.66/92.80
            32.70/60.00 | 29.16/50.00 | 87.41/94.00
            30.83/50.00
            37.91/63.33 | 36.87/60.00 | 89.42/94.80""",
        )
        | grid(
            "kpo/math",
            ("grpo", "gmpo", "kpo", "kpo_unclipped"),
            ("avg16_minerva",),
            "38.67\n 38.48\n 38.23\n 39.15",
        ),
    ),
    "otb_abstract": ("abstract-or-blog", {("otb/samples", "otb_n4", "tokens_to", -65.0, "group_mean_n32")}),
    "otb_text": (
        "secondary",
        {("otb/samples", "otb_n4", "tokens_to", -value, "group_mean_n32") for value in (66.03, 68.32)},
    ),
    "otb_single": (
        "secondary",
        grid(
            "otb/single_turn",
            ("grpo", "rloo", "opo", "ogb", "otb"),
            PEAKS,
            """25.31/31.35/80.86/90.50
            24.38/28.96/74.53/90.56
            27.29/35.31/84.53/93.31
            30.10/33.13/80.55/90.75
            30.31/37.29/85.08/93.43""",
        ),
    ),
    "otb_tools": (
        "secondary",
        grid(
            "otb/tools",
            ("grpo", "rloo", "opo", "ogb", "simpletir", "otb"),
            PEAKS,
            """18.54/27.60/59.45/76.88
            20.10/25.00/62.42/76.06
            20.83/29.90/64.84/76.94
            21.15/30.63/62.50/75.69
            26.67/37.91/71.25/82.25
            28.13/41.46/79.45/84.69""",
        ),
    ),
    "simpletir_abstract": ("abstract-or-blog", grid("simpletir/math", ("text_only",), TIR, "22.1")),
    "simpletir": (
        "certain",
        grid(
            "simpletir/math",
            ("simpletir", "simpletir_32b", "zerotir", "torl", "effective_tir", "arpo"),
            TIR,
            """50.5/30.9/88.4/54.8/79.1/29.7
            59.9/49.2/92.9/63.7/91.6/34.6
            39.6/25/80.2/-/-/22.5
            40.2/27.9/82.2/49.9/75
            42.3/29.2/86.4/-/74.2
            30/30/78.8""",
        ),
    ),
    "simpletir_ablation": (
        "certain",
        grid(
            "simpletir/math",
            ("plain", "low_probability", "high_ratio", "stop_only"),
            ("aime24", "math500"),
            "20.8/73.1\n 23.3/72.8\n 26.3/75.0\n 26.1/77.3",
        ),
    ),
    "empg": (
        "secondary",
        {
            number
            for table, text in {
                "alfworld": "65.6\n 73.7\n 80.8\n 88.1",
                "webshop": "58.2\n 60.8\n 73.2\n 73.8",
                "alfworld_7b": "74.8\n 78.5\n 90.0\n 91.6",
                "webshop_7b": "65.6\n 69.3\n 79.6\n 82.7",
            }.items()
            for number in grid(f"empg/{table}", ("grpo", "empg", "dapo", "dapo_empg"), ("success",), text)
        },
    ),
    "maxrl": (
        "abstract-or-blog",
        grid(
            "maxrl/gsm8k",
            ("maxrl", "grpo", "rloo"),
            ("pass1", "pass128", "pass1024"),
            "33.2/75.0/83.4\n 29.3/45.8/48.8\n 27.5/44.6/48.5",
        ),
    ),
}


def unfounded(table: str, numbers: Iterable[PublishedNumber]) -> list[PublishedNumber]:
    """Those of a table's numbers that the list of sources has not, or with another mark, or without a section."""
    known = publications()
    return [
        one
        for one in numbers
        if (table, one.cell, one.metric, one.value, one.relative_to) not in SOURCES.get(one.source, ("", set()))[1]
        or one.certainty != SOURCES[one.source][0]
        or not known[one.source]["section"]
        or one.section != known[one.source]["section"]
    ]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_number_stands_in_the_list_of_sources_with_its_mark_and_section(table: Table) -> None:
    assert unfounded(table.name, table.numbers) == []
    found = [dataclasses.astuple(one) for one in table.numbers]
    assert len(found) == len(set(found))
    for one in table.published:
        assert one.source.paper == table.paper, "a number of another paper belongs to that paper's table"


def test_a_number_without_a_source_fails() -> None:
    table = next(one for one in TABLES if one.name == "dr_mas/math")
    good = table.numbers[0]
    for change in (
        {"value": good.value + 0.1},
        {"cell": "grpo"},
        {"metric": "pass16"},
        {"source": "nobody"},
        {"certainty": "secondary"},
        {"section": "somewhere"},
        {"relative_to": "grpo"},
    ):
        wrong = dataclasses.replace(good, **change)  # type: ignore[arg-type]
        assert unfounded(table.name, [wrong]) == [wrong], change


def test_nothing_of_the_list_is_left_out() -> None:
    assert set(SOURCES) == set(publications()), "each source is of numbers that a table has"
    found = {
        source: {
            (table.name, one.cell, one.metric, one.value, one.relative_to)
            for table in TABLES
            for one in table.numbers
            if one.source == source
        }
        for source in SOURCES
    }
    assert found == {source: numbers for source, (_, numbers) in SOURCES.items()}


def test_the_abstracts_percentages_are_ratios_of_means() -> None:
    """+5.6/+4.6 and +15.2/+13.1 of Dr. MAS are per cent of the mean over sizes and sharing, not points."""
    for names, gains in ((("math", "math_8b"), (5.6, 4.6)), (("search_3b", "search"), (15.2, 13.1))):
        numbers = [
            one for table in TABLES if table.name in {f"dr_mas/{name}" for name in names} for one in table.numbers
        ]
        for metric, gain in zip(("avg16", "pass16"), gains, strict=True):
            base, ours = (
                sum(one.value for one in numbers if one.metric == metric and one.cell in (cell, f"{cell}_shared"))
                for cell in ("grpo", "dr_mas")
            )
            assert 100 * (ours / base - 1) == pytest.approx(gain, abs=0.07), "the numbers are rounded to a tenth"


def test_every_published_experiment_has_its_table() -> None:
    assert {table.method for table in TABLES if table.default} == {
        "dr_mas", "trloo", "hgpo", "gigpo", "kpo", "otb", "dvp", "trm", "empg", "simpletir", "maxrl",
    }  # fmt: skip


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_numbers_are_in_the_unit_of_their_metric(table: Table) -> None:
    for one in table.numbers:
        metric = table.full.metrics[one.metric]
        shown_in_percent = metric.percent or metric.times != 1.0
        assert shown_in_percent or one.ratio, f"{table.name}: {one.metric} is published in per cent"
        assert -100 <= one.value <= 100


def test_the_token_saving_is_a_ratio() -> None:
    (table,) = (one for one in TABLES if one.name == "otb/samples")
    assert all(one.ratio for one in table.numbers)
    assert not any(one.ratio for other in TABLES if other is not table for one in other.numbers)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_what_is_open_is_said(table: Table) -> None:
    assert table.open, "no paper answers everything"
    hours, hardware = table.full.hours, table.full.hardware
    assert hours is not None and hardware is not None
    assert hours.value is not None or "not stated" in hours.note
    assert table.paper.startswith("arXiv ") and table.claim.endswith(".")


def test_hours_and_gpus_of_the_readme() -> None:
    known = {table.name: (table.full.hours, table.full.hardware) for table in TABLES if table.method == "dr_mas"}
    for name, hours, gpus in (("math", 38, 4), ("math_8b", 42, 8), ("search", 26, 8), ("search_3b", 13, 4)):
        estimate, hardware = known[f"dr_mas/{name}"]
        assert estimate is not None and (estimate.value, estimate.certainty) == (hours, "abstract-or-blog")
        assert hardware is not None and hardware.gpus_per_node == gpus and "H100" in hardware.gpu
