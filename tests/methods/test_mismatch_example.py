# SPDX-License-Identifier: Apache-2.0
"""What `examples/mismatch` measures, on small logits where it can be said beforehand."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mismatch"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mismatch_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make() -> ModuleType:
    return load("make")


def blocks(noise: float, vocabulary: int = 400, positions: int = 60) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    trainer = 5 * torch.randn(positions, vocabulary, generator=generator)
    sampler = trainer + noise * torch.randn(positions, vocabulary, generator=generator)
    drawn = torch.multinomial(torch.softmax(sampler, -1), 1, generator=generator).flatten()
    return [(trainer, sampler, drawn)]


@pytest.mark.parametrize("noise", [1e-3, 0.1, 3.0])
def test_the_bound_holds_for_every_token(make: ModuleType, noise: float) -> None:
    trainer, sampler, _ = blocks(noise)[0]
    assert 0.1 < make.bound_ratio(trainer, sampler) <= 1 + 1e-6
    # Adding a constant to one engine's logits changes neither the policies nor the bound.
    assert make.bound_ratio(trainer, sampler + 7) == pytest.approx(make.bound_ratio(trainer, sampler), rel=1e-2)


def test_pruning_removes_the_largest_differences_and_reports_what_is_lost(make: ModuleType) -> None:
    found = make.study(iter(blocks(0.3)))
    rows = found["by_rho"]
    assert list(rows)[0] == "none" and len(rows) == 1 + len(make.RHOS)
    worst = [row["worst"] for row in rows.values()]
    assert worst[0] > worst[-1] > 0
    sizes = [rows[level]["size"] for level in list(rows)[1:]]
    assert sizes == sorted(sizes, reverse=True) and 1 <= sizes[-1] < sizes[0] <= 400
    lost = [rows[level]["lost"] for level in list(rows)[1:]]
    assert 0 < lost[0] < lost[-1] < 0.1
    assert sum(found["plain"]["count"]) == 60 * 400
    pruned = found["pruned"][f"{make.RHOS[-1]:.3g}"]
    assert min(pruned["log10_p_low"]) >= math.floor(math.log10(make.RHOS[-1])) - 2


def test_equal_engines_do_not_disagree(make: ModuleType) -> None:
    trainer, _, drawn = blocks(0.0)[0]
    found = make.study(iter([(trainer, trainer, drawn)]))
    assert all(row["chi2"] == 0 and row["worst"] == 0 and row.get("lost", 0) == 0 for row in found["by_rho"].values())
    assert max(found["plain"]["max"]) == 0


def test_published_numbers_are_what_the_page_says() -> None:
    found = json.loads((EXAMPLE / "numbers.json").read_text())
    page = (EXAMPLE / "README.md").read_text()
    for case in ("bfloat16", "gaussian"):
        assert found[case]["worst_difference_over_bound"] <= 1
        for row in found[case]["by_rho"].values():
            assert f"{row['worst']:.2f}" in page


def test_training_script_reads_a_file_that_is_cut_short(tmp_path: Path) -> None:
    train = load("train")
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "data": {"actor/grad_norm": 1.0}}\n{"step": 2, "data": {"actor/gr')
    assert train.read(path) == {1: {"actor/grad_norm": 1.0}}
    rows = train.summary([{1: {"actor/grad_norm": 1.0}, 2: {"actor/grad_norm": 3.0}}], 2)
    assert rows["actor/grad_norm"]["last"] == 3.0 and rows["actor/grad_norm"]["largest"] == 3.0
