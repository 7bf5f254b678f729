# SPDX-License-Identifier: Apache-2.0
"""The tables' published numbers against a transcription of their own, typed from the sources."""

from __future__ import annotations

import pytest

from verl_ext.lab.reproduce.catalogue import tables
from verl_ext.lab.reproduce.tables import Table

#: A number: cell, metric, value, certainty, and the cell that it is a difference to (or None).
Number = tuple[str, str, float, str, str | None]

ABSTRACT, SECOND = "abstract-or-blog", "secondary"

#: KernelBench, table 1 of arXiv 2602.05885: by model, by level, per cent at a speedup of 1, 1.2, 1.5 and 2.
KERNELBENCH = {
    "gpt5": ((19.5, 16.5, 12.5, 11), (46.7, 28.6, 13.1, 3), (21, 12, 4, 2)),
    "claude": ((15.5, 13.5, 11, 8.5), (50, 26.7, 9.2, 1.8), (21, 11, 5, 4)),
    "autotriton": ((4.5, 3.6, 2.8, 2.1), (30.6, 9.2, 2.6, 0.5), (7.5, 0, 0, 0)),
    "cold_start_8b": ((7.5, 6.6, 5, 4.3), (8.8, 5.6, 1.8, 0.4), (0.5, 0, 0, 0)),
    "dr_kernel_8b": ((15.9, 12.8, 10.9, 8.4), (46, 20, 5, 1.5), (10.8, 1, 0, 0)),
    "dr_kernel_14b": ((20.3, 16.9, 13.2, 11.6), (49.2, 25.6, 7.4, 2.1), (8.8, 1.2, 0.2, 0)),
    "stts_last": ((24.1, 18.8, 15.3, 12.8), (59.8, 31.6, 9.6, 3), (17.1, 3, 0.2, 0)),
    "stts_best": ((39.3, 25.1, 20.4, 17.6), (80.9, 47.8, 23.6, 12.5), (29.8, 7.3, 0.5, 0)),
}

#: ALFWorld, arXiv 2602.22817: in and out of distribution, None where no number is known.
ALFWORLD_SMALL = {
    "grpo": (72.8, 70.1),
    "gigpo_k2": (90.16, 84.76),
    "gigpo_k4": (93.29, 91.53),
    "hgpo_k2": (92.77, 90.16),
    "hgpo_k4": (94.85, 92.12),
}
ALFWORLD_LARGE = {
    "grpo": (78.64, None),
    "gigpo_k2": (93.29, None),
    "gigpo_k4": (95.43, 92.79),
    "hgpo_k2": (95.44, None),
    "hgpo_k4": (95.96, 93.75),
}
#: WebShop with K = 4: score and success.
WEBSHOP_SMALL = {"gigpo_k4": (86.80, 73.24), "hgpo_k4": (90.64, 78.12)}
WEBSHOP_LARGE = {"gigpo_k4": (88.44, 72.50), "hgpo_k4": (90.49, 79.29)}

#: Qwen3-4B, arXiv 2602.10609: avg@16 and pass@16.
KPO = {
    ("grpo", "aime24"): (27.29, 53.33),
    ("grpo", "aime25"): (23.12, 43.33),
    ("grpo", "math500"): (85.66, 92.80),
    ("gspo", "aime24"): (32.70, 60.00),
    ("gspo", "aime25"): (29.16, 50.00),
    ("gspo", "math500"): (87.41, 94.00),
    ("gmpo", "aime24"): (30.83, 50.00),
    ("kpo", "aime24"): (37.91, 63.33),
    ("kpo", "aime25"): (36.87, 60.00),
    ("kpo", "math500"): (89.42, 94.80),
}
KPO_MINERVA = {"grpo": 38.67, "gmpo": 38.48, "kpo": 38.23, "kpo_unclipped": 39.15}


def kernelbench(cells: dict[str, str]) -> set[Number]:
    """Numbers of some models, under the names of their cells."""
    names = ("1", "1_2", "1_5", "2")
    return {
        (cell, f"fast_{name}_level{level}", value, "certain", None)
        for model, cell in cells.items()
        for level, values in enumerate(KERNELBENCH[model], start=1)
        for name, value in zip(names, values, strict=True)
    }


def columns(rows: dict[str, tuple[float | None, float | None]], first: str, second: str) -> set[Number]:
    return {
        (cell, metric, value, SECOND, None)
        for cell, values in rows.items()
        for metric, value in zip((first, second), values, strict=True)
        if value is not None
    }


