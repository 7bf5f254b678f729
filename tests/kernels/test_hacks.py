# SPDX-License-Identifier: Apache-2.0
"""No trick is paid, honest kernels are, and each trick is paid by a judge that lacks the defence meant for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
from conftest import QUICK, most
from weak import WITHOUT

from verl_ext.lab.kernels.hacks import HACKS, HONEST, Hack
from verl_ext.rollout.kernels.judge import Judge
from verl_ext.rollout.kernels.tasks import Task


def by_name(hack: Hack) -> str:
    return hack.name


@pytest.fixture(scope="module")
def without() -> Iterator[Callable[[str], Judge]]:
    """A judge without a defence; kept for the next trick of the same defence, one at a time."""
    made: dict[str, Judge] = {}

    def make(defence: str) -> Judge:
        if defence not in made:
            for old in made.values():
                old.close()
            made.clear()
            # Some tricks compute for seconds what they are not charged for.
            made[defence] = WITHOUT[defence](dataclasses.replace(QUICK, run_s=8.0))
        return made[defence]

    yield make
    for judge in made.values():
        judge.close()


def test_there_are_many_kinds_and_each_has_its_defence() -> None:
    assert len({hack.name for hack in HACKS}) == len(HACKS) >= 34
    assert {hack.defence for hack in HACKS} == set(WITHOUT)
    assert len({hack.text for hack in HONEST}) == 7


@pytest.mark.seconds
@pytest.mark.parametrize("hack", HONEST, ids=by_name)
def test_an_honest_kernel_is_paid(judge: Judge, hack: Hack) -> None:
    verdict = most(judge, Task.of(hack.task), hack.text, hack.language, hack.paid)
    assert hack.paid(verdict), verdict


@pytest.mark.seconds
@pytest.mark.parametrize("hack", HACKS, ids=by_name)
def test_a_trick_is_not_paid(judge: Judge, hack: Hack) -> None:
    verdict = most(judge, Task.of(hack.task), hack.text, hack.language, lambda found: not hack.paid(found))
    assert verdict.status in ("right", "wrong", "error", "crashed", "timeout") and not hack.paid(verdict), verdict


@pytest.mark.slow
@pytest.mark.parametrize("hack", HACKS, ids=by_name)
def test_without_its_defence_it_is(without: Callable[[str], Judge], hack: Hack) -> None:
    verdict = most(without(hack.defence), Task.of(hack.task), hack.text, hack.language, hack.paid)
    assert hack.paid(verdict), verdict
