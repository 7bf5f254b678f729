# SPDX-License-Identifier: Apache-2.0
"""Pieces of work in turns: what else waits in the event loop comes in between."""

from __future__ import annotations

import asyncio

import pytest

from verl_ext.rollout.shared.turns import in_turn

PIECES = 50


async def _history(turns: bool) -> list[str]:
    """What ran in an event loop: pieces of work that begin together, and looks of something else."""
    history: list[str] = []

    async def piece(number: int) -> None:
        if turns:
            await in_turn()
        history.append(str(number))

    async def looks() -> None:
        while True:
            history.append("look")
            await asyncio.sleep(0)

    looking = asyncio.create_task(looks())
    await asyncio.gather(*(piece(number) for number in range(PIECES)))
    looking.cancel()
    return history


def _longest(history: list[str]) -> int:
    """Pieces without a look between them, at most."""
    return max(len(part.split()) for part in " ".join(history).split("look"))


def test_between_two_pieces_the_loop_looks_at_everything_else():
    history = asyncio.run(_history(turns=True))
    assert [entry for entry in history if entry != "look"] == [str(number) for number in range(PIECES)]
    assert _longest(history) == 1
    assert _longest(asyncio.run(_history(turns=False))) == PIECES


def test_a_piece_that_is_cancelled_gives_its_turn_to_the_next():
    async def run() -> str:
        holds, waits, after = (asyncio.create_task(in_turn()) for _ in range(3))
        await asyncio.sleep(0)
        holds.cancel()
        waits.cancel()
        await asyncio.wait_for(after, 60)
        return f"{holds.cancelled()} {waits.cancelled()} {after.done()}"

    assert asyncio.run(run()) == "True True True"


def test_every_event_loop_has_its_own():
    for _ in range(2):
        asyncio.run(in_turn())
    with pytest.raises(RuntimeError, match="no running event loop"):
        in_turn().send(None)
