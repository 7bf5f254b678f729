# SPDX-License-Identifier: Apache-2.0
"""Full garbage collections in a process of agent loops: seldom enough that its event loop is seldom kept.

A full collection looks at every object of the process: half a second for what is imported, and more with each
trajectory under way. Python begins one whenever the objects have grown by a quarter, so with a thousand trajectories
the event loop stands still for percents of the time. Here what the process has when the first trajectory begins is
looked at once and then left alone, and full collections take `SHARE` of the time at most. Young objects are collected
as ever, and what no cycle holds is freed at once in any case.
"""

from __future__ import annotations

import gc
import time

SHARE = 0.002
"""Of the time on the clock."""
_NEVER = 1 << 30

_next = 0.0


def collect() -> None:
    """Collect if it is time; to be called now and then, such as once a trajectory. The first call takes over."""
    global _next
    begin = time.monotonic()
    if begin < _next or not gc.isenabled():
        return
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    gc.collect()
    if _next == 0.0:
        gc.freeze()
    end = time.monotonic()
    _next = end + (end - begin) / SHARE
