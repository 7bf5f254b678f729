# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that play agent loops with a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest
from loops import QUESTION


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from verl_ext.demo.model import train_tokenizer

    return train_tokenizer([QUESTION] * 64)


@pytest.fixture
def fresh_fates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_ext.rollout.orchestra.loop._fates", {})
