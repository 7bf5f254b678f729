# SPDX-License-Identifier: Apache-2.0
"""Turns in an event loop: pieces of work of many trajectories that hold it, one at a time, others in between.

verl makes an agent loop object of a trajectory in 6 ms and puts its sequences into the store in 10 to 20 ms, without a
break. Where a thousand trajectories begin together the event loop does all of that in one round, and for seconds no
answer is read and no timer fires. Here each waits for its turn, so that between two the loop looks at everything else.
"""

from __future__ import annotations

import asyncio
import weakref

# A lock belongs to one event loop.
_locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


async def in_turn() -> None:
    """Wait until no other piece has its turn in this round of the event loop; first come, first served."""
    async with _locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        await asyncio.sleep(0)
