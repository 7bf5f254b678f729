# SPDX-License-Identifier: Apache-2.0
"""Full garbage collections of agent loop workers: at the first call, and again when their share of the time allows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from verl_ext.rollout.shared import garbage


class Knot:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.self = self


def old_knot() -> weakref.ref[Knot]:
    """One that only a full collection finds."""
    knot = Knot()
    gc.collect(1)
    gc.collect(1)
    return weakref.ref(knot)


@pytest.fixture
def beginning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    thresholds = gc.get_threshold()
    monkeypatch.setattr(garbage, "_next", 0.0)
    yield
    gc.set_threshold(*thresholds)


def test_collects_at_first_and_then_when_it_is_time(beginning: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = old_knot()
    garbage.collect()
    assert first() is None
    assert gc.get_threshold()[2] > 1e6  # Python itself begins none
    second = old_knot()
    monkeypatch.setattr(garbage, "SHARE", 1e-9)
    monkeypatch.setattr(garbage, "_next", 0.0)
    garbage.collect()  # and not again for years
    assert second() is None
    third = old_knot()
    garbage.collect()
    assert third() is not None
    monkeypatch.setattr(garbage, "_next", 0.0)
    garbage.collect()
    assert third() is None


def test_leaves_a_process_alone_whose_collector_is_off(beginning: None) -> None:
    thresholds = gc.get_threshold()
    gc.disable()
    try:
        knot = old_knot()
        garbage.collect()
        assert knot() is not None and gc.get_threshold() == thresholds
    finally:
        gc.enable()
