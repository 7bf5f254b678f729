# SPDX-License-Identifier: Apache-2.0
"""What the collection is given by others: `verl_ext.plugin` fills it, so that nothing here imports what is above it."""

from __future__ import annotations

from collections.abc import Callable

PARTS: list[Callable[[], None]] = []
"""Each calls `verl_ext.integration.parts.insert` for the parts of one wing or package; called when the parts are first
needed, in the process that needs them."""