EXPECTED: dict[str, set[Number]] = {
    "dr_mas/math": {
        ("dr_mas", "avg16", 5.6, ABSTRACT, "grpo"),
        ("dr_mas", "pass16", 4.6, ABSTRACT, "grpo"),
        ("dr_mas", "math500", 90.7, "unverified", None),
        ("dr_mas", "minerva", 40.9, "unverified", None),
        ("dr_mas", "aime24", 44.6, "unverified", None),
    },
    "dr_mas/search": {
        ("dr_mas", "avg16", 15.2, ABSTRACT, "grpo"),
        ("dr_mas", "pass16", 13.1, ABSTRACT, "grpo"),
    },
    "trloo/kernelbench": kernelbench(
        {
            "gpt5": "gpt5",
            "claude": "claude",
            "autotriton": "autotriton",
            "cold_start_8b": "cold_start_8b",
            "dr_kernel_8b": "trloo",
            "dr_kernel_14b": "trloo_14b",
            "stts_last": "stts_last",
            "stts_best": "stts_best",
        }
    ),
    "trloo/kernelbench_14b": kernelbench(
        {"dr_kernel_14b": "trloo", "stts_last": "stts_last", "stts_best": "stts_best"}
    ),
    "hgpo/alfworld": columns(ALFWORLD_SMALL, "in_dist", "out_dist"),
    "hgpo/alfworld_7b": columns(ALFWORLD_LARGE, "in_dist", "out_dist"),
    "hgpo/webshop": columns(WEBSHOP_SMALL, "score", "success"),
    "hgpo/webshop_7b": columns(WEBSHOP_LARGE, "score", "success"),
    "gigpo/alfworld": {
        ("gigpo", "in_dist", 86.7, ABSTRACT, None),
        ("gigpo_7b", "in_dist", 90.8, ABSTRACT, None),
        ("gigpo_vl_3b", "in_dist", 81.0, ABSTRACT, None),
        ("gigpo_search_3b", "in_dist", 42.1, ABSTRACT, None),
        ("gigpo_search_7b", "in_dist", 47.2, ABSTRACT, None),
    },
    "gigpo/webshop": {
        ("gigpo", "success", 67.4, ABSTRACT, None),
        ("gigpo_7b", "success", 75.2, ABSTRACT, None),
    },
    "kpo/math": {
        (cell, f"{what}_{data}", value, SECOND, None)
        for (cell, data), values in KPO.items()
        for what, value in zip(("avg16", "pass16"), values, strict=True)
    }
    | {(cell, "avg16_minerva", value, SECOND, None) for cell, value in KPO_MINERVA.items()},
    "otb/samples": {("otb_n4", "tokens_to", -value, ABSTRACT, "group_mean_n32") for value in (65, 62, 66)},
    "dvp/stability": set(),
    "trm/math": set(),
    "simpletir/math": {("text_only", "aime24", 22.1, ABSTRACT, None), ("simpletir", "aime24", 50.5, ABSTRACT, None)},
    "empg/alfworld": {
        ("grpo", "success", 65.6, SECOND, None),
        ("empg", "success", 73.7, SECOND, None),
        ("dapo", "success", 80.8, SECOND, None),
        ("dapo_empg", "success", 88.1, SECOND, None),
    },
    "empg/webshop": set(),
}

TABLES = tables()


def test_every_published_experiment_has_its_table() -> None:
    assert {table.name for table in TABLES} == set(EXPECTED)
    assert {table.method for table in TABLES if table.default} == {
        "dr_mas", "trloo", "hgpo", "gigpo", "kpo", "otb", "dvp", "trm", "empg", "simpletir",
    }  # fmt: skip


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_numbers_are_those_of_the_sources(table: Table) -> None:
    found = [(one.cell, one.metric, one.value, one.certainty, one.relative_to) for one in table.published]
    assert len(found) == len(set(found))
    assert set(found) == EXPECTED[table.name]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_numbers_are_in_the_unit_of_their_metric(table: Table) -> None:
    for one in table.published:
        metric = table.full.metrics[one.metric]
        shown_in_percent = metric.percent or metric.times != 1.0
        assert shown_in_percent or one.ratio, f"{table.name}: {one.metric} is published in per cent"
        assert -100 <= one.value <= 100


def test_the_token_saving_is_a_ratio() -> None:
    (table,) = (one for one in TABLES if one.name == "otb/samples")
    assert all(one.ratio for one in table.published)
    assert not any(one.ratio for other in TABLES if other is not table for one in other.published)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_what_is_open_is_said(table: Table) -> None:
    assert table.open, "no paper answers everything"
    hours, hardware = table.full.hours, table.full.hardware
    assert hours is not None and hardware is not None
    assert hours.value is not None or "not stated" in hours.note
    assert table.paper.startswith("arXiv ") and table.claim.endswith(".")
    if table.method == "dr_mas":
        assert any("separate weights" in sentence and "shared ones is not" in sentence for sentence in table.open)


def test_hours_and_gpus_of_the_readme() -> None:
    known = {table.name: (table.full.hours, table.full.hardware) for table in TABLES if table.method == "dr_mas"}
    for name, (hours, gpus) in {"dr_mas/math": (38, 4), "dr_mas/search": (26, 8)}.items():
        estimate, hardware = known[name]
        assert estimate is not None and (estimate.value, estimate.certainty) == (hours, ABSTRACT)
        assert hardware is not None and hardware.gpus_per_node == gpus and "H100" in hardware.gpu
