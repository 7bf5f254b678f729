# SPDX-License-Identifier: Apache-2.0
"""The turns of a micro-batch, for policy losses that look along a turn: their arguments have no place for them.

The trainer stores the number of its turn at each token of a batch with merged sequences; the loss finds with `current`
where the turns of its micro-batch lie.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from verl_ext.integration.turns import Turns

COLUMN = "verl_ext_turns"
_current: ContextVar[Turns | None] = ContextVar("verl_ext_turns", default=None)


def current() -> Turns:
    """The turns of the micro-batch whose loss is computed; each sequence one, where nothing says otherwise."""
    return _current.get() or Turns()


class LossTurnsMixin:
    """Mixin over verl's `FSDPEngineWithLMHead` and its subclasses. See the module's text."""

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """verl's own; the policy loss finds the turns."""
        if loss_function is not None and COLUMN in micro_batch.keys():
            loss_function = _by_turn(loss_function)
        return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]


def _by_turn(loss_function: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*, model_output: Any, data: Any, **more: Any) -> Any:
        token = _current.set(Turns.of_numbers(data[COLUMN].to_padded_tensor(0)))
        try:
            return loss_function(model_output=model_output, data=data, **more)
        finally:
            _current.reset(token)

    return loss
