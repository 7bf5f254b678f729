# SPDX-License-Identifier: Apache-2.0
"""An update of verl's FSDP engines, of policies and critics, as the batch asks: rejected tokens, learning rate.

What a batch asks for travels with it as non-tensor data, so that all ranks see the same and nothing is kept in the
engine: a batch that does not ask goes to verl's own code.

- Rejected tokens have left ``response_mask``, which the loss reads, and not ``loss_mask``, whose tokens verl divides
  by. ``kept`` lets it divide by the kept ones. An update that keeps no token on any rank is skipped: its loss would be
  0 or 0/0, and the optimiser would still move the weights by its moments and weight decay. verl's learning-rate
  scheduler counts batches, not updates, and is left alone.
- The learning rate of the optimiser is multiplied for the step and put back, so that verl's scheduler goes on from its
  own value.
"""

from __future__ import annotations

from typing import Any

import torch

from verl_ext.integration.engines.micro_batch import said

NORMALISE = "verl_ext_normalise"
"""``all`` or ``kept``: what a loss with rejected tokens is divided by."""

LEARNING_RATE = "verl_ext_learning_rate"
"""What the learning rate of the update is multiplied by."""

SKIPPED = "skipped_share"
"""Metric: share of the batch's updates without a kept token."""

FACTOR = "lr_factor"
"""Metric: what the learning rate was multiplied by."""


class UpdateStepMixin:
    """Mixin over verl's `FSDPEngineWithLMHead` and its subclasses. See the module's text."""

    _skip = False
    _factor = 1.0

    def train_batch(self, data: Any, loss_function: Any) -> Any:
        """verl's own; without a step of the optimiser where no token of the mini-batch is kept."""
        factor, normalise = said(data, LEARNING_RATE, None), said(data, NORMALISE, None)
        self._factor = 1.0 if factor is None else float(factor)
        if normalise is not None:
            output = self._train_on_kept(data, loss_function, normalise)
        else:
            output = super().train_batch(data, loss_function)  # type: ignore[misc]
        if factor is not None:
            output["metrics"][FACTOR] = [self._factor]
        return output

    def _train_on_kept(self, data: Any, loss_function: Any, normalise: str) -> Any:
        from verl.utils import tensordict_utils as tu

        tokens, rows, all_rows = self._kept(data)
        self._skip = tokens == 0
        if self._skip:
            loss_function = _nothing
        elif normalise == "kept":
            data["loss_mask"] = data["response_mask"]
            size = said(data, "global_batch_size", None)
            if size is not None:
                tu.assign_non_tensor(data, global_batch_size=size * rows / all_rows)
        try:
            output = super().train_batch(data, loss_function)  # type: ignore[misc]
        finally:
            skipped, self._skip = self._skip, False
        metrics = output["metrics"]
        if skipped:
            metrics.pop("grad_norm", None)  # verl takes the mean over updates; this one is none
        metrics[SKIPPED] = [float(skipped)]
        return output

    def optimizer_step(self) -> Any:
        """verl's own, at the learning rate that the batch asks for; none for an update that is skipped."""
        if self._skip:
            self.optimizer_zero_grad()  # type: ignore[attr-defined]
            return 0.0
        if self._factor == 1.0:
            return super().optimizer_step()  # type: ignore[misc]
        groups = self.optimizer.param_groups  # type: ignore[attr-defined]
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self._factor
        try:
            return super().optimizer_step()  # type: ignore[misc]
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def lr_scheduler_step(self) -> Any:
        """verl's own; the learning rate that it returns, for verl's metrics, is times the factor of the update."""
        return super().lr_scheduler_step() * self._factor  # type: ignore[misc]

    def _kept(self, data: Any) -> list[int]:
        """Kept tokens, sequences that have some, and sequences that had some, of the mini-batch on all ranks."""
        from verl.utils.device import get_device_id

        kept, before = (_tokens(data[name]) for name in ("response_mask", "loss_mask"))
        counts = torch.stack([kept.sum(), (kept > 0).sum(), (before > 0).sum()]).to(get_device_id())
        torch.distributed.all_reduce(counts, group=self.get_data_parallel_group())  # type: ignore[attr-defined]
        return [int(count) for count in counts.tolist()]


def _tokens(mask: torch.Tensor) -> torch.Tensor:
    """[B] int64: the tokens of each sequence of a jagged 0/1 mask."""
    so_far = torch.nn.functional.pad(mask.values().long().cumsum(0), (1, 0))
    return so_far[mask.offsets()].diff()


def _nothing(*, model_output: Any, data: Any, **more: Any) -> Any:
    """The loss 0, of any output that carries a gradient."""
    output = model_output["log_probs" if "log_probs" in model_output else "values"]
    return output.values().sum() * 0.0, {}
