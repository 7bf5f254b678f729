# SPDX-License-Identifier: Apache-2.0
"""The gradient of an update on merged sequences is that on a sequence a call, in verl's own actor worker."""

from __future__ import annotations

from pathlib import Path

import merged_process
import pytest
import torch
from ranks import run_ranks, starts_ranks


@starts_ranks
@pytest.mark.parametrize(("world", "ulysses"), [(1, 1), (2, 1), (2, 2)])
def test_the_same_gradient_merged_and_not(world: int, ulysses: int, tmp_path: Path) -> None:
    run_ranks(Path(merged_process.__file__), tmp_path / "found.pt", ulysses, world=world)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert list(found) == list(merged_process.CASES)
    for name, (apart, merged) in found.items():
        far = float((merged - apart).norm() / apart.norm())
        assert float(apart.norm()) > 0, name
        if name == "kpo along the sequence":  # one filter along the sequence, on purpose
            assert far > 1e-4
        else:
            assert far < 1e-5, (name, far)
