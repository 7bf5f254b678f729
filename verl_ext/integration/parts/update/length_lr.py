# SPDX-License-Identifier: Apache-2.0
"""A learning rate that falls once responses grow suddenly: ``trainer.length_lr`` (`verl_ext.methods.length_lr`).

The driver watches the mean response length and says with each update of actor and critic what their learning rate is
multiplied by; the engines do so for that update alone (`verl_ext.integration.engines.update_step`), on top of verl's
schedule, which is never rebuilt. The state of the detector is in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl_ext.integration.columns import ActiveBatch
from verl_ext.integration.compat.data_plane import fetch
from verl_ext.integration.engines.update_step import FACTOR, LEARNING_RATE
from verl_ext.integration.parts.base import Part
from verl_ext.integration.settings.options import coerce, not_extended, read, require_fsdp, select, updated
from verl_ext.methods.length_lr import LengthLR

KEY = "trainer.length_lr"


class LengthLearningRate(Part):
    """See the module's text."""

    key = "LengthLearningRate"

    def __init__(self, config: Any, trainer: Any = None) -> None:
        super().__init__(config, trainer)
        self.schedule = schedule(config)

    @classmethod
    def wanted(cls, config: Any) -> bool:
        node = select(config.get("trainer"), "length_lr") or {}
        return bool(coerce(node.get("enable", False), bool, f"{KEY}.enable"))

    @classmethod
    def check(cls, config: Any) -> list[str]:
        if not cls.wanted(config):
            return []
        own = schedule(config)
        require_fsdp(config, f"{KEY} multiplies the learning rate", f", or {KEY}.enable=false", updated(config))
        # verl takes the ratio where the number of steps is 0
        keys = ("lr_warmup_steps", "lr_warmup_steps_ratio")
        warm = [
            f"{name}.optim.{key}"
            for name, section in updated(config).items()
            for key in keys
            if (section.optim.get(key) or 0) > 0
        ]
        if own.warmup_steps and warm:
            return [
                f"{KEY}.warmup_steps={own.warmup_steps} warms up on top of {' and '.join(warm)}, and the factors are "
                f"multiplied. Set {KEY}.warmup_steps=0, or {', '.join(f'{key}=0' for key in warm)}."
            ]
        return []

    def state(self) -> dict[str, Any]:
        return self.schedule.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self.schedule.restore(state)

    def on_batch(self, batch: Any, active: ActiveBatch, metrics: dict[str, Any]) -> Any:
        if self.trainer.local_trigger_step:  # a later update of the same step
            return batch
        masks = active.turns.unpack(fetch(batch, ["response_mask"])["response_mask"].to_padded_tensor(0))
        valid = active.columns["valid_row"]
        lengths = masks.sum(-1).double()[torch.as_tensor(valid)].tolist()
        length = sum(lengths) / max(len(lengths), 1)
        self.schedule.observe(self.step, length)
        return batch

    @property
    def step(self) -> int:
        """t of the schedule, from 0; verl counts from 1."""
        return int(self.trainer.global_steps) - 1

    @contextmanager
    def around_update(self, role: str, batch: Any) -> Iterator[None]:
        batch.extra_info[LEARNING_RATE] = self.schedule.factor(self.step)
        yield

    def after_update(self, metrics: dict[str, Any]) -> None:
        if f"actor/{FACTOR}" not in metrics:
            raise not_extended(f"{KEY}: the training engine has not multiplied its learning rate")
        schedule = self.schedule
        self.metrics |= {
            "length_lr/factor": float(metrics.pop(f"actor/{FACTOR}")),
            "length_lr/baseline_length": schedule.length_sum / max(schedule.length_count, 1),
            "length_lr/surge_step": -1.0 if schedule.surge_step is None else float(schedule.surge_step),
        }


def schedule(config: Any) -> LengthLR:
    """The schedule of ``trainer.length_lr``, at its beginning. Raises OptionError: an unknown key, or a value out of
    range."""
    node = {key: value for key, value in config.trainer.length_lr.items() if key != "enable"}
    return read({"length_lr": node}, "length_lr", LengthLR, where=KEY)
