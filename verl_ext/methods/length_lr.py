# SPDX-License-Identifier: Apache-2.0
"""A learning rate that falls once responses grow suddenly, the early sign of instability (arXiv 2602.01826).

    warm-up     lr(t) = lr_0 (t + 1) / w                                       for t < w
    surge       s = first step t >= n whose mean response length is above c times the mean of the first n steps
    afterwards  lr(t) = lr_0 max(m, d^floor((t - t_0) / P)),  P = round(p s),  t_0 = w or s (anchor warmup or surge)

with w warmup_steps 10, n baseline_steps 50, c trigger_ratio 3, p period_factor 1.8, d decay 0.5, m min_ratio 0.1. That
the decay is triggered by the length is the paper's; halving, P, floor and warm-up are quoted from its appendix by
others; the detector (n, c) and the anchor are not published.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal


@dataclasses.dataclass
class LengthLR:
    """The schedule and its state: plain numbers, so that a checkpoint can hold them.

    Attributes:
        warmup_steps, baseline_steps, trigger_ratio, period_factor, decay, min_ratio, anchor: see the module's text.
        length_sum, length_count: of the steps seen so far, up to ``baseline_steps`` of them.
        surge_step: s, or None as long as no surge was seen.

    Raises:
        ValueError: an option is out of range.
    """

    warmup_steps: int = 10
    baseline_steps: int = 50
    trigger_ratio: float = 3.0
    period_factor: float = 1.8
    decay: float = 0.5
    min_ratio: float = 0.1
    anchor: Literal["warmup", "surge"] = "warmup"

    length_sum: float = dataclasses.field(default=0.0, init=False)
    length_count: int = dataclasses.field(default=0, init=False)
    surge_step: int | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or self.baseline_steps < 1:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and baseline_steps {self.baseline_steps}; they must be at least "
                "0 and 1"
            )
        if not self.trigger_ratio > 1 or not self.period_factor > 0:
            raise ValueError(
                f"trigger_ratio is {self.trigger_ratio} and period_factor {self.period_factor}; they must be greater "
                "than 1 and 0"
            )
        if not 0 < self.decay < 1 or not 0 <= self.min_ratio <= 1:
            raise ValueError(
                f"decay is {self.decay} and min_ratio {self.min_ratio}; they must be in (0, 1) and in [0, 1]"
            )
        if self.anchor not in ("warmup", "surge"):
            raise ValueError(f"anchor is {self.anchor!r}; choose warmup or surge")

    def observe(self, step: int, mean_length: float) -> None:
        """Take in the mean response length of a step, in tokens, before `factor` of that step is asked for.

        Args:
            step: t, from 0.
            mean_length: over the turns of the step that are no padding.

        Raises:
            ValueError: the length is not a finite number.
        """
        if not math.isfinite(mean_length):
            raise ValueError(f"mean response length is {mean_length} in step {step}")
        if self.length_count < self.baseline_steps:
            self.length_sum += mean_length
            self.length_count += 1
        elif self.surge_step is None and mean_length > self.trigger_ratio * self.length_sum / self.length_count:
            self.surge_step = step

    @property
    def period(self) -> int | None:
        """P in steps, or None before a surge."""
        return None if self.surge_step is None else max(1, round(self.period_factor * self.surge_step))

    def factor(self, step: int) -> float:
        """lr(t) / lr_0 of step t, from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.surge_step is None or step < self.surge_step:
            return 1.0
        assert self.period is not None
        start = self.warmup_steps if self.anchor == "warmup" else self.surge_step
        return max(self.min_ratio, self.decay ** ((step - start) // self.period))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"length_sum": self.length_sum, "length_count": self.length_count, "surge_step": self.surge_step}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self.length_sum = float(state["length_sum"])
        self.length_count = int(state["length_count"])
        self.surge_step = state["surge_step"]
