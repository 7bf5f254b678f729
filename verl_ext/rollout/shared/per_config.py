# SPDX-License-Identifier: Apache-2.0
"""What is made once a process for each config of verl: a loop object lives for one trajectory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")
_kept: dict[tuple[int, Hashable], tuple[Any, Any]] = {}


def once(config: Any, what: Hashable, make: Callable[[], T]) -> T:
    """What `make` has made for this config, under the name `what`."""
    key = id(config), what
    if key not in _kept:
        _kept[key] = config, make()  # the config is kept, so its id stays its own
    return _kept[key][1]
