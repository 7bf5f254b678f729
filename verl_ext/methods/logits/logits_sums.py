# SPDX-License-Identifier: Apache-2.0
"""What the pass over the logits and its kernels tell each other."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Sums(NamedTuple):
    """Sums over the vocabulary, of each computed row; [N]."""

    largest: torch.Tensor  #: max x
    label: torch.Tensor  #: x at the label
    full: torch.Tensor  #: sum of e, the whole vocabulary, float64 as the others
    kept: torch.Tensor  #: sum of e, the set
    surprise: torch.Tensor | None  #: sum of e ln e, the set
    squares: torch.Tensor | None  #: sum of e^2, the set
    size: torch.Tensor | None  #: number of tokens in the set


class Weights(NamedTuple):
    """What the backward pass needs of each computed row: gradient = e (constant + slope ln e) on the set, and
    `label` at the label; [N]."""

    constant: torch.Tensor
    slope: torch.Tensor | None
    label: torch.Tensor
    active: torch.Tensor  #: bool; False: the gradient of the whole row is zero

    def of(self, rows: torch.Tensor) -> Weights:
        """Those of the rows for which `rows`, [N] bool, is True."""
        return Weights(*(None if part is None else part[rows] for part in self))
